"""The runtime on a real GPU, with a store that was built on another machine.

Needs the store of `scripts/gpu_check.py manifests` in LLBF16_AOT_STORE; scripts/gpu_check.sh sets
all of it up.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import llbf16_aot
import pytest
import torch
from llbf16_aot.driver import CudaDriver
from llbf16_aot.errors import ColdCaptureError, DriverError, MissError
from llbf16_aot.problem import Target
from llbf16_aot.runtime import Runtime
from llbf16_aot.store import Miss, Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif("LLBF16_AOT_STORE" not in os.environ, reason="LLBF16_AOT_STORE is not set"),
]

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}


def operands(
    tokens: int, experts: int = 256, hidden: int = 7168, device: str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn((tokens, hidden), device=device).bfloat16()
    return x, torch.randn((experts, hidden), device=device).bfloat16()


def error_of(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    exact = x.double() @ weight.double().t()
    return float((result.double() - exact).norm() / exact.norm())


@pytest.fixture
def runtime() -> Runtime:
    return Runtime(on_miss="error")


@pytest.mark.parametrize("out_dtype", list(TOLERANCE))
def test_load_and_run_gives_router_logits_of_a_models_parameters(out_dtype: torch.dtype) -> None:
    """The two lines of the README must work: a Parameter, inference mode, no set-up."""
    for tokens in (1, 5, 16, 64):
        x, values = operands(tokens)
        weight = torch.nn.Parameter(values)
        with torch.inference_mode():
            logits = llbf16_aot.load_and_run(x, weight, out_dtype=out_dtype)
        assert (logits.dtype, logits.shape) == (out_dtype, (tokens, 256))
        assert error_of(logits, x, values) <= TOLERANCE[out_dtype]


def test_every_stored_kernel_of_this_gpu_is_taken_by_the_driver_as_recorded() -> None:
    """A symbol or a parameter layout that only the ELF reader believes in fails at the launch."""
    store = Store(Path(os.environ["LLBF16_AOT_STORE"]))
    driver = CudaDriver()
    driver.bind_context(0)
    target = str(Target(*driver.compute_capability(0), "a"))
    taken = 0
    for digest in store.digests():
        artifact = store.get(digest)
        assert not isinstance(artifact, Miss), artifact
        record = artifact.record
        if record.key.target != target:
            continue
        library = driver.load_library(artifact.cubin)
        kernel = driver.get_kernel(library, record.launch.symbol)
        wanted = tuple((p.offset_bytes, p.size_bytes) for p in record.launch.params)
        assert driver.param_info(kernel) == wanted, record.key
        driver.make_ready(kernel, 0, dynamic_shared_bytes=record.launch.dynamic_shared_bytes)
        driver.unload_library(library)
        taken += 1
    assert taken > 0


def test_the_driver_names_its_errors() -> None:
    """On the real driver too a wrong symbol must end as our error with the driver's own words."""
    store = Store(Path(os.environ["LLBF16_AOT_STORE"]))
    artifact = store.get(store.digests()[0])
    assert not isinstance(artifact, Miss)
    driver = CudaDriver()
    library = driver.load_library(artifact.cubin)
    with pytest.raises(DriverError, match=r"cuLibraryGetKernel\(none\) failed with CUDA_ERROR_"):
        driver.get_kernel(library, "none")


def test_a_thread_that_made_no_cuda_call_can_launch(runtime: Runtime) -> None:
    """A fresh thread has no context: the launch on the default stream would be refused."""
    x, weight = operands(3)
    out = torch.empty((3, 256), device="cuda")
    runtime.run(x, weight, out=out)
    torch.cuda.synchronize()
    out.fill_(float("nan"))
    torch.cuda.synchronize()
    raised: list[BaseException] = []

    def work() -> None:
        try:
            runtime.run(x, weight, out=out)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert raised == []
    assert error_of(out, x, weight) <= 2e-6


