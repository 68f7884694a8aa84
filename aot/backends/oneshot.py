"""The `oneshot` family: every weight of a thread block is in registers before x is there.

Constraints and launch of the kernel in `llbf16_aot.kernels.oneshot`, without the compiler.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import ConfigError
from ..launch import Extent, GridDim, LaunchGeometry, ParamSource
from ..problem import VECTOR_ELEMENTS, Problem

__all__ = [
    "BLOCK_ELEMENTS",
    "EXPERTS_TILES",
    "MAX_ROUNDS",
    "MAX_SPLIT_K",
    "MAX_STATIC_SHARED_BYTES",
    "MAX_VECTOR_REGISTERS",
    "MAX_WARPS",
    "PARAMS",
    "SOURCES",
    "TOKENS_TILES",
    "OneshotConfig",
    "OneshotTile",
    "Release",
    "check",
    "config_for",
    "geometry",
    "portable",
]

BLOCK_ELEMENTS = 4 * VECTOR_ELEMENTS
"""Elements of K that a warp takes with one 128-bit load a lane: two steps of mma.m16n8k16."""

EXPERTS_TILES = (8, 16, 32, 64)
"""Experts of a cluster: the n8 side of mma.m16n8k16, or one to four of its m16 sides."""

TOKENS_TILES = (8, 16, 32)
"""Tokens of a cluster. More take more clusters along the grid."""

MAX_SPLIT_K = 8
"""Thread blocks of a portable cluster (CUDA C++ Programming Guide, "Thread Block Clusters")."""

MAX_WARPS = 32
"""Warps of a block of 1024 threads, the most that CUDA allows."""

MAX_ROUNDS = 16
"""Times that a warp's registers are filled; all rounds are unrolled."""

MAX_VECTOR_REGISTERS = 160
"""Registers that a thread's vectors may take, of the 255 that an instruction can name."""

MAX_STATIC_SHARED_BYTES = 48 * 1024
"""Static shared memory of a block on every SM (CUDA C++ Programming Guide, same table)."""

REGISTER_FILE = 65_536
"""32-bit registers of an SM on every supported architecture."""

OTHER_REGISTERS = 40
"""Registers of a thread for all but vectors: addresses, sums, predicates."""

Release = Literal["start", "wait"]
"""When a block lets the next kernel in the stream start: at its own start, or behind its wait on
the kernel ahead. Early, the next weights come sooner; late, they do not compete with this x."""

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
    "backends/oneshot.py",
    "kernels/common.py",
    "kernels/oneshot.py",
    "launch.py",
    "problem.py",
)
"""Files that decide this family's machine code, by their path inside the package."""


class OneshotTile(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag="oneshot",
    tag_field="backend",
):
    """Tile configuration.

    `split_k` blocks form a cluster that shares K; each has `warps`, and each warp keeps `vectors`
    blocks of 32 elements of K in flight for each of its rows.
    """

    experts_tile: int
    split_k: int
    warps: int
    vectors: int
    release: Release = "start"


class OneshotConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="oneshot", tag_field="backend"
):
    """Tile configuration and static sizes: K is unrolled, `tokens` is the tile of M."""

    hidden: int
    tokens: int
    experts_tile: int
    split_k: int
    warps: int
    vectors: int
    release: Release = "start"
    weight_bytes: int = 2

    @property
    def terms(self) -> int:
        """Terms of bf16 that a weight is cut into: fp32 weights take three (`common.split`)."""
        return 1 if self.weight_bytes == 2 else 3

    @property
    def blocks(self) -> int:
        """Blocks of 32 elements of K that each thread block of the cluster takes."""
        return -(-self.hidden // (BLOCK_ELEMENTS * self.split_k))

    @property
    def rounds(self) -> int:
        """Times that a warp fills its registers."""
        return -(-self.blocks // (self.warps * self.vectors))

    @property
    def sums(self) -> int:
        """Sums of a cluster's tile of the output."""
        return self.tokens * self.experts_tile

    @property
    def owned(self) -> int:
        """Sums that each block of the cluster owns, in groups of four; the last may own fewer."""
        return -(-self.sums // (4 * self.split_k)) * 4

    @property
    def group(self) -> int:
        """Neighbouring sums that one thread reduces and sends: few, as long as threads suffice."""
        return next((n for n in (1, 2) if self.sums <= n * self.warps * 32), 4)

    @property
    def pitch(self) -> int:
        """Floats from token to token of a warp's sums, so that no two lanes meet in a bank."""
        return 8 if self.experts_tile == 8 else self.experts_tile + 4

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block: the warps' sums, the peers' sums, the mbarrier."""
        inbox = self.split_k * self.owned if self.split_k > 1 else 0
        return (self.warps * self.tokens * self.pitch + inbox) * 4 + 8


def config_for(tile: OneshotTile, problem: Problem) -> OneshotConfig:
    """The static sizes that serve a problem: the smallest tile that holds its tokens, or tiles."""
    return OneshotConfig(
        hidden=problem.hidden,
        tokens=next((t for t in TOKENS_TILES if t >= problem.tokens), TOKENS_TILES[-1]),
        experts_tile=tile.experts_tile,
        split_k=tile.split_k,
        warps=tile.warps,
        vectors=tile.vectors,
        # Without dependent launch nothing is released: one kernel, one key.
        release=tile.release if problem.pdl else "start",
        weight_bytes=problem.weight_dtype.size_bytes,
    )


def check(config: OneshotConfig) -> None:
    """Raise ConfigError, with the hardware's reason, for a configuration that cannot work."""
    if config.hidden < 1 or config.hidden % VECTOR_ELEMENTS:
        raise ConfigError(
            f"oneshot: hidden is {config.hidden}, must be a positive multiple of "
            f"{VECTOR_ELEMENTS}: rows are read in 128-bit loads"
        )
    if config.tokens not in TOKENS_TILES:
        raise ConfigError(
            f"oneshot: tokens is {config.tokens}, must be one of {TOKENS_TILES}: whole mma tiles"
        )
    if config.experts_tile not in EXPERTS_TILES:
        raise ConfigError(
            f"oneshot: experts_tile is {config.experts_tile}, must be one of {EXPERTS_TILES}: "
            "the sides of mma.m16n8k16"
        )
    if not 1 <= config.split_k <= MAX_SPLIT_K:
        raise ConfigError(
            f"oneshot: split_k is {config.split_k}, must be 1 to {MAX_SPLIT_K}: "
            "larger clusters are not portable"
        )
    if not 1 <= config.warps <= MAX_WARPS:
        raise ConfigError(
            f"oneshot: warps is {config.warps}, must be 1 to {MAX_WARPS}: "
            "a block has at most 1024 threads"
        )
    if config.weight_bytes not in (2, 4):
        raise ConfigError(
            f"oneshot: weight_bytes is {config.weight_bytes}, must be 2 (bf16) or 4 (fp32)"
        )
    if config.vectors < 1:
        raise ConfigError(f"oneshot: vectors is {config.vectors}, must be at least 1")
    if config.rounds > MAX_ROUNDS:
        raise ConfigError(
            f"oneshot: hidden {config.hidden} takes {config.rounds} rounds of {config.warps} warps "
            f"with {config.vectors} vectors, at most {MAX_ROUNDS} are unrolled"
        )
    registers = _vector_registers(config)
    available = min(MAX_VECTOR_REGISTERS, REGISTER_FILE // (config.warps * 32) - OTHER_REGISTERS)
    if registers > available:
        raise ConfigError(
            f"oneshot: {config.vectors} vectors a row and {config.tokens} tokens take {registers} "
            f"registers a thread, a block of {config.warps} warps has {available} for them"
        )
    if config.shared_bytes > MAX_STATIC_SHARED_BYTES:
        raise ConfigError(
            f"oneshot: {config.warps} warps with {config.tokens} tokens take {config.shared_bytes} "
            f"bytes of static shared memory, a block has at most {MAX_STATIC_SHARED_BYTES}"
        )


def portable(config: OneshotConfig) -> bool:
    """Whether a configuration that passes `check` leaves registers free on every target.

    A block's registers are given out for four warps at a time. What `check` lets through beyond
    that the compiler fits in for one target, and spills for another (seen for sm_100a and sm_120a).
    """
    warps = -(-config.warps // 4) * 4
    return _vector_registers(config) <= REGISTER_FILE // (warps * 32) - OTHER_REGISTERS


def _vector_registers(config: OneshotConfig) -> int:
    """Registers of one round's vectors, and of the next round's weights where there is one."""
    weights = config.vectors * 2 * config.weight_bytes * (config.experts_tile // 8)
    x = config.vectors * 4 * (config.tokens // 8)
    return weights * min(config.rounds, 2) + x


def geometry(config: OneshotConfig) -> LaunchGeometry:
    """A cluster along K for each tile of experts and of tokens; static shared memory only."""
    return LaunchGeometry(
        grid=(
            GridDim(Extent.ONE, 1, config.split_k),
            GridDim(Extent.EXPERTS, config.experts_tile, 1),
            GridDim(Extent.TOKENS, config.tokens, 1),
        ),
        block=(config.warps * 32, 1, 1),
        cluster=(config.split_k, 1, 1),
        dynamic_shared_bytes=0,
    )
