"""GateLinear on a real GPU: each tier's logits, under torch.compile and in graphs.

Needs kernels of sm_90a or newer for K 7168, N 256 and M 4, 16 and 64 with fp32 logits, dependent
launch on, in LLBF16_AOT_STORE; those for fp32 weights are tested where they are stored.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest
import torch
from llbf16_aot.gate import GateLinear
from llbf16_aot.key import CompileKey
from llbf16_aot.problem import DType, Problem
from llbf16_aot.runtime import Runtime
from llbf16_aot.tiers import Tier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif("LLBF16_AOT_STORE" not in os.environ, reason="LLBF16_AOT_STORE is not set"),
]

HIDDEN, EXPERTS = 7168, 256
BF16, FP32 = torch.bfloat16, torch.float32


def gate_of(
    runtime: Runtime, dtype: torch.dtype = BF16, *, bias: torch.dtype | None = None
) -> GateLinear:
    gate = GateLinear(
        HIDDEN,
        EXPERTS,
        bias=bias is not None,
        out_dtype=FP32,
        weight_dtype=dtype,
        device="cuda",
        runtime=runtime,
    ).requires_grad_(False)
    gate.weight.normal_()
    if bias is not None:
        gate.bias = torch.nn.Parameter(torch.randn(EXPERTS, device="cuda").to(bias), False)
    return gate


def tokens_of(count: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn((count, HIDDEN), device="cuda").to(dtype)


def error_of(logits: torch.Tensor, x: torch.Tensor, gate: GateLinear) -> float:
    exact = x.double() @ gate.weight.double().t()
    if gate.bias is not None:
        exact = exact + gate.bias.double()
    return float((logits.double() - exact).norm() / exact.norm())


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.mark.parametrize("tokens", [4, 16, 64])
def test_small_batches_take_the_stored_kernel(runtime: Runtime, tokens: int) -> None:
    """The whole way from a module's parameter to the logits of a cubin."""
    gate, x = gate_of(runtime), tokens_of(tokens)
    explained = gate.explain(x)
    assert error_of(gate(x), x, gate) <= 2e-6
    stats = runtime.stats()
    if explained.tier is Tier.BF16:
        assert (stats.hits, stats.fallbacks) == (1, 0)
    else:
        assert "the library is faster here" in explained.reason(Tier.BF16), str(explained)
        assert (stats.hits, stats.library) == (0, 1)


def test_large_batches_are_widened_by_the_library(runtime: Runtime) -> None:
    """`widens` asks torch's dispatcher, which must know the product on CUDA."""
    gate, x = gate_of(runtime), tokens_of(300)
    assert gate.explain(x).tier is Tier.CUBLAS
    assert error_of(gate(x), x, gate) <= 1e-5
    assert runtime.stats().hits == 0


@pytest.mark.parametrize("tokens", [4, 64])
@pytest.mark.parametrize("x_dtype", [BF16, FP32])
def test_fp32_weights_are_computed_in_fp32(
    runtime: Runtime, tokens: int, x_dtype: torch.dtype
) -> None:
    """Read as bf16, or cast to it, fp32 weights give other experts."""
    gate, x = gate_of(runtime, FP32), tokens_of(tokens, x_dtype)
    explained = gate.explain(x)
    assert explained.tier in (Tier.FP32, Tier.BF16X3, Tier.LINEAR), str(explained)
    problem = Problem(
        tokens,
        EXPERTS,
        HIDDEN,
        x_dtype=DType.BF16 if x_dtype is BF16 else DType.FP32,
        weight_dtype=DType.FP32,
    )
    stored = tokens <= 32 or x_dtype is BF16
    if stored and isinstance(runtime.lookup(problem, 0), CompileKey):
        assert explained.tier in (Tier.FP32, Tier.BF16X3), str(explained)
    assert error_of(gate(x), x, gate) <= 5e-6
    assert (runtime.stats().hits == 1) == (explained.tier is not Tier.LINEAR)


@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float16])
def test_a_bias_is_added(runtime: Runtime, dtype: torch.dtype) -> None:
    """By the kernel, by torch after it, or by the fallback: never not at all, never twice."""
    gate, x = gate_of(runtime, bias=dtype), tokens_of(4)
    assert gate.explain(x).bias
    assert error_of(gate(x), x, gate) <= 2e-6


def test_a_captured_gate_replays_with_new_inputs(runtime: Runtime) -> None:
    """A preloaded gate must be capturable at once, and a graph must read the x of its replay."""
    gate, x = gate_of(runtime), tokens_of(16)
    report = gate.preload([16])
    assert report is not None
    assert report.ok
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        logits = gate(x)
    for _ in range(3):
        x.copy_(tokens_of(16))
        graph.replay()
        assert error_of(logits, x, gate) <= 2e-6


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_gate_serves_every_batch_from_one_graph(runtime: Runtime, mode: str) -> None:
    """Frozen at its trace's M, a graph launches one kernel for all."""
    gate = gate_of(runtime)
    gate.preload([4, 16, 64])

    def scores(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = gate(x * 1.0)
        return result

    torch._dynamo.reset()
    compiled = torch.compile(scores, fullgraph=True, dynamic=mode == "default", mode=mode)
    with torch.inference_mode():
        for tokens in (4, 64, 300, 16, 4):
            for _ in range(3):
                x = tokens_of(tokens)
                assert error_of(compiled(x).clone(), x, gate) <= 1e-5


@pytest.mark.parametrize(
    "change",
    [
        lambda gate: gate.half(),
        lambda gate: gate.cpu(),
        lambda gate: setattr(gate.weight, "data", gate.weight.data.t().contiguous().t()),
    ],
)
def test_a_gate_that_changes_leaves_the_kernel(
    runtime: Runtime, change: Callable[[GateLinear], object]
) -> None:
    """An address of before the move is another tensor's, or nobody's."""
    gate, x = gate_of(runtime), tokens_of(4)
    gate(x)
    hits = runtime.stats().hits
    twin = copy.deepcopy(gate)
    change(gate)
    x_there = x.to(gate.weight.device)
    assert error_of(gate(x_there), x_there, gate) <= 3e-3
    assert runtime.stats().hits == hits
    assert error_of(twin(x), x, twin) <= 2e-6
