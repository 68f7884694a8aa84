"""The `fp32` kernel: fp32 weights, x in bf16 or fp32, on FMA units, all weights in flight at once.

A cluster owns all tokens of a tile of experts and shares K. Each thread asks for all its weights
straight into registers before the wait on the kernel ahead. After it, each warp brings the part of
x that meets its weights into shared memory of its own, as fp32 and for up to eight tokens in a
pass, while the next pass is on its way; no two warps need the same element, so none waits for
another.

Lanes of a warp hold different parts of K, and their sums are added by exchanges that halve what
each holds. So that a lane always keeps the first half of its sums and sends the second, the sum in
place i of a lane is that of token i ^ lane (of the tokens of a pass): nothing is selected, at the
price of eight addresses in shared memory.

Who may write to whose shared memory, and until when: the sums of the tile are divided among the
cluster's blocks. Every block sends each owner its partial sums with `st.async`, which counts the
bytes on the owner's mbarrier. A block writes to a peer only after the cluster barrier, at which
every block has initialised that mbarrier; and a block ends only after its own mbarrier has counted
all bytes that are addressed to it, after which nobody writes to it any more. A block that owns no
sums is written to by nobody. A block may end while its own stores are under way: `st.async` takes
its value from registers.

Every addition has a fixed place (K within a lane, lanes by halves, rounds, warps by number, blocks
by rank), so results are the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream

from ..backends.fp32 import WEIGHT_ELEMENTS, Fp32Config, check, geometry
from ..problem import DType, Epilogue
from .common import (
    VECTOR_BYTES,
    epilogue_argument,
    launch_options,
    load_weight,
    load_x,
    pointer_arguments,
    store_sum,
    wait_cluster,
)

__all__ = ["Fp32", "check", "entry"]

WARP = 32


@cute.jit
def _store4(shared: cute.Pointer, offset: Int32, values: cute.Tensor) -> None:
    """Write four floats at a multiple of four floats."""
    target = cute.make_tensor((shared + offset).align(VECTOR_BYTES), cute.make_layout((4,)))
    cute.autovec_copy(values, target)


class Fp32:
    """The kernel for one configuration; `__call__` is what the compiler traces."""

    def __init__(
        self, config: Fp32Config, *, x_dtype: DType, pdl: bool, epilogue: Epilogue
    ) -> None:
        check(config)
        self.config = config
        self.x_dtype = x_dtype
        self.pdl = pdl
        self.epilogue = epilogue
        self.x_elements = VECTOR_BYTES // x_dtype.size_bytes
        # 128-bit vectors of a token's part of x, and of a pass, divided among a warp's lanes
        self.row_vectors = config.slice // self.x_elements
        self.pass_vectors = config.tokens_tile * self.row_vectors
        self.lane_vectors = -(-self.pass_vectors // WARP)

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
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,  # [M, K] bf16 or fp32
        weight: cute.Pointer,  # [N, K] fp32
        out: cute.Pointer,  # [M, N]
        tokens: Int32,
        experts: Int32,
        x_row_stride: Int32,
        weight_row_stride: Int32,
        extra: Any,  # bias [N], scale, or None
    ) -> None:
        """Block (rank, expert block, 0) adds its share of K, writes the sums it owns."""
        config = self.config
        S, W, R = config.split_k, config.warps, config.rounds
        XT = config.experts_tile

        # 1. Prepare: request the weights of the first round before anything is waited for.
        thread, _, _ = cute.arch.thread_idx()
        rank, expert_block, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        lane = thread % WARP
        expert0 = expert_block * XT

        # (warps, tokens, experts)
        partial = cute.make_tensor(
            cute.arch.alloc_smem(Float32, W * config.tokens * config.pitch, alignment=16),
            cute.make_layout(
                (W, config.tokens, XT), stride=(config.tokens * config.pitch, config.pitch, 1)
            ),
        )
        # (tokens of a pass, elements of K), of this warp alone
        shared_x = cute.arch.get_dyn_smem(Float32, VECTOR_BYTES) + warp * (
            config.tokens_tile * config.slice
        )
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()

        slice0 = rank * (R * W) + warp  # the warp's part of K in the first round
        w = self._load_weights(weight, weight_row_stride, expert0, experts, slice0, lane)

        if const_expr(S > 1):
            # (blocks of the cluster, owned sums): what the peers send
            inbox = cute.make_tensor(
                cute.arch.alloc_smem(Float32, S * config.owned, alignment=16),
                cute.make_layout((S, config.owned), stride=(config.owned, 1)),
            )
            received = cute.arch.alloc_smem(Int64, 1, alignment=8)
            # Only sums of tokens that are there are sent.
            sent = cutlass.min(tokens, config.tokens) * XT
            mine = cutlass.max(cutlass.min(sent - rank * config.owned, config.owned), 0)
            if thread == 0:
                cute.arch.mbarrier_init(received, 1)
                cute.arch.mbarrier_init_fence()
            # For racecheck of compute-sanitizer, which takes the two for different lanes' accesses.
            cute.arch.sync_warp()
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(received, mine * (S * 4))
            # Relaxed: the fence has released the initialisation already, and a releasing arrive
            # costs a full memory barrier.
            cute.arch.cluster_arrive_relaxed(aligned=False)
        if const_expr(self.pdl):
            # Per thread: each thread of this block reads x.
            cute.arch.griddepcontrol_wait()

        # 2. Main loop: rounds over K, in each of them passes over the tokens.
        self._multiply(x, x_row_stride, tokens, shared_x, partial, w, slice0, warp, lane, True)
        if const_expr(R > 1):
            for r in cutlass.range(1, R, unroll=1):
                later = slice0 + r * W
                v = self._load_weights(weight, weight_row_stride, expert0, experts, later, lane)
                self._multiply(
                    x, x_row_stride, tokens, shared_x, partial, v, later, warp, lane, False
                )
        cute.arch.sync_threads()

        # 3. Epilogue: over the warps of the block, then over the blocks of the cluster.
        if const_expr(S > 1):
            cute.arch.cluster_wait()
            G = config.group
            for start in cutlass.range_constexpr(0, config.sums // G, W * WARP):
                index = (thread + start) * G
                if index < sent:
                    total = self._sum_over_warps(partial, index)
                    slot = rank * config.owned + index % config.owned
                    words = tuple(total[j].bitcast(Int32) for j in range(G))
                    cute.arch.store_async_dsmem(
                        (inbox.iterator + slot).align(4 * G),
                        words if G > 1 else words[0],
                        received,
                        index // config.owned,
                    )
            for start in cutlass.range_constexpr(0, config.owned, W * WARP):
                slot = thread + start
                if slot < mine:
                    wait_cluster(received, 0)
                    value = Float32(0.0)
                    for peer in cutlass.range_constexpr(S):
                        value = value + inbox[peer, slot]
                    index = rank * config.owned + slot
                    store_sum(
                        self.epilogue,
                        out,
                        extra,
                        index // XT,
                        expert0 + index % XT,
                        value,
                        tokens,
                        experts,
                    )
        else:
            for start in cutlass.range_constexpr(0, config.sums, W * WARP):
                index = thread + start
                if index < config.sums:
                    value = Float32(0.0)
                    for j in cutlass.range_constexpr(W):
                        value = value + partial[j, index // XT, index % XT]
                    store_sum(
                        self.epilogue,
                        out,
                        extra,
                        index // XT,
                        expert0 + index % XT,
                        value,
                        tokens,
                        experts,
                    )

    @cute.jit
    def _load_weights(
        self,
        weight: cute.Pointer,
        row_stride: Int32,
        expert0: Int32,
        experts: Int32,
        part: Int32,
        lane: Int32,
    ) -> cute.Tensor:
        """A lane's weights of one part of K: (vectors, experts, 4) words; zeros past K."""
        config = self.config
        E, V, L = config.experts_per_thread, config.vectors, config.lanes
        words = cute.make_rmem_tensor((V, E, 4), Uint32)
        bases = []
        for e in cutlass.range_constexpr(E):
            # A row past the last expert reads that one again; its sums are not written.
            row = cutlass.min(expert0 + lane // L * E + e, experts - 1)
            bases.append(weight.toint() + Int64(row) * Int64(row_stride) * 4)
        for v in cutlass.range_constexpr(V):
            column = part * config.slice + (v * L + lane % L) * WEIGHT_ELEMENTS
            valid = True if config.exact else Boolean(column < config.hidden)
            for e in cutlass.range_constexpr(E):
                loaded = load_weight(bases[e] + Int64(column) * 4, valid)
                for i in cutlass.range_constexpr(4):
                    words[v, e, i] = loaded[i]
        return words

    @cute.jit
    def _multiply(
        self,
        x: cute.Pointer,
        x_row_stride: Int32,
        tokens: Int32,
        shared_x: cute.Pointer,
        partial: cute.Tensor,
        w: cute.Tensor,
        part: Int32,
        warp: Int32,
        lane: Int32,
        first: cutlass.Constexpr[bool],
    ) -> None:
        """Add the products of one part of K to this warp's sums, or begin them in the `first`."""
        config = self.config
        coming = cute.make_rmem_tensor((self.lane_vectors, 4), Uint32)
        self._load_pass(x, x_row_stride, tokens, part, Int32(0), lane, coming)
        if const_expr(config.passes == 1):
            self._put_pass(shared_x, lane, coming)
            cute.arch.sync_warp()
            self._add_pass(shared_x, partial, w, Int32(0), warp, lane, first)
            if const_expr(config.rounds > 1):
                # The next round's x takes the place of this one's.
                cute.arch.sync_warp()
        else:
            for p in cutlass.range(config.passes, unroll=1):
                self._put_pass(shared_x, lane, coming)
                cute.arch.sync_warp()
                # Past the last pass there are no tokens, and nothing is read.
                self._load_pass(x, x_row_stride, tokens, part, p + 1, lane, coming)
                self._add_pass(shared_x, partial, w, p, warp, lane, first)
                cute.arch.sync_warp()

    @cute.jit
    def _load_pass(
        self,
        x: cute.Pointer,
        row_stride: Int32,
        tokens: Int32,
        part: Int32,
        number: Int32,
        lane: Int32,
        words: cute.Tensor,
    ) -> None:
        """Request a lane's vectors of a pass: (vectors of a lane, 4) words; zeros past M and K."""
        config = self.config
        for j in cutlass.range_constexpr(self.lane_vectors):
            index = lane + j * WARP
            row = index // self.row_vectors
            column = part * config.slice + index % self.row_vectors * self.x_elements
            token = number * config.tokens_tile + row
            valid = Boolean(token < tokens)
            if const_expr(not config.exact):
                valid = Boolean(valid & (column < config.hidden))
            if const_expr((j + 1) * WARP > self.pass_vectors):
                valid = Boolean(valid & (row < config.tokens_tile))
            offset = Int64(token) * Int64(row_stride) + Int64(column)
            loaded = load_x(x.toint() + offset * self.x_dtype.size_bytes, valid)
            for i in cutlass.range_constexpr(4):
                words[j, i] = loaded[i]

    @cute.jit
    def _put_pass(self, shared_x: cute.Pointer, lane: Int32, words: cute.Tensor) -> None:
        """Write a lane's vectors of a pass to shared memory, bf16 widened to fp32."""
        config = self.config
        values = cute.make_rmem_tensor((4,), Float32)
        for j in cutlass.range_constexpr(self.lane_vectors):
            index = lane + j * WARP
            row = index // self.row_vectors
            vector = index % self.row_vectors
            if const_expr((j + 1) * WARP <= self.pass_vectors) or row < config.tokens_tile:
                if const_expr(self.x_dtype is DType.FP32):
                    for i in cutlass.range_constexpr(4):
                        values[i] = words[j, i].bitcast(Float32)
                    _store4(shared_x, row * config.slice + vector * 4, values)
                else:
                    # Quads 2n and 2n + 1 of a row. Of every second eight the neighbours change
                    # places, so that the even quads of sixteen lie in eight different banks.
                    turn = vector // 4 % 2
                    for h in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(2):
                            word = words[j, 2 * h + i]
                            values[2 * i] = (word << Uint32(16)).bitcast(Float32)
                            values[2 * i + 1] = (word & Uint32(0xFFFF0000)).bitcast(Float32)
                        quad = (2 * vector + h) ^ turn
                        _store4(shared_x, row * config.slice + quad * 4, values)

    @cute.jit
    def _add_pass(
        self,
        shared_x: cute.Pointer,
        partial: cute.Tensor,
        w: cute.Tensor,
        number: Int32,
        warp: Int32,
        lane: Int32,
        first: cutlass.Constexpr[bool],
    ) -> None:
        """Multiply the pass in shared memory with a lane's weights, and add over the lanes."""
        config = self.config
        E, V, T, L = config.experts_per_thread, config.vectors, config.tokens_tile, config.lanes
        k = lane % L

        # Place i of a lane is token i ^ (k % T). The quad of vector v is v * L + k, turned as it
        # was written: by bit 3, which is a bit of v where eight lanes share K, else one of k.
        rows = []
        for i in cutlass.range_constexpr(T):
            rows.append((Int32(i) ^ (k % T)) * config.slice)
        turned = self.x_dtype is DType.BF16
        places = [k, k]
        if const_expr(turned and L == 8):
            places = [k, k ^ 1]
        elif const_expr(turned):
            places = [k ^ (k // 8 % 2)] * 2

        sums = []  # E * T, expert-major
        for _i in cutlass.range_constexpr(E * T):
            sums.append(Float32(0.0))
        values = cute.make_rmem_tensor((4,), Float32)
        for v in cutlass.range_constexpr(V):
            for i in cutlass.range_constexpr(T):
                offset = rows[i] + places[v % 2] * 4 + v * L * 4
                source = cute.make_tensor(
                    (shared_x + offset).align(VECTOR_BYTES), cute.make_layout((4,))
                )
                cute.autovec_copy(source, values)
                for j in cutlass.range_constexpr(4):
                    for e in cutlass.range_constexpr(E):
                        sums[e * T + i] = w[v, e, j].bitcast(Float32) * values[j] + sums[e * T + i]

        # Over the lanes, nearest last: first by halves of the tokens, then of the experts, and
        # where one sum is left, all to all. `held` is the first expert whose sums are left here.
        experts = E
        places_left = T
        held = Int32(0)
        offset = 1
        for _level in cutlass.range_constexpr(T.bit_length() - 1):
            half = places_left // 2
            for e in cutlass.range_constexpr(E):
                for i in cutlass.range_constexpr(half):
                    other = cute.arch.shuffle_sync_bfly(sums[e * T + i + half], offset=half)
                    sums[e * T + i] = sums[e * T + i] + other
            places_left = half
        totals = []
        for e in cutlass.range_constexpr(E):
            totals.append(sums[e * T])
        alike = 0  # bits of k whose lanes end with the same sums
        for level in cutlass.range_constexpr(T.bit_length() - 1, L.bit_length() - 1):
            offset = 1 << level
            if const_expr(experts > 1):
                experts = experts // 2
                upper = (k & offset) != 0
                held = held + experts if upper else held
                for e in cutlass.range_constexpr(experts):
                    kept = totals[e + experts] if upper else totals[e]
                    given = totals[e] if upper else totals[e + experts]
                    totals[e] = kept + cute.arch.shuffle_sync_bfly(given, offset=offset)
            else:
                alike = alike | offset
                totals[0] = totals[0] + cute.arch.shuffle_sync_bfly(totals[0], offset=offset)

        if const_expr(alike == 0) or (k & alike) == 0:
            token = number * T + k % T
            place = (warp * config.tokens + token) * config.pitch + lane // L * E + held
            kept_sums = cute.make_rmem_tensor((experts,), Float32)
            target = cute.make_tensor(
                (partial.iterator + place).align(min(4 * experts, VECTOR_BYTES)),
                cute.make_layout((experts,)),
            )
            if const_expr(not first):
                cute.autovec_copy(target, kept_sums)
                for e in cutlass.range_constexpr(experts):
                    kept_sums[e] = kept_sums[e] + totals[e]
            else:
                for e in cutlass.range_constexpr(experts):
                    kept_sums[e] = totals[e]
            cute.autovec_copy(kept_sums, target)

    @cute.jit
    def _sum_over_warps(self, partial: cute.Tensor, index: Int32) -> cute.Tensor:
        """A group of neighbouring sums of the tile, each over all warps, by one read a warp."""
        config = self.config
        XT, G = config.experts_tile, config.group
        total = cute.make_rmem_tensor((G,), Float32)
        total.fill(0.0)
        part = cute.make_rmem_tensor((G,), Float32)
        for j in cutlass.range_constexpr(config.warps):
            offset = (j * config.tokens + index // XT) * config.pitch + index % XT
            source = cute.make_tensor(
                (partial.iterator + offset).align(4 * G), cute.make_layout((G,))
            )
            cute.autovec_copy(source, part)
            for i in cutlass.range_constexpr(G):
                total[i] = total[i] + part[i]
        return total


def entry(
    config: Fp32Config,
    *,
    out_dtype: DType,
    pdl: bool,
    x_dtype: DType,
    epilogue: Epilogue = Epilogue.NONE,
) -> tuple[Any, tuple[Any, ...]]:
    """The function to compile and the placeholder arguments to compile it for."""
    kernel = Fp32(config, x_dtype=x_dtype, pdl=pdl, epilogue=epilogue)
    extra = epilogue_argument(epilogue)
    pointers = pointer_arguments(out_dtype, x_dtype=x_dtype, weight_dtype=DType.FP32)
    sizes = (Int32(1), Int32(1), Int32(config.hidden), Int32(config.hidden))
    return kernel, (*pointers, *sizes, extra, make_fake_stream())