def test_sixteen_threads_with_their_own_streams_load_once_and_get_right_answers() -> None:
    """A parameter buffer or a load that two threads share mixes up their tensors."""
    runtime = Runtime(on_miss="error")
    inputs = [operands(5) for _ in range(16)]
    torch.cuda.synchronize()
    start = threading.Barrier(16)
    outputs: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            start.wait(60)
            for _ in range(50):
                outputs[number] = runtime.run(*inputs[number])
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outputs) == list(range(16))
    for number, (x, weight) in enumerate(inputs):
        assert error_of(outputs[number], x, weight) <= 2e-6
    stats = runtime.stats()
    assert (stats.hits, stats.loads, stats.fallbacks) == (800, 1, 0)


def test_the_kernel_runs_on_torchs_current_stream(runtime: Runtime) -> None:
    """Launched on another stream it would not wait for what the caller's stream still computes."""
    x, weight = operands(4)
    expected = runtime.run(x, weight)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.full_like(x, float("nan"))
        torch.cuda._sleep(20_000_000)  # 10 ms of GPU time: the order is the stream's, not luck
        late.copy_(x)
        result = runtime.run(late, weight)
    stream.synchronize()
    assert torch.equal(result, expected)


def test_a_cold_kernel_is_refused_in_a_capture_and_a_warm_one_replays() -> None:
    """Loading code in a capture invalidates it; a fallback captured in its place stays for good."""
    runtime = Runtime(on_miss="error")
    x, weight = operands(2)

    def capture_cold() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")
            runtime.run(x, weight)

    with pytest.raises(ColdCaptureError):
        capture_cold()
    torch.cuda.synchronize()
    out = torch.empty((2, 256), device="cuda")
    runtime.run(x, weight, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runtime.run(x, weight, out=out)
    out.fill_(float("nan"))
    graph.replay()
    assert error_of(out, x, weight) <= 2e-6


@pytest.mark.parametrize("out_dtype", list(TOLERANCE))
def test_the_fallback_keeps_the_accuracy_of_each_output_type(out_dtype: torch.dtype) -> None:
    """A prefill routed with rounded logits would choose other experts than its decode."""
    runtime = Runtime()
    for tokens in (257, 300):
        x, weight = operands(tokens)
        result = runtime.run(x, weight, out_dtype=out_dtype)
        assert (result.dtype, result.shape) == (out_dtype, (tokens, 256))
        # cuBLAS promises no more than fp32 accumulators; rounded to bf16 it would be 1.6e-3.
        assert error_of(result, x, weight) <= max(1e-5, TOLERANCE[out_dtype])
    stats = runtime.stats()
    assert (stats.hits, stats.library, stats.fallbacks, stats.misses) == (0, 2, 0, {})


def test_the_fallback_uses_torchs_own_widening_product_where_it_exists() -> None:
    """Where the keyword is understood and fails, every prefill copies its weights to fp32."""
    x, weight = operands(300)
    try:
        torch.mm(x, weight.t(), out_dtype=torch.float32)
    except TypeError:
        pytest.skip(f"torch {torch.__version__} has no out_dtype")
    runtime = Runtime()
    runtime.run(x, weight)
    assert runtime._torch._mm_widens


def test_a_missing_kernel_names_itself_and_the_command() -> None:
    """The message is all that an operator sees of a store that was built for something else."""
    runtime = Runtime(on_miss="error")
    with pytest.raises(MissError, match=r"no kernel for M=1 N=8 K=40 .*absent") as raised:
        runtime.run(*operands(1, 8, 40))
    assert "llbf16-aot build MANIFEST --target sm_" in raised.value.hint


def test_a_weight_written_just_before_its_first_call_is_read_as_written() -> None:
    """Launched ahead of the copy, the kernel takes the weights that were there before."""
    runtime = Runtime(on_miss="error")
    x, first = operands(4)
    runtime.run(x, first)
    for number in range(50):
        weight = torch.zeros_like(first)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000)  # the copy is still to come when the call is made
        weight.data.copy_(first * (number + 1))
        result = runtime.run(x, weight)
        assert error_of(result, x, weight) <= 2e-6, number
        torch.cuda._sleep(200_000)
        weight.data.copy_(first * -1)
        runtime.weights_updated(weight)
        result = runtime.run(x, weight)
        assert error_of(result, x, weight) <= 2e-6, number


