"""Environment variables: the one place that reads them, as typed values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .errors import UsageError

__all__ = ["DEFAULT_COMPILE_TIMEOUT_S", "VARIABLES", "Environment", "StoreLocation"]

DEFAULT_COMPILE_TIMEOUT_S = 120.0
"""Seconds that one kernel may take: two hundred times what the slowest one takes on one core."""

MAX_JOBS = 1024

VARIABLES = {
    "LLBF16_AOT_STORE": "path of the store, in place of the user's cache directory",
    "LLBF16_AOT_LAYERS": "absolute paths of read-only stores that are read after it, first to last",
    "LLBF16_AOT_TUNING": "tuning table of the runtime: default, reference, or a path",
    "LLBF16_AOT_JOBS": "how many compiler processes run at once, in place of one for each core",
    "LLBF16_AOT_COMPILE_TIMEOUT_S": "seconds that one kernel may take to compile, 120 if not set",
    "LLBF16_AOT_VLLM": "0 leaves vLLM's own gates in place, see docs/vllm.md",
}
"""Every variable of this package and what it sets."""


class StoreLocation(NamedTuple):
    """Where the store is, and which setting says so."""

    root: Path
    origin: str


class Environment:
    """The package's variables in a mapping, by default the process's environment.

    Each property reads its own variable, when it is asked for, so a bad value hurts only who needs
    it. An empty variable counts as not set. Bad values raise UsageError naming the variable.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = os.environ if variables is None else variables

    def _text(self, name: str) -> str | None:
        return self._variables.get(name) or None

    def given(self) -> dict[str, str | None]:
        """The text of every variable of this package, None where it is not set."""
        return {name: self._text(name) for name in VARIABLES}

    @property
    def layers(self) -> tuple[Path, ...]:
        """Read-only stores below the writable one, first to last; empty parts count for nothing."""
        text = self._text("LLBF16_AOT_LAYERS") or ""
        parts = tuple(filter(None, text.split(os.pathsep)))
        for part in parts:
            if not part.startswith("/"):
                raise UsageError(
                    f"LLBF16_AOT_LAYERS has the part {part!r}, must be absolute paths with "
                    f"{os.pathsep!r} between them",
                    hint="write the whole path of each layer",
                )
        return tuple(Path(os.path.normpath(part)) for part in parts)

    @property
    def tuning(self) -> str | None:
        """Name or path of the runtime's tuning table."""
        return self._text("LLBF16_AOT_TUNING")

    @property
    def vllm(self) -> bool:
        """Whether vLLM's gates are to be replaced."""
        text = self._text("LLBF16_AOT_VLLM")
        if text not in (None, "0", "1"):
            raise UsageError(
                f"LLBF16_AOT_VLLM is {text!r}, must be 0 or 1",
                hint="unset LLBF16_AOT_VLLM to replace vLLM's gates, set it to 0 to leave them",
            )
        return text != "0"

    @property
    def jobs(self) -> int | None:
        """Number of compiler processes that run at once."""
        text = self._text("LLBF16_AOT_JOBS")
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= MAX_JOBS):
            raise UsageError(
                f"LLBF16_AOT_JOBS is {text!r}, must be a whole number from 1 to {MAX_JOBS}",
                hint="unset LLBF16_AOT_JOBS to use every core",
            )
        return int(text)

    @property
    def compile_timeout_s(self) -> float:
        """Seconds that one kernel may take to compile."""
        text = self._text("LLBF16_AOT_COMPILE_TIMEOUT_S")
        if text is None:
            return DEFAULT_COMPILE_TIMEOUT_S
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        # The comparison is false for nan; inf would switch the limit off.
        if not 0 < seconds <= 86_400:
            raise UsageError(
                f"LLBF16_AOT_COMPILE_TIMEOUT_S is {text!r}, must be seconds above 0, at most 86400",
                hint=f"unset it to use the default of {DEFAULT_COMPILE_TIMEOUT_S:g} seconds",
            )
        return seconds

    def store_location(self, explicit: Path | None = None) -> StoreLocation:
        """The store's root: what was asked for, else LLBF16_AOT_STORE, else the user's cache.

        Raises UsageError for a path that is not absolute, StoreError where none of them gives one.
        """
        from .store import default_root

        if explicit is not None:
            origin = "--store"
        elif self._text("LLBF16_AOT_STORE") is not None:
            origin = "LLBF16_AOT_STORE"
        else:
            origin = "user cache directory"
        return StoreLocation(default_root(explicit, self._variables), origin)
