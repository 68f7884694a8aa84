"""L1 and L2: leaks, and what reading, publishing and listing cost."""

from __future__ import annotations

import functools
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import bugs
from faults.harness import leftovers, numbered
from faults.tally import Tally
from llbf16_aot.artifact import Artifact, Blob
from llbf16_aot.scan import scan
from llbf16_aot.store import Store
from support import compiled_artifact

Sizes = Callable[[int, int], int]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def round_trips(tally: Tally, store: Store, count: int) -> None:
    """Publish, read, list and lock again and again; what the process and the store then hold."""

    def once(number: int) -> None:
        artifact = numbered(number % 50)
        with store.key_lock(artifact.digest, timeout_s=5):
            store.publish(artifact)
        if store.get(artifact.digest) != artifact:
            tally.lost.append(f"round {number}")
        store.get("0" * 64)
        store.digests()

    once(0)
    gc.collect()
    gc.disable()
    try:
        before = (open_descriptors(), threading.active_count())
        for number in range(count):
            once(number)
            tally.tried += 1
        after = (open_descriptors(), threading.active_count())
    finally:
        gc.enable()
    if after != before:
        tally.wrong.append(f"descriptors and threads: {before} before, {after} after")
    if left := leftovers(store):
        tally.unhealed.append(f"left {left}")
    locks = os.listdir(store.root / "v1" / "locks")
    if len(locks) > 4:
        tally.unhealed.append(f"{len(locks)} lock files stay")


@pytest.mark.fault("L1")
def test_a_thousand_round_trips_leave_nothing_open(
    tally: Tally, fast_folder: Path, pick: Sizes
) -> None:
    """Bug: a server that loads and publishes for days runs out of descriptors or inodes."""
    rounds = pick(300, 1000)
    round_trips(tally, Store(fast_folder / "store"), rounds)
    tally.clean(at_least=rounds)


@pytest.mark.fault("L1", control=True)
def test_round_trips_find_a_directory_that_stays_open(
    tally: Tally, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: descriptors that are never given back must be found."""
    bugs.forgets_descriptors(monkeypatch)
    round_trips(tally, Store(fast_folder / "store"), 5)
    tally.found()


def children_s() -> float:
    """Processor time of all children that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def best_s(
    action: Callable[[], object],
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The shortest time of an action: what it costs where nothing else runs."""
    times = []
    for _ in range(rounds):
        started = clock()
        action()
        times.append(clock() - started)
    return min(times)


def large(number: int) -> Artifact:
    """An artifact with one kernel, as the compiler makes them, padded to a cubin of 60 kB."""
    return compiled_artifact(number, size_bytes=60_000)


def speeds(tally: Tally, store: Store, disk: Store, slack: int) -> None:
    """Reading and publishing 60 kB, and the start of the program.

    Reading and starting are measured in processor time, which other work on the machine adds little
    to; publishing waits for the disk. `slack` multiplies the limits.
    """
    artifact = large(0)
    store.publish(artifact)
    if store.get(artifact.digest) != artifact:
        tally.wrong.append("the entry of 60 kB cannot be read")
    rounds = iter(range(1, 1000))
    measured = {
        "get of 60 kB": (
            best_s(lambda: store.get(artifact.digest), rounds=500, clock=time.thread_time),
            0.0003,
        ),
        "publish of 60 kB": (best_s(lambda: disk.publish(large(next(rounds))), rounds=20), 0.020),
        "--help": (
            best_s(
                lambda: subprocess.run(
                    [sys.executable, "-m", "llbf16_aot", "--help"], check=True, capture_output=True
                ),
                rounds=8,
                clock=children_s,
            ),
            0.2,
        ),
    }
    for name, (took_s, limit_s) in measured.items():
        tally.tried += 1
        tally.notes.append(f"{name}: {took_s * 1e3:.2f} ms, limit {limit_s * 1e3:g} ms")
        if took_s > slack * limit_s:
            tally.wrong.append(f"{name}: {took_s * 1e3:.2f} ms, limit {limit_s * 1e3:g} ms")


@pytest.mark.fault("L2")
def test_reading_publishing_and_help_are_fast(
    tally: Tally, tmp_path: Path, fast_folder: Path, pick: Sizes
) -> None:
    """Bug: an entry is read or hashed several times over, or the program imports too much."""
    # A machine of CI does other things at the same time.
    speeds(tally, Store(fast_folder / "store"), Store(tmp_path / "store"), pick(4, 1))
    tally.clean(at_least=3)


@pytest.mark.fault("L2", control=True)
def test_speeds_find_an_entry_that_is_hashed_many_times(
    tally: Tally, tmp_path: Path, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a read that does its work fifty times over must be found."""
    real = Blob.matches

    def matches(self: Blob, data: bytes) -> bool:
        answers = [real(self, data) for _ in range(200)]
        return all(answers)

    monkeypatch.setattr(Blob, "matches", matches)
    speeds(tally, Store(fast_folder / "store"), Store(tmp_path / "store"), 1)
    tally.found()


@pytest.mark.fault("L2")
def test_a_large_store_is_listed_and_read_as_fast_as_a_small_one(
    tally: Tally, fast_folder: Path, pick: Sizes
) -> None:
    """Bug: a read looks at every entry, a list reads every cubin, or an entry is many files."""
    store = Store(fast_folder / "store")
    first = numbered(0)
    store.publish(first)
    small_s = best_s(functools.partial(store.get, first.digest), rounds=300, clock=time.thread_time)
    inodes = sum(len(files) for _, _, files in os.walk(store.root / "v1" / "refs")) + sum(
        len(files) for _, _, files in os.walk(store.root / "v1" / "blobs")
    )
    count = pick(500, 10_000)
    for number in range(1, count):
        store.publish(numbered(number))
    large_s = best_s(functools.partial(store.get, first.digest), rounds=300, clock=time.thread_time)
    started = time.thread_time()
    found = scan(store)
    list_s = time.thread_time() - started
    names = [name for _, _, files in os.walk(store.root) for name in files]
    tally.tried += 4
    tally.notes.append(f"list of {count} entries: {list_s:.2f} s, limit 1.5 s for 10,000")
    tally.notes.append(f"get: {small_s * 1e6:.0f} us of one, {large_s * 1e6:.0f} us of {count}")
    if len(found.entries) != count:
        tally.lost.append(f"{len(found.entries)} of {count} entries are listed")
    if list_s > 1.5 * max(1.0, count / 10_000):
        tally.wrong.append(f"list of {count} entries took {list_s:.2f} s")
    if large_s > 1.5 * small_s + 50e-6:
        tally.wrong.append(f"get: {small_s * 1e6:.0f} us alone, {large_s * 1e6:.0f} us of {count}")
    if inodes > 3:
        tally.wrong.append(f"{inodes} files for one entry")
    if longest := [name for name in names if len(os.fsencode(name)) > 80]:
        tally.wrong.append(f"longer than 80 bytes: {longest[:3]}")
    tally.clean(at_least=4)
