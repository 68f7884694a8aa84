"""The `dotprod` kernel: one thread block computes a few experts for a tile of tokens, on FMA units.

A thread block holds its experts' whole weight rows in registers, all requested at once and before
the wait on the kernel ahead in the stream; then it streams x past them. Sums are fp32 and every
addition has a fixed place, so results are the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream

from ..backends.dotprod import DotprodConfig, check, geometry
from ..problem import VECTOR_ELEMENTS, DType, Epilogue
from .common import (
    computed_here,
    epilogue_argument,
    epilogue_term,
    finished,
    launch_options,
    load_weight,
    load_x,
    pointer_arguments,
    store_element,
    sum_pairwise,
)

__all__ = ["Dotprod", "check", "entry"]

WARP = 32


@cute.jit
def _dot8(a: cute.Tensor, b: cute.Tensor, sum_: Float32) -> Float32:
    """Add the product of two vectors of eight bf16 to a sum.

    bf16 is the upper half of fp32: a shift and a mask widen it without rounding.
    """
    for i in cutlass.range_constexpr(4):
        a_low = (a[i] << Uint32(16)).bitcast(Float32)
        b_low = (b[i] << Uint32(16)).bitcast(Float32)
        a_high = (a[i] & Uint32(0xFFFF0000)).bitcast(Float32)
        b_high = (b[i] & Uint32(0xFFFF0000)).bitcast(Float32)
        sum_ = a_low * b_low + sum_
        sum_ = a_high * b_high + sum_
    return sum_


class Dotprod:
    """The kernel for one configuration; `__call__` is what the compiler traces."""

    def __init__(
        self, config: DotprodConfig, *, pdl: bool, epilogue: Epilogue = Epilogue.NONE
    ) -> None:
        check(config)
        self.config = config
        self.pdl = pdl
        self.epilogue = epilogue

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        weight: cute.Pointer,
        out: cute.Pointer,
        tokens: Int32,
        experts: Int32,
        x_row_stride: Int32,
        weight_row_stride: Int32,
        extra: Any,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on a stream; row strides are in elements, `extra` is what the epilogue takes."""
        options = launch_options(
            geometry(self.config), tokens, experts, stream=stream, pdl=self.pdl
        )
        self.kernel(x, weight, out, tokens, experts, x_row_stride, weight_row_stride, extra).launch(
            **options,
            # Without it ptxas aims at more blocks an SM, and spills where a thread holds 8 sums.
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,  # [M, K] bf16
        weight: cute.Pointer,  # [N, K] bf16
        out: cute.Pointer,  # [M, N]
        tokens: Int32,
        experts: Int32,
        x_row_stride: Int32,
        weight_row_stride: Int32,
        extra: Any,  # bias [N], scale, or None
    ) -> None:
        """Block (expert block, token block) writes its experts' columns for its tokens."""
        config = self.config
        E = config.experts_per_block
        T = config.tokens
        warps = config.block // WARP

        # 1. Prepare: every weight vector of this thread is requested before anything is waited for.
        thread, _, _ = cute.arch.thread_idx()
        expert_block, token_block, _ = cute.arch.block_idx()
        expert0 = expert_block * E
        token0 = token_block * T
        lane = thread % WARP
        warp = thread // WARP
        # (E * T, warps): the warps' sums
        partial = cute.make_tensor(
            cute.arch.alloc_smem(Float32, E * T * warps, alignment=16),
            cute.make_layout((E * T, warps), stride=(1, E * T)),
        )
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()

        # Bytes from a row's start to this thread's first vector; the others lie constants away.
        first = Int64(thread * VECTOR_ELEMENTS) * 2
        columns = []
        inside = []
        for step in cutlass.range_constexpr(config.steps):
            column = (thread + step * config.block) * VECTOR_ELEMENTS
            columns.append(step * config.block * VECTOR_ELEMENTS * 2)
            whole = (step + 1) * config.block * VECTOR_ELEMENTS <= config.hidden
            inside.append(True if whole else Boolean(column < config.hidden))

        w = []  # E x steps vectors of eight
        for e in cutlass.range_constexpr(E):
            # A block past the last expert reads that one again; it writes nothing.
            row = cutlass.min(expert0 + e, experts - 1)
            base = weight.toint() + Int64(row) * Int64(weight_row_stride) * 2 + first
            for step in cutlass.range_constexpr(config.steps):
                w.append(load_weight(base + columns[step], inside[step]))

        # Before the wait, behind which they would be on the way from x to the sums. Tokens past the
        # last read that one again, and are not written.
        x_rows = []
        for t in cutlass.range_constexpr(T):
            row = cutlass.min(token0 + t, tokens - 1)
            base = x.toint() + Int64(row) * Int64(x_row_stride) * 2 + first
            x_rows.append(computed_here(base))
        terms = []  # of the sums that this thread will write
        for start in cutlass.range_constexpr(0, E * T, config.block):
            expert = expert0 + (thread + start) // T
            terms.append(epilogue_term(self.epilogue, extra, expert, experts))
        if const_expr(self.pdl):
            # Per thread: each thread of this block reads x.
            cute.arch.griddepcontrol_wait()

        # 2. Main loop.
        sums = []  # E * T, expert-major
        for _i in cutlass.range_constexpr(E * T):
            sums.append(Float32(0.0))
        for step in cutlass.range_constexpr(config.steps):
            for t in cutlass.range_constexpr(T):
                v = load_x(x_rows[t] + columns[step], inside[step])
                for e in cutlass.range_constexpr(E):
                    sums[e * T + t] = _dot8(w[e * config.steps + step], v, sums[e * T + t])

        # 3. Epilogue. Lanes halve the number of sums that they hold with each exchange, so n sums
        # cost about n shuffles and not 5 n. `held` is the index of the one sum left in this lane.
        halvings = (E * T - 1).bit_length()
        for _i in cutlass.range_constexpr((1 << halvings) - E * T):
            sums.append(Float32(0.0))
        held = Int32(0)
        for level in cutlass.range_constexpr(halvings):
            half = 1 << (halvings - 1 - level)
            offset = WARP >> (level + 1)
            upper = (lane & offset) != 0
            held = held + half if upper else held
            for i in cutlass.range_constexpr(half):
                kept = sums[i + half] if upper else sums[i]
                sent = sums[i] if upper else sums[i + half]
                sums[i] = kept + cute.arch.shuffle_sync_bfly(sent, offset=offset)
        total = sums[0]
        for level in cutlass.range_constexpr(halvings, 5):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=WARP >> (level + 1))
        if (lane % (WARP >> halvings) == 0) & (held < E * T):
            partial[held, warp] = total
        cute.arch.sync_threads()

        for start in cutlass.range_constexpr(0, E * T, config.block):
            index = thread + start
            if index < E * T:
                total = sum_pairwise([partial[index, j] for j in range(warps)])
                value = finished(self.epilogue, total, terms[start // config.block])
                expert = expert0 + index // T
                token = token0 + index % T
                if (expert < experts) & (token < tokens):
                    store_element(out, Int64(token) * Int64(experts) + Int64(expert), value)


def entry(
    config: DotprodConfig, *, out_dtype: DType, pdl: bool, epilogue: Epilogue = Epilogue.NONE
) -> tuple[Any, tuple[Any, ...]]:
    """The function to compile and the placeholder arguments to compile it for."""
    kernel = Dotprod(config, pdl=pdl, epilogue=epilogue)
    extra = epilogue_argument(epilogue)
    sizes = (Int32(config.tokens), Int32(1), Int32(config.hidden), Int32(config.hidden))
    return kernel, (*pointer_arguments(out_dtype), *sizes, extra, make_fake_stream())
