"""The same kernels as CuTe DSL compiles and calls them, in the process that computes with them.

What a server pays without a store: the import of the compiler, a compile of each key, and TVM-FFI's
call path with torch tensors. Importing this module imports the compiler.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from llbf16_aot.backends import BACKENDS
from llbf16_aot.kernels.common import ELEMENT_TYPES
from llbf16_aot.key import CompileKey
from llbf16_aot.launch import ParamSource
from llbf16_aot.problem import ALIGNMENT_BYTES, VECTOR_ELEMENTS
from llbf16_aot.toolchain import COMPILE_OPTIONS

__all__ = ["compile_call", "stream_of"]

Compiled = Callable[..., Any]
"""Called with x, weight, out and, where compiled so, a stream."""


class _TensorCall:
    """A kernel behind the arguments that a DSL user passes: tensors and a stream."""

    def __init__(self, kernel: Any, sources: tuple[ParamSource, ...]) -> None:
        self.kernel = kernel
        self.with_hidden = ParamSource.HIDDEN in sources

    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(
        self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream
    ) -> None:
        tokens, experts = Int32(x.shape[0]), Int32(weight.shape[0])
        x_row, weight_row = Int32(x.stride[0]), Int32(weight.stride[0])
        tensors = (x.iterator, weight.iterator, out.iterator)
        if const_expr(self.with_hidden):
            hidden = Int32(x.shape[1])
            self.kernel(*tensors, tokens, experts, hidden, x_row, weight_row, None, stream)
        else:
            self.kernel(*tensors, tokens, experts, x_row, weight_row, None, stream)


_WITH_HIDDEN = (
    ParamSource.X,
    ParamSource.WEIGHT,
    ParamSource.OUT,
    ParamSource.TOKENS,
    ParamSource.EXPERTS,
    ParamSource.HIDDEN,
    ParamSource.X_ROW_STRIDE,
    ParamSource.WEIGHT_ROW_STRIDE,
)
_WITHOUT_HIDDEN = tuple(source for source in _WITH_HIDDEN if source is not ParamSource.HIDDEN)


def compile_call(key: CompileKey, *, own_stream: bool = False) -> Compiled:
    """Compile a key's kernel for calls with torch tensors through TVM-FFI.

    x [M, K], weight [N, K] and out [M, N] have run-time extents; K too where the family takes it
    so. With `own_stream` the call takes no stream: TVM-FFI asks torch for the current one.
    Raises ValueError for a family whose parameters this module does not know.
    """
    sources = tuple(BACKENDS[key.backend].PARAMS)
    if sources not in (_WITH_HIDDEN, _WITHOUT_HIDDEN):
        raise ValueError(f"{key.backend} takes {sources}, which this program cannot pass")
    family = importlib.import_module(f"llbf16_aot.kernels.{key.backend}")
    kernel, _ = family.entry(key.config, out_dtype=key.out_dtype, pdl=key.pdl)
    tokens, experts = cute.sym_int(), cute.sym_int()
    static = getattr(key.config, "hidden", None)
    hidden = cute.sym_int(divisibility=VECTOR_ELEMENTS) if static is None else static
    x = _operand(tokens, hidden)
    weight = _operand(experts, hidden)
    out = make_fake_tensor(ELEMENT_TYPES[key.out_dtype], (tokens, experts), (experts, 1))
    options = " ".join((f"--gpu-arch {key.target}", "--enable-tvm-ffi", *COMPILE_OPTIONS))
    stream = make_fake_stream(use_tvm_ffi_env_stream=own_stream)
    compiled: Compiled = cute.compile(
        _TensorCall(kernel, sources), x, weight, out, stream, options=options
    )
    return compiled


def _operand(rows: Any, hidden: Any) -> Any:
    """A placeholder for x or weight: bf16 rows of K elements, at multiples of 16 bytes."""
    stride = cute.sym_int(divisibility=VECTOR_ELEMENTS)
    return make_fake_tensor(
        cutlass.BFloat16, (rows, hidden), (stride, 1), assumed_align=ALIGNMENT_BYTES
    )


def stream_of(handle: int) -> cuda.CUstream:
    """The stream object that a call takes, from the driver's handle."""
    return cuda.CUstream(handle)
