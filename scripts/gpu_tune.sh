#!/usr/bin/env bash
# Measures candidates on this machine's GPU, without a compiler, and writes a tuning table and a report.
#
#   scripts/gpu_tune.sh --store STORE [--wheels DIR] [--python PYTHON] [--out-dir DIR] \
#     MANIFEST... [OPTION...]
#
# STORE      a folder, or a tar archive of its contents, filled by `llbf16-aot build MANIFEST --candidates`
# --wheels   wheels of llbf16-aot and of what it needs and this machine lacks; installed into a
#            temporary folder. Without it the package must be importable.
# --out-dir  where tuning.json, the table sm_90.json and overview.txt go (default: docs/results/tuning).
#            A tuning.json that is there already is gone on with.
# All else is passed on to `llbf16-aot tune`: manifests, --tokens, --backend (with an --out-dir of its own), --name.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
store="" wheels="" python=python3 out="$root/docs/results/tuning" name=gpu_tune
rest=()

usage() {
  sed -n '2,13p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

while [ $# -gt 0 ]; do
  case $1 in
    --store | --wheels | --python | --out-dir) [ $# -ge 2 ] || usage ;;
  esac
  case $1 in
    --store) store=$2 && shift ;;
    --wheels) wheels=$2 && shift ;;
    --python) python=$2 && shift ;;
    --out-dir) out=$2 && shift ;;
    *) rest+=("$1") ;;
  esac
  shift
done
if [ -z "$store" ] || [ ${#rest[@]} -eq 0 ]; then usage; fi

# shellcheck source=scripts/gpu_common.sh
. "$root/scripts/gpu_common.sh"

mkdir -p "$out" || exit 1
"$python" -m llbf16_aot tune "${rest[@]}" --report "$out/tuning.json" --resume \
  --out "$out/sm_90.json" | tee "$out/overview.txt"
status=${PIPESTATUS[0]}
echo "gpu_tune: ended with $status; $out/tuning.json, $out/sm_90.json"
exit "$status"
