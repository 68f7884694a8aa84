"""Tuning: two passes, the fastest right tile, the library where it is faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_lab import SM_90A, candidates, make_lab
from llbf16_aot import measure
from llbf16_aot.backends import OneshotTile, SplitkTile, Tile, backend_name
from llbf16_aot.dispatch import LibraryTile, dispatch
from llbf16_aot.driver import LaunchConfig
from llbf16_aot.errors import NotFoundError
from llbf16_aot.key import CompileKey
from llbf16_aot.problem import DType, Problem
from llbf16_aot.search import PROBES, key_for, search_space
from llbf16_aot.survey import CellKey, SurveyCell, cell_key
from llbf16_aot.tablewriter import write_table
from llbf16_aot.timing import QUICK_REPLAYS
from llbf16_aot.tune import FINALISTS, header_of, measured_tokens, tune, tune_cell

HIDDEN, EXPERTS = 256, 8
CELLS = [CellKey(HIDDEN, EXPERTS, DType.BF16, tokens) for tokens in (1, 2, 3)]


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judgements on the CPU cost more than they do on a GPU."""
    monkeypatch.setattr(measure, "RUNS", 3)
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 16)


def keys(tokens: int = 1) -> dict[Tile, CompileKey]:
    problem = Problem(tokens, EXPERTS, HIDDEN)
    return {tile: key_for(tile, problem, SM_90A) for tile in search_space(HIDDEN, tokens)}


def prices(
    cheap: dict[Tile, float], tokens: int = 1, others: float = 3.0
) -> Callable[[CompileKey, LaunchConfig], float]:
    table = keys(tokens)
    by_key = {table[tile]: us for tile, us in cheap.items()}
    return lambda key, config: by_key.get(key, others)


TILES = [tile for tile in search_space(HIDDEN, 1) if isinstance(tile, OneshotTile)]


def test_the_fastest_right_tile_of_all_candidates_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a pass that never looks at some candidate."""
    for best in (TILES[0], TILES[-1], SplitkTile(7, 5)):
        lab, _, _ = make_lab(monkeypatch, candidates(CELLS), prices({best: 1.5}))
        cell = tune_cell(lab, CellKey(HIDDEN, EXPERTS, DType.BF16, 1))
        assert cell.use == best
        assert cell.chosen.us == pytest.approx(1.5)
        assert [trial.use for trial in cell.trials] == list(search_space(HIDDEN, 1))


@pytest.mark.parametrize(
    ("tokens", "families"),
    [(1, {"fp32"}), (8, {"fp32", "oneshot"}), (24, {"oneshot"}), (64, {"oneshot", "bf16x3"})],
)
def test_routers_with_fp32_weights_are_tuned_over_their_own_families(
    monkeypatch: pytest.MonkeyPatch, tokens: int, families: set[str]
) -> None:
    """Catches a search that measures kernels which cannot take the weights, or none at all."""
    wanted = CellKey(HIDDEN, EXPERTS, DType.FP32, tokens)
    space = search_space(HIDDEN, tokens, DType.FP32)
    assert {backend_name(tile) for tile in space} == families
    best = space[-1]
    key = key_for(best, Problem(tokens, EXPERTS, HIDDEN, weight_dtype=DType.FP32), SM_90A)
    lab, _, _ = make_lab(
        monkeypatch, candidates([wanted]), lambda asked, _: 1.5 if asked == key else 3.0
    )
    cell = tune_cell(lab, wanted)
    assert cell_key(cell) == wanted
    assert cell.use == best
    assert list(cell.library) == ["F.linear"]
    table = write_table([cell], header_of(lab).origin, name="mine", target="sm_90a")
    problem = Problem(tokens, EXPERTS, HIDDEN, weight_dtype=DType.FP32)
    assert dispatch(problem, SM_90A, table) == key
    assert table.tile_for(Problem(tokens, EXPERTS, HIDDEN)) == LibraryTile()


def test_cells_of_one_shape_and_type_of_weights_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two types in turns, gigabytes of weights would be made anew for each cell."""
    wanted = [
        CellKey(HIDDEN, EXPERTS, dtype, tokens)
        for tokens in (3, 4)
        for dtype in (DType.BF16, DType.FP32)
    ]
    lab, _, _ = make_lab(monkeypatch, candidates(wanted), lambda key, config: 3.0)
    order = [cell_key(cell)[2:] for cell in tune(wanted, lab=lambda: lab)]
    assert order == [(DType.BF16, 3), (DType.BF16, 4), (DType.FP32, 3), (DType.FP32, 4)]


