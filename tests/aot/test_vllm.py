"""The vLLM plugin on a stand-in of vLLM's protocol, and on the real package where it is installed.

Run by hand against vLLM 0.33.0, installed without its GPU dependencies on a machine without a GPU;
see docs/vllm.md. Without vLLM the last part is skipped.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gate_kit import Ledger, error_of, fp32_weights, random, widening
from llbf16_aot import vllm_plugin
from llbf16_aot.gate import register_kernels
from llbf16_aot.tiers import Kernels
from torch import nn
from vllm_standin import NAMES, StandIn, load_plugins

__all__ = ["fp32_weights", "widening"]

BF16, FP32 = torch.bfloat16, torch.float32

Lines = Callable[[], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """What the plugin has written to vLLM's log."""
    caplog.set_level(logging.INFO, logger="vllm.llbf16_aot")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "vllm.llbf16_aot"]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    standin = StandIn()
    standin.install(monkeypatch)
    return standin


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The runtime that the process's gates launch with."""
    made = Ledger()
    kernels = register_kernels(Kernels(made, warm=vllm_plugin.PRELOADED))
    monkeypatch.setattr(vllm_plugin._Shared, "kernels", kernels)
    monkeypatch.setattr(vllm_plugin._Shared, "told", set())
    return made


# ---- registration


def test_the_entry_point_is_the_plugins_function() -> None:
    """Misspelt, the plugin is silently never loaded: vLLM only logs what it cannot import."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (group,) = re.findall(r'^\[project\.entry-points\."vllm\.general_plugins"\]\n(.*)$', text, re.M)
    name, _, value = group.replace('"', "").partition(" = ")
    point = importlib.metadata.EntryPoint(name, value, "vllm.general_plugins")
    assert point.name == "llbf16_aot"
    assert point.load() is vllm_plugin.register


def test_gates_are_made_of_the_replacement(vllm: StandIn, lines: Lines) -> None:
    """Registered under another name, or not as a subclass, vLLM goes on making its own."""
    load_plugins([vllm_plugin.register])
    gate = vllm.gate(64, 8, out_dtype=FP32)
    assert isinstance(gate, vllm.gate)
    assert type(gate) is vllm.replacements["GateLinear"]
    assert type(gate) is not vllm.gate
    assert lines() == [
        "llbf16-aot: gates of vLLM 9.9.9 are made to use stored kernels",
        "llbf16-aot: gate K=64 N=8 bfloat16 is served by stored kernels",
    ]


def test_registering_again_changes_nothing(vllm: StandIn, lines: Lines) -> None:
    """vLLM loads plugins in each process and may do it twice; its table takes a name once."""
    load_plugins([vllm_plugin.register])
    first = vllm.replacements["GateLinear"]
    load_plugins([vllm_plugin.register, vllm_plugin.register])
    assert vllm.replacements == {"GateLinear": first}
    assert len(lines()) == 1


def test_somebody_elses_replacement_is_left_alone(vllm: StandIn, lines: Lines) -> None:
    """A hardware plugin's gate must not be thrown out, nor our assertion stop the server."""

    class Theirs(vllm.gate):  # type: ignore[misc,name-defined]
        pass

    vllm.gate.register_oot(name="GateLinear")(Theirs)
    load_plugins([vllm_plugin.register])
    assert vllm.replacements["GateLinear"] is Theirs
    (line,) = lines()
    assert "vLLM's gates stay as they are" in line
    assert "Theirs" in line


@pytest.mark.parametrize(("value", "line"), [("0", "switched off"), ("off", "must be 0 or 1")])
def test_a_variable_switches_the_plugin_off(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, lines: Lines, value: str, line: str
) -> None:
    """The first thing that is tried when a server misbehaves; a typing error must not switch on."""
    monkeypatch.setenv("LLBF16_AOT_VLLM", value)
    load_plugins([vllm_plugin.register])
    assert vllm.replacements == {}
    assert len(lines()) == 1
    assert line in lines()[0]


def without_gate(vllm: StandIn) -> None:
    vllm.drop(NAMES[-1], "GateLinear")


def without_layer(vllm: StandIn) -> None:
    vllm.drop("vllm.model_executor.custom_op", "PluggableLayer")


