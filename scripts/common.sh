# shellcheck shell=bash
# What build.sh and test.sh share: the way to the checkout, and a virtual environment that is up to
# date. To be sourced. Afterwards the present directory is the checkout.
#
# PYTHON  the interpreter that makes the environment; default: the first on PATH that is new enough
# VENV    the environment's folder; default: .venv

unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit

VENV=${VENV:-.venv}
case $VENV in
    /*) venv=$VENV ;;
    *) venv=$PWD/$VENV ;;
esac

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $1"
    if [ $# -gt 1 ]; then say "hint: $2"; fi
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

find_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || fail "PYTHON is $PYTHON, which is no Python 3.10 or newer"
        printf '%s\n' "$PYTHON"
        return
    fi
    for name in python3 python python3.13 python3.12 python3.11 python3.10; do
        if new_enough "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    fail "no Python 3.10 or newer on PATH" "set PYTHON to one, for example PYTHON=/opt/bin/python3.12"
}

version_of() { "$1" -c 'import sys; print("{}.{}".format(*sys.version_info))'; }

make_venv() {
    local python site
    python=$(find_python)
    say "making $VENV with $python"
    # Where the system keeps ensurepip in a package of its own, its pip fills an empty environment.
    if "$python" -c 'import ensurepip' >/dev/null 2>&1; then
        "$python" -m venv "$venv"
    else
        "$python" -m venv --without-pip "$venv"
        site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        "$python" -m pip install --quiet --target "$site" pip
    fi
}

usable_venv() { "$venv/bin/python" -c 'import pip' >/dev/null 2>&1 && new_enough "$venv/bin/python"; }

check_venv() {
    local python present wanted
    if [ -e "$venv" ] && ! usable_venv; then
        [ -f "$venv/pyvenv.cfg" ] || fail "$VENV exists and is no virtual environment" \
            "move it away, or set VENV to another folder"
        say "$VENV is broken: making it anew"
        rm -rf -- "$venv"
    fi
    if [ ! -e "$venv" ]; then
        make_venv
    elif [ -n "${PYTHON:-}" ]; then
        python=$(find_python)
        present=$(version_of "$venv/bin/python")
        wanted=$(version_of "$python")
        [ "$present" = "$wanted" ] || fail "$VENV has Python $present, PYTHON is $PYTHON" \
            "remove $VENV, or give the other Python its own: VENV=.venv-$wanted"
    fi
}

# The hash of what decides an installation: the declared dependencies, the extras, the place.
fingerprint() {
    "$venv/bin/python" - "$1" <<'PYTHON'
import hashlib, os, sys
with open("pyproject.toml", "rb") as file:
    data = file.read()
print(hashlib.sha256(repr((data, sys.argv[1], os.getcwd())).encode()).hexdigest())
PYTHON
}

# ensure_installed EXTRAS: the environment holds this checkout, editable, with these extras.
# Installs only where pyproject.toml or the extras changed since the last time.
ensure_installed() {
    local extras=$1 stamp wanted
    # The lock lives on an open file that is there anyway, and ends with the process.
    exec 9<pyproject.toml
    if command -v flock >/dev/null 2>&1; then
        flock 9
    fi
    check_venv
    stamp=$venv/.installed-${extras//,/-}
    wanted=$(fingerprint "$extras")
    if [ ! -f "$stamp" ] || [ "$(cat -- "$stamp")" != "$wanted" ]; then
        say "installing llbf16-aot[$extras] into $VENV"
        # Editable installs from pyproject.toml came with pip 21.3.
        "$venv/bin/python" -m pip install --quiet 'pip>=22'
        "$venv/bin/python" -m pip install --quiet --editable ".[$extras]"
        printf '%s\n' "$wanted" >"$stamp"
    fi
    exec 9<&-
}
