"""Tiers: the five ways to compute a gate's logits, and which of them a call takes, with reasons.

What concerns the weight is decided once, as a `Plan`; what concerns x in every call.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from torch.nn import functional

from .errors import AotError, ColdCaptureError, MissError, UnsupportedProblemError
from .key import CompileKey
from .loader import LIBRARY, NOT_LOADED, Missing
from .problem import ALIGNMENT_BYTES, OPERAND_TOKENS, DType, Epilogue, Problem
from .runtime import Runtime, process_runtime
from .tensors import DTYPES, check_operands
from .wanted import PreloadReport

__all__ = ["Explanation", "Kernels", "PassedOver", "Plan", "Tier", "linear", "takes", "widens"]

MIN_CAPABILITY = (9, 0)
"""Compute capability of the first GPUs with what our kernels are made of: clusters and st.async."""

FP32_TOKENS = OPERAND_TOKENS[DTYPES[torch.float32], DTYPES[torch.float32]]
"""Largest M of tier 2; above it tier 3 serves bf16 x."""

MAX_PLANS = 4096
"""Plans that a `Kernels` keeps for the operator; more weights than that are no model's gates."""

_MISALIGNED = ALIGNMENT_BYTES - 1
_MAX_INT32 = 2**31 - 1
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Tier(enum.IntEnum):
    """The ways to compute logits, the best first."""

    BF16 = 1
    FP32 = 2
    BF16X3 = 3
    CUBLAS = 4
    LINEAR = 5

    @property
    def title(self) -> str:
        """What the tier is, in words."""
        return _TITLES[self]


_TITLES = {
    Tier.BF16: "bf16 kernel",
    Tier.FP32: "fp32 kernel",
    Tier.BF16X3: "bf16x3 kernel",
    Tier.CUBLAS: "torch.mm, bf16 to fp32",
    Tier.LINEAR: "F.linear with casts",
}


def _tier_of(key: CompileKey) -> Tier:
    """The tier that a kernel belongs to: by its weights, and those of fp32 by its arithmetic."""
    if key.weight_dtype is DType.BF16:
        return Tier.BF16
    return Tier.FP32 if key.backend == "fp32" else Tier.BF16X3


class PassedOver(msgspec.Struct, frozen=True):
    """A tier that a call does not take, and why."""

    tier: Tier
    reason: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """How a gate computes the logits of a call.

    `call` is the compile key of the kernel, or the torch call, or the error that the runtime raises
    for a missing kernel. `bias` tells who adds the bias, empty where there is none. `passed_over`
    holds every earlier tier, in order, with the reason.
    """

    tier: Tier
    call: str
    bias: str
    passed_over: tuple[PassedOver, ...]

    def reason(self, tier: Tier | int) -> str:
        """Why a tier was passed over; empty for one that was not."""
        return next((one.reason for one in self.passed_over if one.tier == tier), "")

    def __str__(self) -> str:
        lines = [f"tier {self.tier.value}, {self.tier.title}: {self.call}"]
        if self.bias:
            lines.append(f"  {self.bias}")
        for one in self.passed_over:
            lines.append(f"  not tier {one.tier.value}, {one.tier.title}: {one.reason}")
        return "\n".join(lines)


