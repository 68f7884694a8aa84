"""Pieces that every kernel family is built from: global loads, the product step, the write-out.

All are traced by CuTe DSL (nvidia-cutlass-dsl 4.8). PTX is written out where the DSL has no name
for an instruction, or no way to state its cache hints; operands are outputs or inputs only, because
`inline_ptx` of 4.8.1 numbers operands wrongly where one is both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx
from cutlass.cute.runtime import make_ptr

from ..launch import Extent, LaunchGeometry
from ..problem import ALIGNMENT_BYTES, DType, Epilogue

__all__ = [
    "ELEMENT_TYPES",
    "VECTOR_BYTES",
    "computed_here",
    "epilogue_argument",
    "epilogue_term",
    "finished",
    "launch_options",
    "load_floats",
    "load_weight",
    "load_x",
    "mma",
    "peer_address",
    "pointer_arguments",
    "result_address",
    "send_floats",
    "split",
    "store_element",
    "store_element_at",
    "store_sum",
    "sum_over_warps",
    "sum_pairwise",
    "upper_halves",
    "wait_cluster",
]

VECTOR_BYTES = 16
"""Bytes of one 128-bit access, the widest that rows aligned to 16 bytes allow."""

ELEMENT_TYPES: dict[DType, Any] = {
    DType.BF16: BFloat16,
    DType.FP16: Float16,
    DType.FP32: Float32,
}
"""CuTe DSL's type for each element type."""

# Weights are read once by one block: they need no place in L1, and the next lines are wanted too.
# Not `.nc`: ptxas (12.9) moves non-coherent loads past griddepcontrol.wait to save registers, and
# the head start on the kernel ahead is lost.
_LOAD_WEIGHT = "ld.global.L1::no_allocate.L2::128B.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];"

# x is written by the kernel ahead: never through the non-coherent path, which may hold older bytes.
_LOAD_X = "ld.global.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];"

_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0},{$w1},{$w2},{$w3}}, "
    "{{$r0},{$r1},{$r2},{$r3}}, {{$r4},{$r5}}, {{$r6},{$r7},{$r8},{$r9}};"
)

_UPPER_HALVES = "prmt.b32 {$w0}, {$r0}, {$r1}, 0x7632;"

# From registers to a peer's shared memory; the peer's mbarrier counts the bytes.
_SEND = (
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{kind} "
    "[{{$r0}}], {words}, [{{$r1}}];"
)

# Acquires at cluster scope: what is waited for was written by other blocks.
_WAIT_CLUSTER = (
    "{{\n.reg .pred done;\nagain:\n"
    "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1};\n"
    "@!done bra again;\n}}"
)


@cute.jit
def load_weight(address: Int64, valid: Any) -> cute.Tensor:
    """Eight bf16 of a weight row as four 32-bit words; zeros, and no access, where not `valid`.

    `valid` is a Python bool, or a run-time Boolean where only the kernel can know.
    """
    words = cute.make_rmem_tensor((4,), Uint32)
    if cutlass.const_expr(valid is not True):
        words.fill(0)
    if valid:
        loaded = inline_ptx(_LOAD_WEIGHT, write_only_types=[Uint32] * 4, read_only_args=[address])
        for i in cutlass.range_constexpr(4):
            words[i] = loaded[i]
    return words


@cute.jit
def load_x(address: Int64, valid: Any) -> cute.Tensor:
    """Eight bf16 of a row of x, as `load_weight`; only after the wait on the kernel ahead."""
    words = cute.make_rmem_tensor((4,), Uint32)
    if cutlass.const_expr(valid is not True):
        words.fill(0)
    if valid:
        loaded = inline_ptx(_LOAD_X, write_only_types=[Uint32] * 4, read_only_args=[address])
        for i in cutlass.range_constexpr(4):
            words[i] = loaded[i]
    return words


def upper_halves(a: Uint32, b: Uint32) -> Uint32:
    """Two fp32 cut to bf16, as one word with the first in its lower half."""
    found: Uint32 = inline_ptx(_UPPER_HALVES, write_only_types=[Uint32], read_only_args=[a, b])
    return found


