"""Tuning: measure every candidate that the store has, in two passes, and choose for each cell.

Decides only; the clock and the GPU are behind a `Lab`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime, timezone

from .backends import BACKENDS, Tile
from .dispatch import LibraryTile, Origin
from .errors import DriverError, NotFoundError
from .key import kernel_source_digest
from .problem import DType, Problem
from .search import candidate_tiles, key_for, representative_tokens
from .survey import CellKey, SurveyCell, SurveyHeader, SurveyTiming, SurveyTrial, choose
from .timing import PROTOCOL, QUICK_REPLAYS, REPLAYS, ROUNDS, Bench, Call, Lab, Sample, Way, middle

__all__ = ["FINALISTS", "header_of", "measured_tokens", "tune", "tune_cell"]

FINALISTS = 5
"""Candidates of a cell that are measured in full: the quick pass errs by less than their spread."""

NEAR = 1.05
"""Finalists within this factor of the fastest are also measured cold and hot."""

Cells = Mapping[CellKey, SurveyCell]


def measured_tokens(tokens: Iterable[int], weight_dtype: DType = DType.BF16) -> tuple[int, ...]:
    """The M to measure so that each of these has a figure: up to 16 itself, above the span's M."""
    wanted = set(tokens)
    small = {count for count in wanted if count <= 16}
    large = {
        count
        for count, (first, last) in representative_tokens(weight_dtype).items()
        if any(first <= one <= last for one in wanted)
    }
    return tuple(sorted(small | large))


def header_of(lab: Lab, *, backends: Collection[str] = ()) -> SurveyHeader:
    """Machine, software, day and protocol of what is about to be measured, and the families."""
    machine = lab.machine()
    return SurveyHeader(
        target=str(lab.target),
        origin=Origin(
            device=machine.device,
            driver=machine.driver,
            date=datetime.now(timezone.utc).date().isoformat(),
            versions=machine.versions,
            protocol=PROTOCOL,
        ),
        kernel_sources={name: kernel_source_digest(name) for name in BACKENDS},
        copy_bytes_per_s=lab.copy_bytes_per_s(),
        backends=tuple(sorted(backends)),
    )


def tune(
    wanted: Iterable[CellKey],
    *,
    lab: Callable[[], Lab],
    known: Cells | None = None,
    on_cell: Callable[[SurveyCell], None] | None = None,
    backends: Collection[str] = (),
) -> Iterator[SurveyCell]:
    """Measure what is wanted, shape by shape; what is known already is taken over.

    Where `backends` names families, only their tiles and the library are candidates. `lab` is asked
    only if something must be measured. Raises NotFoundError where the store has no candidate for a
    cell.
    """
    found = dict(known or {})
    for one in sorted(set(wanted)):
        cell = found.get(one)
        if cell is None:
            before = found.get(one._replace(tokens=one.tokens - 1))
            preferred = None if before is None else before.use
            cell = tune_cell(lab(), one, preferred=preferred, backends=backends)
            found[one] = cell
            if on_cell is not None:
                on_cell(cell)
        yield cell


def tune_cell(
    lab: Lab,
    wanted: CellKey,
    *,
    preferred: Tile | LibraryTile | None = None,
    backends: Collection[str] = (),
) -> SurveyCell:
    """Measure one cell: all candidates quickly, then the fastest right ones and the library."""
    hidden, experts, weight_dtype, tokens = wanted
    bench = lab.bench(hidden, experts, tokens, weight_dtype)
    problem = Problem(tokens, experts, hidden, weight_dtype=weight_dtype)
    trials, calls, lacking = _quick(lab, bench, problem, candidate_tiles(problem, backends))
    finalists = _finalists(bench, trials, calls, preferred)
    library = bench.library()
    full, rest = _full(bench, {tile: calls[tile] for tile in finalists}, library)
    near = min((sample.us for sample in full.values()), default=0.0) * NEAR
    for tile, sample in full.items():
        by_way = _other_ways(bench, calls[tile]) if sample.us <= near else {}
        trials[tile] = SurveyTrial(
            use=tile,
            quick_us=trials[tile].quick_us,
            full=_timing(sample),
            cold=by_way.get(Way.COLD),
            hot=by_way.get(Way.HOT),
        )
    timings = {name: _timing(rest[name]) for name in library}
    elsewhere = {name: _other_ways(bench, call) for name, call in library.items()}
    return SurveyCell(
        hidden=hidden,
        experts=experts,
        tokens=tokens,
        use=choose(trials.values(), timings, preferred),
        library=timings,
        empty=_timing(rest[EMPTY]),
        trials=tuple(trials.values()),
        lacking=lacking,
        weight_dtype=weight_dtype,
        library_cold={name: by_way[Way.COLD] for name, by_way in elsewhere.items()},
        library_hot={name: by_way[Way.HOT] for name, by_way in elsewhere.items()},
    )


