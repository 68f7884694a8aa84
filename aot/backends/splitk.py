"""The `splitk` family: a cluster splits K, warps are specialised, tensor cores multiply.

Constraints and launch of the kernel in `llbf16_aot.kernels.splitk`, without the compiler. M, N and
K are run-time values: one artifact serves every shape.
"""

from __future__ import annotations

import msgspec

from ..errors import ConfigError
from ..launch import Extent, GridDim, LaunchGeometry, ParamSource
from ..problem import Problem

__all__ = [
    "BLOCK_THREADS",
    "CONSUMER_WARPS",
    "EXPERTS_TILES",
    "HIDDEN_TILES",
    "MAX_SHARED_BYTES",
    "MAX_SPLIT_K",
    "PARAMS",
    "PRODUCER_WARPS",
    "SOURCES",
    "TOKENS_TILE",
    "SplitkConfig",
    "SplitkTile",
    "check",
    "config_for",
    "geometry",
]

TOKENS_TILE = 16
"""Tokens of a cluster: the 16 rows of mma.m16n8k16."""

EXPERTS_TILES = (16, 32, 64)
"""Experts of a cluster: two n8 tiles, so that a router of 256 experts fills the GPU's SMs, up to
eight, so that one of 896 reads x a quarter as often."""

HIDDEN_TILES = (128, 256)
"""Elements of K in one pipeline stage: 32 or 64 for each consumer warp."""

CONSUMER_WARPS = 4
"""Warps that multiply, each on its own quarter of a stage's K."""

PRODUCER_WARPS = 4
"""Warps that copy to shared memory: half of them weights, half of them x."""

BLOCK_THREADS = 32 * (CONSUMER_WARPS + PRODUCER_WARPS)

MAX_SPLIT_K = 8
"""Thread blocks of a portable cluster (CUDA C++ Programming Guide, "Thread Block Clusters")."""

MAX_SHARED_BYTES = 99 * 1024
"""Shared memory that a block may take on sm_120, the least of the supported SMs.

CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

PARAMS = (
    ParamSource.X,
    ParamSource.WEIGHT,
    ParamSource.OUT,
    ParamSource.TOKENS,
    ParamSource.EXPERTS,
    ParamSource.HIDDEN,
    ParamSource.X_ROW_STRIDE,
    ParamSource.WEIGHT_ROW_STRIDE,
)
"""Parameters of the kernel, in their order."""

SOURCES = (
    "backends/splitk.py",
    "kernels/common.py",
    "kernels/splitk.py",
    "launch.py",
    "problem.py",
)
"""Files that decide this family's machine code, by their path inside the package."""


class SplitkTile(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="splitk", tag_field="backend"
):
    """Tile configuration: blocks that share K, stages of the copy pipeline, experts, K a stage."""

    split_k: int = 6
    stages: int = 4
    experts_tile: int = 16
    hidden_tile: int = 256


class SplitkConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="splitk", tag_field="backend"
):
    """The tile configuration alone: no size is static."""

    split_k: int
    stages: int
    experts_tile: int = 16
    hidden_tile: int = 256

    @property
    def sums(self) -> int:
        """Sums of a cluster's tile of the output."""
        return TOKENS_TILE * self.experts_tile

    @property
    def owned(self) -> int:
        """Sums that each block of the cluster owns, in groups of four; the last may own fewer."""
        return -(-self.sums // (4 * self.split_k)) * 4

    @property
    def group(self) -> int:
        """Neighbouring sums that one consumer thread reduces and sends at once."""
        return min(self.sums // (32 * CONSUMER_WARPS), 4)

    @property
    def pitch(self) -> int:
        """Floats from row to row of a warp's sums: no two lanes' pairs of sums meet in a bank."""
        return self.experts_tile + 8

    @property
    def row_pitch_bytes(self) -> int:
        """Bytes from row to row of a stage: ldmatrix meets no bank twice where 16 are added."""
        return self.hidden_tile * 2 + 16

    @property
    def stage_bytes(self) -> int:
        """One stage: x of a K tile, then the weights of the same."""
        return (TOKENS_TILE + self.experts_tile) * self.row_pitch_bytes

    @property
    def ring_bytes(self) -> int:
        """All stages. In the end the sums of the block's warps take their place."""
        return self.stages * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the ring, the peers' sums, the mbarriers."""
        return self.ring_bytes + self.split_k * self.owned * 4 + (2 * self.stages + 1) * 8


def config_for(tile: SplitkTile, problem: Problem) -> SplitkConfig:
    """The same configuration for every problem."""
    del problem
    return SplitkConfig(tile.split_k, tile.stages, tile.experts_tile, tile.hidden_tile)


def check(config: SplitkConfig) -> None:
    """Raise ConfigError, with the hardware's reason, for a configuration that cannot work."""
    if not 2 <= config.split_k <= MAX_SPLIT_K:
        raise ConfigError(
            f"splitk: split_k is {config.split_k}, must be 2 to {MAX_SPLIT_K}: st.async traps in a "
            "launch without a cluster (seen on an H200), and larger clusters are not portable"
        )
    if config.experts_tile not in EXPERTS_TILES:
        raise ConfigError(
            f"splitk: experts_tile is {config.experts_tile}, must be one of {EXPERTS_TILES}: "
            "a warp multiplies two, four or eight n8 tiles of mma.m16n8k16"
        )
    if config.hidden_tile not in HIDDEN_TILES:
        raise ConfigError(
            f"splitk: hidden_tile is {config.hidden_tile}, must be one of {HIDDEN_TILES}: "
            "each of four warps multiplies whole steps of 16 of K, and copies take whole lines"
        )
    if config.stages < 2:
        raise ConfigError(
            f"splitk: stages is {config.stages}, must be at least 2: "
            "with one stage copies and products cannot overlap"
        )
    if config.shared_bytes > MAX_SHARED_BYTES:
        raise ConfigError(
            f"splitk: stages is {config.stages}, which takes {config.shared_bytes} bytes of shared "
            f"memory; a block has at most {MAX_SHARED_BYTES} on every supported SM"
        )


def geometry(config: SplitkConfig) -> LaunchGeometry:
    """A cluster along K for each tile of experts and tokens; stages are dynamic shared memory."""
    return LaunchGeometry(
        grid=(
            GridDim(Extent.ONE, 1, config.split_k),
            GridDim(Extent.EXPERTS, config.experts_tile, 1),
            GridDim(Extent.TOKENS, TOKENS_TILE, 1),
        ),
        block=(BLOCK_THREADS, 1, 1),
        cluster=(config.split_k, 1, 1),
        dynamic_shared_bytes=config.ring_bytes,
    )
