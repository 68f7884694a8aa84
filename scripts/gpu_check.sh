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
if [ ! -d "$store" ]; then
  echo "gpu_check: the store $store is not a folder" >&2
  exit 2
fi
store=$(cd "$store" && pwd)
if [ -z "$commit" ]; then
  commit=$(git -C "$root" rev-parse HEAD 2>/dev/null) || commit=unknown
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A store that travelled belongs to another user and may be writable by others: trust wants our own
# copy, with its own modes. Files are copied as they are, digests and all.
cp -r "$store" "$work/store" || exit 1
chmod -R u+rwX,go-w "$work/store"
if [ "$(id -u)" = 0 ]; then chown -R 0:0 "$work/store"; fi

if [ -n "$wheels" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
    --disable-pip-version-check --root-user-action=ignore \
    --target "$work/site" "$wheels"/*.whl || exit 1
  export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export LLBF16_AOT_STORE="$work/store"
unset LLBF16_AOT_TUNING

cd "$root" || exit 1
"$python" - <<'PYTHON' || exit 1
import llbf16_aot, llbf16_aot.store, os, torch
from pathlib import Path
store = llbf16_aot.store.Store(Path(os.environ["LLBF16_AOT_STORE"]))
print(f"llbf16_aot from {llbf16_aot.__file__}; torch {torch.__version__}; "
      f"CUDA {torch.cuda.is_available()}; {len(store.digests())} entries in the store", flush=True)
PYTHON

# Warnings of this machine's own packages are not ours to fail on.
timeout 240 "$python" -m pytest -q -m gpu tests/gpu -p no:cacheprovider --confcutdir tests/gpu \
  -W default --junitxml "$work/junit.xml"
tests=$?

"$python" scripts/gpu_check.py run --store "$LLBF16_AOT_STORE" --commit "$commit" --out "$out" \
  --junit "$work/junit.xml"
check=$?

echo "gpu_check: pytest ended with $tests, the check with $check; report: $out"
[ "$tests" = 0 ] && [ "$check" = 0 ]
