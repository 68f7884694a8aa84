"""The table writer: from the cells of a survey to a tuning table, and to the text of its file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from .backends import DotprodTile, OneshotTile, Tile, dotprod, oneshot, works
from .dispatch import TABLE_SCHEMA, Figures, LibraryTile, Origin, Rule, Table
from .errors import UsageError
from .problem import FEW_TOKENS, MAX_EXPERTS, DType, Problem
from .search import candidate_tiles, tokens_span
from .survey import SurveyCell, cell_key

__all__ = [
    "for_other_targets",
    "format_table",
    "general_rules",
    "measured_rules",
    "write_table",
]

Choice = Tile | LibraryTile

HIDDEN_BANDS = (512, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192)
"""Upper ends of the spans of K that share a general rule; a tile of the upper end fits them all."""

LARGE_BANDS = (10240, 12288, 16384, 32768)
"""Further spans, as far as shapes of them were measured: smaller K say little about them."""

EXPERTS_BANDS = (64, 192, 256, 448, 512, 1024, 2048)
"""Upper ends of the spans of N; beyond the last nothing was measured, and the library is chosen.

256 and 512 are what routers have most often, and should not be judged by what lies above them.
"""

TOKENS_BANDS = ((1, 4), (5, 8), (9, 16), (17, 32), (33, FEW_TOKENS))

GENERAL_LEAD = 1.1
"""How many times as fast as the library a tile must be at a measured shape to serve others, too.

