"""The plot: a benchmark's cells as SVG, one panel a shape, M along, microseconds up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple
from xml.sax.saxutils import escape

from .bench import Anchor, BenchCell

__all__ = ["plot"]

COLUMNS = 4
PANEL = (270, 200)
MARGIN = (34, 12, 24, 30)
"""Left, right, top and bottom space of a panel, for its labels."""

HEAD = 64
FONT = "font-family='Helvetica, Arial, sans-serif'"


class _Series(NamedTuple):
    """A line of a panel: its name, colour, dash pattern (empty: solid), and points (M, us)."""

    name: str
    colour: str
    dash: str
    points: tuple[tuple[int, float], ...]


def plot(cells: Iterable[BenchCell], *, title: str, anchors: Sequence[Anchor] = ()) -> str:
    """The SVG document of a run; lines differ by dash and marker too, not by colour alone."""
    shapes = [
        (shape, tuple(members))
        for shape, members in groupby(
            sorted(cells, key=lambda cell: (cell.hidden, cell.experts, cell.tokens)),
            key=lambda cell: (cell.hidden, cell.experts),
        )
    ]
    rows = max(1, math.ceil(len(shapes) / COLUMNS))
    width, height = COLUMNS * PANEL[0] + 20, HEAD + rows * PANEL[1] + 10
    body = []
    names: dict[str, _Series] = {}
    for number, ((hidden, experts), members) in enumerate(shapes):
        x = 10 + number % COLUMNS * PANEL[0]
        y = HEAD + number // COLUMNS * PANEL[1]
        series = _series(members, anchors)
        names |= {one.name: one for one in series if one.points}
        body.append(f"<g transform='translate({x} {y})'>")
        body += _panel(f"K {hidden}, N {experts}", series)
        body.append("</g>")
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' {FONT} role='img'>",
            f"<title>{escape(title)}</title>",
            f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
            f"<text x='14' y='24' font-size='15' font-weight='bold'>{escape(title)}</text>",
            *_legend(names.values()),
            *body,
            "</svg>\n",
        ]
    )


def _series(cells: Sequence[BenchCell], anchors: Sequence[Anchor]) -> list[_Series]:
    published = {(a.hidden, a.experts, a.tokens): a for a in anchors}
    theirs = tuple(
        # Through the library: what they would take beside the library's time of this run.
        (cell.tokens, cell.cublas_us / published[key].vs_cublas)
        for cell in cells
        if (key := (cell.hidden, cell.experts, cell.tokens)) in published
    )
    compiled = tuple(
        (cell.tokens, cell.torch_compile_us) for cell in cells if cell.torch_compile_us is not None
    )
    return [
        _Series("cuBLAS", "#b3261e", "", tuple((c.tokens, c.cublas_us) for c in cells)),
        _Series("torch.compile", "#8e6bb0", "2 3", compiled),
        _Series("published kernels (through cuBLAS)", "#c77700", "6 3", theirs),
        _Series("ours", "#0b57d0", "", tuple((c.tokens, c.ours_us) for c in cells)),
        _Series(
            "floor (empty kernel + weight bytes)",
            "#5f6368",
            "3 3",
            tuple((c.tokens, c.floor_us) for c in cells),
        ),
    ]


def _legend(series: Iterable[_Series]) -> list[str]:
    found = []
    x = 14
    for one in series:
        found.append(_line(one, ((x, 42), (x + 26, 42))))
        found.append(f"<text x='{x + 32}' y='46' font-size='12'>{escape(one.name)}</text>")
        x += 50 + 7 * len(one.name)
    return found


def _panel(title: str, series: Sequence[_Series]) -> list[str]:
    left, right, top, bottom = MARGIN
    width, height = PANEL[0] - left - right, PANEL[1] - top - bottom
    tokens = sorted({m for one in series for m, _ in one.points})
    step = _step(max(us for one in series for _, us in one.points))
    most = step * 5
    span = max(tokens[-1] - tokens[0], 1)

    def place(point: tuple[int, float]) -> tuple[float, float]:
        across = (point[0] - tokens[0]) / span if len(tokens) > 1 else 0.5
        return left + across * width, top + height * (1 - point[1] / most)

    found = [f"<text x='{left}' y='14' font-size='12' font-weight='bold'>{escape(title)}</text>"]
    for number in range(6):
        y = place((tokens[0], number * step))[1]
        found.append(
            f"<line x1='{left}' y1='{y:.1f}' x2='{left + width}' y2='{y:.1f}' stroke='#e3e3e3'/>"
        )
        found.append(
            f"<text x='{left - 5}' y='{y + 4:.1f}' font-size='10' text-anchor='end'>"
            f"{number * step:g}</text>"
        )
    for m in _ticks(tokens):
        x = place((m, 0.0))[0]
        found.append(
            f"<text x='{x:.1f}' y='{top + height + 14}' font-size='10' text-anchor='middle'>"
            f"{m}</text>"
        )
    found.append(
        f"<text x='{left + width}' y='{top + height + 26}' font-size='10' text-anchor='end'>"
        "tokens M; microseconds up</text>"
    )
    for one in series:
        points = tuple(place(point) for point in one.points)
        if points:
            found.append(_line(one, points))
            if one.name == "ours":
                found += [
                    f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.4' fill='{one.colour}'/>"
                    for x, y in points
                ]
    return found


def _line(series: _Series, points: Iterable[tuple[float, float]]) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = f" stroke-dasharray='{series.dash}'" if series.dash else ""
    return (
        f"<polyline points='{path}' fill='none' stroke='{series.colour}' stroke-width='1.8'{dash}/>"
    )


def _step(most: float) -> float:
    """The least round number of which five reach the largest value."""
    wanted = max(most, 1e-3) / 5
    scale = 10.0 ** math.floor(math.log10(wanted))
    return next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= wanted * 0.999)


def _ticks(tokens: Sequence[int]) -> list[int]:
    """At most eight of the numbers of tokens, both ends among them."""
    if len(tokens) <= 8:
        return list(tokens)
    return [tokens[round(i * (len(tokens) - 1) / 7)] for i in range(8)]
