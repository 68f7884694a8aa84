"""G2: a store against a model of it, in sequences of steps that hypothesis makes up."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.tally import Tally
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from llbf16_aot import prune as prune_module
from llbf16_aot import scan as scan_module
from llbf16_aot.artifact import Artifact, Blob
from llbf16_aot.pins import pin, pins, unpin
from llbf16_aot.prune import (
    EARLIEST_NS,
    Clock,
    PruneRules,
    execute_prune,
    plan_prune,
    plan_removal,
)
from llbf16_aot.repair import repair
from llbf16_aot.scan import Entry, scan
from llbf16_aot.store import Miss, MissReason, Store
from support import artifact_for, files_below, fixture_cubin, make_key

KEYS = 6
DAY_NS = 86_400 * 10**9


def _variant(key: int, version: int) -> Artifact:
    """One of two artifacts of a key; every two keys share their cubins."""
    cubin = fixture_cubin("ptxas_sm_90a") + bytes([key // 2, version]) * 40
    toolchain = {"nvidia-cutlass-dsl": f"4.8.{version}"}
    return artifact_for(make_key(tokens=key + 1), cubin=cubin, toolchain=toolchain)


VARIANTS = {(key, version): _variant(key, version) for key in range(KEYS) for version in range(2)}
DIGESTS = [VARIANTS[key, 0].digest for key in range(KEYS)]
KEY = st.integers(0, KEYS - 1)


class StoreMachine(RuleBasedStateMachine):
    """Publishes, reads, pins, removes, prunes, damages and repairs; compares after every step."""

    folder: Path

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(dir=self.folder))
        self.store = Store(self.root / "store")
        self.entries: dict[int, Artifact] = {}
        self.used_ns: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.damaged: set[int] = set()
        self.now_ns = EARLIEST_NS + 100 * DAY_NS

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)

    # --- Steps --------------------------------------------------------------------------------

    @rule(key=KEY, version=st.integers(0, 1), skew_days=st.sampled_from([0, 0, 0, -3650, 3650]))
    def publish(self, key: int, version: int, skew_days: int) -> None:
        artifact = VARIANTS[key, version]
        self.store.publish(artifact)
        self.entries[key] = artifact
        # The new ref is sound, and so are the blobs that it names, for all who share them.
        self.damaged = {k for k in self.damaged if k != key and self._still_damaged(k)}
        self._date(key, self.now_ns + skew_days * DAY_NS)

    @rule(key=KEY)
    def keep(self, key: int) -> None:
        self.store.touch(DIGESTS[key])
        if key in self.entries:
            self._date(key, self.now_ns)

    @rule(days=st.integers(1, 9))
    def wait(self, days: int) -> None:
        self.now_ns += days * DAY_NS

    @rule(key=KEY)
    def pin(self, key: int) -> None:
        pin(self.store, [DIGESTS[key]])
        self.pinned.add(key)

    @rule(key=KEY)
    def unpin(self, key: int) -> None:
        unpin(self.store, [DIGESTS[key]])
        self.pinned.discard(key)

    @rule(key=KEY)
    def remove(self, key: int) -> None:
        plan = plan_removal(
            scan(self.store), [DIGESTS[key]], Clock(self.now_ns), store=self.store.root
        )
        execute_prune(plan, self.store)
        if key not in self.pinned:
            self._forget(key)

    @rule(
        limit=st.none() | st.integers(0, 60_000),
        days=st.none() | st.integers(0, 12),
        needed=st.none() | st.sets(KEY),
    )
    def prune(self, limit: int | None, days: int | None, needed: set[int] | None) -> None:
        self._repair()
        rules = PruneRules(
            max_bytes=limit,
            older_than_s=None if days is None else days * 86_400.0,
            needed=None if needed is None else frozenset(DIGESTS[key] for key in needed),
        )
        clock = Clock(self.now_ns)
        plan = plan_prune(scan(self.store), rules, clock, store=self.store.root)
        outcome = execute_prune(plan, self.store)
        expected = self._expected(limit, days, needed)
        assert {DIGESTS.index(digest) for digest in outcome.removed} == expected
        for key in expected:
            self._forget(key)
        for key, used_ns in self.used_ns.items():
            if used_ns > self.now_ns:
                # It was dated now, by the real clock: bring it to the model's.
                assert self._ref(key).stat().st_mtime_ns != used_ns
                self._date(key, self.now_ns)
        weight = self._weight()
        assert weight == plan.after_bytes == self._needed_bytes(set())
        free = set(self.entries) - self.pinned
        assert limit is None or weight <= limit or not free, "above the limit for no pin"

    @rule(key=KEY, part=st.sampled_from(["ref", "record", "cubin"]))
    def damage(self, key: int, part: str) -> None:
        if key not in self.entries or key in self.damaged:
            return
        artifact = self.entries[key]
        path = {
            "ref": self._ref(key),
            "record": self._blob(Blob.of(artifact.record.encode()).digest),
            "cubin": self._blob(artifact.record.cubin.digest),
        }[part]
        path.chmod(0o644)
        path.write_bytes(b"x" * path.stat().st_size)
        path.chmod(0o444)
        # Everybody who shares what was damaged is damaged, too.
        for other, entry in self.entries.items():
            if other == key or (part == "cubin" and entry.record.cubin == artifact.record.cubin):
                self.damaged.add(other)
        if part == "ref":
            self._date(key, self.used_ns[key])

    @rule()
    def repair(self) -> None:
        self._repair()

    # --- Promises -----------------------------------------------------------------------------

    @invariant()
    def every_key_is_what_the_model_says(self) -> None:
        for key in range(KEYS):
            found = self.store.get(DIGESTS[key])
            if key not in self.entries:
                assert isinstance(found, Miss), key
                assert found.reason is MissReason.ABSENT, found
            elif key in self.damaged:
                assert isinstance(found, Miss), key
                assert found.reason is MissReason.DAMAGED, found
            else:
                assert found == self.entries[key]

    @invariant()
    def listing_and_pins_are_what_the_model_says(self) -> None:
        assert self.store.digests() == tuple(sorted(DIGESTS[key] for key in self.entries))
        assert pins(self.store) == {DIGESTS[key] for key in self.pinned}

    @invariant()
    def nothing_is_left_behind(self) -> None:
        for folder in ("tmp", "locks"):
            path = self.store.root / "v1" / folder
            left = sorted(os.listdir(path)) if path.exists() else []
            assert left in ([], ["gate.lock", "store.lock"])

    # --- The model ----------------------------------------------------------------------------

    def _repair(self) -> None:
        done = repair(self.store)
        assert {DIGESTS.index(miss.digest) for miss in done.entries} == self.damaged
        assert done.left == ()
        for key in tuple(self.damaged):
            self._forget(key)

    def _expected(self, limit: int | None, days: int | None, needed: set[int] | None) -> set[int]:
        free = [key for key in self.entries if key not in self.pinned]
        gone = {
            key
            for key in free
            if (needed is not None and key not in needed)
            or (days is not None and self.now_ns - self._used(key) > days * DAY_NS)
        }
        for key in sorted(free, key=lambda key: (self._used(key), DIGESTS[key])):
            if limit is None or self._needed_bytes(gone) <= limit:
                break
            gone.add(key)
        return gone

    def _used(self, key: int) -> int:
        return min(self.used_ns[key], self.now_ns)

    def _needed_bytes(self, gone: set[int]) -> int:
        """What is left of the store without these keys: refs, and each blob once."""
        blobs: dict[str, int] = {}
        total = 0
        for key in set(self.entries) - gone:
            record = self.entries[key].record
            named = Blob.of(record.encode())
            blobs[named.digest] = named.size_bytes
            blobs[record.cubin.digest] = record.cubin.size_bytes
            total += len(f"sha256:{named.digest} {named.size_bytes}\n")
        return total + sum(blobs.values())

    def _weight(self) -> int:
        return sum(
            len(data)
            for name, data in files_below(self.store.root).items()
            if name.startswith(("v1/refs/", "v1/blobs/"))
        )

    def _still_damaged(self, key: int) -> bool:
        """Whether a file of the entry is not what it was, told without the store's own code."""
        record = self.entries[key].record
        named = Blob.of(record.encode())
        wanted = {
            self._ref(key): f"sha256:{named.digest} {named.size_bytes}\n".encode(),
            self._blob(named.digest): record.encode(),
            self._blob(record.cubin.digest): self.entries[key].cubin,
        }
        return any(not p.exists() or p.read_bytes() != data for p, data in wanted.items())

    def _forget(self, key: int) -> None:
        self.entries.pop(key, None)
        self.used_ns.pop(key, None)
        self.damaged.discard(key)

    def _date(self, key: int, time_ns: int) -> None:
        os.utime(self._ref(key), ns=(time_ns, time_ns))
        self.used_ns[key] = time_ns

    def _ref(self, key: int) -> Path:
        return self.store.root / "v1" / "refs" / DIGESTS[key][:2] / DIGESTS[key]

    def _blob(self, digest: str) -> Path:
        return self.store.root / "v1" / "blobs" / "sha256" / digest[:2] / digest