def without_table(vllm: StandIn) -> None:
    vllm.drop("vllm.model_executor.custom_op", "op_registry_oot")


def gate_of_another_base(vllm: StandIn) -> None:
    vllm.set(NAMES[-1], "GateLinear", type("GateLinear", (nn.Linear,), {}))


def other_arguments(vllm: StandIn) -> None:
    class GateLinear(vllm.layer):  # type: ignore[misc,name-defined]
        def __init__(self, config: object) -> None:
            super().__init__()

        def set_out_dtype(self, out_dtype: torch.dtype) -> None:
            pass

    vllm.set(NAMES[-1], "GateLinear", GateLinear)


def other_forward(vllm: StandIn) -> None:
    class GateLinear(vllm.gate):  # type: ignore[misc,name-defined]
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
            return super().forward(x)

    vllm.set(NAMES[-1], "GateLinear", GateLinear)


def registration_fails(vllm: StandIn) -> None:
    def refuse(name: str) -> None:
        raise AssertionError("Duplicate layer name: GateLinear")

    vllm.gate.register_oot = refuse


def registration_forgets(vllm: StandIn) -> None:
    vllm.gate.register_oot = lambda name: lambda made: made


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_gate, "no class GateLinear"),
        (without_layer, "no class GateLinear or PluggableLayer"),
        (without_table, "no table of replacements"),
        (gate_of_another_base, "GateLinear is no PluggableLayer"),
        (other_arguments, r"GateLinear.__init__ takes \['config'\]"),
        (other_forward, r"GateLinear.forward takes \['x', 'scale'\]"),
        (registration_fails, "AssertionError: Duplicate"),
        (registration_forgets, "did not take the replacement"),
    ],
)
def test_a_vllm_that_is_not_as_known_is_left_alone(
    vllm: StandIn, lines: Lines, change: Callable[[StandIn], None], reason: str
) -> None:
    """The next release moves a name: the server must start, and one line say why it is slow."""
    change(vllm)
    load_plugins([vllm_plugin.register])
    assert vllm.replacements == {}
    (line,) = lines()
    assert re.search(reason, line)
    assert line.startswith("llbf16-aot: vLLM's gates stay as they are: ")


@pytest.mark.parametrize("missing", NAMES)
def test_a_vllm_without_a_module_is_left_alone(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, lines: Lines, missing: str
) -> None:
    """Releases before the gate had a module of its own, and none at all: an ImportError each."""
    for name in NAMES:
        if name == missing or name.startswith(f"{missing}."):
            monkeypatch.setitem(sys.modules, name, None)
    parent, _, leaf = missing.rpartition(".")
    if parent:
        vllm.drop(parent, leaf)
    load_plugins([vllm_plugin.register])
    assert vllm.replacements == {}
    (line,) = lines()
    assert "ImportError" in line or "ModuleNotFoundError" in line


# ---- layers


@pytest.fixture
def gates(vllm: StandIn) -> StandIn:
    """vLLM with the plugin loaded."""
    vllm_plugin.register()
    return vllm


@pytest.mark.parametrize("bias", [False, True])
def test_a_gate_gives_logits_as_vllm_expects_them(
    gates: StandIn, runtime: Ledger, bias: bool
) -> None:
    """A tensor where a pair is unpacked splits the logits by rows, without an error for M = 2."""
    gate = gates.gate(64, 8, bias=bias, out_dtype=FP32)
    x = random(2, 64)
    logits, output_bias = gate(x)
    assert output_bias is None
    assert error_of(logits, x, gate.weight, gate.bias) <= 2e-6
    alone = gates.gate(64, 8, bias=bias, out_dtype=FP32, return_bias=False)
    assert error_of(alone(x), x, alone.weight, alone.bias) <= 2e-6
    assert [call[0] for call in runtime.calls] == [2, 2]
    assert gates.own.calls == 0


