"""Builds for the harnesses: everything real but the compiler, which answers at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from llbf16_aot import pool
from llbf16_aot.artifact import Artifact
from llbf16_aot.builder import assemble, plan_build
from llbf16_aot.key import CompileKey
from llbf16_aot.manifest import Manifest
from llbf16_aot.plan import BuildPlan
from llbf16_aot.pool import CompilerPool
from llbf16_aot.protocol import Compiled
from llbf16_aot.store import Store

__all__ = ["built_artifact", "counted_compiler", "instant_compiler", "plan_of"]

_SIZE = [1000]


def compiled(key: CompileKey) -> Compiled:
    """What the instant compiler answers: bytes that no two keys share."""
    text = key.digest().encode()
    size = _SIZE[0]
    return Compiled(symbol="kernel", cubin=(text * (size // len(text) + 1))[:size], ptx=b"")


def built_artifact(key: CompileKey) -> Artifact:
    """What a build must return for a key."""
    from fake_builds import COMPILER

    return assemble(key, compiled(key), compiler=dict(COMPILER))


def instant_compiler(
    patch: pytest.MonkeyPatch, size_bytes: int, on_compile: Callable[[CompileKey], None]
) -> None:
    """Let builds of this process compile at once, to cubins of that size."""
    from fake_builds import use_fake_compiler

    use_fake_compiler(patch)
    patch.setitem(globals(), "_SIZE", [size_bytes])

    def compile_key(self: CompilerPool, key: CompileKey) -> Compiled:
        on_compile(key)
        return compiled(key)

    patch.setattr(pool.CompilerPool, "compile", compile_key)


def counted_compiler(patch: pytest.MonkeyPatch, on_compile: Callable[[], None]) -> None:
    """Let builds compile in a real pool of fake compiler processes, and tell of each compile."""
    from fake_builds import use_fake_compiler

    use_fake_compiler(patch)
    real = CompilerPool.compile

    def compile_key(self: CompilerPool, key: CompileKey) -> Compiled:
        on_compile()
        return real(self, key)

    patch.setattr(CompilerPool, "compile", compile_key)


def plan_of(count: int, store: Store) -> BuildPlan:
    """A plan of that many artifacts, at most 4."""
    from fake_builds import manifest_text
    from fake_compiler import Deed

    text = manifest_text(Deed.ANSWER, tokens=f"1-{count}")
    return plan_build(Manifest.parse(text, origin="tiny.yaml"), store=store)
