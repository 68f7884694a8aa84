"""The `bf16x3` family: fp32 weights as three bf16 terms on tensor cores, x in bf16, any M.

Constraints and launch of the kernel in `llbf16_aot.kernels.bf16x3`, without the compiler. M, N and
K are run-time values: one artifact serves every shape.
"""

from __future__ import annotations

import msgspec

from ..errors import ConfigError
from ..launch import Extent, GridDim, LaunchGeometry, ParamSource
from ..problem import Problem

__all__ = [
    "EXPERTS_TILES",
    "HIDDEN_TILE",
    "K_WARPS",
    "MAX_SHARED_BYTES",
    "MAX_SPLIT_K",
    "MAX_STAGES",
    "MAX_WARPS",
    "MIN_TOKENS",
    "PARAMS",
    "SOURCES",
    "TOKENS_TILES",
    "WEIGHT_PITCH_BYTES",
    "X_PITCH_BYTES",
    "Bf16x3Config",
    "Bf16x3Tile",
    "check",
    "config_for",
    "geometry",
]

MIN_TOKENS = 1
"""Smallest M; tables choose this family where it wins, which it does for more than a few tokens."""

TOKENS_TILES = (16, 32, 64, 128)
"""Tokens of a cluster: two to eight n8 tiles of mma.m16n8k16 a warp, one or two warps abreast."""

WARP_TOKENS = 64
"""Tokens of a warp: eight tiles of sums, twice, are half of a thread's registers."""

EXPERTS_TILES = (16, 32, 64)
"""Experts of a cluster: one to four warps, each with the 16 rows of mma.m16n8k16."""

K_WARPS = (1, 2, 4)
"""Warps that share the K of a stage."""

HIDDEN_TILE = 64
"""Elements of K in one stage: four steps of mma.m16n8k16."""

WEIGHT_PITCH_BYTES = HIDDEN_TILE * 4 + 32
"""Bytes from row to row of fp32 weights in a stage: 8-byte reads of four rows fill all banks."""

X_PITCH_BYTES = HIDDEN_TILE * 2 + 16
"""Bytes from row to row of x in a stage: eight rows of ldmatrix meet no bank twice."""

MAX_SPLIT_K = 8
"""Thread blocks of a portable cluster (CUDA C++ Programming Guide, "Thread Block Clusters")."""

MAX_STAGES = 6

MAX_WARPS = 8
"""Warps of a block: a thread may take the 255 registers that its sums and fragments need."""

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
    "backends/bf16x3.py",
    "kernels/bf16x3.py",
    "kernels/common.py",
    "launch.py",
    "problem.py",
)
"""Files that decide this family's machine code, by their path inside the package."""


class Bf16x3Tile(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="bf16x3", tag_field="backend"
):
    """Tile configuration: the tile of the output, who shares K, stages of the copy pipeline.

    `split_k` blocks form a cluster that shares K; in each, `k_warps` share the K of a stage.
    """

    tokens_tile: int
    experts_tile: int
    k_warps: int
    split_k: int
    stages: int