def split(weights: Sequence[Any]) -> list[Sequence[Any]]:
    """Eight weights as terms of bf16, the largest first, each four words of two.

    bf16 weights, in one vector, are their own only term. fp32 weights, in two vectors, are cut into
    three: the 24 bits of an fp32 significand are 8 and 8 and 8 of bf16's, so that cutting off, not
    rounding, leaves no remainder. A weight below 2^-110 in magnitude may lose its last bits.
    """
    if len(weights) == 1:
        return [weights[0]]
    words = [weights[i // 4][i % 4] for i in range(8)]
    terms: list[Sequence[Any]] = []
    for _ in range(3):
        terms.append([upper_halves(words[i], words[i + 1]) for i in range(0, 8, 2)])
        heads = [(word & Uint32(0xFFFF0000)).bitcast(Float32) for word in words]
        words = [
            (w.bitcast(Float32) - head).bitcast(Uint32)
            for w, head in zip(words, heads, strict=True)
        ]
    return terms


def mma(a: Any, b: Any, c: Any) -> Any:
    """One mma.m16n8k16 of bf16 with fp32 sums: four words of A, two of B, four sums in and out."""
    return inline_ptx(_MMA, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *c])


def computed_here(value: Any) -> Any:
    """The value of a 32 or 64-bit integer, computed at this place in the program and not later.

    For addresses that are needed behind a wait: the compiler computes what it can where it is used,
    and a dozen instructions there, each waiting for the last, cost as much as an exchange between
    blocks. It moves nothing past this, nor past the wait.
    """
    if isinstance(value, Int64):
        return inline_ptx("mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[value])
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def load_floats(address: Int32, count: int) -> list[Float32]:
    """One, two or four neighbouring fp32 of shared memory, by one load."""
    if count == 1:
        text = "ld.shared.f32 {$w0}, [{$r0}];"
        one: Float32 = inline_ptx(text, write_only_types=[Float32], read_only_args=[address])
        return [one]
    words = ",".join(f"{{$w{i}}}" for i in range(count))
    text = f"ld.shared.v{count}.f32 {{{words}}}, [{{$r0}}];"
    return list(inline_ptx(text, write_only_types=[Float32] * count, read_only_args=[address]))


def sum_pairwise(values: Sequence[Float32]) -> Float32:
    """The sum by pairs, then pairs of pairs: each addition has its place, few wait for others."""
    terms = list(values)
    while len(terms) > 1:
        pairs = range(0, len(terms) - 1, 2)
        terms = [terms[i] + terms[i + 1] for i in pairs] + terms[len(terms) // 2 * 2 :]
    return terms[0]


def sum_over_warps(source: Int32, count: int, *, warps: int, warp_bytes: int) -> list[Float32]:
    """Neighbouring sums, each over all warps of a block, by one read a warp.

    `source` is where the first warp keeps them; every other warp does so `warp_bytes` further on.
    """
    parts = [load_floats(source + warp * warp_bytes, count) for warp in range(warps)]
    return [sum_pairwise([part[i] for part in parts]) for i in range(count)]


def result_address(out: cute.Pointer, token: Int32, expert: Int32, experts: Int32) -> Int64:
    """Where an element of the output [M, N] lies, if it lies within; computed here, not later."""
    element = Int64(token) * Int64(experts) + Int64(expert)
    address: Int64 = computed_here(out.toint() + element * (out.dtype.width // 8))
    return address


def peer_address(address: Int32, rank: Int32) -> Int32:
    """The same place in the shared memory of another block of the cluster."""
    text = "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};"
    found: Int32 = inline_ptx(text, write_only_types=[Int32], read_only_args=[address, rank])
    return found


def send_floats(address: Int32, values: Sequence[Float32], mbarrier: Int32) -> None:
    """Write one, two or four fp32 to a peer, asynchronously; both addresses are the peer's."""
    count = len(values)
    words = ", ".join(f"{{$r{i + 2}}}" for i in range(count))
    text = _SEND.format(
        kind="b32" if count == 1 else f"v{count}.b32",
        words=words if count == 1 else f"{{{words}}}",
    )
    inline_ptx(text, read_only_args=[address, mbarrier, *(v.bitcast(Int32) for v in values)])


def wait_cluster(mbarrier: cute.Pointer, parity: int) -> None:
    """Wait for a phase of an mbarrier that the whole cluster writes to."""
    inline_ptx(_WAIT_CLUSTER, read_only_args=[mbarrier.toint(), Int32(parity)])


@cute.jit
def store_element(out: cute.Pointer, index: Int64, value: Float32) -> None:
    """Round one fp32 sum to the output's type (to nearest even) and write it."""
    store_element_at(out, out.toint() + index * (out.dtype.width // 8), value)


@cute.jit
def store_element_at(out: cute.Pointer, address: Int64, value: Float32) -> None:
    """As `store_element`, at an address that was computed before."""
    dtype = out.dtype
    place = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    cute.make_tensor(place, cute.make_layout((1,)))[0] = value.to(dtype)


@cute.jit
def _load_element(pointer: cute.Pointer, index: Int32) -> Float32:
    place = cute.make_tensor(pointer + index, cute.make_layout((1,)))
    return place[0].to(Float32)


def epilogue_term(epilogue: Epilogue, extra: Any, expert: Int32, experts: Int32) -> Any:
    """What the sum of an expert is finished with: its bias, the scale, or nothing.

    A bias is a weight: it may be read before the wait on the kernel ahead, and is, so that it costs
    no time. Past the last expert that one's is read; the sum is not written.
    """
    if epilogue.bias_dtype is not None:
        return _load_element(extra, cutlass.min(expert, experts - 1))
    return extra


def finished(epilogue: Epilogue, value: Float32, term: Any) -> Float32:
    """A sum with its epilogue."""
    if epilogue is Epilogue.NONE:
        return value
    return value * term if epilogue is Epilogue.SCALE else value + term


@cute.jit
def store_sum(
    epilogue: cutlass.Constexpr,
    out: cute.Pointer,
    extra: Any,
    token: Int32,
    expert: Int32,
    value: Float32,
    tokens: Int32,
    experts: Int32,
) -> None:
    """Finish one sum, round it and write it, where it lies within the output [M, N]."""
    if (token < tokens) & (expert < experts):
        term = epilogue_term(epilogue, extra, expert, experts)
        total = finished(epilogue, value, term)
        store_element(out, Int64(token) * Int64(experts) + Int64(expert), total)


def epilogue_argument(epilogue: Epilogue) -> Any:
    """Placeholder for what a kernel takes for its epilogue; None where it takes nothing."""
    dtype = epilogue.bias_dtype
    if dtype is not None:
        element = ELEMENT_TYPES[dtype]
        align = element.width // 8
        return make_ptr(element, ALIGNMENT_BYTES, cute.AddressSpace.gmem, assumed_align=align)
    return Float32(1.0) if epilogue is Epilogue.SCALE else None


def pointer_arguments(
    out_dtype: DType, *, x_dtype: DType = DType.BF16, weight_dtype: DType = DType.BF16
) -> tuple[cute.Pointer, cute.Pointer, cute.Pointer]:
    """Placeholders for x, weight and out, from which a kernel is compiled without any tensor."""
    space = cute.AddressSpace.gmem
    x, weight, out = (ELEMENT_TYPES[dtype] for dtype in (x_dtype, weight_dtype, out_dtype))
    return (
        make_ptr(x, ALIGNMENT_BYTES, space, assumed_align=ALIGNMENT_BYTES),
        make_ptr(weight, ALIGNMENT_BYTES, space, assumed_align=ALIGNMENT_BYTES),
        make_ptr(out, ALIGNMENT_BYTES, space, assumed_align=out.width // 8),
    )


def launch_options(
    launch: LaunchGeometry, tokens: Int32, experts: Int32, *, stream: Any, pdl: bool
) -> dict[str, Any]:
    """What a kernel is launched with, by its family's geometry: the rule of the launch record."""
    extents = {Extent.TOKENS: tokens, Extent.EXPERTS: experts}
    grid: list[Any] = []
    for dim in launch.grid:
        blocks = dim.blocks
        if dim.extent is not Extent.ONE:
            blocks = cute.ceil_div(extents[dim.extent], dim.tile) * blocks
        grid.append(blocks)
    return {
        "grid": grid,
        "block": list(launch.block),
        "cluster": None if launch.cluster == (1, 1, 1) else list(launch.cluster),
        "smem": launch.dynamic_shared_bytes or None,
        "stream": stream,
        "use_pdl": pdl,
    }
