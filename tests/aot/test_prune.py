"""Pruning, pins and scans: exactly what the plan says goes, and never what somebody needs."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llbf16_aot import scan as scan_module
from llbf16_aot.artifact import Artifact, Blob
from llbf16_aot.errors import LockTimeoutError, StoreError, StoreUnwritableError
from llbf16_aot.files import Directory
from llbf16_aot.pins import pin, pins, unpin
from llbf16_aot.prune import (
    EARLIEST_NS,
    Clock,
    PruneRules,
    execute_prune,
    plan_prune,
    plan_removal,
    read_clock,
)
from llbf16_aot.repair import repair
from llbf16_aot.scan import Entry, Scan, scan
from llbf16_aot.store import Miss, MissReason, Store
from support import artifact_for, files_below, fixture_cubin, make_artifact, make_key

DAY_NS = 86_400 * 10**9
NOW = EARLIEST_NS + 1000 * DAY_NS
YEARS_NS = 3650 * DAY_NS


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk's speed is not what these tests are about."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def distinct(number: int) -> Artifact:
    """An artifact with a cubin of its own: others share theirs."""
    cubin = fixture_cubin("ptxas_sm_90a") + bytes([number]) * 8
    return artifact_for(make_key(tokens=number + 1), cubin=cubin)


def ref(store: Store, digest: str) -> Path:
    return store.root / "v1" / "refs" / digest[:2] / digest


def dated(store: Store, digest: str, time_ns: int) -> None:
    os.utime(ref(store, digest), ns=(time_ns, time_ns))


def blobs(store: Store) -> set[str]:
    return {Path(n).name for n in files_below(store.root) if n.startswith("v1/blobs/")}


def prune(store: Store, clock: Clock | None = None, **rules: object) -> tuple[str, ...]:
    plan = plan_prune(
        scan(store),
        PruneRules(**rules),  # type: ignore[arg-type]
        clock or read_clock(store),
        store=store.root,
    )
    return execute_prune(plan, store).removed


def weight(store: Store) -> int:
    return sum(
        len(data)
        for name, data in files_below(store.root).items()
        if name.startswith(("v1/refs/", "v1/blobs/"))
    )


# --- Scans ------------------------------------------------------------------------------------


def test_a_scan_finds_every_entry_with_its_record(store: Store) -> None:
    """Bug: `list` shows another key than the one that is loaded, or leaves entries out."""
    artifacts = [distinct(number) for number in range(4)]
    for artifact in artifacts:
        store.publish(artifact)
    found = scan(store)
    assert {e.digest: e.record for e in found.entries} == {a.digest: a.record for a in artifacts}
    assert found.size_bytes == weight(store)
    assert set(found.blobs) == blobs(store)
    assert scan(Store(store.root / "none")) == Scan((), {}, frozenset())


@pytest.mark.parametrize("part", ["ref", "record", "cubin"])
@pytest.mark.parametrize("damage", ["cut", "gone", "folder"])
def test_a_scan_tells_damage_that_it_can_see(store: Store, part: str, damage: str) -> None:
    """Bug: an entry whose part is missing or cut short is listed as if it could be loaded."""
    artifact = make_artifact()
    store.publish(artifact)
    record = Blob.of(artifact.record.encode()).digest
    path = {
        "ref": ref(store, artifact.digest),
        "record": store.root / "v1/blobs/sha256" / record[:2] / record,
        "cubin": store.cubin_path(artifact.record),
    }[part]
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "folder":
        path.mkdir()
    entries = scan(store).entries
    if (part, damage) == ("ref", "gone"):
        assert entries == ()
        return
    (entry,) = entries
    assert entry.reason is MissReason.DAMAGED
    assert entry.detail == store.get(artifact.digest).detail  # type: ignore[union-attr]


def test_a_scan_that_meets_a_prune_tells_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `list` beside a prune cries damage where an entry was removed or replaced."""
    gone, replaced = distinct(1), artifact_for(make_key(), toolchain={"a": "1"})
    newer = artifact_for(make_key(), toolchain={"a": "2"})
    assert newer.digest == replaced.digest
    store.publish(gone)
    store.publish(replaced)
    real = scan_module._read_refs

    def meanwhile(version: Directory) -> object:
        found = real(version)
        store.publish(newer)
        plan = plan_removal(scan_as_before(store), [gone.digest], Clock(NOW), store=store.root)
        execute_prune(plan, store)
        prune(store)
        return found

    def scan_as_before(store: Store) -> Scan:
        monkeypatch.setattr(scan_module, "_read_refs", real)
        return scan(store)

    monkeypatch.setattr(scan_module, "_read_refs", meanwhile)
    (entry,) = scan(store).entries
    assert (entry.digest, entry.record, entry.reason) == (newer.digest, newer.record, None)


