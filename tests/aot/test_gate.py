"""GateLinear as a module: loading, moving, copying, compiling, deciding anew when it must."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import llbf16_aot
import pytest
import torch
from gate_kit import Ledger, error_of, fp32_weights, gate_of, random, widening
from llbf16_aot import gate as gate_module
from llbf16_aot import tiers
from llbf16_aot.errors import ColdCaptureError
from llbf16_aot.gate import GateLinear, register_kernels
from llbf16_aot.tiers import Kernels, Plan, Tier
from runtime_kit import Bench, artifact
from torch import nn

__all__ = ["fp32_weights", "widening"]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The weight's dtype of every decision that is made."""
    made: list[torch.dtype] = []
    init = Plan.__init__

    def noted(
        self: Plan, kernels: Kernels, weight: torch.Tensor, *args: object, **kw: object
    ) -> None:
        made.append(weight.dtype)
        init(self, kernels, weight, *args, **kw)  # type: ignore[arg-type]

    monkeypatch.setattr(Plan, "__init__", noted)
    return made


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- checkpoints


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_a_linear_layer_loads_with_its_dtype_converted(bias: bool) -> None:
    """Other keys, extra state or a refused dtype would need every checkpoint to be converted."""
    linear = nn.Linear(64, 8, bias=bias)
    gate = GateLinear(64, 8, bias=bias, weight_dtype=BF16)
    assert list(gate.state_dict()) == list(linear.state_dict())
    gate.load_state_dict(linear.state_dict())
    assert torch.equal(gate.weight, linear.weight.bfloat16())
    assert gate.weight.dtype is BF16
    if bias:
        assert torch.equal(gate.bias, linear.bias.bfloat16())  # type: ignore[arg-type]
    back = nn.Linear(64, 8, bias=bias)
    back.load_state_dict(gate.state_dict())
    assert torch.equal(back.weight, gate.weight.float())
    wrong = {**linear.state_dict(), "weight": torch.zeros(8, 72)}
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        gate.load_state_dict(wrong)


def test_a_gate_made_on_meta_takes_its_parameters_from_a_checkpoint() -> None:
    """Engines build the model without memory and assign the checkpoint's tensors."""
    bench = Bench(artifact(4, 8, 64), on_miss="error")
    gate = GateLinear(
        64, 8, out_dtype=FP32, weight_dtype=BF16, device="meta", runtime=bench.runtime
    )
    assert gate(torch.empty(4, 64, dtype=BF16, device="meta")).device.type == "meta"
    weight = random(8, 64)
    gate.load_state_dict({"weight": weight}, assign=True)
    x = random(4, 64, seed=1)
    with torch.inference_mode():
        assert error_of(gate(x), x, weight) <= 2e-6
    assert bench.runtime.stats().hits == 1
    other = GateLinear(64, 8, weight_dtype=BF16, device="meta").to_empty(device="cpu")
    other.reset_parameters()
    assert other.weight.abs().max() <= 1 / 8
    assert other.weight.abs().max() > 0


def test_initial_values_are_those_of_a_linear_layer() -> None:
    """A gate in a model that is trained from scratch must start where nn.Linear starts."""
    torch.manual_seed(5)
    linear = nn.Linear(64, 8)
    torch.manual_seed(5)
    gate = GateLinear(64, 8, bias=True)
    assert torch.equal(gate.weight, linear.weight)
    assert torch.equal(gate.bias, linear.bias)  # type: ignore[arg-type]
    torch.manual_seed(5)
    gate.reset_parameters()
    assert torch.equal(gate.weight, linear.weight)


def test_tied_weights_stay_tied() -> None:
    """A gate that copies what it is given doubles memory and misses later changes."""
    linear: Any = nn.Linear(64, 8, dtype=BF16)
    gate = GateLinear.of(linear.weight, linear.bias, out_dtype=FP32)
    assert gate.weight is linear.weight
    assert gate.bias is linear.bias
    with torch.no_grad():
        linear.weight.zero_()
        gate.get_parameter("bias").fill_(3)
    assert gate(random(2, 64)).eq(3).all()
    assert sum(p.numel() for p in nn.ModuleList([linear, gate]).parameters()) == 8 * 65


