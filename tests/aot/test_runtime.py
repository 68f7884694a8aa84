"""The runtime on a GPU of CPU memory: right answers, clean misses, nothing done twice."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import llbf16_aot
import msgspec
import pytest
import support
import torch
from fake_gpu import FakeDevices, FakeDriver, MemoryStore, artifact_for, poison
from hypothesis import given
from hypothesis import strategies as st
from llbf16_aot import runtime as runtime_module
from llbf16_aot.artifact import Artifact
from llbf16_aot.dispatch import dispatch, load_table
from llbf16_aot.errors import (
    AotError,
    ColdCaptureError,
    DriverError,
    MissError,
    TuningTableError,
    UntrustedStoreError,
)
from llbf16_aot.fallback import TorchProduct
from llbf16_aot.launch import LaunchRecord
from llbf16_aot.launcher import Launcher
from llbf16_aot.loader import Loader
from llbf16_aot.problem import DType, Problem, Target
from llbf16_aot.runtime import OnMiss, Runtime, Stats
from llbf16_aot.store import Miss, MissReason, Store
from runtime_kit import DTYPES, TOLERANCE, Bench, artifact, counted, error_of, operands


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="llbf16_aot")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "llbf16_aot"]


# ---- hits


@pytest.mark.parametrize("out_dtype", list(DTYPES))
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden"),
    [(1, 7, 64), (4, 32, 2880), (5, 264, 2304), (16, 8, 512), (17, 33, 2048), (64, 160, 2304)],
)
def test_a_stored_kernel_gives_the_product_in_each_output_type(
    tokens: int, experts: int, hidden: int, out_dtype: torch.dtype
) -> None:
    """A parameter in the wrong place, a grid too small or a wrong output type shows here."""
    bench = Bench(artifact(tokens, experts, hidden, out_dtype=out_dtype), on_miss="error")
    x, weight = operands(tokens, experts, hidden)
    out = poison(torch.empty((tokens, experts), dtype=out_dtype))
    result = bench.runtime.run(x, weight, out=out, out_dtype=out_dtype)
    assert result is out
    assert error_of(out, x, weight) <= TOLERANCE[out_dtype]
    fresh = bench.runtime.run(x, weight, out_dtype=out_dtype)
    assert (fresh.dtype, fresh.shape) == (out_dtype, (tokens, experts))
    assert torch.equal(fresh, out)
    assert bench.runtime.stats() == counted(hits=2, loads=1, misses={}, fallbacks=0)


@given(
    tokens=st.integers(1, 20),
    experts=st.integers(1, 40),
    vectors=st.integers(1, 40),
    x_pad=st.integers(0, 3),
    weight_pad=st.integers(0, 3),
    x_offset=st.integers(0, 2),
)
def test_strided_views_of_any_size_give_the_product(
    tokens: int, experts: int, vectors: int, x_pad: int, weight_pad: int, x_offset: int
) -> None:
    """A stride passed in bytes, or K passed as the stride, reads the neighbours of each row."""
    hidden = 8 * vectors
    x_room = poison(torch.empty((tokens + x_offset, hidden + 8 * x_pad), dtype=torch.bfloat16))
    weight_room = poison(torch.empty((experts, hidden + 8 * weight_pad), dtype=torch.bfloat16))
    x, weight = x_room[x_offset:, :hidden], weight_room[:, weight_pad * 8 :]
    for view, values in zip((x, weight), operands(tokens, experts, hidden), strict=True):
        view.copy_(values)
    bench = Bench(artifact(tokens, experts, hidden), on_miss="error")
    assert error_of(bench.runtime.run(x, weight), x, weight) <= 2e-6


def test_output_types_and_dependence_never_share_a_kernel() -> None:
    """One entry for all output types would write halves of floats; one for pdl would not wait."""
    variants = [(dtype, pdl) for dtype in DTYPES for pdl in (True, False)]
    bench = Bench(*(artifact(6, 8, 64, out_dtype=d, pdl=p) for d, p in variants), on_miss="error")
    x, weight = operands(6, 8, 64)
    for _ in range(2):
        for out_dtype, pdl in variants:
            result = bench.runtime.run(x, weight, out_dtype=out_dtype, pdl=pdl)
            assert error_of(result, x, weight) <= TOLERANCE[out_dtype]
            launched, config, _ = bench.driver.launches[-1]
            assert launched.record.key.out_dtype is DTYPES[out_dtype]
            assert (launched.record.key.pdl, config.programmatic) == (pdl, pdl)
    assert (bench.driver.loads, len({a.digest for a, _, _ in bench.driver.launches})) == (6, 6)


def test_the_runtime_decides_on_dependence_where_a_call_does_not() -> None:
    """A deployment that updates weights in the stream switches it off once, for all calls."""
    for default in (True, False):
        bench = Bench(artifact(1, 8, 64), artifact(1, 8, 64, pdl=False), pdl=default)
        bench.runtime.run(*operands(1, 8, 64))
        bench.runtime.run(*operands(1, 8, 64), pdl=not default)
        programmatic = [config.programmatic for _, config, _ in bench.driver.launches]
        assert programmatic == [default, not default]


def test_one_artifact_serves_many_shapes_from_one_load() -> None:
    """A splitk kernel takes every shape: loading it anew for each would grow the process."""
    bench = Bench(artifact(5, 8, 2048), on_miss="error")
    for tokens, experts, hidden in ((5, 8, 2048), (9, 12, 2048), (33, 8, 2304)):
        x, weight = operands(tokens, experts, hidden)
        assert error_of(bench.runtime.run(x, weight), x, weight) <= 2e-6
    assert bench.runtime.stats() == counted(hits=3, loads=1, misses={}, fallbacks=0)
    assert len(bench.store.asked) == 1
    assert bench.driver.ready == [(0, 4 * 32 * 528)]


@pytest.mark.parametrize(
    ("x_shape", "weight_shape"),
    [((0, 64), (8, 64)), ((3, 64), (0, 64)), ((0, 64), (0, 64)), ((3, 0), (8, 0))],
)
def test_an_empty_extent_gives_its_result_without_a_launch(
    x_shape: tuple[int, int], weight_shape: tuple[int, int]
) -> None:
    """CUDA refuses an empty grid, and a sum of nothing is zero, not whatever memory held."""
    bench = Bench(on_miss="error")
    x = torch.zeros(x_shape, dtype=torch.bfloat16)
    weight = torch.zeros(weight_shape, dtype=torch.bfloat16)
    out = poison(torch.empty((x_shape[0], weight_shape[0]), dtype=torch.float16))
    assert bench.runtime.run(x, weight, out=out, out_dtype=torch.float16) is out
    assert torch.equal(out, torch.zeros_like(out))
    fresh = bench.runtime.run(x, weight, out_dtype=torch.bfloat16)
    assert (fresh.dtype, fresh.shape) == (torch.bfloat16, out.shape)
    assert torch.equal(fresh, torch.zeros_like(fresh))
    assert bench.runtime.stats() == counted(hits=0, loads=0, misses={}, fallbacks=0)


# ---- malformed calls


def test_malformed_calls_raise_before_anything_is_looked_up() -> None:
    """Every check of the tensors module must be wired into the call, for inputs and output."""
    bench = Bench(artifact(3, 8, 64))
    run = bench.runtime.run
    x, weight = operands(3, 8, 64)
    with pytest.raises(
        TypeError, match=r"out_dtype is torch.float64, must be one of torch.float32"
    ):
        run(x, weight, out_dtype=torch.float64)
    with pytest.raises(TypeError, match="pdl is 'on', must be True, False or \"auto\""):
        run(x, weight, pdl="on")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"weight has dtype torch.float16"):
        run(x, weight.half())
    with pytest.raises(ValueError, match="K = 60, must be a multiple of 8"):
        run(x[:, :60], weight[:, :60])
    with pytest.raises(TypeError, match=r"out has dtype torch.float32, out_dtype is torch.bf"):
        run(x, weight, out=torch.empty(3, 8), out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="out overlaps x in memory"):
        run(
            x,
            weight,
            out=x[:, :8].contiguous().set_(x.untyped_storage(), 0, (3, 8), (8, 1)),
            out_dtype=torch.bfloat16,
        )
    with pytest.raises(ValueError, match=r"out has shape \(8, 3\)"):
        run(x[:0], weight, out=torch.empty(8, 3))
    with pytest.raises(TypeError, match="weight requires grad"):
        run(x, torch.nn.Parameter(weight))
    assert bench.store.asked == []
    assert bench.runtime.stats() == counted(hits=0, loads=0, misses={}, fallbacks=0, rejects=8)


def test_cpu_tensors_are_refused_by_the_real_devices() -> None:
    """Without a GPU the default runtime must say so, not fall back and look like it worked."""
    runtime = Runtime(MemoryStore())
    with pytest.raises(ValueError, match="x is on cpu, must be on a cuda device"):
        runtime.run(*operands(1, 8, 64))


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    """A typing error taken as the default would hide misses that were meant to be errors."""
    with pytest.raises(
        ValueError, match=r"on_miss is 'raise', must be one of \('torch', 'error', 'compile'\)"
    ):
        Runtime(MemoryStore(), on_miss="raise")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pdl is 1, must be True, False"):
        Runtime(MemoryStore(), pdl=1)  # type: ignore[arg-type]


# ---- misses


@pytest.mark.parametrize("out_dtype", list(DTYPES))
def test_a_miss_is_computed_by_torch_counted_and_logged_once(
    out_dtype: torch.dtype, warnings_of: Callable[[], list[str]]
) -> None:
    """A silent miss is a slow server that nobody understands; one line a call floods the log."""
    bench = Bench()
    x, weight = operands(3, 8, 2304)
    for _ in range(3):
        out = poison(torch.empty((3, 8), dtype=out_dtype))
        assert bench.runtime.run(x, weight, out=out, out_dtype=out_dtype) is out
        assert error_of(out, x, weight) <= TOLERANCE[out_dtype]
        fresh = bench.runtime.run(x, weight, out_dtype=out_dtype)
        assert (fresh.dtype, fresh.shape) == (out_dtype, (3, 8))
        assert torch.equal(fresh, out)
    assert bench.runtime.stats() == counted(hits=0, loads=0, misses={"absent": 1}, fallbacks=6)
    assert len(bench.store.asked) == 1
    (line,) = warnings_of()
    digest = bench.store.asked[0]
    assert f"no kernel for M=3 N=8 K=2304 bf16 x bf16 -> {DTYPES[out_dtype].value}" in line
    assert f"{digest[:12]}): absent: no such entry. torch computes it from now on." in line
    assert line.endswith(
        "To mend it: list hidden 2304, experts 8, tokens 3 in a manifest and run: "
        "llbf16-aot build MANIFEST --target sm_90a --store /the/store"
    )


def test_one_missing_artifact_is_reported_once_for_all_its_shapes(
    warnings_of: Callable[[], list[str]],
) -> None:
    """A missing splitk kernel misses for every M: sixty-four warnings say no more than one."""
    bench = Bench()
    for tokens in (5, 9, 33):
        x, weight = operands(tokens, 8, 2304)
        assert error_of(bench.runtime.run(x, weight), x, weight) <= 2e-6
    assert bench.runtime.stats() == counted(hits=0, loads=0, misses={"absent": 1}, fallbacks=3)
    assert len(warnings_of()) == 1


@pytest.mark.parametrize("reason", list(MissReason))
def test_each_reason_of_the_store_is_told_and_counted(
    reason: MissReason, warnings_of: Callable[[], list[str]]
) -> None:
    """A damaged entry reported as absent sends people to the wrong remedy."""
    bench = Bench()
    digest = artifact(1, 8, 64).digest
    bench.store.entries[digest] = Miss(digest, reason, "what the store found")
    bench.runtime.run(*operands(1, 8, 64))
    assert bench.runtime.stats().misses == {reason.value: 1}
    assert f": {reason.value}: what the store found. torch" in warnings_of()[0]


def test_under_the_error_policy_every_missed_call_raises(
    warnings_of: Callable[[], list[str]],
) -> None:
    """The first miss raised and later ones left to torch would break the policy's promise."""
    bench = Bench(on_miss="error")
    for _ in range(2):
        with pytest.raises(MissError, match=r"no kernel for M=1 N=8 K=64 .*absent") as raised:
            bench.runtime.run(*operands(1, 8, 64))
        assert "llbf16-aot build MANIFEST" in raised.value.hint
        assert raised.value.exit_code == 3
    assert bench.runtime.stats() == counted(
        hits=0, loads=0, misses={"absent": 1}, fallbacks=0, rejects=2
    )
    (line,) = warnings_of()
    assert "absent: no such entry. Calls raise MissError from now on. To mend it: list" in line


