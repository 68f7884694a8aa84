"""The one command for the GPU machine: what it runs, with what, and what it refuses."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_host.sh"

FAKE_PYTHON = """#!/bin/sh
echo "$* | compiler=$LLBF16_AOT_TEST_COMPILER path=$PYTHONPATH" >> "$LOG"
case "$*" in *bench_host.py*) exit "${HOST_STATUS:-0}" ;; esac
"""


def run(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        ["/usr/bin/env", "bash", str(SCRIPT), *arguments],
        env={**environment, **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Folders as they come to the GPU machine, and a Python that only notes its arguments."""
    for name in ("store", "many", "jit"):
        (tmp_path / name).mkdir()
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def logged(machine: Path, *more: str, **variables: str) -> tuple[int, list[str]]:
    log = machine / "log"
    done = run(
        *("--store", "store", "--python", str(machine / "python"), "--out-dir", "out"),
        *("--commit", "abc", *more),
        cwd=machine,
        LOG=str(log),
        **variables,
    )
    lines = log.read_text().splitlines() if log.exists() else []
    # The first is the shared look at the package.
    return done.returncode, [line for line in lines[1:] if "compileall" not in line]


def test_it_runs_the_proof_and_both_benchmarks(machine: Path) -> None:
    """A part that is left out is missed only when the machine is gone."""
    status, lines = logged(machine)
    assert status == 0
    proof, host, cold = lines
    assert "-m gpu tests/gpu/test_gpu_same_launch.py" in proof
    out = machine / "out"
    assert "bench_host.py run --store " in host
    assert f"--commit abc --out {out}/h200_host.json |" in host
    assert f"--commit abc --out {out}/h200_cold_start.json |" in cold


def test_the_compiler_reaches_only_those_who_ask_for_it(machine: Path) -> None:
    """On everybody's path, nobody could say that no compiler was needed."""
    status, lines = logged(machine, "--jit", "jit", "--many-store", "many")
    assert status == 0
    jit = str(machine / "jit")
    assert all(f"compiler={jit}" in line for line in lines[:1])
    assert [f"--jit {jit}" in line for line in lines] == [False, True, True]
    assert all(line.endswith("path=") for line in lines)
    assert "--many-store " in lines[2]
    # A copy of its own: the one that travelled is another user's.
    assert f"--many-store {machine}" not in lines[2]


def test_bytecode_is_made_before_anything_is_measured(machine: Path) -> None:
    """Without it every start would compile our sources, which an installed package never does."""
    logged(machine, "--jit", "jit")
    lines = (machine / "log").read_text().splitlines()
    made = [number for number, line in enumerate(lines) if "-m compileall" in line]
    measured = [number for number, line in enumerate(lines) if "bench_" in line]
    assert made
    assert max(made) < min(measured)
    assert str(machine / "jit") in lines[made[-1]]


def test_a_failure_of_one_part_is_the_end_status_and_stops_no_other(machine: Path) -> None:
    """The machine's time is short: what can be measured is measured."""
    status, lines = logged(machine, HOST_STATUS="1")
    assert status == 1
    assert len(lines) == 3


@pytest.mark.parametrize(
    "arguments", [(), ("--store",), ("--store", "store", "--unheard-of", "x"), ("--jit", "jit")]
)
def test_a_wrong_call_is_answered_with_the_usage(machine: Path, arguments: tuple[str, ...]) -> None:
    """A typing error must not cost the machine's time."""
    done = run(*arguments, cwd=machine)
    assert done.returncode == 2
    assert "scripts/gpu_host.sh --store STORE" in done.stderr


def test_what_does_not_exist_is_named(machine: Path) -> None:
    """Found at the end, after everything else was measured, it would cost the whole run."""
    for arguments in (("--jit", "none"), ("--many-store", "none")):
        done = run("--store", "store", *arguments, cwd=machine)
        assert done.returncode == 2
        assert "none does not exist" in done.stderr
