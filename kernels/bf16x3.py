"""The `bf16x3` kernel: fp32 weights as three bf16 terms on tensor cores, x in bf16, any M.

A weight of 24 bits is cut into three bf16 of 8 bits each, exactly: its upper half, the upper half
of what is left, and the rest. x is bf16 already, so every product of the three mma.m16n8k16 that
replace one is exact, and only the sums round. Sums of one stage (64 elements of K) start at zero
and are added to the thread's totals by ordinary fp32 additions: tensor cores cut off where they
align what they add, and over a long K that would add up.

A cluster shares K. Each of its blocks takes a run of K tiles, which all threads copy with
`cp.async` into a ring of stages; warps read fp32 weights from there, cut them in registers, and
multiply. Rows past M or N and columns past K are filled with zeros by the copy.

Who may write to whose shared memory, and until when: the sums of the tile are divided among the
cluster's blocks. Every block sends each owner its partial sums with `st.async`, which counts the
bytes on the owner's mbarrier. What arrives takes the place of stages. So a block writes to a peer
only after the one cluster barrier, at which every block has initialised its mbarrier and has read
the last of its stages; and a block ends only after its own mbarrier has counted all bytes that are
addressed to it, after which nobody writes to it any more. A block that owns no sums is written to
by nobody. A block may end while its own stores are under way: `st.async` takes its value from
registers.

Every addition has a fixed place (K tiles in order, warps by number, blocks by rank), so results are
the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.arch import inline_ptx
from cutlass.cute.runtime import make_fake_stream

from ..backends.bf16x3 import (
    HIDDEN_TILE,
    WEIGHT_PITCH_BYTES,
    X_PITCH_BYTES,
    Bf16x3Config,
    check,
    geometry,
)
from ..problem import DType, Epilogue
from .common import (
    VECTOR_BYTES,
    epilogue_argument,
    launch_options,
    mma,
    pointer_arguments,
    store_sum,
    upper_halves,
    wait_cluster,
)

__all__ = ["Bf16x3", "check", "entry"]

WARP = 32

_COPY = "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};"

_LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];"


@cute.jit
def _copy_rows(
    source: cute.Pointer,
    row_stride: Int32,
    row0: Int32,
    rows: Int32,
    column0: Int32,
    columns: Int32,
    stage: Int32,
    thread: Int32,
    count: cutlass.Constexpr[int],
    pitch: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """Start copying `count` rows x one K tile into a stage; zeros where the tensor has ended."""
    size = source.dtype.width // 8
    elements = VECTOR_BYTES // size
    vectors = HIDDEN_TILE // elements
    vector = thread % vectors
    column = column0 + vector * elements
    for i in cutlass.range_constexpr(count * vectors // threads):
        row = thread // vectors + i * (threads // vectors)
        inside = Boolean((row0 + row < rows) & (column < columns))
        # With zero bytes nothing is read; the address stays inside the tensor all the same.
        bytes_ = Int32(VECTOR_BYTES) if inside else Int32(0)
        offset = Int64(row0 + row) * Int64(row_stride) + Int64(column) if inside else Int64(0)
        inline_ptx(
            _COPY,
            read_only_args=[
                stage + row * pitch + vector * VECTOR_BYTES,
                source.toint() + offset * size,
                bytes_,
            ],
        )


class Bf16x3:
    """The kernel for one configuration; `__call__` is what the compiler traces."""

    def __init__(self, config: Bf16x3Config, *, pdl: bool, epilogue: Epilogue) -> None:
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
        self.kernel(
            x, weight, out, tokens, experts, hidden, x_row_stride, weight_row_stride, extra
        ).launch(
            **options,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,  # [M, K] bf16
        weight: cute.Pointer,  # [N, K] fp32
        out: cute.Pointer,  # [M, N]
        tokens: Int32,
        experts: Int32,
        hidden: Int32,
        x_row_stride: Int32,
        weight_row_stride: Int32,
        extra: Any,  # bias [N], scale, or None
    ) -> None:
        """Block (rank, expert block, token block) adds its K tiles and writes the sums it owns."""
        config = self.config
        S, stages = config.split_k, config.stages
        XT, MT = config.experts_tile, config.tokens_tile
        threads = config.warps * WARP

        # 1. Prepare
        thread, _, _ = cute.arch.thread_idx()
        rank, expert_block, token_block = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        lane = thread % WARP
        expert0 = expert_block * XT
        token0 = token_block * MT
        tiles = cute.ceil_div(hidden, HIDDEN_TILE)
        tile0 = rank * tiles // S
        count = (rank + 1) * tiles // S - tile0

        shared = cute.arch.get_dyn_smem(Float32, VECTOR_BYTES)
        ring = shared.toint()
        x_part = XT * WEIGHT_PITCH_BYTES  # where x starts in a stage
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        for s in cutlass.range_constexpr(stages - 1):
            if s < count:
                _copy_rows(
                    weight, weight_row_stride, expert0, experts, (tile0 + s) * HIDDEN_TILE, hidden,
                    ring + s * config.stage_bytes, thread, XT, WEIGHT_PITCH_BYTES, threads,
                )  # fmt: skip
        if const_expr(S > 1):
            received = cute.arch.alloc_smem(Int64, 1, alignment=8)
            # Only sums of tokens that are there are sent.
            sent = cutlass.min(tokens - token0, MT) * XT
            mine = cutlass.max(cutlass.min(sent - rank * config.owned, config.owned), 0)
            if thread == 0:
                cute.arch.mbarrier_init(received, 1)
                cute.arch.mbarrier_init_fence()
            # For racecheck of compute-sanitizer, which takes the two for different lanes' accesses.
            cute.arch.sync_warp()
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(received, mine * (S * 4))
        if const_expr(self.pdl):
            # Per thread: each thread of this block reads x.
            cute.arch.griddepcontrol_wait()
        for s in cutlass.range_constexpr(stages - 1):
            if s < count:
                _copy_rows(
                    x, x_row_stride, token0, tokens, (tile0 + s) * HIDDEN_TILE, hidden,
                    ring + (s * config.stage_bytes + x_part), thread, MT, X_PITCH_BYTES, threads,
                )  # fmt: skip
            # The first group has all the weights requested so far. Groups may be empty.
            cute.arch.cp_async_commit_group()

        # 2. Main loop: warp (k, token, expert) takes every k_warps-th step of a stage.
        expert_warp = warp % config.expert_warps
        token_warp = warp // config.expert_warps % config.token_warps
        k_warp = warp // (config.expert_warps * config.token_warps)
        n_tiles = config.warp_tokens // 8
        g = lane // 4
        t = lane % 4
        # In floats and in bytes from the start of a stage.
        w_offset = (expert_warp * 16 + g) * (WEIGHT_PITCH_BYTES // 4) + 2 * t
        # ldmatrix wants lane l to name row l % 8 of 8 x 8 matrix l // 8: (tokens 0-7, k 0-7),
        # (0-7, 8-15), (8-15, 0-7), (8-15, 8-15), which is B of two n8 tiles.
        x_row = token_warp * config.warp_tokens + lane % 8 + lane // 16 * 8
        x_offset = x_part + x_row * X_PITCH_BYTES + lane // 8 % 2 * 16
        # Warps without tokens copy and wait with the others, and multiply nothing.
        busy = Boolean(token0 + token_warp * config.warp_tokens < tokens)

        totals = cute.make_rmem_tensor((n_tiles, 4), Float32)
        totals.fill(0.0)
        stage = Int32(0)  # of which the next product is
        free = Int32(stages - 1)  # into which the next copy goes
        for i in cutlass.range(count, unroll=1):
            cute.arch.cp_async_wait_group(stages - 2)
            # This tile is there, and all have read the tile before it, whose stage is free now.
            cute.arch.sync_threads()
            if i + (stages - 1) < count:
                column = (tile0 + i + (stages - 1)) * HIDDEN_TILE
                at = ring + free * config.stage_bytes
                _copy_rows(
                    weight, weight_row_stride, expert0, experts, column, hidden,
                    at, thread, XT, WEIGHT_PITCH_BYTES, threads,
                )  # fmt: skip
                _copy_rows(
                    x, x_row_stride, token0, tokens, column, hidden,
                    at + x_part, thread, MT, X_PITCH_BYTES, threads,
                )  # fmt: skip
            cute.arch.cp_async_commit_group()
            if busy:
                self._multiply(
                    totals,
                    shared + (stage * (config.stage_bytes // 4) + w_offset),
                    ring + stage * config.stage_bytes + x_offset,
                    k_warp,
                )
            stage = stage + 1
            if stage == stages:
                stage = Int32(0)
            free = free + 1
            if free == stages:
                free = Int32(0)

        # 3. Epilogue: over the warps that share K, then over the blocks of the cluster. What comes
        # now takes the place of the stages, once all warps have read them.
        cute.arch.sync_threads()
        # (warps, tokens, experts)
        partial = cute.make_tensor(
            shared,
            cute.make_layout((config.k_warps, MT, XT), stride=(MT * config.pitch, config.pitch, 1)),
        )
        for n in cutlass.range_constexpr(n_tiles):
            for j in cutlass.range_constexpr(4):
                # Of mma's result: row g + 8 * (j // 2), column 2 * t + j % 2.
                token = token_warp * config.warp_tokens + n * 8 + 2 * t + j % 2
                partial[k_warp, token, expert_warp * 16 + g + 8 * (j // 2)] = totals[n, j]
        if const_expr(S > 1):
            # Before the barrier of the block, which orders the warps' sums besides.
            cute.arch.cluster_arrive(aligned=False)
        cute.arch.sync_threads()
        if const_expr(S > 1):
            # (blocks of the cluster, owned sums): what the peers send
            inbox = cute.make_tensor(
                shared + config.partial_bytes // 4,
                cute.make_layout((S, config.owned), stride=(config.owned, 1)),
            )
            cute.arch.cluster_wait()
            for start in cutlass.range_constexpr(0, config.sums // 4, threads):
                index = (thread + start) * 4
                if index < sent:
                    total = self._sum_over_warps(shared, index)
                    slot = rank * config.owned + index % config.owned
                    cute.arch.store_async_dsmem(
                        (inbox.iterator + slot).align(VECTOR_BYTES),
                        tuple(total[j].bitcast(Int32) for j in range(4)),
                        received,
                        index // config.owned,
                    )
            if mine > 0:
                wait_cluster(received, 0)
            for start in cutlass.range_constexpr(0, config.owned, threads):
                slot = thread + start
                if slot < mine:
                    value = Float32(0.0)
                    for peer in cutlass.range_constexpr(S):
                        value = value + inbox[peer, slot]
                    index = rank * config.owned + slot
                    store_sum(
                        self.epilogue,
                        out,
                        extra,
                        token0 + index // XT,
                        expert0 + index % XT,
                        value,
                        tokens,
                        experts,
                    )
        else:
            for start in cutlass.range_constexpr(0, config.sums, threads):
                index = thread + start
                value = Float32(0.0)
                for j in cutlass.range_constexpr(config.k_warps):
                    value = value + partial[j, index // XT, index % XT]
                store_sum(
                    self.epilogue,
                    out,
                    extra,
                    token0 + index // XT,
                    expert0 + index % XT,
                    value,
                    tokens,
                    experts,
                )

    @cute.jit
    def _multiply(
        self, totals: cute.Tensor, w_stage: cute.Pointer, x_stage: Int32, k_warp: Int32
    ) -> None:
        """Add the products of this warp's steps of one stage to its totals."""
        config = self.config
        n_tiles = config.warp_tokens // 8
        steps = HIDDEN_TILE // 16 // config.k_warps
        mask = Uint32(0xFFFF0000)

        sums = []  # of this stage: (n8 tiles, 4)
        for _n in cutlass.range_constexpr(n_tiles * 4):
            sums.append(Float32(0.0))
        pair = cute.make_rmem_tensor((2,), Float32)
        for s in cutlass.range_constexpr(steps):
            step = k_warp * steps + s
            # Weights as mma's A: rows g and g + 8, columns 2 * t and 2 * t + 8 of the step.
            terms: list[list[Uint32]] = [[], [], []]
            for a in cutlass.range_constexpr(4):
                offset = step * 16 + (a % 2 * 8 * (WEIGHT_PITCH_BYTES // 4) + a // 2 * 8)
                source = cute.make_tensor((w_stage + offset).align(8), cute.make_layout((2,)))
                cute.autovec_copy(source, pair)
                first, second = pair[0], pair[1]
                for level in cutlass.range_constexpr(3):
                    low, high = first.bitcast(Uint32), second.bitcast(Uint32)
                    terms[level].append(upper_halves(low, high))
                    if const_expr(level < 2):
                        # Exact: what is taken away has the same leading bits.
                        first = first - (low & mask).bitcast(Float32)
                        second = second - (high & mask).bitcast(Float32)
            # x as mma's B, two n8 tiles at a time.
            b = []
            for n in cutlass.range_constexpr(n_tiles // 2):
                found = inline_ptx(
                    _LDMATRIX,
                    write_only_types=[Uint32] * 4,
                    read_only_args=[x_stage + step * 32 + n * (16 * X_PITCH_BYTES)],
                )
                for i in cutlass.range_constexpr(4):
                    b.append(found[i])
            # The small terms first. Tiles take turns, so that no mma waits for the one before.
            for level in cutlass.range_constexpr(3):
                for n in cutlass.range_constexpr(n_tiles):
                    c = [sums[n * 4 + j] for j in range(4)]
                    d = mma(terms[2 - level], (b[2 * n], b[2 * n + 1]), c)
                    for j in cutlass.range_constexpr(4):
                        sums[n * 4 + j] = d[j]
        for n in cutlass.range_constexpr(n_tiles):
            for j in cutlass.range_constexpr(4):
                totals[n, j] = totals[n, j] + sums[n * 4 + j]

    @cute.jit
    def _sum_over_warps(self, shared: cute.Pointer, index: Int32) -> cute.Tensor:
        """Four neighbouring sums of the tile, each over the warps that share K."""
        config = self.config
        XT = config.experts_tile
        total = cute.make_rmem_tensor((4,), Float32)
        total.fill(0.0)
        part = cute.make_rmem_tensor((4,), Float32)
        for j in cutlass.range_constexpr(config.k_warps):
            offset = (j * config.tokens_tile + index // XT) * config.pitch + index % XT
            source = cute.make_tensor((shared + offset).align(VECTOR_BYTES), cute.make_layout((4,)))
            cute.autovec_copy(source, part)
            for i in cutlass.range_constexpr(4):
                total[i] = total[i] + part[i]
        return total


def entry(
    config: Bf16x3Config, *, out_dtype: DType, pdl: bool, epilogue: Epilogue = Epilogue.NONE
) -> tuple[Any, tuple[Any, ...]]:
    """The function to compile and the placeholder arguments to compile it for."""
    kernel = Bf16x3(config, pdl=pdl, epilogue=epilogue)
    extra = epilogue_argument(epilogue)
    pointers = pointer_arguments(out_dtype, weight_dtype=DType.FP32)
    sizes = (Int32(1), Int32(1), Int32(8), Int32(8), Int32(8))
    return kernel, (*pointers, *sizes, extra, make_fake_stream())
