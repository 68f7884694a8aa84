"""The `dotprod` family: one thread block computes a few experts for a tile of tokens.

Constraints and launch of the kernel in `llbf16_aot.kernels.dotprod`, without the compiler.
"""

from __future__ import annotations

import msgspec

from ..errors import ConfigError
from ..launch import Extent, GridDim, LaunchGeometry, ParamSource
from ..problem import VECTOR_ELEMENTS, Problem

__all__ = [
    "MAX_STEPS",
    "MAX_TOKENS_TILE",
    "PARAMS",
    "SOURCES",
    "DotprodConfig",
    "DotprodTile",
    "check",
    "config_for",
    "geometry",
]

MAX_TOKENS_TILE = 16
"""Tokens of one thread block: their fp32 sums stay in registers; more tokens take more blocks."""

MAX_STEPS = 32
"""128-bit weight loads a thread: 4 registers each, all in flight before the producer has ended."""

PARAMS = (
    ParamSource.X,
    ParamSource.WEIGHT,
    ParamSource.OUT,
    ParamSource.TOKENS,
    ParamSource.EXPERTS,
    ParamSource.X_ROW_STRIDE,
    ParamSource.WEIGHT_ROW_STRIDE,
)
"""Parameters of the kernel, in their order."""

SOURCES = (
    "backends/dotprod.py",
    "kernels/common.py",
    "kernels/dotprod.py",
    "launch.py",
    "problem.py",
)
"""Files that decide this family's machine code, by their path inside the package."""


class DotprodTile(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="dotprod", tag_field="backend"
):
    """Tile configuration: threads of a block, experts that one block computes."""

    block: int = 128
    experts_per_block: int = 1


class DotprodConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="dotprod", tag_field="backend"
):
    """Tile configuration and static sizes: K is unrolled, `tokens` is the tile of M in a block."""

    hidden: int
    tokens: int
    block: int
    experts_per_block: int

    @property
    def steps(self) -> int:
        """128-bit loads that each thread makes of one weight row."""
        return -(-self.hidden // (self.block * VECTOR_ELEMENTS))


def config_for(tile: DotprodTile, problem: Problem) -> DotprodConfig:
    """The static sizes that serve a problem: up to 16 tokens exactly, more in tiles of 16."""
    return DotprodConfig(
        hidden=problem.hidden,
        tokens=min(problem.tokens, MAX_TOKENS_TILE),
        block=tile.block,
        experts_per_block=tile.experts_per_block,
    )


def check(config: DotprodConfig) -> None:
    """Raise ConfigError, with the hardware's reason, for a configuration that cannot work."""
    if config.hidden < 1 or config.hidden % VECTOR_ELEMENTS:
        raise ConfigError(
            f"dotprod: hidden is {config.hidden}, must be a positive multiple of "
            f"{VECTOR_ELEMENTS}: rows are read in 128-bit loads"
        )
    if not 1 <= config.tokens <= MAX_TOKENS_TILE:
        raise ConfigError(
            f"dotprod: tokens is {config.tokens}, must be 1 to {MAX_TOKENS_TILE}: "
            "each token holds a sum in registers"
        )
    if config.block % 32 or not 32 <= config.block <= 1024:
        raise ConfigError(
            f"dotprod: block is {config.block}, must be a multiple of 32 from 32 to 1024: "
            "whole warps reduce by shuffles, and a block has at most 1024 threads"
        )
    if config.experts_per_block not in (1, 2):
        raise ConfigError(
            f"dotprod: experts_per_block is {config.experts_per_block}, must be 1 or 2: "
            "the weights of more experts do not fit the registers"
        )
    if config.steps * config.experts_per_block > MAX_STEPS:
        raise ConfigError(
            f"dotprod: hidden {config.hidden} with block {config.block} and "
            f"{config.experts_per_block} experts a block takes "
            f"{config.steps * config.experts_per_block} weight loads a thread, at most {MAX_STEPS} "
            "fit the registers"
        )


def geometry(config: DotprodConfig) -> LaunchGeometry:
    """Blocks over experts, then over tiles of tokens; no cluster, static shared memory only."""
    return LaunchGeometry(
        grid=(
            GridDim(Extent.EXPERTS, config.experts_per_block, 1),
            GridDim(Extent.TOKENS, config.tokens, 1),
            GridDim(Extent.ONE, 1, 1),
        ),
        block=(config.block, 1, 1),
        cluster=(1, 1, 1),
        dynamic_shared_bytes=0,
    )
