"""Tensors of a call: every property that a kernel relies on is checked here, before any launch."""

from __future__ import annotations

from typing import NoReturn

import torch

from .launcher import Operands
from .problem import ALIGNMENT_BYTES, VECTOR_ELEMENTS, DType

__all__ = ["DTYPES", "check_operands", "check_out"]

DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}
"""Output types, by torch's name and by ours."""

MAX_INT32 = 2**31 - 1

_BF16_BYTES = 2
_ALIGNMENT_ELEMENTS = ALIGNMENT_BYTES // _BF16_BYTES


def check_operands(x: torch.Tensor, weight: torch.Tensor, device_type: str) -> Operands:
    """Check the inputs of `x @ weight.T`; raises TypeError or ValueError naming tensor and value.

    Both must be strided, 2-D bf16 tensors of one device of this type, with equal K that is a
    multiple of 8; elements of a row contiguous; rows that do not overlap and start at multiples of
    16 bytes, at most 2^31 - 1 elements apart. A tensor of one row may have any row stride. An empty
    tensor has no rows, so nothing is asked of its strides and address. Autograd is refused, not
    ignored: the kernels have no backward.
    """
    tokens, x_hidden = _check_matrix("x", x)
    experts, hidden = _check_matrix("weight", weight)
    device = x.device
    if device.type != device_type:
        raise ValueError(f"x is on {device}, must be on a {device_type} device")
    if weight.device != device:
        raise ValueError(f"weight is on {weight.device}, x is on {device}: must be one device")
    if x_hidden != hidden:
        raise ValueError(
            f"x has K = {x_hidden} (shape {tuple(x.shape)}), weight has K = {hidden} "
            f"(shape {tuple(weight.shape)}): must be equal"
        )
    if hidden % VECTOR_ELEMENTS:
        raise ValueError(
            f"x and weight have K = {hidden}, must be a multiple of {VECTOR_ELEMENTS}: "
            "kernels load 128 bits at a time"
        )
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        _refuse_grad("x" if x.requires_grad else "weight")
    x_address, x_row_stride = _check_rows("x", x, tokens, hidden)
    weight_address, weight_row_stride = _check_rows("weight", weight, experts, hidden)
    return Operands(
        x_address,
        weight_address,
        tokens,
        experts,
        hidden,
        x_row_stride,
        weight_row_stride,
        device.index or 0,
    )


def check_out(
    out: torch.Tensor, out_dtype: torch.dtype, operands: Operands, device: torch.device
) -> int:
    """Check the output of a call with these checked inputs, and return its address.

    It must be a contiguous [M, N] tensor of `out_dtype` on the inputs' device, whose memory is not
    within the span of x or weight. Kernels write single elements, so any address serves that torch
    gives out. Raises TypeError or ValueError.
    """
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is {type(out).__name__}, must be a torch.Tensor or None")
    if out.layout is not torch.strided:
        raise TypeError(f"out has layout {out.layout}, must be torch.strided")
    if out.dtype is not out_dtype:
        raise TypeError(
            f"out has dtype {out.dtype}, out_dtype is {out_dtype}: pass out_dtype={out.dtype}, "
            "or an out of the other type"
        )
    shape = (operands.tokens, operands.experts)
    if out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, must be [M, N] = {shape}")
    if out.device != device:
        raise ValueError(f"out is on {out.device}, x is on {device}: must be one device")
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}, must be contiguous")
    if out.is_neg():
        raise ValueError("out is a lazily negated view: pass a tensor of its own")
    if out.requires_grad and torch.is_grad_enabled():
        _refuse_grad("out")
    begin = out.data_ptr()
    end = begin + operands.tokens * operands.experts * out_dtype.itemsize
    for name, first, rows, row_stride in (
        ("x", operands.x_address, operands.tokens, operands.x_row_stride),
        ("weight", operands.weight_address, operands.experts, operands.weight_row_stride),
    ):
        last = first + ((rows - 1) * row_stride + operands.hidden) * _BF16_BYTES
        if begin < end and begin < last and first < end:
            raise ValueError(
                f"out overlaps {name} in memory: bytes {begin:#x} to {end:#x} and "
                f"{first:#x} to {last:#x}"
            )
    return begin


def _check_matrix(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """The extents of a strided 2-D bf16 tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}, must be a torch.Tensor")
    if tensor.dtype is not torch.bfloat16:
        raise TypeError(f"{name} has dtype {tensor.dtype}, must be torch.bfloat16")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}, must be torch.strided")
    shape = tensor.shape
    if len(shape) != 2:
        raise ValueError(f"{name} has shape {tuple(shape)}, must have 2 dimensions")
    return shape[0], shape[1]


def _check_rows(name: str, tensor: torch.Tensor, rows: int, hidden: int) -> tuple[int, int]:
    """Address and row stride of a tensor whose rows can be loaded 16 bytes at a time."""
    address = tensor.data_ptr()
    if rows == 0 or hidden == 0:
        return address, hidden
    row_stride, stride = tensor.stride()
    if stride != 1:
        raise ValueError(
            f"{name} has strides {(row_stride, stride)}, the elements of a row must be contiguous: "
            f"pass {name}.contiguous()"
        )
    if address % ALIGNMENT_BYTES:
        raise ValueError(
            f"{name} starts at address {address:#x}, must be a multiple of {ALIGNMENT_BYTES}: "
            "kernels load 128 bits at a time"
        )
    if tensor.is_neg():
        raise ValueError(f"{name} is a lazily negated view: pass {name}.resolve_neg()")
    if rows == 1:
        return address, hidden
    if row_stride < hidden:
        raise ValueError(
            f"{name} has row stride {row_stride}, less than K = {hidden}: rows must not overlap, "
            f"pass {name}.contiguous()"
        )
    if row_stride % _ALIGNMENT_ELEMENTS:
        raise ValueError(
            f"{name} has row stride {row_stride}, must be a multiple of {_ALIGNMENT_ELEMENTS} "
            f"elements ({ALIGNMENT_BYTES} bytes): kernels load 128 bits at a time"
        )
    if row_stride > MAX_INT32:
        raise ValueError(f"{name} has row stride {row_stride}, must be at most {MAX_INT32}")
    return address, row_stride


def _refuse_grad(name: str) -> NoReturn:
    raise TypeError(
        f"{name} requires grad, and the kernels have no backward: call under "
        f"torch.inference_mode() or torch.no_grad(), or pass {name}.detach()"
    )
