"""C2 and C3 from outside: strace kills, or fails, each system call of the store's actions."""

from __future__ import annotations

import functools
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import bugs
from faults.harness import ERRNOS, check_entry, check_healed, numbered, replaced
from faults.tally import Tally
from faults.tracer import FILE_CALLS, Ended, count_calls, known, needs_strace, traced
from llbf16_aot.artifact import Artifact
from llbf16_aot.errors import StoreError
from llbf16_aot.store import Miss, MissReason, Store

OLD = numbered(0)
NEW = replaced(OLD, "9.9.9")
OTHER = numbered(1)

OK, REFUSED, MISSED, UNTYPED, WRONG = 0, 10, 11, 99, 98


@pytest.fixture
def folder(fast_folder: Path) -> Path:
    needs_strace(fast_folder)
    # What is imported late must be there before calls are counted.
    store = Store(fast_folder / "warm")
    store.publish(OTHER)
    assert store.get(OTHER.digest) == OTHER
    with store.key_lock(OTHER.digest, timeout_s=0):
        pass
    return fast_folder


def publish(store: Store) -> int:
    try:
        store.publish(NEW)
    except StoreError:
        return REFUSED
    return OK


def read(store: Store) -> int:
    found = store.get(OLD.digest)
    if isinstance(found, Miss):
        return MISSED if found.reason is MissReason.UNREADABLE else WRONG
    return OK if found == OLD else WRONG


def locked_publish(store: Store) -> int:
    try:
        with store.key_lock(NEW.digest, timeout_s=5):
            store.publish(NEW)
    except StoreError:
        return REFUSED
    return OK


Action = Callable[[Store], int]
ACTIONS: dict[Action, bool] = {publish: False, locked_publish: True, read: True}
"""Whether an older entry is there before."""


def fresh(folder: Path, *, older: bool) -> tuple[Store, Artifact | None]:
    store = Store(folder / "store")
    shutil.rmtree(store.root, ignore_errors=True)
    if older:
        store.publish(OLD)
        return store, OLD
    return store, None


def sweep(
    tally: Tally, folder: Path, action: Action, *, calls: str, fault: str, step: int, first: int = 1
) -> None:
    """Break every `step`-th system call of an action, and look at what is left."""
    older = ACTIONS[action]
    store, _ = fresh(folder, older=older)
    names = count_calls(lambda: action(store), folder, calls)
    assert len(names) > 10, names
    # Two more than were counted: the last ones must be out of reach, or some were not counted.
    for number in range(first, len(names) + 3, step):
        store, before = fresh(folder, older=older)
        option = f"inject={calls}:{fault}:when={number}"
        ended = traced(
            functools.partial(action, store), folder, "-e", f"trace={calls}", "-e", option
        )
        where = f"{action.__name__}, {fault} at {number} of {len(names)}: {ended}"
        if number <= len(names):
            tally.tried += 1
        judge(tally, store, before, ended, action=action, where=where)


def judge(
    tally: Tally, store: Store, before: Artifact | None, ended: Ended, *, action: Action, where: str
) -> None:
    if ended.signal not in (0, signal.SIGKILL) or ended.code in (UNTYPED, WRONG, 125):
        tally.wrong.append(where)
    elif action is not read and ended.code == OK and store.get(NEW.digest) != NEW:
        tally.lost.append(f"ok without the entry: {where}")
    check_entry(tally, store, NEW, before, where)
    check_healed(tally, store, NEW, where)


@pytest.mark.fault("C2")
@pytest.mark.parametrize("action", [publish, locked_publish])
def test_a_writer_killed_at_any_system_call_leaves_the_entry_whole_or_absent(
    tally: Tally, folder: Path, pick: Callable[[int, int], int], action: Action
) -> None:
    """Bug: half an entry, a lost older one, litter or a lock that stays after a kill -9."""
    sweep(tally, folder, action, calls="all", fault="signal=KILL", step=pick(5, 1))
    with Store(folder / "store").key_lock(NEW.digest, timeout_s=0) as held:
        assert held
    tally.clean(at_least=pick(20, 100))


@pytest.mark.fault("C2", control=True)
def test_killing_finds_a_writer_in_place(
    tally: Tally, folder: Path, monkeypatch: pytest.MonkeyPatch, pick: Callable[[int, int], int]
) -> None:
    """Control: files that grow under their own name must be found half written."""
    bugs.writes_in_place(monkeypatch)
    sweep(tally, folder, publish, calls="write", fault="signal=KILL", step=pick(3, 1))
    tally.found()


@pytest.mark.fault("C2", control=True)
def test_killing_finds_litter_that_nobody_sweeps(
    tally: Tally, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: temporary files that stay for ever must be found."""
    bugs.keeps_temporary_files(monkeypatch)
    sweep(tally, folder, publish, calls="fchmod,fsync", fault="signal=KILL", step=1)
    tally.found()


@pytest.mark.fault("C3")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", ERRNOS)
def test_a_failing_system_call_is_typed_or_a_miss_and_heals(
    tally: Tally, folder: Path, pick: Callable[[int, int], int], name: str, action: Action
) -> None:
    """Bug: a raw error, "ok" without the entry, a wrong hit; in Python's own calls, too."""
    first = pick(1 + ERRNOS.index(name), 1)
    calls = known(FILE_CALLS)
    sweep(tally, folder, action, calls=calls, fault=f"error={name}", step=pick(12, 1), first=first)
    tally.clean(at_least=pick(3, 40))


@pytest.mark.fault("C3", control=True)
def test_failing_finds_ok_without_the_entry(
    tally: Tally, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a publisher that says ok whatever happened must be found."""
    bugs.hides_failures(monkeypatch)
    sweep(tally, folder, publish, calls="fsync,renameat", fault="error=EIO", step=2)
    tally.found()
