"""The `oneshot` kernel: split-K on tensor cores, with everything in flight at once.

A cluster owns a tile of the output and shares K. Each thread asks for all its weights straight
into registers before the wait on the kernel ahead, and for x in the same way after it: no pipeline,
no staging in shared memory. K is a sum, so its order is free: the 16 contiguous bytes that a lane
loads are fed to mma as if they were the fragment's scattered columns, by the same permutation for
weights and x.

Who may write to whose shared memory, and until when: the sums of the tile are divided among the
cluster's blocks. Every block sends each owner its partial sums with `st.async`, which counts the
bytes on the owner's mbarrier. A block writes to a peer only after the cluster barrier, at which
every block has initialised that mbarrier; and a block ends only after its own mbarrier has counted
all bytes that are addressed to it, after which nobody writes to it any more. A block that owns no
sums is written to by nobody. A block may end while its own stores are under way: `st.async` takes
its value from registers. There is no full cluster barrier on the way out: it would cost more than
the product.

Every addition has a fixed place (K within a warp, warps by number, blocks by rank), so results are
the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream

from ..backends.oneshot import BLOCK_ELEMENTS, OneshotConfig, check, geometry
from ..problem import VECTOR_ELEMENTS, DType, Epilogue
from .common import (
    VECTOR_BYTES,
    computed_here,
    epilogue_argument,
    epilogue_term,
    finished,
    launch_options,
    load_floats,
    load_weight,
    load_x,
    mma,
    peer_address,
    pointer_arguments,
    result_address,
    send_floats,
    split,
    store_element_at,
    sum_over_warps,
    sum_pairwise,
    wait_cluster,
)

__all__ = ["Oneshot", "check", "entry"]

WARP = 32


class Oneshot:
    """The kernel for one configuration; `__call__` is what the compiler traces."""

    def __init__(
        self, config: OneshotConfig, *, pdl: bool, epilogue: Epilogue = Epilogue.NONE
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
        """Block (rank, expert block, token block) adds its share of K, writes the sums it owns."""
        config = self.config
        S, W, V, R = config.split_k, config.warps, config.vectors, config.rounds
        XT = config.experts_tile
        threads = W * WARP
        warp_bytes = config.tokens * config.pitch * 4
        w_rows = XT // 8  # rows of weights that a lane loads
        x_rows = config.tokens // 8

        # 1. Prepare: request the weights of the first round before anything is waited for.
        thread, _, _ = cute.arch.thread_idx()
        rank, expert_block, token_block = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        lane = thread % WARP
        g = lane // 4  # row within 8
        t = lane % 4  # vector within a block of K
        expert0 = expert_block * XT
        token0 = token_block * config.tokens

        # (warps, tokens, experts)
        partial = cute.make_tensor(
            cute.arch.alloc_smem(Float32, W * config.tokens * config.pitch, alignment=16),
            cute.make_layout(
                (W, config.tokens, XT), stride=(config.tokens * config.pitch, config.pitch, 1)
            ),
        )
        if const_expr(self.pdl and config.release == "start"):
            cute.arch.griddepcontrol_launch_dependents()

        # Bytes from the start of a row to this lane's first vector; the others lie constants away.
        first_column = (rank * config.blocks + warp * V) * BLOCK_ELEMENTS + t * VECTOR_ELEMENTS
        first = Int64(first_column) * 2
        # Blocks of K by rank, round and warp. Where they do not fit K exactly, a lane checks.
        exact = config.hidden == R * W * V * S * BLOCK_ELEMENTS
        steps = []
        inside = []
        for r in cutlass.range_constexpr(R):
            for v in cutlass.range_constexpr(V):
                block = r * W * V + v
                steps.append(block * BLOCK_ELEMENTS * 2)
                if const_expr(exact):
                    inside.append(True)
                else:
                    ours = warp * V + block < config.blocks
                    column = first_column + block * BLOCK_ELEMENTS
                    inside.append(Boolean(ours & (column < config.hidden)))

        width = config.weight_bytes // 2  # of a weight, in elements of x
        w_bases = []
        for i in cutlass.range_constexpr(w_rows):
            # A row past the last expert reads that one again; its sums are not written.
            row = cutlass.min(expert0 + g + 8 * i, experts - 1)
            offset = Int64(row) * Int64(weight_row_stride) * 2 + first
            w_bases.append(weight.toint() + offset * width)
        w_next = self._load_weights(w_bases, steps, inside, 0)

        if const_expr(S > 1):
            # (blocks of the cluster, owned sums): what the peers send
            inbox = cute.arch.alloc_smem(Float32, S * config.owned, alignment=16)
            received = cute.arch.alloc_smem(Int64, 1, alignment=8)
            # Only sums of tokens that are there are sent.
            sent = cutlass.min(tokens - token0, config.tokens) * XT
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

        # Addresses of all that follows: behind the wait they would delay the sums.
        x_bases = []
        x_inside = []
        for i in cutlass.range_constexpr(x_rows):
            row = token0 + g + 8 * i
            x_inside.append(Boolean(row < tokens))
            x_bases.append(computed_here(x.toint() + Int64(row) * Int64(x_row_stride) * 2 + first))
        sources = []  # of the sums that this thread adds up over the warps
        targets = []  # where they go, in their owner's shared memory
        bells = []  # their owner's mbarrier
        inbox_places = []  # of the sums that this thread adds up over the blocks
        results = []  # where those go, in global memory
        terms = []  # what they are finished with
        if const_expr(S > 1):
            G = config.group
            for start in cutlass.range_constexpr(0, config.sums // G, threads):
                index = (thread + start) * G
                owner = index // config.owned
                slot = rank * config.owned + index % config.owned
                sources.append(computed_here(self._partial_address(partial, index)))
                targets.append(computed_here(peer_address(inbox.toint() + slot * 4, owner)))
                bells.append(computed_here(peer_address(received.toint(), owner)))
            for start in cutlass.range_constexpr(0, config.owned, threads):
                index = rank * config.owned + thread + start
                inbox_places.append(computed_here(inbox.toint() + (thread + start) * 4))
                expert = expert0 + index % XT
                results.append(result_address(out, token0 + index // XT, expert, experts))
                terms.append(epilogue_term(self.epilogue, extra, expert, experts))
            # Here and not before the sums are sent: beside the loads of weights it costs nothing.
            cute.arch.cluster_wait()
        else:
            for start in cutlass.range_constexpr(0, config.sums, threads):
                index = thread + start
                sources.append(computed_here(self._partial_address(partial, index)))
                expert = expert0 + index % XT
                results.append(result_address(out, token0 + index // XT, expert, experts))
                terms.append(epilogue_term(self.epilogue, extra, expert, experts))
        if const_expr(self.pdl):
            # Per thread: each thread of this block reads x.
            cute.arch.griddepcontrol_wait()
            if const_expr(config.release == "wait"):
                cute.arch.griddepcontrol_launch_dependents()

        # 2. Main loop: rows of x past the last token are zeros and read nothing.
        # Accumulators: (mma tiles, chains, 4). Two chains halve the wait of one mma for the last;
        # with three terms there is one for each, so that small sums are added before large ones.
        # experts are the 16 rows and tokens the 8 columns, or with 8 experts the other way round
        chains = max(2, config.terms)
        tiles = (x_rows + 1) // 2 if XT == 8 else x_rows * (XT // 16)
        sums = cute.make_rmem_tensor((tiles, chains, 4), Float32)
        sums.fill(0.0)
        zero = Uint32(0)
        for r in cutlass.range_constexpr(R):
            w = w_next
            xs = []
            for i in cutlass.range_constexpr(x_rows):
                for v in cutlass.range_constexpr(V):
                    n = r * V + v
                    valid = x_inside[i]
                    if const_expr(not exact):
                        valid = Boolean(valid & inside[n])
                    xs.append(load_x(x_bases[i] + steps[n], valid))
            w_next = []
            if const_expr(r + 1 < R):
                w_next = self._load_weights(w_bases, steps, inside, r + 1)
            for v in cutlass.range_constexpr(V):
                # (rows of weights, terms) of four words
                w_terms = [split(w[v * w_rows + i]) for i in range(w_rows)]
                for i in cutlass.range_constexpr(tiles):
                    for n in cutlass.range_constexpr(2 * config.terms):
                        term, h = n // 2, n % 2
                        chain = h if const_expr(config.terms == 1) else term
                        c = [sums[i, chain, j] for j in range(4)]
                        if const_expr(XT > 8):
                            row = i // x_rows * 2
                            a0, a1 = w_terms[row][term], w_terms[row + 1][term]
                            b = xs[i % x_rows * V + v]
                            d = mma(
                                (a0[2 * h], a1[2 * h], a0[2 * h + 1], a1[2 * h + 1]),
                                (b[2 * h], b[2 * h + 1]),
                                c,
                            )
                        else:
                            a0, b = xs[2 * i * V + v], w_terms[0][term]
                            if const_expr(2 * i + 1 < x_rows):
                                a1 = xs[(2 * i + 1) * V + v]
                                a = (a0[2 * h], a1[2 * h], a0[2 * h + 1], a1[2 * h + 1])
                            else:
                                a = (a0[2 * h], zero, a0[2 * h + 1], zero)
                            d = mma(a, (b[2 * h], b[2 * h + 1]), c)
                        for j in cutlass.range_constexpr(4):
                            sums[i, chain, j] = d[j]

        # 3. Epilogue: over the warps of the block, then over the blocks of the cluster.
        for i in cutlass.range_constexpr(tiles):
            for j in cutlass.range_constexpr(4):
                value = sums[i, chains - 1, j]
                for chain in cutlass.range_constexpr(chains - 2, -1, -1):
                    value = value + sums[i, chain, j]
                # Of mma's result: row g + 8 * (j // 2), column 2 * t + j % 2.
                if const_expr(XT > 8):
                    expert = i // x_rows * 16 + g + 8 * (j // 2)
                    partial[warp, i % x_rows * 8 + 2 * t + j % 2, expert] = value
                elif const_expr(16 * i + 8 * (j // 2) < config.tokens):
                    partial[warp, 16 * i + g + 8 * (j // 2), 2 * t + j % 2] = value
        cute.arch.sync_threads()

        if const_expr(S > 1):
            for n in cutlass.range_constexpr(len(sources)):
                if (thread + n * threads) * G < sent:
                    total = sum_over_warps(sources[n], G, warps=W, warp_bytes=warp_bytes)
                    send_floats(targets[n], total, bells[n])
            for n in cutlass.range_constexpr(len(results)):
                slot = thread + n * threads
                if slot < mine:
                    # Whether or not it stores a result: a block stays until it got everything.
                    wait_cluster(received, 0)
                    parts = []
                    for peer in cutlass.range_constexpr(S):
                        place = inbox_places[n] + peer * config.owned * 4
                        parts.append(load_floats(place, 1)[0])
                    value = finished(self.epilogue, sum_pairwise(parts), terms[n])
                    self._store(
                        out,
                        results[n],
                        rank * config.owned + slot,
                        value,
                        token0,
                        tokens,
                        expert0,
                        experts,
                    )
        else:
            for n in cutlass.range_constexpr(len(results)):
                index = thread + n * threads
                if index < config.sums:
                    total = sum_over_warps(sources[n], 1, warps=W, warp_bytes=warp_bytes)[0]
                    value = finished(self.epilogue, total, terms[n])
                    self._store(out, results[n], index, value, token0, tokens, expert0, experts)

    def _load_weights(
        self, bases: list[Int64], steps: list[int], inside: list[Any], r: int
    ) -> list[list[cute.Tensor]]:
        """Request a round's weights: for each vector and row, one or two times four words."""
        found = []
        width = self.config.weight_bytes // 2
        for v in range(self.config.vectors):
            n = r * self.config.vectors + v
            for base in bases:
                address = base + steps[n] * width
                halves = range(0, VECTOR_BYTES * width, VECTOR_BYTES)
                found.append([load_weight(address + half, inside[n]) for half in halves])
        return found

    def _partial_address(self, partial: cute.Tensor, index: Int32) -> Int32:
        """Where the first warp keeps a sum of the tile; every other warp does so equally far on."""
        XT = self.config.experts_tile
        offset = index // XT * self.config.pitch + index % XT
        address: Int32 = partial.iterator.toint() + offset * 4
        return address

    @cute.jit
    def _store(
        self,
        out: cute.Pointer,
        address: Int64,
        index: Int32,
        value: Float32,
        token0: Int32,
        tokens: Int32,
        expert0: Int32,
        experts: Int32,
    ) -> None:
        """Write one sum of the tile, where the tile lies within the output."""
        token = token0 + index // self.config.experts_tile
        expert = expert0 + index % self.config.experts_tile
        if (token < tokens) & (expert < experts):
            store_element_at(out, address, value)


def entry(
    config: OneshotConfig, *, out_dtype: DType, pdl: bool, epilogue: Epilogue = Epilogue.NONE
) -> tuple[Any, tuple[Any, ...]]:
    """The function to compile and the placeholder arguments to compile it for."""
    kernel = Oneshot(config, pdl=pdl, epilogue=epilogue)
    extra = epilogue_argument(epilogue)
    sizes = (Int32(1), Int32(1), Int32(config.hidden), Int32(config.hidden))
    return kernel, (*pointer_arguments(out_dtype), *sizes, extra, make_fake_stream())