# --- Plans ------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_until_the_limit_holds_and_not_further(
    store: Store,
) -> None:
    """Bug: the newest goes first, the limit is missed by one entry, or more goes than must."""
    artifacts = [distinct(number) for number in range(5)]
    order = [3, 0, 4, 1, 2]
    for age, number in enumerate(order):
        store.publish(artifacts[number])
        dated(store, artifacts[number].digest, NOW - (10 - age) * DAY_NS)
    each = weight(store) / 5
    clock = Clock(NOW)
    limit = weight(store)
    assert prune(store, clock, max_bytes=limit) == ()
    assert prune(store, clock, max_bytes=limit - 1) == (artifacts[3].digest,)
    assert weight(store) <= limit - 1
    assert prune(store, clock, max_bytes=int(2.5 * each)) == (
        artifacts[0].digest,
        artifacts[4].digest,
    )
    assert store.digests() == tuple(sorted((artifacts[1].digest, artifacts[2].digest)))
    assert prune(store, clock, max_bytes=0) == (artifacts[1].digest, artifacts[2].digest)
    assert weight(store) == 0


def test_a_build_that_keeps_an_entry_counts_as_use(store: Store) -> None:
    """Bug: the kernels that every deployment asks for go because they were built long ago."""
    old, idle = distinct(1), distinct(2)
    for artifact in (old, idle):
        store.publish(artifact)
        dated(store, artifact.digest, EARLIEST_NS)
    before = ref(store, old.digest).read_bytes()
    store.touch(old.digest)
    assert ref(store, old.digest).read_bytes() == before
    assert prune(store, older_than_s=86_400.0) == (idle.digest,)
    store.touch("0" * 64)
    assert store.digests() == (old.digest,)


def test_entries_that_share_a_blob_keep_it_for_each_other(store: Store) -> None:
    """Bug: removing one entry takes the cubin of another along."""
    one, other = make_artifact(tokens=1), make_artifact(tokens=2)
    assert one.record.cubin == other.record.cubin
    store.publish(one)
    store.publish(other)
    assert prune(store, needed=frozenset([other.digest])) == (one.digest,)
    assert store.get(other.digest) == other
    assert len(blobs(store)) == 2
    assert prune(store, needed=frozenset()) == (other.digest,)
    assert blobs(store) == set()


def test_pinned_entries_stay_whatever_the_rules_say(store: Store) -> None:
    """Bug: what a server needs at its next start is pruned although somebody pinned it."""
    pinned, other = distinct(1), distinct(2)
    for artifact in (pinned, other):
        store.publish(artifact)
        dated(store, artifact.digest, EARLIEST_NS)
    pin(store, [pinned.digest])
    rules = PruneRules(max_bytes=0, older_than_s=0.0, needed=frozenset())
    plan = plan_prune(scan(store), rules, Clock(NOW), store=store.root)
    assert [removal.digest for removal in plan.removals] == [other.digest]
    assert execute_prune(plan, store).removed == (other.digest,)
    assert store.get(pinned.digest) == pinned
    assert plan.after_bytes == plan.over_bytes == weight(store) > 0
    assert "above the limit: pinned entries stay" in str(plan)
    unpin(store, [pinned.digest])
    assert prune(store, Clock(NOW), max_bytes=0) == (pinned.digest,)


def test_a_pin_that_comes_between_plan_and_execution_counts(store: Store) -> None:
    """Bug: the plan is minutes old, and what was pinned since goes all the same."""
    artifact = make_artifact()
    store.publish(artifact)
    plan = plan_prune(scan(store), PruneRules(max_bytes=0), read_clock(store), store=store.root)
    pin(store, [artifact.digest])
    outcome = execute_prune(plan, store)
    assert (outcome.removed, outcome.skipped, outcome.blobs) == ((), (artifact.digest,), ())
    assert store.get(artifact.digest) == artifact


