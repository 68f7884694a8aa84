"""The cold-start benchmark, without a GPU: its arithmetic, its keys, and what a child does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_cold_start
import cold_child
import llbf16_aot
import pytest
import torch
from bench_cold_start import Child, FailedChildError
from llbf16_aot.dispatch import dispatch, load_table
from llbf16_aot.manifest import Manifest
from llbf16_aot.problem import Target
from llbf16_aot.store import Store
from support import make_artifact

MS = 1_000_000
BASE = {"python": 20, "import torch": 1000, "context": 300, "operands": 10}


def child(
    more: Mapping[str, float] | None = None, *, resident_mib: float = 600.0, slow_ms: int = 0
) -> Child:
    """A child with these stages after the base ones; `slow_ms` makes its start slower."""
    at = 5 * MS
    stages = []
    for name, ms in {**BASE, "memory read": 7, **(more or {})}.items():
        at += int(ms * MS) + (slow_ms * MS if name == "import torch" else 0)
        stages.append((name, at))
    before = {"resident_kib": 600 * 1024, "private_dirty_kib": 100 * 1024}
    after = {"resident_kib": int(resident_mib * 1024), "private_dirty_kib": 105 * 1024}
    return Child(5 * MS, stages, before, after, {"loads": 1})


def test_stages_begin_with_the_start_of_the_process() -> None:
    """Counted from the child's first line, the interpreter's own start would be left out."""
    one = child({"import llbf16_aot": 15, "preload": 20, "answer": 1})
    assert one.stages_ms() == {
        **BASE,
        "memory read": 7,
        "import llbf16_aot": 15,
        "preload": 20,
        "answer": 1,
    }
    assert one.total_ms == 1330 + 36
    assert one.added_ms == 36


def test_figures_are_medians_of_what_a_process_adds() -> None:
    """A slow child must not move them, and what the measurement itself costs must not count."""
    ours = {"import llbf16_aot": 15.0, "preload": 20.0, "answer": 1.0}
    found = bench_cold_start.summary(
        {
            "torch": [child(), child(), child(slow_ms=500)],
            "ours": [
                child(ours, resident_mib=612.0),
                child(ours, resident_mib=613.0),
                child(ours, resident_mib=640.0, slow_ms=900),
            ],
        }
    )
    assert found["ms_above_torch"] == 36
    assert found["ms_between_kinds"] == 36
    assert found["mib_above_torch"] == 13
    assert found["mib_between_kinds"] == 13
    assert found["jit_ms_above_torch"] is None
    assert found["jit_mib_above_torch"] is None


def test_the_compiler_is_measured_in_the_same_way() -> None:
    """Its reading of our keys is the benchmark's doing, not the compiler's."""
    jit = {"keys read": 50.0, "import compiler": 2600.0, "compile": 18000.0, "answer": 3.0}
    found = bench_cold_start.summary(
        {
            "torch": [child()],
            "ours": [child({"answer": 1.0})],
            "jit": [child(jit, resident_mib=900)],
        }
    )
    assert found["jit_ms_above_torch"] == 2600 + 18000 + 3
    assert found["jit_mib_above_torch"] == 300


@pytest.mark.parametrize(
    ("cost", "ratio", "further"), [(0.1, 0.175, 0.1), (0.3, 0.38125, 0.3)], ids=["cheap", "dear"]
)
def test_preload_tells_the_cost_of_a_key_from_what_is_fixed(
    cost: float, ratio: float, further: float
) -> None:
    """A fixed cost over few keys looks like dear keys."""
    found = bench_cold_start.preload_summary(
        {n: [child({"preload": 5 + cost * n})] * 3 for n in (10, 100, 1000)}
    )
    assert found["fit"].ms_per_key == pytest.approx(cost)
    assert found["fit"].fixed_ms == pytest.approx(5)
    assert found["ms_per_further_key"]["100 to 1000"] == pytest.approx(further)
    assert found["ratio_per_key"] == pytest.approx(ratio)


def test_preload_that_grows_faster_than_its_keys_shows() -> None:
    """A lookup that walks all entries costs more a key the more there are."""
    found = bench_cold_start.preload_summary(
        {n: [child({"preload": 0.001 * n * n})] for n in (10, 100, 1000)}
    )
    assert found["ratio_per_key"] == pytest.approx(100)
    assert found["ms_per_further_key"]["100 to 1000"] > found["ms_per_further_key"]["10 to 100"] * 5


# --- Keys -------------------------------------------------------------------------------------


def test_the_keys_are_those_of_the_manifest_and_begin_with_the_first_answer() -> None:
    """The compiler would compile more or less than we load, or another kernel than is called."""
    target = Target.parse("sm_90a")
    keys = bench_cold_start.manifest_keys("dsv4", target)
    manifest = Manifest.load("dsv4")
    table = load_table("default", target)
    wanted = {
        dispatch(problem, target, table)
        for router in manifest.routers
        for problem in router.problems()
    }
    assert set(keys) == wanted
    assert len(keys) == len(wanted)
    first = next(p for p in manifest.routers[0].problems() if p.tokens == 1 and p.pdl)
    assert keys[0] == dispatch(first, target, table)


def test_stored_keys_are_kernels_of_this_gpu(tmp_path: Path) -> None:
    """A kernel for another GPU is a miss, and a preload of misses costs next to nothing."""
    store = Store(tmp_path / "store")
    artifacts = [make_artifact(tokens=tokens) for tokens in (1, 2, 3)]
    for artifact in (*artifacts, make_artifact(target="sm_100a")):
        store.publish(artifact)
    target = Target.parse("sm_90a")
    found = bench_cold_start.stored_keys(store, target, 3)
    assert {key.digest() for key in found} == {artifact.digest for artifact in artifacts}
    assert len(bench_cold_start.stored_keys(store, target, 2)) == 2
    with pytest.raises(ValueError, match="has 3 kernels for sm_90a, needed are 4"):
        bench_cold_start.stored_keys(store, target, 4)


# --- Children ---------------------------------------------------------------------------------


class FakeRuntime:
    """Computes on the CPU what a GPU would; `wrong` adds to every element."""

    wrong = 0.0
    missing: tuple[object, ...] = ()
    done: list[object] = []  # noqa: RUF012 - shared on purpose: the child makes its own instance

    def __init__(self, *, on_miss: str) -> None:
        assert on_miss == "error"

    def preload(self, what: object) -> SimpleNamespace:
        self.done.append(what)
        return SimpleNamespace(missing=self.missing)

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.double() @ weight.double().t() + self.wrong).float()

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(loads=30)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose CUDA device is CPU memory."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cold_child, "_STAGES", [("python", 1)])
    monkeypatch.setitem(vars(llbf16_aot), "Runtime", FakeRuntime)
    monkeypatch.setattr(FakeRuntime, "done", [])


@pytest.mark.usefixtures("gpu")
def test_a_child_preloads_then_answers_and_tells_its_stages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A stage noted at the wrong place moves a cost from us to torch, or out of sight."""
    assert cold_child.main("ours", "dsv4", 0, 64, 8) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    ours = ["import llbf16_aot", "runtime", "preload", "answer"]
    assert [name for name, _ in told["stages"]] == [*BASE, "memory read", *ours]
    times = [at for _, at in told["stages"]]
    assert times == sorted(times)
    assert FakeRuntime.done == ["dsv4"]
    assert told["facts"]["loads"] == 30
    assert told["facts"]["relative_error"] < 2e-6
    assert told["before"]["resident_kib"] > 1024
    assert told["after"]["private_dirty_kib"] > 0


