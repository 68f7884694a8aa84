"""The launcher: a launch record bound to a kernel and a problem, ready to be called.

Knows no kernel by name: extents, attributes and parameters all come from the record.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from .driver import WORD_BYTES, Driver, Kernel, LaunchConfig, PreparedLaunch, words_of
from .errors import InvalidArtifactError
from .launch import EPILOGUE_PARAMS, Attribute, LaunchRecord, ParamKind, ParamSource
from .problem import Problem

__all__ = ["Extras", "Launcher", "Operands", "check_record", "resolve"]

MAX_BLOCK_THREADS = 1024
MAX_CLUSTER_BLOCKS = 16
"""Thread blocks of the largest cluster of any GPU; above 8 the driver may still refuse."""

MAX_GRID = (2**31 - 1, 65_535, 65_535)


Extras: TypeAlias = Mapping[ParamSource, int | float]
"""What a kernel's epilogue takes of a call: the address of the bias, or the scale."""

_EPILOGUE = frozenset(source for sources in EPILOGUE_PARAMS.values() for source in sources)


class Operands(NamedTuple):
    """What a launch takes of x [M, K] and weight [N, K]; strides in elements, sizes in bytes."""

    x_address: int
    weight_address: int
    tokens: int
    experts: int
    hidden: int
    x_row_stride: int
    weight_row_stride: int
    device_index: int
    x_size: int = 2
    weight_size: int = 2

    @property
    def x_bytes(self) -> int:
        """Bytes from the first element of x to the last, both included."""
        return _span(self.tokens, self.hidden, self.x_row_stride) * self.x_size

    @property
    def weight_bytes(self) -> int:
        """Bytes from the first element of weight to the last, both included."""
        return _span(self.experts, self.hidden, self.weight_row_stride) * self.weight_size


def _span(rows: int, hidden: int, row_stride: int) -> int:
    return (rows - 1) * row_stride + hidden


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
    """Launches one kernel for one problem. Threads may share it: each call holds its own slot.

    Launches as the record says: with dependent launch where it has that attribute, unless
    `programmatic` is false. Extents come from the problem, once; a call brings addresses and
    strides.
    """

    def __init__(
        self,
        driver: Driver,
        kernel: Kernel,
        record: LaunchRecord,
        problem: Problem,
        *,
        programmatic: bool = True,
    ) -> None:
        config = resolve(record, problem)
        self._config = config if programmatic else config._replace(programmatic=False)
        self._driver = driver
        self._kernel = kernel
        self._record = record
        self._problem = problem
        self._places = places = _Places.of(record)
        self._pointers = (places.x, places.weight, places.out)
        self._unusual = bool(places.extras or places.again)
        self._ordinary: Launcher | None = None
        self._free: list[_Slot] = []
        self._slots: list[_Slot] = []

    @property
    def programmatic(self) -> bool:
        """Whether a launch may begin before the kernel ahead of it in the stream has ended."""
        return self._config.programmatic

    @property
    def ordinary(self) -> Launcher:
        """The same kernel, launched after all that is ahead of it in the stream.

        The kernel's wait on what it depends on returns at once there: nothing is in flight that a
        launch without the attribute depends on (PTX ISA, "griddepcontrol").
        """
        if not self._config.programmatic:
            return self
        if self._ordinary is None:
            self._ordinary = Launcher(
                self._driver, self._kernel, self._record, self._problem, programmatic=False
            )
        return self._ordinary

    @property
    def calls(self) -> int:
        """How many launches succeeded, those of `ordinary` left out."""
        return sum(slot.calls for slot in self._slots)

    @property
    def all_calls(self) -> int:
        """How many launches succeeded, those of `ordinary` included."""
        return self.calls + (0 if self._ordinary is None else self._ordinary.calls)

    def __call__(
        self, stream: int, operands: Operands, out_address: int, extras: Extras | None = None
    ) -> None:
        """Enqueue the kernel on a stream for operands of the problem's extents.

        Raises DriverError, and ValueError where the kernel's epilogue takes what `extras` lack.
        """
        self.launch(
            stream,
            operands.x_address,
            operands.weight_address,
            out_address,
            (operands.x_row_stride, operands.weight_row_stride),
            extras,
        )

    def launch(
        self,
        stream: int,
        x: int,
        weight: int,
        out: int,
        strides: tuple[int, int],
        extras: Extras | None = None,
    ) -> None:
        """Enqueue the kernel on a stream; addresses, and row strides of x and weight in elements.

        Callers that pass the same tuple object again spare its being written again. Raises
        DriverError, and ValueError where the kernel's epilogue takes what `extras` lack.
        """
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._new_slot()
        try:
            words = slot.words
            x_at, weight_at, out_at = self._pointers
            words[x_at] = x
            words[weight_at] = weight
            words[out_at] = out
            if slot.strides is not strides:
                slot.set_strides(self._places, strides)
            if self._unusual:
                slot.set_extras(self._places, extras or {})
                slot.repeat(self._places)
            if slot.stream != stream:
                slot.set_stream(stream)
            code = slot.enqueue()
            if code:
                slot.prepared.check(code)
            slot.calls += 1
        finally:
            self._free.append(slot)

    def _new_slot(self) -> _Slot:
        slot = _Slot(self._driver.prepare(self._kernel, self._config))
        slot.set_extents(self._places, self._problem)
        self._slots.append(slot)
        return slot


