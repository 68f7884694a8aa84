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
    "HIDDEN_TILE",
    "MAX_SHARED_BYTES",
    "MAX_SPLIT_K",
    "PARAMS",
    "PRODUCER_WARPS",
    "ROW_PITCH_BYTES",
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

EXPERTS_TILES = (16, 32)
"""Experts of a cluster: two n8 tiles, so that a router of 256 experts fills the GPU's SMs, or four,
so that one of 896 reads x half as often."""

HIDDEN_TILE = 256
"""Elements of K in one pipeline stage: 64 for each consumer warp."""

CONSUMER_WARPS = 4
"""Warps that multiply, each on its own quarter of a stage's K."""

PRODUCER_WARPS = 4
"""Warps that copy to shared memory: half of them weights, half of them x."""

BLOCK_THREADS = 32 * (CONSUMER_WARPS + PRODUCER_WARPS)

ROW_PITCH_BYTES = HIDDEN_TILE * 2 + 16
"""Bytes from row to row of a stage: 16 more than the data, so that ldmatrix meets no bank twice."""

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
    """Tile configuration: thread blocks that share K, stages of the copy pipeline, experts."""

    split_k: int = 6
    stages: int = 4
    experts_tile: int = 16


class SplitkConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="splitk", tag_field="backend"
):
    """The tile configuration alone: no size is static."""

    split_k: int
    stages: int
    experts_tile: int = 16

    @property
    def sums(self) -> int:
        """Sums of a cluster's tile of the output."""
        return TOKENS_TILE * self.experts_tile

    @property
    def owned(self) -> int:
        """Sums of a tile that each block of the cluster owns; the last may own fewer."""
        return -(-self.sums // self.split_k)

    @property
    def pitch(self) -> int:
        """Floats from row to row of a warp's sums: a fragment's stores meet no bank twice."""
        return self.experts_tile + 4

    @property
    def stage_bytes(self) -> int:
        """One stage: x of a K tile, then the weights of the same."""
        return (TOKENS_TILE + self.experts_tile) * ROW_PITCH_BYTES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages, the warps' sums, the peers' sums, the mbarriers."""
        floats = CONSUMER_WARPS * TOKENS_TILE * self.pitch + self.split_k * self.owned
        return self.stages * self.stage_bytes + floats * 4 + (2 * self.stages + 1) * 8


def config_for(tile: SplitkTile, problem: Problem) -> SplitkConfig:
    """The same configuration for every problem."""
    del problem
    return SplitkConfig(tile.split_k, tile.stages, tile.experts_tile)


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
            "a warp multiplies two or four n8 tiles of mma.m16n8k16"
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
        dynamic_shared_bytes=config.stages * config.stage_bytes,
    )
