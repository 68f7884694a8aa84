"""The plot: well-formed, complete, and nothing outside its panels."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llbf16_aot.bench import Anchor, BenchCell
from llbf16_aot.plot import PANEL, plot

SVG = "{http://www.w3.org/2000/svg}"

figures = st.floats(0.01, 5e4)


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)  # noqa: S314 - our own text


def cell_of(
    hidden: int, experts: int, tokens: int, ours: float, cublas: float, floor: float
) -> BenchCell:
    return BenchCell(
        hidden=hidden,
        experts=experts,
        tokens=tokens,
        ours_us=ours,
        ours_spread_us=0.0,
        config="library",
        cublas_us=cublas,
        cublas_spread_us=0.0,
        cublas="torch.mm",
        floor_us=floor,
        empty_us=0.5,
    )


@settings(deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from((64, 7168)), st.sampled_from((8, 256)), st.integers(1, 64)),
        st.tuples(figures, figures, figures),
        min_size=1,
        max_size=24,
    )
)
def test_every_figure_is_a_point_inside_its_panel(
    cells: dict[tuple[int, int, int], tuple[float, float, float]],
) -> None:
    """Catches XML that no viewer opens, a lost cell, and lines that run out of their panel."""
    found = [cell_of(*where, *times) for where, times in cells.items()]
    anchors = [Anchor(*where, 1.0, 0.5) for where in list(cells)[:5]]
    root = parsed(plot(found, title="a < b & 'c'", anchors=anchors))
    assert root.tag == f"{SVG}svg"
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text == "a < b & 'c'"
    panels = root.findall(f"{SVG}g")
    assert len(panels) == len({where[:2] for where in cells})
    circles = [circle for panel in panels for circle in panel.iter(f"{SVG}circle")]
    assert len(circles) == len(cells)
    for panel in panels:
        for line in panel.iter(f"{SVG}polyline"):
            for point in line.attrib["points"].split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= PANEL[0]
                assert 0 <= y <= PANEL[1]


def test_lines_stand_in_the_legend_and_only_those_that_are_there() -> None:
    """Catches a line that nobody can name, and a name without a line."""
    cells = [cell_of(7168, 256, m, 2.0, 7.0, 1.6) for m in (1, 2)]
    text = plot(cells, title="t")
    assert "published" not in text
    assert "torch.compile" not in text
    for name in ("cuBLAS", ">ours<", "floor"):
        assert name in text
    assert "published" in plot(cells, title="t", anchors=[Anchor(7168, 256, 1, 7.0, 3.0)])


def test_a_higher_time_is_drawn_higher() -> None:
    """Catches an axis upside down: the plot would praise the slowest."""
    root = parsed(plot([cell_of(64, 8, m, 2.0, 7.0, 1.0) for m in (1, 2)], title=""))
    panel = root.find(f"{SVG}g")
    assert panel is not None
    heights = [
        float(line.attrib["points"].split()[0].split(",")[1])
        for line in panel.iter(f"{SVG}polyline")
    ]
    cublas, ours, floor = heights
    assert cublas < ours < floor
    assert ours - cublas == pytest.approx((7.0 - 2.0) / (2.0 - 1.0) * (floor - ours), rel=0.05)
