"""Checking: an artifact is built once more, and its bytes are compared with the stored ones.

The same inputs give the same bytes, so a difference says that one of the two was not made from what
its provenance states.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from .artifact import Artifact
from .builder import assemble
from .elfdiff import Difference, compare_cubins
from .environment import Environment
from .errors import AotError, CompilerMissingError
from .key import CompileKey, kernel_source_digest
from .plan import staleness
from .pool import CompilerPool
from .store import Miss
from .toolchain import COMPILER, toolchain

__all__ = ["Checked", "Verdict", "check"]


class Source(Protocol):
    """What artifacts are read from."""

    def get(self, digest: str) -> Artifact | Miss:
        """The verified artifact, or why there is none."""


class Verdict(str, enum.Enum):
    """What a rebuild says of an artifact."""

    SAME = "same"
    DIFFERENT = "different"
    UNUSABLE = "unusable"
    """The stored entry itself cannot be used."""
    INCOMPARABLE = "incomparable"
    """It was made from other inputs than the present ones."""
    FAILED = "failed"
    """It cannot be built here."""


class Checked(msgspec.Struct, frozen=True):
    """One artifact after its check."""

    digest: str
    verdict: Verdict
    key: CompileKey | None = None
    detail: str = ""
    sections: tuple[Difference, ...] = ()


def check(
    source: Source,
    digests: Iterable[str],
    *,
    jobs: int | None = None,
    command: Sequence[str] | None = None,
    on_checked: Callable[[Checked], None] | None = None,
) -> tuple[Checked, ...]:
    """Build each of these entries again in child processes, and compare; writes nothing.

    At most `jobs` processes, by default LLBF16_AOT_JOBS, else one for each core; `command` is the
    program of a compiler process. Raises CompilerMissingError where none is installed,
    UntrustedStoreError.
    """
    compiler = toolchain()
    if compiler is None:
        raise CompilerMissingError(
            f"checking builds artifacts anew and {COMPILER} is not installed",
            hint="pip install 'llbf16-aot[build]'",
        )
    wanted = tuple(dict.fromkeys(digests))
    environment = Environment()
    count = min(jobs or environment.jobs or len(os.sched_getaffinity(0)), max(1, len(wanted)))
    results = []
    with (
        CompilerPool(
            jobs=count,
            version=compiler[COMPILER],
            limit_s=environment.compile_timeout_s,
            command=command,
        ) as pool,
        ThreadPoolExecutor(count) as threads,
    ):
        try:
            for result in threads.map(lambda d: _check(source.get(d), pool, compiler), wanted):
                results.append(result)
                if on_checked is not None:
                    on_checked(result)
        finally:
            # Before the threads are waited for: they end when their compiler processes do.
            pool.close()
            threads.shutdown(cancel_futures=True)
    return tuple(results)


def _check(found: Artifact | Miss, pool: CompilerPool, compiler: dict[str, str]) -> Checked:
    if isinstance(found, Miss):
        return Checked(found.digest, Verdict.UNUSABLE, detail=found.detail)
    record, key = found.record, found.record.key
    reason = staleness(record.provenance, compiler)
    if not reason and record.provenance.kernel_source_digest != kernel_source_digest(key.backend):
        reason = "built from other kernel sources than the installed ones"
    if reason:
        return Checked(found.digest, Verdict.INCOMPARABLE, key, reason)
    try:
        rebuilt = assemble(key, pool.compile(key), compiler=compiler)
    except AotError as error:
        return Checked(found.digest, Verdict.FAILED, key, error.message)
    sections = compare_cubins(found.cubin, rebuilt.cubin)
    if sections:
        names = "; ".join(map(str, sections))
        return Checked(found.digest, Verdict.DIFFERENT, key, names, sections)
    if rebuilt.record.launch != record.launch or rebuilt.record.resources != record.resources:
        detail = "the launch record or the resources differ, the machine code does not"
        return Checked(found.digest, Verdict.DIFFERENT, key, detail)
    return Checked(found.digest, Verdict.SAME, key)
