"""patch_model: finds routers, keeps their parameters, tells what it leaves, undoes.

The last part runs on small models of transformers where that is installed (5.24.0 by hand).
"""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import llbf16_aot
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gate_kit import Ledger, error_of, fp32_weights, random
from llbf16_aot.gate import GateLinear
from llbf16_aot.patch import PatchPlan, patch_model
from torch import nn

__all__ = ["fp32_weights"]

BF16, FP32 = torch.bfloat16, torch.float32


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(8, 64, 64))


class TopKRouter(nn.Module):
    """A router as transformers writes them: the product, then the choice."""

    bias: nn.Parameter | None

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(8, 64))
        self.register_parameter("bias", nn.Parameter(random(8)) if bias else None)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden_states.reshape(-1, 64), self.weight, self.bias)
        return logits, F.softmax(logits, dim=-1).topk(2).indices


class CastingRouter(nn.Module):
    """As DeepSeek-V3's: multiplies in fp32, with a correction that is added to the scores."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(8, 64, dtype=dtype))
        self.e_score_correction_bias = nn.Buffer(torch.ones(8))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = F.linear(hidden_states.type(FP32), self.weight.type(FP32))
        return logits.sigmoid() + self.e_score_correction_bias


class HandwrittenRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(8, 64))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.weight.t()


class TwiceRouter(TopKRouter):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden_states, self.weight)
        return logits, F.linear(hidden_states * 2, self.weight)


class MaskedRouter(TopKRouter):
    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        return F.linear(hidden_states, self.weight) * mask


def linear(hidden: int = 64, experts: int = 8, **options: Any) -> nn.Linear:
    return nn.Linear(hidden, experts, dtype=BF16, bias=False, **options)


def block(router: nn.Module, name: str = "gate", **others: nn.Module) -> nn.Module:
    """A mixture-of-experts block with this router."""
    made = nn.Module()
    made.add_module("experts", Experts())
    parent = made
    for part in name.split(".")[:-1]:
        parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    parent.add_module(name.split(".")[-1], router)
    for other, module in others.items():
        made.add_module(other, module)
    return made


def model_of(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict((f"layer{n}", one) for n, one in enumerate(blocks)))


# ---- layers


@pytest.mark.parametrize(
    "name", ["gate", "router", "router.gate", "router.layer", "gate.wg", "router.classifier"]
)
def test_linear_routers_beside_experts_are_replaced(name: str) -> None:
    """A model whose router has another of the usual names would silently stay slow."""
    runtime = Ledger()
    model = model_of(block(linear(), name), block(linear(), name))
    weight = model.get_submodule(f"layer0.{name}").weight
    report = patch_model(model, runtime=runtime)
    gate = model.get_submodule(f"layer0.{name}")
    assert isinstance(gate, GateLinear)
    assert gate.weight is weight
    assert [one.name for one in report.plan.replaced] == [f"layer0.{name}", f"layer1.{name}"]
    assert report.plan.skipped == ()
    x = random(3, 64)
    with torch.no_grad():
        assert torch.equal(gate(x), F.linear(x, weight))
    assert runtime.calls == [(3, BF16, BF16, BF16)]


def test_parameters_keys_and_bias_are_the_same_after_patching() -> None:
    """A patched model must load and save the same checkpoints, and share ties and optimisers."""
    model = model_of(block(nn.Linear(64, 8)), block(TopKRouter(bias=True)))
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    patch_model(model)
    after = dict(model.named_parameters())
    assert list(model.state_dict()) == keys
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_what_is_no_router_is_not_touched() -> None:
    """`gate` is also the name of an MLP's gating layer: replaced, a dense model changes."""
    mlp = nn.Module()
    mlp.add_module("gate", linear())
    mlp.add_module("shared_experts", Experts())
    model = model_of(
        mlp,
        block(linear(), "gate_proj"),
        block(linear(64, 2049)),
        block(nn.Conv1d(64, 8, 1)),
        block(nn.LayerNorm(64)),
        block(nn.Embedding(8, 64), "router"),
    )
    modules = dict(model.named_modules())
    report = patch_model(model)
    assert dict(model.named_modules()) == modules
    assert report.plan.replaced == ()
    assert [(one.name, one.reason) for one in report.plan.skipped] == [
        ("layer2.gate", "N is 2049, at most 2048"),
        ("layer3.gate", "its weight has shape (8, 64, 1)"),
        ("layer4.gate", "its weight has shape (64,)"),
        ("layer5.router", "its forward calls no F.linear"),
    ]
    assert not report.done


def test_names_can_be_given() -> None:
    """A model of one's own calls its router otherwise; and a usual name may be left out."""
    model = model_of(block(linear(), "chooser", gate=linear()))
    report = patch_model(model, names=["chooser"])
    assert [one.name for one in report.plan.replaced] == ["layer0.chooser"]
    assert type(model.get_submodule("layer0.gate")) is nn.Linear


