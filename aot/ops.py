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
from .problem import VECTOR_ELEMENTS
from .runtime import load_and_run
from .tensors import DTYPES, check_operands, check_out

__all__ = ["router_gemm", "router_gemm_out"]

NAMESPACE = "llbf16"

_SCHEMAS = (
    "router_gemm(Tensor x, Tensor weight, ScalarType? out_dtype=None) -> Tensor",
    "router_gemm_out(Tensor x, Tensor weight, Tensor(a!) out) -> ()",
)


# torch leaves these two without types.
_require: Callable[[object, Callable[[], str]], None] = torch._check
_library: Callable[..., Any] = torch.library.Library


def router_gemm(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Router logits `x @ weight.T` as a torch operator, for code that torch.compile traces.

    x [M, K] bf16, weight [N, K] bf16 -> [M, N] of `out_dtype`, float32 where none is given. Raises
    what `load_and_run` raises. In eager code `load_and_run` is the same without the dispatcher's
    cost.
    """
    result: torch.Tensor = torch.ops.llbf16.router_gemm.default(x, weight, out_dtype)
    return result


def router_gemm_out(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As `router_gemm`, into `out` [M, N] of float32, bfloat16 or float16, which is returned."""
    torch.ops.llbf16.router_gemm_out.default(x, weight, out)
    return out


def _cuda(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    if out_dtype is None:
        return load_and_run(x, weight)
    return load_and_run(x, weight, out_dtype=out_dtype)


def _cuda_out(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    load_and_run(x, weight, out=out, out_dtype=out.dtype)


def _cpu(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    dtype = _checked_dtype(out_dtype)
    check_operands(x, weight, "cpu")
    return _TORCH(x, weight, dtype)


def _cpu_out(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    dtype = _checked_dtype(out.dtype)
    check_out(out, dtype, check_operands(x, weight, "cpu"), x.device)
    out.copy_(_TORCH(x, weight, dtype))


def _fake(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    dtype = _checked_dtype(out_dtype)
    _check_traced(x, weight)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def _fake_out(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    _checked_dtype(out.dtype)
    _check_traced(x, weight)
    shape = (x.shape[0], weight.shape[0])
    _require(out.dim() == 2, lambda: f"out has {out.dim()} dimensions, must have 2")
    _require(out.shape[0] == shape[0], lambda: f"out has shape {out.shape}, must be {shape}")
    _require(out.shape[1] == shape[1], lambda: f"out has shape {out.shape}, must be {shape}")


def _check_traced(x: torch.Tensor, weight: torch.Tensor) -> None:
    """What can be told of tensors that have no memory: a wrong call fails while it is traced."""
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype is not torch.bfloat16:
            raise TypeError(f"{name} has dtype {tensor.dtype}, must be torch.bfloat16")
        if tensor.dim() != 2:
            raise ValueError(f"{name} has {tensor.dim()} dimensions, must have 2")
    hidden = weight.shape[1]
    _require(x.shape[1] == hidden, lambda: f"x has K = {x.shape[1]}, weight has K = {hidden}")
    _require(
        hidden % VECTOR_ELEMENTS == 0,
        lambda: f"K = {hidden}, must be a multiple of {VECTOR_ELEMENTS}",
    )


def _checked_dtype(out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is None:
        return torch.float32
    if out_dtype not in DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}, must be one of {', '.join(map(str, DTYPES))}")
    return out_dtype


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
