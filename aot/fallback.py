"""The fallback: torch computes what no stored kernel does, as exactly as the output type asks."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["TorchProduct"]


class TorchProduct:
    """`x @ weight.T` by torch, with the bias or the scale of a call.

    fp32 and fp16 outputs, and all with a bias or a scale, are fp32 sums that are rounded once: by
    `torch.mm(..., out_dtype=torch.float32)` where this torch has it for the device and both
    operands are bf16, else from operands cast to fp32, which costs a copy of bf16 weights in every
    call. A bf16 output of bf16 operands is what `torch.nn.functional.linear` gives.
    """

    def __init__(self) -> None:
        self._mm_widens = True

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out_dtype: torch.dtype,
        *,
        bias: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """The product in this type."""
        plain = bias is None and scale is None
        if plain and out_dtype is x.dtype is weight.dtype is torch.bfloat16:
            return functional.linear(x, weight)
        product = self._fp32(x, weight)
        if bias is not None:
            product += bias
        if scale is not None:
            product *= scale
        return product.to(out_dtype)

    def _fp32(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._mm_widens and x.dtype is weight.dtype is torch.bfloat16:
            try:
                return torch.mm(x, weight.t(), out_dtype=torch.float32)
            except (TypeError, NotImplementedError):
                # The keyword came with torch 2.8, its kernel for CUDA only.
                self._mm_widens = False
        return functional.linear(x.float(), weight.float())