def test_a_router_used_twice_stays_one_module() -> None:
    """Two gates on one weight would part when one of them is given another."""
    shared = linear()
    model = model_of(block(shared), block(shared))
    report = patch_model(model)
    assert model.get_submodule("layer0.gate") is model.get_submodule("layer1.gate")
    report.undo()
    assert model.get_submodule("layer0.gate") is model.get_submodule("layer1.gate") is shared


def test_what_would_be_lost_is_left() -> None:
    """Hooks, replaced forwards and packed weights are somebody's work: lost, nothing tells."""
    hooked = linear()
    hooked.register_forward_hook(lambda module, args, output: output)
    wrapped = linear()
    wrapped.forward = lambda x: x  # type: ignore[method-assign,assignment]
    packed = linear()
    packed.weight = nn.Parameter(torch.zeros(8, 64, dtype=torch.uint8), requires_grad=False)
    scaled = torch.nn.utils.parametrizations.orthogonal(nn.Linear(64, 8))
    model = model_of(block(hooked), block(wrapped), block(packed), block(scaled))
    report = patch_model(model)
    assert [one.reason for one in report.plan.skipped] == [
        "it has hooks, which a new layer would not have",
        "its forward has been replaced by somebody",
        "its weight is uint8",
        "its weight is not a parameter of its own",
    ]
    again = patch_model(model_of(block(GateLinear(64, 8))))
    assert [one.reason for one in again.plan.skipped] == ["is a GateLinear already"]


# ---- products


@pytest.mark.parametrize("bias", [False, True])
def test_the_product_in_a_router_is_replaced_and_the_choice_kept(bias: bool) -> None:
    """transformers' routers are no linear layers: replaced whole, they lose their top-k."""
    runtime = Ledger()
    router = TopKRouter(bias)
    model = model_of(block(router))
    x = random(3, 64, seed=2)
    with torch.no_grad():
        expected = router(x)
        report = patch_model(model, runtime=runtime)
        logits, chosen = model.get_submodule("layer0.gate")(x)
    assert model.get_submodule("layer0.gate") is router
    assert (report.plan.replaced[0].how, report.plan.replaced[0].bias) == ("product", bias)
    assert len(runtime.calls) == 1
    assert logits.dtype is BF16
    assert error_of(logits, x, router.weight, router.bias) <= 4e-3
    assert torch.equal(chosen, expected[1])
    report.undo()
    with torch.no_grad():
        assert torch.equal(router(x)[0], expected[0])
    assert len(runtime.calls) == 1
    assert "forward" not in router.__dict__


@pytest.mark.usefixtures("fp32_weights")
def test_a_router_that_casts_is_replaced_where_the_cast_does_nothing() -> None:
    """DeepSeek's router multiplies by `weight.type(fp32)`: its own weight only if that is fp32."""
    runtime = Ledger()
    whole, cast = CastingRouter(FP32), CastingRouter(BF16)
    report = patch_model(model_of(block(whole), block(cast)), runtime=runtime)
    assert [one.name for one in report.plan.replaced] == ["layer0.gate"]
    (left,) = report.plan.skipped
    assert left.reason == "its forward multiplies by its own weight 0 times, as it is"
    x = random(3, 64)
    with torch.no_grad():
        scores = whole(x) - 1
        cast(x)
    exact = (x.double() @ whole.weight.double().t()).sigmoid()
    assert (scores.double() - exact).abs().max() < 1e-6
    assert runtime.calls == [(3, FP32, FP32, FP32)]


@pytest.mark.parametrize(
    ("router", "reason"),
    [
        (HandwrittenRouter, "its forward calls no F.linear"),
        (TwiceRouter, "its forward multiplies by its own weight 2 times, as it is"),
        (MaskedRouter, "its forward fails on zeros: TypeError"),
    ],
)
def test_a_forward_that_is_not_understood_is_left(
    router: Callable[[], nn.Module], reason: str
) -> None:
    """Guessing at foreign code changes what a model computes."""
    model = model_of(block(router()))
    report = patch_model(model)
    assert report.plan.replaced == ()
    assert report.plan.skipped[0].reason.startswith(reason)
    assert "forward" not in model.get_submodule("layer0.gate").__dict__


def test_a_router_of_closures_or_decorators_is_left() -> None:
    """A function with captured variables cannot be given other globals and stay the same."""
    factor = 2

    class Closing(TopKRouter):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            return F.linear(hidden_states, self.weight) * factor

    report = patch_model(model_of(block(Closing())))
    assert report.plan.skipped[0].reason == "its forward is not a plain function"


