"""The host benchmark, without a GPU: what it times, what it asks of a store, its report."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_host
import host_rows
import pytest
import torch
from bench_host import Measured
from bench_launch import Launch, Statement
from host_report import FLOOR, JIT, LINEAR, OURS, Timing
from host_rows import Row, WrongAnswerError, check, prepared
from llbf16_aot.backends import SplitkConfig
from llbf16_aot.dispatch import dispatch, load_table
from llbf16_aot.errors import DriverError, NotFoundError
from llbf16_aot.manifest import Manifest
from llbf16_aot.problem import Problem, Target
from llbf16_aot.store import Miss, MissReason, Store
from support import artifact_for, key_for, make_key

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
LIBCUDA = ROOT / "tests" / "aot" / "fake_libcuda.c"


# --- Timing -----------------------------------------------------------------------------------


class Clock:
    """Nanoseconds that pass only where a statement says so."""

    def __init__(self) -> None:
        self.now = 0
        self.log: list[str] = []

    def __call__(self) -> int:
        return self.now

    def spend(self, name: str, ns: int) -> None:
        self.now += ns
        self.log.append(name)

    def drain(self) -> None:
        self.now += 10**9
        self.log.append("drain")


def test_a_rows_cost_is_its_own_and_the_drain_is_not_counted() -> None:
    """Waiting for the GPU inside the timed part would measure kernels, not the host."""
    clock = Clock()
    rows = {
        "cheap": Statement("spend('cheap', 2000)", {"spend": clock.spend}),
        "dear": Statement("spend('dear', 1000)\nspend('dear', 6000)", {"spend": clock.spend}),
    }
    found = bench_host.time_rows(rows, clock.drain, clock=clock, rounds=4, calls=5)
    assert found == {"cheap": (2.0, 2.0, 2.0), "dear": (7.0, 7.0, 7.0)}
    warm = bench_host.WARMUP_CALLS
    assert clock.log.count("cheap") == warm + 4 * 5
    # Every loop begins with an empty queue.
    loops = clock.log[warm * 3 :]
    assert loops.count("drain") == 4 * 2 + 1
    assert loops[0] == loops[6] == "drain"


def test_the_middle_of_the_rounds_counts() -> None:
    """One disturbed round must not move a figure."""
    clock = Clock()
    costs = iter([10**6] * bench_host.WARMUP_CALLS + [1000, 1000, 50_000, 1000, 1000])
    rows = {"row": Statement("spend('row', next(costs))", {"spend": clock.spend, "costs": costs})}
    found = bench_host.time_rows(rows, clock.drain, clock=clock, rounds=5, calls=1)
    assert found["row"][1] == 1.0


# --- Rows -------------------------------------------------------------------------------------


def test_a_row_that_computes_something_else_is_refused() -> None:
    """A fast call that does nothing would be the best of all figures."""
    x, weight = torch.randn(3, 16).bfloat16(), torch.randn(5, 16).bfloat16()
    exact = x.double() @ weight.double().t()
    out = torch.empty(3, 5)

    def judge(text: str, row: Row) -> None:
        names = {"exact": exact, "out": out}
        check("the row", Statement(text, names), row, out, exact)

    judge("exact.float()", Row("", {}, limit=1e-6))
    judge("made = exact.float()\nNone", Row("", {}, limit=1e-6))
    judge("out.copy_(exact)", Row("", {}, made="out", limit=1e-6))
    judge("None", Row("", {}, made="nothing"))
    for text, row in (
        ("exact.float() + 1", Row("", {})),
        ("exact.float()[:2]", Row("", {})),
        ("None", Row("", {})),
        ("exact.float()", Row("", {}, made="out")),
    ):
        with pytest.raises(WrongAnswerError, match="the row"):
            judge(text, row)


def test_a_refused_launch_is_an_error_and_not_a_fast_one() -> None:
    """The code that the driver returns is nobody's exception: unread, every launch could fail."""
    assert Statement("launch()", {"launch": lambda: (0,)}).run() == (0,)
    assert Statement("1 - 1", {}).run() == 0
    for text in ("(700,)", "700", "None\n(1,)"):
        with pytest.raises(DriverError, match="CUDA error"):
            Statement(text, {}).run()


def test_a_prepared_launch_is_that_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor would be that of another grid, or of a kernel that gets another's parameters."""
    monkeypatch.setattr("host_rows.load", lambda *_, **__: 0x3000)
    artifact = artifact_for(key_for(SplitkConfig(split_k=6, stages=4)))
    x = torch.zeros(17, 7176, dtype=torch.bfloat16)[:, :7168]
    weight = torch.zeros(264, 7168, dtype=torch.bfloat16)
    out = torch.zeros(17, 264)
    launch = prepared(artifact, x, weight, out, 0x77)
    assert (launch.grid, launch.block, launch.cluster) == ((6, 17, 2), (256, 1, 1), (6, 1, 1))
    assert (launch.dynamic_shared_bytes, launch.programmatic) == (67584, True)
    pointers = ((x.data_ptr(), 8), (weight.data_ptr(), 8), (out.data_ptr(), 8))
    sizes = ((17, 4), (264, 4), (7168, 4), (7176, 4), (7168, 4))
    assert launch.params == pointers + sizes
    assert (launch.kernel, launch.stream) == (0x3000, 0x77)


