"""The search space: every tile worth measuring for a problem, in a stable order.

Pure: needs neither compiler nor GPU. What a tuning run measures and what a candidate build compiles
come from here, so that they agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Literal

import msgspec

from .backends import (
    BACKENDS,
    Config,
    DotprodTile,
    OneshotTile,
    ProbeConfig,
    SplitkTile,
    Tile,
    backend_name,
    works,
)
from .backends.oneshot import BLOCK_ELEMENTS, EXPERTS_TILES, config_for
from .fp32_tiles import SPANS, bf16x3_space, fp32_space
from .key import CompileKey
from .problem import FEW_TOKENS, OPERAND_TOKENS, VECTOR_ELEMENTS, DType, Problem, Target

__all__ = [
    "PROBES",
    "REPRESENTATIVE_FP32_TOKENS",
    "REPRESENTATIVE_TOKENS",
    "candidate_keys",
    "candidate_tiles",
    "key_for",
    "probe_key",
    "probe_keys",
    "representative_tokens",
    "search_space",
    "tokens_span",
]

REPRESENTATIVE_TOKENS = {
    24: (17, 24),
    32: (25, 32),
    48: (33, 48),
    64: (49, 64),
    96: (65, 96),
    128: (97, 128),
    192: (129, 192),
    256: (193, 256),
}
"""Above 16 tokens one measured M stands for a span: kernels work in tiles of 16 or 32 there."""

REPRESENTATIVE_FP32_TOKENS = {
    **{tokens: span for tokens, span in REPRESENTATIVE_TOKENS.items() if tokens <= FEW_TOKENS},
    **{last: (before + 1, last) for before, last in itertools.pairwise((FEW_TOKENS, *SPANS[:-1]))},
    SPANS[-1]: (SPANS[-2] + 1, OPERAND_TOKENS[DType.BF16, DType.FP32]),
}
"""The same with fp32 weights, which kernels take at any M: the spans of `fp32_tiles`."""

PROBES: tuple[Literal["producer", "empty"], ...] = ("producer", "empty")
"""The kernels that measurements need beside the candidates."""

SPLITS = (1, 2, 4, 6, 8)
EXACT_SPLITS = (5, 7)
"""Splits that are tried only where they part K evenly, and only with the wider tiles."""

VECTORS = (1, 2, 3, 4, 6, 8)
WARPS = range(4, 29)

MAX_WASTE = 0.08
"""Largest share of lanes that load nothing: beyond it a neighbouring tile was always faster."""

FEW = 40
"""Where fewer `oneshot` tiles than this load K in one round, tiles of two rounds are added."""

LATE_RELEASE_TOKENS = 8
"""Above it `oneshot` tiles are also tried with a late release of the next kernel: there x is large
enough that the next kernel's weights get in its way. Below it an early release won."""

DOTPROD_BLOCKS = (128, 256, 512, 1024)
DOTPROD_LATE_BLOCKS = (256, 512)
DOTPROD_TOKENS = 4
DOTPROD_MAX_TOKENS = 8
"""Above it the dot-product design loses to tensor cores in every cell that was measured."""

DOTPROD_MAX_WASTE = 0.25

FP32_ONESHOT = (3, 128)
"""M for which `oneshot` is tried with fp32 weights: below, FMA units won in every cell; above, it
reads the weights too often."""

FMA_TOKENS = 16
"""Largest M for which the family `fp32` is tried: beyond, tensor cores won in every cell."""

BF16X3_TOKENS = 32
"""M above which `bf16x3` is tried."""

SPLITK_TILES = (
    *(SplitkTile(s, stages) for s, stages in ((6, 4), (8, 2), (8, 5), (7, 5), (6, 5))),
    *(SplitkTile(8, stages, 32, hidden) for stages, hidden in ((3, 256), (5, 128), (7, 128))),
    *(SplitkTile(8, stages, 64, hidden) for stages, hidden in ((2, 256), (4, 128))),
)
"""The published tiles, and those that won a sweep among tiles that read x less often: an artifact
of this family serves every shape, so each costs one compile."""


@lru_cache(maxsize=4096)
def search_space(hidden: int, tokens: int, weight_dtype: DType = DType.BF16) -> tuple[Tile, ...]:
    """The tiles to measure for a hidden size, a number of tokens and a type of weights, each once.

    x is bf16. Every tile passes its family's `check` for this problem. The number of experts
    changes no tile: it only changes how many thread blocks there are.
    """
    problem = Problem(tokens, 1, hidden, weight_dtype=weight_dtype)
    wide = weight_dtype is DType.FP32
    oneshot = () if wide and not FP32_ONESHOT[0] <= tokens <= FP32_ONESHOT[1] else _oneshot(problem)
    late = oneshot if tokens > LATE_RELEASE_TOKENS else ()
    tiles: tuple[Tile, ...] = (
        *oneshot,
        *(msgspec.structs.replace(tile, release="wait") for tile in late),
    )
    if not wide:
        tiles = (*tiles, *_dotprod(problem), *SPLITK_TILES)
    else:
        if tokens <= FMA_TOKENS or (tokens <= BF16X3_TOKENS and not oneshot):
            tiles = (*tiles, *fp32_space(hidden, tokens))
        if tokens > BF16X3_TOKENS:
            tiles = (*tiles, *bf16x3_space(hidden, tokens))
    return tuple(tile for tile in tiles if works(_config(tile, problem)))