def test_a_patched_router_follows_its_module() -> None:
    """Moves, casts, new parameters and copies: a gate that keeps the old weight routes by it."""
    runtime = Ledger()
    router = TopKRouter()
    model = model_of(block(router))
    patch_model(model, runtime=runtime)
    x = random(3, 64, seed=2)
    with torch.no_grad():
        twin = copy.deepcopy(model).get_submodule("layer0.gate")
        router.weight.zero_()
        assert torch.equal(router(x)[0], torch.zeros(3, 8, dtype=BF16))
        assert twin(x)[0].abs().max() > 0
        assert len(runtime.calls) == 2
        model.load_state_dict(twin_state(twin), assign=True, strict=False)
        assert torch.equal(router(x)[0], twin(x)[0])
        restored = pickle.loads(pickle.dumps(router))  # noqa: S301
        assert torch.equal(restored(x)[0], F.linear(x, router.weight))
        model.float()
        assert error_of(router(x.float())[0], x, router.weight) <= 2e-6
    assert all(call[2] is BF16 for call in runtime.calls[:4])


def twin_state(router: nn.Module) -> dict[str, torch.Tensor]:
    return {"layer0.gate.weight": router.state_dict()["weight"].clone()}


@pytest.mark.parametrize("router", [linear, TopKRouter])
def test_a_patched_model_compiles_without_a_break(router: Callable[[], nn.Module]) -> None:
    """A graph break in each layer costs more than the kernel gains."""
    torch._dynamo.reset()
    runtime = Ledger()
    model = model_of(block(router()))
    patch_model(model, runtime=runtime)
    gate: Any = model.get_submodule("layer0.gate")
    compiled = torch.compile(lambda x: gate(x), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (3, 7):
            x = random(tokens, 64)
            result = compiled(x)
            logits = result[0] if isinstance(result, tuple) else result
            assert error_of(logits, x, gate.weight) <= 4e-3
    assert [call[0] for call in runtime.calls] == [3, 7]
    torch._dynamo.reset()


# ---- plan and undo


def test_a_dry_run_makes_the_very_plan_and_changes_nothing() -> None:
    """A dry run by other code tells of another run."""

    def make() -> nn.Module:
        torch.manual_seed(1)
        return model_of(block(linear()), block(TopKRouter(True)), block(HandwrittenRouter()))

    model = make()
    modules = dict(model.named_modules())
    dry = patch_model(model, dry_run=True)
    assert dict(model.named_modules()) == modules
    assert "forward" not in model.get_submodule("layer1.gate").__dict__
    assert not dry.done
    dry.undo()
    wet = patch_model(model)
    assert wet.done
    assert wet.plan == dry.plan
    assert isinstance(wet.plan, PatchPlan)
    assert str(wet) == str(dry)
    assert str(dry).splitlines() == [
        "2 replaced, 1 left as they are",
        "  layer0.gate: K=64 N=8 bfloat16: the layer",
        "  layer1.gate: K=64 N=8 bfloat16, bias: the product in its forward",
        "  left: layer2.gate: its forward calls no F.linear",
    ]


def test_undoing_puts_the_modules_back_with_the_parameters_of_now() -> None:
    """Weights that were loaded or trained in between must not be lost with the gate."""
    old = linear()
    model = model_of(block(old), block(linear()))
    report = patch_model(model)
    fresh = random(8, 64, seed=5)
    model.load_state_dict({"layer0.gate.weight": fresh}, assign=True, strict=False)
    model.eval()
    somebody = linear()
    model.get_submodule("layer1").gate = somebody
    report.undo()
    assert model.get_submodule("layer0.gate") is old
    assert torch.equal(old.weight, fresh)
    assert not old.training
    assert model.get_submodule("layer1.gate") is somebody
    assert not report.done
    report.undo()


def test_only_modules_can_be_patched() -> None:
    """A path or a configuration in place of a model would be patched without an effect."""
    with pytest.raises(TypeError, match="model is str"):
        llbf16_aot.patch_model("mixtral")  # type: ignore[arg-type]


# ---- transformers


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


def transformers_model(name: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    made: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).to(BF16).eval()
    return made


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "options", "replaced"),
    [
        ("Mixtral", {"num_local_experts": 8}, 2),
        ("Qwen3Moe", {"num_experts": 8}, 2),
        ("GptOss", {"num_local_experts": 8}, 2),
        (
            "DeepseekV3",
            {
                "n_routed_experts": 8,
                "first_k_dense_replace": 1,
                "n_group": 2,
                "topk_group": 1,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 16,
                "head_dim": 8,
            },
            0,
        ),
    ],
)
def test_models_of_transformers_are_patched_and_answer_the_same(
    name: str, options: dict[str, Any], replaced: int
) -> None:
    """Small modules of our own are what we believe of transformers; these are its models."""
    model = transformers_model(name, **options)
    tokens = torch.arange(6)[None]
    runtime = Ledger()
    with torch.no_grad():
        expected = model(tokens).logits
        report = patch_model(model, runtime=runtime)
        logits = model(tokens).logits
        assert len(report.plan.replaced) == replaced, str(report)
        assert len(runtime.calls) == replaced
        if not replaced:
            assert len(report.plan.skipped) >= 1
            assert all("0 times, as it is" in one.reason for one in report.plan.skipped)
        difference = (logits.float() - expected.float()).norm() / expected.float().norm()
        assert difference <= 2e-2
        report.undo()
        assert torch.equal(model(tokens).logits, expected)
    assert len(runtime.calls) == replaced
