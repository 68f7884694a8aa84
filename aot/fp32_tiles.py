"""Tiles of the families with fp32 weights: what is worth measuring, and what is used until it is.

Pure, and a function of the problem alone, so that builder and runtime agree. A measured rule of a
tuning table comes before the choice that is made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import msgspec

from .backends import bf16x3, fp32, oneshot, works
from .backends.bf16x3 import HIDDEN_TILE, Bf16x3Config, Bf16x3Tile
from .backends.fp32 import Fp32Config, Fp32Tile
from .backends.oneshot import BLOCK_ELEMENTS, OneshotConfig, OneshotTile
from .errors import UnsupportedProblemError
from .problem import FEW_TOKENS, DType, Problem

__all__ = ["SPANS", "bf16x3_space", "default_tile", "fp32_space"]

SMS = 132
"""SMs of an H200, for which the choice is made; GPUs with more of them are served well enough."""

SHAPES = ((16, 4), (8, 4), (8, 2), (4, 4), (32, 8))
"""Experts of a tile and of a thread that are tried."""

SPLITS = (1, 2, 4, 6, 8)
EXACT_SPLITS = (3, 5, 7)
"""Splits that are tried only where they part K evenly among whole warps."""

VECTORS = range(1, 7)
MAX_WARPS = 16
"""More warps leave too few registers for the weights of four experts."""

BF16X3_SPLITS = (1, 2, 3, 4, 6, 8)
BF16X3_STAGES = (2, 3, 4)

MAX_WASTE = 0.15
"""Largest share of lanes that load nothing, where another tile wastes less."""

SPANS = (128, 256, 512, 1024)
"""Upper ends of the spans of M above FEW_TOKENS that share a tile, and so an artifact. Larger M
belong to the last."""

ONE_WAVE, TWO_WAVES = range(1, 101), range(150, 201)
"""Blocks of `bf16x3` that an H200 runs at once, one or two on each SM. In between, and above, some
SMs have twice the work of others: in a sweep over 5 shapes clusters of 6 beat those of 8 there."""

SMALL_BF16X3 = Bf16x3Tile(tokens_tile=64, experts_tile=32, k_warps=2, split_k=1, stages=3)
LARGE_BF16X3 = Bf16x3Tile(tokens_tile=128, experts_tile=32, k_warps=1, split_k=1, stages=3)
LEAST_SPLIT_OF_SMALL = 6
"""The tiles for M above FEW_TOKENS, without their split of K; the small one is taken from this
split on."""

ONESHOT_TOKENS = (3, 64)
"""M that `oneshot` serves where x is bf16, by the 5 shapes measured on an H200: 1 and 2 are left to
FMA units, more than 64 to a kernel that does not read the weights again for each 32."""

ONESHOT_SPLIT_K = 8
_ONESHOT_OTHERS = 30
"""Registers of a thread beside vectors, terms and sums: addresses, mostly."""

ONESHOT_WARPS = range(4, 17)
FEW_EXPERTS = 64
"""Up to so many experts, tiles of 8 keep more SMs busy than tiles of 16."""

LATE_RELEASE_TOKENS = 16

# What the estimates count with: cycles of an SM at 1.8 GHz.
_WEIGHT_BYTES_A_CYCLE = 18.0  # 4.2 TB/s over all SMs
_X_BYTES_A_CYCLE = 32.0
_EXCHANGE_CYCLES = 900.0  # sums to another block of the cluster, and their addition there
_HEAD_START = 0.6  # part of the time for the weights that is not hidden behind the kernel ahead
_ALONE = 0.6  # of a warp's instructions: what it waits for itself, however few warps there are
_BLOCK_CYCLES = 250.0  # to start a block
_MMA_CYCLES = 6.5  # of one of an SM's four tensor cores, for one m16n8k16
_SPLIT_CYCLES = 60.0  # to read and cut the weights of a warp's step
_COPY_BYTES_A_CYCLE = 40.0  # from L2 to one SM
_STAGE_CYCLES = 150.0  # barriers and waits of a stage, where nothing else hides them
_WAVE_CYCLES = 2500.0  # first copies, exchange of sums
_THREAD_REGISTERS = 168
_SM_SHARED_BYTES = 227 * 1024


def default_tile(problem: Problem) -> Fp32Tile | Bf16x3Tile | OneshotTile:
    """The tile for a problem with fp32 weights that no rule of a tuning table admits.

    Raises UnsupportedProblemError where no family computes it.
    """
    problem.check()
    if problem.weight_dtype is not DType.FP32:
        raise UnsupportedProblemError(f"no tuning rule for {problem}")
    first, last = ONESHOT_TOKENS
    if problem.x_dtype is DType.BF16 and first <= problem.tokens <= last:
        tile = _default_oneshot(problem)
        if tile is not None:
            return tile
    if problem.tokens <= fp32.MAX_TOKENS:
        return _default_fp32(problem.hidden, problem.experts, problem.tokens, problem.x_dtype)
    if problem.tokens <= FEW_TOKENS:
        return _default_bf16x3(problem.hidden, problem.experts, problem.tokens)
    tokens = next((most for most in SPANS if most >= problem.tokens), SPANS[-1])
    return _large_bf16x3(problem.hidden, problem.experts, tokens)


def fp32_space(hidden: int, tokens: int, x_dtype: DType = DType.BF16) -> tuple[Fp32Tile, ...]:
    """The `fp32` tiles to measure for a hidden size and a number of tokens, each once, in order.

    Each passes the family's `check`. Tiles that load K in one round with little waste; where there
    are none, because K is short or long, those that waste least.
    """
    problem = _problem(hidden, 1, tokens, x_dtype)
    found = list(_tiles(problem))
    least = min((waste for _, waste in found), default=0.0)
    return tuple(tile for tile, waste in found if waste <= max(MAX_WASTE, least))


def bf16x3_space(hidden: int, tokens: int) -> tuple[Bf16x3Tile, ...]:
    """The `bf16x3` tiles to measure for a hidden size and a number of tokens, each once, in order.

    Each passes the family's `check`, and is no larger than the tokens ask for. No block of a
    cluster is without a K tile, unless K has a single one.
    """
    k_tiles = -(-hidden // HIDDEN_TILE)
    largest = next((t for t in bf16x3.TOKENS_TILES if t >= tokens), bf16x3.TOKENS_TILES[-1])
    shapes = product(bf16x3.TOKENS_TILES, bf16x3.EXPERTS_TILES, bf16x3.K_WARPS, BF16X3_SPLITS)
    found = []
    for tokens_tile, experts_tile, k_warps, split_k in shapes:
        if tokens_tile > largest or split_k > k_tiles:
            continue
        for stages in BF16X3_STAGES:
            tile = Bf16x3Tile(tokens_tile, experts_tile, k_warps, split_k, stages)
            if works(bf16x3.config_for(tile, _problem(hidden, 1, tokens, DType.BF16))):
                found.append(tile)
    return tuple(found)


@lru_cache(maxsize=4096)
def _default_bf16x3(hidden: int, experts: int, tokens: int) -> Bf16x3Tile:
    """The tile of the least estimate; of equal ones the first with the most stages."""
    problem = _problem(hidden, experts, tokens, DType.BF16)
    return min(
        bf16x3_space(hidden, tokens),
        key=lambda tile: (
            _estimate_bf16x3(bf16x3.config_for(tile, problem), problem),
            -tile.stages,
        ),
    )


def _large_bf16x3(hidden: int, experts: int, tokens: int) -> Bf16x3Tile:
    """A tile that gives all SMs alike to do, of a shape that mostly won where M was measured.

    Small tiles where K can be split enough to fill the GPU with them, large ones elsewhere, which
    read less for each product.
    """
    for tile in (SMALL_BF16X3, LARGE_BF16X3):
        clusters = -(-experts // tile.experts_tile) * -(-tokens // tile.tokens_tile)
        split_k = _even_split(clusters, hidden)
        if split_k >= LEAST_SPLIT_OF_SMALL:
            break
    return msgspec.structs.replace(tile, split_k=split_k)


def _even_split(clusters: int, hidden: int) -> int:
    """The largest split of K for so many clusters that fills an H200 once or twice; 1 at least."""
    most = -(-hidden // HIDDEN_TILE)
    return max(
        split_k
        for split_k in BF16X3_SPLITS
        if split_k == 1
        or (split_k <= most and (clusters * split_k in ONE_WAVE or clusters * split_k in TWO_WAVES))
    )


def _default_oneshot(problem: Problem) -> OneshotTile | None:
    """The tile of fewest vectors a warp whose warps load all of K at once; none where K is long."""
    blocks = -(-problem.hidden // (BLOCK_ELEMENTS * ONESHOT_SPLIT_K))
    few = problem.experts <= FEW_EXPERTS
    for vectors in VECTORS:
        warps = max(-(-blocks // vectors), ONESHOT_WARPS.start)
        tile = OneshotTile(
            experts_tile=8 if few else 16,
            split_k=ONESHOT_SPLIT_K,
            warps=warps,
            vectors=vectors,
            release="wait" if problem.tokens > LATE_RELEASE_TOKENS else "start",
        )
        config = oneshot.config_for(tile, problem)
        if warps in ONESHOT_WARPS and config.rounds == 1 and _fits(config):
            return tile
    return None


def _fits(config: OneshotConfig) -> bool:
    """Whether the kernel is allowed, and surely needs no local memory: nobody has compiled it."""
    if not works(config):
        return False
    rows, columns = config.experts_tile // 8, config.tokens // 8
    vectors = config.vectors * (2 * config.weight_bytes * rows + 4 * columns)
    terms = 4 * config.terms * rows
    sums = 4 * config.terms * columns * max(1, rows // 2)
    # Registers are given out to four warps at a time, one for each part of an SM.
    threads = -(-config.warps // 4) * 4 * 32
    return vectors + terms + sums + _ONESHOT_OTHERS <= min(255, oneshot.REGISTER_FILE // threads)


@lru_cache(maxsize=4096)
def _default_fp32(hidden: int, experts: int, tokens: int, x_dtype: DType) -> Fp32Tile:
    problem = _problem(hidden, experts, tokens, x_dtype)
    best = min(
        (
            (_estimate(config, experts), number, tile)
            for number, tile in enumerate(fp32_space(hidden, tokens, x_dtype))
            if not _spills(config := fp32.config_for(tile, problem))
        ),
        default=None,
    )
    if best is None:
        raise UnsupportedProblemError(f"no tile of the family fp32 works for {problem}")
    return best[2]


def _spills(config: Fp32Config) -> bool:
    """Whether the kernel needs local memory, seen where K is no multiple of what its lanes load."""
    held = config.vectors * config.experts_per_thread
    return not config.exact and held >= 10 and config.tokens > 8


def _problem(hidden: int, experts: int, tokens: int, x_dtype: DType) -> Problem:
    return Problem(tokens, experts, hidden, x_dtype=x_dtype, weight_dtype=DType.FP32)


def _tiles(problem: Problem) -> Iterator[tuple[Fp32Tile, float]]:
    """Tiles that work, of as few rounds over K as 16 warps need, with the share of idle lanes."""
    for experts_tile, experts_per_thread in SHAPES:
        for split_k in sorted({*SPLITS, *EXACT_SPLITS}):
            for vectors in VECTORS:
                piece = 32 * experts_per_thread // experts_tile * vectors * fp32.WEIGHT_ELEMENTS
                pieces = -(-problem.hidden // (piece * split_k))
                rounds = -(-pieces // MAX_WARPS)
                warps = -(-pieces // rounds)
                waste = split_k * warps * rounds * piece / problem.hidden - 1
                if split_k in EXACT_SPLITS and waste:
                    continue
                tile = Fp32Tile(experts_tile, experts_per_thread, split_k, warps, vectors)
                if works(fp32.config_for(tile, problem)):
                    yield tile, waste


def _estimate(config: Fp32Config, experts: int) -> float:
    """Cycles that a call might take: enough to order tiles, no prediction of a time."""
    per_thread, tile = config.experts_per_thread, config.tokens_tile
    blocks = -(-experts // config.experts_tile) * config.split_k
    per_sm = -(-blocks // SMS)
    share = -(-config.hidden // config.split_k)
    weights = per_sm * config.experts_tile * share * 4 / _WEIGHT_BYTES_A_CYCLE
    x = per_sm * config.tokens * share * 2 / _X_BYTES_A_CYCLE
    # Instructions of a warp in a pass: products, reads of x, exchanges between lanes, bringing x.
    products = per_thread * tile * config.vectors * 4
    reads = 2 * tile * config.vectors
    exchanges = 3 * per_thread * tile
    brings = 2 * tile * config.lanes * config.vectors // 32 + 60
    busiest = -(-config.warps * per_sm // 4)  # warps of the busiest of an SM's four schedulers
    instructions = products + reads + exchanges + brings
    multiply = config.rounds * config.passes * (busiest + _ALONE) * instructions
    add = -(-config.sums // (config.warps * 32)) * config.warps * 6 * per_sm
    exchange = _EXCHANGE_CYCLES + 12 * config.split_k if config.split_k > 1 else 0.0
    return _HEAD_START * weights + x + multiply + add + exchange + _BLOCK_CYCLES * per_sm


def _estimate_bf16x3(config: Bf16x3Config, problem: Problem) -> float:
    """Cycles that a call might take: enough to order tiles, no prediction of a time."""
    blocks = (
        -(-problem.experts // config.experts_tile)
        * -(-problem.tokens // config.tokens_tile)
        * config.split_k
    )
    stages = -(-problem.hidden // (HIDDEN_TILE * config.split_k))
    resident = min(
        fp32.REGISTER_FILE // (config.warps * 32 * _THREAD_REGISTERS),
        _SM_SHARED_BYTES // (config.dynamic_shared_bytes + 2048),
    )
    steps = HIDDEN_TILE // 16 * config.token_warps * config.expert_warps  # of all warps
    # A warp's tensor core is busy while it, or another of its scheduler, cuts the next weights.
    products = steps * (config.warp_tokens // 8) * 3 * _MMA_CYCLES / 4
    cuts = steps * _SPLIT_CYCLES / 4
    copies = config.stage_bytes / _COPY_BYTES_A_CYCLE
    work = -(-blocks // SMS) * stages * max(products + cuts / 2, copies)
    waves = -(-blocks // (SMS * resident))
    exchange = 2 * config.sums / (config.warps * 32) * config.split_k
    fill = 400.0 / (config.stages - 1)
    return work + waves * (_WAVE_CYCLES + stages * (_STAGE_CYCLES + fill) + 4 * exchange)
