"""Pruning: a plan says what goes and why, and doing it takes nothing that is not in the plan.

Entries go in the order of their last use: the moment of their publication, or of the last build
that kept them. Loading writes nothing and so counts for nothing: pin what servers need.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import msgspec

from .artifact import Blob
from .errors import StoreError
from .files import Directory, command, shown
from .scan import Entry, Scan, scan_in
from .store import LOCK_WAIT_S, Store
from .text import counted, duration, short, size, table

__all__ = [
    "EARLIEST_NS",
    "Clock",
    "PruneOutcome",
    "PrunePlan",
    "PruneRules",
    "Removal",
    "execute_prune",
    "plan_prune",
    "plan_removal",
    "read_clock",
]

EARLIEST_NS = 1_767_225_600_000_000_000
"""The start of 2026, before which nothing was ever published: a clock that says so is wrong."""


class PruneRules(msgspec.Struct, frozen=True, kw_only=True):
    """What may stay; every rule that is given takes entries away. No rule takes a pinned one.

    `max_bytes` bounds refs and blobs together, `older_than_s` is an age in seconds, `needed` holds
    the digests that somebody still asks for.
    """

    max_bytes: int | None = None
    older_than_s: float | None = None
    needed: frozenset[str] | None = None


class Clock(msgspec.Struct, frozen=True):
    """The time of the file system, in nanoseconds: its own clock dates the entries."""

    now_ns: int

    @property
    def trusted(self) -> bool:
        """Whether ages can be told by it: not if it is so far behind that nothing could exist."""
        return self.now_ns >= EARLIEST_NS

    def used_ns(self, entry: Entry) -> int:
        """When an entry was used last; dated in the future it counts as used now."""
        return min(entry.used_ns, self.now_ns)


class Removal(msgspec.Struct, frozen=True):
    """An entry that goes: `reason` says by which rule, `name` what it is."""

    digest: str
    line: bytes
    used_ns: int
    age_s: float
    reason: str
    name: str


class PrunePlan(msgspec.Struct, frozen=True):
    """What a pruning will do. Printing it is the dry run.

    `blobs` are those that no remaining entry names; `misdated` the remaining entries that are dated
    in the future, which get the present time, so that they age like all others.
    """

    store: Path
    removals: tuple[Removal, ...]
    blobs: tuple[Blob, ...]
    misdated: tuple[str, ...]
    kept: int
    pinned: int
    before_bytes: int
    after_bytes: int
    max_bytes: int | None = None
    ages_unknown: bool = False
    """The clock is so wrong that no age is known: the rule about age takes nothing."""

    @property
    def over_bytes(self) -> int:
        """By how much pinned entries keep the store above its limit."""
        return 0 if self.max_bytes is None else max(0, self.after_bytes - self.max_bytes)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.removals and not self.blobs and not self.misdated

    def to_data(self) -> dict[str, object]:
        """The plan as plain values, ready for JSON."""
        return {
            "store": str(self.store),
            "remove": tuple(
                {
                    "digest": removal.digest,
                    "age_s": round(removal.age_s, 3),
                    "reason": removal.reason,
                    "name": removal.name,
                }
                for removal in self.removals
            ),
            "blobs": msgspec.to_builtins(self.blobs),
            "misdated": self.misdated,
            "kept": self.kept,
            "pinned": self.pinned,
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
            "max_bytes": self.max_bytes,
            "over_bytes": self.over_bytes,
            "ages_unknown": self.ages_unknown,
        }

    def __str__(self) -> str:
        rows = (
            ("remove", short(r.digest), duration(r.age_s), r.reason, r.name) for r in self.removals
        )
        header = ("action", "artifact", "used before", "why", "kernel")
        listed = f"{table(header, rows)}\n\n" if self.removals else ""
        return f"{listed}{self.summary}"

    @property
    def summary(self) -> str:
        """How many entries go and stay, and what that is in bytes."""
        text = (
            f"{counted(len(self.removals), 'entry')} to remove, {self.kept} to keep"
            f"{f' ({self.pinned} pinned)' if self.pinned else ''}; "
            f"{counted(len(self.blobs), 'file')} of {size(sum(b.size_bytes for b in self.blobs))} "
            f"that nothing needs then\n"
            f"{size(self.before_bytes)} now, {size(self.after_bytes)} after"
        )
        if self.misdated:
            text += f"\n{counted(len(self.misdated), 'entry')} dated in the future, to date now"
        if self.ages_unknown:
            text += "\nthe file system's clock is wrong: nothing counts as old"
        if self.over_bytes:
            text += f"\n{size(self.over_bytes)} above the limit: pinned entries stay"
        return text


class PruneOutcome(msgspec.Struct, frozen=True):
    """What a pruning did: less than its plan where an entry changed after it was made."""

    removed: tuple[str, ...]
    skipped: tuple[str, ...]
    blobs: tuple[Blob, ...]

    def __str__(self) -> str:
        freed = size(sum(blob.size_bytes for blob in self.blobs))
        text = f"removed {counted(len(self.removed), 'entry')}, freed {freed}"
        if self.skipped:
            text += f"; {counted(len(self.skipped), 'entry')} changed meanwhile, left alone"
        return text


def read_clock(store: Store) -> Clock:
    """What the clock of the store's file system says; raises StoreError where it cannot be asked.

    Makes a file for a moment, because that is how a file system tells the time.
    """
    try:
        with store.reading() as version:
            if version is not None:
                with version.enter("tmp") as temporary:
                    return Clock(temporary.now_ns())
    except StoreError as error:
        raise StoreError(
            f"the file system of {shown(store.root)} does not tell the time: {error.message}",
            hint="a store that cannot be written cannot be pruned either",
        ) from error
    return Clock(0)


def plan_prune(found: Scan, rules: PruneRules, clock: Clock, *, store: Path) -> PrunePlan:
    """Decide what to remove so that every rule holds; touches nothing.

    First go the entries that are too old or not needed, then, one by one, those that were used
    longest ago, until refs and blobs have at most `max_bytes`: no entry more than that takes. A
    blob stays as long as one remaining entry names it. Raises StoreError where an entry cannot be
    read, because nobody knows what it needs.
    """
    _check_readable(found, store)
    reasons: dict[str, str] = {}
    oldest_first = sorted(found.entries, key=lambda e: (clock.used_ns(e), e.digest))
    for entry in oldest_first:
        reason = "" if entry.pinned else _reason(entry, rules, clock)
        if reason:
            reasons[entry.digest] = reason
    ledger = _Ledger(found, (e for e in found.entries if e.digest not in reasons))
    if rules.max_bytes is not None:
        for entry in oldest_first:
            if ledger.size_bytes <= rules.max_bytes:
                break
            if not entry.pinned and entry.digest not in reasons:
                reasons[entry.digest] = f"above {size(rules.max_bytes)}"
                ledger.drop(entry)
    return _plan(found, reasons, clock, ledger, store=store, max_bytes=rules.max_bytes)


def plan_removal(found: Scan, digests: Collection[str], clock: Clock, *, store: Path) -> PrunePlan:
    """The plan that removes these entries and the blobs that only they name, and nothing else."""
    gone = dict.fromkeys(digests, "asked for")
    removed = [entry for entry in found.entries if entry.digest in gone]
    # Where an entry cannot be read nobody knows what it needs: all blobs stay.
    only = set() if found.unreadable else {b.digest for entry in removed for b in entry.blobs}
    ledger = _Ledger(found, (e for e in found.entries if e.digest not in gone), only)
    plan = _plan(found, gone, clock, ledger, store=store, max_bytes=None)
    return msgspec.structs.replace(plan, misdated=(), ages_unknown=False)


def execute_prune(plan: PrunePlan, store: Store, *, timeout_s: float = LOCK_WAIT_S) -> PruneOutcome:
    """Do what the plan says, alone in the store; what changed since the plan was made is left.

    Refs go first and durably, then the blobs that no ref names, so that at every moment a reader
    finds an entry or none, and a power loss leaves at worst a blob too many. Raises StoreError,
    LockTimeoutError if builders keep the store busy for longer, UntrustedStoreError.
    """
    if plan.empty:
        return PruneOutcome((), (), ())
    with store.changing(exclusive=True, timeout_s=timeout_s) as (_, version):
        present = scan_in(version)
        planned = {removal.digest: (removal.line, removal.used_ns) for removal in plan.removals}
        same = {
            entry.digest
            for entry in present.entries
            if planned.get(entry.digest) == (entry.line, entry.used_ns) and not entry.pinned
        }
        _unlink(version, ("refs",), same)
        for digest in plan.misdated:
            if digest not in same:
                with (
                    suppress(FileNotFoundError),
                    version.enter("refs") as refs,
                    refs.enter(digest[:2]) as shard,
                ):
                    shard.touch(digest)
        only = set() if present.unreadable else {blob.digest for blob in plan.blobs}
        blobs = _Ledger(
            present, (e for e in present.entries if e.digest not in same), only
        ).unneeded
        _unlink(version, ("blobs", "sha256"), {blob.digest for blob in blobs})
        there = {entry.digest for entry in present.entries}
    return PruneOutcome(
        removed=tuple(digest for digest in planned if digest in same),
        skipped=tuple(d for d in planned if d in there and d not in same),
        blobs=blobs,
    )


class _Ledger:
    """Which blobs the remaining entries need, and what remains weighs.

    `only` are the blobs that may go where nothing needs them; by default any.
    """

    def __init__(
        self, found: Scan, kept: Iterable[Entry], only: Collection[str] | None = None
    ) -> None:
        self._sizes = found.blobs
        self._users: dict[str, int] = {}
        self._only = only
        self._needed_bytes = 0
        for entry in kept:
            self._needed_bytes += len(entry.line)
            for digest in _digests(entry):
                users = self._users.get(digest, 0)
                self._users[digest] = users + 1
                if not users:
                    self._needed_bytes += self._sizes.get(digest, 0)

    def drop(self, entry: Entry) -> None:
        """Do without an entry."""
        self._needed_bytes -= len(entry.line)
        for digest in _digests(entry):
            self._users[digest] -= 1
            if not self._users[digest]:
                self._needed_bytes -= self._sizes.get(digest, 0)

    @property
    def size_bytes(self) -> int:
        """Bytes of the refs and blobs that remain."""
        spared = 0
        if self._only is not None:
            spared = sum(
                size_bytes
                for digest, size_bytes in self._sizes.items()
                if not self._users.get(digest) and digest not in self._only
            )
        return self._needed_bytes + spared

    @property
    def unneeded(self) -> tuple[Blob, ...]:
        """The blobs that go, by digest."""
        return tuple(
            Blob(digest, size_bytes)
            for digest, size_bytes in sorted(self._sizes.items())
            if not self._users.get(digest) and (self._only is None or digest in self._only)
        )


def _digests(entry: Entry) -> set[str]:
    return {blob.digest for blob in entry.blobs}


def _reason(entry: Entry, rules: PruneRules, clock: Clock) -> str:
    if rules.needed is not None and entry.digest not in rules.needed:
        return "not needed"
    if rules.older_than_s is not None and clock.trusted:
        age_s = (clock.now_ns - clock.used_ns(entry)) / 1e9
        if age_s > rules.older_than_s:
            return f"older than {duration(rules.older_than_s)}"
    return ""


def _plan(
    found: Scan,
    reasons: dict[str, str],
    clock: Clock,
    ledger: _Ledger,
    *,
    store: Path,
    max_bytes: int | None,
) -> PrunePlan:
    removals = [
        Removal(
            digest=entry.digest,
            line=entry.line,
            used_ns=entry.used_ns,
            age_s=(clock.now_ns - clock.used_ns(entry)) / 1e9,
            reason=reasons[entry.digest],
            name=str(entry.record.key) if entry.record is not None else "unusable",
        )
        for entry in sorted(found.entries, key=lambda e: (clock.used_ns(e), e.digest))
        if entry.digest in reasons
    ]
    kept = [entry for entry in found.entries if entry.digest not in reasons]
    return PrunePlan(
        store=store,
        removals=tuple(removals),
        blobs=ledger.unneeded,
        # A clock that is wrong itself must date nothing.
        misdated=tuple(e.digest for e in kept if clock.trusted and e.used_ns > clock.now_ns),
        kept=len(kept),
        pinned=sum(entry.pinned for entry in kept),
        before_bytes=found.size_bytes,
        after_bytes=ledger.size_bytes,
        max_bytes=max_bytes,
        ages_unknown=bool(found.entries) and not clock.trusted,
    )


def _check_readable(found: Scan, store: Path) -> None:
    for entry in found.unreadable:
        raise StoreError(
            f"cannot tell what the entry {entry.digest} needs: {entry.detail}",
            hint=f"mend it or remove it: {command('llbf16-aot', 'rm', entry.digest)} "
            f"{command('--store', str(store))}",
        )


def _unlink(version: Directory, folders: tuple[str, ...], digests: set[str]) -> None:
    """Take files away, shard by shard, each shard durably."""
    if not digests:
        return
    folder, *inner = folders
    with version.enter(folder) as opened:
        if inner:
            _unlink(opened, tuple(inner), digests)
            return
        for name, members in groupby(sorted(digests), key=lambda digest: digest[:2]):
            with opened.enter(name) as shard:
                for digest in members:
                    shard.unlink(digest)
                shard.sync()