# ---- deciding


def test_eligibility_is_decided_once_for_a_weight(decisions: list[torch.dtype]) -> None:
    """Decided in every call it costs more than the launch."""
    bench = Bench(artifact(4, 8, 64), artifact(5, 8, 64), on_miss="error")
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=bench.runtime)
    for tokens in (4, 5, 4, 4, 0, 5):
        gate(random(tokens, 64))
    assert decisions == [BF16]


def test_eligibility_is_decided_anew_when_something_changes(decisions: list[torch.dtype]) -> None:
    """An old decision sends a weight of another dtype, place or layout to a kernel."""
    bench = Bench(artifact(4, 8, 64), artifact(4, 8, 64, out_dtype=BF16), on_miss="torch")
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=bench.runtime)
    x = random(4, 64, seed=1)

    def takes_after(change: Callable[[], object], tier: Tier) -> None:
        count = len(decisions)
        change()
        logits = gate(x)
        assert len(decisions) == count + 1, change
        assert gate.explain(x).tier is tier, change
        kernel = tier is Tier.BF16 and logits.dtype is FP32
        assert error_of(logits, x, gate.weight) <= (2e-6 if kernel else 3e-3), change
        gate(x)

    takes_after(lambda: None, Tier.BF16)
    takes_after(lambda: gate.set_out_dtype(BF16), Tier.BF16)
    takes_after(lambda: gate.set_out_dtype(FP32), Tier.BF16)
    takes_after(lambda: gate.half(), Tier.LINEAR)
    takes_after(lambda: gate.to(BF16), Tier.BF16)
    takes_after(lambda: gate.float(), Tier.LINEAR)
    takes_after(lambda: setattr(gate.weight, "data", random(8, 64)), Tier.BF16)
    takes_after(lambda: setattr(gate.weight, "data", random(64, 8).t()), Tier.LINEAR)
    takes_after(
        lambda: setattr(gate, "weight", nn.Parameter(random(8, 64, seed=7), requires_grad=False)),
        Tier.BF16,
    )
    takes_after(lambda: gate.weight.copy_(random(8, 64, seed=8)), Tier.BF16)
    takes_after(
        lambda: gate.load_state_dict({"weight": random(8, 64, seed=9)}, assign=True), Tier.BF16
    )
    assert not gate.weight.requires_grad


def test_a_dtype_that_changes_under_the_same_parameter_reaches_no_bf16_kernel() -> None:
    """`weight.data = ...` keeps the Parameter: an fp32 weight behind it read as bf16 is garbage."""
    bench = Bench(artifact(4, 8, 64), on_miss="error")
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=bench.runtime)
    x = random(4, 64, seed=1)
    gate(x)
    kept = gate.weight
    kept.data = random(8, 64, dtype=FP16, seed=2)
    assert gate.weight is kept
    assert error_of(gate(x), x, kept.data) <= 1e-2
    assert bench.runtime.stats().hits == 1


def test_moving_to_meta_and_back_leaves_no_old_address() -> None:
    """A kernel launched with the address of freed memory reads somebody else's."""
    bench = Bench(artifact(4, 8, 64), on_miss="error")
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=bench.runtime)
    gate(random(4, 64))
    gate.to("meta")
    assert "weight is on meta" in gate.explain(random(4, 64)).reason(1)
    x = random(4, 64)
    assert gate(x).device == torch.nn.functional.linear(x, gate.weight).device
    assert bench.runtime.stats().hits == 1


def test_swapping_parameters_is_not_refused() -> None:
    """torch.utils.swap_tensors refuses a tensor that somebody holds a weak reference to."""
    gate = gate_of(random(8, 64), out_dtype=FP32)
    gate(random(4, 64))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        gate.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert gate.weight.dtype is FP32


# ---- copies


def test_a_deep_copy_has_its_own_weights_and_the_same_runtime() -> None:
    """A runtime has locks and a driver: copying one fails, losing it makes the copy slow."""
    bench = Bench(artifact(4, 8, 64), on_miss="error")
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=bench.runtime)
    gate(random(4, 64))
    model = copy.deepcopy(nn.ModuleDict({"gate": gate, "again": gate}))
    made = model["gate"]
    assert isinstance(made, GateLinear)
    assert made is model["again"]
    assert made.weight is not gate.weight
    with torch.no_grad():
        gate.weight.zero_()
    x = random(4, 64, seed=1)
    assert error_of(made(x), x, made.weight) <= 2e-6
    assert bench.runtime.stats().hits == 2


