"""The arithmetic of the host-cost reports: pure, so that a machine without a GPU can check it."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "Cell",
    "Fit",
    "Timing",
    "cells",
    "cpu_name",
    "fit",
    "headline",
    "micros",
    "over",
    "quartiles",
    "turns",
    "with_compiler",
    "write",
]

FLOOR = "torch.empty + "
"""Prefix of the rows that allocate and launch and do nothing else: the cheapest is the floor."""

LINEAR = "F.linear"
OURS = "load_and_run"
JIT = "CuTe DSL call"


class Timing(NamedTuple):
    """Microseconds of host time a call of one row in one cell: median and quartiles of rounds."""

    run: str
    mode: str
    hidden: int
    experts: int
    tokens: int
    row: str
    us: float
    low_us: float
    high_us: float


class Cell(NamedTuple):
    """What one shape, M and mode shows. Ratios are of rows of the same run, in turns."""

    mode: str
    hidden: int
    experts: int
    tokens: int
    ours_us: float
    linear_us: float
    floor_us: float
    floor_row: str
    jit_call_us: float | None
    ratio_to_linear: float
    ratio_to_jit_call: float | None
    us_above_floor: float


class Fit(NamedTuple):
    """A straight line through the cost of n keys: milliseconds a key, and without any key."""

    ms_per_key: float
    fixed_ms: float
    largest_residual_ms: float


def turns(rows: Sequence[str], rounds: int) -> Iterable[tuple[str, ...]]:
    """The rows of each round, every round starting one further: no row always has one neighbour."""
    for number in range(rounds):
        start = number % len(rows)
        yield (*rows[start:], *rows[:start])


def micros(total_ns: int, calls: int) -> float:
    """Microseconds a call."""
    return total_ns / calls / 1e3


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile; one value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def cells(timings: Iterable[Timing]) -> list[Cell]:
    """One cell for each mode, shape and M; raises KeyError where a row that it needs is absent.

    Figures are those of the run without the compiler; the ratio to the DSL's call, and its time,
    are those of the run with it, where there is one.
    """
    found: dict[tuple[str, int, int, int], dict[tuple[str, str], float]] = {}
    for one in timings:
        place = (one.mode, one.hidden, one.experts, one.tokens)
        found.setdefault(place, {})[one.run, one.row] = one.us
    return [_cell(place, rows) for place, rows in found.items()]


def _cell(place: tuple[str, int, int, int], rows: Mapping[tuple[str, str], float]) -> Cell:
    ours, linear = rows["plain", OURS], rows["plain", LINEAR]
    floors = {
        row: us for (run, row), us in rows.items() if run == "plain" and row.startswith(FLOOR)
    }
    floor_row = min(floors, key=lambda row: floors[row])
    jit = rows.get(("compiler", JIT))
    return Cell(
        *place,
        ours_us=ours,
        linear_us=linear,
        floor_us=floors[floor_row],
        floor_row=floor_row,
        jit_call_us=jit,
        ratio_to_linear=ours / linear,
        ratio_to_jit_call=None if jit is None else rows["compiler", OURS] / jit,
        us_above_floor=ours - floors[floor_row],
    )


def headline(found: Sequence[Cell]) -> dict[str, float | None]:
    """The three figures, each of its worst cell; the median of the cells beside it."""
    values: dict[str, list[float | None]] = {
        "ratio_to_linear": [cell.ratio_to_linear for cell in found],
        "ratio_to_jit_call": [cell.ratio_to_jit_call for cell in found],
        "us_above_floor": [cell.us_above_floor for cell in found],
    }
    summary: dict[str, float | None] = {}
    for name, figures in values.items():
        known = [figure for figure in figures if figure is not None]
        whole = bool(known) and len(known) == len(figures)
        summary[name] = max(known) if whole else None
        summary[f"{name}_median"] = statistics.median(known) if whole else None
    return summary


def over(values: Sequence[float], base: Sequence[float]) -> float:
    """How far the median of one lies above the median of another."""
    return statistics.median(values) - statistics.median(base)


def fit(points: Mapping[int, float]) -> Fit:
    """The least-squares line through (keys, milliseconds); raises ValueError below two points."""
    if len(points) < 2:
        raise ValueError("a line needs two numbers of keys")
    keys, ms = list(points), list(points.values())
    slope, intercept = statistics.linear_regression(keys, ms)
    residuals = [abs(value - slope * n - intercept) for n, value in zip(keys, ms, strict=True)]
    return Fit(slope, intercept, max(residuals))


def with_compiler(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """An environment whose Python finds the compiler that was unpacked into a folder."""
    folder = folder.resolve()
    paths = [str(folder), str(folder / "nvidia_cutlass_dsl" / "dsl_packages")]
    if environment.get("PYTHONPATH"):
        paths.append(environment["PYTHONPATH"])
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def cpu_name() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report as JSON, figures rounded to what they are good for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_rounded(report), indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    if hasattr(value, "_asdict"):
        return _rounded(value._asdict())
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value
