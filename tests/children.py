"""Child processes for tests: run a function as another user, kill it, or start many at once."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import NamedTuple

NOBODY = 65534
LIMIT_S = 30


def heed_signals() -> None:
    """For a program that is to be ended by signals: what ignores them here is not passed on.

    A runner in the background ignores SIGINT, and one under nohup SIGHUP; Python leaves both so.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Outcome(NamedTuple):
    """How a child ended: with a value, with an exception, or by a signal."""

    value: object = None
    error: str = ""
    message: str = ""
    hint: str = ""
    signal: int = 0


class Child:
    """A forked process that runs one function; `LIMIT_S` seconds later it is killed by SIGALRM."""

    def __init__(
        self,
        function: Callable[[], object],
        *,
        uid: int | None = None,
        gate: tuple[int, int] | None = None,
    ) -> None:
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            # The child runs Python code only, no library that a thread of the parent may be in.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _run(function, writing, uid, gate)
        os.close(writing)
        self._reading = reading

    def join(self) -> Outcome:
        """Wait for the end and say how it was."""
        parts = []
        while part := os.read(self._reading, 1 << 16):
            parts.append(part)
        os.close(self._reading)
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status):
            return Outcome(signal=os.WTERMSIG(status))
        outcome = pickle.loads(b"".join(parts))  # noqa: S301 - written by our own child
        assert isinstance(outcome, Outcome)
        return outcome


def _run(
    function: Callable[[], object], writing: int, uid: int | None, gate: tuple[int, int] | None
) -> None:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        if uid is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        if gate is not None:
            # Ends when the last writing end is closed: all children start at once.
            os.close(gate[1])
            os.read(gate[0], 1)
        outcome = Outcome(value=function())
    except BaseException as error:
        outcome = Outcome(
            error=type(error).__name__,
            message=str(error) or traceback.format_exc(),
            hint=getattr(error, "hint", ""),
        )
    try:
        data = pickle.dumps(outcome)
        while data:
            data = data[os.write(writing, data) :]
    finally:
        os._exit(0)


def in_child(function: Callable[[], object], *, uid: int | None = None) -> Outcome:
    """Run a function in a child process, as another user if asked."""
    return Child(function, uid=uid).join()


def all_at_once(functions: list[Callable[[], object]]) -> list[Outcome]:
    """Run functions in one process each, which start together."""
    gate = os.pipe()
    children = [Child(function, gate=gate) for function in functions]
    os.close(gate[0])
    os.close(gate[1])
    return [child.join() for child in children]
