# shellcheck shell=bash disable=SC2154
# What the scripts for the GPU machine share: a store of our own, and the package from wheels. To be
# sourced by a script that has set: root (the checkout), store (a folder, or an archive that tar can read
# with the folder's contents), wheels (a folder, may be empty), python, and name (for messages).
# Afterwards LLBF16_AOT_STORE is the copy, work is a temporary folder that goes with the script, and the
# present directory is the checkout.

if [ ! -e "$store" ]; then
  echo "$name: the store $store does not exist" >&2
  exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# copy_store STORE FOLDER: a copy of a folder, or of an archive's contents, in a new folder. A store that
# travelled belongs to another user and may be writable by others: trust wants our own copy, with its
# own modes. Files are copied as they are, digests and all.
copy_store() {
  mkdir "$2" || exit 1
  if [ -d "$1" ]; then
    cp -r "$1/." "$2/" || exit 1
  else
    tar -xf "$1" -C "$2" --no-same-owner || exit 1
  fi
  chmod -R u+rwX,go-w "$2"
  if [ "$(id -u)" = 0 ]; then chown -R 0:0 "$2"; fi
}

copy_store "$store" "$work/store"

if [ -n "$wheels" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
    --disable-pip-version-check --root-user-action=ignore \
    --target "$work/site" "$wheels"/*.whl || exit 1
  export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export LLBF16_AOT_STORE="$work/store"
unset LLBF16_AOT_TUNING

# What is installed on the machine may be another version: the module must be the one of the wheels.
cd "$root" || exit 1
"$python" - <<'PYTHON' || exit 1
import llbf16_aot, llbf16_aot.store, os, torch
from pathlib import Path
store = llbf16_aot.store.Store(Path(os.environ["LLBF16_AOT_STORE"]))
print(f"llbf16_aot from {llbf16_aot.__file__}; torch {torch.__version__}; "
      f"CUDA {torch.cuda.is_available()}; {len(store.digests())} entries in the store", flush=True)
PYTHON