class Bf16x3Config(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="bf16x3", tag_field="backend"
):
    """The tile configuration alone: no size is static."""

    tokens_tile: int
    experts_tile: int
    k_warps: int
    split_k: int
    stages: int

    @property
    def warp_tokens(self) -> int:
        """Tokens of a warp."""
        return min(self.tokens_tile, WARP_TOKENS)

    @property
    def token_warps(self) -> int:
        """Warps side by side along the tokens."""
        return self.tokens_tile // self.warp_tokens

    @property
    def expert_warps(self) -> int:
        """Warps side by side along the experts."""
        return self.experts_tile // 16

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.token_warps * self.expert_warps * self.k_warps

    @property
    def sums(self) -> int:
        """Sums of a cluster's tile of the output."""
        return self.tokens_tile * self.experts_tile

    @property
    def owned(self) -> int:
        """Sums that each block of the cluster owns, in groups of four; the last may own fewer."""
        return -(-self.sums // (4 * self.split_k)) * 4

    @property
    def pitch(self) -> int:
        """Floats from token to token of the warps' sums: a fragment's stores meet no bank twice."""
        return self.experts_tile + 4

    @property
    def stage_bytes(self) -> int:
        """One stage: the weights of a K tile, then x of the same."""
        return self.experts_tile * WEIGHT_PITCH_BYTES + self.tokens_tile * X_PITCH_BYTES

    @property
    def partial_bytes(self) -> int:
        """The sums of the warps that share K."""
        return self.k_warps * self.tokens_tile * self.pitch * 4

    @property
    def dynamic_shared_bytes(self) -> int:
        """Dynamic shared memory: the stages, and in their place later warps' and peers' sums."""
        inbox = self.split_k * self.owned * 4 if self.split_k > 1 else 0
        return max(self.stages * self.stage_bytes, self.partial_bytes + inbox)


def config_for(tile: Bf16x3Tile, problem: Problem) -> Bf16x3Config:
    """The same configuration for every problem."""
    del problem
    return Bf16x3Config(
        tokens_tile=tile.tokens_tile,
        experts_tile=tile.experts_tile,
        k_warps=tile.k_warps,
        split_k=tile.split_k,
        stages=tile.stages,
    )


def check(config: Bf16x3Config) -> None:
    """Raise ConfigError, with the hardware's reason, for a configuration that cannot work."""
    for name, value, allowed, reason in (
        ("tokens_tile", config.tokens_tile, TOKENS_TILES, "whole n8 tiles of mma.m16n8k16"),
        ("experts_tile", config.experts_tile, EXPERTS_TILES, "whole m16 tiles of mma.m16n8k16"),
        ("k_warps", config.k_warps, K_WARPS, f"a stage has {HIDDEN_TILE // 16} steps of K"),
    ):
        if value not in allowed:
            raise ConfigError(f"bf16x3: {name} is {value}, must be one of {allowed}: {reason}")
    if config.warps not in (4, 8):
        raise ConfigError(
            f"bf16x3: k_warps is {config.k_warps}, which makes blocks of {config.warps} warps, "
            "must be 4 or 8: one or two for each of an SM's four schedulers, and a thread takes "
            "up to 255 registers"
        )
    if config.tokens_tile * HIDDEN_TILE * 2 % (config.warps * 32 * 16):
        raise ConfigError(
            f"bf16x3: tokens_tile is {config.tokens_tile}, whose part of a stage gives not "
            f"every one of {config.warps * 32} threads a 128-bit copy"
        )
    if not 1 <= config.split_k <= MAX_SPLIT_K:
        raise ConfigError(
            f"bf16x3: split_k is {config.split_k}, must be 1 to {MAX_SPLIT_K}: "
            "larger clusters are not portable"
        )
    if not 2 <= config.stages <= MAX_STAGES:
        raise ConfigError(
            f"bf16x3: stages is {config.stages}, must be 2 to {MAX_STAGES}: "
            "with one stage copies and products cannot overlap"
        )
    # 8 bytes for the mbarrier, rounded up to the alignment of the dynamic part.
    shared_bytes = config.dynamic_shared_bytes + 128
    if shared_bytes > MAX_SHARED_BYTES:
        raise ConfigError(
            f"bf16x3: stages is {config.stages}, which takes {shared_bytes} bytes of shared "
            f"memory; a block has at most {MAX_SHARED_BYTES} on every supported SM"
        )


def geometry(config: Bf16x3Config) -> LaunchGeometry:
    """A cluster along K for each tile of experts and tokens; stages are dynamic shared memory."""
    return LaunchGeometry(
        grid=(
            GridDim(Extent.ONE, 1, config.split_k),
            GridDim(Extent.EXPERTS, config.experts_tile, 1),
            GridDim(Extent.TOKENS, config.tokens_tile, 1),
        ),
        block=(config.warps * 32, 1, 1),
        cluster=(config.split_k, 1, 1),
        dynamic_shared_bytes=config.dynamic_shared_bytes,
    )
