"""The torch operators: what torch.compile may rely on, tried on the CPU."""

from __future__ import annotations

import subprocess
import sys

import llbf16_aot
import pytest
import torch
from llbf16_aot import ops
from llbf16_aot import runtime as runtime_module
from runtime_kit import DTYPES, TOLERANCE, Bench, artifact, error_of, operands

GEMM = torch.ops.llbf16.router_gemm
GEMM_OUT = torch.ops.llbf16.router_gemm_out


@pytest.mark.parametrize("out_dtype", [None, *DTYPES])
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_opcheck_passes(tokens: int, out_dtype: torch.dtype | None) -> None:
    """A fake that differs from the real thing, or an alias, breaks graphs in the compiler."""
    x, weight = operands(max(tokens, 1), 8, 64)
    torch.library.opcheck(GEMM.default, (x[:tokens], weight, out_dtype))
    out = torch.empty((tokens, 8), dtype=out_dtype or torch.float32)
    torch.library.opcheck(GEMM_OUT.default, (x[:tokens], weight, out))


@pytest.mark.parametrize("out_dtype", list(DTYPES))
def test_the_operators_give_the_product(out_dtype: torch.dtype) -> None:
    """A type that is lost on the way gives logits that look right and are rounded."""
    x, weight = operands(5, 12, 2304)
    for result in (
        GEMM(x, weight, out_dtype),
        GEMM(x, weight, out_dtype=out_dtype),
        ops.router_gemm(x, weight, out_dtype),
        llbf16_aot.router_gemm_out(x, weight, torch.empty((5, 12), dtype=out_dtype)),
    ):
        assert result.dtype is out_dtype
        assert error_of(result, x, weight) <= TOLERANCE[out_dtype]
    assert GEMM(x, weight).dtype is torch.float32


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "extras",
    [
        (None, None),
        (torch.arange(8.0), None),
        (torch.arange(8.0).bfloat16(), None),
        (None, 3.0),
    ],
)
def test_weights_of_fp32_biases_and_scales_pass_through_a_compiled_graph(
    x_dtype: torch.dtype, extras: tuple[torch.Tensor | None, float | None]
) -> None:
    """Taken eagerly and refused while traced, a router works until somebody compiles the model."""
    x, weight = operands(3, 8, 64)
    x, weight = x.to(x_dtype), weight.float()
    bias, scale = extras
    torch.library.opcheck(GEMM.default, (x, weight, None, bias, scale))
    torch.library.opcheck(GEMM_OUT.default, (x, weight, torch.empty(3, 8), bias, scale))

    def route(x: torch.Tensor) -> torch.Tensor:
        return ops.router_gemm(x, weight, bias=bias, scale=scale)

    exact = x.double() @ weight.double().t()
    exact = exact + bias.double() if bias is not None else exact * (scale or 1.0)
    for result in (route(x), torch.compile(route, fullgraph=True, backend="aot_eager")(x)):
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_graph_serves_every_number_of_tokens(backend: str) -> None:
    """A graph that froze M, or broke at the operator, compiles anew in the middle of a request."""
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def route(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = GEMM(x * 2, weight).softmax(-1)
        return logits

    compiled = torch.compile(route, fullgraph=True, dynamic=True, backend=counting)
    for tokens in (2, 3, 5, 17, 70, 64):
        x, weight = operands(tokens, 8, 64)
        torch.testing.assert_close(compiled(x, weight), route(x, weight))
    assert graphs == 1


def test_a_compiled_graph_may_write_into_an_output() -> None:
    """Taken for a function without effects, the compiler drops the call or moves it."""

    def route(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        GEMM_OUT(x, weight, out)
        first = out.sum()
        GEMM_OUT(x * 2, weight, out)
        return first + out.sum()

    compiled = torch.compile(route, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (2, 9):
        x, weight = operands(tokens, 8, 64)
        mine, theirs = torch.empty(tokens, 8), torch.empty(tokens, 8)
        torch.testing.assert_close(compiled(x, weight, mine), route(x, weight, theirs))
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w: (x.float(), w), "x has dtype torch.float32"),
        (lambda x, w: (x, w, None, torch.zeros(8).half()), "bias has dtype torch.float16"),
        (lambda x, w: (x, w, None, torch.zeros(7)), "bias has (shape|N)"),
        (lambda x, w: (x, w, None, torch.zeros(8, 1)), "bias has (shape|2 dim)"),
        (lambda x, w: (x, w, None, torch.zeros(8), 2.0), "bias and scale are both given"),
        (lambda x, w: (x, w.half()), "weight has dtype torch.float16"),
        (lambda x, w: (x[0], w), r"x has shape|x has 1 dimensions"),
        (lambda x, w: (x[:, :56], w), "x has K = 56"),
        (lambda x, w: (x[:, :60].contiguous(), w[:, :60].contiguous()), "K = 60, must be a mult"),
        (lambda x, w: (x, w, torch.float64), "out_dtype is torch.float64, must be one of"),
    ],
)
def test_malformed_calls_are_refused_when_run_and_when_traced(
    change: object, message: str, traced: bool
) -> None:
    """A fake that lets a wrong call pass makes a graph that fails far from where it was written."""
    arguments = change(*operands(3, 8, 64))  # type: ignore[operator]
    if not traced:
        with pytest.raises((TypeError, ValueError), match=message):
            GEMM(*arguments)
        return
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            GEMM(*fakes)


