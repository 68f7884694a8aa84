"""One compiler process: keys go in, machine code comes out, and it cannot hurt its parent.

The compiler runs in children because it is not thread-safe, reads dozens of environment variables
and may crash. A child serves keys of one target, in its own process group and its own temporary
directory, with an environment that holds nothing of the caller's but where packages lie.

They speak the protocol of `llbf16_aot.protocol`. A child ends at the end of its input: that also
ends the idle children of a parent that was killed. A busy one ends with the key that it works on;
the temporary directory of either stays behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from .errors import CompileError
from .key import CompileKey
from .protocol import Compiled, Ready, Reply, Request

__all__ = ["CompilerProcess", "child_command", "child_environment"]

_log = logging.getLogger(__name__)

TAIL_BYTES = 4096
"""How much of a child's log an error shows, and how much of it is kept in memory."""

MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 64 << 20
"""A reply that is larger than these is no reply: cubins of this package have some 20 KiB."""

_READ_BYTES = 1 << 16
_LOOK_AGAIN_S = 0.2
"""How often a silent child is checked for its end: a grandchild may hold its pipes open."""

_ENDING_S = 2.0
"""How long a child that closed its output may take to end, before it is killed."""

_INHERITED = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""Variables without which some installations cannot start Python at all."""


def child_command() -> tuple[str, ...]:
    """The program of a child: this interpreter, with the one module that imports the compiler."""
    return (sys.executable, "-m", "llbf16_aot.compiler")


def child_environment(folder: Path) -> dict[str, str]:
    """The whole environment of a child whose private directory is `folder`.

    No CUTE_DSL_* variable of the caller reaches the compiler: some of them change machine code.
    """
    environment = {name: os.environ[name] for name in _INHERITED if os.environ.get(name)}
    paths = (os.path.abspath(entry) for entry in sys.path)
    environment.update(
        PATH=os.defpath,
        LC_ALL="C.UTF-8",
        TZ="UTC",
        HOME=str(folder),
        TMPDIR=str(folder),
        XDG_CACHE_HOME=str(folder),
        CUTE_DSL_DUMP_DIR=str(folder / "dump"),
        PYTHONPATH=os.pathsep.join(path for path in paths if os.path.exists(path)),
        PYTHONHASHSEED="0",
        PYTHONSAFEPATH="1",
    )
    if sys.dont_write_bytecode:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return environment


class CompilerProcess:
    """One compiler process for one target; used by one thread at a time, killed from any."""

    def __init__(self, command: Sequence[str], target: str, *, limit_s: float) -> None:
        self.target = target
        self.served = 0
        self._limit_s = limit_s
        self._input = bytearray()
        self._tail = bytearray()
        self._life = threading.Lock()
        self._reaped = False
        self._folder = Path(tempfile.mkdtemp(prefix="llbf16-aot-build-"))
        try:
            (self._folder / "dump").mkdir()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._folder,
                env=child_environment(self._folder),
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            _remove(self._folder)
            raise
        # A crash is reported by its signal; an image of gigabytes in the private directory is not.
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(self._process.pid, resource.RLIMIT_CORE, (0, 0))
        self._selector = selectors.DefaultSelector()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream, selectors.EVENT_READ)

    def handshake(self, version: str) -> None:
        """Wait until the child is ready; raises CompileError unless it runs this version."""
        deadline = time.monotonic() + self._limit_s
        line = self._read_line(deadline)
        try:
            ready = msgspec.json.decode(line, type=Ready)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._fail(f"the compiler process started with {_quote(line)} instead of its version")
        if not ready.ready or ready.version != version:
            self._fail(
                f"the compiler process runs version {ready.version}, installed is {version}",
                hint="reinstall nvidia-cutlass-dsl: its packages do not belong together",
            )

    def request(self, key: CompileKey) -> Compiled | str:
        """Compile one key: machine code, or why the compiler refuses.

        Raises CompileError where the child can serve no further key.
        """
        self.served += 1
        self._tail.clear()
        deadline = time.monotonic() + self._limit_s
        stdin = self._process.stdin
        try:
            # One request is far smaller than a pipe's buffer, and never more than one is under way.
            if stdin is not None:
                stdin.write(msgspec.json.encode(Request(key)) + b"\n")
        except OSError:
            self._fail(self._ending())
        line = self._read_line(deadline)
        try:
            reply = msgspec.json.decode(line, type=Reply)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._fail(f"the compiler process answered {_quote(line)}, which is no reply")
        if not reply.ok:
            return reply.error + self.log()
        for size in (reply.cubin_size, reply.ptx_size):
            if not 0 <= size <= MAX_PAYLOAD_BYTES:
                self._fail(f"the compiler process announced {size} bytes of machine code")
        cubin = self._read(reply.cubin_size, deadline)
        return Compiled(reply.symbol, cubin, self._read(reply.ptx_size, deadline))

    def log(self) -> str:
        """The end of what the child wrote to its log, as a block to put after a message."""
        text = self._tail[-TAIL_BYTES:].decode("utf-8", "replace").strip()
        if not text:
            return ""
        shown = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
        return "\nend of the compiler's log:\n" + "\n".join(f"  {s}" for s in shown.splitlines())

    def kill(self) -> None:
        """End the child's whole process group; the thread that uses the child notices."""
        with self._life:
            # Before the child is reaped its number cannot belong to anybody else.
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill and forget the child: process group, pipes and private directory.

        May be called again, and does then what a signal kept it from.
        """
        self.kill()
        with self._life:
            if not self._reaped:
                self._process.wait()
                self._reaped = True
        self._selector.close()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        _remove(self._folder)

    def _read_line(self, deadline: float) -> bytes:
        searched = 0
        while (end := self._input.find(b"\n", searched)) < 0:
            searched = len(self._input)
            if searched > MAX_HEADER_BYTES:
                self._fail(
                    f"the compiler process answered {_quote(self._input)}, which is no reply"
                )
            self._pump(deadline)
        line = bytes(self._input[:end])
        del self._input[: end + 1]
        return line

    def _read(self, size: int, deadline: float) -> bytes:
        while len(self._input) < size:
            self._pump(deadline)
        data = bytes(self._input[:size])
        del self._input[:size]
        return data

    def _pump(self, deadline: float) -> None:
        """Take in what the child wrote; raises CompileError where it ended or ran out of time."""
        left = deadline - time.monotonic()
        if left <= 0:
            self._fail(
                f"the compiler process was ended after the limit of {self._limit_s:g} seconds",
                hint="allow more with LLBF16_AOT_COMPILE_TIMEOUT_S, or use fewer --jobs",
            )
        events = self._selector.select(min(left, _LOOK_AGAIN_S))
        stdout = self._process.stdout
        for selected, _ in events:
            chunk = _read_some(selected.fd)
            if chunk is None:
                continue
            if selected.fileobj is stdout:
                if not chunk:
                    self._fail(self._ending())
                self._input += chunk
            elif chunk:
                self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            else:
                self._selector.unregister(selected.fileobj)
        if not events and self._has_ended():
            self._fail(self._ending())

    def _has_ended(self) -> bool:
        """Whether the child has ended, without reaping it: its number stays taken."""
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self._process.pid, flags) is not None

    def _ending(self) -> str:
        """How a child ended that closed its output."""
        deadline = time.monotonic() + _ENDING_S
        while not self._has_ended():
            if time.monotonic() >= deadline:
                return "the compiler process closed its output"
            time.sleep(0.01)
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if status is None or status.si_code == os.CLD_EXITED:
            code = 0 if status is None else status.si_status
            return f"the compiler process ended with exit status {code}"
        name = signal.Signals(status.si_status).name
        if name == "SIGKILL":
            return "the compiler process was killed by SIGKILL, as happens when memory is short"
        return f"the compiler process crashed with {name}"

    def _fail(self, message: str, *, hint: str = "") -> NoReturn:
        """Kill the group, take in the rest of its log and raise CompileError."""
        self.kill()
        stderr = self._process.stderr
        # A pipe holds at most 1 MiB; only a process outside the group could fill it again.
        for _ in range((1 << 20) // _READ_BYTES + 1):
            chunk = None if stderr is None else _read_some(stderr.fileno())
            if not chunk:
                break
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
        if not hint and "SIGKILL" in message:
            hint = "use fewer --jobs"
        raise CompileError(message + self.log(), hint=hint)


def _read_some(descriptor: int) -> bytes | None:
    """What can be read now: empty at the end of the stream, None where there is nothing yet."""
    try:
        return os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _quote(data: bytes | bytearray) -> str:
    text = repr(bytes(data[:80]))[1:]
    return text if len(data) <= 80 else f"{text}..."


def _remove(folder: Path) -> None:
    """Remove a private directory whatever a child left there; trouble is logged, never raised."""
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        return
    # A directory without write permission keeps its entries; our own can be opened up again.
    for root, names, _ in os.walk(folder):
        for path in (os.path.join(root, name) for name in names):
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        _log.warning("%s: the compiler's temporary directory cannot be removed", folder)
