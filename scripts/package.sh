#!/usr/bin/env bash
# Checks the package as users get it, installed and not editable: every file is in it, it finds its own
# data, its types are right, and those of the tests and programs that use it. Needs the environment that
# test.sh makes.

set -euo pipefail

# shellcheck source=scripts/common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT

# From a copy: a build inside the checkout leaves a folder behind that later builds would mix in.
mkdir "$work/source"
cp -R pyproject.toml README.md LICENSE aot kernels manifests "$work/source/"
find "$work/source" -name __pycache__ -prune -exec rm -rf -- {} +
"$venv/bin/python" -m pip install --quiet --no-deps --target "$work/package" "$work/source"

for pair in aot:. kernels:kernels manifests:manifests; do
    from=$work/source/${pair%%:*}
    to=$work/package/llbf16_aot/${pair#*:}
    while IFS= read -r file; do
        cmp -s -- "$from/$file" "$to/$file" ||
            fail "the package lacks ${pair%%:*}/${file#./}" \
                "add it to [tool.setuptools] in pyproject.toml"
    done < <(cd -- "$from" && find . -type f)
done

# From an empty folder, where nothing but the installed package can be found.
mkdir "$work/empty"
(
    cd -- "$work/empty"
    PYTHONPATH=$work/package "$venv/bin/python" -m llbf16_aot \
        build dsv4 --dry-run --store "$work/store" >/dev/null
)

MYPYPATH=$work/package "$venv/bin/python" -m mypy --config-file pyproject.toml -p llbf16_aot

# The tests and programs, against the same package. torch has functions without types.
export MYPYPATH=$work/package:tests:tests/aot:tests/gpu:tests/kernels:scripts
"$venv/bin/python" -m mypy --config-file pyproject.toml --explicit-package-bases \
    --allow-untyped-calls --exclude '^tests/data/' tests scripts
