"""The `splitk` kernel: a cluster shares K, its warps are specialised, tensor cores multiply.

Each thread block of a cluster takes a run of K tiles of one tile of the output, 16 tokens x 16 or
32 experts. Producer
warps copy weights and x with `cp.async` into a ring of stages in shared memory; consumer warps
multiply, each its own quarter of a stage. M, N and K are run-time values: rows past M or N and
columns past K are filled with zeros by the copy, and a block without a K tile adds zeros.

Who may write to whose shared memory, and until when: the sums of a tile are divided among the
cluster's blocks. Every block sends each owner its partial sums with `st.async`, which counts the
bytes on the owner's mbarrier `received`. A block writes to a peer only after the cluster barrier,
at which every block has initialised that mbarrier; and a block ends only after its own mbarrier has
counted all bytes that are addressed to it, after which nobody writes to it any more. A block may
end while its own stores are under way: `st.async` takes its value from a register.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.arch import inline_ptx
from cutlass.cute.runtime import make_fake_stream

from ..backends.splitk import (
    CONSUMER_WARPS,
    HIDDEN_TILE,
    PRODUCER_WARPS,
    ROW_PITCH_BYTES,
    TOKENS_TILE,
    SplitkConfig,
    check,
    geometry,
)
from ..problem import VECTOR_ELEMENTS, DType, Epilogue
from .common import (
    VECTOR_BYTES,
    epilogue_argument,
    launch_options,
    mma,
    pointer_arguments,
    store_sum,
    wait_cluster,
)

__all__ = ["Splitk", "check", "entry"]

WARP = 32
CONSUMERS = CONSUMER_WARPS * WARP
PRODUCERS = PRODUCER_WARPS * WARP
COPIERS = PRODUCERS // 2
"""Threads that copy one operand."""

CONSUMER_BARRIER = 1
"""Hardware barrier of the consumer warps; 0 belongs to the whole block."""

# Weights come from memory, where the neighbouring lines are wanted next; x lies in L2 already, and
# the hint only makes work there: up to a tenth of the time with 896 experts.
_COPY_WEIGHT = "cp.async.cg.shared.global.L2::256B [{$r0}], [{$r1}], 16, {$r2};"
_COPY_X = "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};"

_LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];"


@cute.jit
def _copy_tile(
    source: cute.Pointer,
    row_stride: Int32,
    row0: Int32,
    rows: Int32,
    column0: Int32,
    columns: Int32,
    stage: Int32,
    thread: Int32,
    count: cutlass.Constexpr[int],
    copy: cutlass.Constexpr[str],
) -> None:
    """Start copying `count` rows x one K tile into a stage; zeros where the tensor has ended.

    A warp copies one row of 512 bytes at a time, so its accesses are whole lines.
    """
    vectors = HIDDEN_TILE // VECTOR_ELEMENTS
    column = column0 + (thread % vectors) * VECTOR_ELEMENTS
    for i in cutlass.range_constexpr(count * vectors // COPIERS):
        row = thread // vectors + i * (COPIERS // vectors)
        inside = Boolean((row0 + row < rows) & (column < columns))
        # With zero bytes nothing is read; the address stays inside the tensor all the same.
        bytes_ = Int32(VECTOR_BYTES) if inside else Int32(0)
        offset = Int64(row0 + row) * Int64(row_stride) + Int64(column) if inside else Int64(0)
        inline_ptx(
            copy,
            read_only_args=[
                stage + row * ROW_PITCH_BYTES + (thread % vectors) * VECTOR_BYTES,
                source.toint() + offset * 2,
                bytes_,
            ],
        )


class Splitk:
    """The kernel for one configuration; `__call__` is what the compiler traces."""

    def __init__(
        self, config: SplitkConfig, *, pdl: bool, epilogue: Epilogue = Epilogue.NONE
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
        hidden: Int32,
        x_row_stride: Int32,
        weight_row_stride: Int32,
        extra: Any,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on a stream; row strides are in elements, `extra` is what the epilogue takes."""
        options = launch_options(
            geometry(self.config), tokens, experts, stream=stream, pdl=self.pdl
        )
        if const_expr(self.config.experts_tile > 16):
            # Unasked the compiler keeps to 64 registers, which four tiles of sums do not fit into.
            options["min_blocks_per_mp"] = 1
        self.kernel(
            x, weight, out, tokens, experts, hidden, x_row_stride, weight_row_stride, extra
        ).launch(**options)

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,  # [M, K] bf16
        weight: cute.Pointer,  # [N, K] bf16
        out: cute.Pointer,  # [M, N]
        tokens: Int32,
        experts: Int32,
        hidden: Int32,
        x_row_stride: Int32,
        weight_row_stride: Int32,
        extra: Any,  # bias [N], scale, or None
    ) -> None:
        """Block (rank, expert block, token block) adds its K tiles and writes the sums it owns."""
        S = self.config.split_k
        stages = self.config.stages
        owned = self.config.owned
        XT, pitch = self.config.experts_tile, self.config.pitch

        # 1. Prepare
        thread, _, _ = cute.arch.thread_idx()
        rank, expert_block, token_block = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        lane = thread % WARP
        expert0 = expert_block * XT
        token0 = token_block * TOKENS_TILE
        tiles = cute.ceil_div(hidden, HIDDEN_TILE)
        tile0 = rank * tiles // S
        count = (rank + 1) * tiles // S - tile0

        ring = cute.arch.get_dyn_smem(Uint8, VECTOR_BYTES).toint()
        full = cute.arch.alloc_smem(Int64, stages, alignment=8)
        empty = cute.arch.alloc_smem(Int64, stages, alignment=8)
        received = cute.arch.alloc_smem(Int64, 1, alignment=8)
        # (warps, tokens, experts)
        partial = cute.make_tensor(
            cute.arch.alloc_smem(Float32, CONSUMER_WARPS * TOKENS_TILE * pitch, alignment=16),
            cute.make_layout(
                (CONSUMER_WARPS, TOKENS_TILE, XT), stride=(TOKENS_TILE * pitch, pitch, 1)
            ),
        )
        # (blocks of the cluster, owned sums): what the peers send
        inbox = cute.make_tensor(
            cute.arch.alloc_smem(Float32, S * owned, alignment=16),
            cute.make_layout((S, owned), stride=(owned, 1)),
        )
        mine = cutlass.min(self.config.sums - rank * owned, owned)

        if const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        if thread == 0:
            for s in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + s, PRODUCERS)
                cute.arch.mbarrier_init(empty + s, CONSUMERS)
            cute.arch.mbarrier_init(received, 1)
            cute.arch.mbarrier_init_fence()
        # For the own block's warps; the cluster's other blocks are waited for only before sending.
        cute.arch.sync_threads()
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(received, mine * (S * 4))
        # Relaxed: the fence above has released the initialisation to the cluster already.
        cute.arch.cluster_arrive_relaxed(aligned=False)

        # 2. Main loop
        if warp < CONSUMER_WARPS:
            self._consume(
                ring, full, empty, received, partial, inbox, out, extra,
                tokens, experts, expert0, token0, count, rank, mine, warp, lane, thread,
            )  # fmt: skip
        elif warp < CONSUMER_WARPS + PRODUCER_WARPS // 2:
            self._produce(
                weight, weight_row_stride, expert0, experts, ring + TOKENS_TILE * ROW_PITCH_BYTES,
                full, empty, tile0, count, hidden, thread - CONSUMERS, XT, _COPY_WEIGHT,
            )  # fmt: skip
            cute.arch.cluster_wait()
        else:
            if const_expr(self.pdl):
                # Per thread: these threads, and no others, read x.
                cute.arch.griddepcontrol_wait()
            self._produce(
                x, x_row_stride, token0, tokens, ring,
                full, empty, tile0, count, hidden, thread - CONSUMERS - COPIERS,
                TOKENS_TILE, _COPY_X,
            )  # fmt: skip
            cute.arch.cluster_wait()

    @cute.jit
    def _produce(
        self,
        source: cute.Pointer,
        row_stride: Int32,
        row0: Int32,
        rows: Int32,
        ring: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        tile0: Int32,
        count: Int32,
        hidden: Int32,
        thread: Int32,
        tile_rows: cutlass.Constexpr[int],
        copy: cutlass.Constexpr[str],
    ) -> None:
        """Copy one operand's tiles, as far ahead of the consumers as there are stages."""
        stage = Int32(0)
        phase = Int32(1)  # a new mbarrier counts as having completed the phase before its first
        for i in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase)
            _copy_tile(
                source, row_stride, row0, rows, (tile0 + i) * HIDDEN_TILE, hidden,
                ring + stage * self.config.stage_bytes, thread, tile_rows, copy,
            )  # fmt: skip
            cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
            stage = stage + 1
            if stage == self.config.stages:
                stage = Int32(0)
                phase = phase ^ 1

    @cute.jit
    def _consume(
        self,
        ring: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        received: cute.Pointer,
        partial: cute.Tensor,
        inbox: cute.Tensor,
        out: cute.Pointer,
        extra: Any,
        tokens: Int32,
        experts: Int32,
        expert0: Int32,
        token0: Int32,
        count: Int32,
        rank: Int32,
        mine: Int32,
        warp: Int32,
        lane: Int32,
        thread: Int32,
    ) -> None:
        """Multiply this block's K tiles, reduce over warps and cluster, write the owned sums."""
        S = self.config.split_k
        owned = self.config.owned
        XT = self.config.experts_tile
        n_tiles = XT // 8
        steps = HIDDEN_TILE // CONSUMER_WARPS // 16

        # ldmatrix wants lane l to name row l % 8 of 8 x 8 matrix l // 8. Of x the matrices are
        # (tokens 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15): the order of mma's A. Of the
        # weights (experts 0-7, k 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15): B of two n8 tiles,
        # and of the next two 16 rows further on.
        within = warp * (steps * 32)
        x_row = lane % 16
        x_part = lane // 16
        w_row = lane % 8 + (lane // 16) * 8
        w_part = (lane // 8) % 2
        x_offset = x_row * ROW_PITCH_BYTES + within + x_part * 16
        w_offset = (TOKENS_TILE + w_row) * ROW_PITCH_BYTES + within + w_part * 16

        sums = cute.make_rmem_tensor((n_tiles, 4), Float32)
        sums.fill(0.0)
        stage = Int32(0)
        phase = Int32(0)
        for _i in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            base = ring + stage * self.config.stage_bytes
            for k in cutlass.range_constexpr(steps):
                a = inline_ptx(
                    _LDMATRIX,
                    write_only_types=[Uint32] * 4,
                    read_only_args=[base + x_offset + k * 32],
                )
                b = []
                for pair in cutlass.range_constexpr(n_tiles // 2):
                    found = inline_ptx(
                        _LDMATRIX,
                        write_only_types=[Uint32] * 4,
                        read_only_args=[base + w_offset + (pair * 16 * ROW_PITCH_BYTES + k * 32)],
                    )
                    for i in cutlass.range_constexpr(4):
                        b.append(found[i])
                for n in cutlass.range_constexpr(n_tiles):
                    c = [sums[n, j] for j in range(4)]
                    d = mma(a, (b[2 * n], b[2 * n + 1]), c)
                    for j in cutlass.range_constexpr(4):
                        sums[n, j] = d[j]
            # Every lane: racecheck of compute-sanitizer does not see that a lane which arrives
            # after a warp barrier speaks for its warp, and it costs nothing that can be measured.
            cute.arch.mbarrier_arrive(empty + stage)
            stage = stage + 1
            if stage == self.config.stages:
                stage = Int32(0)
                phase = phase ^ 1

        # 3. Epilogue: over the warps of the block, then over the blocks of the cluster. The order
        # of each sum is fixed: warps by number, blocks by rank.
        row = lane // 4
        column = (lane % 4) * 2
        for n in cutlass.range_constexpr(n_tiles):
            for j in cutlass.range_constexpr(2):
                partial[warp, row, n * 8 + column + j] = sums[n, j]
                partial[warp, row + 8, n * 8 + column + j] = sums[n, 2 + j]
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=CONSUMERS)
        cute.arch.cluster_wait()
        for start in cutlass.range_constexpr(0, self.config.sums, CONSUMERS):
            index = thread + start
            total = Float32(0.0)
            for w in cutlass.range_constexpr(CONSUMER_WARPS):
                total = total + partial[w, index // XT, index % XT]
            cute.arch.store_async_dsmem(
                inbox.iterator + (rank * owned + index % owned),
                total.bitcast(Int32),
                received,
                index // owned,
            )
        wait_cluster(received, 0)
        for start in cutlass.range_constexpr(0, owned, CONSUMERS):
            slot = thread + start
            if slot < mine:
                value = Float32(0.0)
                for r in cutlass.range_constexpr(S):
                    value = value + inbox[r, slot]
                index = rank * owned + slot
                token = token0 + index // XT
                expert = expert0 + index % XT
                store_sum(self.epilogue, out, extra, token, expert, value, tokens, experts)


def entry(
    config: SplitkConfig, *, out_dtype: DType, pdl: bool, epilogue: Epilogue = Epilogue.NONE
) -> tuple[Any, tuple[Any, ...]]:
    """The function to compile and the placeholder arguments to compile it for."""
    kernel = Splitk(config, pdl=pdl, epilogue=epilogue)
    extra = epilogue_argument(epilogue)
    sizes = (Int32(1), Int32(1), Int32(8), Int32(8), Int32(8))
    return kernel, (*pointer_arguments(out_dtype), *sizes, extra, make_fake_stream())
