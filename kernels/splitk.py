"""The `splitk` kernel: a cluster shares K, its warps are specialised, tensor cores multiply.

Each thread block of a cluster takes a run of K tiles of one tile of the output, 16 tokens x 16 to
64 experts. Producer warps copy weights and x with `cp.async` into a ring of stages in shared
memory; consumer warps multiply, each its own quarter of a stage. Weights that the ring has no room
for are asked into L2 meanwhile. M, N and K are run-time values: rows past M or N and columns past K
are filled with zeros by the copy, and a block without a K tile adds zeros.

Who may write to whose shared memory, and until when: the sums of a tile are divided among the
cluster's blocks. Every block sends each owner its partial sums with `st.async`, which counts the
bytes on the owner's mbarrier `received`. A block writes to a peer only after the cluster barrier,
at which every block has initialised that mbarrier; and a block ends only after its own mbarrier has
counted all bytes that are addressed to it, after which nobody writes to it any more. A block that
owns no sums of tokens that are there is written to by nobody. A block may end while its own stores
are under way: `st.async` takes its values from registers. The sums of a block's own warps lie where
the ring was; peers write beside it, so that a fast block meets no stage of a slow one.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.arch import inline_ptx
from cutlass.cute.runtime import make_fake_stream

from ..backends.splitk import (
    CONSUMER_WARPS,
    PRODUCER_WARPS,
    TOKENS_TILE,
    SplitkConfig,
    check,
    geometry,
)
from ..problem import VECTOR_ELEMENTS, DType, Epilogue
from .common import (
    VECTOR_BYTES,
    computed_here,
    epilogue_argument,
    epilogue_term,
    finished,
    launch_options,
    load_floats,
    mma,
    peer_address,
    pointer_arguments,
    result_address,
    send_floats,
    store_element_at,
    sum_over_warps,
    sum_pairwise,
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

# One instruction for a run of a row's bytes, at most this many elements: what blocks run at once
# would otherwise drive each other's lines out of L2 where K is very large.
PREFETCH_ELEMENTS = 2048
_PREFETCH = "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};"

_STORE_PAIR = "st.shared.v2.f32 [{$r0}], {{$r1},{$r2}};"


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
        config = self.config
        S, XT, stages = config.split_k, config.experts_tile, config.stages

        # 1. Prepare
        thread, _, _ = cute.arch.thread_idx()
        rank, expert_block, token_block = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        lane = thread % WARP
        expert0 = expert_block * XT
        token0 = token_block * TOKENS_TILE
        tiles = cute.ceil_div(hidden, config.hidden_tile)
        tile0 = rank * tiles // S
        count = (rank + 1) * tiles // S - tile0

        ring = cute.arch.get_dyn_smem(Uint8, VECTOR_BYTES).toint()
        full = cute.arch.alloc_smem(Int64, stages, alignment=8)
        empty = cute.arch.alloc_smem(Int64, stages, alignment=8)
        received = cute.arch.alloc_smem(Int64, 1, alignment=8)
        # (blocks of the cluster, owned sums): what the peers send
        inbox = cute.arch.alloc_smem(Float32, S * config.owned, alignment=16)
        # Only sums of tokens that are there are sent.
        sent = cutlass.min(tokens - token0, TOKENS_TILE) * XT
        mine = cutlass.max(cutlass.min(sent - rank * config.owned, config.owned), 0)

        if const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        if thread == 0:
            for s in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + s, PRODUCERS)
                cute.arch.mbarrier_init(empty + s, CONSUMERS)
            cute.arch.mbarrier_init(received, 1)
            cute.arch.mbarrier_init_fence()
        # For the own block's warps; the cluster's other blocks are waited for later.
        cute.arch.sync_threads()
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(received, mine * (S * 4))
        # Relaxed: the fence above has released the initialisation to the cluster already.
        cute.arch.cluster_arrive_relaxed(aligned=False)

        # 2. Main loop
        if warp < CONSUMER_WARPS:
            self._consume(
                ring, full, empty, received, inbox, out, extra, tokens, experts,
                expert0, token0, count, rank, sent, mine, warp, lane, thread,
            )  # fmt: skip
        elif warp < CONSUMER_WARPS + PRODUCER_WARPS // 2:
            self._produce(
                weight, weight_row_stride, expert0, experts,
                ring + TOKENS_TILE * config.row_pitch_bytes, full, empty,
                tile0, count, hidden, thread - CONSUMERS, XT, True,
            )  # fmt: skip
        else:
            self._produce(
                x, x_row_stride, token0, tokens, ring, full, empty,
                tile0, count, hidden, thread - CONSUMERS - COPIERS, TOKENS_TILE, False,
            )  # fmt: skip

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
        weights: cutlass.Constexpr[bool],
    ) -> None:
        """Copy one operand's tiles, as far ahead of the consumers as there are stages.

        A warp copies whole lines of one or two rows at a time. What lies past the last row or
        column becomes zeros and is not read.

        No warp waits for another one of its block between arriving at the cluster barrier and
        leaving it: racecheck of compute-sanitizer hung where producers left it at their end.
        """
        config = self.config
        vectors = config.hidden_tile // VECTOR_ELEMENTS
        column = tile0 * config.hidden_tile + thread % vectors * VECTOR_ELEMENTS
        # Every address lies inside the tensor, those that nothing is read from too.
        first = Int64(cutlass.min(column, hidden - VECTOR_ELEMENTS)) * 2
        addresses = []
        sizes = []
        for i in cutlass.range_constexpr(tile_rows * vectors // COPIERS):
            row = row0 + thread // vectors + i * (COPIERS // vectors)
            address = Int64(cutlass.min(row, rows - 1)) * Int64(row_stride) * 2 + first
            addresses.append(computed_here(source.toint() + address))
            sizes.append(computed_here(Int32(VECTOR_BYTES) if row < rows else Int32(0)))
        place = computed_here(
            ring + thread // vectors * config.row_pitch_bytes + thread % vectors * VECTOR_BYTES
        )
        if const_expr(not weights):
            # Here, where x is waited for anyway.
            cute.arch.cluster_wait()
        if const_expr(self.pdl and not weights):  # noqa: SIM102
            # Per thread: these threads, and no others, read x.
            # The branch, which every block with a K tile takes, keeps the addresses above it: the
            # assembler moves all that does not depend on a wait behind the wait.
            if count > 0:
                cute.arch.griddepcontrol_wait()

        # The first round finds the ring empty.
        first_round = cutlass.min(count, config.stages)
        for i in cutlass.range(first_round, unroll=1):
            self._copy(addresses, sizes, place, i, i, column, hidden, weights)
            cute.arch.cp_async_mbarrier_arrive_noinc(full + i)
        if const_expr(weights):
            # Behind the copies that are needed first.
            self._prefetch(source, row_stride, row0, rows, tile0, count, hidden, thread)
            cute.arch.cluster_wait()
        stage = Int32(0)
        phase = Int32(0)
        for i in cutlass.range(first_round, count, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase)
            self._copy(addresses, sizes, place, stage, i, column, hidden, weights)
            cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
            stage = stage + 1
            if stage == config.stages:
                stage = Int32(0)
                phase = phase ^ 1

    @cute.jit
    def _copy(
        self,
        addresses: list[Int64],
        sizes: list[Int32],
        place: Int32,
        stage: Int32,
        tile: Int32,
        column: Int32,
        hidden: Int32,
        weights: cutlass.Constexpr[bool],
    ) -> None:
        """Start this thread's copies of one K tile into a stage."""
        config = self.config
        rows_apart = COPIERS * VECTOR_ELEMENTS // config.hidden_tile
        inside = column + tile * config.hidden_tile < hidden
        step = Int64(tile * (config.hidden_tile * 2) if inside else 0)
        base = place + stage * config.stage_bytes
        for n in cutlass.range_constexpr(len(addresses)):
            inline_ptx(
                _COPY_WEIGHT if weights else _COPY_X,
                read_only_args=[
                    base + n * rows_apart * config.row_pitch_bytes,
                    addresses[n] + step,
                    sizes[n] if inside else Int32(0),
                ],
            )

    @cute.jit
    def _prefetch(
        self,
        weight: cute.Pointer,
        row_stride: Int32,
        row0: Int32,
        rows: Int32,
        tile0: Int32,
        count: Int32,
        hidden: Int32,
        thread: Int32,
    ) -> None:
        """Ask L2 for the weights that the ring has no room for yet, a row a thread."""
        config = self.config
        each = COPIERS // config.experts_tile
        column = (tile0 + config.stages) * config.hidden_tile
        end = cutlass.min((tile0 + count) * config.hidden_tile, hidden)
        size = cutlass.min(end - column, PREFETCH_ELEMENTS) * 2
        row = row0 + thread // each
        if (thread % each == 0) & (row < rows) & (size > 0):
            address = weight.toint() + (Int64(row) * Int64(row_stride) + Int64(column)) * 2
            inline_ptx(_PREFETCH, read_only_args=[address, size])

    @cute.jit
    def _consume(
        self,
        ring: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        received: cute.Pointer,
        inbox: cute.Pointer,
        out: cute.Pointer,
        extra: Any,
        tokens: Int32,
        experts: Int32,
        expert0: Int32,
        token0: Int32,
        count: Int32,
        rank: Int32,
        sent: Int32,
        mine: Int32,
        warp: Int32,
        lane: Int32,
        thread: Int32,
    ) -> None:
        """Multiply this block's K tiles, reduce over warps and cluster, write the owned sums."""
        config = self.config
        S, XT, owned, G = config.split_k, config.experts_tile, config.owned, config.group
        n_tiles = XT // 8
        steps = config.hidden_tile // CONSUMER_WARPS // 16
        row_pitch = config.row_pitch_bytes

        # ldmatrix wants lane l to name row l % 8 of 8 x 8 matrix l // 8. Of x the matrices are
        # (tokens 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15): the order of mma's A. Of the
        # weights (experts 0-7, k 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15): B of two n8 tiles,
        # and of the next two 16 rows further on.
        within = warp * (steps * 32)
        x_place = ring + lane % 16 * row_pitch + within + lane // 16 * 16
        w_row = TOKENS_TILE + lane % 8 + (lane // 16) * 8
        w_place = ring + w_row * row_pitch + within + (lane // 8) % 2 * 16

        # Addresses of all that follows the products, while x is not there yet.
        # (warps, tokens, experts) fp32, in the ring once all is multiplied
        pitch = config.pitch * 4
        warp_bytes = TOKENS_TILE * pitch
        partial = computed_here(ring + warp * warp_bytes + lane // 4 * pitch + lane % 4 * 8)
        sources = []  # of the sums that this thread adds up over the warps
        targets = []  # where they go, in their owner's shared memory
        bells = []  # their owner's mbarrier
        for start in cutlass.range_constexpr(0, config.sums // G, CONSUMERS):
            index = (thread + start) * G
            owner = index // owned
            slot = rank * owned + index % owned
            sources.append(computed_here(ring + index // XT * pitch + index % XT * 4))
            targets.append(computed_here(peer_address(inbox.toint() + slot * 4, owner)))
            bells.append(computed_here(peer_address(received.toint(), owner)))
        results = []  # where the sums go that this thread adds up over the blocks
        terms = []  # what they are finished with
        for start in cutlass.range_constexpr(0, owned, CONSUMERS):
            index = rank * owned + thread + start
            token = token0 + index // XT
            expert = expert0 + index % XT
            results.append(result_address(out, token, expert, experts))
            terms.append(epilogue_term(self.epilogue, extra, expert, experts))
        # Here and not before the sums are sent: beside the wait for x it costs nothing.
        cute.arch.cluster_wait()

        sums = cute.make_rmem_tensor((n_tiles, 4), Float32)
        sums.fill(0.0)
        stage = Int32(0)
        phase = Int32(0)
        for _i in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            base = stage * config.stage_bytes
            for k in cutlass.range_constexpr(steps):
                a = inline_ptx(
                    _LDMATRIX,
                    write_only_types=[Uint32] * 4,
                    read_only_args=[x_place + base + k * 32],
                )
                b = []
                for pair in cutlass.range_constexpr(n_tiles // 2):
                    found = inline_ptx(
                        _LDMATRIX,
                        write_only_types=[Uint32] * 4,
                        read_only_args=[w_place + base + (pair * 16 * row_pitch + k * 32)],
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
            if stage == config.stages:
                stage = Int32(0)
                phase = phase ^ 1

        # 3. Epilogue: over the warps of the block, then over the blocks of the cluster. The order
        # of each sum is fixed: warps by number, blocks by rank, both by pairs.
        # The sums take the ring's place once every warp has multiplied the last stage.
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=CONSUMERS)
        for n in cutlass.range_constexpr(n_tiles):
            for half in cutlass.range_constexpr(2):
                inline_ptx(
                    _STORE_PAIR,
                    read_only_args=[
                        partial + (half * 8 * pitch + n * 32),
                        sums[n, 2 * half],
                        sums[n, 2 * half + 1],
                    ],
                )
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=CONSUMERS)
        for n in cutlass.range_constexpr(len(sources)):
            if (thread + n * CONSUMERS) * G < sent:
                totals = sum_over_warps(sources[n], G, warps=CONSUMER_WARPS, warp_bytes=warp_bytes)
                send_floats(targets[n], totals, bells[n])
        for n in cutlass.range_constexpr(len(results)):
            slot = thread + n * CONSUMERS
            if slot < mine:
                # Whether or not it stores a result: a block stays until it got everything.
                wait_cluster(received, 0)
                parts = []
                for peer in cutlass.range_constexpr(S):
                    place = inbox.toint() + (peer * owned + slot) * 4
                    parts.append(load_floats(place, 1)[0])
                value = finished(self.epilogue, sum_pairwise(parts), terms[n])
                if expert0 + (rank * owned + slot) % XT < experts:
                    store_element_at(out, results[n], value)


def entry(
    config: SplitkConfig, *, out_dtype: DType, pdl: bool, epilogue: Epilogue = Epilogue.NONE
) -> tuple[Any, tuple[Any, ...]]:
    """The function to compile and the placeholder arguments to compile it for."""
    kernel = Splitk(config, pdl=pdl, epilogue=epilogue)
    extra = epilogue_argument(epilogue)
    sizes = (Int32(1), Int32(1), Int32(8), Int32(8), Int32(8))
    return kernel, (*pointer_arguments(out_dtype), *sizes, extra, make_fake_stream())
