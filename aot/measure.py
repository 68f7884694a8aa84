"""Measurements on a GPU: what a call costs by `timing`'s protocols, and whether it is right.

Stored kernels are loaded and launched as the runtime does it, from a store and without a compiler.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch.nn import functional

from .artifact import Artifact
from .devices import CudaDevices, Devices
from .driver import Driver
from .errors import DriverError, NotFoundError
from .key import CompileKey
from .launcher import Launcher, Operands
from .loader import ArtifactSource, Loader, Missing
from .problem import DType, Problem, Target
from .search import probe_key
from .tensors import DTYPES
from .timing import CALLS, MAX_ERROR, RUNS, WARMUPS, Call, Machine, Sample, Way, per_call

__all__ = ["GpuBench", "GpuLab", "GraphTimer", "Timer"]

COPY_BYTES = 1 << 30
COPY_CALLS = 4
COPY_REPLAYS = 10

TORCH_TYPES = {ours: dtype for dtype, ours in DTYPES.items()}

_NVRM = re.compile(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s")


class Timer(Protocol):
    """A clock for graphs."""

    def __call__(self, body: Call, *, calls: int, replays: int) -> Sequence[float]:
        """Microseconds of each replay of a graph of `body(0)` to `body(calls - 1)`."""


class GraphTimer:
    """Captures calls into a CUDA graph on a new stream; times replays by CUDA events.

    A new stream and `torch.cuda.graph` for each measurement: on one stream kept for all, and
    captured without it, an empty kernel behind a producer took 0.2 us in some graphs and 0.7 in
    others.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, body: Call, *, calls: int, replays: int) -> list[float]:
        """Microseconds of each replay, after a call outside the graph and three warm-up replays."""
        stream = _stream(self._device)
        with torch.cuda.stream(stream):
            body(0)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for number in range(calls):
                    body(number)
            for _ in range(WARMUPS):
                graph.replay()
            found = [_replay(graph, stream) for _ in range(replays)]
            graph.reset()
        return found


