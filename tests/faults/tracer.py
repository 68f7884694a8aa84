"""Faults from outside: strace attaches to a child and breaks its n-th system call.

A child is forked from the test's own process, where everything is imported already, so its system
calls are those of the action alone, and one injection takes some milliseconds.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import select
import shutil
import signal
import subprocess
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

__all__ = ["FILE_CALLS", "Ended", "count_calls", "known", "needs_strace", "traced"]

FILE_CALLS = (
    "open,openat,openat2,mkdir,mkdirat,chmod,fchmod,fchmodat,fstat,newfstatat,stat,lstat,statx,"
    "read,write,pread64,pwrite64,close,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,"
    "rmdir,flock,lseek,ioctl,fcntl,getdents64,readlink,readlinkat,link,linkat,utimensat,futimesat,"
    "ftruncate,getrandom"
)
"""What a store can ask of files. Names that a machine lacks are left out, see `known`."""

LIMIT_S = 20
START = signal.SIGUSR1


class Ended(NamedTuple):
    """How a traced child ended: by an exit code, or a signal; and what it said."""

    code: int
    signal: int
    said: str


class _UnusableError(Exception):
    """strace is not there, or may not trace here."""


def _attached(tracer: subprocess.Popen[bytes]) -> None:
    """Wait until strace says that it holds the child."""
    assert tracer.stderr is not None
    seen = b""
    while b"attached" not in seen:
        if not select.select([tracer.stderr], [], [], LIMIT_S)[0]:
            raise _UnusableError("strace says nothing")
        part = os.read(tracer.stderr.fileno(), 4096)
        if not part:
            raise _UnusableError(seen.decode(errors="replace").strip())
        seen += part


def traced(
    action: Callable[[], int], folder: Path, *options: str, log: Path | None = None
) -> Ended:
    """Run `action` in a child under strace with these options; its result is the exit code."""
    program = shutil.which("strace")
    if program is None:
        raise _UnusableError("strace is not installed")
    said = folder / "said"
    said.write_bytes(b"")
    said_descriptor = os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    # The child waits for a signal: a wait that is none of the calls which are counted.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {START})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _child(action, said_descriptor)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(said_descriptor)
    tracer = subprocess.Popen(
        [program, "-o", str(log or "/dev/null"), *options, "-p", str(child)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    status = None
    try:
        _attached(tracer)
        os.kill(child, START)
        _, status = os.waitpid(child, 0)
    finally:
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        tracer.wait(timeout=LIMIT_S)
        assert tracer.stderr is not None
        tracer.stderr.close()
    text = said.read_text(errors="replace")
    if os.WIFSIGNALED(status):
        return Ended(-1, os.WTERMSIG(status), text)
    return Ended(os.WEXITSTATUS(status), 0, text)


def _child(action: Callable[[], int], said: int) -> NoReturn:
    code = 125
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        gc.disable()
        signal.sigwait({START})
        code = action()
    except BaseException:
        os.write(said, traceback.format_exc().encode())
    finally:
        os._exit(code)


def needs_strace(folder: Path) -> None:
    """Skip the test where strace cannot break the system calls of a child."""
    try:
        ended = traced(lambda: 7, folder, "-e", "inject=getppid:error=EIO:when=1")
    except _UnusableError as error:
        pytest.skip(f"strace does not work here: {error}")
    if ended.code != 7:
        pytest.skip(f"strace does not work here: {ended}")


def count_calls(action: Callable[[], int], folder: Path, calls: str) -> list[str]:
    """Names of the system calls, out of `calls`, that the action makes, in order."""
    log = folder / "strace.log"
    ended = traced(action, folder, "-e", f"trace={calls}", log=log)
    assert ended.code == 0, ended
    found = re.findall(r"^(?:<\.\.\. )?(\w+)", log.read_text(errors="replace"), re.MULTILINE)
    return [name for name in found if name not in ("exit_group", "exit")]


@functools.cache
def known(calls: str) -> str:
    """Those of the system calls that this machine's strace knows."""
    program = shutil.which("strace")
    if program is None:
        pytest.skip("strace is not installed")
    names = []
    for name in calls.split(","):
        ended = subprocess.run(
            [program, "-e", f"trace={name}", "-o", "/dev/null", "true"],
            check=False,
            capture_output=True,
        )
        if ended.returncode == 0:
            names.append(name)
    return ",".join(names)
