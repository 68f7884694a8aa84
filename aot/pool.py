"""The pool: keys compile in a bounded number of compiler processes, shared by threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import TracebackType

from .child import CompilerProcess, child_command
from .errors import CompileError
from .key import CompileKey
from .protocol import Compiled

__all__ = ["CompilerPool"]

_log = logging.getLogger(__name__)

KEYS_PER_CHILD = 40
"""A child is replaced after this many keys: each compile leaves idle threads behind in it."""


class CompilerPool:
    """At most `jobs` compiler processes, shared by the threads that call `compile`.

    `version` is the compiler's, `limit_s` the time that a process may take to start, and to compile
    one key. Not promised: any order among threads.
    """

    def __init__(
        self,
        *,
        jobs: int,
        version: str,
        limit_s: float,
        command: Sequence[str] | None = None,
        keys_per_child: int = KEYS_PER_CHILD,
    ) -> None:
        self._jobs = jobs
        self._version = version
        self._limit_s = limit_s
        self._command = tuple(child_command() if command is None else command)
        self._keys_per_child = keys_per_child
        self._changed = threading.Condition()
        self._slots = 0
        self._children: set[CompilerProcess] = set()
        self._idle: list[CompilerProcess] = []
        self._closed = False
        self._broken: CompileError | None = None

    def __enter__(self) -> CompilerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def compile(self, key: CompileKey) -> Compiled:
        """Compile one key in a child of its target, waiting for a free one.

        Raises CompileError, whose message ends with the tail of the child's log, where the compiler
        refuses, crashes, answers nonsense or takes too long, and where the pool was closed. One bad
        key costs one child; after two failed starts in a row every call fails with that reason.
        """
        child = self._lease(key.target)
        try:
            answer = child.request(key)
        except BaseException:
            self._discard(child)
            raise
        if child.served >= self._keys_per_child:
            self._discard(child)
        else:
            self._give_back(child)
        if isinstance(answer, str):
            raise CompileError(answer)
        return answer

    def close(self) -> None:
        """End every child now; calls of `compile` that are under way fail.

        What a signal cuts short here the next call goes on with.
        """
        with self._changed:
            self._closed = True
            busy = self._children.difference(self._idle)
            self._changed.notify_all()
        for child in busy:
            child.kill()
        while self._idle:
            # Forgotten only when it has ended: nobody takes an idle child from a closed pool.
            child = self._idle[-1]
            child.end()
            with self._changed:
                self._children.discard(child)
                self._idle.pop()
        with self._changed:
            # The threads that use them take the busy ones away, at once: they were killed.
            self._changed.wait_for(lambda: not self._children, timeout=10)

    def _lease(self, target: str) -> CompilerProcess:
        retired: CompilerProcess | None = None
        with self._changed:
            while True:
                self._refuse_if_unusable()
                for child in self._idle:
                    if child.target == target:
                        self._idle.remove(child)
                        return child
                if self._slots < self._jobs:
                    self._slots += 1
                    break
                if self._idle:
                    retired = self._idle.pop(0)
                    self._slots += 1
                    break
                self._changed.wait()
        if retired is not None:
            self._discard(retired)
        try:
            return self._start_twice(target)
        except BaseException:
            self._free_slot()
            raise

    def _refuse_if_unusable(self) -> None:
        if self._closed:
            raise CompileError("the build was interrupted")
        if self._broken is not None:
            raise CompileError(self._broken.message, hint=self._broken.hint)

    def _start_twice(self, target: str) -> CompilerProcess:
        """Start a child; a second failure in a row is one of the installation, not of a key."""
        try:
            return self._start(target)
        except CompileError as error:
            _log.info("starting a compiler process failed, trying once more: %s", error.message)
        try:
            return self._start(target)
        except CompileError as error:
            with self._changed:
                self._broken = self._broken or error
            raise

    def _start(self, target: str) -> CompilerProcess:
        try:
            child = CompilerProcess(self._command, target, limit_s=self._limit_s)
        except OSError as error:
            raise CompileError(
                f"a compiler process cannot be started: {error}",
                hint="TMPDIR must name a directory that can be written",
            ) from error
        with self._changed:
            self._children.add(child)
            closed = self._closed
        try:
            if closed:
                self._refuse_if_unusable()
            child.handshake(self._version)
        except BaseException:
            child.end()
            with self._changed:
                self._children.discard(child)
                self._changed.notify_all()
            raise
        return child

    def _give_back(self, child: CompilerProcess) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append(child)
                self._changed.notify()
                return
        self._discard(child)

    def _discard(self, child: CompilerProcess) -> None:
        child.end()
        with self._changed:
            self._children.discard(child)
        self._free_slot()

    def _free_slot(self) -> None:
        with self._changed:
            self._slots -= 1
            self._changed.notify_all()
