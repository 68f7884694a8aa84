"""GateLinear: a router's linear layer, computed by the best of five tiers.

Importing this module registers `torch.ops.llbf16.gate`, which compiled graphs call: the tier is
then chosen by M when the graph runs, not when it was traced.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from .runtime import Runtime
from .tiers import Explanation, Kernels, Plan, linear
from .wanted import PreloadReport

__all__ = ["GateLinear", "gate_product", "kernels_of", "register_kernels"]

_DECODE_TOKENS = range(1, 65)

_TRACED_DTYPES = (torch.bfloat16, torch.float32)


class GateLinear(nn.Module):
    """`x @ weight.T + bias` of a mixture-of-experts router, x [..., K] -> logits [..., N].

    Stands in for `nn.Linear(in_features, out_features)`: the same state-dict keys, shapes, loading
    and initial values, and whatever x `nn.Linear` takes. `weight_dtype` is the parameters' dtype,
    torch's default where none is given. `out_dtype` is the logits' dtype, the weight's where none
    is given; `set_out_dtype` changes it later. `force_fp32_compute` forbids to compute in less than
    fp32: kernels never do, and `F.linear` then runs on operands cast to fp32. `runtime` is the one
    to launch with, the process's where none is given.

    Each call takes the first tier that can serve it, see docs/gate.md; `explain(x)` tells which,
    and why not the earlier ones. What no tier of ours serves `F.linear` computes, so a gate raises
    what that raises, besides what `Runtime.run` raises for a missing kernel. Kernels have no
    backward: where autograd is on and something requires grad, `F.linear` computes.
    """

    __constants__ = ("in_features", "out_features")
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        out_dtype: torch.dtype | None = None,
        *,
        weight_dtype: torch.dtype | None = None,
        force_fp32_compute: bool = False,
        device: torch.device | str | int | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__()
        made = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=weight_dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.out_dtype = out_dtype
        self.force_fp32_compute = force_fp32_compute
        self.register_parameter("weight", made._parameters["weight"])
        self.register_parameter("bias", made._parameters["bias"])
        self._kernels = kernels_of(runtime)
        self._plan: Plan | None = None

    @classmethod
    def of(
        cls,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        force_fp32_compute: bool = False,
        runtime: Runtime | None = None,
    ) -> GateLinear:
        """A gate on these very parameters, weight [N, K] and bias [N], which it shares."""
        experts, hidden = weight.shape
        gate = cls(
            hidden,
            experts,
            bias=bias is not None,
            out_dtype=out_dtype,
            weight_dtype=weight.dtype if weight.is_floating_point() else None,
            force_fp32_compute=force_fp32_compute,
            device="meta",
            runtime=runtime,
        )
        gate.register_parameter("weight", weight)
        gate.register_parameter("bias", bias)
        return gate

    def reset_parameters(self) -> None:
        """Initial values, as `nn.Linear` draws them."""
        made = nn.Linear(
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        with torch.no_grad():
            self.weight.copy_(made.weight)
            if self.bias is not None:
                self.bias.copy_(made.bias)

    def set_out_dtype(self, out_dtype: torch.dtype | None) -> None:
        """Set the logits' dtype, and decide anew which tiers can serve."""
        self.out_dtype = out_dtype
        self._plan = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [..., N] of x [..., K]."""
        weight, bias = self.weight, self.bias
        if torch.compiler.is_compiling():
            return gate_product(
                x,
                weight,
                bias,
                self.out_dtype or weight.dtype,
                fp32=self.force_fp32_compute,
                kernels=self._kernels,
            )
        plan = self._plan
        if plan is None or not plan.holds(weight, bias):
            plan = self._decide(weight, bias)
        return plan(x, weight, bias)

    def explain(self, x: torch.Tensor) -> Explanation:
        """Which tier computes `gate(x)` and why not the earlier ones; computes nothing.

        Loads the kernel that it names, as the call would. Raises TuningTableError and
        UntrustedStoreError, as the call would.
        """
        return self._decide(self.weight, self.bias).explain(x, self.weight, self.bias)

    def preload(
        self,
        tokens: Iterable[int] = _DECODE_TOKENS,
        x_dtypes: Iterable[torch.dtype] = (torch.bfloat16,),
    ) -> PreloadReport | None:
        """Make the kernels for these token counts ready: before a capture, or `Runtime.freeze`.

        Returns what `Runtime.preload` reports, None where no kernel can serve this gate: ask
        `explain` why. Raises what `Runtime.preload` raises.
        """
        return self._decide(self.weight, self.bias).preload(tokens, tuple(x_dtypes))

    def extra_repr(self) -> str:
        """The sizes and settings, for `print`."""
        text = (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, out_dtype={self.out_dtype}"
        )
        return text + (", force_fp32_compute=True" if self.force_fp32_compute else "")

    def _decide(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Plan:
        self._plan = Plan(
            self._kernels,
            weight,
            bias,
            self.out_dtype or weight.dtype,
            fp32=self.force_fp32_compute,
        )
        return self._plan

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> GateLinear:
        """Moves and casts end here, in place of the tensors or in their memory."""
        module: Any = super()  # without types in torch
        module._apply(fn, recurse)
        self._plan = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: parameters and settings. A runtime belongs to its process."""
        state = {**self.__dict__, "_plan": None}
        del state["_kernels"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        module: Any = super()  # without types in torch
        module.__setstate__(state)
        self._kernels = kernels_of(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> GateLinear:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        made._kernels = self._kernels
        return made


class _Registry:
    """The kernels that graphs name by number, as long as somebody holds them."""

    lock = threading.Lock()
    known: ClassVar[weakref.WeakValueDictionary[int, Kernels]] = weakref.WeakValueDictionary()
    of_runtime: ClassVar[weakref.WeakValueDictionary[int, Kernels]] = weakref.WeakValueDictionary()
    last = 0
    default: Kernels | None = None
    library: Any = None


def register_kernels(kernels: Kernels) -> Kernels:
    """Give a number to kernels that compiled graphs are to name; the caller keeps them alive."""
    with _Registry.lock:
        _Registry.last += 1
        kernels.number = _Registry.last
        _Registry.known[kernels.number] = kernels
    return kernels


def kernels_of(runtime: Runtime | None) -> Kernels:
    """The kernels of a runtime, the same for all its gates, so that these share compiled code."""
    if runtime is None:
        if _Registry.default is None:
            _Registry.default = register_kernels(Kernels())
        return _Registry.default
    kernels = _Registry.of_runtime.get(id(runtime))  # alive as long as its Kernels
    if kernels is None:
        kernels = _Registry.of_runtime[id(runtime)] = register_kernels(Kernels(runtime))
    return kernels


def gate_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    fp32: bool,
    kernels: Kernels,
) -> torch.Tensor:
    """Logits as one operator, for code that is traced: x [..., K] -> [..., N] of `out_dtype`.

    Where no kernel could serve whatever M is, `F.linear` in the open, which the compiler may fuse.
    """
    grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if (
        grad
        or weight.device.type != kernels.device_type
        or weight.dtype not in _TRACED_DTYPES
        or x.dtype not in _TRACED_DTYPES
        or x.dim() == 0
    ):
        return linear(x, weight, bias, out_dtype, fp32=fp32)
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    product: torch.Tensor = torch.ops.llbf16.gate.default(
        flat, weight, bias, out_dtype, fp32, kernels.number
    )
    return product if x.dim() == 2 else product.reshape(*x.shape[:-1], weight.shape[0])


def _gate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fp32: bool,
    kernels: int,
) -> torch.Tensor:
    known = _Registry.known.get(kernels)
    if known is None:
        raise RuntimeError(
            f"the runtime number {kernels} of a compiled gate is gone: keep the gate as long as "
            "what was compiled of it"
        )
    with torch.no_grad():
        return known.plan(weight, bias, out_dtype, fp32=fp32)(x, weight, bias).contiguous()


def _fake_gate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fp32: bool,
    kernels: int,
) -> torch.Tensor:
    require: Callable[[object, Callable[[], str]], None] = torch._check
    require(
        x.shape[1] == weight.shape[1], lambda: f"x has K = {x.shape[1]}, weight {weight.shape[1]}"
    )
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


def _register() -> None:
    """Define the operator, once in a process whatever imports or reloads this module."""
    with _Registry.lock:
        if _Registry.library is not None:
            return
        make: Callable[..., Any] = torch.library.Library
        library: Any = make("llbf16", "FRAGMENT")
        # The first: the compiler may not hand over tensors with other strides than were traced.
        tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
        library.define(
            "gate(Tensor x, Tensor weight, Tensor? bias, ScalarType out_dtype, bool fp32, "
            "int kernels) -> Tensor",
            tags=tags,
        )
        library.impl("gate", _gate, "CUDA")
        library.impl("gate", _gate, "CPU")
        torch.library.register_fake("llbf16::gate", _fake_gate, lib=library)
        _Registry.library = library


_register()
