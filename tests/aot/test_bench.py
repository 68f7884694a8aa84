"""The benchmark: ratios of one run, the floor, and published figures as they are meant."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
import torch
from fake_gpu import artifact_for
from fake_lab import EMPTY_US, LIBRARY_US, SM_90A, candidates, make_lab
from hypothesis import given
from hypothesis import strategies as st
from llbf16_aot import measure
from llbf16_aot.backends import SplitkTile
from llbf16_aot.bench import Anchor, BenchCell, bench_cell, read_anchors, summarize
from llbf16_aot.dispatch import LibraryTile, Rule, Table, dispatch
from llbf16_aot.errors import AotError, NotFoundError, UsageError
from llbf16_aot.problem import Problem
from llbf16_aot.timing import Way

PROBLEM = Problem(2, 8, 256)
BANDWIDTH = 4e12
TABLE = Table(schema=1, name="t", source="", rules=(Rule(use=SplitkTile(7, 5)),))
LIBRARY = Table(schema=1, name="t", source="", rules=(Rule(use=LibraryTile()),))
ARTIFACTS = [*candidates([]), artifact_for(dispatch(PROBLEM, SM_90A, TABLE))]
OURS_US = 1.75


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RUNS", 2)


def cell_of(
    hidden: int = 4096,
    experts: int = 256,
    tokens: int = 1,
    *,
    ours: float = 2.0,
    cublas: float = 8.0,
    floor: float = 1.6,
) -> BenchCell:
    return BenchCell(
        hidden=hidden,
        experts=experts,
        tokens=tokens,
        ours_us=ours,
        ours_spread_us=0.0,
        config="splitk(6,4)",
        cublas_us=cublas,
        cublas_spread_us=0.0,
        cublas="torch.mm",
        floor_us=floor,
        empty_us=0.75,
    )


def test_a_cell_has_the_tables_kernel_the_library_and_the_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches figures under the wrong name, and a floor without the weights or the launch."""
    lab, _, _ = make_lab(monkeypatch, ARTIFACTS, lambda key, config: OURS_US)
    cell = bench_cell(lab, PROBLEM, table=TABLE, copy_bytes_per_s=BANDWIDTH)
    assert (cell.ours_us, cell.cublas_us, cell.cublas) == (OURS_US, LIBRARY_US, "F.linear")
    assert cell.config == "splitk(7,5,16,256)"
    assert cell.empty_us == EMPTY_US
    assert cell.floor_us == pytest.approx(EMPTY_US + 8 * 256 * 2 / BANDWIDTH * 1e6, abs=1e-4)
    assert (cell.cold_us, cell.hot_us, cell.torch_compile_us) == (None, None, None)
    data = json.loads(msgspec.json.encode(cell))
    assert (data["K"], data["N"], data["M"]) == (256, 8, 2)
    assert "cold_us" not in data


def test_other_ways_and_torch_compile_are_measured_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches cold figures that are those after the producer, and the other way round."""
    lab, _, clock = make_lab(monkeypatch, ARTIFACTS, lambda key, config: OURS_US)

    def compiled(function: object, *, dynamic: bool) -> object:
        def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            clock.us += 8.5
            return x

        return product

    monkeypatch.setattr(torch, "compile", compiled)
    cell = bench_cell(
        lab,
        PROBLEM,
        table=TABLE,
        copy_bytes_per_s=BANDWIDTH,
        ways=(Way.COLD, Way.HOT),
        torch_compile=True,
    )
    assert (cell.cold_us, cell.hot_us) == (OURS_US, OURS_US)
    assert (cell.cublas_cold_us, cell.cublas_hot_us) == (LIBRARY_US, LIBRARY_US)
    assert cell.torch_compile_us == 8.5


def test_where_the_table_leaves_a_cell_to_the_library_its_time_is_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a ratio above 1 for a cell that the runtime gives to the library."""
    lab, _, _ = make_lab(monkeypatch, ARTIFACTS, lambda key, config: OURS_US)
    cell = bench_cell(lab, PROBLEM, table=LIBRARY, copy_bytes_per_s=BANDWIDTH, ways=(Way.COLD,))
    assert (cell.config, cell.ours_us, cell.vs_cublas) == ("library", LIBRARY_US, 1.0)
    assert cell.cold_us == LIBRARY_US


