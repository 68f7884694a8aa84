"""Devices: what torch knows of the GPU that a call runs on: its stream, capture, current device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch

__all__ = ["CudaDevices", "Devices"]


Empty: TypeAlias = Callable[[tuple[int, int], tuple[int, int], torch.dtype], torch.Tensor]
"""Makes a tensor of a shape, strides and a dtype on the current device."""


class Devices(Protocol):
    """What the runtime asks torch about devices. `index` is an ordinal, as torch numbers them."""

    @property
    def device_type(self) -> str:
        """The type of device that tensors must be on, as torch names it."""

    def current(self) -> int:
        """The calling thread's current device."""

    def guard(self, index: int) -> AbstractContextManager[object]:
        """Make a device the current one for a while."""

    def stream(self, index: int) -> int:
        """The driver's handle of torch's current stream on a device."""

    def capturing(self) -> bool:
        """Whether the current device's current stream is being captured into a graph."""

    def empty(
        self, shape: tuple[int, int], strides: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor on the current device whose values are not set."""


class CudaDevices:
    """The CUDA devices of torch."""

    device_type = "cuda"

    def __init__(self) -> None:
        # These private calls cost 0.1 us where their public kin build objects for 4 us a launch.
        raw_stream: Callable[[int], int] | None = getattr(
            torch._C, "_cuda_getCurrentRawStream", None
        )
        current: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
        self.stream: Callable[[int], int] = raw_stream or _stream
        self.current: Callable[[], int] = current or torch.cuda.current_device
        self.empty: Empty = _fast_empty() or _empty

    def guard(self, index: int) -> AbstractContextManager[object]:
        """Make a device the current one for a while."""
        return torch.cuda.device(index)

    def capturing(self) -> bool:
        """Whether the current device's current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()


def _fast_empty() -> Empty | None:
    """What torch.compile's code allocates with: a third of torch.empty's cost on the host."""
    try:
        from torch._C._dynamo import guards
    except ImportError:
        return None
    empty: Empty | None = getattr(guards, "_empty_strided_cuda", None)
    return empty


def _empty(shape: tuple[int, int], strides: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def _stream(index: int) -> int:
    handle: int = torch.cuda.current_stream(index).cuda_stream
    return handle