def test_a_wrong_or_unsteady_tile_is_rejected_however_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a table that names the kernel which skips the work."""
    wrong, unsteady, unlaunchable, right = TILES[:4]
    price = prices({wrong: 0.1, unsteady: 0.2, unlaunchable: 0.3, right: 1.5})
    lab, driver, _ = make_lab(monkeypatch, candidates(CELLS), price)
    table = keys()
    driver.wrong = lambda key: key == table[wrong]
    driver.unsteady = lambda key: key == table[unsteady]
    driver.unlaunchable = lambda key: key == table[unlaunchable]
    cell = tune_cell(lab, CellKey(HIDDEN, EXPERTS, DType.BF16, 1))
    assert cell.use == right
    reasons = {trial.use: trial.rejected for trial in cell.trials if trial.rejected}
    assert "not written" in reasons[wrong]
    assert "other bits" in reasons[unsteady]
    assert "CUDA_ERROR_INVALID_CLUSTER_SIZE" in reasons[unlaunchable]
    assert set(reasons) == {wrong, unsteady, unlaunchable}


def test_only_finalists_are_measured_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a tuning run that takes hours, and one that decides by the quick pass."""
    lab, _, clock = make_lab(monkeypatch, candidates(CELLS), prices({TILES[0]: 1.5}))
    cell = tune_cell(lab, CellKey(HIDDEN, EXPERTS, DType.BF16, 1))
    full = [trial for trial in cell.trials if trial.full is not None]
    assert len(full) == FINALISTS
    assert all(trial.quick_us is not None for trial in cell.trials)
    quick = sorted(trial.quick_us or 0.0 for trial in cell.trials)
    assert max(trial.quick_us or 0.0 for trial in full) <= quick[FINALISTS - 1]
    assert QUICK_REPLAYS < 20
    assert clock.graphs < len(cell.trials) + 3 * (FINALISTS + 4) + 2 + 2 * (FINALISTS + 2)


def test_the_fastest_and_the_library_are_also_measured_cold_and_hot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a report that hides what a kernel costs where no kernel runs ahead of it."""
    price = prices({TILES[0]: 1.5, TILES[1]: 1.55, TILES[2]: 2.0})
    lab, _, _ = make_lab(monkeypatch, candidates(CELLS), price)
    cell = tune_cell(lab, CellKey(HIDDEN, EXPERTS, DType.BF16, 1))
    trials = {trial.use: trial for trial in cell.trials}
    for tile in TILES[:2]:
        assert trials[tile].cold is not None
        assert trials[tile].hot is not None
    assert trials[TILES[2]].full is not None
    assert trials[TILES[2]].cold is trials[TILES[2]].hot is None
    assert set(cell.library_cold) == set(cell.library_hot) == set(cell.library)


def test_the_full_pass_decides_over_the_quick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a choice by seven replays, where the order of near tiles is noise."""
    table = keys()
    looks = {table[TILES[0]]: 0, table[TILES[1]]: 0}

    def price(key: CompileKey, config: LaunchConfig) -> float:
        if key not in looks:
            return 3.0
        looks[key] += 1
        quick = looks[key] <= 64
        return (1.0 if quick else 2.0) if key == table[TILES[0]] else 1.5

    lab, _, _ = make_lab(monkeypatch, candidates(CELLS), price)
    assert tune_cell(lab, CellKey(HIDDEN, EXPERTS, DType.BF16, 1)).use == TILES[1]


