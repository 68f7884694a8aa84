"""Our launch, captured into a CUDA graph, against its launch record and against the DSL's own.

Needs a store in LLBF16_AOT_STORE with every family, as the manifests of `scripts/bench_host.py` and
of `scripts/gpu_check.py` make it. The comparison with the DSL runs in a process of its own, which
finds the compiler in the folder LLBF16_AOT_TEST_COMPILER; `scripts/gpu_host.sh --jit DIR` sets it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from launch_proof import FAMILIES, NO_COMPILER, Pair, capture, cases, operands, our_call
from llbf16_aot.store import Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif("LLBF16_AOT_STORE" not in os.environ, reason="LLBF16_AOT_STORE is not set"),
]


def the_store() -> Store:
    return Store(Path(os.environ["LLBF16_AOT_STORE"]))


def test_a_captured_launch_is_what_its_record_promises() -> None:
    """A driver module that loses an attribute or shifts a parameter still computes most results."""
    store = the_store()
    found = cases(store)
    for case in found:
        x, weight, out = operands(case)
        call = our_call(case, store, x, weight, out)
        captured = capture(lambda _, call=call: call(), case.record)  # type: ignore[misc]
        assert captured == case.promised(x, weight, out), case.key
        print(f"compared: {case.key}")
    assert [(case.key.backend, case.key.pdl) for case in found] == [
        (backend, pdl) for backend in sorted(FAMILIES) for pdl in (False, True)
    ]


def test_a_captured_launch_is_the_same_as_the_dsls_own(tmp_path: Path) -> None:
    """A launch unlike the DSL's makes of a stored kernel something else than of a compiled one."""
    out = tmp_path / "pairs.json"
    environment = dict(os.environ)
    folder = os.environ.get("LLBF16_AOT_TEST_COMPILER")
    if folder:
        paths = [folder, os.path.join(folder, "nvidia_cutlass_dsl", "dsl_packages")]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("launch_proof.py")), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if done.returncode == NO_COMPILER:
        pytest.skip(f"no compiler here, set LLBF16_AOT_TEST_COMPILER: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr[-3000:]
    pairs = msgspec.json.decode(out.read_bytes(), type=list[Pair])
    assert pairs
    for pair in pairs:
        print(f"compared: {pair.case}")
        assert pair.ours == pair.theirs, pair.case
