"""Mending a miss: compile what is missing and publish it, for `on_miss="compile"`.

The one module that the runtime shares with the builder. The compiler runs in a child process; this
process never imports it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .artifact import Artifact
from .builder import execute
from .errors import AotError
from .key import CompileKey
from .plan import plan_keys
from .store import Store

__all__ = ["RUNTIME_MODEL", "compile_keys"]

RUNTIME_MODEL = "runtime"
"""Who asks for what is compiled here, where an artifact's models are listed."""


def compile_keys(keys: Iterable[CompileKey], store: Store) -> dict[CompileKey, Artifact | AotError]:
    """Compile what of these the store lacks and publish it: each key's artifact or what failed.

    An artifact that the store would not take is among them all the same, with a warning in the log.
    Raises CompilerMissingError where the build extra is not installed, UntrustedStoreError where
    others could change the store.
    """
    wanted = {key.digest(): key for key in keys}
    plan = plan_keys(
        wanted,
        dict.fromkeys(wanted, (RUNTIME_MODEL,)),
        (),
        store=store,
        force=False,
        needs=(),
    )
    report = execute(plan, store=store)
    found: dict[CompileKey, Artifact | AotError] = {}
    for result in report.results:
        outcome = result.error if result.artifact is None else result.artifact
        if outcome is None:
            raise AotError(f"the build of {result.item.key} ended without a result")
        found[result.item.key] = outcome
    return found