Beside a shape where a kernel led by a fiftieth it was level with the library; of 313 cells beside
measured ones none whose lead there was below 1.4 lost more than 9 % of it (docs/notes/kernels.md).
"""

GENERAL_REACH = 1.0
"""How far a general rule looks for shapes beside the nearest: one octave of K, or two of N."""


class _Span(NamedTuple):
    tokens: tuple[int, int]
    use: Choice


def write_table(
    cells: Iterable[SurveyCell],
    origin: Origin,
    *,
    name: str,
    target: str,
    backends: Sequence[str] = (),
) -> Table:
    """The tuning table of measured cells: one rule for each that was measured, then general ones.

    Every measured cell dispatches to what was chosen for it. `backends` names the families that
    were tried, where not all were: the table's source says so. Raises UsageError without cells.
    """
    ordered = sorted(cells, key=cell_key)
    if not ordered:
        raise UsageError(
            "no cell was measured, so there is no table to write",
            hint="build the candidates first: llbf16-aot build MANIFEST --candidates",
        )
    shapes = len({(cell.hidden, cell.experts, cell.weight_dtype) for cell in ordered})
    others = "with fp32 weights fp32_tiles decides for others"
    if any(cell.weight_dtype is DType.BF16 for cell in ordered):
        others = (
            f"other shapes follow the nearest measured one as far as its lead bears it, the "
            f"library takes the rest and all above {EXPERTS_BANDS[-1]} experts"
        )
    library = sum(isinstance(cell.use, LibraryTile) for cell in ordered)
    tried = f", of kernels only {' and '.join(backends)} were tried" if backends else ""
    return Table(
        schema=TABLE_SCHEMA,
        name=name,
        source=(
            f"measured for {target} in {len(ordered)} cells of {shapes} shapes, of which the "
            f"library is faster in {library}{tried}; {others}"
        ),
        rules=(*measured_rules(ordered), *general_rules(ordered)),
        measured=origin,
    )


def measured_rules(cells: Sequence[SurveyCell]) -> tuple[Rule, ...]:
    """One rule for each run of neighbouring tokens with one choice, shape by shape.

    A cell speaks for its own span of tokens; up to 16 also for those that were left out before it.
    """
    rules = []
    for shape, members in groupby(sorted(cells, key=cell_key), key=lambda cell: cell_key(cell)[:3]):
        runs: list[list[SurveyCell]] = []
        for cell in members:
            if runs and runs[-1][-1].use == cell.use and _adjoins(runs[-1][-1], cell):
                runs[-1].append(cell)
            else:
                runs.append([cell])
        end = 0
        for run in runs:
            start = end + 1 if run[0].tokens <= 16 else _span(run[0])[0]
            end = _span(run[-1])[1]
            rules.append(
                Rule(
                    use=run[0].use,
                    tokens=(start, end),
                    experts=(shape[1], shape[1]),
                    hidden=(shape[0], shape[0]),
                    weight_dtype=shape[2],
                    measured=Figures(
                        us=_ends(cell.chosen.us for cell in run),
                        cublas_us=_ends(cell.cublas.us for cell in run),
                        spread_us=round(max(cell.chosen.spread_us for cell in run), 3),
                    ),
                )
            )
    return tuple(rules)


def general_rules(cells: Sequence[SurveyCell]) -> tuple[Rule, ...]:
    """Rules for what was not measured: by K, N and M as a measured shape near by, or the library.

    Every supported problem with bf16 weights finds one, and no tile fails its family's `check`.
    With fp32 weights `fp32_tiles` decides what was not measured.
    """
    cells = [cell for cell in cells if cell.weight_dtype is DType.BF16]
    if not cells:
        return (Rule(use=LibraryTile()),)
    rules = [Rule(use=LibraryTile(), experts=(EXPERTS_BANDS[-1] + 1, MAX_EXPERTS))]
    reach = max(cell.hidden for cell in cells)
    first_hidden = 1
    for hidden in (*HIDDEN_BANDS, *(band for band in LARGE_BANDS if band <= reach)):
        first_experts = 1
        bands: list[tuple[tuple[int, int], tuple[_Span, ...]]] = []
        for experts in EXPERTS_BANDS:
            spans = _spans(cells, hidden, experts)
            if bands and bands[-1][1] == spans:
                bands[-1] = ((bands[-1][0][0], experts), spans)
            else:
                bands.append(((first_experts, experts), spans))
            first_experts = experts + 1
        rules += [
            Rule(use=span.use, tokens=span.tokens, experts=band, hidden=(first_hidden, hidden))
            for band, spans in bands
            for span in spans
        ]
        first_hidden = hidden + 1
    return (*rules, Rule(use=LibraryTile()))


def for_other_targets(table: Table) -> Table:
    """The same rules for targets that nobody measured, without figures.

    A tile of `oneshot` whose registers suffice on the measured target only gives way to the one
    most like it.
    """
    rules = []
    for rule in table.rules:
        use = rule.use
        if isinstance(use, OneshotTile):
            tokens = FEW_TOKENS if rule.tokens is None else rule.tokens[1]
            hidden = HIDDEN_BANDS[-1] if rule.hidden is None else rule.hidden[1]
            use = _portable(use, Problem(tokens, 1, hidden, weight_dtype=rule.weight_dtype))
        rules.append(msgspec.structs.replace(rule, use=use, measured=None))
    return msgspec.structs.replace(
        table,
        source=f"the rules that were measured for another target: {table.source}",
        rules=tuple(rules),
        measured=None,
    )


def _portable(use: OneshotTile, problem: Problem) -> Choice:
    """This tile, or the one most like it whose registers suffice on every target; or none."""
    if oneshot.portable(oneshot.config_for(use, problem)):
        return use
    fitting = (
        tile
        for tile in _oneshot_tiles(problem)
        if oneshot.portable(oneshot.config_for(tile, problem))
    )
    return _most_like(use, problem, fitting, problem)


def format_table(table: Table) -> str:
    """The text of a table's file: one rule a line, ranges first. `load_table` reads it back."""
    head: dict[str, object] = {
        "schema": table.schema,
        "name": table.name,
        "source": table.source,
    }
    if table.measured is not None:
        head["measured"] = msgspec.to_builtins(table.measured)
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rules = ",\n".join(f"    {_rule_text(rule)}" for rule in table.rules)
    return "\n".join(["{", *lines, '  "rules": [', rules, "  ]", "}"]) + "\n"


def _rule_text(rule: Rule) -> str:
    data = msgspec.to_builtins(rule)
    order = ("weight_dtype", "tokens", "experts", "hidden", "use", "measured")
    return json.dumps({name: data[name] for name in order if name in data})


def _span(cell: SurveyCell) -> tuple[int, int]:
    """The numbers of tokens for which a cell speaks, both ends included."""
    return tokens_span(cell.tokens, cell.weight_dtype)


def _adjoins(before: SurveyCell, cell: SurveyCell) -> bool:
    """Whether no span of tokens that nobody measured lies between two cells of a shape."""
    return cell.tokens <= 16 or _span(before)[1] + 1 >= _span(cell)[0]


