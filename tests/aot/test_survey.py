"""The survey: how a cell's choice falls, and that its file says what was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from llbf16_aot.backends import OneshotTile, SplitkTile
from llbf16_aot.dispatch import LibraryTile, Origin
from llbf16_aot.errors import UsageError
from llbf16_aot.survey import (
    Survey,
    SurveyCell,
    SurveyHeader,
    SurveyTiming,
    SurveyTrial,
    choose,
    read_survey,
    tile_text,
    write_survey,
)

A, B, C = OneshotTile(16, 8, 7, 4), OneshotTile(32, 8, 7, 4), SplitkTile(6, 4)
LIBRARY = {"F.linear": SurveyTiming(7.0, 0.1), "torch.mm": SurveyTiming(6.0, 0.1)}


def trial(use: OneshotTile | SplitkTile, us: float | None, rejected: str = "") -> SurveyTrial:
    full = None if us is None else SurveyTiming(us, 0.01)
    return SurveyTrial(use=use, quick_us=us, full=full, rejected=rejected)


def test_the_fastest_right_tile_is_chosen() -> None:
    """Catches a choice by the quick pass, of a rejected tile, or of the slowest."""
    assert choose([trial(A, 2.0), trial(B, 1.5), trial(C, 3.0)], LIBRARY) == B
    assert choose([trial(A, 2.0), trial(B, 1.5, "wrong")], LIBRARY) == A
    quick = SurveyTrial(use=B, quick_us=0.1)
    assert choose([trial(A, 2.0), quick], LIBRARY) == A


@pytest.mark.parametrize("us", [6.0, 6.5])
def test_where_the_library_is_not_slower_it_is_chosen(us: float) -> None:
    """Catches a kernel that is slower than the faster one of the library's products."""
    assert choose([trial(A, us)], LIBRARY) == LibraryTile()
    assert choose([trial(A, 5.98)], LIBRARY) == A
    assert choose([], LIBRARY) == LibraryTile()


def test_a_lead_smaller_than_its_figures_lie_apart_is_none() -> None:
    """Catches a kernel chosen by noise: 7.28 us, give or take 3.13, against 7.79 was one."""
    noisy = SurveyTrial(use=A, quick_us=5.5, full=SurveyTiming(5.5, 0.6))
    assert choose([noisy], LIBRARY) == LibraryTile()
    assert choose([noisy, trial(B, 5.8)], LIBRARY) == B


def test_of_equals_the_neighbours_choice_wins_and_only_of_equals() -> None:
    """Catches a table that changes tiles with every M for noise, and one that keeps slow tiles."""
    near = [trial(A, 2.0), trial(B, 2.01)]
    assert choose(near, LIBRARY, B) == B
    assert choose(near, LIBRARY, C) == A
    assert choose([trial(A, 2.0), trial(B, 2.1)], LIBRARY, B) == A
    assert choose([trial(A, 5.98), trial(B, 6.01)], LIBRARY, B) == A
    assert choose(near, LIBRARY, LibraryTile()) == A


def survey_of(*cells: SurveyCell) -> Survey:
    header = SurveyHeader(
        target="sm_90a",
        origin=Origin(device="d", driver="1", date="2026-11-29", versions={}, protocol="p"),
        kernel_sources={"oneshot": "0" * 64},
        copy_bytes_per_s=4.2e12,
    )
    return Survey(schema=1, header=header, cells=cells)


def cell_of(tokens: int) -> SurveyCell:
    return SurveyCell(
        hidden=7168,
        experts=256,
        tokens=tokens,
        use=A,
        library=LIBRARY,
        empty=SurveyTiming(0.75, 0.0),
        trials=(trial(A, 2.0), trial(C, None, "not in the store")),
    )


def test_a_survey_reads_back_in_order_of_its_cells(tmp_path: Path) -> None:
    """Catches a report that cannot be gone on with."""
    path = tmp_path / "deep" / "report.json"
    write_survey(survey_of(cell_of(9), cell_of(1)), path)
    assert read_survey(path) == survey_of(cell_of(1), cell_of(9))
    assert len(path.read_text().splitlines()) == 6
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]


def test_figures_of_a_cell_come_from_its_choice() -> None:
    """Catches a table that shows the library's time as ours, or the other way round."""
    one = cell_of(1)
    assert (one.chosen.us, one.cublas.us) == (2.0, 6.0)
    assert one.best is not None
    assert one.best.use == A


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON|truncated"),
        ('{"schema": 1}', "header"),
        (
            '{"schema": 2, "header": {"target": "", "origin": {"device": "", "driver": "", '
            '"date": "", "versions": {}, "protocol": ""}, "kernel_sources": {}, '
            '"copy_bytes_per_s": 1}, "cells": []}',
            "schema is 2",
        ),
    ],
)
def test_a_file_that_is_no_survey_is_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    """Catches a traceback for a report that was cut short."""
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"report\.json: .*({message})"):
        read_survey(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_survey(tmp_path / "absent.json")


def test_tiles_are_written_as_people_read_them() -> None:
    """Catches labels in tables and plots that do not say which tile it was."""
    assert [tile_text(t) for t in (A, C, LibraryTile())] == [
        "oneshot(16,8,7,4)",
        "splitk(6,4,16,256)",
        "library",
    ]
    assert tile_text(msgspec.structs.replace(A, release="wait")) == "oneshot(16,8,7,4,wait)"
