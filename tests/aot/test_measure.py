"""The laboratory: what is timed, what is judged, and what is asked of the store."""

from __future__ import annotations

import pytest
import torch
from fake_lab import (
    EMPTY_US,
    LIBRARY_US,
    PRODUCER_US,
    SM_90A,
    Clock,
    PricedDriver,
    candidates,
    make_lab,
)
from llbf16_aot import measure
from llbf16_aot.backends import OneshotTile, SplitkTile
from llbf16_aot.driver import LaunchConfig
from llbf16_aot.errors import DriverError, NotFoundError
from llbf16_aot.key import CompileKey
from llbf16_aot.measure import GpuBench, GpuLab
from llbf16_aot.problem import DType, Problem
from llbf16_aot.search import key_for, search_space
from llbf16_aot.survey import CellKey
from llbf16_aot.timing import CALLS, RUNS, Call, Way

PROBLEM = Problem(3, 8, 256)
KEY = key_for(SplitkTile(6, 4), PROBLEM, SM_90A)
OURS_US = 2.25


def lab_of(monkeypatch: pytest.MonkeyPatch) -> tuple[GpuLab, PricedDriver, Clock]:
    return make_lab(
        monkeypatch, candidates([CellKey(256, 8, DType.BF16, 3)]), lambda key, config: OURS_US
    )


def bench_of(monkeypatch: pytest.MonkeyPatch) -> tuple[GpuBench, PricedDriver, Clock]:
    lab, driver, clock = lab_of(monkeypatch)
    return lab.bench(256, 8, 3), driver, clock


def call_of(bench: GpuBench, key: CompileKey = KEY) -> Call:
    call = bench.kernel(key)
    assert not isinstance(call, str), call
    return call


def test_after_the_producer_the_producers_own_cost_is_taken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a figure that contains the producer, or one that takes it off twice."""
    bench, _, clock = bench_of(monkeypatch)
    sample = bench.time(call_of(bench), Way.AFTER_PRODUCER, 7)
    assert sample.us == pytest.approx(OURS_US)
    assert bench.time(bench.empty(), Way.AFTER_PRODUCER, 7).us == pytest.approx(EMPTY_US)
    clock.jitter = 64.0
    assert bench.time(call_of(bench), Way.COLD, 20).spread_us == pytest.approx(1.0)


def test_the_base_is_measured_anew_when_it_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a producer that is measured once for hours, while the machine's clocks move."""
    bench, _, clock = bench_of(monkeypatch)
    bench.time(call_of(bench), Way.AFTER_PRODUCER, 7)
    before = clock.graphs
    bench.time(call_of(bench), Way.AFTER_PRODUCER, 7)
    assert clock.graphs == before + 1
    bench.settle(20)
    assert clock.graphs == before + 2


@pytest.mark.parametrize(
    ("way", "weights", "producers"),
    [(Way.AFTER_PRODUCER, CALLS, CALLS), (Way.COLD, CALLS, 0), (Way.HOT, 1, 0)],
)
def test_a_graph_has_64_calls_on_the_weights_that_its_protocol_says(
    monkeypatch: pytest.MonkeyPatch, way: Way, weights: int, producers: int
) -> None:
    """Catches a cold measurement on one weight, which would read the cache."""
    bench, driver, _ = bench_of(monkeypatch)
    seen: list[str] = []
    cost = driver._cost

    def noting(key: CompileKey, config: LaunchConfig) -> float:
        seen.append(key.backend)
        return cost(key, config)

    monkeypatch.setattr(driver, "_cost", noting)
    bench.settle(7)
    seen.clear()
    used: set[int] = set()
    call = call_of(bench)

    def spied(number: int) -> None:
        used.add(number)
        call(number)

    sample = bench.time(spied, way, 7)
    assert len(used) == weights
    assert (seen.count("splitk"), seen.count("probe")) == (CALLS, producers)
    assert seen == (["probe", "splitk"] if producers else ["splitk"]) * CALLS
    assert sample.us == pytest.approx(OURS_US)


def test_a_right_kernel_has_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the three tests below: the judgement is not always a fault."""
    bench, driver, _ = bench_of(monkeypatch)
    assert bench.fault(call_of(bench)) == ""
    assert driver.runs == RUNS


def test_an_output_that_is_not_written_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check on an output that still holds the right result of somebody else."""
    bench, driver, _ = bench_of(monkeypatch)
    call = call_of(bench)
    assert bench.fault(call) == ""
    driver.wrong = lambda key: True
    assert "not finite or were not written" in bench.fault(call)


def test_a_kernel_that_is_a_little_wrong_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a tolerance that bf16 sums would pass."""
    bench, _, _ = bench_of(monkeypatch)
    call = call_of(bench)

    def off(number: int) -> None:
        call(number)
        bench._out.mul_(1.0 + 4e-6)

    assert bench.fault(off).startswith("relative error against float64 is 4")


def test_other_bits_in_one_run_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a kernel with a race: its error is small, its bits are not the same."""
    bench, driver, _ = bench_of(monkeypatch)
    driver.unsteady = lambda key: True
    assert "other bits in" in bench.fault(call_of(bench))


