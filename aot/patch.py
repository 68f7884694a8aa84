"""patch_model: finds the routers of a model, and lets kernels compute their logits."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.nn import functional

from .gate import GateLinear, gate_product, kernels_of
from .runtime import Runtime
from .tiers import Kernels, Plan

__all__ = ["ROUTER_NAMES", "PatchPlan", "PatchReport", "PlannedGate", "SkippedGate", "patch_model"]

ROUTER_NAMES = (
    "gate",
    "router",
    "classifier",
    "gate.gate",
    "gate.wg",
    "router.classifier",
    "router.gate",
    "router.layer",
    "router.proj",
)
"""Where a router lies, seen from the module that has `experts`."""

EXPERTS = "experts"

MAX_EXPERTS = 2048
"""Largest N of a router: a layer with more is another kind of layer."""


class PlannedGate(msgspec.Struct, frozen=True):
    """A router that is replaced: as a whole layer, or only the product inside its forward."""

    name: str
    how: Literal["layer", "product"]
    hidden: int
    experts: int
    dtype: str
    bias: bool

    def __str__(self) -> str:
        bias = ", bias" if self.bias else ""
        what = "the layer" if self.how == "layer" else "the product in its forward"
        return f"{self.name}: K={self.hidden} N={self.experts} {self.dtype}{bias}: {what}"


class SkippedGate(msgspec.Struct, frozen=True):
    """What is named and placed as a router and stays as it is, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class PatchPlan(msgspec.Struct, frozen=True):
    """What `patch_model` does to a model, router by router in the model's order."""

    replaced: tuple[PlannedGate, ...]
    skipped: tuple[SkippedGate, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} replaced, {len(self.skipped)} left as they are"]
        lines += [f"  {one}" for one in self.replaced]
        lines += [f"  left: {one}" for one in self.skipped]
        return "\n".join(lines)


class PatchReport:
    """A plan, and what was done by it: nothing in a dry run. Prints as the plan."""

    def __init__(self, plan: PatchPlan, done: Iterable[_Swap] = ()) -> None:
        self.plan = plan
        self._done = list(done)

    @property
    def done(self) -> bool:
        """Whether the model has been changed, and the change was not undone."""
        return bool(self._done)

    def undo(self) -> None:
        """Put every module back that is still as it was patched, with its present parameters."""
        while self._done:
            self._done.pop().undo()

    def __str__(self) -> str:
        return str(self.plan)