@pytest.mark.parametrize("change", ["touched", "replaced", "shared"])
def test_what_changed_since_the_plan_was_made_is_left_alone(store: Store, change: str) -> None:
    """Bug: an entry that a build just kept or replaced goes, or a blob that it now needs."""
    artifact = artifact_for(make_key(), toolchain={"a": "1"})
    store.publish(artifact)
    dated(store, artifact.digest, NOW - DAY_NS)
    plan = plan_prune(scan(store), PruneRules(max_bytes=0), Clock(NOW), store=store.root)
    wanted = artifact
    if change == "touched":
        store.touch(artifact.digest)
    elif change == "replaced":
        wanted = artifact_for(make_key(), toolchain={"a": "2"})
        store.publish(wanted)
    else:
        wanted = make_artifact(tokens=2)
        assert wanted.record.cubin == artifact.record.cubin
        store.publish(wanted)
    execute_prune(plan, store)
    assert store.get(wanted.digest) == wanted


def test_blobs_that_nothing_needs_go_without_any_rule(store: Store) -> None:
    """Bug: what a killed publisher or a replaced entry left behind stays for good."""
    store.publish(artifact_for(make_key(), toolchain={"a": "1"}))
    kept = artifact_for(make_key(), toolchain={"a": "2"})
    store.publish(kept)
    assert len(blobs(store)) == 3
    assert prune(store) == ()
    assert len(blobs(store)) == 2
    assert store.get(kept.digest) == kept


def test_removing_named_entries_leaves_all_other_files_alone(store: Store) -> None:
    """Bug: `rm` of one entry sweeps what belongs to a publisher that is about to finish."""
    one, other = distinct(1), distinct(2)
    store.publish(one)
    store.publish(other)
    stray = Blob.of(b"a publisher's blob")
    folder = store.root / "v1/blobs/sha256" / stray.digest[:2]
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / stray.digest).write_bytes(b"a publisher's blob")
    found = scan(store)
    plan = plan_removal(found, [one.digest], Clock(NOW), store=store.root)
    execute_prune(plan, store)
    assert store.get(other.digest) == other
    assert stray.digest in blobs(store)
    assert len(blobs(store)) == 3
    assert plan.after_bytes == weight(store)


def test_the_plan_decides_and_touches_nothing(store: Store) -> None:
    """Bug: a dry run removes, or prints something else than what a run would do."""
    for number in range(3):
        store.publish(distinct(number))
    before = files_below(store.root)
    found, clock = scan(store), read_clock(store)
    plan = plan_prune(found, PruneRules(max_bytes=0), clock, store=store.root)
    assert plan == plan_prune(found, PruneRules(max_bytes=0), clock, store=store.root)
    assert files_below(store.root) == before
    outcome = execute_prune(plan, store)
    assert outcome.removed == tuple(removal.digest for removal in plan.removals)
    assert {blob.digest for blob in outcome.blobs} == {blob.digest for blob in plan.blobs}
    assert str(plan).count("\nremove") == 3