def candidate_tiles(problem: Problem, backends: Collection[str] = ()) -> tuple[Tile, ...]:
    """The search space of a problem; where families are named, only theirs."""
    tiles = search_space(problem.hidden, problem.tokens, problem.weight_dtype)
    return tuple(tile for tile in tiles if not backends or backend_name(tile) in backends)


def candidate_keys(
    problems: Iterable[Problem], target: Target, *, backends: Collection[str] = ()
) -> Iterator[CompileKey]:
    """The keys of every tile of these problems, each once, in the order of their first use."""
    seen: set[CompileKey] = set()
    for problem in problems:
        for tile in candidate_tiles(problem, backends):
            key = key_for(tile, problem, target)
            if key not in seen:
                seen.add(key)
                yield key


def key_for(tile: Tile, problem: Problem, target: Target) -> CompileKey:
    """The compile key of a tile for a problem, whatever a tuning table would choose."""
    return CompileKey.of(_config(tile, problem), problem, target)


def probe_key(kind: Literal["producer", "empty"], target: Target) -> CompileKey:
    """The compile key of a probe kernel: what it writes is bf16, as x is."""
    return CompileKey.of(ProbeConfig(kind), Problem(1, 1, VECTOR_ELEMENTS, DType.BF16), target)


def probe_keys(targets: Iterable[Target]) -> Iterator[CompileKey]:
    """The keys of all probe kernels for these targets."""
    for target in targets:
        for kind in PROBES:
            yield probe_key(kind, target)


def representative_tokens(weight_dtype: DType) -> Mapping[int, tuple[int, int]]:
    """Above 16 tokens: the M to measure with weights of a type, and the span each stands for."""
    wide = weight_dtype is DType.FP32
    return REPRESENTATIVE_FP32_TOKENS if wide else REPRESENTATIVE_TOKENS


def tokens_span(tokens: int, weight_dtype: DType = DType.BF16) -> tuple[int, int]:
    """The numbers of tokens for which a measurement at this one speaks, both ends included."""
    return representative_tokens(weight_dtype).get(tokens, (tokens, tokens))


def _config(tile: Tile, problem: Problem) -> Config:
    config: Config = BACKENDS[backend_name(tile)].config_for(tile, problem)
    return config


def _oneshot(problem: Problem) -> tuple[OneshotTile, ...]:
    """Tiles that load K in one round, and tiles of two, least waste first, where those are few."""
    once = tuple(tile for tile, _ in _covering(problem, rounds=1))
    if len(once) >= FEW:
        return once
    twice = sorted(_covering(problem, rounds=2), key=lambda found: found[1])
    return (*once, *(tile for tile, _ in twice[: FEW - len(once)]))


def _covering(problem: Problem, *, rounds: int) -> Iterator[tuple[OneshotTile, float]]:
    """Tiles whose warps cover K in so many rounds with little waste, and that waste."""
    blocks = -(-problem.hidden // BLOCK_ELEMENTS)
    for experts_tile in EXPERTS_TILES:
        for split_k in sorted({*SPLITS, *EXACT_SPLITS}):
            if split_k in EXACT_SPLITS and (blocks % split_k or experts_tile not in (16, 32)):
                continue
            share = -(-blocks // split_k)
            for vectors in VECTORS:
                warps = -(-share // (vectors * rounds))
                waste = split_k * warps * vectors * rounds / blocks - 1
                if warps not in WARPS or waste > MAX_WASTE:
                    continue
                tile = OneshotTile(experts_tile, split_k, warps, vectors)
                config = config_for(tile, problem)
                if config.rounds == rounds and works(config):
                    yield tile, waste


def _dotprod(problem: Problem) -> Iterator[DotprodTile]:
    if problem.tokens > DOTPROD_MAX_TOKENS:
        return
    few = problem.tokens <= DOTPROD_TOKENS
    for block in DOTPROD_BLOCKS if few else DOTPROD_LATE_BLOCKS:
        loads = block * VECTOR_ELEMENTS
        if -(-problem.hidden // loads) * loads / problem.hidden - 1 > DOTPROD_MAX_WASTE:
            continue
        for experts_per_block in (1, 2) if few else (1,):
            yield DotprodTile(block, experts_per_block)
