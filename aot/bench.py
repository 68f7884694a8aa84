"""The benchmark: what the tuned kernels cost beside the library, the floor and published figures.

Arithmetic and order only; the clock and the GPU are behind a `Lab`. All ratios are of one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from .dispatch import Origin, Table, dispatch
from .errors import AotError, LibraryChosenError, NotFoundError, UsageError
from .files import read_regular
from .problem import DType, Problem
from .survey import LIBRARY_TEXT, tile_text
from .timing import REPLAYS, ROUNDS, Bench, Call, Lab, Sample, Way, middle

__all__ = [
    "Anchor",
    "BenchCell",
    "BenchReport",
    "Summary",
    "bench_cell",
    "read_anchors",
    "summarize",
]

MAX_ANCHORS_BYTES = 16 << 20

NEAR_FLOOR = 1.15
"""Cells within this factor of the floor are not held against published kernels."""

OURS = "ours"
EMPTY = "empty"
COMPILED = "torch.compile"


class BenchCell(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"hidden": "K", "experts": "N", "tokens": "M"},
):
    """One (K, N, M), microseconds after the producer; `cold` and `hot` where they were asked for.

    `floor_us` is an empty dependent kernel plus the bytes of the weight over the copy bandwidth.
    Where `config` is `library` our time is the library's: the runtime takes it there.
    """

    hidden: int
    experts: int
    tokens: int
    ours_us: float
    ours_spread_us: float
    config: str
    cublas_us: float
    cublas_spread_us: float
    cublas: str
    floor_us: float
    empty_us: float
    weight_dtype: DType = DType.BF16
    torch_compile_us: float | None = None
    cold_us: float | None = None
    hot_us: float | None = None
    cublas_cold_us: float | None = None
    cublas_hot_us: float | None = None

    @property
    def vs_cublas(self) -> float:
        """How many times the library's speed."""
        return self.cublas_us / self.ours_us

    @property
    def over_floor(self) -> float:
        """How many times the floor's time."""
        return self.ours_us / self.floor_us


class Anchor(msgspec.Struct, frozen=True):
    """A cell of published kernels: the library's time and their best one, after the producer."""

    hidden: int
    experts: int
    tokens: int
    cublas_us: float
    published_us: float

    @property
    def vs_cublas(self) -> float:
        """How many times the library's speed, where and when it was measured."""
        return self.cublas_us / self.published_us


class Summary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Geometric means of a run, and the least advantage over published kernels by cell.

    Published kernels were measured on another day, so they are compared through the library's time;
    cells within 1.15 of the floor are left out of `min_vs_published`.
    """

    cells: int
    geomean_vs_cublas: float
    geomean_vs_cublas_m1_8: float | None
    geomean_over_floor: float
    min_vs_cublas: float
    min_vs_published: float | None = None
    geomean_vs_published: float | None = None


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark run: where and how, every cell, and the summary."""

    what: str
    commit: str
    target: str
    tuning: str
    origin: Origin
    copy_bytes_per_s: float
    summary: Summary
    cells: tuple[BenchCell, ...]

    def to_data(self) -> dict[str, object]:
        """The report as plain values, ready for JSON: what it says of its origin stands on top."""
        data: dict[str, object] = msgspec.to_builtins(self)
        cells, summary = data.pop("cells"), data.pop("summary")
        del data["origin"]
        return {
            **data,
            **msgspec.to_builtins(self.origin),
            "summary": summary,
            "cells": cells,
        }

    def encode(self) -> str:
        """The report as JSON, one cell a line."""
        head = self.to_data()
        del head["cells"]
        lines = [
            f"{msgspec.json.encode(name).decode()}: {msgspec.json.encode(value).decode()},"
            for name, value in head.items()
        ]
        rows = ",\n".join(msgspec.json.encode(cell).decode() for cell in self.cells)
        return "\n".join(["{", *lines, '"cells": [', rows, "]", "}"]) + "\n"


def bench_cell(
    lab: Lab,
    problem: Problem,
    *,
    table: Table,
    copy_bytes_per_s: float,
    ways: Sequence[Way] = (),
    torch_compile: bool = False,
) -> BenchCell:
    """Measure one cell in rounds, with what the table dispatches to.

    `ways` are measured beside the one after the producer. Raises NotFoundError where the store
    lacks the kernel, and AotError where its results are wrong.
    """
    bench = lab.bench(problem.hidden, problem.experts, problem.tokens, problem.weight_dtype)
    library = bench.library()
    calls = {**library, EMPTY: bench.empty()}
    ours, config = _ours(lab, bench, problem, table)
    if ours is not None:
        calls[OURS] = ours
    if torch_compile:
        compiled = bench.compiled()
        if not isinstance(compiled, str):
            calls[COMPILED] = compiled
    found = _rounds(bench, calls, Way.AFTER_PRODUCER)
    name = min(library, key=lambda one: found[one].us)
    mine = found.get(OURS, found[name])
    weight_bytes = problem.experts * problem.hidden * problem.weight_dtype.size_bytes
    timed = {way: _rounds(bench, {OURS: ours or library[name], **library}, way) for way in ways}
    return BenchCell(
        hidden=problem.hidden,
        experts=problem.experts,
        tokens=problem.tokens,
        ours_us=_digits(mine.us),
        ours_spread_us=_digits(mine.spread_us),
        config=config,
        cublas_us=_digits(found[name].us),
        cublas_spread_us=_digits(found[name].spread_us),
        cublas=name,
        floor_us=_digits(found[EMPTY].us + weight_bytes / copy_bytes_per_s * 1e6),
        empty_us=_digits(found[EMPTY].us),
        weight_dtype=problem.weight_dtype,
        torch_compile_us=_digits(found[COMPILED].us) if COMPILED in found else None,
        cold_us=_way(timed, Way.COLD, (OURS,)),
        hot_us=_way(timed, Way.HOT, (OURS,)),
        cublas_cold_us=_way(timed, Way.COLD, library),
        cublas_hot_us=_way(timed, Way.HOT, library),
    )


