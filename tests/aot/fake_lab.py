"""A laboratory without a GPU: kernels of the fake GPU, and a clock that a price list drives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from fake_gpu import FakeDevices, FakeDriver, FakeLaunch, MemoryStore, artifact_for
from llbf16_aot.artifact import Artifact
from llbf16_aot.backends import ProbeConfig
from llbf16_aot.driver import Kernel, LaunchConfig
from llbf16_aot.errors import DriverError
from llbf16_aot.key import CompileKey
from llbf16_aot.measure import GpuLab
from llbf16_aot.problem import Problem, Target
from llbf16_aot.search import candidate_keys, probe_keys
from llbf16_aot.survey import CellKey
from torch.nn import functional

SM_90A = Target.parse("sm_90a")

Price = Callable[[CompileKey, LaunchConfig], float]

LIBRARY_US = 7.0
PRODUCER_US = 1.5
EMPTY_US = 0.75
FREE_US = 250.0


def candidates(cells: Iterable[CellKey]) -> list[Artifact]:
    """What a candidate build of these cells puts into a store."""
    problems = [
        Problem(tokens, experts, hidden, weight_dtype=weight_dtype)
        for hidden, experts, weight_dtype, tokens in cells
    ]
    keys = (*probe_keys([SM_90A]), *candidate_keys(problems, SM_90A))
    return [artifact_for(key) for key in keys]


class Clock:
    """Adds up prices. `jitter` is added to every second replay of a graph."""

    def __init__(self) -> None:
        self.us = 0.0
        self.timing = False
        self.jitter = 0.0
        self.graphs = 0

    def __call__(self, body: Callable[[int], None], *, calls: int, replays: int) -> Sequence[float]:
        self.graphs += 1
        self.timing = True
        self.us = 0.0
        try:
            for number in range(calls):
                body(number)
        finally:
            self.timing = False
        if not self.us:
            self.us = FREE_US * calls  # what has no price, as a copy
        return [self.us + self.jitter * (replay % 2) for replay in range(replays)]


class PricedDriver(FakeDriver):
    """Computes outside graphs; in graphs it only charges. `wrong` keys compute nonsense."""

    def __init__(self, artifacts: Iterable[Artifact], clock: Clock, price: Price) -> None:
        super().__init__(artifacts)
        self._clock = clock
        self._price = price
        self.wrong: Callable[[CompileKey], bool] = lambda key: False
        self.unsteady: Callable[[CompileKey], bool] = lambda key: False
        self.unlaunchable: Callable[[CompileKey], bool] = lambda key: False
        self.runs = 0

    def prepare(self, kernel: Kernel, config: LaunchConfig) -> FakeLaunch:
        compute = super().prepare(kernel, config)
        artifact = self.libraries[kernel - 0x1000]
        key = artifact.record.key

        def launch(stream: int, params: bytes) -> None:
            if self.unlaunchable(key):
                raise DriverError("cuLaunchKernelEx failed with CUDA_ERROR_INVALID_CLUSTER_SIZE")
            if self._clock.timing:
                self._clock.us += self._cost(key, config)
                return
            self.runs += 1
            if self.wrong(key):
                return
            compute(stream, params)
            if self.unsteady(key) and self.runs % 3 == 0:
                self._spoil(artifact, params)

        return FakeLaunch(config, launch)

    def _cost(self, key: CompileKey, config: LaunchConfig) -> float:
        if isinstance(key.config, ProbeConfig):
            return PRODUCER_US if key.config.kind == "producer" else EMPTY_US
        return self._price(key, config)

    def _spoil(self, artifact: Artifact, params: bytes) -> None:
        import ctypes

        from llbf16_aot.launch import ParamSource

        out = next(p for p in artifact.record.launch.params if p.source is ParamSource.OUT)
        address = int.from_bytes(params[out.offset_bytes : out.offset_bytes + 8], "little")
        bits = ctypes.c_uint32.from_address(address)
        bits.value ^= 1


def make_lab(
    monkeypatch: pytest.MonkeyPatch,
    artifacts: Iterable[Artifact],
    price: Price,
    *,
    library_us: Callable[[torch.Tensor], float] = lambda x: LIBRARY_US,
) -> tuple[GpuLab, PricedDriver, Clock]:
    """A lab over these artifacts, in which a launch costs its price and the library its own."""
    clock = Clock()
    held = list(artifacts)
    driver = PricedDriver(held, clock, price)
    real: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if clock.timing:
            clock.us += library_us(x)
            return x
        return real(x, weight)

    monkeypatch.setattr(functional, "linear", linear)
    lab = GpuLab(MemoryStore(held), driver=driver, devices=FakeDevices(), timer=clock)
    return lab, driver, clock