class _Places(NamedTuple):
    """Where a record's parameters lie in the buffer: words of 8 bytes, halves of 4.

    A pointer that the kernel does not take goes to the spare word at the end. `again` holds, as
    (to, from), the words of pointers that it takes twice.
    """

    x: int
    weight: int
    out: int
    extras: tuple[tuple[ParamSource, int], ...]
    again: tuple[tuple[int, int], ...]
    halves: tuple[tuple[ParamSource, int], ...]

    @classmethod
    def of(cls, record: LaunchRecord) -> _Places:
        """Read the places from a record that `check_record` lets pass."""
        words: dict[ParamSource, list[int]] = {}
        halves: list[tuple[ParamSource, int]] = []
        for param in record.params:
            if param.kind is ParamKind.POINTER:
                words.setdefault(param.source, []).append(param.offset_bytes // WORD_BYTES)
            else:
                halves.append((param.source, param.offset_bytes // 4))
        spare = words_of(record.params_size_bytes) - 1
        x, weight, out = (
            words.get(source, [spare])
            for source in (ParamSource.X, ParamSource.WEIGHT, ParamSource.OUT)
        )
        again = tuple((to, places[0]) for places in (x, weight, out) for to in places[1:])
        extras = tuple(
            (param.source, param.offset_bytes)
            for param in record.params
            if param.source in _EPILOGUE
        )
        return cls(x[0], weight[0], out[0], extras, again, tuple(halves))


class _Slot:
    """A prepared launch and how often it ran. Popped from a list: one thread has it at a time."""

    __slots__ = ("calls", "data", "enqueue", "halves", "prepared", "stream", "strides", "words")

    def __init__(self, prepared: PreparedLaunch) -> None:
        prepared.params[:] = bytes(len(prepared.params))  # gaps too: the same bytes in every call
        self.prepared = prepared
        self.enqueue = prepared.enqueue
        self.stream = 0
        self.data = prepared.params
        self.words = prepared.params.cast("Q")
        self.halves = prepared.params.cast("i")
        self.strides: tuple[int, int] | None = None
        self.calls = 0

    def set_stream(self, stream: int) -> None:
        """Enqueue on this stream from now on."""
        self.prepared.use_stream(stream)
        self.stream = stream

    def set_extents(self, places: _Places, problem: Problem) -> None:
        """Write what stays the same in every call."""
        extents = {
            ParamSource.TOKENS: problem.tokens,
            ParamSource.EXPERTS: problem.experts,
            ParamSource.HIDDEN: problem.hidden,
        }
        for source, place in places.halves:
            if source in extents:
                self.halves[place] = extents[source]

    def set_strides(self, places: _Places, strides: tuple[int, int]) -> None:
        """Write the row strides of x and weight."""
        for source, place in places.halves:
            if source is ParamSource.X_ROW_STRIDE:
                self.halves[place] = strides[0]
            elif source is ParamSource.WEIGHT_ROW_STRIDE:
                self.halves[place] = strides[1]
        self.strides = strides

    def set_extras(self, places: _Places, extras: Extras) -> None:
        """Write what the epilogue takes, without which a kernel would read address 0."""
        for source, offset in places.extras:
            if source not in extras:
                raise ValueError(f"the kernel takes {source.value}, and the call brings none")
            layout = "<Q" if source.kind is ParamKind.POINTER else "<f"
            struct.pack_into(layout, self.data, offset, extras[source])

    def repeat(self, places: _Places) -> None:
        """Write pointers again that the kernel takes twice."""
        for to, origin in places.again:
            self.words[to] = self.words[origin]
