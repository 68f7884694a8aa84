"""The `probe` family: kernels that measurements need and no problem is dispatched to.

`producer` writes x the way the kernel ahead of a router does; `empty` does nothing, and shows what
a launch alone costs. Constraints and launch of the kernels in `llbf16_aot.kernels.probe`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import ConfigError
from ..launch import Extent, GridDim, LaunchGeometry, ParamSource
from ..problem import VECTOR_ELEMENTS

__all__ = ["BLOCK_THREADS", "PARAMS", "SOURCES", "ProbeConfig", "check", "geometry"]

BLOCK_THREADS = 256

PARAMS = (
    ParamSource.X,
    ParamSource.OUT,
    ParamSource.HIDDEN,
)
"""Parameters of both kernels: source and destination [M, K] bf16, contiguous, and K."""

SOURCES = (
    "backends/probe.py",
    "kernels/common.py",
    "kernels/probe.py",
    "launch.py",
    "problem.py",
)
"""Files that decide this family's machine code, by their path inside the package."""


class ProbeConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="probe", tag_field="backend"
):
    """Which kernel: `producer` copies x [M, K] to out [M, K], `empty` touches nothing."""

    kind: Literal["producer", "empty"]


def check(config: ProbeConfig) -> None:
    """Raise ConfigError for a kind that does not exist."""
    if config.kind not in ("producer", "empty"):
        raise ConfigError(f"probe: kind is {config.kind!r}, must be 'producer' or 'empty'")


def geometry(config: ProbeConfig) -> LaunchGeometry:
    """Blocks over a row of K and over tokens; the empty kernel is one block."""
    if config.kind == "empty":
        one = GridDim(Extent.ONE, 1, 1)
        return LaunchGeometry((one, one, one), (BLOCK_THREADS, 1, 1), (1, 1, 1), 0)
    return LaunchGeometry(
        grid=(
            GridDim(Extent.HIDDEN, BLOCK_THREADS * VECTOR_ELEMENTS, 1),
            GridDim(Extent.TOKENS, 1, 1),
            GridDim(Extent.ONE, 1, 1),
        ),
        block=(BLOCK_THREADS, 1, 1),
        cluster=(1, 1, 1),
        dynamic_shared_bytes=0,
    )
