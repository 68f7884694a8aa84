"""What is asked of a router GEMM, and for which machine: the `Problem` and the `Target`."""

from __future__ import annotations

import enum
import re
from functools import lru_cache

import msgspec

from .errors import TargetError, UnsupportedProblemError

__all__ = [
    "ALIGNMENT_BYTES",
    "FEW_TOKENS",
    "MAX_EXPERTS",
    "MAX_HIDDEN",
    "OPERAND_TOKENS",
    "VECTOR_ELEMENTS",
    "DType",
    "Epilogue",
    "Layout",
    "Problem",
    "Target",
    "hidden_multiple",
]

ALIGNMENT_BYTES = 16
"""Every row of x and weight starts at a multiple of this: kernels load 128 bits at a time."""

VECTOR_ELEMENTS = 8
"""Elements of bf16 in one 128-bit load: K is a multiple of it where an operand is bf16."""

FEW_TOKENS = 64
"""Up to here each M is listed and named for itself; above it M come in spans, and bf16 weights are
the library's unless a rule of the tuning table says otherwise."""

MAX_EXPERTS = 65_536
"""Largest N: keeps every grid extent within the 65,535 that CUDA allows for grid.y and grid.z."""

MAX_HIDDEN = 1 << 20
"""Largest K: keeps element offsets of a row, and byte offsets of a K tile, within 32 bits."""


class DType(str, enum.Enum):
    """Element types, by the names that manifests and keys use."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FP32 else 2


OPERAND_TOKENS: dict[tuple[DType, DType], int] = {
    (DType.BF16, DType.BF16): 65_536,
    (DType.BF16, DType.FP32): 65_536,
    (DType.FP32, DType.FP32): 32,
}
"""The element types of x and weight that kernels take together, with the largest M of each pair.

Tensor cores multiply bf16 x at any M, the bound keeps grids within CUDA's; x in fp32 needs FMA
units, which lose to the library beyond the bound.
"""


def hidden_multiple(x_dtype: DType, weight_dtype: DType) -> int:
    """What K is a multiple of, so that contiguous rows of both operands keep their alignment."""
    return ALIGNMENT_BYTES // min(x_dtype.size_bytes, weight_dtype.size_bytes)


class Layout(str, enum.Enum):
    """Memory layout of the operands."""

    K_MAJOR = "k_major"
    """x [M, K] and weight [N, K] have contiguous rows, the output [M, N] is contiguous."""


class Epilogue(str, enum.Enum):
    """What happens to an fp32 sum before it is rounded to the output type and written."""

    NONE = "none"
    BIAS_FP32 = "bias_fp32"
    """A bias [N] of fp32 is added."""
    BIAS_BF16 = "bias_bf16"
    """A bias [N] of bf16 is added."""
    SCALE = "scale"
    """It is multiplied by an fp32 number that the call brings."""

    @property
    def bias_dtype(self) -> DType | None:
        """The element type of the bias; none where none is added."""
        return _BIAS_DTYPES.get(self)


_BIAS_DTYPES = {Epilogue.BIAS_FP32: DType.FP32, Epilogue.BIAS_BF16: DType.BF16}

_TARGET = re.compile(r"sm_(?P<number>[1-9][0-9]{1,2})(?P<suffix>[af]?)")


class Target(msgspec.Struct, frozen=True, order=True):
    """An SM architecture that a cubin is built for, as `sm_90a`.

    The suffix `a` marks an architecture-specific target, whose code runs on that architecture only,
    `f` a family target, and no suffix code that runs on later minor versions too (CUDA C++
    Programming Guide, "Feature Set Compiler Targets").
    """

    major: int
    minor: int
    suffix: str

    @classmethod
    @lru_cache(maxsize=64)
    def parse(cls, text: str) -> Target:
        """Read `sm_90a` and the like; raises TargetError for anything else."""
        match = _TARGET.fullmatch(text)
        if match is None:
            raise TargetError(
                f"target {text!r} is not of the form sm_90a",
                hint="name SM architecture and suffix, for example sm_90a, sm_100a, sm_103a",
            )
        number = int(match["number"])
        return cls(major=number // 10, minor=number % 10, suffix=match["suffix"])

    @property
    def number(self) -> int:
        """The compute capability without its dot: 90 for sm_90a."""
        return self.major * 10 + self.minor

    def __str__(self) -> str:
        return f"sm_{self.number}{self.suffix}"


class Problem(msgspec.Struct, frozen=True, order=True):
    """One product `out[M, N] = x[M, K] @ weight[N, K]^T` as a caller states it.

    `tokens` is M, `experts` N, `hidden` K. `pdl` asks for programmatic dependent launch: the kernel
    may start, and load weights, before the kernel ahead of it in the stream has ended.
    """

    tokens: int
    experts: int
    hidden: int
    out_dtype: DType = DType.FP32
    pdl: bool = True
    x_dtype: DType = DType.BF16
    weight_dtype: DType = DType.BF16
    layout: Layout = Layout.K_MAJOR
    alignment_bytes: int = ALIGNMENT_BYTES
    epilogue: Epilogue = Epilogue.NONE

    def check(self) -> None:
        """Raise UnsupportedProblemError where no kernel of this package computes the problem."""
        max_tokens = OPERAND_TOKENS.get((self.x_dtype, self.weight_dtype))
        if max_tokens is None:
            supported = ", ".join(f"{x.value} x {w.value}" for x, w in OPERAND_TOKENS)
            raise UnsupportedProblemError(
                f"x_dtype is {self.x_dtype.value} and weight_dtype {self.weight_dtype.value}, "
                f"supported are {supported}"
            )
        for name, value, largest in (
            ("tokens", self.tokens, max_tokens),
            ("experts", self.experts, MAX_EXPERTS),
            ("hidden", self.hidden, MAX_HIDDEN),
        ):
            if not 1 <= value <= largest:
                raise UnsupportedProblemError(f"{name} is {value}, supported are 1 to {largest}")
        multiple = hidden_multiple(self.x_dtype, self.weight_dtype)
        if self.hidden % multiple:
            raise UnsupportedProblemError(
                f"hidden is {self.hidden}, supported are multiples of {multiple}: "
                "kernels load 128 bits at a time"
            )
        if self.alignment_bytes != ALIGNMENT_BYTES:
            raise UnsupportedProblemError(
                f"alignment is {self.alignment_bytes} bytes, supported is {ALIGNMENT_BYTES}"
            )

    def __str__(self) -> str:
        epilogue = "" if self.epilogue is Epilogue.NONE else f" {self.epilogue.value}"
        return (
            f"M={self.tokens} N={self.experts} K={self.hidden} {self.x_dtype.value} x "
            f"{self.weight_dtype.value} -> {self.out_dtype.value}{epilogue}"
            f"{'' if self.pdl else ', no dependent launch'}"
        )
