#!/usr/bin/env bash
# Checks style, spelling, packaging and types and runs the tests that need no GPU, on a machine with
# nothing but Python 3.10 or newer and pip.
#
#   scripts/test.sh            everything, as CI does
#   scripts/test.sh ARGUMENTS  only pytest, in the checkout, with these arguments: scripts/test.sh -k store
#
# Makes .venv and installs this checkout with compiler, runtime and test tools. Writes nothing outside
# the checkout and the folder for temporary files, but for pip's cache. PYTHON chooses the interpreter,
# VENV the environment's folder.

set -euo pipefail

# shellcheck source=scripts/common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

# One command: the exact torch of the extra `test` must win over the open range of `runtime`.
ensure_installed build,runtime,test
python=$venv/bin/python

if [ $# -eq 0 ]; then
    say "ruff"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    say "codespell"
    "$python" -m codespell_lib aot kernels manifests tests scripts docs ./*.md
    say "package and types"
    scripts/package.sh
    say "pytest"
fi
if [ $# -eq 0 ]; then
    # The reliability bar at CI size, held by tests/faults: its rows are shown at the end.
    export LLBF16_AOT_FAULTS_OUT=$PWD/build/faults.json
fi
# Later arguments win: `-m gpu` or `-n 0` may follow.
exec "$python" -m pytest -m "not gpu" -n 2 --dist worksteal "$@"
