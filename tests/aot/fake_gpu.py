"""A GPU of CPU memory: a driver that computes what a launch asks for, and devices to go with it.

It decodes the parameter buffer by the stored launch record and computes only what the grid covers,
so that a wrong offset, value or extent shows in the result.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from llbf16_aot.artifact import RECORD_SCHEMA, Artifact, Blob, Provenance, Record, Resources
from llbf16_aot.backends import BACKENDS, ProbeConfig
from llbf16_aot.driver import Kernel, LaunchConfig, Library, words_of
from llbf16_aot.errors import DriverError
from llbf16_aot.key import CompileKey, kernel_source_digest
from llbf16_aot.launch import EPILOGUE_PARAMS, Attribute, Extent, LaunchRecord, ParamSource
from llbf16_aot.problem import DType
from llbf16_aot.store import Miss, MissReason

TORCH_TYPES = {
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}


def artifact_for(key: CompileKey) -> Artifact:
    """An artifact as the builder would publish it, but for its bytes, which name the key."""
    backend = BACKENDS[key.backend]
    cubin = b"machine code of " + str(key).encode()
    launch = LaunchRecord.assemble(
        f"kernel_{Blob.of(cubin).digest[:8]}",
        backend.geometry(key.config),
        attributes=(Attribute.PROGRAMMATIC_STREAM_SERIALIZATION,) if key.pdl else (),
        sources=(*backend.PARAMS, *EPILOGUE_PARAMS[key.epilogue]),
    )
    return Artifact(
        Record(
            schema=RECORD_SCHEMA,
            key=key,
            launch=launch,
            resources=Resources(registers=32, static_shared_bytes=0, local_bytes=0),
            provenance=Provenance(
                builder_version="0",
                toolchain={},
                options=(),
                kernel_source_digest=kernel_source_digest(key.backend),
            ),
            cubin=Blob.of(cubin),
        ),
        cubin,
    )


class MemoryStore:
    """Artifacts in memory, misses for all else; counts how often each digest was asked for."""

    root = Path("/the/store")

    def __init__(self, artifacts: Iterable[Artifact] = ()) -> None:
        self.entries: dict[str, Artifact | Miss] = {a.digest: a for a in artifacts}
        self.asked: list[str] = []

    def get(self, digest: str) -> Artifact | Miss:
        self.asked.append(digest)
        return self.entries.get(digest) or Miss(digest, MissReason.ABSENT, "no such entry")


class FakeLaunch:
    """A prepared launch: its buffer starts as garbage, and no two threads may be in it at once."""

    def __init__(self, config: LaunchConfig, execute: Callable[[int, bytes], None]) -> None:
        self.params = memoryview(bytearray(b"\xa5" * words_of(config.params_size_bytes) * 8))
        self._size_bytes = config.params_size_bytes
        self._execute = execute
        self._busy = threading.Lock()
        self._stream = 0

    def use_stream(self, stream: int) -> None:
        self._stream = stream

    def check(self, code: int) -> None:
        if code:
            raise DriverError(f"launch failed with {code}")

    def enqueue(self) -> int:
        if not self._busy.acquire(blocking=False):
            raise DriverError("two threads use one prepared launch")
        try:
            self._execute(self._stream, bytes(self.params[: self._size_bytes]))
        finally:
            self._busy.release()
        return 0

    def __call__(self, stream: int, params: bytes) -> None:
        assert len(params) == self._size_bytes
        self.params[: len(params)] = params
        self.use_stream(stream)
        self.check(self.enqueue())


class FakeDriver:
    """Executes launches of the artifacts that it knows on CPU memory; counts and records calls."""

    def __init__(self, artifacts: Iterable[Artifact] = ()) -> None:
        self.capabilities = {0: (9, 0), 1: (10, 0)}
        self.contexts: set[int] = set()
        self.artifacts = {a.cubin: a for a in artifacts}
        self.params: tuple[tuple[int, int], ...] | None = None
        self.failing: set[str] = set()
        self.before_launch: Callable[[], None] = lambda: None
        self.libraries: dict[int, Artifact] = {}
        self.loads = 0
        self.unloads = 0
        self.ready: list[tuple[int, int]] = []
        self.bound: list[tuple[int, int]] = []
        self.launches: list[tuple[Artifact, LaunchConfig, int]] = []

    def device_count(self) -> int:
        return len(self.capabilities)

    def has_context(self, device: int) -> bool:
        return device in self.contexts

    def compute_capability(self, device: int) -> tuple[int, int]:
        self._may_fail("compute_capability")
        return self.capabilities[device]

    def bind_context(self, device: int) -> None:
        self.bound.append((threading.get_ident(), device))

    def load_library(self, cubin: bytes) -> Library:
        self._may_fail("load_library")
        self.loads += 1
        library = 0x2000 + self.loads
        self.libraries[library] = self.artifacts[cubin]
        return Library(library)

    def unload_library(self, library: Library) -> None:
        self.unloads += 1
        self._may_fail("unload_library")

    def get_kernel(self, library: Library, symbol: str) -> Kernel:
        if self.libraries[library].record.launch.symbol != symbol:
            raise DriverError(f"no symbol {symbol}")
        return Kernel(library + 0x1000)

    def param_info(self, kernel: Kernel) -> tuple[tuple[int, int], ...]:
        launch = self.libraries[kernel - 0x1000].record.launch
        return self.params or tuple((p.offset_bytes, p.size_bytes) for p in launch.params)

    def make_ready(self, kernel: Kernel, device: int, *, dynamic_shared_bytes: int) -> None:
        self._may_fail("make_ready")
        self.ready.append((device, dynamic_shared_bytes))

    def prepare(self, kernel: Kernel, config: LaunchConfig) -> FakeLaunch:
        artifact = self.libraries[kernel - 0x1000]

        def launch(stream: int, params: bytes) -> None:
            self.before_launch()
            self._may_fail("launch")
            execute(artifact, config, params)
            self.launches.append((artifact, config, stream))

        return FakeLaunch(config, launch)

    def _may_fail(self, call: str) -> None:
        if call in self.failing:
            raise DriverError(f"{call} failed")


class FakeDevices:
    """CPU memory as device 0; `now` is the current device, `captured` whether a graph records."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.now = 0
        self.captured = False
        self.guarded: list[int] = []
        self.at_capture_check: Callable[[], None] = lambda: None

    def current(self) -> int:
        return self.now

    @contextmanager
    def guard(self, index: int) -> Iterator[None]:
        before, self.now = self.now, index
        self.guarded.append(index)
        try:
            yield
        finally:
            self.now = before

    def stream(self, index: int) -> int:
        assert index == self.now
        return 0x77 + index

    def capturing(self) -> bool:
        self.at_capture_check()
        return self.captured

    def empty(
        self, shape: tuple[int, int], strides: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        return poison(torch.empty_strided(shape, strides, dtype=dtype))


def execute(artifact: Artifact, config: LaunchConfig, params: bytes) -> None:
    """The product that a parameter buffer describes, as far as the grid covers it."""
    record = artifact.record
    values = {
        p.source: int.from_bytes(
            params[p.offset_bytes : p.offset_bytes + p.size_bytes], "little", signed=True
        )
        for p in record.launch.params
    }
    key = record.key
    hidden = values.get(ParamSource.HIDDEN, getattr(key.config, "hidden", None))
    assert hidden is not None
    if isinstance(key.config, ProbeConfig):
        if key.config.kind == "producer":
            # Whole rows, as many as the grid has: the parameters do not tell their number.
            size_bytes = config.grid[1] * hidden * 2
            ctypes.memmove(values[ParamSource.OUT], values[ParamSource.X], size_bytes)
        return
    tokens, experts = values[ParamSource.TOKENS], values[ParamSource.EXPERTS]
    x = _rows(values[ParamSource.X], tokens, hidden, values[ParamSource.X_ROW_STRIDE], key.x_dtype)
    weight = _rows(
        values[ParamSource.WEIGHT],
        experts,
        hidden,
        values[ParamSource.WEIGHT_ROW_STRIDE],
        key.weight_dtype,
    )
    sums = x.double() @ weight.double().t()
    if ParamSource.BIAS in values:
        assert key.epilogue.bias_dtype is not None
        sums += _rows(values[ParamSource.BIAS], 1, experts, experts, key.epilogue.bias_dtype)
    if ParamSource.SCALE in values:
        sums *= struct.unpack("<f", struct.pack("<i", values[ParamSource.SCALE]))[0]
    result = sums.to(TORCH_TYPES[key.out_dtype])
    covered = {Extent.TOKENS: 0, Extent.EXPERTS: 0, Extent.ONE: 0}
    for dim, blocks in zip(record.launch.grid, config.grid, strict=True):
        covered[dim.extent] = blocks // dim.blocks * dim.tile
    size = key.out_dtype.size_bytes
    for row in range(min(tokens, covered[Extent.TOKENS])):
        columns = min(experts, covered[Extent.EXPERTS])
        line = result[row, :columns].contiguous()
        ctypes.memmove(
            values[ParamSource.OUT] + row * experts * size, line.data_ptr(), columns * size
        )


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, every byte of it 0xff: not a number in each of our types."""
    ctypes.memset(tensor.data_ptr(), 0xFF, tensor.numel() * tensor.element_size())
    return tensor


def _rows(address: int, rows: int, hidden: int, stride: int, dtype: DType) -> torch.Tensor:
    data = ctypes.string_at(address, ((rows - 1) * stride + hidden) * dtype.size_bytes)
    flat = torch.frombuffer(bytearray(data), dtype=TORCH_TYPES[dtype])
    return flat.as_strided((rows, hidden), (stride, 1))


def buffer_of(record: LaunchRecord, values: dict[ParamSource, int]) -> bytes:
    """A parameter buffer laid out parameter by parameter, gaps zero."""
    buffer = bytearray(record.params_size_bytes)
    for param in record.params:
        form = "<Q" if param.size_bytes == 8 else "<i"
        struct.pack_into(form, buffer, param.offset_bytes, values[param.source])
    return bytes(buffer)