def test_a_pickled_gate_holds_parameters_and_settings_only() -> None:
    """A runtime, or a decision with addresses, in a pickle fails or lies in another process."""
    gate = gate_of(random(8, 64), random(8), out_dtype=FP32, runtime=Ledger())
    gate(random(4, 64))
    made = pickle.loads(pickle.dumps(gate))  # noqa: S301
    assert isinstance(made, GateLinear)
    assert torch.equal(made.weight, gate.weight)
    assert (made.out_dtype, made.explain(random(4, 64)).tier) == (FP32, Tier.LINEAR)
    buffer = io.BytesIO()
    torch.save(gate.state_dict(), buffer)
    buffer.seek(0)
    assert set(torch.load(buffer, weights_only=True)) == {"weight", "bias"}


def test_a_runtime_is_freed_with_its_last_gate() -> None:
    """Held by a table for compiled graphs, a runtime and its loaded code would never go."""
    runtime = Ledger()
    gone = weakref.ref(runtime)
    gates = [gate_of(random(8, 64), runtime=runtime) for _ in range(2)]
    assert gates[0]._kernels is gates[1]._kernels
    del gates, runtime
    gc.collect()
    assert gone() is None


# ---- preloading


def test_a_preloaded_gate_needs_no_store_and_no_load() -> None:
    """Without it the first call in a capture is refused, and the first request waits."""
    artifacts = [artifact(m, 8, 64) for m in (1, 2, 3, 4)]
    bench = Bench(*artifacts, on_miss="error")
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=bench.runtime)
    report = gate.preload(range(1, 5))
    assert report is not None
    assert report.ok
    loads = bench.runtime.stats().loads
    bench.runtime.freeze()
    bench.devices.captured = True
    for tokens in (1, 2, 3, 4):
        x = random(tokens, 64)
        assert error_of(gate(x), x, gate.weight) <= 2e-6
        assert gate.explain(x).tier is Tier.BF16
    assert bench.runtime.stats().loads == loads


def test_preloading_tells_what_is_missing() -> None:
    """A report that is silent about a kernel that is not there is worth nothing."""
    bench = Bench(artifact(1, 8, 64), on_miss="torch")
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=bench.runtime)
    report = gate.preload([1, 2])
    assert report is not None
    assert [one.reason for one in report.missing] == ["absent"]
    assert bench.runtime.stats().misses == {"absent": 1}


def test_a_cold_gate_in_a_capture_is_refused() -> None:
    """A load breaks the capture, and a fallback captured in its place stays for good."""
    bench = Bench(artifact(4, 8, 64))
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=bench.runtime)
    bench.devices.captured = True
    assert gate.explain(random(4, 64)).call.startswith("raises ColdCaptureError: no kernel for M=4")
    with pytest.raises(ColdCaptureError):
        gate(random(4, 64))


