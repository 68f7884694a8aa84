"""Tensors of a call: every property that a kernel relies on is checked here, before any launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeAlias

import torch

from .launcher import Operands
from .problem import ALIGNMENT_BYTES, OPERAND_TOKENS, DType, Epilogue, hidden_multiple

__all__ = [
    "DTYPES",
    "Guard",
    "bias_epilogue",
    "check_bias",
    "check_operands",
    "check_out",
    "check_scale",
    "guard_of",
    "operand_types",
]

DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}
"""Output types, by torch's name and by ours."""

Guard: TypeAlias = Callable[..., bool]
"""Whether tensors are like those that were checked before: everything but where they lie."""

MAX_INT32 = 2**31 - 1

_OPERANDS = {x for pair in OPERAND_TOKENS for x in pair}
_BIASES = {e.bias_dtype: e for e in Epilogue if e.bias_dtype is not None}


def operand_types(x: torch.dtype, weight: torch.dtype) -> tuple[DType, DType]:
    """Our names of the types of x and weight; raises TypeError where no kernel takes them."""
    for name, dtype in (("x", x), ("weight", weight)):
        if DTYPES.get(dtype) not in _OPERANDS:
            raise TypeError(f"{name} has dtype {dtype}, must be torch.bfloat16 or torch.float32")
    found = DTYPES[x], DTYPES[weight]
    if found not in OPERAND_TOKENS:
        raise TypeError(
            f"x has dtype {x} and weight {weight}: no kernel takes them together, pass "
            f"x.to({weight}), or a weight of {x}"
        )
    return found


def check_operands(x: torch.Tensor, weight: torch.Tensor, device_type: str) -> Operands:
    """Check the inputs of `x @ weight.T`; raises TypeError or ValueError naming tensor and value.

    Both must be strided, 2-D tensors of one device of this type: bf16, or a weight of fp32 with x
    of bf16 or fp32; with equal K that is a multiple of 8, or of 4 where both are fp32; elements of
    a row contiguous; rows that do not overlap and start at multiples of 16 bytes, at most 2^31 - 1
    elements apart. A tensor of one row may have any row stride. An empty
    tensor has no rows, so nothing is asked of its strides and address. Autograd is refused, not
    ignored: the kernels have no backward.
    """
    tokens, x_hidden = _check_matrix("x", x)
    experts, hidden = _check_matrix("weight", weight)
    types = operand_types(x.dtype, weight.dtype)
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
    multiple = hidden_multiple(*types)
    if hidden % multiple:
        raise ValueError(
            f"x and weight have K = {hidden}, must be a multiple of {multiple}: "
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
        types[0].size_bytes,
        types[1].size_bytes,
    )


def check_bias(
    bias: torch.Tensor, operands: Operands, device: torch.device
) -> tuple[Epilogue, int]:
    """Check the bias of a call with these checked inputs: its epilogue and its address.

    It must be a contiguous [N] tensor of fp32 or bf16 on the inputs' device. Raises TypeError or
    ValueError.
    """
    if not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias is {type(bias).__name__}, must be a torch.Tensor or None")
    epilogue = bias_epilogue(bias.dtype)
    if bias.layout is not torch.strided:
        raise TypeError(f"bias has layout {bias.layout}, must be torch.strided")
    if bias.shape != (operands.experts,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, must be [N] = ({operands.experts},)")
    if bias.device != device:
        raise ValueError(f"bias is on {bias.device}, x is on {device}: must be one device")
    if not bias.is_contiguous():
        raise ValueError(f"bias has stride {bias.stride()}, must be contiguous")
    if bias.is_neg():
        raise ValueError("bias is a lazily negated view: pass bias.resolve_neg()")
    if bias.requires_grad and torch.is_grad_enabled():
        _refuse_grad("bias")
    return epilogue, bias.data_ptr()


def bias_epilogue(dtype: torch.dtype) -> Epilogue:
    """The epilogue that adds a bias of this type; raises TypeError where none does."""
    ours = DTYPES.get(dtype)
    epilogue = None if ours is None else _BIASES.get(ours)
    if epilogue is None:
        raise TypeError(f"bias has dtype {dtype}, must be torch.float32 or torch.bfloat16")
    return epilogue


def check_scale(scale: float) -> float:
    """Check the factor of a call; raises TypeError for what is no real number."""
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale is {scale!r}, must be a number or None")
    return float(scale)


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
    for name, first, size_bytes in (
        ("x", operands.x_address, operands.x_bytes),
        ("weight", operands.weight_address, operands.weight_bytes),
    ):
        last = first + size_bytes
        if begin < end and begin < last and first < end:
            raise ValueError(
                f"out overlaps {name} in memory: bytes {begin:#x} to {end:#x} and "
                f"{first:#x} to {last:#x}"
            )
    return begin


def guard_of(*tensors: torch.Tensor) -> Guard:
    """A cheap test whether other tensors need not be checked again: true says that they need not.

    It compares type, dtype, layout, device, sizes, strides, lazy negation and `requires_grad`, each
    tensor with the one in its place here. Addresses and the grad mode are not compared: those
    checks remain to be done. False says nothing: the same tensors may give it in inference mode.

    Uses what torch.compile guards its graphs with, one call for all of it; where this torch does
    not have that, the properties are compared one by one.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Guard = guards.check
        if check(*tensors) is True:
            return check
    except (ImportError, AttributeError, TypeError, RuntimeError):
        pass
    return _plain_guard(*tensors)


def _plain_guard(*tensors: torch.Tensor) -> Guard:
    wanted = tuple(map(_properties, tensors))

    def check(*others: torch.Tensor) -> bool:
        return tuple(map(_properties, others)) == wanted

    return check


def _properties(tensor: object) -> tuple[object, ...] | None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.stride(),
        tensor.is_neg(),
        tensor.requires_grad,
    )


def _check_matrix(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """The extents of a strided 2-D tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}, must be a torch.Tensor")
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
    multiple = ALIGNMENT_BYTES // tensor.element_size()
    if row_stride % multiple:
        raise ValueError(
            f"{name} has row stride {row_stride}, must be a multiple of {multiple} "
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
