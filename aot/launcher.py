"""The launcher: a launch record bound to a kernel and a problem, ready to be called.

Knows no kernel by name: extents, attributes and parameters all come from the record.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

from .driver import Driver, Kernel, LaunchConfig, PreparedLaunch
from .errors import InvalidArtifactError
from .launch import Attribute, LaunchRecord, ParamKind, ParamSource
from .problem import Problem

__all__ = ["Launcher", "Operands", "check_record", "resolve"]

MAX_BLOCK_THREADS = 1024
MAX_CLUSTER_BLOCKS = 16
"""Thread blocks of the largest cluster of any GPU; above 8 the driver may still refuse."""

MAX_GRID = (2**31 - 1, 65_535, 65_535)


class Operands(NamedTuple):
    """What a launch takes of x [M, K] and weight [N, K]: addresses, extents, strides (elements)."""

    x_address: int
    weight_address: int
    tokens: int
    experts: int
    hidden: int
    x_row_stride: int
    weight_row_stride: int
    device_index: int


_FORMAT = {ParamKind.POINTER: "Q", ParamKind.INT32: "i"}

_VALUES = {
    ParamSource.X: Operands._fields.index("x_address"),
    ParamSource.WEIGHT: Operands._fields.index("weight_address"),
    ParamSource.TOKENS: Operands._fields.index("tokens"),
    ParamSource.EXPERTS: Operands._fields.index("experts"),
    ParamSource.HIDDEN: Operands._fields.index("hidden"),
    ParamSource.X_ROW_STRIDE: Operands._fields.index("x_row_stride"),
    ParamSource.WEIGHT_ROW_STRIDE: Operands._fields.index("weight_row_stride"),
    ParamSource.OUT: len(Operands._fields),
}
"""Place of each parameter's value in a call's operands, followed by the output's address."""


def check_record(record: LaunchRecord) -> None:
    """Raise InvalidArtifactError for a launch record that no driver could execute.

    A stored record is whole, but a faulty builder could have written it: refused here, it is a miss
    with a reason, not an error in the middle of a call.
    """
    if not record.symbol:
        raise InvalidArtifactError("launch record has an empty symbol")
    for name, extents, most in (
        ("block", record.block, MAX_BLOCK_THREADS),
        ("cluster", record.cluster, MAX_CLUSTER_BLOCKS),
    ):
        if min(extents) < 1 or math.prod(extents) > most:
            raise InvalidArtifactError(
                f"launch record has {name} {extents}, its product must be 1 to {most}"
            )
    for axis, dim, cluster in zip("xyz", record.grid, record.cluster, strict=True):
        if dim.tile < 1 or dim.blocks < 1 or dim.blocks % cluster:
            raise InvalidArtifactError(
                f"launch record has grid.{axis} of {dim.blocks} blocks for each {dim.tile} "
                f"{dim.extent.value}, must be positive and whole clusters of {cluster}"
            )
    if record.dynamic_shared_bytes < 0:
        raise InvalidArtifactError(
            f"launch record has {record.dynamic_shared_bytes} bytes of dynamic shared memory"
        )
    end = 0
    for param in record.params:
        size = param.source.kind.size_bytes
        if (param.kind, param.size_bytes) != (param.source.kind, size):
            raise InvalidArtifactError(
                f"launch record passes {param.source.value} as {param.kind.value} of "
                f"{param.size_bytes} bytes, must be {param.source.kind.value} of {size}"
            )
        if param.offset_bytes < end or param.offset_bytes % size:
            raise InvalidArtifactError(
                f"launch record puts {param.source.value} at byte {param.offset_bytes}, must be a "
                f"multiple of {size} and at least {end}"
            )
        end = param.offset_bytes + size


def resolve(record: LaunchRecord, problem: Problem) -> LaunchConfig:
    """The launch of a problem; raises InvalidArtifactError where CUDA allows no such grid."""
    x, y, z = (dim.resolve(problem) for dim in record.grid)
    grid = (x, y, z)
    if any(blocks > most for blocks, most in zip(grid, MAX_GRID, strict=True)):
        raise InvalidArtifactError(f"launch record gives grid {grid}, largest is {MAX_GRID}")
    return LaunchConfig(
        grid=grid,
        block=record.block,
        cluster=record.cluster,
        dynamic_shared_bytes=record.dynamic_shared_bytes,
        programmatic=Attribute.PROGRAMMATIC_STREAM_SERIALIZATION in record.attributes,
        params=tuple((param.offset_bytes, param.size_bytes) for param in record.params),
    )


class Launcher:
    """Launches one kernel for one problem. Threads may share it: each call holds its own slot."""

    def __init__(
        self, driver: Driver, kernel: Kernel, record: LaunchRecord, problem: Problem
    ) -> None:
        self._config = resolve(record, problem)
        self._driver = driver
        self._kernel = kernel
        self._pack = struct.Struct(_packing(record)).pack
        self._pick = _picker(tuple(_VALUES[param.source] for param in record.params))
        self._free: list[_Slot] = []
        self._slots: list[_Slot] = []

    @property
    def calls(self) -> int:
        """How many launches succeeded."""
        return sum(slot.calls for slot in self._slots)

    def __call__(self, stream: int, operands: Operands, out_address: int) -> None:
        """Enqueue the kernel on a stream; raises DriverError."""
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._new_slot()
        try:
            slot.launch(stream, self._pack(*self._pick((*operands, out_address))))
            slot.calls += 1
        finally:
            self._free.append(slot)

    def _new_slot(self) -> _Slot:
        slot = _Slot(self._driver.prepare(self._kernel, self._config))
        self._slots.append(slot)
        return slot


class _Slot:
    """A prepared launch and how often it ran. Popped from a list: one thread has it at a time."""

    __slots__ = ("calls", "launch")

    def __init__(self, launch: PreparedLaunch) -> None:
        self.launch = launch
        self.calls = 0


def _packing(record: LaunchRecord) -> str:
    """The struct format of the parameter buffer, padding included."""
    text = "<"
    end = 0
    for param in record.params:
        text += f"{param.offset_bytes - end}x{_FORMAT[param.kind]}"
        end = param.offset_bytes + param.size_bytes
    return text


def _picker(places: tuple[int, ...]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """Select places of a tuple, as a tuple for any number of them."""
    if len(places) < 2:
        return lambda values: tuple(values[place] for place in places)
    return itemgetter(*places)