def _ends(values: Iterable[float]) -> tuple[float, float]:
    found = [round(value, 3) for value in values]
    return min(found), max(found)


def _spans(cells: Sequence[SurveyCell], hidden: int, experts: int) -> tuple[_Span, ...]:
    """What to use up to this K and N for each span of tokens, neighbours with one choice merged."""
    spans: list[_Span] = []
    for tokens in TOKENS_BANDS:
        use = _general(cells, hidden, experts, tokens)
        if spans and spans[-1].use == use:
            spans[-1] = _Span((spans[-1].tokens[0], tokens[1]), use)
        else:
            spans.append(_Span(tokens, use))
    return tuple(spans)


def _general(
    cells: Sequence[SurveyCell], hidden: int, experts: int, tokens: tuple[int, int]
) -> Choice:
    """What serves a span of tokens up to this K and N: a tile like a measured one, or the library.

    It follows the nearest measured shape whose lead bears the way: GENERAL_LEAD must be left of it
    at the span's largest problem, if the kernel's time grew with K, N and M from there and the
    library's not at all. A shape that is no larger, and where no kernel leads by as much, ends the
    search, and so does the end of GENERAL_REACH; the library is chosen then.
    """
    within = [cell for cell in cells if tokens[0] <= cell.tokens <= tokens[1]] or cells
    shapes: dict[tuple[int, int], SurveyCell] = {}
    for cell in sorted(within, key=cell_key):
        shapes[cell.hidden, cell.experts] = cell  # the one with the most tokens

    def growth(cell: SurveyCell) -> float:
        weights = hidden * experts / (cell.hidden * cell.experts)
        return max(weights, 1.0) * max(tokens[1] / cell.tokens, 1.0)

    def apart(cell: SurveyCell) -> float:
        # K decides which tiles fit at all; N only how many thread blocks there are.
        return abs(math.log2(cell.hidden / hidden)) + abs(math.log2(cell.experts / experts)) / 2

    nearest_first = sorted(shapes.values(), key=lambda c: (apart(c), growth(c), cell_key(c)))
    for cell in nearest_first:
        if apart(cell) > max(GENERAL_REACH, apart(nearest_first[0])):
            break
        lead = cell.cublas.us / cell.chosen.us  # 1 where the library was chosen
        if lead >= GENERAL_LEAD * growth(cell):
            use = _fitted(cell.use, cell.hidden, Problem(tokens[1], 1, hidden))
            if not isinstance(use, LibraryTile):
                return use
        elif lead < GENERAL_LEAD and cell.hidden <= hidden and cell.experts <= experts:
            break
    return LibraryTile()


def _fitted(use: Choice, measured_hidden: int, problem: Problem) -> Choice:
    """A choice like this one for the largest problem of a span; the library where no tile fits."""
    if isinstance(use, OneshotTile):
        tiles = _oneshot_tiles(problem)
        if problem.hidden == measured_hidden and use in tiles:
            return use
        measured = msgspec.structs.replace(problem, hidden=measured_hidden)
        return _most_like(use, measured, tiles, problem)
    if isinstance(use, DotprodTile) and not works(dotprod.config_for(use, problem)):
        return LibraryTile()
    return use


def _oneshot_tiles(problem: Problem) -> list[OneshotTile]:
    """The tiles of `oneshot` that are worth trying for a problem."""
    return [tile for tile in candidate_tiles(problem) if isinstance(tile, OneshotTile)]


def _most_like(
    use: OneshotTile, measured: Problem, tiles: Iterable[OneshotTile], problem: Problem
) -> Choice:
    """Of tiles for a problem the one most like that of a measured one; the library without any.

    Alike in how they part the work first, in how a block does it last.
    """

    def unlike(tile: OneshotTile) -> tuple[float, ...]:
        rounds = oneshot.config_for(tile, problem).rounds
        return (
            abs(math.log2(tile.experts_tile / use.experts_tile)),
            abs(math.log2(tile.split_k / use.split_k)),
            abs(rounds - oneshot.config_for(use, measured).rounds),
            abs(math.log2(tile.vectors / use.vectors)),
            tile.release != use.release,
            tile.warps,
            tile.split_k,
            tile.vectors,
        )

    return min(tiles, key=unlike, default=LibraryTile())
