"""P1 to P6: many processes and threads at one store, and processes that die at the wrong moment."""

from __future__ import annotations

import errno
import fcntl
import functools
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import children
import pytest
from children import NOBODY, Child, Outcome, all_at_once, in_child
from faults import bugs
from faults.builds import counted_compiler, instant_compiler, plan_of
from faults.harness import check_healed, leftovers, needs_root, numbered, replaced
from faults.tally import Tally
from llbf16_aot import builder, locks
from llbf16_aot import store as store_module
from llbf16_aot.builder import execute
from llbf16_aot.errors import LockTimeoutError
from llbf16_aot.files import Directory
from llbf16_aot.report import BuildResult
from llbf16_aot.store import Miss, MissReason, Store


@pytest.fixture(autouse=True)
def _patient_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four processes share the cores with everything else that runs."""
    monkeypatch.setattr(children, "LIMIT_S", 300)


class Builders:
    """Processes that build one cold key at the same moment, and what they have compiled."""

    def __init__(self, folder: Path, count: int) -> None:
        self.store = Store(folder / "store")
        self._log = folder / "compiled"
        self._count = count

    def run(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        before_compile: Callable[[], None] = lambda: None,
        uid: int | None = None,
    ) -> list[Outcome]:
        """What each of them has built, as the bytes of its cubin."""

        def on_compile() -> None:
            descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND)
            os.write(descriptor, b"x")
            os.close(descriptor)
            before_compile()

        self._log.write_bytes(b"")
        self._log.chmod(0o666)
        if uid is None:
            counted_compiler(monkeypatch, on_compile)
        else:
            # Another user cannot always run our interpreter, or import from it: the compiler is in
            # the process, and what is imported late is imported now.
            import email.parser  # noqa: F401
            import importlib.metadata

            importlib.metadata.version("llbf16-aot")
            instant_compiler(monkeypatch, 1000, lambda key: on_compile())
        plan = plan_of(1, Store(self.store.root.parent / "nowhere"))

        def build() -> bytes:
            report = execute(plan, store=self.store, jobs=1, limit_s=200)
            report.check_coverage()
            (result,) = report.results
            assert result.artifact is not None, result
            assert result.unpublished is None, result
            return result.artifact.cubin

        if uid is None:
            return all_at_once([build] * self._count)
        return [child.join() for child in [Child(build, uid=uid) for _ in range(self._count)]]

    @property
    def compiles(self) -> int:
        return self._log.stat().st_size

    def judge(self, tally: Tally, outcomes: list[Outcome], *, compiles: int) -> None:
        tally.tried += len(outcomes)
        values = {outcome.value for outcome in outcomes if not outcome.error}
        for outcome in outcomes:
            if outcome.error or outcome.signal:
                tally.wrong.append(str(outcome))
        if len(values) != 1:
            tally.wrong.append(f"{len(values)} different cubins")
        if self.compiles != compiles:
            tally.wrong.append(f"{self.compiles} compiles, wanted {compiles}")
        for digest in self.store.digests():
            found = self.store.get(digest)
            if isinstance(found, Miss) or {found.cubin} != values:
                tally.lost.append(f"the entry afterwards: {found!r}")
        if len(self.store.digests()) != 1:
            tally.lost.append(f"the store lists {self.store.digests()}")
        if left := leftovers(self.store):
            tally.unhealed.append(f"left {left}")


@pytest.mark.fault("P1")
@pytest.mark.parametrize("count", [32, 64])
def test_many_builders_of_one_cold_key_compile_once(
    tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Bug: every rank of a node compiles the same kernel, or one of them gets nothing."""
    builders = Builders(tmp_path, count)
    builders.judge(tally, builders.run(monkeypatch), compiles=1)
    tally.clean(at_least=count)