def takes(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    """Whether the runtime takes x and weight of these dtypes together: its own check is asked."""
    x, weight = (torch.empty((1, 64), dtype=dtype) for dtype in (x_dtype, weight_dtype))
    try:
        check_operands(x, weight, "cpu")
    except (TypeError, ValueError):
        return False
    return True


def widens(device_type: str) -> bool:
    """Whether this torch multiplies bf16 to fp32 in one call on such devices."""
    mm: Any = torch.ops.aten.mm
    if "dtype" not in mm.overloads():
        return False  # the keyword came with torch 2.8
    key = device_type.upper()
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", key))


def widening_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` of bf16 x [M, K] and weight [N, K], summed and returned in fp32."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    fp32: bool,
) -> torch.Tensor:
    """`F.linear` in the weight's dtype, or with `fp32` in fp32 despite autocast; then cast."""
    if fp32:
        with torch.autocast(x.device.type, enabled=False):
            product = functional.linear(
                x.float(), weight.float(), None if bias is None else bias.float()
            )
    else:
        if bias is not None:
            bias = bias.to(weight.dtype)
        product = functional.linear(x.to(weight.dtype), weight, bias)
    return product.to(out_dtype)


def _epilogue_of(bias: torch.Tensor | None) -> Epilogue | None:
    """What a kernel does with a bias; None where it cannot add this one, and torch does."""
    if bias is None:
        return Epilogue.NONE
    if bias.layout is not torch.strided or not bias.is_contiguous() or bias.is_neg():
        return None
    return _BIASES.get(bias.dtype)


def _kernel_out_dtype(out_dtype: torch.dtype, epilogue: Epilogue | None) -> torch.dtype:
    """What a kernel is asked for: sums that torch adds a bias to are rounded after that only."""
    return torch.float32 if epilogue is None else out_dtype


def _kernel_product(
    runtime: Runtime,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    epilogue: Epilogue | None,
) -> torch.Tensor:
    """Logits by the runtime."""
    if epilogue is Epilogue.NONE:
        return runtime.run(x, weight, out_dtype=out_dtype)
    if epilogue is not None:
        return runtime.run(x, weight, out_dtype=out_dtype, bias=bias)
    sums = runtime.run(x, weight)
    return (sums if bias is None else sums.add_(bias)).to(out_dtype)


_BIASES = {torch.float32: Epilogue.BIAS_FP32, torch.bfloat16: Epilogue.BIAS_BF16}

_BY_TORCH = "bias added by torch"
_BY_KERNEL = "bias added by the kernel"


class Kernels:
    """What gates know of a runtime: their own, or without one the process's, made when needed.

    `number` names it in a graph that torch.compile made. `warm`: token counts whose kernels are
    made ready when the operator first sees a weight, outside of a capture.
    """

    def __init__(self, runtime: Runtime | None = None, *, warm: Iterable[int] = ()) -> None:
        self._runtime = runtime
        self._warm = tuple(warm)
        self._plans: dict[tuple[object, ...], Plan] = {}
        self.device_type = "cuda" if runtime is None else runtime.device_type
        self.number = 0

    @property
    def runtime(self) -> Runtime:
        """The runtime; raises StoreError where the process's has no store."""
        return process_runtime() if self._runtime is None else self._runtime

    @property
    def own_runtime(self) -> Runtime | None:
        """The runtime that was given, None where it is the process's."""
        return self._runtime

    def fault(self, device: torch.device) -> str:
        """Why no kernel can run on a device; empty where it can."""
        if device.type != self.device_type:
            return f"weight is on {device}, kernels run on {self.device_type}"
        try:
            capability = self.runtime.capability(device.index or 0)
        except AotError as error:
            return error.message
        if capability < MIN_CAPABILITY:
            have, need = (".".join(map(str, one)) for one in (capability, MIN_CAPABILITY))
            return f"{device} has compute capability {have}, kernels need {need}"
        return ""

    def plan(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        *,
        fp32: bool,
    ) -> Plan:
        """The plan of a weight, found by what it depends on: for code with no place to keep it."""
        key = (
            type(weight),
            weight.dtype,
            weight.device,
            weight.shape,
            weight.stride(),
            weight.data_ptr() & _MISALIGNED,
            _bias_facts(bias),
            out_dtype,
            fp32,
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = Plan(self, weight, bias, out_dtype, fp32=fp32)
            if self._warm and not plan.warm(self._warm):
                return plan  # in a capture: warmed up by a later call
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan


class Plan:
    """What a weight admits: decided once, holds while the weight stays what it is.

    Keeps no tensor alive. `out_dtype` is that of the logits, `fp32` forbids to compute in less.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        *,
        fp32: bool,
    ) -> None:
        self._kernels = kernels
        self._out_dtype = out_dtype
        self._fp32 = fp32
        self._identity = id(weight)  # no weak reference: torch.utils.swap_tensors refuses those
        self._stride = weight.stride() if weight.layout is torch.strided else None
        self._bias = bias is not None
        self._bias_id = id(bias)
        self._bias_facts = _bias_facts(bias)
        self._epilogue = _epilogue_of(bias)
        self._dtype = weight.dtype
        self._device = weight.device
        self._experts, self._hidden = weight.shape
        self._plain = _is_plain(weight) and (bias is None or _is_plain(bias))
        self._address = weight.data_ptr() if self._plain else 0
        self._version = _version(weight)
        self._fault = self._find_fault(weight, bias)
        self._pair_faults: dict[torch.dtype, str] = {}
        """Why no kernel takes x of a dtype with the weight; empty where none takes the weight."""
        self._limits: dict[torch.dtype, int] = {}
        """The largest M of a kernel for each dtype of x; without those that no kernel takes."""
        if not self._fault:
            for x_dtype in DTYPES:
                fault = self._pair_faults[x_dtype] = self._find_pair_fault(x_dtype)
                if not fault:
                    self._limits[x_dtype] = OPERAND_TOKENS[DTYPES[x_dtype], DTYPES[self._dtype]]
        self._cublas_fault = self._find_cublas_fault()

    def holds(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether the plan is still that of this weight and bias."""
        return (
            self._identity == id(weight)
            and self._dtype is weight.dtype
            and self._version == _version(weight)
            and self._bias_id == id(bias)
            and (bias is None or self._bias_facts == _bias_facts(bias))
            and (
                not self._plain
                or (self._address == weight.data_ptr() and self._stride == weight.stride())
            )
        )

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits of x [..., K]: a new tensor [..., N] of the plan's output dtype."""
        if not self._wants_grad(x, weight, bias):
            limit = self._limits.get(x.dtype, 0)
            if limit or not self._cublas_fault:
                flat = self._flat(x)
                if flat is not None and flat.shape[0] > 0:
                    if flat.shape[0] <= limit and (self._admits(flat) or not self._x_fault(flat)):
                        return self._shaped(
                            x,
                            _kernel_product(
                                self._kernels.runtime,
                                flat,
                                weight,
                                bias,
                                self._out_dtype,
                                self._epilogue,
                            ),
                        )
                    if not self._cublas_fault and not self._cublas_x_fault(flat):
                        product = widening_product(flat, weight)
                        return self._shaped(x, product if bias is None else product.add_(bias))
        return linear(x, weight, bias, self._out_dtype, fp32=self._fp32)

    def explain(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Explanation:
        """What `__call__` would do; computes nothing, loads the kernel that it names."""
        passed: list[PassedOver] = []
        note = "" if bias is None else "bias added by F.linear"

        def told(tier: Tier, call: str, bias_by: str = note) -> Explanation:
            return Explanation(
                tier=tier,
                call=call,
                bias=bias_by if bias is not None else "",
                passed_over=tuple(one for one in passed if one.tier < tier),
            )

        common = self._common_fault(x, weight, bias)
        flat = None if common else self._flat(x)
        candidate: Tier | None = None
        for tier in (Tier.BF16, Tier.FP32, Tier.BF16X3):
            reason = self._dtype_fault(tier) or common
            if not reason and flat is not None:
                reason = self._kernel_fault(flat) or self._tokens_fault(tier, flat.shape[0])
            if not reason:
                candidate = tier
                break
            passed.append(PassedOver(tier, reason))
        if candidate is not None and flat is not None:
            served = self._served(flat)
            if isinstance(served, CompileKey):
                tier = _tier_of(served)
                for earlier in range(candidate, tier):
                    passed.append(
                        PassedOver(Tier(earlier), f"the tuning table chooses {served.backend} here")
                    )
                return told(tier, str(served), _BY_TORCH if self._epilogue is None else _BY_KERNEL)
            passed.append(PassedOver(candidate, served.message))
            for later in range(candidate + 1, Tier.CUBLAS):
                reason = self._dtype_fault(Tier(later)) or self._tokens_fault(
                    Tier(later), flat.shape[0]
                )
                passed.append(PassedOver(Tier(later), reason or served.message))
            error = self._error_of(served)
            if error:
                return told(candidate, f"raises {error}: {served.message}", "")
            return self._explain_fallback(passed, told_bias=bias is not None)
        reason = common or self._cublas_fault
        if not reason and flat is not None:
            reason = self._cublas_x_fault(flat)
        if not reason:
            return told(Tier.CUBLAS, _mm_text(torch.float32), _BY_TORCH)
        passed.append(PassedOver(Tier.CUBLAS, reason))
        return told(Tier.LINEAR, self._linear_text(x))

    def _error_of(self, missing: Missing) -> str:
        """The name of the error that the runtime raises for a miss; empty where it falls back."""
        runtime = self._kernels.runtime
        if missing.reason == NOT_LOADED and runtime.capturing():
            return ColdCaptureError.__name__
        if runtime.on_miss == "error" and missing.reason != LIBRARY:
            return MissError.__name__
        return ""

    def _explain_fallback(self, passed: list[PassedOver], *, told_bias: bool) -> Explanation:
        """What the runtime's own fallback does, which computes as `fallback.TorchProduct`."""
        out_dtype = _kernel_out_dtype(self._out_dtype, self._epilogue)
        bias = _BY_TORCH if told_bias else ""
        plain = self._dtype is torch.bfloat16
        rounds = out_dtype is torch.bfloat16 and not self._bias
        if plain and not rounds and widens(self._device.type):
            return Explanation(
                tier=Tier.CUBLAS, call=_mm_text(out_dtype), bias=bias, passed_over=tuple(passed)
            )
        if not plain:
            reason = f"weight is {_name(self._dtype)}"
        elif rounds:
            reason = "logits are bfloat16"
        else:
            reason = f"this torch does not widen on {self._device.type}"
        return Explanation(
            tier=Tier.LINEAR,
            call=f"F.linear of the runtime's fallback, to {_name(out_dtype)}",
            bias=bias,
            passed_over=(*passed, PassedOver(Tier.CUBLAS, reason)),
        )

    def warm(self, tokens: Iterable[int]) -> bool:
        """Make the kernels for bf16 x of these token counts ready; False during a capture."""
        if not self._limits:
            return True
        if self._kernels.runtime.capturing():
            return False
        self.preload(tokens, (torch.bfloat16,))
        return True

    def unserved(self, tokens: Iterable[int], x_dtype: torch.dtype) -> str:
        """Why no kernel serves any of these token counts; empty where one does.

        Makes ready what it finds. Counts and logs no miss.
        """
        reason = self._fault or self._pair_faults.get(x_dtype, f"x is {_name(x_dtype)}")
        if reason:
            return reason
        served = False
        for count in tokens:
            if count <= self._limits[x_dtype]:
                problem = self._problem(count, x_dtype)
                found = self._kernels.runtime.lookup(problem, self._device.index or 0)
                if isinstance(found, CompileKey):
                    served = True
                else:
                    reason = reason or found.message
        return "" if served else reason

    def preload(
        self, tokens: Iterable[int], x_dtypes: Iterable[torch.dtype]
    ) -> PreloadReport | None:
        """`Runtime.preload` of the kernels of these token counts; None where no kernel serves.

        What the tuning table leaves to the library is left out.
        """
        counts = tuple(tokens)
        keys: dict[CompileKey, None] = {}
        index = self._device.index or 0
        if not self._limits:
            return None
        runtime = self._kernels.runtime
        for x_dtype in x_dtypes:
            for count in counts:
                if not 0 < count <= self._limits.get(x_dtype, 0):
                    continue
                found = runtime.lookup(self._problem(count, x_dtype), index)
                key = found if isinstance(found, CompileKey) else found.key
                if key is not None:
                    keys[key] = None
        return runtime.preload(keys, devices=[index])

    # ---- what concerns the weight

    def _find_fault(self, weight: torch.Tensor, bias: torch.Tensor | None) -> str:
        """Why no kernel can take the weight, whatever x is; its dtype aside."""
        if not self._plain:
            return f"weight is a {type(weight).__name__}"
        if bias is not None and bias.device != weight.device:
            return f"bias is on {bias.device}, weight on {weight.device}"
        if bias is not None and bias.shape != (self._experts,):
            return f"bias has shape {tuple(bias.shape)}, must be [N] = ({self._experts},)"
        if self._out_dtype not in DTYPES:
            return f"logits are {_name(self._out_dtype)}"
        return self._kernels.fault(weight.device) or _layout_fault("weight", weight)

    def _find_pair_fault(self, x_dtype: torch.dtype) -> str:
        """Why no kernel takes x of a dtype with the weight, whatever else x is."""
        pair = f"x is {_name(x_dtype)}, weight {_name(self._dtype)}"
        weight_dtype = DTYPES.get(self._dtype)
        if weight_dtype is None or (DTYPES[x_dtype], weight_dtype) not in OPERAND_TOKENS:
            return pair
        try:
            self._problem(1, x_dtype).check()
        except UnsupportedProblemError as error:
            return error.message
        return "" if takes(x_dtype, self._dtype) else f"{pair}: this runtime does not take them"

    def _find_cublas_fault(self) -> str:
        """Why the widening product cannot take the weight, whatever x is."""
        if self._dtype is not torch.bfloat16:
            return f"weight is {_name(self._dtype)}"
        if self._out_dtype is not torch.float32:
            return f"logits are {_name(self._out_dtype)}"
        fault = self._kernels.fault(self._device) if self._plain else self._fault
        if fault:
            return fault
        return "" if widens(self._device.type) else f"torch has none for {self._device.type}"

    def _dtype_fault(self, tier: Tier) -> str:
        wanted = torch.bfloat16 if tier is Tier.BF16 else torch.float32
        return "" if self._dtype is wanted else f"weight is {_name(self._dtype)}"

    def _problem(self, tokens: int, x_dtype: torch.dtype) -> Problem:
        return Problem(
            tokens,
            self._experts,
            self._hidden,
            DTYPES[_kernel_out_dtype(self._out_dtype, self._epilogue)],
            x_dtype=DTYPES[x_dtype],
            weight_dtype=DTYPES[self._dtype],
            epilogue=self._epilogue or Epilogue.NONE,
        )

    # ---- what concerns x

    def _wants_grad(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        return torch.is_grad_enabled() and (
            x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        )

    def _flat(self, x: torch.Tensor) -> torch.Tensor | None:
        """x as [M, K], None where it has no rows of K elements."""
        shape = x.shape
        if not shape or shape[-1] != self._hidden or not self._hidden:
            return None
        return x if len(shape) == 2 else x.reshape(-1, self._hidden)

    def _shaped(self, x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        return product if x.dim() == 2 else product.reshape(*x.shape[:-1], self._experts)

    def _admits(self, flat: torch.Tensor) -> bool:
        """Whether a glance shows that kernels take x; false says nothing."""
        try:
            return (
                type(flat) is torch.Tensor
                and flat.is_contiguous()
                and not flat.data_ptr() & _MISALIGNED
                and flat.device == self._device
                and not flat.is_neg()
            )
        except RuntimeError:  # no memory of its own: sparse, or wrapped by a transform
            return False

    def _x_fault(self, flat: torch.Tensor) -> str:
        """Why kernels do not take x of these rows; its dtype and M aside."""
        if not _is_plain(flat):
            return f"x is a {type(flat).__name__}"
        if flat.device != self._device:
            return f"x is on {flat.device}, weight on {self._device}"
        return _layout_fault("x", flat)

    def _common_fault(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> str:
        """What bars every tier but the last."""
        if self._wants_grad(x, weight, bias):
            return "autograd is on and a tensor requires grad: kernels have no backward"
        flat = self._flat(x)
        if flat is None:
            return f"x has shape {tuple(x.shape)}, must end in K = {self._hidden}"
        return "" if flat.shape[0] else "x has no rows"

    def _kernel_fault(self, flat: torch.Tensor) -> str:
        """Why no kernel computes this x."""
        if self._fault:
            return self._fault
        limit = self._limits.get(flat.dtype)
        if limit is None:
            pair = f"x is {_name(flat.dtype)}, weight {_name(self._dtype)}"
            return self._pair_faults.get(flat.dtype, pair)
        if flat.shape[0] > limit:
            return f"M is {flat.shape[0]}, at most {limit}"
        return self._x_fault(flat)

    def _tokens_fault(self, tier: Tier, tokens: int) -> str:
        """Why M leaves a tier to its neighbour."""
        if tier is Tier.FP32 and tokens > FP32_TOKENS:
            return f"M is {tokens}, at most {FP32_TOKENS}"
        if tier is Tier.BF16X3 and tokens <= FP32_TOKENS:
            return f"M is {tokens}, above {FP32_TOKENS} only"
        return ""

    def _cublas_x_fault(self, flat: torch.Tensor) -> str:
        if flat.dtype is not torch.bfloat16:
            return f"x is {_name(flat.dtype)}"
        if flat.layout is not torch.strided:
            return f"x has layout {flat.layout}"
        if flat.device != self._device:
            return f"x is on {flat.device}, weight on {self._device}"
        return ""

    def _served(self, flat: torch.Tensor) -> CompileKey | Missing:
        problem = self._problem(flat.shape[0], flat.dtype)
        return self._kernels.runtime.lookup(problem, self._device.index or 0)

    def _linear_text(self, x: torch.Tensor) -> str:
        dtype = torch.float32 if self._fp32 else self._dtype
        parts = [f"F.linear in {_name(dtype)}"]
        if x.dtype != dtype:
            parts.append(f"x cast from {_name(x.dtype)}")
        if self._out_dtype != dtype:
            parts.append(f"logits cast to {_name(self._out_dtype)}")
        return ", ".join(parts)


def _mm_text(out_dtype: torch.dtype) -> str:
    call = "torch.mm(x, weight.T, out_dtype=torch.float32)"
    return call if out_dtype is torch.float32 else f"{call}.to({out_dtype})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bias_facts(bias: torch.Tensor | None) -> tuple[object, ...] | None:
    """What it depends on who adds a bias."""
    if bias is None:
        return None
    strides = bias.stride() if bias.layout is torch.strided else None
    return type(bias), bias.dtype, bias.device, bias.shape, strides


def _version(weight: torch.Tensor) -> int:
    """torch's count of changes in place; tensors of inference mode have none."""
    return 0 if weight.is_inference() else weight._version


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory and nothing else: no wrapper, no fake, no transform's stand-in."""
    if type(tensor) not in _PLAIN and torch.nn.Parameter not in type(tensor).__mro__:
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def _layout_fault(name: str, tensor: torch.Tensor) -> str:
    """Why the rows of a 2-D tensor cannot be loaded 16 bytes at a time; empty where they can.

    The runtime checks the same before every launch, and raises where this asks.
    """
    if tensor.layout is not torch.strided:
        return f"{name} has layout {tensor.layout}"
    if tensor.is_neg():
        return f"{name} is a lazily negated view"
    rows, hidden = tensor.shape
    row_stride, stride = tensor.stride()
    if not rows or not hidden:
        return f"{name} has shape {(rows, hidden)}"
    if stride != 1:
        return f"{name} has strides {(row_stride, stride)}, rows must be contiguous"
    if tensor.data_ptr() & _MISALIGNED:
        return f"{name} does not start at a multiple of {ALIGNMENT_BYTES} bytes"
    if rows > 1:
        if row_stride < hidden:
            return f"{name} has row stride {row_stride}, less than K = {hidden}"
        if row_stride * tensor.element_size() % ALIGNMENT_BYTES:
            return f"{name} has rows that do not start at multiples of {ALIGNMENT_BYTES} bytes"
        if row_stride > _MAX_INT32:
            return f"{name} has row stride {row_stride}, at most {_MAX_INT32}"
    return ""
