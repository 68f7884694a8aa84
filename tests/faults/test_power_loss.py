"""C4: after a power loss every acknowledged entry can be read."""

from __future__ import annotations

import os
import random
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from children import Child
from faults import bugs
from faults.harness import check_healed, needs_root, numbered, run_tool
from faults.power import Disk, attach, mount
from faults.tally import Tally
from llbf16_aot.store import Miss, MissReason, Store

MOST = 2000


def acknowledged(reading: int) -> int:
    """How many entries the writer has said to be there."""
    os.set_blocking(reading, False)
    count = 0
    while True:
        try:
            part = os.read(reading, 65536)
        except BlockingIOError:
            return count
        if not part:
            return count
        count += len(part)


@contextmanager
def recovered(image: Path, place: Path) -> Iterator[Path]:
    """The copied file system, mounted elsewhere."""
    place.mkdir(exist_ok=True)
    device = attach(image)
    try:
        mount(device, place)
        try:
            yield place
        finally:
            run_tool("umount", str(place))
    finally:
        run_tool("losetup", "-d", device)


def crash(tally: Tally, folder: Path, number: int, dice: random.Random) -> int:
    """One power loss at a random moment of a writer; how many entries it had acknowledged."""
    disk = Disk(folder)
    copy = folder / "copy.img"
    try:
        store = Store(disk.place / "store")
        reading, writing = os.pipe()

        def write() -> None:
            for each in range(MOST):
                store.publish(numbered(each))
                os.write(writing, b"x")

        writer = Child(write)
        time.sleep(dice.uniform(0.02, 0.6))
        os.kill(writer.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
        disk.copy(copy)
        os.close(writing)
        count = acknowledged(reading)
        os.close(reading)
        os.kill(writer.pid, signal.SIGKILL)
        assert writer.join().signal == signal.SIGKILL, "the writer came to its end"
    finally:
        disk.close()
    tally.tried += 1
    with recovered(copy, folder / "recovered") as place:
        judge(tally, Store(place / "store"), count, number)
    return count


def judge(tally: Tally, store: Store, count: int, number: int) -> None:
    for each in range(count):
        found = store.get(numbered(each).digest)
        if found != numbered(each):
            said = found.detail if isinstance(found, Miss) else "another artifact"
            tally.lost.append(f"crash {number}: entry {each} of {count} acknowledged: {said}")
    # The one that was under way is whole or absent.
    under_way = numbered(count)
    found = store.get(under_way.digest)
    if isinstance(found, Miss):
        if found.reason is not MissReason.ABSENT:
            tally.wrong.append(f"crash {number}: entry {count}, under way: {found.detail}")
    elif found != under_way:
        tally.wrong.append(f"crash {number}: entry {count}, under way: another artifact")
    check_healed(tally, store, under_way, f"crash {number}")


@needs_root
@pytest.mark.fault("C4")
def test_every_acknowledged_entry_survives_a_power_loss(
    tally: Tally, fast_folder: Path, pick: Callable[[int, int], int]
) -> None:
    """Bug: "published" is said of bytes, a name or a directory that only memory knew."""
    dice = random.Random(4)
    crashes = pick(3, 50)
    entries = sum(crash(tally, fast_folder, number, dice) for number in range(crashes))
    assert entries >= 3 * crashes, "too few entries were acknowledged to lose one"
    tally.clean(at_least=crashes)


def no_directory_syncs(patch: pytest.MonkeyPatch) -> None:
    """Bytes are written through, names are not."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            real(descriptor)

    patch.setattr(os, "fsync", fsync)


@needs_root
@pytest.mark.fault("C4", control=True)
@pytest.mark.parametrize("plant", [bugs.no_syncs, no_directory_syncs])
def test_power_losses_find(
    tally: Tally,
    fast_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Control: with syncing off, of everything or of directories alone, entries must be lost."""
    plant(monkeypatch)
    dice = random.Random(5)
    # A file's sync often takes names along: without those of directories few crashes lose an entry.
    for number in range(30):
        crash(tally, fast_folder, number, dice)
        if tally.findings:
            break
    tally.found()
