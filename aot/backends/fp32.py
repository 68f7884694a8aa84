"""The `fp32` family: fp32 weights and fp32 arithmetic, all weights in registers before x is there.

Constraints and launch of the kernel in `llbf16_aot.kernels.fp32`, without the compiler.
"""

from __future__ import annotations

import msgspec

from ..errors import ConfigError
from ..launch import Extent, GridDim, LaunchGeometry, ParamSource
from ..problem import Problem

__all__ = [
    "EXPERTS_PER_THREAD",
    "LANES",
    "MAX_SHARED_BYTES",
    "MAX_SPLIT_K",
    "MAX_TOKENS",
    "MAX_VECTOR_REGISTERS",
    "MAX_WARPS",
    "PARAMS",
    "SOURCES",
    "TOKENS",
    "TOKENS_TILE",
    "WEIGHT_ELEMENTS",
    "Fp32Config",
    "Fp32Tile",
    "check",
    "config_for",
    "geometry",
]

MAX_TOKENS = 32
"""Largest M: beyond it tensor cores win, even at three products for one (`bf16x3`)."""

WEIGHT_ELEMENTS = 4
"""Elements of fp32 in one 128-bit load."""

TOKENS_TILE = 8
"""Tokens of one pass: a thread's fp32 sums of more would not fit its registers."""

TOKENS = (1, 2, 4, 8, 16, 24, 32)
"""Static numbers of tokens: parts of one pass, or whole passes."""

LANES = (8, 16, 32)
"""Lanes of a warp that share K. Eight read 128 contiguous bytes of a weight row, a whole line."""

EXPERTS_PER_THREAD = (1, 2, 4, 8)

MIN_EXPERTS_TILE = 4
"""Experts of a tile: a 16-byte vector of sums belongs to one token."""

MAX_SPLIT_K = 8
"""Thread blocks of a portable cluster (CUDA C++ Programming Guide, "Thread Block Clusters")."""

MAX_WARPS = 32
"""Warps of a block of 1024 threads, the most that CUDA allows."""

MAX_VECTORS = 8

MAX_VECTOR_REGISTERS = 176
"""Registers for weights, sums and x, of the 255 that an instruction can name."""

MAX_SHARED_BYTES = 99 * 1024
"""Shared memory that a block may take on sm_120, the least of the supported SMs.

CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

MAX_STATIC_SHARED_BYTES = 48 * 1024
"""Static shared memory of a block on every SM (same table)."""

REGISTER_FILE = 65_536
"""32-bit registers of an SM on every supported architecture."""

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
    "backends/fp32.py",
    "kernels/common.py",
    "kernels/fp32.py",
    "launch.py",
    "problem.py",
)
"""Files that decide this family's machine code, by their path inside the package."""


class Fp32Tile(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fp32", tag_field="backend"
):
    """Tile configuration.

    `split_k` blocks form a cluster that shares K for `experts_tile` experts; each has `warps`, and
    each lane holds `vectors` 128-bit vectors of each of its `experts_per_thread` weight rows.
    """

    experts_tile: int
    experts_per_thread: int
    split_k: int
    warps: int
    vectors: int