def test_a_traced_output_must_have_the_shape_and_type_of_the_result() -> None:
    """Too small an output would be written past its end by a graph that nothing checks."""
    x, weight = operands(3, 8, 64)
    with torch._subclasses.FakeTensorMode() as mode:
        fake_x, fake_weight = mode.from_tensor(x), mode.from_tensor(weight)
        for out, message in (
            (torch.empty(2, 8), "out has shape"),
            (torch.empty(3, 9), "out has shape"),
            (torch.empty(24), "out has 1 dimensions"),
            (torch.empty((3, 8), dtype=torch.float64), "out_dtype is torch.float64"),
        ):
            with pytest.raises((RuntimeError, TypeError), match=message):
                GEMM_OUT(fake_x, fake_weight, out)


def test_on_a_gpu_the_operators_are_calls_of_the_process_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel is chosen inside: a graph for two tokens serves five with the kernel for five."""
    bench = Bench(artifact(2, 8, 64), artifact(5, 8, 64, out_dtype=torch.float16), on_miss="error")
    monkeypatch.setattr(runtime_module._Process, "runtime", bench.runtime)
    x, weight = operands(5, 8, 64)
    assert ops._cuda(x[:2], weight).dtype is torch.float32
    assert ops._cuda(x, weight, torch.float16).dtype is torch.float16
    out = torch.empty((5, 8), dtype=torch.float16)
    ops._cuda_out(x, weight, out)
    assert error_of(out, x, weight) <= TOLERANCE[torch.float16]
    kinds = [a.record.key.out_dtype.value for a, _, _ in bench.driver.launches]
    assert kinds == ["fp32", "fp16", "fp16"]


def test_the_operators_are_registered_for_cuda() -> None:
    """Registered for the CPU only, the first call on a GPU is an error of the dispatcher."""
    for name in ("llbf16::router_gemm", "llbf16::router_gemm_out"):
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)


def test_importing_twice_or_reloading_defines_the_operators_once() -> None:
    """A second definition is an error of torch: notebooks and plug-ins reload modules."""
    program = """
import importlib, sys, torch
import llbf16_aot.ops as ops
first = torch.ops.llbf16.router_gemm.default
ops._register()
from llbf16_aot import router_gemm
assert torch.ops.llbf16.router_gemm.default is first
x = torch.ones((2, 64), dtype=torch.bfloat16)
print(router_gemm(x, x).tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "[[64.0, 64.0], [64.0, 64.0]]\n"
