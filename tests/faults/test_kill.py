"""C1, and writers stopped at named points: kill -9 at random times, readers at the worst times."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from children import Child
from faults import bugs
from faults.harness import check_entry, check_healed, numbered, replaced
from faults.tally import Tally
from llbf16_aot.artifact import Artifact
from llbf16_aot.store import Store

OLD = numbered(0)
NEW = replaced(OLD, "9.9.9")


def slow_syncs(patch: pytest.MonkeyPatch) -> None:
    """Give every sync the time of a disk, so that kills spread over all of a publish."""
    patch.setattr(os, "fsync", lambda descriptor: time.sleep(0.0005))


def killed_at_random(tally: Tally, folder: Path, rounds: int) -> None:
    dice = random.Random(20261129)
    store = Store(folder / "store")
    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        slow_syncs(patch)
        store.publish(NEW)
        whole_s = time.monotonic() - started
        killed = 0
        for number in range(rounds):
            shutil.rmtree(store.root, ignore_errors=True)
            before: Artifact | None = None
            if number % 2:
                store.publish(OLD)
                before = OLD
            reading, writing = os.pipe()

            def publish(writing: int = writing) -> None:
                os.write(writing, b"x")
                store.publish(NEW)

            child = Child(publish)
            os.read(reading, 1)
            time.sleep(dice.uniform(0, 1.2 * whole_s))
            os.kill(child.pid, signal.SIGKILL)
            ended = child.join()
            os.close(reading)
            os.close(writing)
            killed += ended.signal == signal.SIGKILL
            tally.tried += 1
            where = f"round {number}"
            if ended.error:
                tally.wrong.append(f"{where}: {ended.error}: {ended.message}")
            check_entry(tally, store, NEW, before, where)
            check_healed(tally, store, NEW, where)
    assert killed > rounds // 2, "too few of the kills met a publish"


@pytest.mark.fault("C1")
def test_a_writer_killed_at_random_times_leaves_the_entry_whole_or_absent(
    tally: Tally, fast_folder: Path, pick: Callable[[int, int], int]
) -> None:
    """Bug: half an entry, a lost older one, or litter that the next publish does not sweep."""
    rounds = pick(100, 1000)
    killed_at_random(tally, fast_folder, rounds)
    tally.clean(at_least=rounds)


@pytest.mark.fault("C1", control=True)
def test_random_kills_find_a_writer_in_place(
    tally: Tally, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: files that grow under their own name, at the speed of a disk, must be found."""
    bugs.writes_in_place(monkeypatch)
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        time.sleep(0.0005)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    killed_at_random(tally, fast_folder, 60)
    tally.found()


class Stopped:
    """A child that publishes and stops at the `number`-th call of `os.<name>`, before or after it.

    It blocks on a FIFO, so nothing here waits for a clock; in the product there is no such point.
    """

    def __init__(
        self, store: Store, artifact: Artifact, folder: Path, *, name: str, number: int, after: bool
    ) -> None:
        self._reached, self._go = folder / "reached", folder / "go"
        for fifo in (self._reached, self._go):
            os.mkfifo(fifo)

        def publish() -> None:
            real = getattr(os, name)
            seen = [0]

            def stopping(*args: object, **keywords: object) -> object:
                seen[0] += 1
                mine = seen[0] == number
                if mine and not after:
                    self._stop()
                result = real(*args, **keywords)
                if mine and after:
                    self._stop()
                return result

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, name, stopping)
                store.publish(artifact)
            if seen[0] < number:
                # Never reached: do not leave the parent waiting.
                self._stop(said=b"-")

        self.child = Child(publish)
        with self._reached.open("rb") as file:
            self.reached = file.read() == b"x"

    def _stop(self, said: bytes = b"x") -> None:
        self._reached.write_bytes(said)
        self._go.read_bytes()

    def go_on(self) -> str:
        """Let the child end; what it failed with, if it did."""
        self._go.write_bytes(b"")
        ended = self.child.join()
        self._reached.unlink()
        self._go.unlink()
        return f"{ended.error}: {ended.message}" if ended.error or ended.signal else ""


def at_every_point(tally: Tally, folder: Path) -> None:
    """Stop a writer at each point, let others read, list and publish, then let it go on."""
    for name in ("rename", "write", "mkdir"):
        for older in (False, True):
            for after in (False, True):
                number = 1
                while at_point(tally, folder, name=name, number=number, older=older, after=after):
                    number += 1


def at_point(
    tally: Tally, folder: Path, *, name: str, number: int, older: bool, after: bool
) -> bool:
    """Whether there was such a point."""
    where = f"{'after' if after else 'before'} {name} {number}, older entry: {older}"
    store = Store(folder / "store")
    shutil.rmtree(store.root, ignore_errors=True)
    before: Artifact | None = None
    if older:
        store.publish(OLD)
        before = OLD
    point = Stopped(store, NEW, folder, name=name, number=number, after=after)
    other = numbered(1)
    if point.reached:
        tally.tried += 1
        check_entry(tally, store, NEW, before, where)
        listed = store.digests()
        if listed not in ((), (NEW.digest,)) or (older and not listed):
            tally.wrong.append(f"{where}: listed {listed}")
        # Another writer is not held up, and the stopped one does not undo its work.
        store.publish(other)
        if store.get(other.digest) != other:
            tally.lost.append(f"{where}: the other writer's entry")
    if failure := point.go_on():
        tally.wrong.append(f"{where}: the stopped writer failed: {failure}")
        return point.reached
    if point.reached and store.get(other.digest) != other:
        tally.lost.append(f"{where}: the other writer's entry, afterwards")
    if store.get(NEW.digest) != NEW:
        tally.lost.append(f"{where}: the stopped writer's own entry")
    check_healed(tally, store, NEW, where)
    return point.reached


@pytest.mark.fault("P3")
def test_a_writer_stopped_at_any_point_disturbs_nobody(tally: Tally, fast_folder: Path) -> None:
    """Bug: readers see an entry in the making, or another writer sweeps a living writer's file."""
    at_every_point(tally, fast_folder)
    tally.clean(at_least=40)


@pytest.mark.fault("P3", control=True)
def test_stopping_finds_a_writer_in_place(
    tally: Tally, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: an entry that is visible in the making must be found."""
    bugs.writes_in_place(monkeypatch)
    at_every_point(tally, fast_folder)
    tally.found()


@pytest.mark.fault("P3", control=True)
def test_stopping_finds_a_sweeper_of_living_files(
    tally: Tally, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a sweeper that asks no lock takes away what a stopped writer still needs."""
    from llbf16_aot.files import Directory

    def sweep(self: Directory) -> None:
        for name in self.names():
            os.unlink(name, dir_fd=self._descriptor)

    monkeypatch.setattr(Directory, "sweep", sweep)
    at_every_point(tally, fast_folder)
    tally.found()
