"""Forks: objects that must not go on in a child process as if nothing had happened."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

__all__ = ["Forkable", "watch_forks"]


class Forkable(Protocol):
    """Something that is told that it now lives in a forked child."""

    def after_fork(self) -> None:
        """Runs in the child, in its only thread, before the fork returns there."""


class _Watched:
    """Everything that wants to be told, as long as somebody else keeps it alive."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.hooked = False
        self.objects: weakref.WeakSet[Forkable] = weakref.WeakSet()


_watched = _Watched()


def watch_forks(watcher: Forkable) -> None:
    """Let an object be told of every fork in the child. Costs nothing until there is one."""
    with _watched.lock:
        if not _watched.hooked:
            os.register_at_fork(after_in_child=_tell)
            _watched.hooked = True
        _watched.objects.add(watcher)


def _tell() -> None:
    # The thread that held it in the parent does not exist here.
    _watched.lock = threading.Lock()
    for watcher in tuple(_watched.objects):
        watcher.after_fork()
