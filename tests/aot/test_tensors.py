"""Checks of a call's tensors: each property that a kernel relies on, each with its own words."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch
from llbf16_aot.tensors import check_operands, check_out

BF16 = torch.bfloat16


def matrix(rows: int, hidden: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros((rows, hidden), dtype=dtype)


def aligned(count: int) -> torch.Tensor:
    """`count` bf16 elements whose address is a multiple of 64."""
    room = torch.zeros(count + 32, dtype=BF16)
    return room[(-room.data_ptr() % 64) // 2 :][:count]


def wide() -> torch.Tensor:
    """A view of rows 2^31 elements apart, in address space that takes no memory."""
    unreserved = 0x4000  # MAP_NORESERVE, which the module names since Python 3.11
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved
    room = torch.frombuffer(mmap.mmap(-1, 2**32 + 128, flags=flags), dtype=BF16)
    return room.as_strided((2, 64), (2**31, 1))


GOOD = matrix(3, 64), matrix(5, 64)

BAD: list[tuple[str, object, object, type[Exception], str]] = [
    ("x is no tensor", [[1.0]], GOOD[1], TypeError, "x is list, must be a torch.Tensor"),
    ("weight is None", GOOD[0], None, TypeError, "weight is NoneType, must be a torch.Tensor"),
    ("x is fp32", matrix(3, 64, torch.float32), GOOD[1], TypeError, "x has dtype torch.float32"),
    ("x is fp16", matrix(3, 64, torch.float16), GOOD[1], TypeError, "x has dtype torch.float16"),
    ("weight fp16", GOOD[0], matrix(5, 64, torch.float16), TypeError, "weight has dtype torch.fl"),
    ("x is 1-D", matrix(3, 64)[0], GOOD[1], ValueError, r"x has shape \(64,\), must have 2 dim"),
    ("weight 3-D", GOOD[0], GOOD[1][None], ValueError, r"weight has shape \(1, 5, 64\), must have"),
    ("x sparse", matrix(3, 64).to_sparse(), GOOD[1], TypeError, "x has layout torch.sparse_coo"),
    ("x meta", torch.empty(3, 64, dtype=BF16, device="meta"), GOOD[1], ValueError, "x is on meta"),
    (
        "weight elsewhere",
        GOOD[0],
        torch.empty(5, 64, dtype=BF16, device="meta"),
        ValueError,
        "weight is on meta, x is on cpu: must be one device",
    ),
    ("K differs", GOOD[0], matrix(5, 72), ValueError, r"x has K = 64 \(.*weight has K = 72"),
    ("K % 8", matrix(3, 60), matrix(5, 60), ValueError, "K = 60, must be a multiple of 8"),
    ("K below 8", matrix(3, 4), matrix(5, 4), ValueError, "K = 4, must be a multiple of 8"),
    (
        "x transposed",
        matrix(64, 3).t(),
        GOOD[1],
        ValueError,
        r"x has strides \(1, 3\), the elements of a row must be contiguous: pass x.contiguous\(\)",
    ),
    ("weight every 2nd", GOOD[0], matrix(5, 128)[:, ::2], ValueError, r"weight has strides \(128,"),
    ("one row, stride", matrix(64, 2).t()[:1], GOOD[1], ValueError, r"x has strides \(1, 2\)"),
    ("x shifted", aligned(200)[1:193].view(3, 64), GOOD[1], ValueError, "x starts at address 0x"),
    ("x 8 bytes", aligned(200)[4:196].view(3, 64), GOOD[1], ValueError, "multiple of 16: kernels"),
    ("weight shifted", GOOD[0], aligned(400)[1:321].view(5, 64), ValueError, "weight starts at"),
    ("x odd stride", matrix(3, 68)[:, :64], GOOD[1], ValueError, "x has row stride 68, must be a"),
    ("weight stride", GOOD[0], matrix(5, 65)[:, :64], ValueError, "weight has row stride 65, must"),
    ("x expanded", matrix(1, 64).expand(3, 64), GOOD[1], ValueError, "x has row stride 0, less"),
    (
        "x rows overlap",
        aligned(200).as_strided((3, 64), (8, 1)),
        GOOD[1],
        ValueError,
        "x has row stride 8, less than K = 64: rows must not overlap",
    ),
    ("x negated", torch._neg_view(matrix(3, 64)), GOOD[1], ValueError, "x is a lazily negated"),
    ("x grad", matrix(3, 64).requires_grad_(), GOOD[1], TypeError, "x requires grad, and the ke"),
    ("weight grad", GOOD[0], torch.nn.Parameter(matrix(5, 64)), TypeError, "weight requires grad"),
]


@pytest.mark.parametrize(
    ("x", "weight", "error", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_inputs_that_a_kernel_could_not_take_are_refused_by_name_and_value(
    x: torch.Tensor, weight: torch.Tensor, error: type[Exception], message: str
) -> None:
    """Each would be a wrong answer, a misaligned load or a read out of bounds on the GPU."""
    with pytest.raises(error, match=message):
        check_operands(x, weight, "cpu")


def test_a_row_stride_above_32_bits_is_refused() -> None:
    """Kernels take strides as 32-bit integers: a larger one would wrap around."""
    with pytest.raises(ValueError, match="x has row stride 2147483648, must be at most 2147483647"):
        check_operands(wide(), GOOD[1], "cpu")


def test_tensors_of_another_device_type_are_refused() -> None:
    """A CPU address handed to a GPU kernel is an illegal access that poisons the whole process."""
    with pytest.raises(ValueError, match="x is on cpu, must be on a cuda device"):
        check_operands(*GOOD, "cuda")


def test_parameters_that_require_grad_are_taken_without_autograd() -> None:
    """Model weights are Parameters: refusing them under inference_mode would refuse every model."""
    weight = torch.nn.Parameter(matrix(5, 64))
    with torch.no_grad():
        assert check_operands(GOOD[0], weight, "cpu").experts == 5
    with torch.inference_mode():
        assert check_operands(matrix(3, 64), weight, "cpu").experts == 5


@pytest.mark.parametrize(
    ("x", "tokens", "stride"),
    [
        (matrix(3, 64), 3, 64),
        (matrix(3, 80)[:, 8:72], 3, 80),
        (matrix(6, 64)[::2], 3, 128),
        (matrix(6, 64)[4:], 2, 64),
        (matrix(1, 64), 1, 64),
        (matrix(2, 67)[:1, :64], 1, 64),
        (aligned(64).as_strided((1, 64), (0, 1)), 1, 64),
        (aligned(64).as_strided((1, 64), (2**40, 1)), 1, 64),
        (matrix(0, 64), 0, 64),
        (matrix(64, 0).t(), 0, 64),
    ],
    ids=["plain", "columns", "every 2nd", "offset", "row", "odd", "stride 0", "huge", "M=0", "T"],
)
def test_views_that_a_kernel_can_take_pass_with_address_and_stride(
    x: torch.Tensor, tokens: int, stride: int
) -> None:
    """torch leaves the stride of a single row arbitrary: judged by it, M = 1 would be refused."""
    operands = check_operands(x, GOOD[1], "cpu")
    assert (operands.x_address, operands.tokens, operands.x_row_stride) == (
        x.data_ptr(),
        tokens,
        stride,
    )
    assert (operands.weight_address, operands.experts, operands.weight_row_stride) == (
        GOOD[1].data_ptr(),
        5,
        64,
    )
    assert (operands.hidden, operands.device_index) == (64, 0)


def checked(out: object, x: torch.Tensor, weight: torch.Tensor) -> int:
    operands = check_operands(x, weight, "cpu")
    return check_out(out, torch.float32, operands, x.device)  # type: ignore[arg-type]


def inside(tensor: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """A [3, 5] fp32 tensor that starts so many bytes into another one's memory."""
    room = tensor.untyped_storage()
    start = tensor.storage_offset() * 2 + offset_bytes
    return torch.empty(0, dtype=torch.float32).set_(room, start // 4, (3, 5), (5, 1))


BAD_OUT: list[tuple[str, Callable[[torch.Tensor], object], type[Exception], str]] = [
    ("no tensor", lambda x: 3, TypeError, "out is int, must be a torch.Tensor or None"),
    (
        "dtype",
        lambda x: torch.empty(3, 5, dtype=BF16),
        TypeError,
        "out has dtype torch.bfloat16, out_dtype is torch.float32: pass out_dtype=torch.bfloat16",
    ),
    ("sparse", lambda x: torch.zeros(3, 5).to_sparse(), TypeError, "out has layout torch.sparse"),
    (
        "shape",
        lambda x: torch.empty(5, 3),
        ValueError,
        r"out has shape \(5, 3\), must be .* \(3, 5",
    ),
    ("flat", lambda x: torch.empty(15), ValueError, r"out has shape \(15,\)"),
    ("device", lambda x: torch.empty(3, 5, device="meta"), ValueError, "out is on meta, x is on"),
    ("transposed", lambda x: torch.empty(5, 3).t(), ValueError, r"out has strides \(1, 3\), must"),
    ("columns", lambda x: torch.empty(3, 6)[:, :5], ValueError, r"out has strides \(6, 1\), must"),
    ("negated", lambda x: torch._neg_view(torch.empty(3, 5)), ValueError, "out is a lazily neg"),
    ("grad", lambda x: torch.empty(3, 5, requires_grad=True), TypeError, "out requires grad"),
    ("on x", lambda x: inside(x, 0), ValueError, "out overlaps x in memory: bytes 0x"),
    ("last bytes of x", lambda x: inside(x, 3 * 128 - 4), ValueError, "out overlaps x in memory"),
    ("before x", lambda x: inside(x, -56), ValueError, "out overlaps x in memory"),
]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [case[1:] for case in BAD_OUT],
    ids=[case[0] for case in BAD_OUT],
)
def test_outputs_that_a_kernel_could_not_write_are_refused_by_value(
    make: Callable[[torch.Tensor], object], error: type[Exception], message: str
) -> None:
    """Each would write out of bounds, into the wrong place or over the inputs of other blocks."""
    x = aligned(1000)[200:392].view(3, 64)
    with pytest.raises(error, match=message):
        checked(make(x), x, GOOD[1])


