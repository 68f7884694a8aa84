"""The survey: what a tuning run measured, cell by cell, and which tile it chose there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from .backends import Tile, backend_name
from .dispatch import LibraryTile, Origin
from .errors import UsageError
from .files import read_regular
from .outfile import write_whole
from .problem import DType

__all__ = [
    "LIBRARY_TEXT",
    "SURVEY_SCHEMA",
    "CellKey",
    "Survey",
    "SurveyCell",
    "SurveyHeader",
    "SurveyTiming",
    "SurveyTrial",
    "cell_key",
    "choose",
    "read_survey",
    "tile_text",
    "write_survey",
]

SURVEY_SCHEMA = 1

MAX_SURVEY_BYTES = 256 << 20

LIBRARY_TEXT = "library"

TIE = 1.01
"""Tiles within this factor of the fastest count as equal: closer than two runs of one tile lie."""


class SurveyTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds a call and their spread."""

    us: float
    spread_us: float


class SurveyTrial(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """One tile in one cell: the first look, the full measurement if it got one, or why none.

    `full` is behind a producer, by which tiles are chosen; `cold` and `hot` tell of the fastest
    what they cost with weights in memory and in L2.
    """

    use: Tile
    quick_us: float | None = None
    full: SurveyTiming | None = None
    cold: SurveyTiming | None = None
    hot: SurveyTiming | None = None
    rejected: str = ""


class SurveyCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One (K, N, M): every tile that was tried, the library, the empty kernel, and the choice.

    `lacking` counts the candidates that the store has no usable kernel for. `library` is behind a
    producer; `library_cold` and `library_hot` as the trials' fields.
    """

    hidden: int
    experts: int
    tokens: int
    use: Tile | LibraryTile
    library: dict[str, SurveyTiming]
    empty: SurveyTiming
    trials: tuple[SurveyTrial, ...]
    lacking: int = 0
    weight_dtype: DType = DType.BF16
    library_cold: dict[str, SurveyTiming] = {}
    library_hot: dict[str, SurveyTiming] = {}

    @property
    def cublas(self) -> SurveyTiming:
        """The faster one of the library's products."""
        return min(self.library.values(), key=lambda timing: timing.us)

    @property
    def best(self) -> SurveyTrial | None:
        """The fastest right tile, or None where there is no right one."""
        right = [t for t in self.trials if t.full is not None and not t.rejected]
        return min(right, key=_full_us, default=None)

    @property
    def chosen(self) -> SurveyTiming:
        """What the choice costs."""
        for trial in self.trials:
            if trial.use == self.use and trial.full is not None:
                return trial.full
        return self.cublas


class SurveyHeader(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Where the figures come from, and the digests of the kernel sources that they speak of.

    `backends` names the families that were tried, where not all were.
    """

    target: str
    origin: Origin
    kernel_sources: dict[str, str]
    copy_bytes_per_s: float
    backends: tuple[str, ...] = ()


class Survey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All cells of a tuning run."""

    schema: int
    header: SurveyHeader
    cells: tuple[SurveyCell, ...]


class CellKey(NamedTuple):
    """What is measured: K, N, the type of the weights, and M. Also the order of cells.

    M is last: weights are made once for all M of a shape.
    """

    hidden: int
    experts: int
    weight_dtype: DType
    tokens: int


def cell_key(cell: SurveyCell) -> CellKey:
    """What a cell is of."""
    return CellKey(cell.hidden, cell.experts, cell.weight_dtype, cell.tokens)


def choose(
    trials: Iterable[SurveyTrial],
    library: Mapping[str, SurveyTiming],
    preferred: Tile | LibraryTile | None = None,
) -> Tile | LibraryTile:
    """The fastest right tile, or the library where that is faster.

    Of tiles that cannot be told apart (within TIE of the fastest) `preferred` wins, which is what
    the cell with one token less took: fewer artifacts then serve more cells. Never a tile that is
    slower than the library, or whose lead is less than its figures lie apart.
    """
    limit = min(timing.us for timing in library.values())
    right = [
        trial
        for trial in trials
        if trial.full is not None
        and not trial.rejected
        and trial.full.us + trial.full.spread_us < limit
    ]
    if not right:
        return LibraryTile()
    best = min(right, key=_full_us)
    for trial in right:
        if trial.use == preferred and _full_us(trial) <= TIE * _full_us(best):
            return trial.use
    return best.use


def tile_text(tile: Tile | LibraryTile) -> str:
    """A choice as people read it: `oneshot(16,8,7,4)`, `library`; words only where unusual."""
    if isinstance(tile, LibraryTile):
        return LIBRARY_TEXT
    fields = ((getattr(tile, f.name), f.default) for f in msgspec.structs.fields(tile))
    shown = (value for value, usual in fields if not isinstance(value, str) or value != usual)
    values = ",".join(map(str, shown))
    return f"{backend_name(tile)}({values})"


def read_survey(path: Path) -> Survey:
    """The survey of a file; raises UsageError naming file and field."""
    try:
        survey = msgspec.json.decode(read_regular(path, limit_bytes=MAX_SURVEY_BYTES), type=Survey)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the report: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: {error}", hint="name another file, or leave out --resume to start anew"
        ) from error
    if survey.schema != SURVEY_SCHEMA:
        raise UsageError(f"{path}: schema is {survey.schema}, this version reads {SURVEY_SCHEMA}")
    return survey


def write_survey(survey: Survey, path: Path) -> None:
    """Write a survey, one cell a line, whole or not at all; raises UsageError naming the file."""
    head = msgspec.json.encode(survey.header).decode()
    cells = ",\n".join(
        msgspec.json.encode(cell).decode() for cell in sorted(survey.cells, key=cell_key)
    )
    text = f'{{"schema":{survey.schema},\n"header":{head},\n"cells":[\n{cells}\n]}}\n'
    write_whole(path, text)


def _full_us(trial: SurveyTrial) -> float:
    return float("inf") if trial.full is None else trial.full.us