def test_where_the_library_is_faster_the_cell_is_its(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a dispatcher that prefers our kernel to a faster product."""
    lab, _, _ = make_lab(monkeypatch, candidates(CELLS), prices({}), library_us=lambda x: 2.0)
    cell = tune_cell(lab, CellKey(HIDDEN, EXPERTS, DType.BF16, 1))
    assert cell.use == LibraryTile()
    assert cell.chosen.us == pytest.approx(2.0)
    assert cell.best is not None
    assert cell.best.full is not None
    assert cell.best.full.us == pytest.approx(3.0)


def test_candidates_that_the_store_lacks_are_counted_and_none_at_all_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a table from half a store that does not say so."""
    table = keys()
    some = [a for a in candidates(CELLS) if a.record.key != table[TILES[0]]]
    lab, _, _ = make_lab(monkeypatch, some, prices({TILES[1]: 1.5}))
    cell = tune_cell(lab, CellKey(HIDDEN, EXPERTS, DType.BF16, 1))
    assert cell.lacking == 1
    assert len(cell.trials) == len(search_space(HIDDEN, 1)) - 1
    assert TILES[0] not in {trial.use for trial in cell.trials}
    lab, _, _ = make_lab(monkeypatch, candidates([])[: len(PROBES)], prices({}))
    with pytest.raises(NotFoundError, match="no candidate for hidden 256, 1 tokens on sm_90a"):
        tune_cell(lab, CellKey(HIDDEN, EXPERTS, DType.BF16, 1))


def test_known_cells_are_taken_over_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that measures all anew after its time limit, or that needs a GPU to end."""
    lab, _, clock = make_lab(monkeypatch, candidates(CELLS), prices({TILES[0]: 1.5}))
    told: list[SurveyCell] = []
    first = list(tune(CELLS[:2], lab=lambda: lab, on_cell=told.append))
    assert told == first
    known = {cell_key(cell): cell for cell in first}
    graphs = clock.graphs
    again = list(tune(CELLS, lab=lambda: lab, known=known, on_cell=told.append))
    assert again[:2] == first
    assert told == again
    assert clock.graphs > graphs

    def no_gpu() -> measure.GpuLab:
        raise AssertionError("no GPU is needed for what is known")

    assert list(tune(CELLS[:2], lab=no_gpu, known=known)) == first


def test_a_tuned_table_dispatches_every_measured_cell_to_its_winner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a break anywhere between the clock and the table, end to end."""

    def price(key: CompileKey, config: LaunchConfig) -> float:
        wanted = {"oneshot": TILES[2], "dotprod": None}.get(key.backend)
        return 1.0 if wanted is not None and keys()[wanted] == key else 2.0

    lab, _, _ = make_lab(monkeypatch, candidates(CELLS), price)
    cells = list(tune(CELLS, lab=lambda: lab))
    header = header_of(lab)
    table = write_table(cells, header.origin, name="tuned", target=header.target)
    for hidden, experts, _, tokens in CELLS:
        key = dispatch(Problem(tokens, experts, hidden), SM_90A, table)
        assert key == keys(tokens)[TILES[2]]
    assert header.target == "sm_90a"
    assert header.origin.versions["torch"]
    families = {"dotprod", "splitk", "oneshot", "fp32", "bf16x3", "probe"}
    assert set(header.kernel_sources) == families


@pytest.mark.parametrize(
    ("tokens", "measured"),
    [
        (range(1, 17), tuple(range(1, 17))),
        (range(1, 65), (*range(1, 17), 24, 32, 48, 64)),
        ([17], (24,)),
        ([24, 25], (24, 32)),
        ([1, 64], (1, 64)),
        ([], ()),
    ],
)
def test_above_16_tokens_representatives_are_measured(
    tokens: list[int], measured: tuple[int, ...]
) -> None:
    """Catches an M of a manifest that no measurement speaks for, and 48 needless ones."""
    assert measured_tokens(tokens) == measured
