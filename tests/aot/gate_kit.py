"""Gates on the GPU of CPU memory, and a runtime that takes fp32 weights: for tests of gates."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from fake_gpu import FakeDevices, FakeDriver, MemoryStore
from llbf16_aot import tiers
from llbf16_aot.dispatch import dispatch, load_table
from llbf16_aot.errors import LibraryChosenError
from llbf16_aot.gate import GateLinear
from llbf16_aot.key import CompileKey
from llbf16_aot.loader import LIBRARY, Missing
from llbf16_aot.problem import FEW_TOKENS, OPERAND_TOKENS, DType, Problem, Target
from llbf16_aot.runtime import OnMiss, Pdl, Runtime
from llbf16_aot.wanted import PreloadReport, Wanted
from runtime_kit import DTYPES

Operands = tuple[torch.Tensor, torch.Tensor]


class Ledger(Runtime):
    """A runtime that has every kernel of its tables, computes in fp64 and notes what it is given.

    `calls` are those that a kernel would compute, `library` holds the M of all others.
    Takes what `OPERAND_TOKENS` names and fails the test for anything else: whatever reaches it is
    what a kernel would read.
    """

    def __init__(self, *, capability: tuple[int, int] = (9, 0), on_miss: OnMiss = "torch") -> None:
        super().__init__(
            MemoryStore(),
            driver=FakeDriver(),
            devices=FakeDevices(),
            on_miss=on_miss,
            tuning="default",
        )
        self.shape = capability
        self.calls: list[tuple[int, torch.dtype, torch.dtype, torch.dtype]] = []
        self.library: list[int] = []
        self.biases: list[torch.dtype] = []
        self.absent: set[int] = set()
        self.wanted: list[CompileKey] = []
        self.captures = False

    def capability(self, device: int) -> tuple[int, int]:
        return self.shape

    def capturing(self) -> bool:
        return self.captures

    def lookup(self, problem: Problem, device: int) -> CompileKey | Missing:
        if problem.tokens in self.absent:
            return Missing("subject", "absent", f"no kernel for {problem}: absent", "build it")
        where = Target.parse("sm_90a")
        try:
            return dispatch(problem, where, load_table("reference", where))
        except LibraryChosenError as error:
            return Missing("subject", LIBRARY, f"no kernel for {problem}: {error.message}", "")

    def preload(self, what: Wanted, *, devices: Iterable[int] | None = None) -> PreloadReport:
        assert not isinstance(what, str)
        self.wanted += [one for one in what if isinstance(one, CompileKey)]  # type: ignore[union-attr]
        return PreloadReport(devices=(0,), deferred=(), wanted=0, loads=0, library=0, missing=())

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.float32,
        pdl: Pdl | None = None,
        bias: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        assert scale is None
        limit = OPERAND_TOKENS[DTYPES[x.dtype], DTYPES[weight.dtype]]
        assert 0 < x.shape[0] <= limit
        for tensor in (x, weight):
            assert tensor.dim() == 2
            assert tensor.stride(1) == 1
            assert tensor.data_ptr() % 16 == 0
            assert tensor.shape[0] == 1 or tensor.stride(0) * tensor.element_size() % 16 == 0
        if weight.dtype is torch.bfloat16 and x.shape[0] > FEW_TOKENS:
            self.library.append(x.shape[0])
        else:
            self.calls.append((x.shape[0], x.dtype, weight.dtype, out_dtype))
        sums = x.double() @ weight.double().t()
        if bias is not None:
            assert bias.dtype in (torch.float32, torch.bfloat16)
            assert bias.shape == (weight.shape[0],)
            self.biases.append(bias.dtype)
            sums = sums + bias.double()
        return sums.to(out_dtype)


@pytest.fixture
def fp32_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gates believe that the runtime takes every pair that kernels exist for."""

    def takes(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
        return (DTYPES[x_dtype], DTYPES[weight_dtype]) in OPERAND_TOKENS

    monkeypatch.setattr(tiers, "takes", takes)


def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What torch.mm with out_dtype gives on a GPU."""
    assert x.dtype is weight.dtype is torch.bfloat16
    return (x.double() @ weight.double().t()).float()


@pytest.fixture
def widening(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gives the CPU the widening product that CUDA has; the list holds the M of each call."""
    calls: list[int] = []

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape[0])
        return wide_product(x, weight)

    monkeypatch.setattr(tiers, "widens", lambda device_type: True)
    monkeypatch.setattr(tiers, "widening_product", product)
    return calls


def gate_of(
    weight: torch.Tensor, bias: torch.Tensor | None = None, **options: object
) -> GateLinear:
    """A gate on these values, for inference."""
    return GateLinear.of(
        torch.nn.Parameter(weight, requires_grad=False),
        None if bias is None else torch.nn.Parameter(bias, requires_grad=False),
        **options,  # type: ignore[arg-type]
    )


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def error_of(
    result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> float:
    """Relative Frobenius error against float64."""
    weight = weight.detach()
    bias = None if bias is None else bias.detach()
    exact = x.double() @ weight.double().t()
    if bias is not None:
        exact = exact + bias.double()
    assert result.shape == exact.shape
    return float((result.double() - exact).norm() / exact.norm())


def dtype_of(dtype: torch.dtype) -> DType:
    return DTYPES[dtype]
