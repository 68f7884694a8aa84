"""Locks: held by living processes only, fair to who waits to be alone, gone without a trace."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Child, in_child
from llbf16_aot.errors import LockTimeoutError
from llbf16_aot.files import Directory
from llbf16_aot.locks import acquire
from llbf16_aot.store import Store
from support import make_artifact


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Directory]:
    (tmp_path / "locks").mkdir(mode=0o700)
    with Directory.open_root(str(tmp_path / "locks"), create=False) as directory:
        yield directory


def taken(folder: Directory, *, exclusive: bool) -> bool:
    """Whether another process finds the lock taken."""

    def attempt() -> None:
        acquire(folder, "a.lock", exclusive=exclusive, timeout_s=0).release()

    return in_child(attempt).error == LockTimeoutError.__name__


def test_shared_holders_keep_out_only_who_wants_to_be_alone(folder: Directory) -> None:
    """Bug: publishers wait for each other, or prune runs beside them."""
    lock = acquire(folder, "a.lock", exclusive=False, timeout_s=0)
    assert not taken(folder, exclusive=False)
    assert taken(folder, exclusive=True)
    lock.release()
    assert not taken(folder, exclusive=True)


def test_a_timeout_names_the_process_that_holds_the_lock(folder: Directory) -> None:
    """Bug: a waiter cannot be told which process to look at."""
    lock = acquire(folder, "a.lock", exclusive=True, timeout_s=0)

    def wait() -> None:
        acquire(folder, "a.lock", exclusive=True, timeout_s=0.05)

    outcome = in_child(wait)
    assert outcome.error == LockTimeoutError.__name__
    assert f"held by process {os.getpid()} for 0.05 seconds" in outcome.message
    assert outcome.hint == f"see what it is: ps -fp {os.getpid()}"
    lock.release()


def test_a_stopped_holder_keeps_the_lock_and_a_killed_one_does_not(folder: Directory) -> None:
    """Bug: a lock is taken from a process that only sleeps, or kept for one that is gone."""
    ready, told = os.pipe()

    def hold() -> None:
        acquire(folder, "a.lock", exclusive=True, timeout_s=0)
        os.write(told, b"x")
        os.kill(os.getpid(), signal.SIGSTOP)

    child = Child(hold)
    os.read(ready, 1)
    os.close(ready)
    os.close(told)
    assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
    assert taken(folder, exclusive=True)
    os.kill(child.pid, signal.SIGKILL)
    assert child.join().signal == signal.SIGKILL
    assert not taken(folder, exclusive=True)


def test_a_forked_child_cannot_release_the_lock_of_its_parent(folder: Directory) -> None:
    """Bug: a worker that ends takes the lock away under the builder that forked it."""
    lock = acquire(folder, "a.lock", exclusive=True, timeout_s=0, temporary=True)
    assert in_child(lock.release).error == ""
    assert taken(folder, exclusive=True)
    lock.release()


def test_a_child_that_lives_on_does_not_keep_a_released_lock(folder: Directory) -> None:
    """Bug: a daemon forked during a publish blocks every prune for as long as it runs."""
    lock = acquire(folder, "a.lock", exclusive=True, timeout_s=0)
    gate = os.pipe()
    child = Child(lambda: None, gate=gate)
    lock.release()
    try:
        assert not taken(folder, exclusive=True)
    finally:
        os.close(gate[0])
        os.close(gate[1])
        child.join()


def test_the_file_of_a_temporary_lock_goes_and_waiters_still_exclude_each_other(
    folder: Directory,
) -> None:
    """Bug: a lock on a file that was unlinked lets two builders in, or the files pile up."""
    inside = threading.Semaphore()
    crowded: list[str] = []

    def work() -> None:
        for _ in range(50):
            lock = acquire(folder, "a.lock", exclusive=True, timeout_s=30, temporary=True)
            if not inside.acquire(blocking=False):
                crowded.append("two inside")
            else:
                folder.names()
                inside.release()
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert crowded == []
    assert folder.names() == []


def test_key_locks_leave_no_file_behind(tmp_path: Path) -> None:
    """Bug: every key that was ever built costs an inode for its lock, for good."""
    store = Store(tmp_path / "store")
    with store.key_lock("0" * 64, timeout_s=0) as held:
        assert held
        assert os.listdir(store.root / "v1" / "locks") == ["0" * 64 + ".lock"]
    assert os.listdir(store.root / "v1" / "locks") == []


def test_who_waits_to_be_alone_is_not_overtaken(tmp_path: Path) -> None:
    """Bug: prune starves on a busy store, because there is always one more publisher."""
    store = Store(tmp_path / "store")
    store.publish(make_artifact())
    waiting, alone = threading.Event(), threading.Event()

    def prune() -> None:
        waiting.set()
        with store.changing(exclusive=True, timeout_s=30):
            alone.set()

    with store.changing(exclusive=False, timeout_s=0):
        thread = threading.Thread(target=prune)
        thread.start()
        waiting.wait()
        # Until the thread has closed the gate newcomers get in; from then on they do not.
        deadline = 5000
        while deadline:
            deadline -= 1
            try:
                with store.changing(exclusive=False, timeout_s=0):
                    pass
            except LockTimeoutError:
                break
        assert deadline, "newcomers overtake for ever"
        assert not alone.is_set()
    thread.join()
    assert alone.is_set()


def test_a_file_of_another_kind_in_place_of_a_lock_is_no_lock(
    folder: Directory, tmp_path: Path
) -> None:
    """Bug: a FIFO in place of a lock file hangs every builder, or a link is followed."""
    os.mkfifo(tmp_path / "locks" / "a.lock")
    (tmp_path / "locks" / "b.lock").symlink_to(tmp_path / "elsewhere")
    for name in ("a.lock", "b.lock"):
        with pytest.raises(OSError, match=r"regular file|symbolic links"):
            acquire(folder, name, exclusive=True, timeout_s=0)
    assert not (tmp_path / "elsewhere").exists()


def test_publishing_waits_for_prune_and_tells_when_it_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a publisher files a ref while prune takes the blobs away, or hangs for ever."""
    store = Store(tmp_path / "store")
    artifact = make_artifact()
    monkeypatch.setattr("llbf16_aot.store.LOCK_WAIT_S", 0.05)
    with store.changing(exclusive=True, timeout_s=0):
        assert in_child(lambda: store.publish(artifact)).error == LockTimeoutError.__name__
    assert store.digests() == ()
    store.publish(artifact)
    assert store.get(artifact.digest) == artifact
