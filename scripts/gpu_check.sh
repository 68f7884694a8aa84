#!/usr/bin/env bash
# Checks stored kernels on this machine's GPU, without a compiler, and writes one JSON report.
#
#   scripts/gpu_check.sh --store DIR [--wheels DIR] [--commit SHA] [--out FILE] [--python PYTHON]
#
# --store   a store with every key that `scripts/gpu_check.py manifests` asks for
# --wheels  wheels of llbf16-aot and of what it needs and this machine lacks; installed into a
#           temporary folder. Without it the package must be importable.
# --commit  what the report says was checked (default: HEAD, where this is a git checkout)
# --out     default: docs/results/h200_gpu_check.json
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
store="" wheels="" commit="" out="$root/docs/results/h200_gpu_check.json" python=python3
name=gpu_check

usage() {
  sed -n '2,10p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || usage
  case $1 in
    --store) store=$2 ;;
    --wheels) wheels=$2 ;;
    --commit) commit=$2 ;;
    --out) out=$2 ;;
    --python) python=$2 ;;
    *) usage ;;
  esac
  shift 2
done
if [ -z "$store" ]; then usage; fi
if [ -z "$commit" ]; then
  commit=$(git -C "$root" rev-parse HEAD 2>/dev/null) || commit=unknown
fi

# shellcheck source=scripts/gpu_common.sh
. "$root/scripts/gpu_common.sh"

# Warnings of this machine's own packages are not ours to fail on.
timeout 240 "$python" -m pytest -q -m gpu tests/gpu -p no:cacheprovider --confcutdir tests/gpu \
  -W default --junitxml "$work/junit.xml"
tests=$?

"$python" scripts/gpu_check.py run --store "$LLBF16_AOT_STORE" --commit "$commit" --out "$out" \
  --junit "$work/junit.xml"
check=$?

echo "gpu_check: pytest ended with $tests, the check with $check; report: $out"
[ "$tests" = 0 ] && [ "$check" = 0 ]
