"""The toolchain: which compiler is installed and how it is called, told without importing it."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["COMPILER", "COMPILE_OPTIONS", "KNOWN_TARGETS", "builder_version", "toolchain"]

COMPILER = "nvidia-cutlass-dsl"
"""The distribution that compiles kernels."""

COMPILE_OPTIONS: tuple[str, ...] = ("--opt-level 3",)
"""Options that every kernel is compiled with; part of an artifact's provenance."""

KNOWN_TARGETS = (
    "sm_90a",
    "sm_100a",
    "sm_100f",
    "sm_103a",
    "sm_103f",
    "sm_120a",
    "sm_120f",
    "sm_121a",
    "sm_121f",
)
"""What the compiler that the extra `build` installs makes machine code for; a test compiles each.

Its assembler (ptxas 12.9) knows no sm_107 and no sm_110.
"""

_REQUIREMENT_NAME = re.compile(r"[A-Za-z0-9._-]+")


@lru_cache(maxsize=1)
def _versions() -> tuple[tuple[str, str], ...] | None:
    from importlib import metadata

    versions: dict[str, str] = {}
    waiting = [COMPILER]
    while waiting:
        name = waiting.pop()
        if name in versions:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            # Its libraries come one for each CUDA version, most of them behind extras.
            continue
        versions[name] = distribution.version
        for requirement in distribution.requires or ():
            match = _REQUIREMENT_NAME.match(requirement)
            if match is not None and match[0].startswith(f"{COMPILER}-libs-"):
                waiting.append(match[0])
    return tuple(sorted(versions.items())) if COMPILER in versions else None


def toolchain() -> dict[str, str] | None:
    """Versions of the compiler and of its libraries by distribution, None if it is not installed.

    Read from the installed packages' metadata: says what is installed, not whether it works.
    """
    versions = _versions()
    return None if versions is None else dict(versions)


def builder_version() -> str:
    """The version of this package."""
    from importlib import metadata

    return metadata.version("llbf16-aot")
