#!/usr/bin/env bash
# Runs the reliability bar: every harness of tests/faults, and the tests elsewhere that hold a row.
#
#   scripts/faults.sh         at CI size; shows the rows, and writes them to build/faults.json
#   scripts/faults.sh --full  at full size; writes docs/results/faults.json and docs/results/faults.md
#
# Further arguments go to pytest. As root, with strace, mkfs.ext4, losetup and mount, in a checkout that other
# users can read, all rows run; a row that lacks what it needs is listed as skipped, with the reason.
# PYTHON and VENV: see test.sh.

set -euo pipefail

# shellcheck source=scripts/common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

full=
if [ "${1:-}" = --full ]; then
    full=1
    shift
fi

ensure_installed build,runtime,test
python=$venv/bin/python

rows=$PWD/build/faults.json
export LLBF16_AOT_FAULTS_OUT=$rows
if [ -n "$full" ]; then
    export LLBF16_AOT_FAULTS_FULL=1
fi
mkdir -p build

mapfile -t elsewhere < <("$python" scripts/faults_report.py --tests)
status=0
"$python" -m pytest -m "not gpu" -n 2 --dist worksteal tests/faults "${elsewhere[@]}" "$@" || status=$?
if [ -n "$full" ]; then
    "$python" scripts/faults_report.py "$rows" docs/results/faults
fi
exit "$status"
