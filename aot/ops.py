"""The torch operators `torch.ops.llbf16.router_gemm` and `router_gemm_out`.

Importing this module registers them. On CUDA they are calls of the process's runtime: a graph that
torch.compile made chooses the kernel by M when it runs, not when it was traced. On the CPU torch
computes, with the same checks: for tests, and to trace without a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .fallback import TorchProduct
from .launcher import Operands
from .problem import hidden_multiple
from .runtime import load_and_run
from .tensors import (
    DTYPES,
    bias_epilogue,
    check_bias,
    check_operands,
    check_out,
    operand_types,
)

__all__ = ["router_gemm", "router_gemm_out"]

NAMESPACE = "llbf16"

_EXTRAS = "Tensor? bias=None, float? scale=None"
_SCHEMAS = (
    f"router_gemm(Tensor x, Tensor weight, ScalarType? out_dtype=None, {_EXTRAS}) -> Tensor",
    f"router_gemm_out(Tensor x, Tensor weight, Tensor(a!) out, {_EXTRAS}) -> ()",
)


# torch leaves these two without types.
_require: Callable[[object, Callable[[], str]], None] = torch._check
_library: Callable[..., Any] = torch.library.Library


def router_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Router logits `x @ weight.T` as a torch operator, for code that torch.compile traces.

    x [M, K], weight [N, K] bf16 -> [M, N] of `out_dtype`, float32 where none is given; types,
    `bias` [N] and `scale` as `load_and_run` takes them. Raises what that raises. In eager code
    `load_and_run` is the same without the dispatcher's cost.
    """
    result: torch.Tensor = torch.ops.llbf16.router_gemm.default(x, weight, out_dtype, bias, scale)
    return result


def router_gemm_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """As `router_gemm`, into `out` [M, N] of float32, bfloat16 or float16, which is returned."""
    torch.ops.llbf16.router_gemm_out.default(x, weight, out, bias, scale)
    return out


def _cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    dtype = torch.float32 if out_dtype is None else out_dtype
    return load_and_run(x, weight, out_dtype=dtype, bias=bias, scale=scale)


def _cuda_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> None:
    load_and_run(x, weight, out=out, out_dtype=out.dtype, bias=bias, scale=scale)


def _cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    dtype = _checked_dtype(out_dtype)
    _check_extras(check_operands(x, weight, "cpu"), x, bias, scale)
    return _TORCH(x, weight, dtype, bias=bias, scale=scale)


def _cpu_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> None:
    dtype = _checked_dtype(out.dtype)
    operands = check_operands(x, weight, "cpu")
    check_out(out, dtype, operands, x.device)
    _check_extras(operands, x, bias, scale)
    out.copy_(_TORCH(x, weight, dtype, bias=bias, scale=scale))


def _check_extras(
    operands: Operands, x: torch.Tensor, bias: torch.Tensor | None, scale: float | None
) -> None:
    if bias is not None:
        if scale is not None:
            raise ValueError(_BOTH)
        check_bias(bias, operands, x.device)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    dtype = _checked_dtype(out_dtype)
    _check_traced(x, weight, bias, scale)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def _fake_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> None:
    _checked_dtype(out.dtype)
    _check_traced(x, weight, bias, scale)
    shape = (x.shape[0], weight.shape[0])
    _require(out.dim() == 2, lambda: f"out has {out.dim()} dimensions, must have 2")
    _require(out.shape[0] == shape[0], lambda: f"out has shape {out.shape}, must be {shape}")
    _require(out.shape[1] == shape[1], lambda: f"out has shape {out.shape}, must be {shape}")


def _check_traced(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float | None
) -> None:
    """What can be told of tensors that have no memory: a wrong call fails while it is traced."""
    multiple = hidden_multiple(*operand_types(x.dtype, weight.dtype))
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dim() != 2:
            raise ValueError(f"{name} has {tensor.dim()} dimensions, must have 2")
    experts, hidden = weight.shape
    _require(x.shape[1] == hidden, lambda: f"x has K = {x.shape[1]}, weight has K = {hidden}")
    _require(
        hidden % multiple == 0,
        lambda: f"K = {hidden}, must be a multiple of {multiple}",
    )
    if bias is not None:
        if scale is not None:
            raise ValueError(_BOTH)
        bias_epilogue(bias.dtype)
        if bias.dim() != 1:
            raise ValueError(f"bias has {bias.dim()} dimensions, must have 1")
        _require(bias.shape[0] == experts, lambda: f"bias has N = {bias.shape[0]}, not {experts}")


def _checked_dtype(out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is None:
        return torch.float32
    if out_dtype not in DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}, must be one of {', '.join(map(str, DTYPES))}")
    return out_dtype


_BOTH = "bias and scale are both given, a call takes one of them"

_TORCH = TorchProduct()


class _Registered:
    """The library of the operators: its registrations live as long as it does."""

    lock = threading.Lock()
    library: Any = None


def _register() -> None:
    """Define the operators, once in a process whatever imports or reloads this module.

    By `Library.impl`, not `custom_op`, whose wrapper costs more than the call: see docs/runtime.md.
    """
    with _Registered.lock:
        if _Registered.library is not None:
            return
        library: Any = _library(NAMESPACE, "FRAGMENT")
        # The first: the compiler may not hand over tensors with other strides than were traced.
        tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
        for schema in _SCHEMAS:
            library.define(schema, tags=tags)
        library.impl("router_gemm", _cuda, "CUDA")
        library.impl("router_gemm_out", _cuda_out, "CUDA")
        library.impl("router_gemm", _cpu, "CPU")
        library.impl("router_gemm_out", _cpu_out, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::router_gemm", _fake, lib=library)
        torch.library.register_fake(f"{NAMESPACE}::router_gemm_out", _fake_out, lib=library)
        _Registered.library = library


_register()
