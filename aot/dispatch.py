"""Dispatch: the one pure function from problem, target and tuning table to a compile key.

The builder and the runtime call the same function, so what was built is what is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import msgspec

from .backends import BACKENDS, OPERANDS, Tile, backend_name
from .errors import (
    ConfigError,
    LibraryChosenError,
    TuningTableError,
    UnsupportedProblemError,
)
from .files import read_regular
from .fp32_tiles import default_tile
from .key import CompileKey, check_target
from .problem import FEW_TOKENS, DType, Problem, Target

__all__ = [
    "PACKAGED_TABLES",
    "TABLE_SCHEMA",
    "Figures",
    "LibraryTile",
    "Origin",
    "Rule",
    "Table",
    "dispatch",
    "load_table",
    "warmup_keys",
]

TABLE_SCHEMA = 1

MAX_TABLE_BYTES = 16 << 20

PACKAGED_TABLES = ("default", "reference")
"""Tables that come with the package: ours, and the published dispatch rule."""

_TABLES = Path(__file__).parent / "tables"


class LibraryTile(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="library", tag_field="backend"
):
    """In place of a tile: the library's product is faster here than every kernel of ours."""


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rule was chosen for: microseconds a call, least and most over the rule's tokens.

    `us` is of the rule's own tile, `cublas_us` of the library, `spread_us` the largest
    interquartile range of the first.
    """

    us: tuple[float, float]
    cublas_us: tuple[float, float]
    spread_us: float


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tile for the problems within its ranges, both ends included.

    An absent range of experts or hidden sizes admits all, one of tokens all up to FEW_TOKENS.
    `weight_dtype` tells for which weights the rule is, and bf16 goes without saying. A rule admits
    no x of a type that its tile's family does not take; the library is measured with x of bf16, and
    preferred for that only.
    """

    use: Tile | LibraryTile
    tokens: tuple[int, int] | None = None
    experts: tuple[int, int] | None = None
    hidden: tuple[int, int] | None = None
    measured: Figures | None = None
    weight_dtype: DType = DType.BF16

    def admits(self, problem: Problem) -> bool:
        """Whether the rule is for the problem's operands, and the problem within every range."""
        # What tells most rules apart comes first: a table has hundreds, a manifest thousands of
        # problems.
        hidden, experts = self.hidden, self.experts
        if hidden is not None and not hidden[0] <= problem.hidden <= hidden[1]:
            return False
        if experts is not None and not experts[0] <= problem.experts <= experts[1]:
            return False
        first, last = self.tokens or (1, FEW_TOKENS)
        if not first <= problem.tokens <= last or self.weight_dtype is not problem.weight_dtype:
            return False
        if isinstance(self.use, LibraryTile):
            return problem.x_dtype is DType.BF16
        return (problem.x_dtype, problem.weight_dtype) in OPERANDS[backend_name(self.use)]


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the figures of a table come from: machine, software, day and way of measuring."""

    device: str
    driver: str
    date: str
    versions: dict[str, str]
    protocol: str


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tuning table for one target: the first rule that admits a problem decides.

    The last rule is for bf16 weights and has no range, so every problem with such weights and up to
    FEW_TOKENS tokens finds a rule; one with more that finds none is left to the library. One with
    fp32 weights that finds none is served by `fp32_tiles.default_tile`.
    """

    schema: int
    name: str
    source: str
    rules: tuple[Rule, ...]
    measured: Origin | None = None

    def tile_for(self, problem: Problem) -> Tile | LibraryTile:
        """What the first rule that admits the problem says."""
        for rule in self.rules:
            if rule.admits(problem):
                return rule.use
        if problem.weight_dtype is DType.FP32:
            return default_tile(problem)
        if problem.tokens > FEW_TOKENS:
            return LibraryTile()
        raise TuningTableError(f"tuning table {self.name} has no rule for {problem}")