EMPTY = "empty"


def _quick(
    lab: Lab, bench: Bench, problem: Problem, tiles: Iterable[Tile]
) -> tuple[dict[Tile, SurveyTrial], dict[Tile, Call], int]:
    """A first look at every candidate, and how many the store lacks; these are not listed.

    A report of a store with the likeliest candidates would be mostly of the others. One that the
    driver refuses has a trial and no call.
    """
    trials: dict[Tile, SurveyTrial] = {}
    calls: dict[Tile, Call] = {}
    lacking: list[str] = []
    bench.settle(REPLAYS)
    for tile in tiles:
        call = bench.kernel(key_for(tile, problem, lab.target))
        if isinstance(call, str):
            lacking.append(call)
            continue
        try:
            us = bench.time(call, Way.AFTER_PRODUCER, QUICK_REPLAYS).us
        except DriverError as error:
            trials[tile] = SurveyTrial(use=tile, rejected=error.message)
            continue
        trials[tile] = SurveyTrial(use=tile, quick_us=round(us, 4))
        calls[tile] = call
    if not calls:
        reasons = (*(trial.rejected for trial in trials.values()), *lacking, "no tile fits")
        raise NotFoundError(
            f"the store has no candidate for hidden {problem.hidden}, {problem.tokens} tokens on "
            f"{lab.target}: {reasons[0]}",
            hint=f"run: llbf16-aot build MANIFEST --candidates --target {lab.target}",
        )
    return trials, calls, len(lacking)


def _finalists(
    bench: Bench,
    trials: dict[Tile, SurveyTrial],
    calls: Mapping[Tile, Call],
    preferred: Tile | LibraryTile | None,
) -> list[Tile]:
    """The fastest candidates that compute the right thing, and the neighbouring cell's choice."""
    found: list[Tile] = []
    for tile in sorted(calls, key=lambda tile: trials[tile].quick_us or 0.0):
        if len(found) >= FINALISTS and tile != preferred:
            continue
        fault = bench.fault(calls[tile])
        if fault:
            trials[tile] = SurveyTrial(use=tile, quick_us=trials[tile].quick_us, rejected=fault)
        else:
            found.append(tile)
    return found


def _full(
    bench: Bench, finalists: Mapping[Tile, Call], library: Mapping[str, Call]
) -> tuple[dict[Tile, Sample], dict[str, Sample]]:
    """Full measurements in rounds, so that a disturbance meets all that are compared alike."""
    others = {**library, EMPTY: bench.empty()}
    tiles: dict[Tile, list[Sample]] = {tile: [] for tile in finalists}
    rest: dict[str, list[Sample]] = {name: [] for name in others}
    for _ in range(ROUNDS):
        bench.settle(REPLAYS)
        for tile, call in finalists.items():
            tiles[tile].append(bench.time(call, Way.AFTER_PRODUCER, REPLAYS))
        for name, call in others.items():
            rest[name].append(bench.time(call, Way.AFTER_PRODUCER, REPLAYS))
    return (
        {tile: middle(samples) for tile, samples in tiles.items()},
        {name: middle(samples) for name, samples in rest.items()},
    )


def _other_ways(bench: Bench, call: Call) -> dict[Way, SurveyTiming]:
    """What a call costs cold and hot: told beside the choice, which is made behind a producer."""
    return {way: _timing(bench.time(call, way, REPLAYS)) for way in (Way.COLD, Way.HOT)}


def _timing(sample: Sample) -> SurveyTiming:
    return SurveyTiming(round(sample.us, 4), round(sample.spread_us, 4))
