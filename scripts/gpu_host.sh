#!/usr/bin/env bash
# Measures what calls and cold starts cost on this machine, and proves that our launch is the DSL's own.
#
#   scripts/gpu_host.sh --store STORE [--many-store STORE] [--jit DIR] [--wheels DIR] [--python PYTHON] \
#     [--out-dir DIR] [--commit SHA]
#
# STORE         a folder, or a tar archive of its contents, with the keys of the manifest dsv4 and of the
#               one that `scripts/bench_host.py manifest` writes
# --many-store  the same with at least 1,000 kernels for this GPU, from `llbf16-aot build --candidates`
# --jit         a folder with nvidia-cutlass-dsl and apache-tvm-ffi unpacked: only the processes that
#               compare with the compiler see it. Without it the figures that need it are null.
# --wheels      wheels of llbf16-aot and of what it needs and this machine lacks (cuda-core too, if its
#               launch is to be timed); installed into a temporary folder
# --out-dir     where h200_host.json, h200_cold_start.json and h200_same_launch.txt go
#               (default: docs/results)
# --commit      what the reports say was measured (default: HEAD, where this is a git checkout)
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
store="" many="" jit="" wheels="" commit="" python=python3 out="$root/docs/results" name=gpu_host

usage() {
  sed -n '2,17p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || usage
  case $1 in
    --store) store=$2 ;;
    --many-store) many=$2 ;;
    --jit) jit=$2 ;;
    --wheels) wheels=$2 ;;
    --commit) commit=$2 ;;
    --out-dir) out=$2 ;;
    --python) python=$2 ;;
    *) usage ;;
  esac
  shift 2
done
if [ -z "$store" ]; then usage; fi
for given in "$many" "$jit"; do
  if [ -n "$given" ] && [ ! -e "$given" ]; then
    echo "$name: $given does not exist" >&2
    exit 2
  fi
done
if [ -z "$commit" ]; then
  commit=$(git -C "$root" rev-parse HEAD 2>/dev/null) || commit=unknown
fi
# The sourced part changes into the checkout.
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
if [ -n "$many" ]; then many=$(realpath "$many"); fi
if [ -n "$jit" ]; then jit=$(realpath "$jit"); fi

# shellcheck source=scripts/gpu_common.sh
. "$root/scripts/gpu_common.sh"

more=()
if [ -n "$many" ]; then
  copy_store "$many" "$work/many"
  more=(--many-store "$work/many")
fi
with_jit=()
if [ -n "$jit" ]; then with_jit=(--jit "$jit"); fi

# As pip does where packages are installed: a start that compiles Python again is nobody's.
for folder in "$work/site" "$jit"; do
  if [ -d "$folder" ]; then "$python" -m compileall -q -j 0 "$folder" >/dev/null; fi
done

LLBF16_AOT_TEST_COMPILER=$jit timeout 200 "$python" -m pytest -q -rA -m gpu \
  tests/gpu/test_gpu_same_launch.py -p no:cacheprovider --confcutdir tests/gpu -W default \
  2>&1 | tee "$out/h200_same_launch.txt"
proof=${PIPESTATUS[0]}

"$python" scripts/bench_host.py run --store "$LLBF16_AOT_STORE" --commit "$commit" \
  --out "$out/h200_host.json" "${with_jit[@]}"
host=$?

"$python" scripts/bench_cold_start.py run --store "$LLBF16_AOT_STORE" --commit "$commit" \
  --out "$out/h200_cold_start.json" "${with_jit[@]}" "${more[@]}"
cold=$?

echo "gpu_host: same launch ended with $proof, host cost with $host, cold start with $cold; see $out"
[ "$proof" = 0 ] && [ "$host" = 0 ] && [ "$cold" = 0 ]