def summarize(cells: Iterable[BenchCell], anchors: Sequence[Anchor] = ()) -> Summary:
    """The summary of a run: over the anchors' cells where there are anchors, else over all.

    Raises UsageError where a cell of the anchors was not measured, or there is none at all.
    """
    found = {(cell.hidden, cell.experts, cell.tokens): cell for cell in cells}
    wanted = [(a.hidden, a.experts, a.tokens) for a in anchors] or list(found)
    missing = [key for key in wanted if key not in found]
    if missing:
        raise UsageError(
            f"{len(missing)} cells of the anchors were not measured, first K={missing[0][0]} "
            f"N={missing[0][1]} M={missing[0][2]}",
            hint="measure the manifest 'anchors' with all its tokens, or leave out --anchors",
        )
    rows = [found[key] for key in wanted]
    if not rows:
        raise UsageError("no cell was measured", hint="name a manifest that has routers")
    published = [
        (cell.vs_cublas / anchor.vs_cublas, cell.over_floor)
        for cell, anchor in zip(rows, anchors, strict=False)
    ]
    small = [cell.vs_cublas for cell in rows if cell.tokens <= 8]
    away = [ratio for ratio, over_floor in published if over_floor > NEAR_FLOOR]
    return Summary(
        cells=len(rows),
        geomean_vs_cublas=_digits(_geomean([cell.vs_cublas for cell in rows])),
        geomean_vs_cublas_m1_8=_digits(_geomean(small)) if small else None,
        geomean_over_floor=_digits(_geomean([cell.over_floor for cell in rows])),
        min_vs_cublas=_digits(min(cell.vs_cublas for cell in rows)),
        min_vs_published=_digits(min(away)) if away else None,
        geomean_vs_published=_digits(_geomean([r for r, _ in published])) if published else None,
    )


class _AnchorCell(msgspec.Struct):
    K: int
    N: int
    M: int
    cublas_us: dict[str, float]
    reference_best_us: dict[str, float]


class _AnchorFile(msgspec.Struct):
    cells: list[_AnchorCell]


def read_anchors(path: Path) -> tuple[Anchor, ...]:
    """Published figures from a file; raises UsageError naming file and field."""
    way = Way.AFTER_PRODUCER.value
    try:
        data = read_regular(path, limit_bytes=MAX_ANCHORS_BYTES)
        cells = msgspec.json.decode(data, type=_AnchorFile).cells
        found = tuple(
            Anchor(c.K, c.N, c.M, c.cublas_us[way], c.reference_best_us[way]) for c in cells
        )
    except OSError as error:
        raise UsageError(f"{path}: cannot read the anchors: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    except KeyError as error:
        raise UsageError(f"{path}: a cell has no figure {way}") from error
    if not all(a.cublas_us > 0 and a.published_us > 0 for a in found):
        raise UsageError(f"{path}: a time is not a positive number")
    return found


def _ours(lab: Lab, bench: Bench, problem: Problem, table: Table) -> tuple[Call | None, str]:
    try:
        key = dispatch(problem, lab.target, table)
    except LibraryChosenError:
        return None, LIBRARY_TEXT
    call = bench.kernel(key)
    if isinstance(call, str):
        raise NotFoundError(
            call, hint=f"run: llbf16-aot build MANIFEST --target {lab.target}, with this table"
        )
    fault = bench.fault(call)
    if fault:
        raise AotError(f"{key} computes {problem} wrongly: {fault}")
    return call, tile_text(table.tile_for(problem))


def _rounds(bench: Bench, calls: Mapping[str, Call], way: Way) -> dict[str, Sample]:
    """Every call in every round, so that a disturbance meets all that are compared alike."""
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        if way is Way.AFTER_PRODUCER:
            bench.settle(REPLAYS)
        for name, call in calls.items():
            samples[name].append(bench.time(call, way, REPLAYS))
    return {name: middle(found) for name, found in samples.items()}


def _way(timed: Mapping[Way, Mapping[str, Sample]], way: Way, names: Iterable[str]) -> float | None:
    if way not in timed:
        return None
    return _digits(min(timed[way][name].us for name in names))


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _digits(value: float) -> float:
    return round(value, 4)
