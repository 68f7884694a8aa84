"""The launch record: data from which a launch is computed without knowing the kernel."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from .problem import Epilogue, Problem

__all__ = [
    "EPILOGUE_PARAMS",
    "Attribute",
    "Extent",
    "GridDim",
    "LaunchGeometry",
    "LaunchRecord",
    "Param",
    "ParamKind",
    "ParamSource",
]


class Extent(str, enum.Enum):
    """The part of a problem that a grid dimension grows with."""

    ONE = "one"
    TOKENS = "tokens"
    EXPERTS = "experts"
    HIDDEN = "hidden"


class GridDim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A grid extent in thread blocks: `ceil(extent / tile) * blocks`."""

    extent: Extent
    tile: int
    blocks: int

    def resolve(self, problem: Problem) -> int:
        """Number of thread blocks for this problem."""
        if self.extent is Extent.TOKENS:
            size = problem.tokens
        elif self.extent is Extent.EXPERTS:
            size = problem.experts
        elif self.extent is Extent.HIDDEN:
            size = problem.hidden
        else:
            size = 1
        return -(-size // self.tile) * self.blocks


class Attribute(str, enum.Enum):
    """Launch attributes beside the cluster, by their CUDA driver names."""

    PROGRAMMATIC_STREAM_SERIALIZATION = "programmatic_stream_serialization"


class LaunchGeometry(NamedTuple):
    """What a kernel family says of its launch: block and cluster in threads and thread blocks."""

    grid: tuple[GridDim, GridDim, GridDim]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int


class ParamKind(str, enum.Enum):
    """How a kernel parameter is passed."""

    POINTER = "pointer"
    INT32 = "int32"
    FLOAT32 = "float32"

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameter, which is also its alignment."""
        return 8 if self is ParamKind.POINTER else 4


class ParamSource(str, enum.Enum):
    """Where the value of a kernel parameter comes from."""

    X = "x"
    WEIGHT = "weight"
    OUT = "out"
    TOKENS = "tokens"
    EXPERTS = "experts"
    HIDDEN = "hidden"
    X_ROW_STRIDE = "x_row_stride"
    WEIGHT_ROW_STRIDE = "weight_row_stride"
    BIAS = "bias"
    SCALE = "scale"

    @property
    def kind(self) -> ParamKind:
        """Tensors are passed as pointers, extents and strides (in elements) as 32-bit integers."""
        if self in (ParamSource.X, ParamSource.WEIGHT, ParamSource.OUT, ParamSource.BIAS):
            return ParamKind.POINTER
        return ParamKind.FLOAT32 if self is ParamSource.SCALE else ParamKind.INT32


EPILOGUE_PARAMS: dict[Epilogue, tuple[ParamSource, ...]] = {
    Epilogue.NONE: (),
    Epilogue.BIAS_FP32: (ParamSource.BIAS,),
    Epilogue.BIAS_BF16: (ParamSource.BIAS,),
    Epilogue.SCALE: (ParamSource.SCALE,),
}
"""What a kernel takes for its epilogue, behind the parameters of its family."""


class Param(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel parameter: its source and its place in the parameter buffer."""

    source: ParamSource
    kind: ParamKind
    offset_bytes: int
    size_bytes: int


class LaunchRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that `cuLaunchKernelEx` needs beside the tensors of a call."""

    symbol: str
    grid: tuple[GridDim, GridDim, GridDim]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    attributes: tuple[Attribute, ...]
    params: tuple[Param, ...]

    @classmethod
    def assemble(
        cls,
        symbol: str,
        geometry: LaunchGeometry,
        *,
        attributes: tuple[Attribute, ...],
        sources: tuple[ParamSource, ...],
    ) -> LaunchRecord:
        """Lay the parameters out as the CUDA ABI does: each aligned to its own size."""
        params: list[Param] = []
        end = 0
        for source in sources:
            size = source.kind.size_bytes
            offset = -(-end // size) * size
            params.append(Param(source, source.kind, offset, size))
            end = offset + size
        return cls(symbol, *geometry, attributes, tuple(params))

    @property
    def params_size_bytes(self) -> int:
        """Bytes of the whole parameter buffer."""
        return max((p.offset_bytes + p.size_bytes for p in self.params), default=0)
