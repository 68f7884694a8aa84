#!/usr/bin/env bash
# Builds manifests into a store, on a machine with nothing but Python 3.10 or newer and pip.
#
#   scripts/build.sh                          builds manifests/dsv4.yaml
#   scripts/build.sh MANIFEST... [OPTION...]  as `llbf16-aot build`: --target, --store, --jobs, ...
#
# Makes .venv, installs this checkout with the compiler, builds into the user's store and prints what
# serves every router, number of tokens and target. Run again, it compiles only what is missing.
# PYTHON chooses the interpreter, VENV the environment's folder.

set -euo pipefail

started_in=$PWD
# shellcheck source=scripts/common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
checkout=$PWD

ensure_installed build

if [ $# -eq 0 ]; then
    set -- "$checkout/manifests/dsv4.yaml"
fi
# Relative paths mean what they mean to the caller.
cd -- "$started_in"
exec "$venv/bin/python" -m llbf16_aot build "$@"
