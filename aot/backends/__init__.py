"""The kernel families: what each is called, what its configuration may be, how it is launched.

Importing this package imports no compiler: the CuTe DSL code of a family lies in
`llbf16_aot.kernels`, in the module of the same name.
"""

from __future__ import annotations

from typing import TypeAlias

from ..errors import ConfigError
from ..problem import DType
from . import bf16x3, dotprod, fp32, oneshot, probe, splitk
from .bf16x3 import Bf16x3Config, Bf16x3Tile
from .dotprod import DotprodConfig, DotprodTile
from .fp32 import Fp32Config, Fp32Tile
from .oneshot import OneshotConfig, OneshotTile
from .probe import ProbeConfig
from .splitk import SplitkConfig, SplitkTile

__all__ = [
    "BACKENDS",
    "OPERANDS",
    "Bf16x3Config",
    "Bf16x3Tile",
    "Config",
    "DotprodConfig",
    "DotprodTile",
    "Fp32Config",
    "Fp32Tile",
    "OneshotConfig",
    "OneshotTile",
    "ProbeConfig",
    "SplitkConfig",
    "SplitkTile",
    "Tile",
    "backend_name",
    "works",
]

Tile: TypeAlias = DotprodTile | SplitkTile | OneshotTile | Fp32Tile | Bf16x3Tile
"""The tile configuration of one family: what a tuning table chooses."""

Config: TypeAlias = (
    DotprodConfig | SplitkConfig | OneshotConfig | Fp32Config | Bf16x3Config | ProbeConfig
)
"""Tile configuration and static sizes: everything of a family that selects machine code."""

BACKENDS = {
    "dotprod": dotprod,
    "splitk": splitk,
    "oneshot": oneshot,
    "fp32": fp32,
    "bf16x3": bf16x3,
    "probe": probe,
}
"""Name of a family to its module, in the order in which messages list them."""

OPERANDS: dict[str, tuple[tuple[DType, DType], ...]] = {
    "dotprod": ((DType.BF16, DType.BF16),),
    "splitk": ((DType.BF16, DType.BF16),),
    "oneshot": ((DType.BF16, DType.BF16), (DType.BF16, DType.FP32)),
    "fp32": ((DType.BF16, DType.FP32), (DType.FP32, DType.FP32)),
    "bf16x3": ((DType.BF16, DType.FP32),),
    "probe": ((DType.BF16, DType.BF16),),
}
"""Name of a family to the element types of x and weight that it takes together."""


def backend_name(value: Tile | Config) -> str:
    """The name of the family that a tile or a configuration belongs to."""
    return str(value.__struct_config__.tag)


def works(config: Config) -> bool:
    """Whether a configuration passes its family's `check`."""
    try:
        BACKENDS[backend_name(config)].check(config)
    except ConfigError:
        return False
    return True