class Fp32Config(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fp32", tag_field="backend"
):
    """Tile configuration and static sizes: K is unrolled, `tokens` is the largest M."""

    hidden: int
    tokens: int
    experts_tile: int
    experts_per_thread: int
    split_k: int
    warps: int
    vectors: int

    @property
    def lanes(self) -> int:
        """Lanes of a warp that share K; the warp's other lanes have other experts."""
        return 32 * self.experts_per_thread // self.experts_tile

    @property
    def slice(self) -> int:
        """Elements of K that a warp takes in one round."""
        return self.lanes * self.vectors * WEIGHT_ELEMENTS

    @property
    def rounds(self) -> int:
        """Times that a warp fills its registers with weights."""
        return -(-self.hidden // (self.split_k * self.warps * self.slice))

    @property
    def exact(self) -> bool:
        """Whether the rounds end where K ends, so that no lane needs to check its column."""
        return self.hidden == self.split_k * self.rounds * self.warps * self.slice

    @property
    def tokens_tile(self) -> int:
        """Tokens of one pass over the weights in registers."""
        return min(self.tokens, TOKENS_TILE)

    @property
    def passes(self) -> int:
        """Passes over the weights in registers."""
        return self.tokens // self.tokens_tile

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
        """Floats from token to token of a warp's sums: eight lanes' vectors meet in no bank."""
        return 4 if self.experts_tile == 4 else self.experts_tile + 4

    @property
    def x_shared_bytes(self) -> int:
        """Dynamic shared memory: one pass of x in fp32, each warp's slice of K its own."""
        return self.warps * self.tokens_tile * self.slice * 4

    @property
    def static_shared_bytes(self) -> int:
        """Static shared memory: the warps' sums, the peers' sums, the mbarrier."""
        inbox = self.split_k * self.owned if self.split_k > 1 else 0
        return (self.warps * self.tokens * self.pitch + inbox) * 4 + 8

    @property
    def vector_registers(self) -> int:
        """Registers of a lane for weights, sums and, where x is fp32, a pass of x on its way."""
        x = -(-self.tokens_tile * self.lanes * self.vectors // 32) * 4
        weights = self.experts_per_thread * self.vectors * 4
        return weights + self.experts_per_thread * self.tokens_tile + x


def config_for(tile: Fp32Tile, problem: Problem) -> Fp32Config:
    """The static sizes that serve a problem: the smallest number of tokens that holds its own."""
    return Fp32Config(
        hidden=problem.hidden,
        tokens=next((t for t in TOKENS if t >= problem.tokens), problem.tokens),
        experts_tile=tile.experts_tile,
        experts_per_thread=tile.experts_per_thread,
        split_k=tile.split_k,
        warps=tile.warps,
        vectors=tile.vectors,
    )


def check(config: Fp32Config) -> None:
    """Raise ConfigError, with the hardware's reason, for a configuration that cannot work."""
    if config.hidden < 1 or config.hidden % WEIGHT_ELEMENTS:
        raise ConfigError(
            f"fp32: hidden is {config.hidden}, must be a positive multiple of {WEIGHT_ELEMENTS}: "
            "rows are read in 128-bit loads"
        )
    if config.tokens not in TOKENS:
        raise ConfigError(
            f"fp32: tokens is {config.tokens}, must be one of {TOKENS}: "
            f"passes of {TOKENS_TILE}, or a part of one whose sums lanes can halve"
        )
    if config.experts_per_thread not in EXPERTS_PER_THREAD:
        raise ConfigError(
            f"fp32: experts_per_thread is {config.experts_per_thread}, must be one of "
            f"{EXPERTS_PER_THREAD}: lanes halve the sums that they hold"
        )
    tiles = tuple(32 // lanes * config.experts_per_thread for lanes in LANES)
    tiles = tuple(tile for tile in tiles if tile >= MIN_EXPERTS_TILE)
    if config.experts_tile not in tiles:
        raise ConfigError(
            f"fp32: experts_tile is {config.experts_tile}, must be one of {tiles} with "
            f"{config.experts_per_thread} experts a thread: {LANES} lanes share K, so that a load "
            f"takes whole 128-byte lines, and sums are sent in groups of up to {MIN_EXPERTS_TILE}"
        )
    if not 1 <= config.split_k <= MAX_SPLIT_K:
        raise ConfigError(
            f"fp32: split_k is {config.split_k}, must be 1 to {MAX_SPLIT_K}: "
            "larger clusters are not portable"
        )
    if not 1 <= config.warps <= MAX_WARPS:
        raise ConfigError(
            f"fp32: warps is {config.warps}, must be 1 to {MAX_WARPS}: "
            "a block has at most 1024 threads"
        )
    if not 1 <= config.vectors <= MAX_VECTORS:
        raise ConfigError(
            f"fp32: vectors is {config.vectors}, must be 1 to {MAX_VECTORS}: "
            "more of them do not fit the registers"
        )
    available = min(MAX_VECTOR_REGISTERS, REGISTER_FILE // (config.warps * 32) - 40)
    if config.vector_registers > available:
        raise ConfigError(
            f"fp32: {config.vectors} vectors of {config.experts_per_thread} experts and "
            f"{config.tokens_tile} tokens take {config.vector_registers} registers a thread, "
            f"a block of {config.warps} warps has {available} for them"
        )
    if config.static_shared_bytes > MAX_STATIC_SHARED_BYTES:
        raise ConfigError(
            f"fp32: {config.warps} warps with {config.tokens} tokens take "
            f"{config.static_shared_bytes} bytes of static shared memory, "
            f"a block has at most {MAX_STATIC_SHARED_BYTES}"
        )
    shared_bytes = config.static_shared_bytes + config.x_shared_bytes
    if shared_bytes > MAX_SHARED_BYTES:
        raise ConfigError(
            f"fp32: {config.warps} warps with {config.slice} elements of K each take "
            f"{shared_bytes} bytes of shared memory, "
            f"a block has at most {MAX_SHARED_BYTES} on every supported SM"
        )


def geometry(config: Fp32Config) -> LaunchGeometry:
    """A cluster along K for each tile of experts; x in fp32 is dynamic shared memory."""
    return LaunchGeometry(
        grid=(
            GridDim(Extent.ONE, 1, config.split_k),
            GridDim(Extent.EXPERTS, config.experts_tile, 1),
            GridDim(Extent.TOKENS, config.tokens, 1),
        ),
        block=(config.warps * 32, 1, 1),
        cluster=(config.split_k, 1, 1),
        dynamic_shared_bytes=config.x_shared_bytes,
    )