def test_an_output_that_overlaps_the_weights_is_refused() -> None:
    """A kernel would overwrite a weight that another thread block has still to read."""
    weight = aligned(320).view(5, 64)
    with pytest.raises(ValueError, match="out overlaps weight in memory"):
        checked(inside(weight, 64), GOOD[0], weight)


def test_outputs_right_beside_the_inputs_pass() -> None:
    """An arena allocator packs tensors without a gap: touching is not overlapping."""
    x = aligned(1000)[200:392].view(3, 64)
    for out in (inside(x, 3 * 128), inside(x, -60)):
        assert checked(out, x, GOOD[1]) == out.data_ptr()


def test_an_empty_output_overlaps_nothing() -> None:
    """M = 0 is a legal call with a slice of any arena: it writes no byte."""
    x = aligned(1000)[200:392].view(3, 64)
    out = inside(x, 16)[:0]
    assert checked(out, x[:0], GOOD[1]) == out.data_ptr()
    assert checked(inside(x, 16)[:, :0], x, GOOD[1][:0]) == out.data_ptr()


def test_an_output_at_an_odd_element_passes() -> None:
    """Kernels write single elements: asking for more would refuse slices of a larger buffer."""
    out = torch.empty(16, dtype=torch.float32)[1:].view(3, 5)
    assert checked(out, *GOOD) == out.data_ptr()
