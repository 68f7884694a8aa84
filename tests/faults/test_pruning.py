"""G1, G3, C2, C3: pruning beside readers and writers, with wrong clocks, killed and failing."""

from __future__ import annotations

import functools
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import children
import pytest
from children import all_at_once
from faults.calls import AtCall, fail_with
from faults.harness import ERRNOS, check_healed, leftovers
from faults.tally import Tally
from faults.tracer import FILE_CALLS, count_calls, known, needs_strace, traced
from llbf16_aot.artifact import Artifact
from llbf16_aot.errors import AotError, StoreError
from llbf16_aot.files import Directory
from llbf16_aot.pins import pin
from llbf16_aot.prune import Clock, PruneRules, execute_prune, plan_prune, read_clock
from llbf16_aot.scan import scan
from llbf16_aot.store import Miss, MissReason, Store
from support import FIXTURE_TARGETS, make_artifact

Sizes = Callable[[int, int], int]


def entries(count: int) -> list[Artifact]:
    """Artifacts of which some share their cubin."""
    return [
        make_artifact(target=FIXTURE_TARGETS[number % 5], tokens=1 + number // 5)
        for number in range(count)
    ]


ENTRIES = entries(12)
PINNED = ENTRIES[0]


def prune(store: Store, max_bytes: int) -> None:
    clock = read_clock(store)
    plan = plan_prune(scan(store), PruneRules(max_bytes=max_bytes), clock, store=store.root)
    execute_prune(plan, store, timeout_s=60)


def dangling(store: Store) -> list[str]:
    """Refs that name what is not there, or not whole."""
    found = [(digest, store.get(digest)) for digest in store.digests()]
    return [
        f"{digest[:8]}: {state.detail}"
        for digest, state in found
        if isinstance(state, Miss) and state.reason is not MissReason.ABSENT
    ]


class Beside:
    """Readers, writers and a pruner at one store, for some seconds."""

    def __init__(self, store: Store, time_s: float) -> None:
        self._store = store
        self._time_s = time_s

    def write(self, seed: int) -> tuple[int, list[str]]:
        dice, end, count = random.Random(seed), time.monotonic() + self._time_s, 0
        while time.monotonic() < end:
            self._store.publish(dice.choice(ENTRIES))
            count += 1
        return count, []

    def read(self, seed: int) -> tuple[int, list[str]]:
        dice, end, count = random.Random(seed), time.monotonic() + self._time_s, 0
        wrong: list[str] = []
        while time.monotonic() < end:
            entry = dice.choice(ENTRIES)
            found = self._store.get(entry.digest)
            count += 1
            if isinstance(found, Miss):
                if found.reason is not MissReason.ABSENT:
                    wrong.append(f"{found.reason.value}: {found.detail}")
                elif entry == PINNED:
                    wrong.append("the pinned entry is gone")
            elif found != entry:
                wrong.append(f"{entry.digest[:8]}: another artifact")
        return count, wrong

    def prune(self) -> tuple[int, list[str]]:
        end, count = time.monotonic() + self._time_s, 0
        while time.monotonic() < end:
            prune(self._store, (count % 4) * 15_000)
            count += 1
        return count, []

    def run(self, tally: Tally) -> None:
        self._store.publish(PINNED)
        pin(self._store, [PINNED.digest])
        outcomes = all_at_once(
            [functools.partial(self.write, seed) for seed in range(4)]
            + [functools.partial(self.read, seed) for seed in range(4)]
            + [self.prune]
        )
        for outcome in outcomes:
            if isinstance(outcome.value, tuple):
                tally.tried += outcome.value[0]
                tally.wrong.extend(outcome.value[1])
            else:
                tally.wrong.append(str(outcome))
        tally.lost.extend(dangling(self._store))
        prune(self._store, 0)
        if self._store.digests() != (PINNED.digest,):
            tally.wrong.append(f"after pruning to nothing: {self._store.digests()}")
        if left := leftovers(self._store):
            tally.unhealed.append(f"left {left}")
        for entry in ENTRIES:
            check_healed(tally, self._store, entry, entry.digest[:8])


@pytest.mark.fault("G1")
def test_pruning_beside_readers_and_writers_takes_nothing_from_them(
    tally: Tally, fast_folder: Path, monkeypatch: pytest.MonkeyPatch, pick: Sizes
) -> None:
    """Bug: a reader fails while entries go, or a publisher's blob goes before its ref is there."""
    monkeypatch.setattr(children, "LIMIT_S", 300)
    Beside(Store(fast_folder / "store"), pick(5, 60)).run(tally)
    tally.clean(at_least=pick(500, 5000))


@pytest.mark.fault("G1", control=True)
def test_pruning_without_the_lock_dangles(
    tally: Tally, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a pruner that does not wait for publishers must leave a ref without its blob."""

    def lock(self: Store, stack: ExitStack, version: Directory, **_: object) -> None:
        os.sched_yield()

    monkeypatch.setattr(Store, "_lock", lock)
    for _ in range(5):
        shutil.rmtree(fast_folder / "store", ignore_errors=True)
        Beside(Store(fast_folder / "store"), 2).run(tally)
        if tally.findings:
            break
    tally.found()


YEARS_NS = 10 * 365 * 86_400 * 10**9
DAY_S = 86_400.0
DAY_NS = 86_400 * 10**9


def set_used(store: Store, artifact: Artifact, time_ns: int) -> None:
    path = store.root / "v1" / "refs" / artifact.digest[:2] / artifact.digest
    os.utime(path, ns=(time_ns, time_ns))


def clock_table(tally: Tally, folder: Path, believe: Callable[[Clock], Clock]) -> None:
    """Fresh and old entries under clocks that are right, and ten years ahead or behind.

    An entry is old where its date is a week before the time at which it is pruned. Dates are those
    of the clock that was in force when the entry was used.
    """
    now = time.time_ns()
    fresh, old = ENTRIES[1], ENTRIES[2]
    for name, published_ns, pruned_ns, fresh_stays, old_stays in (
        ("right", now, now, True, False),
        ("ahead when published, right since", now + YEARS_NS, now, True, True),
        ("behind when published, right since", now - YEARS_NS, now, False, False),
        ("right when published, behind since", now, now - YEARS_NS, True, True),
        ("ahead all the time", now + YEARS_NS, now + YEARS_NS, True, False),
        ("behind all the time", now - YEARS_NS, now - YEARS_NS, True, True),
    ):
        store = Store(folder / "store")
        shutil.rmtree(store.root, ignore_errors=True)
        for entry, age_ns in ((fresh, 0), (old, 7 * DAY_NS)):
            store.publish(entry)
            set_used(store, entry, published_ns - age_ns)
        tally.tried += 1
        plan = plan_prune(
            scan(store),
            PruneRules(older_than_s=DAY_S),
            believe(Clock(pruned_ns)),
            store=store.root,
        )
        execute_prune(plan, store)
        stays = (
            isinstance(store.get(fresh.digest), Artifact),
            isinstance(store.get(old.digest), Artifact),
        )
        if stays != (fresh_stays, old_stays):
            tally.wrong.append(f"clock {name}: fresh, old stay: {stays}")
        # Nothing is immortal: a right clock a week later takes whatever is left.
        for entry in (fresh, old):
            if isinstance(store.get(entry.digest), Artifact) and pruned_ns < now:
                set_used(store, entry, pruned_ns)
        later = Clock(now + 8 * DAY_NS)
        plan = plan_prune(scan(store), PruneRules(older_than_s=DAY_S), later, store=store.root)
        execute_prune(plan, store)
        again = plan_prune(
            scan(store),
            PruneRules(older_than_s=DAY_S),
            Clock(now + 16 * DAY_NS),
            store=store.root,
        )
        execute_prune(again, store)
        if store.digests():
            tally.unhealed.append(f"clock {name}: still there: {store.digests()}")


@pytest.mark.fault("G3")
def test_clocks_ten_years_off_remove_nothing_fresh_and_keep_nothing_for_ever(
    tally: Tally, fast_folder: Path
) -> None:
    """Bug: a clock that jumped makes every entry old, or one that was wrong makes it immortal."""
    clock_table(tally, fast_folder, lambda clock: clock)
    tally.clean(at_least=6)


@pytest.mark.fault("G3", control=True)
def test_the_table_finds_a_clock_that_is_always_believed(
    tally: Tally, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: ages by plain subtraction must be found."""
    monkeypatch.setattr(Clock, "trusted", property(lambda self: True))
    monkeypatch.setattr(Clock, "used_ns", lambda self, entry: entry.used_ns)
    clock_table(tally, fast_folder, lambda clock: clock)
    tally.found()


KEPT, GONE = ENTRIES[3], ENTRIES[4]
OK, REFUSED, SKIPPED, RAW = 0, 10, 12, 99


def filled(folder: Path) -> Store:
    """A store with two entries that rules keep and two that they do not, one pinned of each."""
    store = Store(folder / "store")
    shutil.rmtree(store.root, ignore_errors=True)
    for entry in (PINNED, KEPT, GONE):
        store.publish(entry)
    pin(store, [PINNED.digest])
    return store


def prune_unneeded(store: Store) -> int:
    try:
        plan = plan_prune(
            scan(store),
            PruneRules(needed=frozenset([KEPT.digest])),
            read_clock(store),
            store=store.root,
        )
        outcome = execute_prune(plan, store, timeout_s=5)
    except StoreError:
        return REFUSED
    return SKIPPED if outcome.skipped else OK


def judge_pruned(tally: Tally, store: Store, code: int, where: str) -> None:
    """What must stay is there, what may go is whole or absent, and the next prune is complete."""
    if code not in (OK, REFUSED, SKIPPED):
        tally.wrong.append(where)
    for entry in (PINNED, KEPT):
        if store.get(entry.digest) != entry:
            tally.lost.append(f"{where}: {store.get(entry.digest)!r}")
    found = store.get(GONE.digest)
    if isinstance(found, Miss):
        if found.reason is not MissReason.ABSENT:
            tally.wrong.append(f"{where}: {found.detail}")
    elif found != GONE:
        tally.wrong.append(f"{where}: another artifact")
    elif code == OK:
        tally.wrong.append(f"{where}: ok, and nothing was pruned")
    if prune_unneeded(store) != OK or set(store.digests()) != {PINNED.digest, KEPT.digest}:
        tally.unhealed.append(f"{where}: the next prune leaves {store.digests()}")
    blobs = sum(len(files) for _, _, files in os.walk(store.root / "v1" / "blobs"))
    if blobs != 4:
        tally.unhealed.append(f"{where}: {blobs} blobs, wanted 4")
    check_healed(tally, store, GONE, where)


@pytest.mark.fault("C2")
def test_a_prune_killed_at_any_system_call_loses_nothing_that_must_stay(
    tally: Tally, fast_folder: Path, pick: Sizes
) -> None:
    """Bug: blobs go before their refs, or what a killed prune left can never be pruned."""
    needs_strace(fast_folder)
    assert prune_unneeded(filled(fast_folder)) == OK
    store = filled(fast_folder)
    names = count_calls(lambda: prune_unneeded(store), fast_folder, "all")
    for number in range(1, len(names) + 1, pick(6, 1)):
        store = filled(fast_folder)
        option = f"inject=all:signal=KILL:when={number}"
        traced(functools.partial(prune_unneeded, store), fast_folder, "-e", option)
        tally.tried += 1
        judge_pruned(tally, store, REFUSED, f"killed at {number} of {len(names)}")
    tally.clean(at_least=pick(20, 100))


def blobs_first(patch: pytest.MonkeyPatch) -> None:
    """What is pruned loses its blobs before its ref."""
    from llbf16_aot import prune as module

    real = module._unlink
    waiting: list[tuple[Directory, set[str]]] = []

    def unlink(version: Directory, folders: tuple[str, ...], digests: set[str]) -> None:
        if folders == ("refs",):
            waiting.append((version, digests))
            return
        real(version, folders, digests)
        if folders == ("blobs", "sha256"):
            (one,) = waiting
            real(one[0], ("refs",), one[1])
            waiting.clear()

    patch.setattr(module, "_unlink", unlink)


@pytest.mark.fault("C2", control=True)
def test_killing_a_prune_finds_one_that_takes_blobs_first(
    tally: Tally, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a ref that outlives its blobs must be found."""
    needs_strace(fast_folder)
    blobs_first(monkeypatch)
    for number in range(1, 12):
        store = filled(fast_folder)
        option = f"inject=unlink,unlinkat:signal=KILL:when={number}"
        traced(functools.partial(prune_unneeded, store), fast_folder, "-e", option)
        tally.tried += 1
        judge_pruned(tally, store, REFUSED, f"killed at removal {number}")
    tally.found()


@pytest.mark.fault("C3")
@pytest.mark.parametrize("name", ERRNOS)
def test_a_prune_with_a_failing_system_call_is_typed_and_loses_nothing(
    tally: Tally, fast_folder: Path, pick: Sizes, name: str
) -> None:
    """Bug: an entry that could not be read is taken for one that needs no blobs."""
    needs_strace(fast_folder)
    assert prune_unneeded(filled(fast_folder)) == OK
    calls = known(FILE_CALLS)
    store = filled(fast_folder)
    names = count_calls(lambda: prune_unneeded(store), fast_folder, calls)
    for number in range(1 + ERRNOS.index(name), len(names) + 1, pick(15, 1)):
        store = filled(fast_folder)
        ended = traced(
            functools.partial(prune_unneeded, store),
            fast_folder,
            *("-e", f"trace={calls}", "-e", f"inject={calls}:error={name}:when={number}"),
        )
        tally.tried += 1
        where = f"{name} at {number} of {len(names)} ({names[number - 1]}): {ended}"
        judge_pruned(tally, store, ended.code, where)
    tally.clean(at_least=pick(5, 100))


@pytest.mark.fault("C3")
@pytest.mark.parametrize("name", ERRNOS)
def test_a_prune_with_a_failing_call_is_typed_and_loses_nothing(
    tally: Tally, fast_folder: Path, pick: Sizes, name: str
) -> None:
    """Bug: the system's own error comes out of a prune."""
    step = pick(3, 1)
    number, done = ERRNOS.index(name) % step - step + 1, False
    while not done:
        number += step
        store = filled(fast_folder)
        at_call = AtCall(number, fail_with(name))
        code = RAW
        with pytest.MonkeyPatch.context() as patch:
            at_call.install(patch)
            try:
                code = prune_unneeded(store)
            except AotError as error:
                tally.wrong.append(f"{name} at {number}: {error!r}")
            except Exception as error:
                tally.wrong.append(f"{name} at {number} ({at_call.reached}): raw {error!r}")
        done = not at_call.reached
        tally.tried += not done
        judge_pruned(tally, store, code, f"{name} at call {number} ({at_call.reached})")
    tally.clean(at_least=pick(20, 60))
