"""The tuning table that a survey becomes: every measured cell gets its choice, all else a rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llbf16_aot.backends import DotprodTile, OneshotTile, Tile, dotprod, works
from llbf16_aot.dispatch import LibraryTile, Origin, Table, dispatch, load_table
from llbf16_aot.errors import LibraryChosenError, UsageError
from llbf16_aot.problem import FEW_TOKENS, MAX_EXPERTS, MAX_HIDDEN, DType, Problem, Target
from llbf16_aot.search import representative_tokens, search_space, tokens_span
from llbf16_aot.survey import SurveyCell, SurveyTiming, SurveyTrial
from llbf16_aot.tablewriter import (
    EXPERTS_BANDS,
    GENERAL_LEAD,
    HIDDEN_BANDS,
    LARGE_BANDS,
    TOKENS_BANDS,
    format_table,
    write_table,
)

SM_90A = Target.parse("sm_90a")
ORIGIN = Origin(
    device="a GPU", driver="1.2", date="2026-11-29", versions={"torch": "2"}, protocol="p"
)
SHAPES = ((7168, 256), (4096, 8), (2880, 32), (1024, 1024), (8192, 64), (520, 7), (16384, 64))


def cell(
    hidden: int,
    experts: int,
    tokens: int,
    use: Tile | LibraryTile,
    *,
    us: float = 1.5,
    cublas_us: float = 7.0,
    weight_dtype: DType = DType.BF16,
) -> SurveyCell:
    trials: tuple[SurveyTrial, ...] = ()
    if not isinstance(use, LibraryTile):
        trials = (SurveyTrial(use=use, quick_us=us, full=SurveyTiming(us, 0.01)),)
    return SurveyCell(
        hidden=hidden,
        experts=experts,
        tokens=tokens,
        use=use,
        library={"torch.mm": SurveyTiming(cublas_us, 0.02)},
        empty=SurveyTiming(0.75, 0.0),
        trials=trials,
        weight_dtype=weight_dtype,
    )


@st.composite
def surveys(draw: st.DrawFn) -> list[SurveyCell]:
    """Cells of some shapes, each with a tile of its search space, or with the library."""
    found = []
    shapes = st.lists(
        st.tuples(st.sampled_from(SHAPES), st.sampled_from((DType.BF16, DType.FP32))),
        min_size=1,
        unique=True,
    )
    for (hidden, experts), weight_dtype in draw(shapes):
        counts = (*range(1, 17), *representative_tokens(weight_dtype))
        for tokens in draw(st.lists(st.sampled_from(counts), min_size=1, unique=True)):
            # Few tiles, so that neighbours often agree.
            tiles = (*search_space(hidden, tokens, weight_dtype)[:3], LibraryTile())
            use = draw(st.sampled_from(tiles))
            found.append(cell(hidden, experts, tokens, use, weight_dtype=weight_dtype))
    return found


def table_of(cells: list[SurveyCell], folder: Path | None = None) -> Table:
    table = write_table(cells, ORIGIN, name="mine", target="sm_90a")
    if folder is None:
        return table
    path = folder / "table.json"
    path.write_text(format_table(table))
    return load_table(str(path), SM_90A)


@settings(deadline=None)
@given(surveys())
def test_every_measured_cell_dispatches_to_what_was_chosen(cells: list[SurveyCell]) -> None:
    """Catches a merge over a gap, a lost cell, and a general rule that stands before a measured."""
    table = table_of(cells)
    for one in cells:
        first, last = tokens_span(one.tokens, one.weight_dtype)
        for tokens in {first, (first + last) // 2, last}:
            problem = Problem(tokens, one.experts, one.hidden, weight_dtype=one.weight_dtype)
            assert table.tile_for(problem) == one.use


@settings(deadline=None, max_examples=60)
@given(
    surveys(),
    st.lists(
        st.tuples(
            st.integers(1, FEW_TOKENS),
            st.one_of(st.integers(1, 3000), st.integers(1, MAX_EXPERTS)),
            st.one_of(st.integers(1, 2048), st.integers(1, MAX_HIDDEN // 8)).map(lambda n: 8 * n),
        ),
        min_size=30,
        max_size=30,
    ),
)
def test_every_other_problem_finds_a_kernel_or_the_library(
    cells: list[SurveyCell], problems: list[tuple[int, int, int]]
) -> None:
    """Catches a general rule whose tile fails its check for some K, N or M: a gap in production."""
    table = table_of(cells)
    for size in problems:
        try:
            dispatch(Problem(*size), SM_90A, table).check()
        except LibraryChosenError:
            continue


@pytest.mark.parametrize("use", [OneshotTile(64, 4, 4, 2), OneshotTile(8, 1, 8, 4), DotprodTile()])
def test_general_rules_hold_at_the_ends_of_their_ranges(use: Tile) -> None:
    """Catches a tile fitted to the middle of a range of K: its ends are where it breaks."""
    # A lead that bears every way, so that the tile and not the library is chosen.
    cells = [cell(1024, 64, m, use, us=0.001, cublas_us=1e4) for m in (1, 8, 16, 24, 64)]
    table = table_of(cells)
    ends = [8, *(k + d for k in (*HIDDEN_BANDS, 32768) for d in (-8, 0, 8)), MAX_HIDDEN]
    for hidden in ends:
        for experts in (1, *(n + d for n in EXPERTS_BANDS for d in (0, 1)), MAX_EXPERTS):
            for tokens in (1, 4, 5, 8, 9, 16, 17, 32, 33, 64):
                try:
                    dispatch(Problem(tokens, experts, hidden), SM_90A, table).check()
                except LibraryChosenError:
                    if experts <= EXPERTS_BANDS[-1] and hidden <= HIDDEN_BANDS[-1]:
                        # Only where the tile cannot be fitted: a row beyond a thread's registers.
                        end = min(band for band in HIDDEN_BANDS if band >= hidden)
                        last = min(span[1] for span in TOKENS_BANDS if span[1] >= tokens)
                        assert isinstance(use, DotprodTile)
                        assert not works(dotprod.config_for(use, Problem(last, 1, end)))


def test_a_large_k_has_rules_of_its_own_only_where_it_was_measured() -> None:
    """Catches K of 16384 served as 8192 is, and a kernel that nobody compared with the library."""
    tile = OneshotTile(16, 8, 7, 4)
    small, large = cell(8192, 64, 8, tile), cell(16384, 64, 8, OneshotTile(8, 8, 16, 4))
    without, with_large = table_of([small]), table_of([small, large])
    for hidden in LARGE_BANDS:
        few, many = Problem(8, 64, hidden), Problem(33, 64, hidden)
        assert without.tile_for(few) == without.tile_for(many) == LibraryTile()
        measured = isinstance(with_large.tile_for(few), OneshotTile)
        assert measured == (hidden <= large.hidden)
    problem = Problem(8, 64, 32776)
    assert without.tile_for(problem) == with_large.tile_for(problem) == LibraryTile()


def test_neighbouring_tokens_with_one_tile_share_a_rule_with_their_figures() -> None:
    """Catches a table with a rule for every cell, and figures that hide the slowest of them."""
    tile, other = OneshotTile(16, 8, 7, 4), OneshotTile(32, 8, 7, 4)
    cells = [
        cell(7168, 256, 1, tile, us=1.5, cublas_us=7.0),
        cell(7168, 256, 2, tile, us=1.7, cublas_us=7.2),
        cell(7168, 256, 4, tile, us=1.6),
        cell(7168, 256, 24, other, us=2.5),
        cell(7168, 256, 32, other, us=2.6),
    ]
    rules = [rule for rule in table_of(cells).rules if rule.measured is not None]
    assert [rule.tokens for rule in rules] == [(1, 4), (17, 32)]
    figures = rules[0].measured
    assert figures is not None
    assert (figures.us, figures.cublas_us, figures.spread_us) == ((1.5, 1.7), (7.0, 7.2), 0.01)


def test_a_shape_beside_a_measured_one_gets_a_tile_like_it() -> None:
    """Catches general rules that ignore the measurements."""
    cells = [
        *(cell(7168, 256, m, OneshotTile(32, 4, 14, 4)) for m in (1, 2, 4)),
        *(cell(2048, 256, m, OneshotTile(8, 8, 4, 2)) for m in (1, 2, 4)),
    ]
    table = table_of(cells)
    near_large, near_small = (table.tile_for(Problem(2, 250, k)) for k in (7160, 2040))
    assert isinstance(near_large, OneshotTile)
    assert isinstance(near_small, OneshotTile)
    assert (near_large.experts_tile, near_large.split_k) == (32, 4)
    assert (near_small.experts_tile, near_small.split_k) == (8, 8)


def test_where_the_library_wins_everywhere_near_the_general_rule_says_so() -> None:
    """Catches a kernel for shapes beside those where every kernel was slower than the library."""
    cells = [cell(7168, 2000, m, LibraryTile()) for m in (9, 16)]
    cells += [cell(7168, 128, m, OneshotTile(16, 8, 7, 4)) for m in (9, 16)]
    table = table_of(cells)
    assert table.tile_for(Problem(12, 1900, 7168)) == LibraryTile()
    assert isinstance(table.tile_for(Problem(12, 100, 7168)), OneshotTile)


def test_256_and_512_experts_are_not_judged_by_what_lies_above_them() -> None:
    """Catches 512 experts left to the library because it is faster with 1024.

    At K 7168, M 32 `oneshot` took 3.54 us with 448 experts, the library 7.50 with 512.
    """
    tile = OneshotTile(32, 7, 8, 4)
    for common, above in ((256, 448), (512, 1024)):
        cells = [cell(7168, common - 64, 32, tile, us=3.54, cublas_us=7.55)]
        cells += [cell(7168, above, 32, LibraryTile())]
        table = table_of(cells)
        assert table.tile_for(Problem(32, common, 7160)) == tile
        assert table.tile_for(Problem(32, common + 1, 7160)) == LibraryTile()


def test_a_lead_that_does_not_bear_the_way_leaves_a_shape_to_the_library() -> None:
    """Catches a kernel slower than the library: one that was 1.3 times as fast on half the weights.

    At K 6144, N 2048, M 32 a tile that was the faster one with 896 experts took 16.4 us for 11.7.
    """
    tile = OneshotTile(32, 7, 8, 4)
    close = table_of([cell(7168, 896, m, tile, us=7.5, cublas_us=8.3) for m in (24, 32)])
    assert close.tile_for(Problem(32, 895, 7160)) == LibraryTile()
    wide = table_of([cell(7168, 896, m, tile, us=2.0, cublas_us=8.3) for m in (24, 32)])
    assert wide.tile_for(Problem(32, 895, 7160)) == tile
    assert wide.tile_for(Problem(32, 2048, 7168)) == tile
    assert wide.tile_for(Problem(32, 2048, 16384)) == LibraryTile()
    assert wide.tile_for(Problem(64, 448, 7168)) == tile
    few = table_of([cell(7168, 256, 4, tile, us=1.5, cublas_us=7.0)])
    assert few.tile_for(Problem(64, 256, 7168)) == LibraryTile()


def test_a_lead_as_small_as_what_neighbours_differ_by_holds_where_it_was_measured_only() -> None:
    """Catches a tile level with the library: at K 12224, N 2032, M 16 one took 17.48 us for 17.46.

    At K 12288, N 2048 that tile had taken 17.11 for 17.42.
    """
    tile = OneshotTile(16, 8, 8, 6)
    for cublas_us, beside in ((10.1, LibraryTile()), (10.9, LibraryTile()), (11.1, tile)):
        table = table_of([cell(12288, 2048, 16, tile, us=10.0, cublas_us=cublas_us)])
        assert table.tile_for(Problem(16, 2048, 12288)) == tile
        assert table.tile_for(Problem(16, 2032, 12224)) == beside


def test_where_the_nearest_lead_does_not_bear_the_way_a_farther_shape_is_followed() -> None:
    """Catches 192 experts left to the library because of 256, where 128 had led by twice.

    At K 8704, N 74, M 64 the library took 9.32 us, and a kernel 2.89 before.
    """
    few, many = OneshotTile(16, 8, 10, 4, "wait"), OneshotTile(16, 6, 18, 3)
    cells = [
        cell(10240, 128, 64, few, us=4.0, cublas_us=8.2),
        cell(10240, 256, 64, many, us=8.0, cublas_us=8.5),
    ]
    for order in (cells, cells[::-1]):
        assert table_of(order).tile_for(Problem(64, 192, 10240)) == few
    # Four times the weights are too many for a lead of twice, and 256 has figures of its own.
    assert table_of(cells[:1]).tile_for(Problem(64, 512, 10240)) == LibraryTile()
    assert table_of(cells).tile_for(Problem(64, 250, 10232)) == LibraryTile()


def test_of_shapes_as_near_the_one_that_needs_less_of_its_lead_decides() -> None:
    """Catches K 1024, N 256 left to the library, as it is four times (1024, 64) in weights."""
    tile = OneshotTile(16, 4, 8, 2)
    small = cell(1024, 64, 8, OneshotTile(8, 4, 8, 1), us=0.8, cublas_us=3.3)
    large = cell(2048, 256, 8, tile, us=1.3, cublas_us=6.4)
    for order in ([small, large], [large, small]):
        found = table_of(order).tile_for(Problem(8, 256, 1024))
        assert isinstance(found, OneshotTile)
        assert (found.experts_tile, found.split_k) == (tile.experts_tile, tile.split_k)


def test_where_the_library_wins_with_fewer_weights_no_farther_shape_is_asked() -> None:
    """Catches a kernel taken from far off, across a shape where the library was faster already."""
    far = cell(4096, 512, 64, OneshotTile(32, 4, 8, 4), us=1.0, cublas_us=7.0)
    near = cell(7168, 896, 64, LibraryTile())
    assert table_of([far]).tile_for(Problem(64, 1024, 7168)) != LibraryTile()
    assert table_of([far, near]).tile_for(Problem(64, 1024, 7168)) == LibraryTile()


def test_the_packaged_table_leaves_nothing_to_the_library_that_a_kernel_leads_far_above() -> None:
    """Catches a hole between measured shapes: K 513 to 1024, N 193 to 256 was one."""
    table = load_table("default", SM_90A)
    kernels = [
        (
            rule.hidden[0],
            rule.experts[0],
            rule.tokens,
            rule.measured.cublas_us[0] / rule.measured.us[1],
        )
        for rule in table.rules
        if rule.measured and rule.hidden and rule.experts and rule.tokens
        if rule.weight_dtype is DType.BF16 and rule.use != LibraryTile()
    ]
    assert kernels
    seen = 0
    for hidden in (*HIDDEN_BANDS, *LARGE_BANDS):
        for experts in EXPERTS_BANDS:
            for tokens in TOKENS_BANDS:
                problem = Problem(tokens[1], experts - 1, hidden - 8)
                if table.tile_for(problem) != LibraryTile():
                    continue
                seen += 1
                leads = [
                    lead
                    for its_hidden, its_experts, span, lead in kernels
                    if its_hidden >= hidden
                    and its_experts >= experts
                    and span[0] <= tokens[1] <= span[1]
                ]
                # Figures in the table are rounded, what they were judged by is not.
                assert max(leads, default=1.0) < GENERAL_LEAD + 0.001, (problem, max(leads))
    assert seen


def test_a_general_rule_has_the_very_tile_that_was_measured_at_its_end() -> None:
    """Catches one with half the warps and two rounds, or with another release, in its place."""
    for tile in (OneshotTile(16, 8, 16, 4), OneshotTile(8, 8, 16, 4, release="wait")):
        table = table_of([cell(16384, 64, 16, tile)])
        assert table.tile_for(Problem(16, 60, 16000)) == tile


@settings(deadline=None)
@given(surveys())
def test_the_text_of_a_table_reads_back_as_the_table(cells: list[SurveyCell]) -> None:
    """Catches a figure or a range that the file loses, or that the strict schema refuses."""
    import msgspec

    table = table_of(cells)
    assert msgspec.json.decode(format_table(table), type=Table) == table


def test_the_file_has_one_rule_a_line_and_says_where_its_figures_are_from(tmp_path: Path) -> None:
    """Catches a table whose diff nobody can read, and figures without machine and day."""
    cells = [cell(7168, 256, 1, OneshotTile(16, 8, 7, 4)), cell(7168, 256, 2, LibraryTile())]
    table = table_of(cells, tmp_path)
    text = (tmp_path / "table.json").read_text()
    assert table.measured == ORIGIN
    assert text.count('"use"') == len(table.rules)
    for line in text.splitlines():
        if '"use"' in line:
            json.loads(line.rstrip(","))
    assert "library is faster in 1" in table.source


def test_without_cells_there_is_no_table() -> None:
    """Catches a table of general rules alone that claims to be measured."""
    with pytest.raises(UsageError, match="no cell was measured"):
        write_table([], ORIGIN, name="mine", target="sm_90a")


def test_above_16_tokens_a_cell_speaks_for_its_own_span_only() -> None:
    """One measurement at 1,024 tokens must not decide for 17."""
    tile = OneshotTile(16, 1, 4, 2)
    cells = [cell(520, 7, tokens, tile) for tokens in (8, 256)]
    wide = [cell(520, 7, tokens, tile, weight_dtype=DType.FP32) for tokens in (4, 1024)]
    spans = [
        (rule.weight_dtype, rule.tokens)
        for rule in table_of([*cells, *wide]).rules
        if rule.measured
    ]
    assert sorted(spans) == [
        (DType.BF16, (1, 8)),
        (DType.BF16, (193, 256)),
        (DType.FP32, (1, 4)),
        (DType.FP32, (513, 65_536)),
    ]


def test_a_table_of_fp32_weights_alone_says_so() -> None:
    """A source that speaks of shapes and experts which no rule names misleads who tunes."""
    wide = [cell(520, 7, 4, LibraryTile(), weight_dtype=DType.FP32)]
    table = table_of(wide)
    assert "with fp32 weights fp32_tiles decides for others" in table.source
    fp32_x = Problem(4, 7, 520, x_dtype=DType.FP32, weight_dtype=DType.FP32)
    assert not isinstance(table.tile_for(fp32_x), LibraryTile)
