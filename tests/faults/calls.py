"""In-process faults: something happens at the n-th call that the store makes of the system."""

from __future__ import annotations

import ast
import errno
import fcntl
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from llbf16_aot import files, locks, prune, scan, store

__all__ = ["AtCall", "fail_with", "system_functions"]

_PURE = frozenset(
    {
        "close",
        "fsdecode",
        "fsencode",
        "fspath",
        "strerror",
        "getcwd",
        "geteuid",
        "getpid",
        "makedev",
    }
)
"""Touch nothing of the system, or, as `close`, are handled apart."""

_NAMED = frozenset(
    ("open", "listdir", "scandir", "stat", "mkdir", "chmod", "rename", "unlink", "rmdir", "utime")
)
"""Functions whose errors carry their first argument as the name of the file."""


def system_functions(*modules: ModuleType) -> list[tuple[ModuleType, str]]:
    """The functions of `os` and `fcntl` that modules call, found in their source."""
    names: set[tuple[str, str]] = set()
    for module in modules:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in ("os", "fcntl")
            ):
                names.add((node.func.value.id, node.func.attr))
    owners = {"os": os, "fcntl": fcntl}
    return sorted(
        ((owners[owner], name) for owner, name in names if name not in _PURE),
        key=lambda one: (one[0].__name__, one[1]),
    )


FUNCTIONS = system_functions(files, locks, prune, scan, store)


class AtCall:
    """Does `action` at the call of that number, counted over all functions; 0 only counts."""

    def __init__(self, number: int = 0, action: Callable[[], None] | None = None) -> None:
        self.count = 0
        self.reached = ""
        self._number = number
        self._action = action

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for owner, name in FUNCTIONS:
            patch.setattr(owner, name, self._wrapped(getattr(owner, name), name))
        patch.setattr(os, "close", self._closing(os.close))

    def _turn(self, name: str) -> bool:
        self.count += 1
        if self.count != self._number:
            return False
        self.reached = name
        return True

    def _wrapped(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            if self._turn(name) and self._action is not None:
                try:
                    self._action()
                except OSError as error:
                    if name in _NAMED and args:
                        # As Python does, even where what was named is a descriptor's number.
                        error.filename = args[0]
                    raise
            return real(*args, **keywords)

        return call

    def _closing(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def close(descriptor: int) -> None:
            # The system gives the descriptor back whatever close reports.
            real(descriptor)
            if self._turn("close") and self._action is not None:
                self._action()

        return close


def fail_with(name: str) -> Callable[[], None]:
    """An action that fails as the system does with that error."""
    number = getattr(errno, name)

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail
