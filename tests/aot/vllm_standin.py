"""A stand-in for the parts of vLLM that the plugin touches, written for these tests.

It keeps vLLM's protocol: layers are replaced when they are made, by the class name, from a table
that takes each name once; a layer has the attributes of vLLM's linear layers; plugins' exceptions
stop the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

NAMES = (
    "vllm",
    "vllm.envs",
    "vllm.platforms",
    "vllm.model_executor",
    "vllm.model_executor.custom_op",
    "vllm.model_executor.layers",
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.layers.fused_moe.router",
    "vllm.model_executor.layers.fused_moe.router.gate_linear",
)


class UnquantizedLinearMethod:
    """The method of a layer whose weight is what it looks like."""


class Fp8LinearMethod:
    """The method of a quantized layer."""


class StandIn:
    """The modules, and the classes in them."""

    def __init__(self) -> None:
        replacements: dict[str, type] = {}
        own = SimpleNamespace(calls=0)

        class PluggableLayer(nn.Module):
            def __new__(cls, *args: object, **kwargs: object) -> Any:
                return super().__new__(replacements.get(cls.__name__, cls))

            @classmethod
            def register_oot(cls, layer: type | None = None, name: str | None = None) -> Any:
                def put(made: type) -> type:
                    key = name or cls.__name__
                    assert key not in replacements
                    replacements[key] = made
                    return made

                return put if layer is None else put(layer)

        class GateLinear(PluggableLayer):
            def __init__(
                self,
                input_size: int,
                output_size: int,
                bias: bool = False,
                out_dtype: torch.dtype | None = None,
                params_dtype: torch.dtype | None = None,
                force_fp32_compute: bool = False,
                skip_bias_add: bool = False,
                quant_config: object = None,
                prefix: str = "",
                return_bias: bool = True,
            ) -> None:
                super().__init__()
                self.input_size, self.output_size = input_size, output_size
                self.skip_bias_add, self.return_bias = skip_bias_add, return_bias
                self.quant_method = Fp8LinearMethod() if quant_config else UnquantizedLinearMethod()
                self.out_dtype, self.prefix = out_dtype, prefix
                values = torch.randn(output_size, input_size).to(params_dtype or torch.bfloat16)
                self.weight = nn.Parameter(values, requires_grad=False)
                addend = torch.randn(output_size).to(values.dtype) if bias else None
                self.bias = None if addend is None else nn.Parameter(addend, requires_grad=False)

            def set_out_dtype(self, out_dtype: torch.dtype) -> None:
                if self.out_dtype is not None:
                    raise ValueError("out_dtype has already been set")
                self.out_dtype = out_dtype

            def forward(self, x: torch.Tensor) -> Any:
                own.calls += 1
                bias = None if self.skip_bias_add else self.bias
                logits = nn.functional.linear(x.to(self.weight.dtype), self.weight, bias)
                logits = logits.to(self.out_dtype or logits.dtype)
                if not self.return_bias:
                    return logits
                return logits, self.bias if self.skip_bias_add else None

        self.replacements = replacements
        self.own = own
        self.layer = PluggableLayer
        self.gate: Any = GateLinear
        self.cuda = True
        self.modules = {name: ModuleType(name) for name in NAMES}
        for name, module in self.modules.items():
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(self.modules[parent], leaf, module)
        self.set("vllm", "__version__", "9.9.9")
        self.envs: Any = self.modules["vllm.envs"]
        self.set("vllm.envs", "VLLM_BATCH_INVARIANT", False)
        self.set("vllm.platforms", "current_platform", SimpleNamespace(is_cuda=lambda: self.cuda))
        self.set("vllm.model_executor.custom_op", "PluggableLayer", PluggableLayer)
        self.set("vllm.model_executor.custom_op", "op_registry_oot", replacements)
        self.set(NAMES[-1], "GateLinear", GateLinear)

    def set(self, module: str, name: str, value: object) -> None:
        """Put something into a module."""
        setattr(self.modules[module], name, value)

    def drop(self, module: str, name: str) -> None:
        """Take something out of a module."""
        delattr(self.modules[module], name)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make `import vllm` find the stand-in."""
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)


def load_plugins(functions: list[Callable[[], object]]) -> None:
    """What vLLM does with the functions of its entry points: exceptions go through."""
    for function in functions:
        function()