def _replay(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    begin, end = _event(), _event()
    begin.record(stream)
    graph.replay()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


class GpuLab:
    """One GPU with a store. Raises DriverError where there is no GPU or no driver.

    The seams `driver`, `devices` and `timer` are by default the machine's own.
    """

    def __init__(
        self,
        store: ArtifactSource,
        *,
        index: int = 0,
        driver: Driver | None = None,
        devices: Devices | None = None,
        timer: Timer | None = None,
    ) -> None:
        if devices is None:
            if not torch.cuda.is_available():
                raise DriverError(
                    "torch sees no GPU to measure on",
                    hint="run this on a machine with a GPU: llbf16-aot doctor tells what is there",
                )
            torch.cuda.set_device(index)
            devices = CudaDevices()
        self.store = store
        self.index = index
        self.devices = devices
        self.device = torch.device(devices.device_type, index)
        self.loader = Loader(store, "default", driver)
        self.loader.driver.bind_context(index)
        self.timer = GraphTimer(self.device) if timer is None else timer
        self._weights: tuple[tuple[int, int, DType], torch.Tensor] | None = None

    @property
    def target(self) -> Target:
        """The GPU's architecture."""
        return self.loader.target(self.index)

    def machine(self) -> Machine:
        """GPU, driver, and the versions of torch and the compiler of the kernels."""
        cuda = self.devices.device_type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else self.devices.device_type
        versions = {"llbf16-aot": _version("llbf16-aot"), "torch": str(torch.__version__)}
        found = self.store.get(probe_key("empty", self.target).digest())
        if isinstance(found, Artifact):
            versions |= {f"built with {k}": v for k, v in _toolchain(found).items()}
        return Machine(name, _driver_release(), versions)

    def copy_bytes_per_s(self) -> float:
        """Bytes read plus bytes written in a second by a large device-to-device copy."""
        # By a kernel: as a copy node of a graph it would run at two thirds of the bandwidth.
        source = torch.randn(COPY_BYTES // 4, dtype=torch.float32, device=self.device)
        copy = torch.empty_like(source)
        replays = self.timer(
            lambda _: _discard(torch.add(source, 0, out=copy)),
            calls=COPY_CALLS,
            replays=COPY_REPLAYS,
        )
        return 2 * COPY_BYTES / (per_call(replays, COPY_CALLS).us * 1e-6)

    def bench(
        self, hidden: int, experts: int, tokens: int, weight_dtype: DType = DType.BF16
    ) -> GpuBench:
        """Operands for a problem, x in bf16; weights of another shape or type are given up."""
        kind = (hidden, experts, weight_dtype)
        if self._weights is None or self._weights[0] != kind:
            self._weights = None
            dtype = TORCH_TYPES[weight_dtype]
            self._weights = (kind, _random(self.device, CALLS, experts, hidden, dtype=dtype))
        return GpuBench(self, self._weights[1], tokens)


class GpuBench:
    """One M, N and K on a GPU: x [M, K], weights [calls, N, K], out [M, N] fp32."""

    def __init__(self, lab: GpuLab, weights: torch.Tensor, tokens: int) -> None:
        _, experts, hidden = weights.shape
        self._lab = lab
        self._weights = weights
        self._problem = Problem(tokens, experts, hidden, weight_dtype=DTYPES[weights.dtype])
        self._source = _random(lab.device, tokens, hidden)
        self._x = self._source.clone()
        self._out = torch.empty((tokens, experts), dtype=torch.float32, device=lab.device)
        self._operands = [self._operand(weight, self._x) for weight in weights]
        self._producer: Call | None = None
        self._base_us: float | None = None

    def kernel(self, key: CompileKey) -> Call | str:
        """The stored kernel of a key on x and the weights, or why there is none."""
        found = self._lab.loader.load_key(key, self._problem, self._lab.index)
        if isinstance(found, Missing):
            return found.message
        return self._call(found, self._operands, self._out)

    def library(self) -> dict[str, Call]:
        """The library's products: a bf16 output, and an fp32 one where torch has it here.

        For fp32 weights the one that there is: x is cast to fp32 in each call.
        """
        x, weights = self._x, self._weights
        if weights.dtype is torch.float32:
            return {
                "F.linear": lambda i: _discard(functional.linear(x.float(), weights[i])),
            }
        calls: dict[str, Call] = {"F.linear": lambda i: _discard(functional.linear(x, weights[i]))}
        try:
            torch.mm(x, weights[0].t(), out_dtype=torch.float32)
        except (TypeError, NotImplementedError):
            # The keyword came with torch 2.8, its kernel for CUDA only.
            return calls
        calls["torch.mm"] = lambda i: _discard(torch.mm(x, weights[i].t(), out_dtype=torch.float32))
        return calls

    def compiled(self) -> Call | str:
        """`F.linear(x, w).float()` by torch.compile, or why it makes nothing of it."""
        x, weights = self._x, self._weights
        try:
            # It stops compiling a function after some shapes, and runs it as it is without a word.
            torch.compiler.reset()
            product = torch.compile(_linear_fp32, dynamic=False)
            product(x, weights[0])
        except Exception as error:  # whatever a missing compiler or its generated code raises
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return lambda i: _discard(product(x, weights[i]))

    def empty(self) -> Call:
        """A kernel that does nothing, with dependent launch."""
        return self._probe("empty")

    def settle(self, replays: int) -> None:
        """Measure anew what the producer costs alone."""
        producer = self._producing()
        times = self._lab.timer(producer, calls=CALLS, replays=replays)
        self._base_us = per_call(times, CALLS).us

    def time(self, call: Call, way: Way, replays: int) -> Sample:
        """What a call costs, by one of the protocols."""
        timer = self._lab.timer
        if way is Way.COLD:
            return per_call(timer(call, calls=CALLS, replays=replays), CALLS)
        if way is Way.HOT:
            return per_call(timer(lambda _: call(0), calls=CALLS, replays=replays), CALLS)
        producer = self._producing()
        if self._base_us is None:
            self.settle(replays)

        def pair(number: int) -> None:
            producer(number)
            call(number)

        times = timer(pair, calls=CALLS, replays=replays)
        return per_call(times, CALLS, base_us=self._base_us or 0.0)

    def fault(self, call: Call) -> str:
        """What is wrong with a kernel's results, on fresh inputs and a poisoned output."""
        self._x.copy_(_random(self._lab.device, *self._x.shape))
        weight = self._weights[0]
        weight.copy_(_random(self._lab.device, *weight.shape, dtype=weight.dtype))
        outs = []
        for _ in range(RUNS):
            self._out.fill_(float("nan"))
            call(0)
            outs.append(self._out.clone())
        exact = self._x.double() @ weight.double().t()
        results = torch.stack(outs)
        finite = torch.isfinite(results).all()
        error = (results[0].double() - exact).norm() / exact.norm()
        bits = results.view(torch.int32)
        same = (bits == bits[0]).flatten(1).all(1).sum()
        found = torch.stack((finite.double(), error, same.double())).tolist()
        if not found[0]:
            return "elements of the output are not finite or were not written"
        if not found[1] <= MAX_ERROR:
            return f"relative error against float64 is {found[1]:.2e}, above {MAX_ERROR:.0e}"
        if found[2] != RUNS:
            return f"other bits in {RUNS - int(found[2])} of {RUNS} runs on the same inputs"
        return ""

    def _producing(self) -> Call:
        if self._producer is None:
            self._producer = self._probe("producer")
        return self._producer

    def _probe(self, kind: Literal["producer", "empty"]) -> Call:
        lab = self._lab
        key = probe_key(kind, lab.target)
        problem = Problem(
            self._problem.tokens, self._problem.experts, self._problem.hidden, DType.BF16
        )
        found = lab.loader.load_key(key, problem, lab.index)
        if isinstance(found, Missing):
            raise NotFoundError(
                f"the store lacks the kernel that measurements need: {found.message}",
                hint=f"run: llbf16-aot build MANIFEST --probes --target {lab.target}",
            )
        operand = self._operand(self._weights[0], self._source)
        return self._call(found, [operand] * CALLS, self._x)

    def _operand(self, weight: torch.Tensor, x: torch.Tensor) -> Operands:
        hidden = self._problem.hidden
        return Operands(
            x.data_ptr(),
            weight.data_ptr(),
            self._problem.tokens,
            self._problem.experts,
            hidden,
            hidden,
            hidden,
            self._lab.index,
            weight_size=weight.element_size(),
        )

    def _call(self, launcher: Launcher, operands: list[Operands], out: torch.Tensor) -> Call:
        stream, index, address = self._lab.devices.stream, self._lab.index, out.data_ptr()
        return lambda i: launcher(stream(index), operands[i], address)


def _event() -> torch.cuda.Event:
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event  # torch leaves it without types
    return event(enable_timing=True)


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
    return stream(device)


def _linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x.to(weight.dtype), weight).float()


def _discard(result: object) -> None:
    """Drop a product: only what it cost counts."""
    del result


def _random(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers: zeros would hide faults, and can run faster than real data does."""
    return torch.randn(shape, dtype=dtype, device=device)


def _toolchain(artifact: Artifact) -> dict[str, str]:
    return artifact.record.provenance.toolchain


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _driver_release() -> str:
    """The driver's release, as 580.95.05, from the kernel module or its tool."""
    with contextlib.suppress(OSError):
        match = _NVRM.search(Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
        if match is not None:
            return match[1]
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
            return done.stdout.strip().partition("\n")[0] or "unknown"
    return "unknown"
