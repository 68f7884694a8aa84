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
    from .key import CompileKey
    from .manifest import Manifest
    from .problem import DType, Problem, Target
    from .runtime import Runtime, load_and_run
    from .store import Store

__all__ = [
    "AotError",
    "CompileKey",
    "DType",
    "Manifest",
    "Problem",
    "Runtime",
    "Store",
    "Target",
    "build",
    "load_and_run",
    "warmup_keys",
]

_HOME = {
    "AotError": "errors",
    "CompileKey": "key",
    "DType": "problem",
    "Manifest": "manifest",
    "Problem": "problem",
    "Runtime": "runtime",
    "Store": "store",
    "Target": "problem",
    "build": "builder",
    "load_and_run": "runtime",
    "warmup_keys": "dispatch",
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