def test_the_output_type_may_be_set_later(gates: StandIn, runtime: Ledger, lines: Lines) -> None:
    """Models learn it from the experts' quantization: decided before, the logits are bf16."""
    gate = gates.gate(64, 8)
    told = len(lines())
    gate.set_out_dtype(FP32)
    assert len(lines()) == told + 1
    logits, _ = gate(random(4, 64))
    assert logits.dtype is FP32
    assert runtime.calls == [(4, BF16, BF16, FP32)]
    with pytest.raises(ValueError, match="already been set"):
        gate.set_out_dtype(BF16)


def test_kernels_are_ready_when_the_layer_is_made(gates: StandIn, runtime: Ledger) -> None:
    """vLLM warms up and captures later: a kernel that is first looked for there is refused."""
    asked: list[int] = []
    lookup = runtime.lookup

    def noted(problem: Any, device: int) -> Any:
        asked.append(problem.tokens)
        return lookup(problem, device)

    runtime.lookup = noted  # type: ignore[method-assign]
    gates.gate(64, 8, out_dtype=FP32)
    assert asked == list(vllm_plugin.PRELOADED)


def test_a_gate_without_a_stored_kernel_stays_vllms(
    gates: StandIn, runtime: Ledger, lines: Lines
) -> None:
    """Left to our fallback it would be slower than vLLM's own kernels, which are still there."""
    runtime.absent = set(range(1, 65))
    gate = gates.gate(64, 8, out_dtype=FP32)
    for _ in range(3):
        gates.gate(64, 8, out_dtype=FP32)
    x = random(4, 64)
    logits, _ = gate(x)
    assert error_of(logits, x, gate.weight) <= 3e-3
    assert (gates.own.calls, runtime.calls) == (1, [])
    told = [line for line in lines() if "left to vLLM" in line]
    assert len(told) == 1
    assert "gate K=64 N=8 bfloat16 is left to vLLM: no kernel for M=1 N=8 K=64" in told[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quant_config": object()}, "the gate is quantized"),
        ({"skip_bias_add": True, "bias": True}, "skip_bias_add is set"),
        ({"params_dtype": torch.float16}, "x is bfloat16, weight float16"),
    ],
)
def test_a_gate_of_another_kind_stays_vllms(
    gates: StandIn, runtime: Ledger, lines: Lines, options: dict[str, Any], reason: str
) -> None:
    """Packed bytes of a quantized weight, or a bias added twice, give logits that look right."""
    gate = gates.gate(64, 8, out_dtype=FP32, **options)
    gate(random(4, 64))
    assert (gates.own.calls, runtime.calls) == (1, [])
    assert reason in lines()[-1]