@pytest.mark.fault("P1", control=True)
def test_counting_compiles_finds_missing_locks(
    tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with locks off there must be more compiles than one."""
    bugs.no_locks(monkeypatch)
    builders = Builders(tmp_path, 32)
    builders.judge(tally, builders.run(monkeypatch), compiles=1)
    tally.found()


def together(count: int) -> Callable[[], None]:
    """A point that no process passes before `count` of them have reached it."""
    barrier = multiprocessing.get_context("fork").Barrier(count)

    def wait() -> None:
        barrier.wait(timeout=200)

    return wait


N = 32


@pytest.mark.fault("P2")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_kernel_locks_all_compile_and_all_are_right(
    tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Bug: on a file system without locks builders disturb each other, or wait for ever."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    builders = Builders(tmp_path, N)
    outcomes = builders.run(monkeypatch, before_compile=together(N))
    builders.judge(tally, outcomes, compiles=N)
    tally.clean(at_least=N)


@needs_root
@pytest.mark.fault("P2")
def test_with_an_unwritable_lock_folder_all_compile_and_all_are_right(
    tally: Tally, nobody_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a folder of locks that somebody made read-only stops every build."""
    builders = Builders(nobody_folder, N)
    assert in_child(builders.store.prepare, uid=NOBODY).error == ""
    folder = builders.store.root / "v1" / "locks"
    folder.mkdir(exist_ok=True)
    os.chown(folder, NOBODY, NOBODY)
    for lock in folder.iterdir():
        lock.unlink()
    folder.chmod(0o500)
    outcomes = builders.run(monkeypatch, before_compile=together(N), uid=NOBODY)
    os.chown(builders.store.root, 0, 0)
    for path in (builders.store.root, *builders.store.root.rglob("*")):
        os.chown(path, 0, 0)
    builders.judge(tally, outcomes, compiles=N)
    tally.clean(at_least=N)


@pytest.mark.fault("P2", control=True)
def test_builders_without_locks_find_a_writer_in_place(
    tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: files that grow under their own name, many at once, must be found."""
    bugs.no_locks(monkeypatch)
    bugs.writes_in_place(monkeypatch)
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        os.sched_yield()
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        builders = Builders(folder, N)
        outcomes = builders.run(monkeypatch, before_compile=together(N))
        builders.judge(tally, outcomes, compiles=N)
        if tally.findings:
            break
    tally.found()


class Crowd:
    """Writers and readers of the same keys, for some seconds."""

    def __init__(
        self, store: Store, *, writers: int, readers: int, keys: int, time_s: float
    ) -> None:
        self.store = store
        self._writers, self._readers = writers, readers
        self._entries = [numbered(number) for number in range(keys)]
        self._newer = [replaced(entry, "9.9.9") for entry in self._entries]
        self._time_s = time_s

    def write(self, seed: int) -> int:
        """Publish in an order of its own, old and new versions; how often."""
        dice, end, count = random.Random(seed), time.monotonic() + self._time_s, 0
        while time.monotonic() < end or count < len(self._entries):
            order = list(range(len(self._entries)))
            dice.shuffle(order)
            for number in order:
                entry = dice.choice((self._entries, self._newer))[number]
                with self.store.key_lock(entry.digest, timeout_s=math.inf):
                    self.store.publish(entry)
                count += 1
        return count

    def read(self, seed: int) -> tuple[int, list[str]]:
        """Read in an order of its own; how often, and what was wrong."""
        dice, end = random.Random(seed), time.monotonic() + self._time_s
        seen: set[int] = set()
        count, wrong = 0, []
        while time.monotonic() < end:
            number = dice.randrange(len(self._entries))
            found = self.store.get(self._entries[number].digest)
            count += 1
            if isinstance(found, Miss):
                if found.reason is not MissReason.ABSENT or number in seen:
                    wrong.append(f"{number}: {found.reason.value}: {found.detail}")
            else:
                seen.add(number)
                if found not in (self._entries[number], self._newer[number]):
                    wrong.append(f"{number}: another artifact")
        return count, wrong

    def run(self, tally: Tally) -> None:
        outcomes = all_at_once(
            [functools.partial(self.write, seed) for seed in range(self._writers)]
            + [functools.partial(self.read, seed) for seed in range(self._readers)]
        )
        for outcome in outcomes:
            if isinstance(outcome.value, int):
                tally.tried += outcome.value
            elif isinstance(outcome.value, tuple):
                tally.tried += outcome.value[0]
                tally.wrong.extend(outcome.value[1])
            else:
                tally.wrong.append(str(outcome))
        for old, new in zip(self._entries, self._newer, strict=True):
            if self.store.get(old.digest) not in (old, new):
                tally.lost.append(f"{old.digest[:8]}: {self.store.get(old.digest)!r}")
        if left := leftovers(self.store):
            tally.unhealed.append(f"left {left}")


@pytest.mark.fault("P3")
def test_builders_and_readers_of_many_keys_all_find_whole_entries(
    tally: Tally, fast_folder: Path, pick: Callable[[int, int], int]
) -> None:
    """Bug: with many at once a reader sees a half, an entry vanishes, or a writer fails."""
    crowd = Crowd(
        Store(fast_folder / "store"),
        writers=pick(8, 32),
        readers=4,
        keys=pick(16, 64),
        time_s=pick(5, 60),
    )
    crowd.run(tally)
    tally.clean(at_least=pick(200, 10_000))


@pytest.mark.fault("P3", control=True)
def test_a_crowd_finds_a_writer_in_place(
    tally: Tally, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: readers must meet files that grow under their own name."""
    bugs.writes_in_place(monkeypatch)
    Crowd(Store(fast_folder / "store"), writers=4, readers=4, keys=4, time_s=2).run(tally)
    tally.found()


def hold(store: Store, digest: str, said: int) -> None:
    """Take a lock, say so, and never give it back."""
    with store.key_lock(digest, timeout_s=5) as held:
        os.write(said, b"x" if held else b"-")
        while True:
            signal.pause()


def waited(store: Store, digest: str, timeout_s: float) -> tuple[str, float]:
    """What came of waiting for a lock, and how long that took in seconds."""
    started = time.monotonic()
    try:
        with store.key_lock(digest, timeout_s=timeout_s) as held:
            said = "held" if held else "no lock"
    except LockTimeoutError as error:
        said = f"{error.message} | {error.hint}"
    return said, time.monotonic() - started


def holders(tally: Tally, store: Store, rounds: int) -> None:
    """Kill or stop the holder of a lock while another process waits for it."""
    digest = numbered(0).digest
    for number in range(rounds):
        reading, writing = os.pipe()
        holder = Child(functools.partial(hold, store, digest, writing))
        os.close(writing)
        answer = os.read(reading, 1)
        os.close(reading)
        if answer != b"x":
            tally.wrong.append(f"round {number}: the lock cannot be taken: {holder.join()}")
            continue
        tally.tried += 1
        if number % 2:
            os.kill(holder.pid, signal.SIGSTOP)
            said, _ = waited(store, digest, 0.2)
            if str(holder.pid) not in said or "held by" not in said:
                tally.wrong.append(f"round {number}, stopped {holder.pid}: {said}")
        waiter = Child(functools.partial(waited, store, digest, 20))
        os.kill(holder.pid, signal.SIGKILL)
        outcome = waiter.join()
        assert holder.join().signal == signal.SIGKILL
        if not isinstance(outcome.value, tuple) or outcome.value[0] != "held":
            tally.wrong.append(f"round {number}: after the holder's death: {outcome}")
        elif outcome.value[1] > 1.0:
            tally.wrong.append(f"round {number}: went on after {outcome.value[1]:.1f} s only")
    check_healed(tally, store, numbered(0), "after all")


@pytest.mark.fault("P4")
def test_a_lock_goes_with_its_holder_and_a_stopped_holder_is_named(
    tally: Tally, tmp_path: Path
) -> None:
    """Bug: a killed builder blocks all others for good, or nobody can tell which one blocks."""
    holders(tally, Store(tmp_path / "store"), 20)
    tally.clean(at_least=20)


@pytest.mark.fault("P4", control=True)
def test_killed_holders_find_locks_that_are_files(
    tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a lock that is the existence of a file outlives its holder, and must be found."""

    class FileLock:
        def __init__(self, directory: Directory, name: str) -> None:
            self._path = f"{directory.path}/{name}"

        def release(self) -> None:
            os.unlink(self._path)

    def acquire(directory: Directory, name: str, *, timeout_s: float, **_: object) -> FileLock:
        path, end = f"{directory.path}/{name}", time.monotonic() + min(timeout_s, 1.5)
        while True:
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                if time.monotonic() > end:
                    raise LockTimeoutError(f"{path} was held by somebody") from None
                time.sleep(0.01)
            else:
                return FileLock(directory, name)

    monkeypatch.setattr(store_module, "acquire", acquire)
    with pytest.MonkeyPatch.context() as patch:
        # Publishing is not what this is about.
        patch.setattr(Store, "publish", lambda self, artifact: None)
        holders(tally, Store(tmp_path / "store"), 3)
    tally.found()


def forks(tally: Tally, store: Store, count: int) -> None:
    """Fork while holding a lock: the children end in every way, and the lock stays the parent's."""
    digest = numbered(0).digest
    with ExitStack() as stack:
        held = stack.enter_context(store.key_lock(digest, timeout_s=5))
        assert held

        def leave_by_the_end() -> str:
            stack.close()
            return waited(store, digest, 0)[0]

        def leave_at_once() -> str:
            return waited(store, digest, 0)[0]

        def leave_by_an_error() -> str:
            try:
                with stack:
                    raise KeyError("in the child")
            except KeyError:
                return waited(store, digest, 0)[0]

        ways = (leave_by_the_end, leave_at_once, leave_by_an_error)
        for number in range(count):
            outcome = in_child(ways[number % 3])
            tally.tried += 1
            where = f"fork {number}, {ways[number % 3].__name__}"
            if outcome.error or outcome.signal:
                tally.wrong.append(f"{where}: {outcome}")
            elif "held by" not in str(outcome.value):
                tally.wrong.append(f"{where}: the child took the lock: {outcome.value}")
            # Somebody who was never related finds it taken, too.
            other = in_child(lambda: waited(Store(store.root), digest, 0)[0])
            if "held by" not in str(other.value):
                tally.wrong.append(f"{where}: the lock is free: {other}")
    if waited(store, digest, 0)[0] != "held":
        tally.unhealed.append("the lock stays taken")


@pytest.mark.fault("P5")
def test_children_that_inherit_a_lock_neither_keep_nor_release_it(
    tally: Tally, tmp_path: Path
) -> None:
    """Bug: a forked worker gives its parent's lock away, or keeps it when the parent is done."""
    forks(tally, Store(tmp_path / "store"), 64)
    tally.clean(at_least=64)


@pytest.mark.fault("P5", control=True)
def test_forks_find_a_child_that_unlocks(
    tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a lock that whoever has a copy can give back must be found."""
    real = locks.Lock.release

    def release(self: locks.Lock) -> None:
        self._owner = os.getpid()
        real(self)

    monkeypatch.setattr(locks.Lock, "release", release)
    forks(tally, Store(tmp_path / "store"), 3)
    tally.found()


def crowd_of_threads(tally: Tally, store: Store, *, threads: int, rounds: int) -> None:
    """Threads that take the locks of four keys in turn; two must never be inside one."""
    inside = [0] * 4
    barrier = threading.Barrier(threads)
    digests = [numbered(number).digest for number in range(4)]

    def work(first: int) -> None:
        try:
            barrier.wait(timeout=60)
            for number in range(rounds):
                which = (first + number) % 4
                with store.key_lock(digests[which], timeout_s=120) as held:
                    inside[which] += 1
                    if not held or inside[which] != 1:
                        tally.wrong.append(f"{inside[which]} threads inside, held: {held}")
                    if number % 8 == 0:
                        store.publish(numbered(which))
                        if store.get(digests[which]) != numbered(which):
                            tally.lost.append(f"thread {first}, round {number}")
                    inside[which] -= 1
        except Exception as error:
            tally.wrong.append(f"thread {first}: {error!r}")

    workers = [threading.Thread(target=work, args=(first,)) for first in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=280)
        if worker.is_alive():
            tally.wrong.append("a thread waits for ever")
    tally.tried += threads * rounds


@pytest.mark.fault("P5")
def test_threads_exclude_each_other_and_none_waits_for_ever(
    tally: Tally, fast_folder: Path, pick: Callable[[int, int], int]
) -> None:
    """Bug: locks of one process do not exclude its own threads, or two of them deadlock."""
    rounds = pick(25, 200)
    crowd_of_threads(tally, Store(fast_folder / "store"), threads=16, rounds=rounds)
    tally.clean(at_least=16 * rounds)


@pytest.mark.fault("P5", control=True)
def test_threads_find_missing_locks(
    tally: Tally, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without locks two threads must meet."""
    bugs.no_locks(monkeypatch)
    crowd_of_threads(tally, Store(fast_folder / "store"), threads=16, rounds=10)
    tally.found()


INVISIBLE_S = 2.0


def late_names(patch: pytest.MonkeyPatch) -> None:
    """As a network file system may: a new name under refs cannot be seen for two seconds."""
    real = Directory.read_dated

    def read_dated(self: Directory, name: str, **limits: Any) -> tuple[bytes, int]:
        data, time_ns = real(self, name, **limits)
        if "/refs/" in self.path and time.time() - time_ns / 1e9 < INVISIBLE_S:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.path}/{name}")
        return data, time_ns

    patch.setattr(Directory, "read_dated", read_dated)


def race(tally: Tally, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty builders of one key without locks, none of whom sees what the others have made."""
    bugs.no_locks(monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        late_names(patch)
        racing = Builders(folder, 20)
        outcomes = racing.run(monkeypatch, before_compile=together(20))
        (ref,) = (racing.store.root / "v1" / "refs").rglob("?" * 64)
        invisible = racing.store.get(ref.name)
        age_s = time.time() - ref.stat().st_mtime
        assert isinstance(invisible, Miss) or age_s >= INVISIBLE_S, "the race was not invisible"
    racing.judge(tally, outcomes, compiles=20)


@pytest.mark.fault("P6")
def test_losers_of_a_race_return_their_own_bytes(
    tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the loser of a rename race on NFS looks for the winner's file, and dies."""
    race(tally, tmp_path, monkeypatch)
    tally.clean(at_least=20)


@pytest.mark.fault("P6", control=True)
def test_a_race_finds_a_loser_that_reads_the_winner(
    tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a builder that takes what the store gives back must be found."""

    def read_back(store: Store, result: BuildResult) -> BuildResult:
        found = store.get(result.item.digest)
        assert not isinstance(found, Miss), "cannot see the winner"
        return result

    monkeypatch.setattr(builder, "_read_back", read_back)
    race(tally, tmp_path, monkeypatch)
    tally.found()