def test_the_ordinary_launch_and_the_dependent_one_give_the_same_bits() -> None:
    """The wait inside a kernel must be nothing where there is nothing to wait for."""
    runtime = Runtime(on_miss="error")
    for tokens in (1, 3, 5, 8, 16):
        x, weight = operands(tokens)
        ordinary = runtime.run(x, weight)
        assert torch.equal(runtime.run(x, weight), ordinary)
        assert torch.equal(runtime.run(x, weight, pdl=True), ordinary)
        runtime.weights_updated()
        assert torch.equal(runtime.run(x, weight), ordinary)


def test_a_preloaded_and_frozen_runtime_captures_its_first_call() -> None:
    """Engines capture right after the load: nothing may be left to do at the first call."""
    runtime = Runtime(on_miss="error")
    report = runtime.preload("dsv4")
    assert report.ok
    assert torch.cuda.current_device() in report.devices
    runtime.freeze()
    for tokens in (1, 5, 16):
        x, weight = operands(tokens, 384)
        out = torch.empty((tokens, 384), device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runtime.run(x, weight, out=out)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            out.fill_(float("nan"))
            graph.replay()
            assert error_of(out, x, weight) <= 2e-6
    assert runtime.stats().fallbacks == 0


def test_the_operator_works_in_torch_compile_and_in_a_graph() -> None:
    """A fake that is wrong of strides or types shows in the compiled graph only."""
    import llbf16_aot.ops  # noqa: F401 - registers the operators

    x, weight = operands(3)
    with torch.inference_mode():
        torch.library.opcheck(torch.ops.llbf16.router_gemm.default, (x, weight))
        out = torch.empty((3, 256), device="cuda")
        torch.library.opcheck(torch.ops.llbf16.router_gemm_out.default, (x, weight, out))

    def route(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = torch.ops.llbf16.router_gemm(x * 2, weight)
        return logits

    compiled = torch.compile(route, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (2, 5, 16, 70):
            x, weight = operands(tokens)
            assert error_of(compiled(x, weight), x * 2, weight) <= 1e-5
            if tokens <= 16:
                assert torch.equal(compiled(x, weight), route(x, weight))


def test_a_warm_call_is_served_with_an_output_and_in_another_mode() -> None:
    """The short way of a call must recognise CUDA tensors as the CPU tests recognise theirs."""
    runtime = Runtime(on_miss="error")
    x, values = operands(4)
    weight = torch.nn.Parameter(values)
    out = torch.empty((4, 256), device="cuda")
    for _ in range(3):
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                assert error_of(runtime.run(x, weight), x, values) <= 2e-6
                out.fill_(float("nan"))
                assert runtime.run(x, weight, out=out) is out
                assert error_of(out, x, values) <= 2e-6
        with pytest.raises(TypeError, match="weight requires grad"):
            runtime.run(x, weight)
    routes = runtime._weights[id(weight)].routes
    assert all(type(r.admits).__name__ == "builtin_function_or_method" for r in routes.values())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
def test_tensors_of_another_gpu_are_computed_there(runtime: Runtime) -> None:
    """Launched in the current device's context the kernel would read another GPU's addresses."""
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x, weight = operands(3, device=device)
        result = runtime.run(x, weight)
        assert result.device == x.device
        assert error_of(result, x, weight) <= 2e-6
        assert torch.cuda.current_device() == 0


def test_no_compiler_was_imported() -> None:
    """Everything above must have worked without it."""
    assert not [name for name in sys.modules if name.split(".")[0] == "cutlass"]
