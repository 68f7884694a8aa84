"""Routes: what a runtime remembers of calls, so that one alike is checked in a single step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from .launcher import Launcher, Operands
from .tensors import Guard, guard_of

__all__ = ["Family", "Memory", "Route", "Weight"]

MAX_ALTERNATIVES = 4
"""Routes kept for one shape of x and one output type: other strides, grad or inference modes."""


class Route:
    """Calls of one shape and layout: how to recognise them, and what launches them.

    `admits` takes x and weight, `admits_out` these and an output, where a call had one. `auto` and
    `always` launch with dependent launch where the kernel has it, `never` without; None until a
    call has asked for it. `next` are calls of the same shape that are otherwise unlike.
    """

    __slots__ = (
        "admits",
        "admits_out",
        "always",
        "auto",
        "device",
        "grads",
        "never",
        "next",
        "out_bytes",
        "out_dtype",
        "out_strides",
        "shape",
        "strides",
        "weight_bytes",
        "x_bytes",
    )

    def __init__(
        self, x: torch.Tensor, weight: torch.Tensor, operands: Operands, out_dtype: torch.dtype
    ) -> None:
        self.admits: Guard = guard_of(x, weight)
        self.admits_out: Guard | None = None
        self.auto: Launcher | None = None
        self.always: Launcher | None = None
        self.never: Launcher | None = None
        self.next: Route | None = None
        self.device = operands.device_index
        self.out_dtype = out_dtype
        self.grads = x.requires_grad or weight.requires_grad
        self.strides = (operands.x_row_stride, operands.weight_row_stride)
        self.shape = (operands.tokens, operands.experts)
        self.out_strides = (operands.experts, 1)
        self.out_bytes = operands.tokens * operands.experts * out_dtype.itemsize
        self.x_bytes = operands.x_bytes
        self.weight_bytes = operands.weight_bytes


Family: TypeAlias = dict[tuple[torch.Size, torch.dtype], Route]
"""The routes of all weights that look alike, by the shape of x and the output type."""


class Sight(NamedTuple):
    """A weight as one call sees it.

    Its address, torch's count of changes in place (0 for inference tensors, which have none), and
    how often it was said to have changed.
    """

    address: int
    version: int
    epoch: int


class Weight:
    """A weight tensor that has been used: where its values were last read, and in which version.

    Recognised by the tensor object, not by its address, which the allocator gives out again: when
    the object dies, its record goes too.
    """

    __slots__ = (
        "address",
        "captured_at",
        "epoch",
        "last",
        "reference",
        "routes",
        "version",
        "versioned",
    )

    def __init__(
        self, tensor: torch.Tensor, routes: Family, forget: Callable[[object], object]
    ) -> None:
        self.reference = weakref.ref(tensor, forget)
        self.routes = routes
        self.last: Route | None = None
        """The route of the last call without an output: the next one is mostly like it."""
        self.versioned = not tensor.is_inference()
        self.address = 0
        self.version = 0
        self.captured_at: tuple[int, int] = (0, 0)
        self.epoch = 0

    def sight_of(self, tensor: torch.Tensor, address: int) -> Sight:
        """What a call sees of the weight now."""
        return Sight(address, tensor._version if self.versioned else 0, self.epoch)

    def saw(self, sight: Sight) -> bool:
        """Whether a call has waited for these values already."""
        return self.address == sight.address and self.version == sight.version

    def captured(self, sight: Sight) -> bool:
        """Whether a call in a stream capture has waited for these values already."""
        return self.captured_at == sight[:2]


class Memory:
    """The weights and routes of a runtime. Threads may share it."""

    def __init__(self) -> None:
        self.weights: dict[int, Weight] = {}
        """By the identity of the tensor object."""
        self._families: dict[tuple[object, ...], Family] = {}
        self._lock = threading.Lock()

    def weight(self, tensor: torch.Tensor, device: int) -> Weight:
        """The record of a weight, made on its first use."""
        key = id(tensor)
        known = self.weights.get(key)
        alike = (tensor.shape, tensor.stride(), device)
        if known is not None and known.routes is self._families.get(alike):
            return known
        forget = self.weights.pop
        with self._lock:
            family = self._families.setdefault(alike, {})
            known = Weight(tensor, family, lambda _: forget(key, None))
            self.weights[key] = known
        return known

    def route(
        self,
        known: Weight,
        x: torch.Tensor,
        weight: torch.Tensor,
        operands: Operands,
        out_dtype: torch.dtype,
    ) -> Route:
        """The route of such a call, made on the first one."""
        key = (x.shape, out_dtype)
        first = route = known.routes.get(key)
        count = 0
        while route is not None:
            if route.admits(x, weight):
                return route
            route, count = route.next, count + 1
        made = Route(x, weight, operands, out_dtype)
        if count < MAX_ALTERNATIVES:
            made.next = first
        known.routes[key] = made
        return made

    def forget_routes(self, tokens: int) -> None:
        """Forget the routes of calls with more tokens than these."""
        with self._lock:
            for family in self._families.values():
                for key in [key for key in tuple(family) if key[0][0] > tokens]:
                    family.pop(key, None)
            for known in tuple(self.weights.values()):
                known.last = None

    def note(self, known: Weight, sight: Sight, *, capturing: bool) -> None:
        """Remember that a call waited for a weight, unless it was said to have changed since.

        What was captured has not run: it counts for later captures only. A graph waits for all that
        was ahead of it in the stream, so there nothing but the graph itself can be in the way.
        """
        with self._lock:
            if known.epoch != sight.epoch:
                return
            if capturing:
                known.captured_at = sight[:2]
            else:
                known.address, known.version = sight.address, sight.version

    def changed(self, weight: torch.Tensor | None) -> None:
        """Let the next call of a weight, or of all, be one that has not seen it.

        Whatever shares memory with the tensor is meant: its views, and what it is a view of.
        """
        begin, end = 0, 1 << 64
        if weight is not None:
            storage = weight.untyped_storage()
            begin = storage.data_ptr()
            end = begin + storage.nbytes()
        with self._lock:
            for known in tuple(self.weights.values()):
                known.epoch += 1
                if begin <= known.address < end:
                    known.address = 0
                if begin <= known.captured_at[0] < end:
                    known.captured_at = (0, 0)