def patch_model(
    model: nn.Module,
    *,
    dry_run: bool = False,
    names: Iterable[str] = ROUTER_NAMES,
    runtime: Runtime | None = None,
) -> PatchReport:
    """Let the routers of a model be computed as `GateLinear` does, with their own parameters.

    A router is a module at one of `names`, seen from a module with a child `experts`, that has a
    floating-point `weight` [N, K] with N at most 2048. An `nn.Linear` is replaced by a `GateLinear`
    on the same parameters. Of a module that does more than the product (transformers' `TopKRouter`
    classes), only the `F.linear(x, self.weight, self.bias)` in its forward is: found by running
    that forward once, on two rows of zeros. All else is left, with the reason. Logits keep their
    dtype.

    `dry_run` makes the same plan and changes nothing. Returns a report that prints the plan and can
    undo it. Raises TypeError for a model that is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, must be a torch.nn.Module")
    wanted = tuple(names)
    planned: list[PlannedGate] = []
    skipped: list[SkippedGate] = []
    swaps: list[_Swap] = []
    made: dict[int, _Swap] = {}
    for prefix, parent in model.named_modules(remove_duplicate=False):
        if EXPERTS not in parent._modules:
            continue
        for path in wanted:
            module = _submodule(parent, path)
            weight = getattr(module, "weight", None)
            if module is None or not isinstance(weight, torch.Tensor):
                continue
            name = f"{prefix}.{path}" if prefix else path
            reason = _unfit(module, weight)
            swap = None if reason else made.get(id(module)) or _swap_of(module, runtime)
            if isinstance(swap, str):
                reason, swap = swap, None
            if swap is None:
                skipped.append(SkippedGate(name, reason))
                continue
            made[id(module)] = swap
            planned.append(_planned(name, swap.how, module, weight))
            swaps.append(swap.at(parent, path))
    report = PatchReport(PatchPlan(tuple(planned), tuple(skipped)), () if dry_run else swaps)
    if not dry_run:
        for swap in swaps:
            swap.do()
    return report


def _submodule(parent: nn.Module, path: str) -> nn.Module | None:
    module: nn.Module | None = parent
    for part in path.split("."):
        module = None if module is None else module._modules.get(part)
    return module


def _planned(
    name: str, how: Literal["layer", "product"], module: nn.Module, weight: torch.Tensor
) -> PlannedGate:
    experts, hidden = weight.shape
    dtype = str(weight.dtype).removeprefix("torch.")
    return PlannedGate(name, how, hidden, experts, dtype, _bias_of(module) is not None)


def _bias_of(module: nn.Module) -> nn.Parameter | None:
    bias = module._parameters.get("bias")
    return bias if bias is not None and bias.dim() == 1 else None


def _weight_of(module: nn.Module) -> nn.Parameter:
    """The weight of a module that `_unfit` lets pass."""
    weight = module._parameters["weight"]
    if weight is None:
        raise TypeError(f"{type(module).__name__} has no weight")
    return weight


def _unfit(module: nn.Module, weight: torch.Tensor) -> str:
    """Why a module with a weight is no router that could be replaced; empty where it is one."""
    if isinstance(module, GateLinear):
        return "is a GateLinear already"
    if module._parameters.get("weight") is not weight:
        return "its weight is not a parameter of its own"
    if weight.dim() != 2:
        return f"its weight has shape {tuple(weight.shape)}"
    if not weight.is_floating_point():
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if weight.shape[0] > MAX_EXPERTS:
        return f"N is {weight.shape[0]}, at most {MAX_EXPERTS}"
    if "forward" in module.__dict__:
        return "its forward has been replaced by somebody"
    return ""


class _Swap:
    """One change of a model, at one place."""

    how: Literal["layer", "product"]

    def at(self, parent: nn.Module, path: str) -> _Swap:
        """The same change for another place where the module is."""
        raise NotImplementedError

    def do(self) -> None:
        """Make the change."""
        raise NotImplementedError

    def undo(self) -> None:
        """Take it back, unless somebody has changed the place since."""
        raise NotImplementedError


class _LayerSwap(_Swap):
    """An nn.Linear that becomes a GateLinear."""

    how = "layer"

    def __init__(self, old: nn.Linear, new: GateLinear) -> None:
        self._old, self._new = old, new
        self._parent: nn.Module | None = None
        self._leaf = ""

    def at(self, parent: nn.Module, path: str) -> _Swap:
        swap = _LayerSwap(self._old, self._new)
        above, _, swap._leaf = path.rpartition(".")
        swap._parent = parent.get_submodule(above)
        return swap

    def do(self) -> None:
        if self._parent is not None:
            setattr(self._parent, self._leaf, self._new)

    def undo(self) -> None:
        if self._parent is None or self._parent._modules.get(self._leaf) is not self._new:
            return
        self._old.register_parameter("weight", self._new.weight)
        self._old.register_parameter("bias", self._new.bias)
        self._old.train(self._new.training)
        setattr(self._parent, self._leaf, self._old)


class _ProductSwap(_Swap):
    """A forward of which the product is computed by a gate."""

    how = "product"

    def __init__(self, module: nn.Module, forward: _Forward) -> None:
        self._module, self._forward = module, forward

    def at(self, parent: nn.Module, path: str) -> _Swap:
        return self

    def do(self) -> None:
        self._module.forward = self._forward

    def undo(self) -> None:
        if self._module.__dict__.get("forward") is self._forward:
            del self._module.forward


def _swap_of(module: nn.Module, runtime: Runtime | None) -> _Swap | str:
    """How a router can be replaced, or why it cannot."""
    if type(module).forward is nn.Linear.forward and isinstance(module, nn.Linear):
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return "it has hooks, which a new layer would not have"
        gate = GateLinear.of(_weight_of(module), module._parameters.get("bias"), runtime=runtime)
        gate.train(module.training)
        return _LayerSwap(module, gate)
    original = type(module).forward
    if not isinstance(original, FunctionType) or original.__closure__ is not None:
        return "its forward is not a plain function"
    if not _functional_names(original):
        return "its forward calls no F.linear"
    forward = _Forward(module, kernels_of(runtime))
    reason = forward.try_out()
    return reason or _ProductSwap(module, forward)


def _functional_names(function: FunctionType) -> list[str]:
    """The global names by which a function calls `torch.nn.functional.linear`."""
    code = function.__code__
    if "linear" not in code.co_names or "__name__" in code.co_names:
        return []
    return [name for name in code.co_names if function.__globals__.get(name) is functional]


class _Forward:
    """A module's own forward, in which the product with its weight is a gate's.

    Belongs to its module: a copy of the module gets one of its own.
    """

    def __init__(self, module: nn.Module, kernels: Kernels) -> None:
        self._bind(module, kernels)

    def _bind(self, module: nn.Module, kernels: Kernels) -> None:
        self._module = module
        self._kernels = kernels
        self._call = _with_product(type(module).forward, _Product(module, kernels))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(copy.deepcopy(self._module, memo), self._kernels)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self._module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._bind(state["module"], kernels_of(None))

    def try_out(self) -> str:
        """Run the forward on zeros; tells why its product is not found, empty where it is."""
        module = self._module
        seen = _Product(module, self._kernels, only_look=True)
        weight = _weight_of(module)
        x = torch.zeros((2, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        try:
            with torch.no_grad():
                _with_product(type(module).forward, seen)(module, x)
        except Exception as error:  # it is foreign code, and wants other arguments than x
            return f"its forward fails on zeros: {type(error).__name__}: {error}"
        if seen.found != 1:
            return f"its forward multiplies by its own weight {seen.found} times, as it is"
        return ""


def _with_product(function: Any, product: _Product) -> FunctionType:
    """A function with another `F.linear`, and all else as before."""
    stand_in = ModuleType("llbf16_aot_functional")
    stand_in.__dict__.update(functional.__dict__, linear=product.linear)
    scope = {**function.__globals__, **dict.fromkeys(_functional_names(function), stand_in)}
    # With a name, torch.compile would look other names up in the module that is called so.
    del scope["__name__"]
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class _Product:
    """`F.linear`, but for the product of one module's weight, which takes the best tier."""

    def __init__(self, module: nn.Module, kernels: Kernels, *, only_look: bool = False) -> None:
        self._module = module
        self._kernels = kernels
        self._plan: Plan | None = None
        self._only_look = only_look
        self.found = 0

    def linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As torch's; by the best tier where weight and bias are the module's own."""
        if (
            self._only_look
            or weight is not self._module.weight
            or (bias is not None and bias is not self._module.bias)
        ):
            self.found += weight is self._module.weight
            return functional.linear(input, weight, bias)
        if torch.compiler.is_compiling():
            return gate_product(
                input, weight, bias, weight.dtype, fp32=False, kernels=self._kernels
            )
        plan = self._plan
        if plan is None or not plan.holds(weight, bias):
            plan = self._plan = Plan(self._kernels, weight, bias, weight.dtype, fp32=False)
        return plan(input, weight, bias)