def test_fp32_weights_go_to_kernels_only_where_the_runtime_takes_them(
    gates: StandIn, runtime: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has kernels of its own for them: ours must take their place, not F.linear."""
    monkeypatch.setattr("llbf16_aot.tiers.takes", lambda x, weight: x is weight is BF16)
    gates.gate(64, 8, out_dtype=FP32, params_dtype=FP32)(random(4, 64))
    assert (gates.own.calls, runtime.calls) == (1, [])
    monkeypatch.setattr("llbf16_aot.tiers.takes", lambda x, weight: True)
    gates.gate(64, 8, out_dtype=FP32, params_dtype=FP32)(random(4, 64))
    assert (gates.own.calls, runtime.calls) == (1, [(4, BF16, FP32, FP32)])


def test_other_platforms_and_batch_invariance_stay_vllms(gates: StandIn, runtime: Ledger) -> None:
    """Kernels are chosen by M: with them the same token's logits depend on the batch."""
    gates.envs.VLLM_BATCH_INVARIANT = True
    gates.gate(64, 8, out_dtype=FP32)(random(4, 64))
    gates.envs.VLLM_BATCH_INVARIANT = False
    gates.cuda = False
    gates.gate(64, 8, out_dtype=FP32)(random(4, 64))
    assert (gates.own.calls, runtime.calls) == (2, [])


def test_a_failing_decision_leaves_the_gate_to_vllm(
    gates: StandIn, runtime: Ledger, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that cannot be trusted raises: in a layer's constructor it would stop the server."""

    def refuse(problem: object, device: int) -> None:
        raise OSError("the store is gone")

    monkeypatch.setattr(runtime, "lookup", refuse)
    gates.gate(64, 8, out_dtype=FP32)(random(4, 64))
    assert (gates.own.calls, runtime.calls) == (1, [])
    assert "OSError: the store is gone" in lines()[-1]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_graph_without_guards_still_chooses_by_the_number_of_tokens(
    gates: StandIn, runtime: Ledger, widening: list[int]
) -> None:
    """vLLM drops the compiler's guards: a branch on M in the layer is frozen at its first trace."""
    gate = gates.gate(64, 8, out_dtype=FP32)
    with torch.no_grad():
        graph, _ = torch._dynamo.export(
            lambda x: gate(x)[0], aten_graph=False, tracing_mode="symbolic"
        )(random(5, 64))
        for tokens in (2, 64, 65, 300, 3):
            x = random(tokens, 64)
            assert error_of(graph(x), x, gate.weight) <= 2e-6
    assert [call[0] for call in runtime.calls] == [2, 64, 3]
    assert runtime.library == [65, 300]
    assert widening == []


# ---- the real vLLM


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The installed vLLM, as on one CUDA device without a distributed group."""
    try:
        gate_linear = importlib.import_module(NAMES[-1])
    except ImportError as error:
        pytest.skip(f"vLLM with its GateLinear is not installed: {error}")
    linear = importlib.import_module("vllm.model_executor.layers.linear")
    custom_op = importlib.import_module("vllm.model_executor.custom_op")
    for module in (linear, importlib.import_module("vllm.model_executor.parameter")):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    platforms = importlib.import_module("vllm.platforms")
    monkeypatch.setattr(type(platforms.current_platform), "is_cuda", lambda self: True)
    return gate_linear.GateLinear


def real_gate(real: Any, **options: Any) -> Any:
    gate = real(64, 8, params_dtype=BF16, prefix="gate", **options)
    gate.weight_loader(gate.weight, random(8, 64))
    return gate


def test_the_real_vllm_makes_gates_of_the_replacement(
    real: Any, runtime: Ledger, lines: Lines
) -> None:
    """The stand-in is what we believe of vLLM; this is vLLM."""
    vllm_plugin.register()
    vllm_plugin.register()
    assert re.match(r"llbf16-aot: gates of vLLM \S+ are made to use stored kernels", lines()[0])
    gate = real_gate(real, out_dtype=FP32)
    assert type(gate) is not real
    assert isinstance(gate, real)
    x = random(3, 64, seed=1)
    logits, bias = gate(x)
    assert bias is None
    assert error_of(logits, x, gate.weight) <= 2e-6
    assert runtime.calls == [(3, BF16, BF16, FP32)]


def test_the_real_vllm_may_set_the_output_type_later(real: Any, runtime: Ledger) -> None:
    """As its models do after they have seen the experts."""
    vllm_plugin.register()
    gate = real_gate(real)
    gate.set_out_dtype(FP32)
    assert gate(random(3, 64))[0].dtype is FP32
    assert runtime.calls == [(3, BF16, BF16, FP32)]


def test_the_real_vllms_own_forward_serves_what_we_do_not(real: Any, runtime: Ledger) -> None:
    """`super().forward` must be callable as vLLM wrote it."""
    vllm_plugin.register()
    runtime.absent = set(range(1, 65))
    gate = real_gate(real, out_dtype=FP32)
    assert not gate.llbf16_aot_used
    gate.allow_cublas_router_gemm = False  # the CPU has none
    x = random(3, 64, seed=1)
    logits, _ = gate(x)
    assert error_of(logits, x, gate.weight) <= 3e-3
    assert runtime.calls == []


def test_the_real_vllm_loads_the_plugin_by_its_entry_point(
    real: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by nobody, the plugin is dead code."""
    if not [
        point
        for point in importlib.metadata.entry_points(group="vllm.general_plugins")
        if point.name == "llbf16_aot"
    ]:
        pytest.skip("llbf16-aot was installed before it had the entry point")
    plugins = importlib.import_module("vllm.plugins")
    custom_op = importlib.import_module("vllm.model_executor.custom_op")
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    monkeypatch.setenv("VLLM_PLUGINS", "llbf16_aot")
    plugins.load_general_plugins()
    assert issubclass(custom_op.op_registry_oot["GateLinear"], real)