def test_large_batches_are_the_librarys_without_a_warning(
    warnings_of: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill has any number of tokens: an entry and a warning for each would grow for ever."""
    monkeypatch.setattr(runtime_module, "MAX_LARGE", 4)
    bench = Bench(artifact(3, 8, 64))
    small = operands(3, 8, 64)
    for tokens in (65, 66, 67, 68, 69, 70, 300, 65):
        x, weight = operands(tokens, 8, 64)
        assert error_of(bench.runtime.run(x, weight), x, weight) <= 2e-6
        bench.runtime.run(*small)
    assert bench.runtime.stats() == counted(hits=8, loads=1, misses={}, fallbacks=0, library=8)
    assert len(bench.runtime._entries) <= 5
    assert warnings_of() == []
    assert len(bench.store.asked) == 1


@pytest.mark.parametrize("on_miss", ["torch", "error", "compile"])
def test_kernels_of_large_batches_are_an_offer_that_may_be_missing(
    on_miss: OnMiss, tmp_path: Path, warnings_of: Callable[[], list[str]]
) -> None:
    """A manifest of 16 tokens is whole: a prefill must not warn, raise, compile, break a graph."""
    path = tmp_path / "table.json"
    path.write_text(
        '{"schema": 1, "name": "t", "source": "", "rules": ['
        '{"tokens": [65, 256], "use": {"backend": "splitk", "split_k": 6, "stages": 4}},'
        '{"use": {"backend": "splitk", "split_k": 2, "stages": 2}}]}'
    )
    where = Target.parse("sm_90a")
    stored = artifact_for(dispatch(Problem(100, 8, 64), where, load_table(str(path), where)))

    def made(*artifacts: Artifact) -> tuple[Runtime, FakeDevices]:
        store = Store(tmp_path / "store") if on_miss == "compile" else MemoryStore(artifacts)
        devices = FakeDevices()
        return (
            Runtime(
                store,
                tuning=str(path),
                on_miss=on_miss,
                driver=FakeDriver(artifacts),
                devices=devices,
                layers=[MemoryStore(artifacts)],
            ),
            devices,
        )

    x, weight = operands(100, 8, 64)
    for captured in (True, False):
        runtime, devices = made()
        devices.captured = captured
        assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
        runtime.freeze()
        assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
        stats = runtime.stats()
        assert (stats.library, stats.misses, stats.rejects) == (2, {}, 0)
    assert warnings_of() == []
    runtime, _ = made(stored)
    assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    assert (runtime.stats().hits, runtime.stats().library) == (1, 0)


def test_more_tokens_than_any_kernel_takes_are_one_miss(
    warnings_of: Callable[[], list[str]],
) -> None:
    """fp32 operands have a bound of their own: beyond it M must not matter either."""
    bench = Bench()
    for tokens in (33, 34, 300):
        x, weight = (tensor.float() for tensor in operands(tokens, 8, 64))
        assert error_of(bench.runtime.run(x, weight), x, weight) <= 2e-6
    assert bench.runtime.stats() == counted(hits=0, loads=0, misses={"unsupported": 1}, fallbacks=3)
    (line,) = warnings_of()
    assert "unsupported: tokens is 33, supported are 1 to 32" in line
    assert bench.store.asked == []


def test_kernels_of_large_batches_are_found_again_after_they_were_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forgetting must cost a look into memory: no load, no lost count, nothing after `freeze`."""
    monkeypatch.setattr(runtime_module, "MAX_LARGE", 3)
    problem = Problem(128, 8, 64, weight_dtype=DType.FP32)
    where = Target.parse("sm_90a")
    stored = artifact_for(dispatch(problem, where, load_table("reference", where)))
    bench = Bench(stored, on_miss="error")
    counts = (*range(65, 73), 65)
    for number, tokens in enumerate(counts):
        x, weight = operands(tokens, 8, 64)
        weight = weight.float()
        for _ in range(2):
            assert error_of(bench.runtime.run(x, weight), x, weight) <= 2e-6
        if number == 4:
            bench.runtime.freeze()
    stats = bench.runtime.stats()
    assert (stats.hits, stats.loads, stats.misses) == (2 * len(counts), 1, {})
    assert len(bench.runtime._entries) <= 3
    assert sum(len(family) for family in bench.runtime._memory._families.values()) <= 3


def test_a_gpu_that_no_kernel_runs_on_falls_back(warnings_of: Callable[[], list[str]]) -> None:
    """An A100 in the fleet must serve, slower, and say why."""
    bench = Bench()
    bench.driver.capabilities[0] = (8, 0)
    x, weight = operands(1, 8, 64)
    assert error_of(bench.runtime.run(x, weight), x, weight) <= 2e-6
    assert bench.runtime.stats().misses == {"target": 1}
    assert "target: target sm_80a is older than sm_90" in warnings_of()[0]


def changed(artifact: Artifact, **fields: object) -> Artifact:
    launch: LaunchRecord = msgspec.structs.replace(artifact.record.launch, **fields)
    return Artifact(msgspec.structs.replace(artifact.record, launch=launch), artifact.cubin)


def test_parameters_that_the_driver_sees_otherwise_reject_the_artifact(
    warnings_of: Callable[[], list[str]],
) -> None:
    """A buffer laid out for another kernel hands it garbage as pointers."""
    bench = Bench(artifact(1, 8, 64))
    bench.driver.params = ((0, 8), (8, 8), (16, 8), (24, 8))
    x, weight = operands(1, 8, 64)
    assert error_of(bench.runtime.run(x, weight), x, weight) <= 2e-6
    assert bench.runtime.stats() == counted(hits=0, loads=0, misses={"rejected": 1}, fallbacks=1)
    assert (bench.driver.unloads, bench.driver.launches) == (1, [])
    assert "takes parameters (offset, size) ((0, 8), (8, 8), (16, 8), (24, 8))" in warnings_of()[0]
    assert warnings_of()[0].endswith("--store /the/store --force")


def test_the_command_in_a_warning_can_be_pasted_whatever_the_store_is_called(
    warnings_of: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A space in the path would make the build fill another store."""
    bench = Bench()
    monkeypatch.setattr(bench.store, "root", Path("/my store"))
    bench.runtime.run(*operands(1, 8, 64))
    assert warnings_of()[0].endswith("--store '/my store'")


def test_an_artifact_of_another_key_is_rejected_before_it_is_loaded() -> None:
    """A store that answers with the wrong entry must not make us launch the wrong kernel."""
    wanted, other = artifact(1, 8, 64), artifact(1, 8, 64, out_dtype=torch.bfloat16)
    bench = Bench(wanted, other)
    bench.store.entries[wanted.digest] = other
    bench.runtime.run(*operands(1, 8, 64))
    assert bench.runtime.stats().misses == {"rejected": 1}
    assert bench.driver.loads == 0


def test_a_record_that_cannot_be_launched_is_rejected_before_it_is_loaded() -> None:
    """A tile of zero would divide by zero in a request."""
    wanted = artifact(1, 8, 64)
    bench = Bench(wanted)
    bench.store.entries[wanted.digest] = changed(wanted, block=(0, 1, 1))
    bench.runtime.run(*operands(1, 8, 64))
    assert bench.runtime.stats().misses == {"rejected": 1}
    assert bench.driver.loads == 0


@pytest.mark.parametrize(
    ("failing", "unloads"),
    [({"load_library"}, 0), ({"make_ready"}, 1), ({"make_ready", "unload_library"}, 1)],
)
def test_a_driver_that_refuses_a_kernel_is_a_miss_and_leaves_nothing_loaded(
    failing: set[str], unloads: int, warnings_of: Callable[[], list[str]]
) -> None:
    """A cubin for another architecture fails here: the server goes on, the first cause is told."""
    bench = Bench(artifact(1, 8, 64))
    bench.driver.failing = failing
    x, weight = operands(1, 8, 64)
    assert error_of(bench.runtime.run(x, weight), x, weight) <= 2e-6
    assert bench.runtime.stats() == counted(hits=0, loads=0, misses={"driver": 1}, fallbacks=1)
    assert bench.driver.unloads == unloads
    assert f"driver: {min(failing)} failed" in warnings_of()[0]


def test_a_machine_whose_driver_cannot_be_asked_falls_back() -> None:
    """Missing bindings must not take a server down that torch alone could serve."""
    bench = Bench(artifact(1, 8, 64))
    bench.driver.failing = {"compute_capability"}
    bench.runtime.run(*operands(1, 8, 64))
    assert bench.runtime.stats().misses == {"driver": 1}


def test_a_refused_launch_raises_and_is_no_hit() -> None:
    """A failed launch is often the report of an earlier fault: torch would only hide it."""
    bench = Bench(artifact(1, 8, 64))
    bench.driver.failing = {"launch"}
    with pytest.raises(DriverError, match="launch failed"):
        bench.runtime.run(*operands(1, 8, 64))
    assert bench.runtime.stats() == counted(hits=0, loads=1, misses={}, fallbacks=0)
    bench.driver.failing = set()
    bench.runtime.run(*operands(1, 8, 64))
    assert bench.runtime.stats().hits == 1


def test_trouble_with_trust_is_raised_under_every_policy() -> None:
    """A store that somebody else can write to must never be a quiet fallback."""

    class Foreign(MemoryStore):
        def get(self, digest: str) -> Artifact | Miss:
            raise UntrustedStoreError("the store belongs to somebody else")

    runtime = Runtime(Foreign(), driver=FakeDriver(), devices=FakeDevices())
    for _ in range(2):
        with pytest.raises(UntrustedStoreError):
            runtime.run(*operands(1, 8, 64))
    assert runtime.stats() == counted(hits=0, loads=0, misses={}, fallbacks=0)


def test_a_tuning_table_that_cannot_be_read_is_raised(tmp_path: Path) -> None:
    """A wrong path in a deployment must be seen, not served by another table."""
    runtime = Runtime(
        MemoryStore(), tuning=str(tmp_path / "no.json"), driver=FakeDriver(), devices=FakeDevices()
    )
    with pytest.raises(TuningTableError):
        runtime.run(*operands(1, 8, 64))


@pytest.mark.parametrize("on_miss", ["torch", "error"])
def test_where_the_table_prefers_the_library_torch_computes_without_a_miss(
    on_miss: OnMiss, tmp_path: Path, warnings_of: Callable[[], list[str]]
) -> None:
    """A choice reported as a miss sends people to build a kernel that would be slower."""
    table = tmp_path / "table.json"
    table.write_text(
        '{"schema": 1, "name": "t", "source": "test", "rules": ['
        '{"tokens": [9, 64], "use": {"backend": "library"}},'
        '{"use": {"backend": "dotprod", "block": 128, "experts_per_block": 1}}]}',
        encoding="utf-8",
    )
    kernel = artifact(4, 8, 64)
    runtime = Runtime(
        MemoryStore([kernel]),
        tuning=str(table),
        on_miss=on_miss,
        driver=FakeDriver([kernel]),
        devices=FakeDevices(),
    )
    for tokens in (9, 33, 9, 4):
        x, weight = operands(tokens, 8, 64)
        assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    assert runtime.stats() == counted(hits=1, loads=1, misses={}, fallbacks=0, library=3)
    assert warnings_of() == []


def test_a_log_handler_may_ask_for_the_figures() -> None:
    """A handler that reports stats() would wait for ever on a lock that its own thread holds."""
    bench = Bench()
    seen: list[Stats] = []

    class Handler(logging.Handler):
        def createLock(self) -> None:  # noqa: N802 - logging's name
            self.lock = None  # a handler stuck with its lock would hang logging at exit too

        def emit(self, record: logging.LogRecord) -> None:
            seen.append(bench.runtime.stats())

    log = logging.getLogger("llbf16_aot")
    handler = Handler()
    log.addHandler(handler)
    try:
        # A thread that can be left behind: caught in the lock, it would hang the test run.
        thread = threading.Thread(target=bench.runtime.run, args=operands(1, 8, 64), daemon=True)
        thread.start()
        thread.join(30)
    finally:
        log.removeHandler(handler)
    assert seen == [counted(hits=0, loads=0, misses={"absent": 1}, fallbacks=0)]


# ---- the store on disk


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Store, Artifact]:
    """A store on disk with one artifact that passes every check of a read."""
    kernel = support.artifact_for(support.make_key(hidden=2304, tokens=3))
    store = Store(tmp_path / "store")
    store.publish(kernel)
    return store, kernel


def on_disk(store: Store, kernel: Artifact) -> Runtime:
    """A new runtime, as a new process has it."""
    return Runtime(
        store.root, tuning="reference", driver=FakeDriver([kernel]), devices=FakeDevices()
    )


def contents(root: Path) -> dict[Path, tuple[int, bytes]]:
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()}


def test_a_published_artifact_is_loaded_and_nothing_is_written(
    stored: tuple[Store, Artifact],
) -> None:
    """Layers of an image are read-only: a loader that touches them fails, or grows every node."""
    store, kernel = stored
    before = contents(store.root)
    runtime = on_disk(store, kernel)
    x, weight = operands(3, 264, 2304)
    assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    assert runtime.stats() == counted(hits=1, loads=1, misses={}, fallbacks=0)
    assert contents(store.root) == before


def test_a_damaged_artifact_is_a_miss_with_its_reason_until_it_is_published_again(
    stored: tuple[Store, Artifact], warnings_of: Callable[[], list[str]]
) -> None:
    """A flipped byte handed to the driver is a wrong answer, or a load that never returns."""
    store, kernel = stored
    path = store.cubin_path(kernel.record)
    damaged = bytearray(kernel.cubin)
    damaged[len(damaged) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(damaged)
    runtime = on_disk(store, kernel)
    x, weight = operands(3, 264, 2304)
    for _ in range(2):
        assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    assert runtime.stats() == counted(hits=0, loads=0, misses={"damaged": 1}, fallbacks=2)
    (line,) = warnings_of()
    assert str(store.root) in line
    store.publish(kernel)
    healed = on_disk(store, kernel)
    assert error_of(healed.run(x, weight), x, weight) <= 2e-6
    assert healed.stats() == counted(hits=1, loads=1, misses={}, fallbacks=0)


# ---- capture, devices, threads


def test_a_cold_call_during_capture_is_refused_and_a_warm_one_is_not() -> None:
    """Loading code while a graph records breaks the capture, far from where it is noticed."""
    bench = Bench(artifact(1, 8, 64))
    x, weight = operands(1, 8, 64)
    bench.devices.captured = True
    for _ in range(2):
        with pytest.raises(ColdCaptureError, match="first call for M=1 N=8 K=64") as raised:
            bench.runtime.run(x, weight)
        assert raised.value.hint == "preload it, or make the same call once before the capture"
    assert (bench.store.asked, bench.driver.loads) == ([], 0)
    bench.devices.captured = False
    bench.runtime.run(x, weight)
    missed = operands(2, 8, 64)
    bench.runtime.run(*missed)
    bench.devices.captured = True
    assert error_of(bench.runtime.run(x, weight), x, weight) <= 2e-6
    assert error_of(bench.runtime.run(*missed), *missed) <= 2e-6
    assert bench.runtime.stats() == counted(
        hits=2, loads=1, misses={"absent": 1}, fallbacks=2, rejects=2
    )


def test_the_tensors_device_is_made_current_for_the_call_and_only_for_it() -> None:
    """The default stream of the current device runs the kernel: it must be the tensors' device."""
    bench = Bench(artifact(1, 8, 64))
    bench.devices.now = 1
    for _ in range(2):
        bench.runtime.run(*operands(1, 8, 64))
    assert (bench.devices.guarded, bench.devices.now) == ([0, 0], 1)
    bench.devices.now = 0
    bench.runtime.run(*operands(1, 8, 64))
    assert bench.devices.guarded == [0, 0]
    assert [stream for _, _, stream in bench.driver.launches] == [0x77] * 3


def test_each_device_gets_the_kernel_of_its_own_target() -> None:
    """Two kinds of GPU in a host: code for device 0 does not run on device 1 (tilelang 2516)."""
    kernels = artifact(1, 8, 64), artifact(1, 8, 64, target="sm_100a")
    driver = FakeDriver(kernels)
    loader = Loader(MemoryStore(kernels), "reference", driver)
    for device in (0, 1):
        assert isinstance(loader.find(Problem(1, 8, 64), device), Launcher)
    assert [a.record.key.target for a in driver.libraries.values()] == ["sm_90a", "sm_100a"]


def test_one_load_serves_two_devices_of_a_kind_and_is_made_ready_on_each() -> None:
    """The shared memory limit is set for each device: launched without it the second one fails."""
    kernel = artifact(5, 8, 2304)
    driver = FakeDriver([kernel])
    driver.capabilities[1] = (9, 0)
    loader = Loader(MemoryStore([kernel]), "reference", driver)
    for device in (0, 1, 1, 0):
        assert isinstance(loader.find(Problem(5, 8, 2304), device), Launcher)
    assert (driver.loads, loader.loads) == (1, 1)
    assert [device for device, _ in driver.ready] == [0, 1]
    assert {device for _, device in driver.bound} == {0, 1}


def test_every_thread_has_a_context_before_its_first_launch() -> None:
    """A thread that made no CUDA call has none; its launch fails though torch gave it memory."""
    bench = Bench(artifact(1, 8, 64), on_miss="error")
    bound_at_launch: list[bool] = []
    bench.driver.before_launch = lambda: bound_at_launch.append(
        (threading.get_ident(), 0) in bench.driver.bound
    )
    bench.runtime.run(*operands(1, 8, 64))
    thread = threading.Thread(target=bench.runtime.run, args=operands(1, 8, 64))
    thread.start()
    thread.join()
    assert bound_at_launch == [True, True]
    before = len(bench.driver.bound)
    bench.runtime.run(*operands(1, 8, 64))
    assert len(bench.driver.bound) == before


def test_sixteen_threads_on_one_cold_key_load_it_once() -> None:
    """Each would read, verify and load the same kernel, and count its own miss."""
    bench = Bench(artifact(1, 8, 64), on_miss="error")
    # All threads have seen the key cold before the first of them may go on to load it.
    everybody = threading.Barrier(16)

    def meet() -> None:
        everybody.wait(60)

    bench.devices.at_capture_check = meet
    x, weight = operands(1, 8, 64)
    results: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: results.append(bench.runtime.run(x, weight)))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bench.runtime.stats() == counted(hits=16, loads=1, misses={}, fallbacks=0)
    assert len(bench.store.asked) == 1
    assert all(torch.equal(result, results[0]) for result in results)
    assert error_of(results[0], x, weight) <= 2e-6


def test_counters_are_exact_when_threads_count_at_once() -> None:
    """A count that two threads read before either writes it back loses one."""
    bench = Bench(artifact(1, 8, 64))
    start = threading.Barrier(8)

    def work() -> None:
        start.wait(60)
        for _ in range(25):
            bench.runtime.run(*operands(1, 8, 64))
            bench.runtime.run(*operands(2, 8, 64))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bench.runtime.stats() == counted(hits=200, loads=1, misses={"absent": 1}, fallbacks=200)


# ---- the fallback


def test_the_fallback_widens_in_torch_where_torch_can_and_else_by_itself() -> None:
    """bf16 sums cast to fp32 would look like fp32 logits and be a thousand times less exact."""
    x, weight = operands(3, 8, 2304)
    product = TorchProduct()
    first = product(x, weight, torch.float32)  # the CPU has no widening product
    assert error_of(first, x, weight) <= 2e-6
    assert torch.equal(product(x, weight, torch.float32), first)
    assert error_of(product(x, weight, torch.float16), x, weight) <= 4e-4


def test_the_fallback_asks_torch_for_fp32_sums_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casting the weights in every call costs their copy: only where torch has nothing better."""
    asked: list[torch.dtype] = []

    def mm(x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        asked.append(out_dtype)
        return x.float() @ weight.float()

    monkeypatch.setattr(torch, "mm", mm)
    x, weight = operands(3, 8, 64)
    product = TorchProduct()
    for out_dtype in (torch.float32, torch.float16, torch.float32):
        assert product(x, weight, out_dtype).dtype is out_dtype
    assert asked == [torch.float32] * 3


# ---- the process's runtime and the walls


def test_load_and_run_takes_store_and_table_from_the_environment_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's setting that is overwritten, or read at import, sends a server to another store."""
    monkeypatch.setattr(runtime_module._Process, "runtime", None)
    monkeypatch.setenv("LLBF16_AOT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("LLBF16_AOT_TUNING", "reference")
    made: list[tuple[Path, str]] = []

    def loader(store: MemoryStore, tuning: str, driver: object) -> Loader:
        made.append((store.root, tuning))
        return Loader(store, tuning, FakeDriver())

    monkeypatch.setattr(runtime_module, "Loader", loader)
    monkeypatch.setattr(runtime_module, "CudaDevices", FakeDevices)
    x, weight = operands(3, 8, 64)
    for _ in range(2):
        assert error_of(llbf16_aot.load_and_run(x, weight), x, weight) <= 2e-6
    out = torch.empty((3, 8), dtype=torch.float16)
    assert llbf16_aot.load_and_run(x, weight, out=out, out_dtype=torch.float16) is out
    assert made == [(tmp_path / "store", "reference")]
    process = runtime_module._Process.runtime
    assert process is not None
    assert process.stats().fallbacks == 3
    assert not (tmp_path / "store").exists()


def test_what_is_given_wins_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application that names its store must not be redirected by a variable."""
    monkeypatch.setenv("LLBF16_AOT_STORE", str(tmp_path / "other"))
    monkeypatch.setenv("LLBF16_AOT_TUNING", "no-such-table")
    runtime = Runtime(
        tmp_path / "mine", tuning="reference", driver=FakeDriver(), devices=FakeDevices()
    )
    x, weight = operands(3, 8, 64)
    assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    assert runtime.stats().misses == {"absent": 1}


def test_the_runtime_needs_no_compiler() -> None:
    """A broken compiler package must not be able to kill a server (vllm 49859)."""
    program = """
import sys
sys.modules["cutlass"] = None
import torch
from llbf16_aot import AotError, Runtime, load_and_run
try:
    load_and_run(torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(8, 8, dtype=torch.bfloat16))
except ValueError as error:
    print(error)
print(sorted(name for name in sys.modules if name.startswith(("cutlass.", "llbf16_aot.kernels."))))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "x is on cpu, must be on a cuda device\n[]\n"


def test_errors_of_the_runtime_share_the_base_class() -> None:
    """Callers catch AotError for everything that is not their own malformed call."""
    assert issubclass(MissError, AotError)
    assert issubclass(ColdCaptureError, AotError)
