"""The kernel families without the compiler: constraints at their borders, grids that cover."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llbf16_aot.backends import (
    BACKENDS,
    OPERANDS,
    Bf16x3Config,
    Bf16x3Tile,
    Config,
    DotprodConfig,
    DotprodTile,
    Fp32Config,
    Fp32Tile,
    OneshotConfig,
    OneshotTile,
    ProbeConfig,
    SplitkConfig,
    SplitkTile,
    Tile,
    backend_name,
    bf16x3,
    dotprod,
    fp32,
    oneshot,
    probe,
    splitk,
)
from llbf16_aot.errors import ConfigError
from llbf16_aot.launch import Extent, LaunchGeometry, ParamKind, ParamSource
from llbf16_aot.problem import FEW_TOKENS, MAX_EXPERTS, MAX_HIDDEN, DType, Problem

DOTPROD = DotprodConfig(hidden=7168, tokens=1, block=128, experts_per_block=1)
SPLITK = SplitkConfig(split_k=6, stages=4)
ONESHOT = OneshotConfig(hidden=7168, tokens=8, experts_tile=8, split_k=4, warps=8, vectors=2)
FP32 = Fp32Config(
    hidden=6144, tokens=8, experts_tile=16, experts_per_thread=4, split_k=8, warps=8, vectors=3
)
BF16X3 = Bf16x3Config(tokens_tile=64, experts_tile=64, k_warps=2, split_k=8, stages=3)
ROUTERS: dict[str, Config] = {
    "dotprod": DOTPROD,
    "splitk": SPLITK,
    "oneshot": ONESHOT,
    "fp32": FP32,
    "bf16x3": BF16X3,
}
BASES: dict[str, Config] = {**ROUTERS, "probe": ProbeConfig("producer")}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_family_has_a_configuration_that_is_accepted(backend: str) -> None:
    """Catches a check that refuses everything, and a family that these tests forgot."""
    BACKENDS[backend].check(BASES[backend])
    assert backend_name(BASES[backend]) == backend


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (DOTPROD, {"hidden": 8}),
        (DOTPROD, {"tokens": 16}),
        (DOTPROD, {"block": 64}),
        (DOTPROD, {"block": 32, "hidden": 8192}),
        (DOTPROD, {"block": 1024}),
        (DOTPROD, {"experts_per_block": 2}),
        (DOTPROD, {"hidden": 32768}),
        (DOTPROD, {"hidden": 16384, "experts_per_block": 2}),
        (SPLITK, {"split_k": 2}),
        (SPLITK, {"split_k": 8}),
        (SPLITK, {"stages": 2}),
        (SPLITK, {"stages": 5}),
        (ONESHOT, {"hidden": 8}),
        (ONESHOT, {"split_k": 1}),
        (ONESHOT, {"split_k": 8}),
        (FP32, {"hidden": 4}),
        (FP32, {"hidden": 6148}),
        (FP32, {"hidden": MAX_HIDDEN}),
        (FP32, {"tokens": 1}),
        (FP32, {"tokens": 32}),
        (FP32, {"split_k": 1}),
        (FP32, {"experts_tile": 4}),
        (FP32, {"vectors": 5}),
        (FP32, {"warps": 1}),
        (BF16X3, {"tokens_tile": 32}),
        (BF16X3, {"tokens_tile": 16, "k_warps": 1}),
        (BF16X3, {"tokens_tile": 128, "k_warps": 1, "stages": 2}),
        (BF16X3, {"split_k": 1}),
        (BF16X3, {"stages": 2}),
        (BF16X3, {"experts_tile": 16, "k_warps": 4}),
    ],
)
def test_configurations_at_the_borders_are_accepted(base: Config, changes: dict[str, int]) -> None:
    """Catches a border that is off by one on the inner side."""
    config = msgspec.structs.replace(base, **changes)
    BACKENDS[backend_name(config)].check(config)


@pytest.mark.parametrize(
    ("base", "changes", "named", "reason"),
    [
        (DOTPROD, {"hidden": 0}, "hidden is 0", "128-bit"),
        (DOTPROD, {"hidden": -8}, "hidden is -8", "128-bit"),
        (DOTPROD, {"hidden": 7164}, "hidden is 7164", "128-bit"),
        (DOTPROD, {"tokens": 0}, "tokens is 0", "registers"),
        (DOTPROD, {"tokens": 17}, "tokens is 17", "registers"),
        (DOTPROD, {"block": 0}, "block is 0", "warps"),
        (DOTPROD, {"block": 16}, "block is 16", "warps"),
        (DOTPROD, {"block": 48}, "block is 48", "warps"),
        (DOTPROD, {"block": 1056}, "block is 1056", "1024 threads"),
        (DOTPROD, {"experts_per_block": 0}, "experts_per_block is 0", "registers"),
        (DOTPROD, {"experts_per_block": 3}, "experts_per_block is 3", "registers"),
        (DOTPROD, {"hidden": 32776}, "hidden 32776", "registers"),
        (DOTPROD, {"hidden": 16392, "experts_per_block": 2}, "hidden 16392", "registers"),
        (DOTPROD, {"block": 32, "hidden": 8200}, "hidden 8200", "registers"),
        (SPLITK, {"split_k": 1}, "split_k is 1", "st.async"),
        (SPLITK, {"split_k": 0}, "split_k is 0", "st.async"),
        (SPLITK, {"split_k": 9}, "split_k is 9", "portable"),
        (SPLITK, {"stages": 1}, "stages is 1", "overlap"),
        (SPLITK, {"stages": 0}, "stages is 0", "overlap"),
        (SPLITK, {"stages": 6}, "stages is 6", "shared memory"),
        (ONESHOT, {"hidden": 7164}, "hidden is 7164", "128-bit"),
        (ONESHOT, {"hidden": 0}, "hidden is 0", "128-bit"),
        (ONESHOT, {"tokens": 12}, "tokens is 12", "mma"),
        (ONESHOT, {"experts_tile": 12}, "experts_tile is 12", "mma"),
        (ONESHOT, {"split_k": 0}, "split_k is 0", "portable"),
        (ONESHOT, {"split_k": 17}, "split_k is 17", "portable"),
        (ONESHOT, {"warps": 0}, "warps is 0", "1024 threads"),
        (ONESHOT, {"warps": 33}, "warps is 33", "1024 threads"),
        (ONESHOT, {"vectors": 0}, "vectors is 0", "at least 1"),
        (ONESHOT, {"hidden": MAX_HIDDEN}, f"hidden {MAX_HIDDEN}", "unrolled"),
        (ONESHOT, {"vectors": 21}, "21 vectors", "registers"),
        (FP32, {"hidden": 0}, "hidden is 0", "128-bit"),
        (FP32, {"hidden": 6146}, "hidden is 6146", "128-bit"),
        (FP32, {"tokens": 0}, "tokens is 0", "halve"),
        (FP32, {"tokens": 12}, "tokens is 12", "passes of 8"),
        (FP32, {"tokens": 40}, "tokens is 40", "passes of 8"),
        (FP32, {"experts_per_thread": 3}, "experts_per_thread is 3", "halve"),
        (FP32, {"experts_tile": 32}, "experts_tile is 32", "128-byte lines"),
        (
            FP32,
            {"experts_tile": 2, "experts_per_thread": 2},
            "experts_tile is 2",
            "groups of up to 4",
        ),
        (FP32, {"split_k": 0}, "split_k is 0", "portable"),
        (FP32, {"split_k": 9}, "split_k is 9", "portable"),
        (FP32, {"warps": 0}, "warps is 0", "1024 threads"),
        (FP32, {"warps": 33}, "warps is 33", "1024 threads"),
        (FP32, {"vectors": 0}, "vectors is 0", "registers"),
        (FP32, {"vectors": 9}, "vectors is 9", "registers"),
        (FP32, {"vectors": 8}, "8 vectors", "registers"),
        (FP32, {"warps": 17}, "17 warps", "registers"),
        (FP32, {"tokens": 32, "warps": 20, "vectors": 1}, "20 warps", "static shared memory"),
        (
            FP32,
            {"experts_tile": 4, "experts_per_thread": 4, "warps": 9, "vectors": 3},
            "9 warps",
            "every supported SM",
        ),
        (BF16X3, {"tokens_tile": 8}, "tokens_tile is 8", "n8"),
        (BF16X3, {"tokens_tile": 16}, "tokens_tile is 16", "128-bit copy"),
        (BF16X3, {"experts_tile": 8}, "experts_tile is 8", "m16"),
        (BF16X3, {"k_warps": 3}, "k_warps is 3", "4 steps"),
        (BF16X3, {"k_warps": 4}, "16 warps", "255 registers"),
        (BF16X3, {"experts_tile": 16, "k_warps": 1}, "1 warps", "schedulers"),
        (BF16X3, {"split_k": 0}, "split_k is 0", "portable"),
        (BF16X3, {"split_k": 9}, "split_k is 9", "portable"),
        (BF16X3, {"stages": 1}, "stages is 1", "overlap"),
        (BF16X3, {"stages": 7}, "stages is 7", "overlap"),
        (BF16X3, {"stages": 4}, "stages is 4", "shared memory"),
    ],
)
def test_configurations_beyond_the_borders_are_refused_with_value_and_reason(
    base: Config, changes: dict[str, int], named: str, reason: str
) -> None:
    """Catches a constraint that is not checked: the kernel would spill, trap or fail to launch."""
    config = msgspec.structs.replace(base, **changes)
    with pytest.raises(ConfigError) as caught:
        BACKENDS[backend_name(config)].check(config)
    assert caught.value.message.startswith(f"{backend_name(config)}: ")
    assert named in caught.value.message
    assert reason in caught.value.message


tiles: st.SearchStrategy[Tile] = st.one_of(
    st.builds(
        DotprodTile,
        block=st.integers(1, 32).map(lambda n: 32 * n),
        experts_per_block=st.integers(1, 2),
    ),
    st.builds(SplitkTile, split_k=st.integers(2, splitk.MAX_SPLIT_K), stages=st.integers(2, 5)),
    st.builds(
        OneshotTile,
        experts_tile=st.sampled_from(oneshot.EXPERTS_TILES),
        split_k=st.integers(1, oneshot.MAX_SPLIT_K),
        warps=st.integers(1, 16),
        vectors=st.integers(1, 4),
    ),
    st.builds(
        Fp32Tile,
        experts_tile=st.sampled_from((4, 8, 16, 32)),
        experts_per_thread=st.sampled_from(fp32.EXPERTS_PER_THREAD),
        split_k=st.integers(1, fp32.MAX_SPLIT_K),
        warps=st.integers(1, 16),
        vectors=st.integers(1, 6),
    ),
    st.builds(
        Bf16x3Tile,
        tokens_tile=st.sampled_from(bf16x3.TOKENS_TILES),
        experts_tile=st.sampled_from(bf16x3.EXPERTS_TILES),
        k_warps=st.sampled_from(bf16x3.K_WARPS),
        split_k=st.integers(1, bf16x3.MAX_SPLIT_K),
        stages=st.integers(2, 4),
    ),
)
problems = st.builds(
    Problem,
    tokens=st.integers(1, FEW_TOKENS),
    experts=st.integers(1, MAX_EXPERTS),
    hidden=st.integers(1, 4096).map(lambda n: 8 * n),
)


def accepted_geometry(tile: Tile, problem: Problem) -> tuple[Config, LaunchGeometry] | None:
    backend = BACKENDS[backend_name(tile)]
    weight_dtype = OPERANDS[backend_name(tile)][0][1]
    problem = msgspec.structs.replace(problem, weight_dtype=weight_dtype)
    config = backend.config_for(tile, problem)
    try:
        backend.check(config)
    except ConfigError:
        return None
    return config, backend.geometry(config)


@given(tiles, problems)
def test_a_grid_covers_all_tokens_and_experts_without_an_empty_tile(
    tile: Tile, problem: Problem
) -> None:
    """Catches a last tile that is dropped, and blocks that have nothing to do."""
    found = accepted_geometry(tile, problem)
    if found is None:
        return
    geometry = found[1]
    for extent, size in ((Extent.TOKENS, problem.tokens), (Extent.EXPERTS, problem.experts)):
        (dim,) = (dim for dim in geometry.grid if dim.extent is extent)
        assert dim.blocks == 1
        starts = [tile * dim.tile for tile in range(dim.resolve(problem))]
        assert starts[0] == 0
        assert starts[-1] < size <= starts[-1] + dim.tile


@given(tiles, problems)
def test_a_launch_is_within_what_cuda_allows(tile: Tile, problem: Problem) -> None:
    """Catches a launch that the driver refuses, or whose grid its clusters do not divide."""
    found = accepted_geometry(tile, problem)
    if found is None:
        return
    geometry = found[1]
    grid = [dim.resolve(problem) for dim in geometry.grid]
    threads = geometry.block[0] * geometry.block[1] * geometry.block[2]
    blocks = geometry.cluster[0] * geometry.cluster[1] * geometry.cluster[2]
    assert 1 <= threads <= 1024
    assert threads % 32 == 0
    assert 1 <= blocks <= 8
    assert all(extent % size == 0 for extent, size in zip(grid, geometry.cluster, strict=True))
    assert 1 <= grid[0] < 2**31
    assert 1 <= grid[1] < 2**16
    assert 1 <= grid[2] < 2**16
    assert 0 <= geometry.dynamic_shared_bytes <= 99 * 1024


@given(tiles, problems)
def test_the_launch_of_a_configuration_does_not_depend_on_the_problem(
    tile: Tile, problem: Problem
) -> None:
    """Catches two problems that share a key but would need different launch records."""
    backend = BACKENDS[backend_name(tile)]
    found = accepted_geometry(tile, problem)
    if found is not None:
        assert backend.geometry(found[0]) == found[1]
        assert backend.config_for(tile, problem) == found[0]


@pytest.mark.parametrize("backend", ROUTERS)
def test_parameters_are_the_three_tensors_first_and_each_once(backend: str) -> None:
    """Catches a parameter that is listed twice, and one that a kernel cannot do without."""
    params = BACKENDS[backend].PARAMS
    assert params[:3] == (ParamSource.X, ParamSource.WEIGHT, ParamSource.OUT)
    assert len(set(params)) == len(params)
    assert {ParamSource.TOKENS, ParamSource.EXPERTS} <= set(params)
    assert {ParamSource.X_ROW_STRIDE, ParamSource.WEIGHT_ROW_STRIDE} <= set(params)
    assert all(source.kind is ParamKind.INT32 for source in params[3:])


@pytest.mark.parametrize("backend", ROUTERS)
def test_the_size_k_is_either_static_or_a_parameter(backend: str) -> None:
    """Catches a kernel that nobody tells how long a row is, or that is told twice."""
    static = "hidden" in BASES[backend].__struct_fields__
    assert static != (ParamSource.HIDDEN in BACKENDS[backend].PARAMS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sources_are_sorted_and_name_the_family_its_kernel_and_what_all_share(
    backend: str,
) -> None:
    """Catches a family that forgot its own kernel in what the digest covers."""
    sources = BACKENDS[backend].SOURCES
    assert list(sources) == sorted(set(sources))
    assert {f"backends/{backend}.py", f"kernels/{backend}.py", "kernels/common.py"} <= set(sources)


def test_dotprod_unrolls_its_loads_for_the_whole_row() -> None:
    """Catches a number of loads that leaves the end of a row out."""
    assert [
        msgspec.structs.replace(DOTPROD, hidden=hidden).steps for hidden in (8, 1024, 1032, 7168)
    ] == [1, 1, 2, 7]
    assert dotprod.config_for(DotprodTile(), Problem(17, 8, 1024)).tokens == 16


def test_splitk_is_one_kernel_for_every_problem() -> None:
    """Catches a static size that would make one artifact a shape."""
    tile = SplitkTile(split_k=7, stages=5)
    configs = {
        splitk.config_for(tile, Problem(tokens, experts, hidden))
        for tokens, experts, hidden in ((1, 8, 8), (64, 1024, 7168), (16, 7, 2880))
    }
    assert configs == {SplitkConfig(split_k=7, stages=5)}


def test_splitk_shares_all_sums_among_the_blocks_of_its_cluster() -> None:
    """Catches sums that no block owns, where the cluster does not divide them evenly."""
    for split_k in range(2, splitk.MAX_SPLIT_K + 1):
        for experts_tile in splitk.EXPERTS_TILES:
            owned = SplitkConfig(split_k, 2, experts_tile).owned
            tile = splitk.TOKENS_TILE * experts_tile
            assert (split_k - 1) * owned < tile <= split_k * owned


tiles_fp32 = st.builds(
    Fp32Config,
    hidden=st.integers(1, 1000).map(lambda n: 4 * n),
    tokens=st.sampled_from(fp32.TOKENS),
    experts_tile=st.sampled_from((4, 8, 16, 32)),
    experts_per_thread=st.sampled_from(fp32.EXPERTS_PER_THREAD),
    split_k=st.integers(1, fp32.MAX_SPLIT_K),
    warps=st.integers(1, 6),
    vectors=st.integers(1, 4),
)


@given(tiles_fp32)
def test_the_lanes_of_an_fp32_tile_take_each_weight_exactly_once(config: Fp32Config) -> None:
    """Catches a column that two lanes add, or none: sums would be wrong for some K alone.

    By the kernel's own rule: vector v of a lane is (part * vectors + v) * lanes + lane of its row,
    and the parts of K go by rank, round and warp.
    """
    try:
        fp32.check(config)
    except ConfigError:
        return
    lanes, vectors, width = config.lanes, config.vectors, fp32.WEIGHT_ELEMENTS
    taken = [
        part * config.slice + (v * lanes + lane) * width
        for rank in range(config.split_k)
        for round_ in range(config.rounds)
        for warp in range(config.warps)
        for part in [(rank * config.rounds + round_) * config.warps + warp]
        for v in range(vectors)
        for lane in range(lanes)
    ]
    inside = [column for column in taken if column < config.hidden]
    assert sorted(inside) == list(range(0, config.hidden, width))
    assert config.exact == (len(inside) == len(taken))
    assert 32 // lanes * config.experts_per_thread == config.experts_tile


@pytest.mark.parametrize("lanes", fp32.LANES)
@pytest.mark.parametrize("vectors", [1, 2, 3, 6])
def test_the_turned_quads_of_x_are_each_once_and_in_different_banks(
    lanes: int, vectors: int
) -> None:
    """Catches a place in shared memory that two quads share, and the conflicts that turning saves.

    Quads 2n and 2n + 1 are written by one lane; bit 3 of a quad's number turns the pair.
    """
    quads = range(lanes * vectors)
    place = {q: q ^ (q >> 3 & 1) for q in quads}
    assert sorted(place.values()) == list(quads)
    for start in range(0, len(place), 8):
        assert len({place[start + i] % 8 for i in range(8)}) == 8
    if len(place) >= 16:
        for start in range(0, len(place) - 15, 16):
            assert len({place[start + 2 * i] % 8 for i in range(8)}) == 8
    # As the kernel reads them: by vector and lane, from one address of its own a vector's parity.
    for v in range(vectors):
        for k in range(lanes):
            turn = v % 2 if lanes == 8 else k // 8 % 2
            assert place[v * lanes + k] == v * lanes + (k ^ turn)


def test_fp32_takes_the_smallest_number_of_tokens_that_is_compiled() -> None:
    """Catches a tile that holds fewer tokens than the problem has: the last were not computed."""
    tile = Fp32Tile(16, 4, 8, 8, 3)
    found = {
        m: fp32.config_for(tile, Problem(m, 8, 6144, weight_dtype=DType.FP32)).tokens
        for m in range(1, 33)
    }
    assert all(tokens >= m for m, tokens in found.items())
    assert sorted(set(found.values())) == list(fp32.TOKENS)
    assert [found[m] for m in (1, 2, 3, 4, 5, 8, 9, 17, 25)] == [1, 2, 4, 4, 8, 8, 16, 24, 32]


def test_bf16x3_is_one_kernel_for_every_problem() -> None:
    """Catches a static size that would make one artifact a shape, or one a number of tokens."""
    tile = Bf16x3Tile(64, 64, 2, 8, 3)
    configs = {
        bf16x3.config_for(tile, Problem(m, n, k, weight_dtype=DType.FP32))
        for m, n, k in ((1, 8, 8), (65_536, 1024, 7168), (100, 7, 2880))
    }
    assert configs == {BF16X3}


@pytest.mark.parametrize("config", [FP32, BF16X3])
def test_families_with_fp32_weights_share_all_sums_among_the_blocks(config: Config) -> None:
    """Catches sums that no block owns, and a vector of four that two blocks would own."""
    for split_k in range(1, 9):
        changed = msgspec.structs.replace(config, split_k=split_k)
        assert isinstance(changed, Fp32Config | Bf16x3Config)
        assert changed.owned % 4 == 0
        assert changed.owned * split_k >= changed.sums > changed.owned * split_k - 4 * split_k


def test_bf16x3_keeps_peers_sums_off_its_own() -> None:
    """Catches an inbox that overlaps the warps' sums, which are read while peers write."""
    for tokens_tile in bf16x3.TOKENS_TILES:
        for experts_tile in bf16x3.EXPERTS_TILES:
            config = msgspec.structs.replace(
                BF16X3, tokens_tile=tokens_tile, experts_tile=experts_tile
            )
            inbox = config.split_k * config.owned * 4
            assert config.partial_bytes >= config.k_warps * config.sums * 4
            assert config.partial_bytes % 16 == 0
            assert config.dynamic_shared_bytes >= config.partial_bytes + inbox
            assert config.dynamic_shared_bytes >= config.stages * config.stage_bytes


def test_the_probe_has_a_kind_and_covers_x() -> None:
    """Catches a producer that leaves the end of a row unwritten, and a kind that is no kernel."""
    with pytest.raises(ConfigError, match="kind is 'both'"):
        probe.check(ProbeConfig("both"))  # type: ignore[arg-type]
    grid = probe.geometry(ProbeConfig("producer")).grid
    problem = Problem(tokens=5, experts=256, hidden=2056)
    elements = probe.BLOCK_THREADS * 8
    assert [dim.resolve(problem) for dim in grid] == [2, 5, 1]
    assert elements < problem.hidden <= 2 * elements
