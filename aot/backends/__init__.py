"""The kernel families: what each is called, what its configuration may be, how it is launched.

Importing this package imports no compiler: the CuTe DSL code of a family lies in
`llbf16_aot.kernels`, in the module of the same name.
"""

from __future__ import annotations

from typing import TypeAlias

from . import dotprod, oneshot, probe, splitk
from .dotprod import DotprodConfig, DotprodTile
from .oneshot import OneshotConfig, OneshotTile
from .probe import ProbeConfig
from .splitk import SplitkConfig, SplitkTile

__all__ = [
    "BACKENDS",
    "Config",
    "DotprodConfig",
    "DotprodTile",
    "OneshotConfig",
    "OneshotTile",
    "ProbeConfig",
    "SplitkConfig",
    "SplitkTile",
    "Tile",
    "backend_name",
]

Tile: TypeAlias = DotprodTile | SplitkTile | OneshotTile
"""The tile configuration of one family: what a tuning table chooses."""

Config: TypeAlias = DotprodConfig | SplitkConfig | OneshotConfig | ProbeConfig
"""Tile configuration and static sizes: everything of a family that selects machine code."""

BACKENDS = {"dotprod": dotprod, "splitk": splitk, "oneshot": oneshot, "probe": probe}
"""Name of a family to its module, in the order in which messages list them."""


def backend_name(value: Tile | Config) -> str:
    """The name of the family that a tile or a configuration belongs to."""
    return str(value.__struct_config__.tag)
