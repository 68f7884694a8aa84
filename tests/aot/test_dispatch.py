"""Dispatch: the published rule to the letter, every problem served, the same key everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llbf16_aot.backends import (
    Bf16x3Tile,
    DotprodConfig,
    DotprodTile,
    Fp32Config,
    Fp32Tile,
    OneshotConfig,
    OneshotTile,
    SplitkConfig,
    SplitkTile,
    oneshot,
)
from llbf16_aot.dispatch import (
    PACKAGED_TABLES,
    Figures,
    LibraryTile,
    Rule,
    Table,
    _load_table,
    _table_path,
    dispatch,
    load_table,
    warmup_keys,
)
from llbf16_aot.errors import (
    LibraryChosenError,
    TargetError,
    TuningTableError,
    UnsupportedProblemError,
)
from llbf16_aot.key import CompileKey
from llbf16_aot.problem import FEW_TOKENS, MAX_EXPERTS, MAX_HIDDEN, DType, Problem, Target
from llbf16_aot.tablewriter import for_other_targets, format_table

UPDATE = os.environ.get("LLBF16_AOT_UPDATE_GOLDEN") == "1"

SM_90A = Target.parse("sm_90a")
FP32_TILE = {
    "experts_tile": 16, "experts_per_thread": 4, "split_k": 8, "warps": 8, "vectors": 3
}  # fmt: skip
TARGETS = ("sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_110a", "sm_120a", "sm_121a")

# The published rule, written down once more and in another form than the tables: (hidden, experts)
# to token counts to what is published for them.
Choice = tuple[str, int] | tuple[str, int, int]

WIDE: Choice = ("dotprod", 256)
S82: Choice = ("splitk", 8, 2)
S85: Choice = ("splitk", 8, 5)
S75: Choice = ("splitk", 7, 5)
S65: Choice = ("splitk", 6, 5)

EXCEPTIONS: dict[int, dict[tuple[int, int], dict[int, Choice]]] = {
    90: {
        (4096, 256): {
            1: WIDE,
            3: WIDE,
            5: S82,
            6: S82,
            7: S82,
            10: S85,
            11: S85,
            13: S82,
            14: S85,
            15: S85,
            16: S82,
        },
        (7168, 256): {8: S65},
        (6144, 256): {9: S82, 11: S82},
        (7168, 384): {
            1: WIDE,
            2: WIDE,
            6: S82,
            7: S75,
            8: S82,
            9: S75,
            10: S75,
            11: S75,
            12: S82,
            13: S75,
            14: S75,
            15: S75,
            16: S75,
        },
    },
    100: {
        (6144, 256): {1: WIDE, 3: WIDE, 4: WIDE, 9: S82, 12: S82, 16: S82},
        (4096, 256): {5: S85, 8: S85, 9: S82},
        (7168, 256): {14: S82},
        (7168, 384): {13: S75, 16: S75},
    },
    120: {},
}

PUBLISHED_SHAPES = ((4096, 256), (7168, 256), (6144, 256), (7168, 384))
OTHER_SHAPES = ((7168, 896), (2048, 128), (2304, 256), (2880, 32), (7168, 255), (1024, 256))


def published(tokens: int, experts: int, hidden: int, architecture: int) -> Choice:
    exception = EXCEPTIONS[architecture].get((hidden, experts), {}).get(tokens)
    if exception is not None:
        return exception
    if tokens <= 4 or hidden < 2048:
        return ("dotprod", 128)
    return ("splitk", 6, 4)


def chosen(key: CompileKey) -> Choice:
    if isinstance(key.config, DotprodConfig):
        assert key.config.experts_per_block == 1
        return (key.backend, key.config.block)
    assert isinstance(key.config, SplitkConfig)
    return (key.backend, key.config.split_k, key.config.stages)


def reference(tokens: int, experts: int, hidden: int, target: str) -> CompileKey:
    parsed = Target.parse(target)
    return dispatch(Problem(tokens, experts, hidden), parsed, load_table("reference", parsed))


@pytest.mark.parametrize(
    ("target", "architecture"),
    [
        ("sm_90a", 90),
        ("sm_100a", 100),
        ("sm_100f", 100),
        ("sm_103a", 100),
        ("sm_110a", 120),
        ("sm_120a", 120),
        ("sm_121a", 120),
    ],
)
def test_the_reference_table_is_the_published_rule(target: str, architecture: int) -> None:
    """Catches a mistyped exception, one that leaks to another shape, and sm_103 without any."""
    for hidden, experts in (*PUBLISHED_SHAPES, *OTHER_SHAPES):
        for tokens in range(1, 17):
            key = reference(tokens, experts, hidden, target)
            wanted = published(tokens, experts, hidden, architecture)
            assert chosen(key) == wanted, f"M={tokens} N={experts} K={hidden} {target}"


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a", "sm_120a"])
def test_targets_that_nobody_measured_follow_the_measured_table(target: str) -> None:
    """Catches a table that is measured anew for one target and left behind for the others.

    `LLBF16_AOT_UPDATE_GOLDEN=1` writes the others' table anew.
    """
    wanted = for_other_targets(load_table("default", Target.parse("sm_90a")))
    if UPDATE:
        _table_path("default", Target.parse(target)).write_text(format_table(wanted))
        _load_table.cache_clear()
    other = load_table("default", Target.parse(target))
    assert other == wanted
    assert other.measured is None
    assert all(rule.measured is None for rule in other.rules)
    assert "measured for another target" in other.source


def test_a_tile_that_fits_only_the_measured_target_gives_way_to_one_like_it() -> None:
    """Catches a kernel that spills for Blackwell, so that a build for it fails.

    Seen: these two tiles, 16 and 24 bytes a thread, for sm_100a; eleven warps have the registers of
    twelve.
    """
    tight, fits = OneshotTile(16, 2, 11, 6), OneshotTile(32, 8, 7, 4)
    rounds = OneshotTile(8, 8, 11, 6, release="wait")
    figures = Figures(us=(1.0, 2.0), cublas_us=(3.0, 4.0), spread_us=0.1)
    rules = (
        Rule(use=tight, tokens=(17, 24), hidden=(4096, 4096)),
        Rule(use=rounds, tokens=(17, 32), hidden=(16385, 32768)),
        Rule(use=fits, tokens=(1, 8), hidden=(7168, 7168), measured=figures),
        Rule(use=LibraryTile()),
    )
    other = for_other_targets(Table(schema=1, name="t", source="here", rules=rules)).rules
    given_way = other[0].use
    assert isinstance(given_way, OneshotTile)
    assert given_way != tight
    assert given_way.experts_tile == tight.experts_tile
    assert oneshot.portable(oneshot.config_for(given_way, Problem(24, 1, 4096)))
    # No tile of `oneshot` holds this K with so many tokens elsewhere.
    assert other[1].use == LibraryTile()
    assert other[2:] == (Rule(use=fits, tokens=(1, 8), hidden=(7168, 7168)), rules[3])


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "backend"),
    [
        (4, 2048, "dotprod"),
        (5, 2048, "splitk"),
        (4, 2040, "dotprod"),
        (5, 2040, "dotprod"),
        (64, 2040, "dotprod"),
        (64, 2048, "splitk"),
        (4, 32768, "dotprod"),
        (4, 32776, "splitk"),
        (1, MAX_HIDDEN, "splitk"),
    ],
)
def test_the_borders_of_the_reference_rule(
    tokens: int, hidden: int, backend: str, target: str
) -> None:
    """Catches a border that is off by one; K is a multiple of 8, so 2040 is the one below 2048.

    Above K 32768 the published rule has no kernel: the weights of a thread would not fit registers.
    """
    assert reference(tokens, 128, hidden, target).backend == backend


def test_dotprod_is_unrolled_for_the_tokens_and_tiled_above_16() -> None:
    """Catches a key that serves another number of tokens than was asked for."""
    sizes = {
        tokens: reference(tokens, 128, 1024, "sm_90a").config for tokens in (1, 15, 16, 17, 64)
    }
    assert {
        tokens: config.tokens for tokens, config in sizes.items() if hasattr(config, "tokens")
    } == {1: 1, 15: 15, 16: 16, 17: 16, 64: 16}


problems = st.builds(
    Problem,
    tokens=st.integers(1, FEW_TOKENS),
    experts=st.integers(1, MAX_EXPERTS),
    hidden=st.one_of(st.integers(1, 4096), st.integers(1, MAX_HIDDEN // 8)).map(lambda n: 8 * n),
    out_dtype=st.sampled_from(DType),
    pdl=st.booleans(),
)


@given(problems, st.sampled_from(TARGETS), st.sampled_from(PACKAGED_TABLES))
def test_every_valid_problem_has_a_key_that_can_be_compiled(
    problem: Problem, target: str, tuning: str
) -> None:
    """Catches a hole in a packaged table, and a rule that chooses what its kernel cannot do."""
    parsed = Target.parse(target)
    try:
        key = dispatch(problem, parsed, load_table(tuning, parsed))
    except LibraryChosenError:
        # A measured choice; the published rule knows no such case.
        assert tuning != "reference"
        return
    key.check()
    assert (key.target, key.out_dtype, key.pdl) == (target, problem.out_dtype, problem.pdl)


@given(
    st.builds(
        Problem,
        tokens=st.one_of(st.integers(-1, FEW_TOKENS), st.integers(65_537, 70_000)),
        experts=st.integers(-1, MAX_EXPERTS + 2),
        hidden=st.integers(-8, MAX_HIDDEN + 16),
        x_dtype=st.sampled_from(DType),
        weight_dtype=st.sampled_from(DType),
        alignment_bytes=st.sampled_from((8, 16)),
    )
)
def test_dispatch_refuses_what_check_refuses_and_nothing_else(problem: Problem) -> None:
    """Catches a dispatch that makes a key for a problem that the kernels compute wrongly."""

    def refusal(decide: Callable[[], object]) -> str | None:
        try:
            decide()
        except UnsupportedProblemError as error:
            return error.message
        return None

    table = load_table("reference", SM_90A)
    assert refusal(lambda: dispatch(problem, SM_90A, table)) == refusal(problem.check)


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_targets_without_the_needed_instructions_are_refused(target: str) -> None:
    """Catches a key for plain sm_90, which the compiler refuses, or for a GPU without clusters."""
    parsed = Target.parse(target)
    with pytest.raises(TargetError, match=target):
        dispatch(Problem(1, 256, 7168), parsed, load_table("default", parsed))


def test_a_rule_that_chooses_what_cannot_work_is_named_with_its_table() -> None:
    """Catches a bad user table that becomes a kernel with spilled registers or a failed launch."""
    tile = DotprodTile(block=32, experts_per_block=2)
    table = Table(schema=1, name="mine", source="", rules=(Rule(use=tile),))
    with pytest.raises(UnsupportedProblemError, match=r"mine.*K=8192.*weight loads"):
        dispatch(Problem(1, 256, 8192), SM_90A, table)


def test_a_table_may_leave_a_problem_to_the_library() -> None:
    """Catches a choice of the library that is taken for a kernel, or that hides a bad problem."""
    rules = (Rule(use=LibraryTile(), tokens=(9, 64)), Rule(use=SplitkTile()))
    table = Table(schema=1, name="mine", source="", rules=rules)
    with pytest.raises(LibraryChosenError, match="mine"):
        dispatch(Problem(9, 256, 7168), SM_90A, table)
    assert dispatch(Problem(8, 256, 7168), SM_90A, table).backend == "splitk"
    with pytest.raises(UnsupportedProblemError, match="hidden is 7164") as caught:
        dispatch(Problem(9, 256, 7164), SM_90A, table)
    assert not isinstance(caught.value, LibraryChosenError)


def test_a_rule_serves_the_weights_that_it_names_alone() -> None:
    """Catches a bf16 kernel that is chosen for fp32 weights, and the reverse.

    A problem with fp32 weights that no rule admits has a tile all the same.
    """
    mine = Fp32Tile(8, 2, 4, 4, 2)
    rules = (
        Rule(use=mine, tokens=(1, 8), weight_dtype=DType.FP32),
        Rule(use=LibraryTile(), tokens=(9, 16), weight_dtype=DType.FP32),
        Rule(use=SplitkTile()),
    )
    table = Table(schema=1, name="mine", source="", rules=rules)
    wide = {"weight_dtype": DType.FP32}
    key = dispatch(Problem(8, 256, 2048, **wide), SM_90A, table)  # type: ignore[arg-type]
    assert key.weight_dtype is DType.FP32
    assert isinstance(key.config, Fp32Config)
    assert (key.config.experts_tile, key.config.vectors) == (8, 2)
    with pytest.raises(LibraryChosenError):
        dispatch(Problem(16, 256, 2048, **wide), SM_90A, table)  # type: ignore[arg-type]
    later = dispatch(Problem(17, 256, 2048, **wide), SM_90A, table)  # type: ignore[arg-type]
    assert later.backend == "oneshot"
    assert later.weight_dtype is DType.FP32
    assert dispatch(Problem(8, 256, 2048), SM_90A, table).backend == "splitk"
    # bf16x3 takes no x in fp32: its rule is none for such a problem.
    first = Rule(use=Bf16x3Tile(32, 16, 4, 8, 4), weight_dtype=DType.FP32)
    table = Table(schema=1, name="mine", source="", rules=(first, *rules))
    assert dispatch(Problem(8, 256, 2048, **wide), SM_90A, table).backend == "bf16x3"  # type: ignore[arg-type]
    problem = Problem(8, 256, 2048, x_dtype=DType.FP32, weight_dtype=DType.FP32)
    assert dispatch(problem, SM_90A, table).config == key.config


@pytest.mark.parametrize("name", PACKAGED_TABLES)
@given(
    tokens=st.one_of(st.integers(1, 66), st.integers(1, 65_536)),
    experts=st.one_of(st.integers(1, 1024), st.integers(1, MAX_EXPERTS)),
    quads=st.one_of(st.integers(1, 4096), st.integers(1, MAX_HIDDEN // 4)),
    x_dtype=st.sampled_from((DType.BF16, DType.FP32)),
    target=st.sampled_from(TARGETS),
)
def test_every_problem_with_fp32_weights_is_served(
    name: str, tokens: int, experts: int, quads: int, x_dtype: DType, target: str
) -> None:
    """Catches a shape that no tile serves: any K of 16-byte rows, any N, any M of its operands."""
    problem = Problem(tokens, experts, 4 * quads, x_dtype=x_dtype, weight_dtype=DType.FP32)
    wanted = Target.parse(target)
    if (x_dtype is DType.BF16 and quads % 2) or (x_dtype is DType.FP32 and tokens > 32):
        with pytest.raises(UnsupportedProblemError):
            dispatch(problem, wanted, load_table(name, wanted))
        return
    key = dispatch(problem, wanted, load_table(name, wanted))
    key.check()
    assert (key.x_dtype, key.weight_dtype) == (x_dtype, DType.FP32)
    allowed = {"fp32"} if tokens <= 32 else {"bf16x3"}
    if x_dtype is DType.BF16 and 3 <= tokens <= 64:
        allowed.add("oneshot")
    assert key.backend in allowed
    if isinstance(key.config, OneshotConfig):
        assert key.config.terms == 3
        assert key.config.hidden == problem.hidden
    if key.backend == "fp32":
        assert isinstance(key.config, Fp32Config)
        assert key.config.tokens >= tokens
        assert key.config.hidden == problem.hidden


@pytest.mark.parametrize("table", PACKAGED_TABLES)
@pytest.mark.parametrize("shape", [(256, 6144), (7, 2880)])
@pytest.mark.parametrize("first", [65, 129, 257, 513])
def test_one_artifact_serves_a_whole_span_of_tokens_above_64(
    table: str, shape: tuple[int, int], first: int
) -> None:
    """Catches a key that depends on M where M is unbounded: nobody could build them all."""
    last = 65_536 if first == 513 else 2 * first - 2
    keys = {
        dispatch(
            Problem(tokens, *shape, weight_dtype=DType.FP32), SM_90A, load_table(table, SM_90A)
        )
        for tokens in (first, first + 1, (first + last) // 2, last)
    }
    assert len(keys) == 1


@pytest.mark.parametrize("table", PACKAGED_TABLES)
def test_above_64_tokens_bf16_weights_have_a_kernel_only_where_it_was_measured(table: str) -> None:
    """Catches a general rule that sends a prefill to a kernel which cuBLAS beats."""
    parsed = load_table(table, SM_90A)
    for hidden, experts in ((7168, 256), (2048, 128), (2880, 7)):
        for tokens in (65, 128, 256, 257, 4096, 65_536):
            problem = Problem(tokens, experts, hidden)
            try:
                key = dispatch(problem, SM_90A, parsed)
            except LibraryChosenError:
                continue
            assert (table, hidden) != ("reference", hidden)
            assert tokens <= 256
            assert (hidden, experts) != (2880, 7)
            key.check()


def test_a_rule_without_tokens_says_nothing_of_more_than_64() -> None:
    """Catches a published rule that sends a prefill of thousands of tokens to a small kernel."""
    tile = SplitkTile()
    table = Table(schema=1, name="t", source="", rules=(Rule(use=tile),))
    assert table.tile_for(Problem(64, 256, 7168)) == tile
    assert table.tile_for(Problem(65, 256, 7168)) == LibraryTile()
    explicit = Table(schema=1, name="t", source="", rules=(Rule(use=tile, tokens=(65, 99)),))
    assert explicit.tile_for(Problem(65, 256, 7168)) == tile


def test_the_first_rule_that_admits_a_problem_decides() -> None:
    """Catches a search that prefers the last or the narrowest rule; ranges include both ends."""
    rules = (
        Rule(use=SplitkTile(2, 2), tokens=(5, 6)),
        Rule(use=SplitkTile(3, 2), experts=(8, 16), hidden=(64, 128)),
        Rule(use=SplitkTile(4, 2), tokens=(1, 64)),
        Rule(use=SplitkTile(5, 2)),
    )
    table = Table(schema=1, name="t", source="", rules=rules)

    def split_k(tokens: int, experts: int, hidden: int) -> int:
        key = dispatch(Problem(tokens, experts, hidden), SM_90A, table)
        assert isinstance(key.config, SplitkConfig)
        return key.config.split_k

    assert [split_k(tokens, 8, 64) for tokens in (4, 5, 6, 7)] == [3, 2, 2, 3]
    assert [split_k(1, experts, 64) for experts in (7, 8, 16, 17)] == [4, 3, 3, 4]
    assert [split_k(1, 8, hidden) for hidden in (56, 64, 128, 136)] == [4, 3, 3, 4]


def test_warmup_keys_are_distinct_and_in_the_order_of_first_use() -> None:
    """Catches an order that follows hashes, and a splitk key that is built once for every shape."""
    keys = warmup_keys([(7168, 256), (4096, 128)], range(1, 17), target=SM_90A, tuning="reference")
    expected: list[tuple[str, int | None, Choice]] = []
    for hidden, experts in ((7168, 256), (4096, 128)):
        for tokens in range(1, 17):
            choice = published(tokens, experts, hidden, 90)
            entry = (
                ("dotprod", tokens, (*choice, hidden))
                if choice[0] == "dotprod"
                else ("splitk", None, choice)
            )
            if entry not in expected:
                expected.append(entry)
    found = [
        ("dotprod", key.config.tokens, (*chosen(key), key.config.hidden))
        if isinstance(key.config, DotprodConfig)
        else ("splitk", None, chosen(key))
        for key in keys
    ]
    assert found == expected
    assert len(set(keys)) == len(keys) == 10


def test_warmup_keys_are_the_keys_that_dispatch_gives() -> None:
    """Catches a warm-up whose filter drifted from the one that serving asks with."""
    shapes, tokens = [(2880, 32), (7168, 384)], (1, 8, 33)
    keys = warmup_keys(
        shapes, tokens, target=SM_90A, tuning="reference", out_dtype=DType.BF16, pdl=False
    )
    table = load_table("reference", SM_90A)
    assert set(keys) == {
        dispatch(Problem(m, n, k, DType.BF16, pdl=False), SM_90A, table)
        for k, n in shapes
        for m in tokens
    }


# --- Purity across processes -----------------------------------------------------------------

DIGESTS = """
import sys
from llbf16_aot.dispatch import dispatch, load_table
from llbf16_aot.errors import LibraryChosenError
from llbf16_aot.problem import Problem, Target, DType
for name in ("default", "reference"):
    for text in ("sm_90a", "sm_103a", "sm_120a"):
        target = Target.parse(text)
        table = load_table(name, target)
        for hidden, experts in ((7168, 256), (4096, 256), (2880, 32), (1024, 8)):
            for tokens in (1, 4, 5, 16, 64):
                for out in DType:
                    problem = Problem(tokens, experts, hidden, out)
                    try:
                        print(dispatch(problem, target, table).digest())
                    except LibraryChosenError as error:
                        print(error.message)
