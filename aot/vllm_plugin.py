"""The vLLM plugin: replaces vLLM's GateLinear by one that launches stored kernels.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`. What a
layer cannot have served by kernels stays vLLM's own code. Nothing here may stop a server: trouble
is one line in vLLM's log.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import Any, NamedTuple

import torch

from .environment import Environment
from .errors import AotError
from .gate import gate_product, register_kernels
from .problem import FEW_TOKENS
from .search import REPRESENTATIVE_FP32_TOKENS, REPRESENTATIVE_TOKENS
from .tiers import Kernels, Plan

__all__ = ["LAYER", "register", "replacement"]

LAYER = "GateLinear"
"""The class name under which vLLM looks up replacements."""

PRELOADED = tuple(
    sorted({*range(1, FEW_TOKENS + 1), *REPRESENTATIVE_TOKENS, *REPRESENTATIVE_FP32_TOKENS})
)
"""Token counts whose kernels are made ready, before vLLM captures graphs: those that tables tell
apart."""

_MARK = "llbf16_aot_used"

# Below vLLM's own logger, which vLLM shows; ours it does not.
logger = logging.getLogger("vllm.llbf16_aot")


class _Vllm(NamedTuple):
    """What is needed of vLLM."""

    version: str
    gate: Any
    replacements: dict[str, Any]
    current_platform: Any
    envs: Any


def register() -> None:
    """The entry point: let vLLM make gates of ours. Never raises, may be called again."""
    # vLLM lets the exceptions of a plugin through, and the server does not start.
    try:
        outcome = _register()
    except Exception as error:
        logger.warning(
            "llbf16-aot: vLLM's gates stay as they are: %s: %s", type(error).__name__, error
        )
    else:
        if outcome:
            logger.info("llbf16-aot: %s", outcome)


def replacement(gate: Any, current_platform: Any, envs: Any) -> type:
    """The class that stands in for vLLM's gate class, a subclass of it.

    Whether a layer is served by kernels is decided when it is made and when `set_out_dtype` is
    called, before vLLM traces or captures anything; kernels of all small batches are ready then.
    """

    class AotGateLinear(gate):  # type: ignore[misc]
        """vLLM's gate, computed by stored kernels where these can."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.llbf16_aot_used = False
            self._decide(final=self.out_dtype is not None)

        def set_out_dtype(self, out_dtype: torch.dtype) -> None:
            """As vLLM's, then decide anew."""
            super().set_out_dtype(out_dtype)
            self._decide(final=True)

        def forward(self, x: torch.Tensor) -> Any:
            """Logits, with the bias that vLLM expects beside them where it does."""
            if not self.llbf16_aot_used:
                return super().forward(x)
            logits = gate_product(
                x,
                self.weight,
                self.bias,
                self.out_dtype or self.weight.dtype,
                fp32=False,
                kernels=_Shared.kernels,
            )
            return (logits, None) if getattr(self, "return_bias", True) else logits

        def _decide(self, *, final: bool) -> None:
            try:
                reason = _unfit(self, current_platform, envs) or _unserved(self)
            except Exception as error:  # a gate that fails to be ours is still vLLM's
                reason = f"{type(error).__name__}: {error}"
            self.llbf16_aot_used = not reason
            if final and (reason, _shape(self)) not in _Shared.told:
                _Shared.told.add((reason, _shape(self)))
                if reason:
                    logger.warning("llbf16-aot: gate %s is left to vLLM: %s", _shape(self), reason)
                else:
                    logger.info("llbf16-aot: gate %s is served by stored kernels", _shape(self))

    return AotGateLinear


class _Shared:
    """What the gates of a process share."""

    kernels = register_kernels(Kernels(warm=PRELOADED))
    told: set[tuple[str, str]] = set()  # noqa: RUF012


