"""The arithmetic of the host-cost reports: a fault here is a fault in every figure."""

from __future__ import annotations

import json
from pathlib import Path

import host_report
import pytest
from host_report import FLOOR, JIT, LINEAR, OURS, Timing


def timing(row: str, us: float, *, run: str = "plain", tokens: int = 1) -> Timing:
    return Timing(run, "ordinary", 7168, 256, tokens, row, us, us - 0.1, us + 0.1)


def cell(tokens: int, ours: float, *, compiler: bool = True) -> list[Timing]:
    found = [
        timing(LINEAR, 24.0, tokens=tokens),
        timing(OURS, ours, tokens=tokens),
        timing(f"{FLOOR}ctypes", 9.0, tokens=tokens),
        timing(f"{FLOOR}cuda.bindings", 8.0, tokens=tokens),
        timing("launch, ctypes", 1.0, tokens=tokens),
    ]
    if compiler:
        found += [
            timing(LINEAR, 30.0, run="compiler", tokens=tokens),
            timing(OURS, 11.0, run="compiler", tokens=tokens),
            timing(f"{FLOOR}ctypes", 2.0, run="compiler", tokens=tokens),
            timing(JIT, 22.0, run="compiler", tokens=tokens),
        ]
    return found


def test_a_cell_compares_rows_of_one_run_only() -> None:
    """Ratios across processes would hold the difference between the processes too."""
    (found,) = host_report.cells(cell(1, 10.0))
    assert found.ratio_to_linear == 10.0 / 24.0
    assert found.ratio_to_jit_call == 11.0 / 22.0
    assert (found.floor_us, found.floor_row) == (8.0, f"{FLOOR}cuda.bindings")
    assert found.us_above_floor == 2.0


def test_the_headline_is_the_worst_cell() -> None:
    """A mean would hide a shape or an M that misses the limit."""
    figures = host_report.headline(host_report.cells(cell(1, 10.0) + cell(8, 12.0) + cell(16, 9.0)))
    assert figures["ratio_to_linear"] == 12.0 / 24.0
    assert figures["us_above_floor"] == 4.0
    assert figures["us_above_floor_median"] == 2.0


def test_a_ratio_that_some_cell_lacks_is_null() -> None:
    """The worst of the cells that happen to have it is not the worst cell."""
    part = host_report.cells(cell(1, 10.0) + cell(8, 12.0, compiler=False))
    assert host_report.headline(part)["ratio_to_jit_call"] is None
    none = host_report.cells(cell(1, 10.0, compiler=False))
    assert host_report.headline(none)["ratio_to_jit_call"] is None
    assert host_report.headline(none)["ratio_to_linear"] == 10.0 / 24.0


def test_a_cell_without_a_row_that_it_needs_is_an_error() -> None:
    """A report without our own call would pass for one with good figures."""
    with pytest.raises(KeyError):
        host_report.cells([one for one in cell(1, 10.0) if one.row != OURS])


def test_every_row_begins_a_round_and_every_round_has_every_row() -> None:
    """A row that always runs behind the same one inherits its caches and its queue."""
    rows = ("a", "b", "c")
    rounds = list(host_report.turns(rows, 6))
    assert [order[0] for order in rounds] == ["a", "b", "c", "a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)


def test_quartiles_of_few_values() -> None:
    """One round must not end in an error after everything was measured."""
    assert host_report.quartiles([4.0]) == (4.0, 4.0, 4.0)
    assert host_report.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_a_line_is_told_from_a_curve() -> None:
    """Cost that grows faster than the number of keys must show in the residual."""
    line = host_report.fit({10: 6.0, 100: 15.0, 1000: 105.0})
    assert line.ms_per_key == pytest.approx(0.1)
    assert line.fixed_ms == pytest.approx(5.0)
    assert line.largest_residual_ms == pytest.approx(0.0, abs=1e-9)
    curve = host_report.fit({10: 0.1, 100: 10.0, 1000: 1000.0})
    assert curve.largest_residual_ms > 30
    with pytest.raises(ValueError, match="two numbers"):
        host_report.fit({10: 1.0})


def test_the_compiler_is_found_before_anything_else_and_the_rest_stays(tmp_path: Path) -> None:
    """Behind the wheels' folder another version of a shared package would be taken."""
    before = {"PYTHONPATH": "/wheels", "HOME": "/home"}
    after = host_report.with_compiler(before, tmp_path)
    packages = tmp_path / "nvidia_cutlass_dsl" / "dsl_packages"
    assert after["PYTHONPATH"].split(":") == [str(tmp_path), str(packages), "/wheels"]
    assert after["HOME"] == "/home"
    assert before["PYTHONPATH"] == "/wheels"
    assert host_report.with_compiler({}, tmp_path)["PYTHONPATH"].count(":") == 1


def test_a_report_names_the_fields_of_its_records(tmp_path: Path) -> None:
    """Rows as bare lists can be read by nobody."""
    path = tmp_path / "new" / "report.json"
    found = host_report.cells(cell(1, 10.0, compiler=False))
    host_report.write(path, {"cells": found, "none": None, "met": {"a": True}, "n": 3})
    report = json.loads(path.read_text())
    assert report["cells"][0]["ratio_to_linear"] == 0.4167
    assert report["cells"][0]["ratio_to_jit_call"] is None
    assert (report["none"], report["met"], report["n"]) == (None, {"a": True}, 3)