def test_an_entry_that_cannot_be_read_stops_a_prune(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a disk error for one record, and the cubin that it names is swept as litter."""
    artifact = make_artifact()
    store.publish(artifact)
    entry = msgspec.structs.replace(
        scan(store).entries[0], record=None, reason=MissReason.UNREADABLE, detail="EIO"
    )
    found = msgspec.structs.replace(scan(store), entries=(entry,))
    with pytest.raises(StoreError, match="cannot tell what the entry"):
        plan_prune(found, PruneRules(), Clock(NOW), store=store.root)
    plan = plan_prune(scan(store), PruneRules(max_bytes=0), read_clock(store), store=store.root)
    monkeypatch.setattr("llbf16_aot.prune.scan_in", lambda version: found)
    assert execute_prune(plan, store).blobs == ()
    monkeypatch.undo()
    assert store.cubin_path(artifact.record).exists()


# --- Clocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used_ns", "now_ns", "removed"),
    [
        (NOW, NOW, False),
        (NOW - 89 * DAY_NS, NOW, False),
        (NOW - 91 * DAY_NS, NOW, True),
        (NOW - YEARS_NS // 10, NOW, True),
        # Published while the clock was ten years ahead: fresh, for as long as nobody dates it.
        (NOW + YEARS_NS, NOW, False),
        # The clock is ten years behind now: what is there is dated in the future.
        (NOW, NOW - YEARS_NS, False),
        (NOW - YEARS_NS - 91 * DAY_NS, NOW - YEARS_NS, False),
    ],
)
def test_ages_survive_clocks_that_are_years_off(
    store: Store, used_ns: int, now_ns: int, removed: bool
) -> None:
    """Bug: a clock that jumps makes every fresh entry old."""
    artifact = make_artifact()
    store.publish(artifact)
    dated(store, artifact.digest, used_ns)
    gone = prune(store, Clock(now_ns), older_than_s=90 * 86_400.0)
    assert gone == ((artifact.digest,) if removed else ())


def test_a_date_in_the_future_makes_nothing_immortal(store: Store) -> None:
    """Bug: an entry of a builder whose clock was ten years ahead survives ten years of pruning."""
    artifact = make_artifact()
    store.publish(artifact)
    clock = read_clock(store)
    dated(store, artifact.digest, clock.now_ns + YEARS_NS)
    assert prune(store, clock, older_than_s=86_400.0) == ()
    assert ref(store, artifact.digest).stat().st_mtime_ns < clock.now_ns + DAY_NS
    later = Clock(clock.now_ns + 2 * DAY_NS)
    assert prune(store, later, older_than_s=86_400.0) == (artifact.digest,)


def test_a_clock_before_the_first_release_dates_nothing(store: Store) -> None:
    """Bug: a machine that boots in 1970 dates every entry so, and the next prune takes them all."""
    artifact = make_artifact()
    store.publish(artifact)
    dated(store, artifact.digest, NOW)
    plan = plan_prune(scan(store), PruneRules(older_than_s=0.0), Clock(10**9), store=store.root)
    assert (plan.removals, plan.misdated, plan.ages_unknown) == ((), (), True)
    assert "clock is wrong" in str(plan)


def test_the_time_is_asked_of_the_file_system(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: ages compare this machine's clock with the dates that a file server gave."""
    store.publish(make_artifact())
    monkeypatch.setattr("time.time", lambda: 1.0)
    monkeypatch.setattr("time.time_ns", lambda: 10**9)
    clock = read_clock(store)
    there = ref(store, store.digests()[0]).stat().st_mtime_ns
    assert 0 <= clock.now_ns - there < 600 * 10**9
    assert os.listdir(store.root / "v1" / "tmp") == []


# --- Locks ------------------------------------------------------------------------------------


def test_without_a_lock_nothing_is_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: on a file system without locks prune takes blobs that a publisher counts on."""
    artifact = make_artifact()
    store.publish(artifact)
    plan = plan_prune(scan(store), PruneRules(max_bytes=0), read_clock(store), store=store.root)

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        with pytest.raises(StoreUnwritableError, match="cannot lock the store"):
            execute_prune(plan, store)
    assert store.get(artifact.digest) == artifact


def test_a_publisher_keeps_prune_out_from_its_first_blob_to_its_ref(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: prune takes a blob between its publication and that of the ref: a dangling ref."""
    store.publish(distinct(1))
    plan = plan_prune(scan(store), PruneRules(max_bytes=0), read_clock(store), store=store.root)
    real = Directory.put
    refused: list[str] = []

    def put(self: Directory, name: str, data: bytes, *, temporary: Directory) -> None:
        with pytest.raises(LockTimeoutError):
            execute_prune(plan, store, timeout_s=0)
        refused.append(name)
        real(self, name, data, temporary=temporary)

    monkeypatch.setattr(Directory, "put", put)
    store.publish(distinct(2))
    assert len(refused) == 3
    monkeypatch.undo()
    assert execute_prune(plan, store).removed == (distinct(1).digest,)
    assert store.get(distinct(2).digest) == distinct(2)


def test_a_reader_that_meets_a_prune_finds_the_entry_or_a_clean_miss(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: between ref and blob the entry goes, and a server logs damage and tells to build."""
    artifact, other = artifact_for(make_key(), toolchain={"a": "1"}), distinct(2)
    newer = artifact_for(make_key(), toolchain={"a": "2"})
    store.publish(artifact)
    store.publish(other)
    real = Directory.read
    steps = [
        lambda: store.publish(newer),
        lambda: prune(store),
        lambda: None,
    ]

    def read(
        self: Directory, name: str, *, limit_bytes: int, size_bytes: int | None = None
    ) -> bytes:
        data = real(self, name, limit_bytes=limit_bytes, size_bytes=size_bytes)
        monkeypatch.setattr(Directory, "read", real)
        for step in steps:
            step()
        return data

    monkeypatch.setattr(Directory, "read", read)
    assert store.get(artifact.digest) == newer
    steps[2] = lambda: prune(store, needed=frozenset([other.digest]))
    monkeypatch.setattr(Directory, "read", read)
    found = store.get(artifact.digest)
    assert isinstance(found, Miss)
    assert found.reason is MissReason.ABSENT


# --- Pins -------------------------------------------------------------------------------------


def test_pins_are_kept_until_they_are_taken_away(store: Store) -> None:
    """Bug: a pin is lost with the entry, or one that is taken away still counts."""
    assert pins(store) == frozenset()
    pin(store, ["0" * 64, "f" * 64])
    pin(store, ["0" * 64])
    assert pins(store) == {"0" * 64, "f" * 64}
    assert (store.root / "v1" / "pins" / "00" / ("0" * 64)).read_bytes() == b""
    unpin(store, ["0" * 64, "1" * 64])
    assert pins(store) == {"f" * 64}
    with pytest.raises(ValueError, match="no digest"):
        pin(store, ["../../etc"])


def test_pins_that_cannot_be_read_stop_a_prune(store: Store) -> None:
    """Bug: the list of pins is damaged, and so everything that was pinned goes."""
    store.publish(make_artifact())
    pin(store, ["0" * 64])
    (store.root / "v1" / "pins" / "00" / ("0" * 64)).unlink()
    (store.root / "v1" / "pins" / "00").rmdir()
    (store.root / "v1" / "pins" / "00").write_text("")
    with pytest.raises(StoreError, match="pins/00"):
        scan(store)
    assert len(store.digests()) == 1


# --- Repair -----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["ref", "record", "cubin"])
def test_repair_removes_what_is_damaged_and_the_next_publish_heals(store: Store, part: str) -> None:
    """Bug: damaged entries stay for good, or sound ones go with them."""
    bad, sound = distinct(1), distinct(2)
    for artifact in (bad, sound):
        store.publish(artifact)
    record = Blob.of(bad.record.encode()).digest
    path = {
        "ref": ref(store, bad.digest),
        "record": store.root / "v1/blobs/sha256" / record[:2] / record,
        "cubin": store.cubin_path(bad.record),
    }[part]
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))
    done = repair(store)
    assert [miss.digest for miss in done.entries] == [bad.digest]
    assert [Path(name).name for name in done.blobs] == ([] if part == "ref" else [path.name])
    assert done.left == ()
    miss = store.get(bad.digest)
    assert isinstance(miss, Miss)
    assert miss.reason is MissReason.ABSENT
    assert store.get(sound.digest) == sound
    assert repair(store) == type(done)((), (), ())
    store.publish(bad)
    assert store.get(bad.digest) == bad


def test_repair_of_named_entries_leaves_the_others(store: Store) -> None:
    """Bug: `verify KEY --repair` removes what nobody named."""
    bad = [distinct(1), distinct(2)]
    for artifact in bad:
        store.publish(artifact)
        ref(store, artifact.digest).unlink()
        ref(store, artifact.digest).write_text("damaged")
    assert [miss.digest for miss in repair(store, [bad[0].digest]).entries] == [bad[0].digest]
    assert store.digests() == (bad[1].digest,)


def test_repair_takes_odd_files_and_says_what_it_cannot_take(store: Store) -> None:
    """Bug: a FIFO in place of a blob stays, or somebody's files in a folder are deleted."""
    artifacts = [distinct(number) for number in range(2)]
    for artifact, kind in zip(artifacts, ("fifo", "full"), strict=True):
        store.publish(artifact)
        path = store.cubin_path(artifact.record)
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
            (path / "precious").write_text("data")
    done = repair(store)
    assert {miss.digest for miss in done.entries} == {a.digest for a in artifacts}
    assert [Path(name).name for name in done.blobs] == [artifacts[0].record.cubin.digest]
    assert [miss.digest for miss in done.left] == [artifacts[1].record.cubin.digest]
    assert (store.cubin_path(artifacts[1].record) / "precious").read_text() == "data"


def test_repair_leaves_what_cannot_be_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a network file system has a bad moment, and a sound store is emptied."""
    artifact = make_artifact()
    store.publish(artifact)
    unreadable = Miss(artifact.digest, MissReason.UNREADABLE, "EIO")
    monkeypatch.setattr(Store, "get", lambda self, digest: unreadable)
    done = repair(store)
    assert (done.entries, done.left) == ((), (unreadable,))
    monkeypatch.undo()
    assert store.get(artifact.digest) == artifact


# --- Properties of plans ----------------------------------------------------------------------


@st.composite
def scans(draw: st.DrawFn) -> Scan:
    """Stores of up to eight entries that share blobs at random, with litter."""
    names = [f"{number:x}" * 64 for number in range(8)]
    sizes = {name: draw(st.integers(1, 50)) for name in names}
    entries = []
    for number in range(draw(st.integers(0, 8))):
        base = make_artifact().record
        cubin = draw(st.sampled_from(names[:4]))
        record = draw(st.sampled_from(names[4:]))
        entries.append(
            Entry(
                f"{number:064x}",
                b"x" * draw(st.integers(1, 9)),
                draw(st.integers(NOW - 5 * DAY_NS, NOW + 5 * DAY_NS)),
                pinned=draw(st.booleans()),
                record_blob=Blob(record, sizes[record]),
                record=msgspec.structs.replace(base, cubin=Blob(cubin, sizes[cubin])),
            )
        )
    pinned = frozenset(entry.digest for entry in entries if entry.pinned)
    return Scan(tuple(entries), sizes, pinned)


def remaining_bytes(found: Scan, gone: set[str]) -> int:
    """What the entries that stay weigh, each blob once, without the plan's own book-keeping."""
    kept = [entry for entry in found.entries if entry.digest not in gone]
    needed = {blob.digest for entry in kept for blob in entry.blobs}
    return sum(len(e.line) for e in kept) + sum(found.blobs[name] for name in needed)


@settings(max_examples=300, deadline=None)
@given(
    found=scans(),
    limit=st.none() | st.integers(0, 400),
    age=st.none() | st.integers(0, 5),
    needed=st.none() | st.sets(st.integers(0, 8)),
)
def test_every_plan_removes_exactly_what_the_rules_say(
    found: Scan, limit: int | None, age: int | None, needed: set[int] | None
) -> None:
    """Bug: shared blobs counted twice, a pin overlooked, an order that depends on chance."""
    rules = PruneRules(
        max_bytes=limit,
        older_than_s=None if age is None else age * 86_400.0,
        needed=None if needed is None else frozenset(f"{n:064x}" for n in needed),
    )
    plan = plan_prune(found, rules, Clock(NOW), store=Path("/s"))
    gone = {removal.digest for removal in plan.removals}
    free = [e for e in found.entries if not e.pinned]
    must = {
        e.digest
        for e in free
        if (rules.needed is not None and e.digest not in rules.needed)
        or (age is not None and NOW - min(e.used_ns, NOW) > age * DAY_NS)
    }
    expected = set(must)
    for entry in sorted(free, key=lambda e: (min(e.used_ns, NOW), e.digest)):
        if limit is None or remaining_bytes(found, expected) <= limit:
            break
        expected.add(entry.digest)
    assert gone == expected
    assert plan.after_bytes == remaining_bytes(found, gone)
    kept = [e for e in found.entries if e.digest not in gone]
    needed_blobs = {blob.digest for e in kept for blob in e.blobs}
    assert {blob.digest for blob in plan.blobs} == set(found.blobs) - needed_blobs
    assert set(plan.misdated) == {e.digest for e in kept if e.used_ns > NOW}


def test_a_ref_that_could_not_be_read_once_keeps_its_date(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: after a short trouble with the disk a fresh entry counts as the oldest of all."""
    artifact = distinct(1)
    store.publish(artifact)
    real = Directory.read_dated
    troubles = [OSError(errno.EIO, os.strerror(errno.EIO))]

    def read(self: Directory, *arguments: object, **named: object) -> object:
        if troubles:
            raise troubles.pop()
        return real(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Directory, "read_dated", read)
    (entry,) = scan(store).entries
    assert not troubles
    assert entry.reason is None
    assert entry.record == artifact.record
    assert entry.used_ns == ref(store, artifact.digest).stat().st_mtime_ns
    assert entry.line == ref(store, artifact.digest).read_bytes()
