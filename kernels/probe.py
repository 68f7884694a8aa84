"""The `probe` kernels: the producer of x ahead of a router, and the empty kernel.

Both behave as a good neighbour of a dependent launch does: they release their dependents at the
start and wait for the kernel ahead before they write.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream

from ..backends.probe import ProbeConfig, check, geometry
from ..problem import ALIGNMENT_BYTES, VECTOR_ELEMENTS, DType
from .common import load_x, pointer_arguments

__all__ = ["Probe", "check", "entry"]


class Probe:
    """The kernel of one kind; `__call__` is what the compiler traces."""

    def __init__(self, config: ProbeConfig, *, pdl: bool) -> None:
        check(config)
        self.config = config
        self.pdl = pdl

    @cute.jit
    def __call__(
        self, x: cute.Pointer, out: cute.Pointer, hidden: Int32, stream: cuda.CUstream
    ) -> None:
        """Launch on a stream. Only the record's grid covers all tokens; this one covers one."""
        launch = geometry(self.config)
        self.kernel(x, out, hidden).launch(
            grid=[cute.ceil_div(hidden, launch.grid[0].tile), 1, 1],
            block=list(launch.block),
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,  # [M, K] bf16
        out: cute.Pointer,  # [M, K] bf16
        hidden: Int32,
    ) -> None:
        """Block (part of a row, token) copies eight elements a thread, or nothing."""
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        if const_expr(self.config.kind == "producer"):
            thread, _, _ = cute.arch.thread_idx()
            part, token, _ = cute.arch.block_idx()
            column = (part * geometry(self.config).block[0] + thread) * VECTOR_ELEMENTS
            if column < hidden:
                offset = (Int64(token) * Int64(hidden) + Int64(column)) * 2
                words = load_x(x.toint() + offset, True)
                place = cute.make_ptr(
                    Uint32,
                    out.toint() + offset,
                    cute.AddressSpace.gmem,
                    assumed_align=ALIGNMENT_BYTES,
                )
                mOut = cute.make_tensor(place, cute.make_layout((4,)))
                cute.autovec_copy(words, mOut)


def entry(config: ProbeConfig, *, out_dtype: DType, pdl: bool) -> tuple[Any, tuple[Any, ...]]:
    """The function to compile and the placeholder arguments to compile it for."""
    x, _, out = pointer_arguments(out_dtype)
    return Probe(config, pdl=pdl), (x, out, Int32(VECTOR_ELEMENTS), make_fake_stream())