"""


def environments(folder: Path) -> Iterator[tuple[dict[str, str], Path]]:
    yield {"PYTHONHASHSEED": "0", "LC_ALL": "C"}, folder
    yield {"PYTHONHASHSEED": "1", "LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo"}, Path("/")
    yield {"PYTHONHASHSEED": "4294967295", "LANG": "tr_TR.UTF-8", "PYTHONUTF8": "0"}, folder
    yield {"PYTHONHASHSEED": "random", "PYTHONOPTIMIZE": "2", "CUTE_DSL_ARCH": "sm_80"}, folder


def test_keys_do_not_depend_on_hash_seed_locale_time_zone_or_folder(tmp_path: Path) -> None:
    """Catches a digest over an unordered set or a path: no process finds what another built."""
    processes = [
        subprocess.Popen(
            (sys.executable, "-c", DIGESTS),
            env={"PATH": os.defpath, **variables},
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        for variables, folder in environments(tmp_path)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    assert len(outputs[0].splitlines()) == 2 * 3 * 4 * 5 * 3
    assert len(set(outputs)) == 1


# --- Tables of the user's own ----------------------------------------------------------------


def table_text(**changes: object) -> str:
    data: dict[str, object] = {
        "schema": 1,
        "name": "mine",
        "source": "measured",
        "rules": [
            {"tokens": [1, 4], "use": {"backend": "dotprod", "block": 64}},
            {"use": {"backend": "splitk", "split_k": 2, "stages": 3}},
        ],
    }
    return json.dumps({**data, **changes})


def test_a_table_may_be_a_file_or_a_folder(tmp_path: Path) -> None:
    """Catches a path taken for the name of a packaged table, and lost defaults of a tile."""
    file = tmp_path / "any.json"
    file.write_text(table_text())
    for name in (str(file), str(tmp_path)):
        table = load_table(name, SM_90A)
        assert table.name == "mine"
        assert table.tile_for(Problem(4, 8, 64)) == DotprodTile(block=64, experts_per_block=1)
        assert table.tile_for(Problem(5, 8, 64)) == SplitkTile(split_k=2, stages=3)


def test_a_folder_gives_the_nearest_table_for_a_target(tmp_path: Path) -> None:
    """Catches sm_103a served by sm_90's table, or an exact table that is never looked at."""
    for stem in ("any", "sm_100", "sm_90", "sm_121"):
        (tmp_path / f"{stem}.json").write_text(table_text(name=stem))
    names = {
        text: load_table(str(tmp_path), Target.parse(text)).name for text in (*TARGETS, "sm_101a")
    }
    assert names == {
        "sm_90a": "sm_90",
        "sm_100a": "sm_100",
        "sm_100f": "sm_100",
        "sm_101a": "sm_100",
        "sm_103a": "sm_100",
        "sm_110a": "any",
        "sm_120a": "any",
        "sm_121a": "sm_121",
    }