def run_machine(tally: Tally, folder: Path, examples: int, *, shrink: bool) -> None:
    """Run the machine; what it finds is a wrong answer, made small if that is worth the time."""

    class Counted(StoreMachine):
        @initialize()
        def begin(self) -> None:
            tally.tried += 1
            self.folder = folder
            super().begin()

    try:
        run_state_machine_as_test(
            Counted,
            settings=settings(
                max_examples=examples,
                stateful_step_count=25,
                deadline=None,
                database=None,
                phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
                derandomize=not shrink,
                suppress_health_check=list(HealthCheck),
            ),
        )
    except AssertionError as error:
        tally.wrong.append(str(error))


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk's speed is not what these tests are about."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.fault("G2")
def test_a_store_does_what_its_model_does(
    tally: Tally, fast_folder: Path, pick: Callable[[int, int], int]
) -> None:
    """Bug: an order of publish, pin, rm, damage and prune that loses an entry or keeps one."""
    examples = pick(60, 2000)
    run_machine(tally, fast_folder, examples, shrink=True)
    tally.clean(at_least=examples)


def _order_by_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Clock, "used_ns", lambda self, entry: 0)


def _no_pins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scan_module, "pins_in", lambda version: frozenset())


def _one_more(patch: pytest.MonkeyPatch) -> None:
    real = prune_module._Ledger.size_bytes.fget  # type: ignore[attr-defined]
    patch.setattr(prune_module._Ledger, "size_bytes", property(lambda self: real(self) + 1))


def _forgets_shared_blobs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        prune_module,
        "_digests",
        lambda entry: {blob.digest for blob in Entry.blobs.fget(entry)[:1]},  # type: ignore[attr-defined]
    )


@pytest.mark.fault("G2", control=True)
@pytest.mark.parametrize("bug", [_order_by_name, _no_pins, _one_more, _forgets_shared_blobs])
def test_the_machine_finds_a_planted_bug(
    tally: Tally,
    fast_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Control: with the rule broken the same steps must find a wrong answer."""
    bug(monkeypatch)
    run_machine(tally, fast_folder, 200, shrink=False)
    tally.found()
