"""Ahead-of-time compiled CuTe DSL kernels for mixture-of-experts routers.

`load_and_run(x, weight)` computes router logits with a stored cubin; `build` and the command
`llbf16-aot` fill the store. Importing this package imports neither torch, CUDA nor the compiler.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .builder import build
    from .dispatch import warmup_keys
    from .errors import AotError
    from .gate import GateLinear
    from .key import CompileKey
    from .manifest import Manifest
    from .ops import router_gemm, router_gemm_out
    from .patch import patch_model
    from .problem import DType, Problem, Target
    from .runtime import Runtime, freeze, load_and_run, preload, stats, weights_updated
    from .store import Store
    from .wanted import PreloadReport

__all__ = [
    "AotError",
    "CompileKey",
    "DType",
    "GateLinear",
    "Manifest",
    "PreloadReport",
    "Problem",
    "Runtime",
    "Store",
    "Target",
    "build",
    "freeze",
    "load_and_run",
    "patch_model",
    "preload",
    "router_gemm",
    "router_gemm_out",
    "stats",
    "warmup_keys",
    "weights_updated",
]

_HOME = {
    "AotError": "errors",
    "CompileKey": "key",
    "DType": "problem",
    "GateLinear": "gate",
    "Manifest": "manifest",
    "PreloadReport": "wanted",
    "Problem": "problem",
    "Runtime": "runtime",
    "Store": "store",
    "Target": "problem",
    "build": "builder",
    "freeze": "runtime",
    "load_and_run": "runtime",
    "patch_model": "patch",
    "preload": "runtime",
    "router_gemm": "ops",
    "router_gemm_out": "ops",
    "stats": "runtime",
    "warmup_keys": "dispatch",
    "weights_updated": "runtime",
}

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that `import llbf16_aot` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