def _register() -> str:
    """Register the replacement; tells what was done, empty where there was nothing to do."""
    if not Environment().vllm:
        return "switched off by LLBF16_AOT_VLLM=0"
    vllm = _find_vllm()
    present = vllm.replacements.get(LAYER)
    if present is not None:
        if hasattr(present, "llbf16_aot"):
            return ""
        return (
            f"vLLM's gates stay as they are: {present.__module__}.{present.__qualname__} has them"
        )
    made = replacement(vllm.gate, vllm.current_platform, vllm.envs)
    made.llbf16_aot = True  # type: ignore[attr-defined]
    vllm.gate.register_oot(name=LAYER)(made)
    if vllm.replacements.get(LAYER) is not made:
        raise AotError(f"vLLM {vllm.version} did not take the replacement of {LAYER}")
    return f"gates of vLLM {vllm.version} are made to use stored kernels"


def _find_vllm() -> _Vllm:
    """vLLM's parts; raises ImportError where one is not there, AotError where one is unlike."""
    vllm = importlib.import_module("vllm")
    envs = importlib.import_module("vllm.envs")
    platforms = importlib.import_module("vllm.platforms")
    custom_op = importlib.import_module("vllm.model_executor.custom_op")
    gate_linear = importlib.import_module("vllm.model_executor.layers.fused_moe.router.gate_linear")
    version = str(getattr(vllm, "__version__", "of unknown version"))
    gate = getattr(gate_linear, LAYER, None)
    layer = getattr(custom_op, "PluggableLayer", None)
    replacements: Any = getattr(custom_op, "op_registry_oot", None)
    reason = _unlike(gate, layer, replacements)
    if reason:
        raise AotError(f"vLLM {version} is not as this plugin knows it: {reason}")
    return _Vllm(version, gate, replacements, platforms.current_platform, envs)


def _unlike(gate: Any, layer: Any, replacements: Any) -> str:
    """In what these differ from the vLLM that this was written for; empty where they do not."""
    if not isinstance(gate, type) or not isinstance(layer, type):
        return f"no class {LAYER} or PluggableLayer"
    if not issubclass(gate, layer):
        return f"{LAYER} is no PluggableLayer"
    if not isinstance(replacements, dict):
        return "no table of replacements"
    wanted = {
        "__init__": ["input_size", "output_size"],
        "forward": ["x"],
        "set_out_dtype": ["out_dtype"],
        "register_oot": [],
    }
    for name, parameters in wanted.items():
        method = getattr(gate, name, None)
        if method is None:
            return f"{LAYER} has no {name}"
        found = [one for one in inspect.signature(method).parameters if one != "self"]
        if found[: len(parameters)] != parameters:
            return f"{LAYER}.{name} takes {found}"
        if name == "forward" and found != parameters:
            return f"{LAYER}.forward takes {found}"
    return ""


def _unfit(layer: Any, current_platform: Any, envs: Any) -> str:
    """What of a layer, or of vLLM's settings, no kernel of ours provides for."""
    weight = getattr(layer, "weight", None)
    if not current_platform.is_cuda():
        return "the platform is not CUDA"
    if getattr(envs, "VLLM_BATCH_INVARIANT", False):
        return "VLLM_BATCH_INVARIANT is set: kernels are chosen by the number of tokens"
    if type(getattr(layer, "quant_method", None)).__name__ not in (
        "UnquantizedLinearMethod",
        "_GateLinearMethod",
    ):
        return "the gate is quantized"
    if getattr(layer, "skip_bias_add", False):
        return "skip_bias_add is set"
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return "there is no weight of two dimensions"
    return ""


def _unserved(layer: Any) -> str:
    """Why no kernel serves a layer's small batches; makes ready the kernels that do."""
    weight = layer.weight
    if weight.device.type == "meta":
        return ""  # placed later: the operator decides, and warms up, when it first runs
    plan = Plan(_Shared.kernels, weight, layer.bias, layer.out_dtype or weight.dtype, fp32=False)
    return plan.unserved(PRELOADED, torch.bfloat16)


def _shape(layer: Any) -> str:
    weight = getattr(layer, "weight", None)
    dtype = getattr(weight, "dtype", None)
    return f"K={layer.input_size} N={layer.output_size} {str(dtype).removeprefix('torch.')}"
