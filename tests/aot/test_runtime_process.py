"""The runtime as a process has it: forks, spawns, bare environments, and nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import support
from llbf16_aot.artifact import Artifact
from llbf16_aot.store import Store

TESTS = Path(__file__).parent

PRELUDE = f"""
import json, os, sys
sys.path[:0] = [{str(TESTS.parent)!r}, {str(TESTS)!r}]
import torch
torch.set_num_threads(1)  # the threads of torch's own products do not survive a fork either
from fake_gpu import FakeDevices, FakeDriver
from llbf16_aot.errors import ForkedProcessError
from llbf16_aot.runtime import Runtime
from llbf16_aot.store import Store
from pathlib import Path
from runtime_kit import error_of, operands

store = Store(Path(sys.argv[1]))

def make(**options):
    kernel = store.get(sys.argv[2])
    return Runtime(
        store, tuning="reference", driver=FakeDriver([kernel]), devices=FakeDevices(), **options
    )

x, weight = operands(3, 264, 2304)

def served(runtime):
    return error_of(runtime.run(x, weight), x, weight) <= 2e-6
"""


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Store, Artifact]:
    kernel = support.artifact_for(support.make_key(hidden=2304, tokens=3))
    store = Store(tmp_path / "store")
    store.publish(kernel)
    return store, kernel


def run(program: str, stored: tuple[Store, Artifact], **environ: str | None) -> str:
    """What a program prints in a process of its own; a variable that is None is not set there."""
    store, kernel = stored
    variables = {**os.environ, **environ}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program, str(store.root), kernel.digest],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n")


IN_CHILD = """
def in_child(body):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            body()
            code = 0
        except BaseException as error:
            print("raised", type(error).__name__, error)
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def test_a_fork_after_a_kernel_was_loaded_is_told_clearly(stored: tuple[Store, Artifact]) -> None:
    """CUDA does not survive a fork: launched all the same, a child hangs or corrupts memory."""
    program = f"""{IN_CHILD}
runtime = make()
served(runtime)

def body():
    for _ in range(2):
        try:
            runtime.run(x, weight)
        except ForkedProcessError as error:
            print(error, "|", error.hint)
    try:
        runtime.preload([])
    except ForkedProcessError:
        print("preload too")

print(in_child(body))
print(served(runtime), runtime.stats().hits)
"""
    lines = run(program, stored).splitlines()
    message = (
        "this process was forked after its parent loaded kernels, and CUDA does not survive a fork "
        '| start workers with multiprocessing.get_context("spawn"), or fork before the first call'
    )
    assert lines == [message, message, "preload too", "0", "True 2"]


def test_a_fork_before_the_first_call_serves(stored: tuple[Store, Artifact]) -> None:
    """Servers make their runtime, then fork workers: nothing was loaded, so nothing is lost."""
    program = f"""{IN_CHILD}
runtime = make()
print(in_child(lambda: print(served(runtime), runtime.stats().loads)))
print(served(runtime), runtime.stats().loads)
"""
    assert run(program, stored).splitlines() == ["True 1", "0", "True 1"]


def test_a_fork_while_another_thread_loads_does_not_hang_the_child(
    stored: tuple[Store, Artifact],
) -> None:
    """The lock of a thread that the child does not have would be held for ever."""
    program = f"""{IN_CHILD}
import threading
runtime = make()
inside, go_on = threading.Event(), threading.Event()
get = Store.get

def slow(self, digest):
    if threading.current_thread() is not threading.main_thread():
        inside.set()
        go_on.wait(60)
    return get(self, digest)

Store.get = slow
thread = threading.Thread(target=served, args=(runtime,))
thread.start()
inside.wait(60)

def body():
    try:
        print(served(runtime))
    except ForkedProcessError:
        print("told")

print(in_child(body))
go_on.set()
thread.join()
print(served(runtime))
"""
    # The parent had asked the driver for the device's target: that is use enough to be told.
    assert run(program, stored).splitlines() == ["told", "0", "True"]


def test_a_runtime_that_died_is_not_told_of_forks(stored: tuple[Store, Artifact]) -> None:
    """A list of all runtimes ever made would keep them, and their kernels' memory, for good."""
    program = f"""{IN_CHILD}
import gc, weakref
runtime = make()
served(runtime)
seen = weakref.ref(runtime)
del runtime
gc.collect()
print(seen())
print(in_child(lambda: print(served(make()))))
"""
    assert run(program, stored).splitlines() == ["None", "True", "0"]


def test_a_spawned_process_serves(stored: tuple[Store, Artifact], tmp_path: Path) -> None:
    """Spawn starts from nothing: state that only an import of the parent made is missing there."""
    main = tmp_path / "main.py"
    main.write_text(
        PRELUDE
        + """
import multiprocessing

def work(queue):
    queue.put(served(make()))

if __name__ == "__main__":
    served(make())
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print(queue.get(timeout=50))
    child.join()
"""
    )
    store, kernel = stored
    done = subprocess.run(
        [sys.executable, str(main), str(store.root), kernel.digest],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "True\n"


WATCH = """
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = (
    "os.mkdir os.rename os.remove os.rmdir os.link os.symlink os.chmod os.chown os.truncate "
    "os.utime os.exec os.fork os.forkpty os.posix_spawn os.spawn os.system os.putenv "
    "subprocess.Popen socket.connect socket.bind fcntl.flock fcntl.lockf"
).split()
done = []

def watch(event, arguments):
    if event == "open" and (arguments[2] or 0) & WRITES:
        done.append(f"open {arguments[0]}")
    elif event in CHANGES:
        done.append(f"{event} {arguments[:1]}")

sys.addaudithook(watch)
"""


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": ""},
        {"HOME": None, "PATH": "", "TMPDIR": None},
        {"HOME": "/proc/self", "XDG_CACHE_HOME": "/proc/self", "PATH": "/nowhere"},
    ],
    ids=["as it is", "no PATH", "no HOME", "HOME that cannot be written"],
)
def test_loading_writes_nothing_and_takes_no_lock(
    stored: tuple[Store, Artifact], environ: dict[str, str | None]
) -> None:
    """Tens of thousands of nodes that write to HOME at start take a file system down."""
    program = f"""{WATCH}
runtime = make(on_miss="error")
report = runtime.preload([store.get(sys.argv[2]).record.key])
runtime.freeze()
print(json.dumps([report.ok, served(runtime), served(runtime), done]))
"""
    assert json.loads(run(program, stored, **environ)) == [True, True, True, []]


def test_the_watch_finds_what_is_planted(stored: tuple[Store, Artifact], tmp_path: Path) -> None:
    """The control: a lock, a file and a process in the middle of a load are seen."""
    program = f"""{WATCH}
import fcntl, subprocess
open({str(tmp_path / "written")!r}, "w").close()
with open({str(tmp_path / "written")!r}) as file:
    fcntl.flock(file, fcntl.LOCK_EX)
subprocess.run(["/bin/true"])
print(json.dumps([line.split()[0] for line in done]))
"""
    found = json.loads(run(program, stored))
    assert found[:3] == ["open", "fcntl.flock", "subprocess.Popen"]