def test_a_name_without_a_table_is_refused_with_the_names_there_are() -> None:
    """Catches a typing error that falls back to some other table without a word."""
    with pytest.raises(TuningTableError) as caught:
        load_table("fastest", SM_90A)
    assert "'fastest' is neither default nor reference nor a path" in caught.value.message
    assert caught.value.hint


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Catches an OSError that escapes the package's errors."""
    missing = tmp_path / "missing.json"
    with pytest.raises(TuningTableError, match=f"{missing}: cannot read"):
        load_table(str(missing), SM_90A)


def test_a_folder_without_a_table_for_the_target_says_which_file_to_add(tmp_path: Path) -> None:
    """Catches an error that leaves the user guessing how the file must be called."""
    (tmp_path / "sm_100.json").write_text(table_text())
    with pytest.raises(TuningTableError, match="no tuning table for sm_90a") as caught:
        load_table(str(tmp_path), SM_90A)
    assert "sm_90.json" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "truncated"),
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        (table_text(schema="1"), "schema"),
        (table_text(schema=2), "schema is 2"),
        (table_text(colour="red"), "unknown field `colour`"),
        (table_text(rules=[]), "last rule must be for bf16 weights and have no range"),
        (
            table_text(rules=[{"weight_dtype": "fp32", "use": {"backend": "fp32", **FP32_TILE}}]),
            "last rule",
        ),
        (
            table_text(
                rules=[{"use": {"backend": "fp32", **FP32_TILE}}, {"use": {"backend": "splitk"}}]
            ),
            "rules[0] uses fp32 for bf16 weights",
        ),
        (
            table_text(
                rules=[
                    {"weight_dtype": "fp32", "use": {"backend": "splitk"}},
                    {"use": {"backend": "splitk"}},
                ]
            ),
            "rules[0] uses splitk for fp32 weights",
        ),
        (table_text(rules=[{"tokens": [1, 64], "use": {"backend": "splitk"}}]), "last rule"),
        (table_text(rules=[{"experts": [1, 9], "use": {"backend": "splitk"}}]), "last rule"),
        (table_text(rules=[{"hidden": [1, 9], "use": {"backend": "splitk"}}]), "last rule"),
        (table_text(rules=[{"use": {"backend": "magic"}}]), "magic"),
        (table_text(rules=[{"use": {"backend": "splitk", "block": 128}}]), "field `block`"),
        (table_text(rules=[{"token": [1, 4], "use": {"backend": "splitk"}}]), "field `token`"),
        (table_text(rules=[{"tokens": [1], "use": {"backend": "splitk"}}]), "length 2"),
        (table_text(rules=[{"tokens": [1.5, 4], "use": {"backend": "splitk"}}]), "int"),
    ],
)
def test_a_broken_table_is_refused_with_file_and_field(
    text: str, complaint: str, tmp_path: Path
) -> None:
    """Catches a misspelt field that is ignored, a table that leaves a problem without a rule."""
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(TuningTableError) as caught:
        load_table(str(path), SM_90A)
    assert str(path) in caught.value.message
    assert complaint in caught.value.message


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """Catches a UnicodeDecodeError that escapes the package's errors."""
    path = tmp_path / "mine.json"
    path.write_bytes(table_text().encode().replace(b"measured", b"\xff\xfe"))
    with pytest.raises(TuningTableError, match=str(path)):
        load_table(str(path), SM_90A)


def test_packaged_tables_state_where_they_come_from() -> None:
    """Catches a table of which nobody can say later why it chooses what it does."""
    for tuning in PACKAGED_TABLES:
        for target in TARGETS:
            table = load_table(tuning, Target.parse(target))
            assert table.name == tuning
            assert table.source


def test_a_table_that_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """A FIFO as a table would wait for a writer for ever, and a device may never end."""
    fifo = tmp_path / "table.json"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero")):
        with pytest.raises(TuningTableError, match="not a regular file"):
            load_table(str(path), SM_90A)


def test_warmup_keys_leave_out_what_the_library_computes(tmp_path: Path) -> None:
    """A warm-up that ends with an error for a cell without a kernel warms nothing up."""
    path = tmp_path / "table.json"
    path.write_text(
        '{"schema": 1, "name": "t", "source": "test", "rules": ['
        '{"tokens": [2, 64], "use": {"backend": "library"}},'
        '{"use": {"backend": "dotprod", "block": 128, "experts_per_block": 1}}]}'
    )
    keys = warmup_keys([(2048, 64)], range(1, 9), target=SM_90A, tuning=str(path))
    assert [key.config for key in keys] == [DotprodConfig(2048, 1, 128, 1)]