def load_table(name: str, target: Target) -> Table:
    """The tuning table of a name for a target.

    `name` is `default`, `reference`, or the path of a table or of a folder of tables. In a folder,
    `sm_90.json` serves every target of that number, `sm_100.json` also later minor versions of the
    same major one, `any.json` all others. Raises TuningTableError, naming file and field.
    """
    return _load_table(str(_table_path(name, target)))


def _table_path(name: str, target: Target) -> Path:
    if name in PACKAGED_TABLES:
        folder = _TABLES / name
    else:
        folder = Path(name)
        if os.sep not in name and not folder.exists():
            raise TuningTableError(
                f"tuning table {name!r} is neither {' nor '.join(PACKAGED_TABLES)} nor a path",
                hint="name a packaged table, or the path of a table or of a folder of tables",
            )
    if not folder.is_dir():
        return folder
    for candidate in (f"sm_{target.number}", f"sm_{target.major}0", "any"):
        path = folder / f"{candidate}.json"
        if path.exists():
            return path
    raise TuningTableError(
        f"{folder}: no tuning table for {target}",
        hint=f"add sm_{target.number}.json, or any.json for all targets",
    )


@lru_cache(maxsize=64)
def _load_table(path: str) -> Table:
    try:
        data = read_regular(path, limit_bytes=MAX_TABLE_BYTES)
        table = msgspec.json.decode(data, type=Table)
    except OSError as error:
        raise TuningTableError(f"{path}: cannot read the tuning table: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise TuningTableError(f"{path}: {error}") from error
    if table.schema != TABLE_SCHEMA:
        raise TuningTableError(
            f"{path}: schema is {table.schema}, this version reads {TABLE_SCHEMA}"
        )
    last = table.rules[-1] if table.rules else None
    if last is None or not (
        last.tokens is last.experts is last.hidden is None and last.weight_dtype is DType.BF16
    ):
        raise TuningTableError(
            f"{path}: the last rule must be for bf16 weights and have no range, "
            "so that every problem finds a rule"
        )
    for number, rule in enumerate(table.rules):
        if isinstance(rule.use, LibraryTile):
            continue
        family = backend_name(rule.use)
        if rule.weight_dtype not in {weight for _, weight in OPERANDS[family]}:
            raise TuningTableError(
                f"{path}: rules[{number}] uses {family} for {rule.weight_dtype.value} weights, "
                "which that family does not take"
            )
    return table


def dispatch(problem: Problem, target: Target, table: Table) -> CompileKey:
    """The compile key that serves a problem on a target.

    Pure: equal arguments give an equal key in every process. Raises UnsupportedProblemError where
    no kernel computes the problem, its subclass LibraryChosenError where the table leaves it to the
    library, and TargetError where no kernel can be built for the target.
    """
    problem.check()
    check_target(target)
    tile = table.tile_for(problem)
    if isinstance(tile, LibraryTile):
        raise LibraryChosenError(f"the library is faster here, by the tuning table {table.name}")
    backend = BACKENDS[backend_name(tile)]
    config = backend.config_for(tile, problem)
    try:
        backend.check(config)
    except ConfigError as error:
        raise UnsupportedProblemError(
            f"tuning table {table.name} chooses for {problem} what cannot work: {error.message}"
        ) from error
    return CompileKey.of(config, problem, target)


def warmup_keys(
    shapes: Iterable[tuple[int, int]],
    tokens: Iterable[int],
    *,
    target: Target,
    tuning: str = "default",
    out_dtype: DType = DType.FP32,
    pdl: bool = True,
) -> tuple[CompileKey, ...]:
    """The distinct keys that routers of these `(hidden, experts)` ask for at these token counts.

    Each key stands once, in the order of its first use: shapes in their order, tokens within.
    Where the table leaves a problem to the library there is nothing to warm up. Raises what
    `dispatch` raises for all else.
    """
    table = load_table(tuning, target)
    counts = tuple(tokens)
    keys: dict[CompileKey, None] = {}
    for hidden, experts in shapes:
        for count in counts:
            try:
                key = dispatch(Problem(count, experts, hidden, out_dtype, pdl), target, table)
            except LibraryChosenError:
                continue
            keys[key] = None
    return tuple(keys)
