"""The fallback: torch computes what no stored kernel does, as exactly as the output type asks."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["TorchProduct"]


class TorchProduct:
    """`x @ weight.T` by torch.

    fp32 and fp16 outputs are fp32 sums, rounded once: by `torch.mm(..., out_dtype=torch.float32)`
    where this torch has it for the device, else from operands cast to fp32, which costs a copy of
    the weights in every call. A bf16 output is what `torch.nn.functional.linear` gives.
    """

    def __init__(self) -> None:
        self._mm_widens = True

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """The product in this type."""
        if out_dtype is torch.bfloat16:
            return functional.linear(x, weight)
        return self._fp32(x, weight).to(out_dtype)

    def _fp32(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._mm_widens:
            try:
                return torch.mm(x, weight.t(), out_dtype=torch.float32)
            except (TypeError, NotImplementedError):
                # The keyword came with torch 2.8, its kernel for CUDA only.
                self._mm_widens = False
        return functional.linear(x.float(), weight.float())