def test_a_kernel_that_is_absent_or_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a benchmark of a kernel that computes nothing."""
    lab, driver, _ = make_lab(monkeypatch, ARTIFACTS, lambda key, config: OURS_US)
    driver.wrong = lambda key: key.backend == "splitk"
    with pytest.raises(AotError, match=r"computes .* wrongly: elements"):
        bench_cell(lab, PROBLEM, table=TABLE, copy_bytes_per_s=BANDWIDTH)
    lab, _, _ = make_lab(monkeypatch, candidates([]), lambda key, config: OURS_US)
    with pytest.raises(NotFoundError, match="absent"):
        bench_cell(lab, PROBLEM, table=TABLE, copy_bytes_per_s=BANDWIDTH)


def test_the_summary_is_of_geometric_means() -> None:
    """Catches arithmetic means, in which one good cell hides many bad ones."""
    cells = [
        cell_of(tokens=1, ours=2.0, cublas=8.0, floor=1.0),
        cell_of(tokens=8, ours=4.0, cublas=4.0, floor=1.0),
        cell_of(tokens=9, ours=1.0, cublas=16.0, floor=1.0),
    ]
    summary = summarize(cells)
    assert summary.cells == 3
    assert summary.geomean_vs_cublas == pytest.approx(4.0, abs=1e-4)
    assert summary.geomean_vs_cublas_m1_8 == pytest.approx(2.0, abs=1e-4)
    assert summary.geomean_over_floor == pytest.approx(2.0, abs=1e-4)
    assert summary.min_vs_cublas == 1.0
    assert summary.min_vs_published is None
    assert summarize(cells[2:]).geomean_vs_cublas_m1_8 is None


def test_published_figures_are_compared_through_the_library() -> None:
    """Catches times of two days held against each other, and cells at the floor that count."""
    cells = [
        cell_of(tokens=1, ours=2.0, cublas=8.0, floor=1.0),
        cell_of(tokens=2, ours=1.1, cublas=8.0, floor=1.0),
        cell_of(tokens=3, ours=2.0, cublas=9.0, floor=1.0),
    ]
    anchors = [
        Anchor(4096, 256, 1, cublas_us=6.0, published_us=3.0),
        # Within 1.15 of the floor: nothing can be much faster there.
        Anchor(4096, 256, 2, cublas_us=8.0, published_us=1.0),
    ]
    summary = summarize(cells, anchors)
    assert summary.cells == 2
    assert summary.min_vs_published == 2.0
    assert summary.geomean_vs_published == pytest.approx(math.sqrt(2.0 * (8 / 1.1) / 8), abs=1e-4)
    with pytest.raises(UsageError, match="1 cells of the anchors were not measured, first K=4096"):
        summarize(cells[:1], anchors)
    with pytest.raises(UsageError, match="no cell was measured"):
        summarize([])


times = st.floats(0.5, 20.0)


@given(
    st.lists(st.tuples(times, times, times, times, times), min_size=1, max_size=12), st.randoms()
)
def test_the_summary_depends_on_no_order_and_no_unit(
    rows: list[tuple[float, ...]], random: object
) -> None:
    """Catches cells that are paired with the anchors of another cell."""
    cells = [
        cell_of(tokens=m, ours=o, cublas=c, floor=f) for m, (o, c, f, _, _) in enumerate(rows, 1)
    ]
    anchors = [
        Anchor(4096, 256, m, cublas_us=c, published_us=p)
        for m, (_, _, _, c, p) in enumerate(rows, 1)
    ]
    expected = summarize(cells, anchors)
    random.shuffle(cells)  # type: ignore[attr-defined]
    random.shuffle(anchors)  # type: ignore[attr-defined]
    found = summarize(cells, anchors)
    for name in found.__struct_fields__:
        a, b = getattr(found, name), getattr(expected, name)
        assert a == b or a == pytest.approx(b, abs=2e-4)


def test_anchors_are_read_from_their_file(tmp_path: Path) -> None:
    """Catches the published default taken for their best, and the cold figure for ours."""
    path = tmp_path / "anchors.json"
    cell = {
        "K": 7168,
        "N": 256,
        "M": 1,
        "cublas_us": {"cold": 7.0, "after_producer": 7.4},
        "reference_us": {"cold": 2.6, "after_producer": 2.7},
        "reference_best_us": {"cold": 2.5, "after_producer": 2.6},
    }
    path.write_text(json.dumps({"device": "d", "cells": [cell]}))
    assert read_anchors(path) == (Anchor(7168, 256, 1, 7.4, 2.6),)
    for broken in ({"cells": [{"K": 1}]}, {}, {"cells": [{**cell, "cublas_us": {"cold": 1.0}}]}):
        path.write_text(json.dumps(broken))
        with pytest.raises(UsageError, match=r"anchors\.json: "):
            read_anchors(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_anchors(tmp_path / "absent.json")