def test_inputs_are_fresh_for_every_judgement_and_never_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a check on zeros, which every kernel passes."""
    bench, _, _ = bench_of(monkeypatch)
    call = call_of(bench)
    seen = []
    for _ in range(2):
        assert bench.fault(call) == ""
        seen.append(bench._x.clone())
        assert int((bench._x == 0).sum()) < bench._x.numel() // 10
    assert not torch.equal(*seen)


def test_the_library_is_timed_under_the_same_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a library that is measured without the producer, or that counts it."""
    bench, _, _ = bench_of(monkeypatch)
    library = bench.library()
    assert "F.linear" in library
    for call in library.values():
        assert bench.time(call, Way.AFTER_PRODUCER, 7).us == pytest.approx(LIBRARY_US)
    assert PRODUCER_US != LIBRARY_US


def test_what_the_store_lacks_is_told_with_the_build_that_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a crash, or a candidate that is silently not measured."""
    bench, _, _ = bench_of(monkeypatch)
    other = key_for(OneshotTile(16, 8, 7, 4), Problem(3, 8, 7168), SM_90A)
    told = bench.kernel(other)
    assert isinstance(told, str)
    assert "absent" in told
    lab, _, _ = make_lab(monkeypatch, [], lambda key, config: 1.0)
    with pytest.raises(NotFoundError, match="measurements need") as caught:
        lab.bench(256, 8, 3).settle(7)
    assert "build MANIFEST --probes --target sm_90a" in caught.value.hint


def test_weights_are_shared_by_the_cells_of_a_shape_and_given_up_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches 64 weights for every M, which would fill the GPU's memory."""
    lab, _, _ = lab_of(monkeypatch)
    first, second = lab.bench(256, 8, 3), lab.bench(256, 8, 4)
    assert first._weights.data_ptr() == second._weights.data_ptr()
    assert first._weights.shape == (CALLS, 8, 256)
    third = lab.bench(256, 16, 3)
    assert lab._weights is not None
    assert lab._weights[1] is third._weights


def test_the_copy_bandwidth_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a floor that is half of what it should be."""
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 16)
    lab, _, _ = lab_of(monkeypatch)
    # The fake clock gives a copy 250 us.
    assert lab.copy_bytes_per_s() == pytest.approx(2 * (1 << 16) / 250e-6)


def test_without_a_gpu_the_message_says_so() -> None:
    """Catches a traceback of torch on a machine that cannot measure."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(DriverError, match="no GPU to measure on"):
        GpuLab(candidates([]))  # type: ignore[arg-type]


def test_torch_compile_that_does_not_work_is_a_reason_not_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a benchmark that dies where there is no C compiler."""

    def broken(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no C compiler\nand a long trace")

    monkeypatch.setattr(torch, "compile", broken)
    bench, _, _ = bench_of(monkeypatch)
    assert bench.compiled() == "RuntimeError: no C compiler"


def test_fp32_weights_are_measured_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches figures of bf16 weights, or of a library call that reads them, under that name."""
    lab, _, _ = lab_of(monkeypatch)
    bench = lab.bench(256, 8, 3, DType.FP32)
    assert list(bench.library()) == ["F.linear"]
    bench.library()["F.linear"](0)
    problem = Problem(3, 8, 256, weight_dtype=DType.FP32)
    missing = bench.kernel(key_for(OneshotTile(16, 2, 4, 1), problem, SM_90A))
    assert isinstance(missing, str)
    assert "bf16 x fp32" in missing
    assert lab.bench(256, 8, 3).library().keys() >= {"F.linear"}


def test_torch_compile_compiles_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches eager figures under its name: it compiles a function for a few shapes only."""
    compiled: list[object] = []
    real = torch.compile

    def backend(module: torch.fx.GraphModule, inputs: object) -> object:
        compiled.append(inputs)
        return module

    monkeypatch.setattr(
        torch, "compile", lambda function, **options: real(function, backend=backend, **options)
    )
    lab, _, _ = lab_of(monkeypatch)
    for number in range(12):
        call = lab.bench(64, 8 + number, 1).compiled()
        assert not isinstance(call, str), call
    assert len(compiled) == 12


def test_every_candidate_of_a_cell_can_be_loaded_and_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches keys whose static sizes are not those of the problem that is measured."""
    monkeypatch.setattr(measure, "RUNS", 2)
    bench, _, _ = bench_of(monkeypatch)
    tiles = search_space(PROBLEM.hidden, PROBLEM.tokens)
    assert len(tiles) > 10
    for tile in tiles:
        assert bench.fault(call_of(bench, key_for(tile, PROBLEM, SM_90A))) == "", tile