@pytest.mark.usefixtures("gpu")
def test_plain_torch_stops_before_us(capsys: pytest.CaptureFixture[str]) -> None:
    """A base that did some of our work would hide it."""
    assert cold_child.main("torch", "dsv4", 0, 64, 8) == 0
    told = json.loads(capsys.readouterr().out)
    assert [name for name, _ in told["stages"]] == [*BASE, "memory read"]
    assert FakeRuntime.done == []


@pytest.mark.usefixtures("gpu")
def test_a_wrong_first_answer_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time to a wrong answer is no figure."""
    monkeypatch.setattr(FakeRuntime, "wrong", 0.01)
    assert cold_child.main("ours", "dsv4", 0, 64, 8) == 1
    assert "relative error" in capsys.readouterr().err


@pytest.mark.usefixtures("gpu")
def test_a_missing_kernel_ends_the_child_in_the_runtimes_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A preload of nothing is fast."""
    missing = (SimpleNamespace(message="no kernel for M=1"), SimpleNamespace(message="another"))
    monkeypatch.setattr(FakeRuntime, "missing", missing)
    with pytest.raises(SystemExit, match="2 kernels missing: no kernel for M=1"):
        cold_child.main("ours", "dsv4", 0, 64, 8)


def test_a_child_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    """On a machine without a GPU, and wherever a child ends early."""
    with pytest.raises(
        FailedChildError, match="torch ended with 1:\ncold_child: torch sees no GPU"
    ):
        bench_cold_start.start("torch", "dsv4", store=tmp_path, shape=(64, 8))


def test_without_a_driver_it_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback tells nobody what to do."""
    out = tmp_path / "cold.json"
    assert bench_cold_start.main(["run", "--store", str(tmp_path), "--out", str(out)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("bench_cold_start: ")
    assert lines[1].startswith("hint: install the NVIDIA driver")
    assert not out.exists()
