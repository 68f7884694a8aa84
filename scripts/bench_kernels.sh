#!/usr/bin/env bash
# Measures stored kernels beside cuBLAS on this machine's GPU, without a compiler, and writes the figures
# and a plot.
#
#   scripts/bench_kernels.sh --store STORE [--wheels DIR] [--python PYTHON] [--out-dir DIR] [--commit SHA] \
#     [MANIFEST... [OPTION...]]
#
# STORE      a folder, or a tar archive of its contents, filled by `llbf16-aot build MANIFEST --probes`
# --wheels   wheels of llbf16-aot and of what it needs and this machine lacks; installed into a
#            temporary folder. Without it the package must be importable.
# --out-dir  where h200_kernels.json, .svg and .txt go (default: docs/results)
# --commit   what the report says was measured (default: HEAD, where this is a git checkout)
# All else is passed on to `llbf16-aot bench`; default: the manifest anchors, also cold and hot.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
store="" wheels="" commit="" python=python3 out="$root/docs/results" name=bench_kernels
rest=()

usage() {
  sed -n '2,14p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

while [ $# -gt 0 ]; do
  case $1 in
    --store | --wheels | --python | --out-dir | --commit) [ $# -ge 2 ] || usage ;;
  esac
  case $1 in
    --store) store=$2 && shift ;;
    --wheels) wheels=$2 && shift ;;
    --python) python=$2 && shift ;;
    --out-dir) out=$2 && shift ;;
    --commit) commit=$2 && shift ;;
    *) rest+=("$1") ;;
  esac
  shift
done
if [ -z "$store" ]; then usage; fi
if [ ${#rest[@]} -eq 0 ]; then rest=(anchors --cold --hot); fi
if [ -z "$commit" ]; then
  commit=$(git -C "$root" rev-parse HEAD 2>/dev/null) || commit=unknown
fi

# shellcheck source=scripts/gpu_common.sh
. "$root/scripts/gpu_common.sh"

mkdir -p "$out" || exit 1
"$python" -m llbf16_aot bench "${rest[@]}" --commit "$commit" --json-out "$out/h200_kernels.json" \
  --svg "$out/h200_kernels.svg" | tee "$out/h200_kernels.txt"
status=${PIPESTATUS[0]}
echo "bench_kernels: ended with $status; $out/h200_kernels.json, $out/h200_kernels.svg"
exit "$status"
