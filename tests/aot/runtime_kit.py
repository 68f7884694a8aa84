"""A runtime on the GPU of CPU memory, with what it is given: for all tests of the runtime."""

from __future__ import annotations

import torch
from fake_gpu import FakeDevices, FakeDriver, MemoryStore, artifact_for
from llbf16_aot.artifact import Artifact
from llbf16_aot.dispatch import dispatch, load_table
from llbf16_aot.problem import DType, Problem, Target
from llbf16_aot.runtime import OnMiss, Pdl, Runtime, Stats

DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}


def artifact(
    tokens: int,
    experts: int,
    hidden: int,
    *,
    out_dtype: torch.dtype = torch.float32,
    pdl: bool = True,
    target: str = "sm_90a",
) -> Artifact:
    problem = Problem(tokens, experts, hidden, DTYPES[out_dtype], pdl)
    where = Target.parse(target)
    return artifact_for(dispatch(problem, where, load_table("reference", where)))


def counted(
    *,
    hits: int,
    loads: int,
    misses: dict[str, int],
    fallbacks: int,
    library: int = 0,
    rejects: int = 0,
) -> Stats:
    return Stats(
        hits=hits,
        loads=loads,
        misses=misses,
        fallbacks=fallbacks,
        library=library,
        rejects=rejects,
    )


class Bench:
    """A runtime, and the store, driver and devices that it is given."""

    def __init__(self, *artifacts: Artifact, on_miss: OnMiss = "torch", pdl: Pdl = True) -> None:
        self.store = MemoryStore(artifacts)
        self.driver = FakeDriver(artifacts)
        self.devices = FakeDevices()
        self.runtime = Runtime(
            self.store,
            tuning="reference",
            pdl=pdl,
            on_miss=on_miss,
            driver=self.driver,
            devices=self.devices,
        )


def operands(tokens: int, experts: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * 1000 + experts)
    x = torch.randn((tokens, hidden), generator=generator).bfloat16()
    return x, torch.randn((experts, hidden), generator=generator).bfloat16()


def error_of(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Relative Frobenius error against float64."""
    exact = x.double() @ weight.double().t()
    return float((result.double() - exact).norm() / exact.norm())