class FakeRuntime:
    """The product on CPU memory; counts as our kernels do, or as torch's fallback does."""

    fallbacks = 0

    def __init__(self, store: object, *, on_miss: str, pdl: object = "auto") -> None:
        del store, pdl
        assert on_miss == "error"

    def run(
        self, x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return our_product(x, weight, out=out)

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(fallbacks=self.fallbacks, library=0)


def our_product(
    x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    product = (x.double() @ weight.double().t()).float()
    return product if out is None else out.copy_(product)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> host_rows.Bench:
    """A bench whose GPU is CPU memory, with one way to launch and one that this machine lacks."""
    for name in ("randn", "empty"):
        make = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *size, make=make, device="cpu", **more: make(*size, **more)
        )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(host_rows, "Runtime", FakeRuntime)
    monkeypatch.setattr(host_rows, "load_and_run", our_product)
    monkeypatch.setattr(host_rows, "process_stats", lambda: SimpleNamespace(fallbacks=0, library=0))
    monkeypatch.setattr(host_rows, "load", lambda *_, **__: 0x3000)

    def by_address(launch: Launch) -> Statement:
        """What a launch computes, from the addresses and sizes among its parameters."""
        (x, _), (weight, _), (out, _), (tokens, _), (experts, _), *_ = launch.params

        def compute() -> int:
            def matrix(address: int, rows: int, kind: Any, dtype: torch.dtype) -> torch.Tensor:
                columns = 2048 if kind is ctypes.c_uint16 else experts
                memory = (kind * (rows * columns)).from_address(address)
                return torch.frombuffer(memory, dtype=dtype).view(rows, columns)

            operands = (
                matrix(address, rows, ctypes.c_uint16, torch.bfloat16)
                for address, rows in ((x, tokens), (weight, experts))
            )
            our_product(*operands, out=matrix(out, tokens, ctypes.c_float, torch.float32))
            return 0

        return Statement("compute()", {"compute": compute})

    def lacking(launch: Launch) -> Statement:
        raise ImportError("no such package\nand more")

    monkeypatch.setattr(host_rows, "WAYS", {"cuda.bindings": by_address, "cuda.core": lacking})
    store = Store(tmp_path / "store")
    # Whatever the shipped table chooses: the answers come from `by_address`.
    artifact = artifact_for(make_key(hidden=2048))
    monkeypatch.setattr(Store, "get", lambda _, digest: artifact)
    return host_rows.Bench(store, compiler=False)


def test_a_bench_offers_its_rows_and_tells_what_is_not_there(bench: host_rows.Bench) -> None:
    """A row that silently fell away is missed only when the figures are read."""
    rows = bench.rows(2048, 128, 1)
    wanted = {LINEAR, OURS, f"{OURS}, out=", "torch.empty", "x.new_empty", "Runtime.run"}
    wanted |= {"Runtime.run, out=", "Runtime.run, pdl=True", "Runtime.run, pdl=False"}
    wanted |= {host_rows.OP, f"{host_rows.OP}.default", f"{host_rows.OP}_out"}
    wanted |= {"launch, cuda.bindings", f"{FLOOR}cuda.bindings"}
    assert wanted <= set(rows)
    for name in ("launch, cuda.core", f"{FLOOR}cuda.core"):
        assert bench.unavailable[name] == "ImportError: no such package"
    assert set(rows).isdisjoint(bench.unavailable)
    found = bench_host.time_rows(rows, lambda: None, rounds=1, calls=2)
    assert all(us[0] > 0 for us in found.values())
    bench.check_stored()


def test_calls_that_torch_computed_are_no_figures_of_ours(
    bench: host_rows.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own product is as exact as ours: only the counters tell them apart."""
    monkeypatch.setattr(FakeRuntime, "fallbacks", 3)
    with pytest.raises(WrongAnswerError, match=r"Runtime\.run: torch computed 3 of the calls"):
        bench.check_stored()


def test_a_store_without_the_kernel_is_told_with_what_to_build(
    bench: host_rows.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is all that comes back from the GPU machine."""
    miss = Miss("0" * 64, MissReason.ABSENT, "no such entry")
    monkeypatch.setattr(Store, "get", lambda _, digest: miss)
    with pytest.raises(NotFoundError, match=f"{bench.store.root} lacks .* hidden=7168") as raised:
        bench.rows(7168, 256, 8)
    assert "bench_host.py manifest" in raised.value.hint


LAUNCH_EACH_WAY = """
import sys
from bench_launch import WAYS, Launch
plain = sys.argv[1] == "plain"
launch = Launch(
    kernel=0x3000, symbol="kernel", cubin=b"", grid=(6, 16, 2), block=(256, 1, 1),
    cluster=(1, 1, 1) if plain else (6, 1, 1), dynamic_shared_bytes=67584, programmatic=not plain,
    params=((0x1122334455667788, 8), (-5, 4), (0x99, 8)), stream=0 if plain else 0x4D,
)
from cuda.bindings import driver
driver.cuInit(0)
for way in ("cuda.bindings", "ctypes", "ctypes, lock held"):
    WAYS[way](launch).run()
"""


@pytest.mark.parametrize(
    ("kind", "rest"),
    [
        ("full", "stream 0x4d cluster 6 1 1 attribute 6 = 1"),
        ("plain", "stream 0"),
    ],
)
def test_every_way_launches_the_same(kind: str, rest: str, tmp_path: Path) -> None:
    """A way that drops an attribute or a parameter is cheaper, and computes something else."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the printing libcuda")
    library = tmp_path / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([*command, str(LIBCUDA)], check=True)
    paths = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH_EACH_WAY, kind],
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("cuLaunchKernelEx")]
    wanted = (
        f"cuLaunchKernelEx 0x3000 grid 6 16 2 block 256 1 1 shared 67584 {rest} "
        "params 0x1122334455667788 -5 0x99 extra 0"
    )
    assert lines == [wanted] * 3


# --- Manifest and report ----------------------------------------------------------------------


def test_the_manifest_builds_what_the_runs_and_the_launch_proof_ask_for(tmp_path: Path) -> None:
    """A kernel that was not built ends the measurement on the machine where none can be built."""
    path = tmp_path / "host.yaml"
    assert bench_host.main(["manifest", "--out", str(path)]) == 0
    manifest = Manifest.load(path)
    target = Target.parse("sm_90a")
    assert list(manifest.targets) == [target]
    built = {
        dispatch(problem, target, load_table(router.tuning, target))
        for router in manifest.routers
        for problem in router.problems()
    }
    default = load_table("default", target)
    asked = {
        dispatch(Problem(tokens, experts, hidden, pdl=pdl), target, default)
        for hidden, experts in bench_host.SHAPES
        for tokens in bench_host.TOKENS
        for pdl in (True, False)
    }
    assert asked <= built
    proof = {(key.backend, key.pdl) for key in built}
    assert proof == {(b, p) for b in ("dotprod", "splitk", "oneshot") for p in (True, False)}


def measured(run: str, rows: dict[str, float], unavailable: dict[str, str]) -> Measured:
    return Measured(
        {"device": "Paper GPU", "driver": "1", "versions": {"torch": run}, "cpu": "paper"},
        [Timing(run, "ordinary", 7168, 256, 1, row, us, us, us) for row, us in rows.items()],
        dict.fromkeys(rows, "text"),
        unavailable,
        run == "compiler",
    )


ROWS = {LINEAR: 20.0, OURS: 9.0, f"{FLOOR}ctypes": 7.0}


def report(*runs: Measured) -> dict[str, Any]:
    names = ("plain", "compiler")
    return bench_host.report_of(
        dict(zip(names, runs, strict=False)), commit="abc", date="2026-01-01"
    )


def test_without_a_compiler_its_figures_are_null_with_a_reason() -> None:
    """A null that nobody explains reads like a failed measurement."""
    found = report(measured("plain", ROWS, {}))
    assert (found["ratio_to_linear"], found["us_above_floor"]) == (0.45, 2.0)
    assert found["met"] == {
        "ratio_to_linear": True,
        "ratio_to_jit_call": None,
        "us_above_floor": True,
    }
    assert found["ratio_to_jit_call"] is None
    assert "--jit" in found["reasons"]["ratio_to_jit_call"]
    assert (found["commit"], found["date"], found["device"]) == ("abc", "2026-01-01", "Paper GPU")


def test_with_a_compiler_the_ratio_is_of_its_run() -> None:
    """Against a call timed in another process the ratio would not be one run's."""
    compiler = measured("compiler", {**ROWS, OURS: 10.0, JIT: 16.0}, {})
    found = report(measured("plain", ROWS, {}), compiler)
    assert found["ratio_to_jit_call"] == 0.625
    assert found["met"]["ratio_to_jit_call"] is False
    assert found["reasons"] == {}
    assert found["compiler_imported"] == {"plain": False, "compiler": True}
    assert found["versions_with_compiler"] == {"torch": "compiler"}


def test_a_compiler_whose_call_fails_is_told_by_its_error() -> None:
    """A figure that is missing because of an exception must show the exception."""
    compiler = measured("compiler", ROWS, {JIT: "TypeError: no stream"})
    found = report(measured("plain", ROWS, {}), compiler)
    assert found["reasons"] == {"ratio_to_jit_call": "TypeError: no stream"}


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """A traceback from torch's insides tells nobody what to do."""
    out = tmp_path / "host.json"
    program = (sys.executable, str(SCRIPTS / "bench_host.py"), "run")
    done = subprocess.run(
        [*program, "--store", str(tmp_path), "--out", str(out)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "bench_host: torch sees no GPU: run this on a GPU machine",
        "bench_host: the run plain failed",
    ]
    assert not out.exists()