# ---- torch.compile


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_gate_chooses_the_tier_when_it_runs(
    backend: str, widening: list[int], decisions: list[torch.dtype]
) -> None:
    """Frozen at the M of its trace, a graph launches the kernel of one M, or none, for all."""
    runtime = Ledger()
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=runtime)
    graphs = 0

    def counting(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        lookup = torch._dynamo.lookup_backend(backend)
        result: Callable[..., object] = lookup(module, inputs)
        return result

    compiled = torch.compile(gate, fullgraph=True, dynamic=True, backend=counting)
    with torch.inference_mode():
        for tokens in (3, 64, 65, 7, 300):
            x = random(tokens, 64)
            assert error_of(compiled(x), x, gate.weight) <= 2e-6
    assert graphs == 1
    assert [call[0] for call in runtime.calls] == [3, 64, 7]
    assert runtime.library == [65, 300]
    assert widening == []
    assert decisions == [BF16]


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_layers_share_their_code() -> None:
    """A number of its own for each layer would compile sixty graphs in place of one."""
    runtime = Ledger()
    graphs = 0

    def counting(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return module.forward

    torch.compiler.reset()
    gates = [gate_of(random(8, 64, seed=n), out_dtype=FP32, runtime=runtime) for n in range(4)]
    for gate in gates:
        gate.compile(fullgraph=True, dynamic=True, backend=counting)
    x = random(4, 64)
    with torch.no_grad():
        for gate in gates:
            assert error_of(gate(x), x, gate.weight) <= 2e-6
    assert len(runtime.calls) == 4
    assert graphs == 1


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 64), (64,), (0, 64)])
def test_a_compiled_gate_takes_x_of_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    """Under the compiler too a gate stands in for nn.Linear."""
    runtime = Ledger()
    gate = gate_of(random(8, 64), random(8), out_dtype=FP32, runtime=runtime)
    x = random(*shape)
    with torch.no_grad():
        compiled = torch.compile(gate, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(compiled, gate(x))
    assert compiled.shape == (*shape[:-1], 8)


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_gate_on_the_cpu_is_a_linear_layer_with_gradients() -> None:
    """An opaque operator there has no backward and cannot be fused."""
    gate = GateLinear(64, 8, bias=True, out_dtype=FP32)
    x = random(4, 64, dtype=FP32)
    compiled = torch.compile(gate, fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    assert gate.weight.grad is not None
    assert torch.allclose(gate.weight.grad, x.sum(0).expand(8, 64))
    runtime = Ledger()
    trained = GateLinear(64, 8, out_dtype=FP32, weight_dtype=BF16, runtime=runtime)
    torch.compile(trained, fullgraph=True, backend="aot_eager")(random(4, 64)).sum().backward()
    assert trained.weight.grad is not None
    assert runtime.calls == []


def test_the_operator_passes_torchs_own_checks() -> None:
    """A fake result of another shape, dtype or stride makes compiled code read beside it."""
    kernels = register_kernels(Kernels(Ledger()))
    for tokens, bias in ((3, None), (0, None), (4, random(8))):
        for out_dtype in (FP32, BF16):
            arguments = (random(tokens, 64), random(8, 64), bias, out_dtype, False, kernels.number)
            torch.library.opcheck(torch.ops.llbf16.gate.default, arguments)


def test_the_operator_says_so_when_its_runtime_is_gone() -> None:
    """A graph may outlive the gate: it must not run on another gate's runtime."""
    number = register_kernels(Kernels(Ledger())).number
    gc.collect()
    with pytest.raises(RuntimeError, match=f"runtime number {number}"):
        torch.ops.llbf16.gate(random(2, 64), random(8, 64), None, FP32, False, number)


def test_the_operator_warms_up_outside_of_captures_only() -> None:
    """In an engine the first call is the warm-up's: all kernels must be there before captures."""
    runtime = Ledger()
    kernels = register_kernels(Kernels(runtime, warm=range(1, 5)))
    weight = random(8, 64)
    runtime.captures = True
    torch.ops.llbf16.gate(random(2, 64), weight, None, FP32, False, kernels.number)
    assert runtime.wanted == []
    runtime.captures = False
    for _ in range(2):
        torch.ops.llbf16.gate(random(2, 64), weight, None, FP32, False, kernels.number)
    warmed = len(runtime.wanted)
    assert 1 <= warmed <= 4
    torch.ops.llbf16.gate(random(2, 64), random(16, 64), None, FP32, False, kernels.number)
    assert len(runtime.wanted) > warmed


def test_the_operators_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that come and go, as in training, must not fill memory with decisions."""
    monkeypatch.setattr(tiers, "MAX_PLANS", 3)
    kernels = Kernels(Ledger())
    for experts in range(1, 9):
        kernels.plan(random(experts, 64), None, FP32, fp32=False)
    assert len(kernels._plans) <= 3


def test_the_gate_is_a_public_name() -> None:
    """The documentation says `from llbf16_aot import GateLinear`."""
    assert llbf16_aot.GateLinear is gate_module.GateLinear
    assert "out_dtype=torch.float32, force_fp32_compute=True" in repr(
        llbf16_aot.GateLinear(8, 2, out_dtype=FP32, force_fp32_compute=True)
    )
