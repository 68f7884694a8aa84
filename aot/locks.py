"""Kernel locks on files of a directory: free as soon as their holder is gone, killed or not.

No lock is judged by a process number, an age or the existence of its file.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from contextlib import suppress

from .errors import LockTimeoutError
from .files import Directory, command, shown

__all__ = ["NO_LOCKS", "Lock", "acquire"]

NO_LOCKS = frozenset(
    (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM, errno.EROFS)
)
"""Asking for a lock that ends so says that there are none for us: here they cannot be had."""

_FIRST_WAIT_S = 0.001
_LONGEST_WAIT_S = 0.05


class Lock:
    """A lock that this process holds; a forked child that inherits it can let go of its copy only.

    With `temporary` the lock's file goes when the lock does.
    """

    def __init__(
        self, directory: Directory, name: str, descriptor: int, *, temporary: bool
    ) -> None:
        self._directory = directory
        self._name = name
        self._descriptor = descriptor
        self._temporary = temporary
        self._owner = os.getpid()

    def release(self) -> None:
        """Let others have it; trouble with that is no trouble, and nothing is released twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            # A child's copy is the parent's lock: unlocking it would take the lock from the parent.
            if self._owner == os.getpid():
                if self._temporary:
                    with suppress(OSError):
                        self._directory.unlink(self._name)
                # Closing is not enough: a child that was forked meanwhile holds it open as well.
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            with suppress(OSError):
                os.close(descriptor)


def acquire(
    directory: Directory, name: str, *, exclusive: bool, timeout_s: float, temporary: bool = False
) -> Lock:
    """The lock of that name in a directory, shared or exclusive, waited for at most `timeout_s`.

    `math.inf` waits for ever. `directory` must stay open until the lock is released. Raises
    LockTimeoutError, which names the holder where the kernel tells it, and OSError where no lock
    can be had; `NO_LOCKS` are the numbers of those that say that there are none here.
    """
    kind = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
    deadline = math.inf if timeout_s == math.inf else time.monotonic() + max(0.0, timeout_s)
    wait_s = _FIRST_WAIT_S
    while True:
        descriptor = directory.open_lock(name)
        try:
            while not _locked(descriptor, kind):
                now = time.monotonic()
                if now >= deadline:
                    raise _timeout(directory, name, descriptor, timeout_s)
                time.sleep(min(wait_s, deadline - now))
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            # Its last holder may have taken the file away while we waited for it.
            if directory.is_named(name, descriptor):
                return Lock(directory, name, descriptor, temporary=temporary)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        return False
    return True


def _timeout(
    directory: Directory, name: str, descriptor: int, timeout_s: float
) -> LockTimeoutError:
    path = f"{directory.path}/{name}"
    holder = _holder(descriptor)
    by = "another process" if holder is None else f"process {holder}"
    return LockTimeoutError(
        f"{shown(path)} was held by {by} for {timeout_s:g} seconds",
        hint=f"see who holds it: {command('fuser', '-v', path)}"
        if holder is None
        else f"see what it is: {command('ps', '-fp', str(holder))}",
    )


def _holder(descriptor: int) -> int | None:
    """A process that holds a lock on the file, as far as the kernel shows it to us."""
    try:
        found = os.fstat(descriptor)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            for line in file:
                words = line.split()
                # `1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF`; waiters have an arrow.
                if len(words) > 5 and words[1] == "FLOCK" and words[5] == device:
                    holder = int(words[4])
                    return holder if holder > 0 else None
    except (OSError, ValueError):
        pass
    return None
