"""A compiler process that misbehaves on request; needs the standard library only.

Run as `python fake_compiler.py VERSION [FIFO]`. The key's `hidden` chooses what happens; see Deed.
Another value, or none, is answered.
"""

from __future__ import annotations

import enum
import json
import os
import signal
import subprocess
import sys
import time


class Deed(enum.IntEnum):
    """What the process does with a key, by the key's `hidden`."""

    ANSWER = 8
    REFUSE = 16
    CRASH = 24
    EXIT = 32
    HANG = 40
    OUT_OF_MEMORY = 48
    CHATTER = 56
    GARBAGE = 64
    LITTER = 72
    TOO_LARGE = 80
    CUT_SHORT = 88
    LEAVE_GRANDCHILD = 96
    TELL = 104
    FLOOD_STDOUT = 112
    CHATTER_AND_CRASH = 120
    CLOSE_STDOUT = 128


def reply(symbol: str, cubin: bytes = b"cubin", ptx: bytes = b"ptx") -> None:
    header = {"ok": True, "symbol": symbol, "cubin_size": len(cubin), "ptx_size": len(ptx)}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + cubin + ptx)
    sys.stdout.buffer.flush()


def chatter() -> None:
    line = b"the compiler talks and talks\n" * 4096
    for _ in range(100_000_000 // len(line)):
        sys.stderr.buffer.write(line)
    sys.stderr.buffer.write(b"its last words\n")
    sys.stderr.buffer.flush()


def act(deed: Deed, key: dict[str, object], fifo: str) -> None:
    if deed is Deed.ANSWER:
        reply("kernel", json.dumps(key).encode())
    elif deed is Deed.REFUSE:
        print("a diagnostic", file=sys.stderr, flush=True)
        print(json.dumps({"ok": False, "error": "no such instruction"}), flush=True)
    elif deed is Deed.CRASH:
        print("\x1b[31mabout to crash", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif deed is Deed.EXIT:
        print("giving up", file=sys.stderr, flush=True)
        os._exit(3)
    elif deed is Deed.HANG:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("waiting for ever", file=sys.stderr, flush=True)
        if fifo:
            os.open(fifo, os.O_WRONLY)
        while True:
            signal.pause()
    elif deed is Deed.OUT_OF_MEMORY:
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed is Deed.CHATTER:
        chatter()
        reply("kernel")
    elif deed is Deed.CHATTER_AND_CRASH:
        chatter()
        os.abort()
    elif deed is Deed.GARBAGE:
        print("hello, this is no JSON", flush=True)
        time.sleep(3600)
    elif deed is Deed.FLOOD_STDOUT:
        while True:
            sys.stdout.buffer.write(b"x" * 65536)
    elif deed is Deed.LITTER:
        os.makedirs("deep/down")
        for path in ("left behind", "deep/down/file", os.environ["CUTE_DSL_DUMP_DIR"] + "/dump"):
            with open(path, "wb") as file:
                file.write(b"x" * 4096)
        os.symlink("/", "root")
        os.chmod("deep/down", 0o500)
        os.chmod("deep", 0o100)
        reply(os.getcwd())
    elif deed is Deed.TOO_LARGE:
        header = {"ok": True, "symbol": "kernel", "cubin_size": 1 << 40, "ptx_size": 0}
        print(json.dumps(header), flush=True)
        time.sleep(3600)
    elif deed is Deed.CUT_SHORT:
        header = {"ok": True, "symbol": "kernel", "cubin_size": 100, "ptx_size": 0}
        sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + b"x" * 99)
        sys.stdout.buffer.flush()
        os._exit(0)
    elif deed is Deed.LEAVE_GRANDCHILD:
        code = f"import os, time; os.open({fifo!r}, 1); print(1, flush=True); time.sleep(3600)"
        other = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE)
        assert other.stdout is not None
        other.stdout.readline()
        os._exit(4)
    elif deed is Deed.TELL:
        told = {"pid": os.getpid(), "environment": dict(os.environ), "directory": os.getcwd()}
        reply("kernel", json.dumps(told).encode())
    elif deed is Deed.CLOSE_STDOUT:
        os.close(1)
        time.sleep(3600)


def main() -> None:
    version, fifo = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    print(json.dumps({"ready": True, "version": version}), flush=True)
    for line in sys.stdin:
        key = json.loads(line)["key"]
        hidden = key["config"].get("hidden")
        act(Deed(hidden) if hidden in [*Deed] else Deed.ANSWER, key, fifo)


if __name__ == "__main__":
    main()
