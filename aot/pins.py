"""Pins: entries that no pruning takes, whatever its rules; a pin may come before its entry."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from .files import Directory
from .key import DIGEST_PATTERN
from .layout import is_digest_in, shard_names
from .store import LOCK_WAIT_S, Store

__all__ = ["pin", "pins", "pins_in", "unpin"]

_FOLDER = "pins"


def pins(store: Store) -> frozenset[str]:
    """The digests that are pinned; raises StoreError where they cannot be read."""
    with store.reading() as version:
        return frozenset() if version is None else pins_in(version)


def pins_in(version: Directory) -> frozenset[str]:
    """The digests that are pinned in a store's open folder.

    Raises OSError for any trouble but absence: who prunes must know every pin.
    """
    found: set[str] = set()
    with suppress(FileNotFoundError), version.enter(_FOLDER) as folder:
        for name in shard_names(folder):
            with folder.enter(name) as shard:
                found.update(digest for digest in shard.names() if is_digest_in(digest, name))
    return frozenset(found)


def pin(store: Store, digests: Iterable[str]) -> None:
    """Pin these digests, durably; those that are pinned already stay so.

    Raises the StoreError of `Store.publish`; then some may be pinned and others not.
    """
    with (
        # As a publisher, so that nobody prunes by a list of pins that is about to change.
        store.changing(exclusive=False, timeout_s=LOCK_WAIT_S) as (_, version),
        version.make("tmp") as temporary,
        version.make(_FOLDER) as folder,
    ):
        for digest in _checked(digests):
            with folder.make(digest[:2]) as shard:
                if not shard.has(digest):
                    shard.put(digest, b"", temporary=temporary)


def unpin(store: Store, digests: Iterable[str]) -> None:
    """Take the pins of these digests away, durably; those that have none are no trouble."""
    with (
        store.changing(exclusive=False, timeout_s=LOCK_WAIT_S) as (_, version),
        version.make(_FOLDER) as folder,
    ):
        for digest in _checked(digests):
            with suppress(FileNotFoundError), folder.enter(digest[:2]) as shard:
                if shard.unlink(digest):
                    shard.sync()


def _checked(digests: Iterable[str]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(digests))
    for digest in found:
        if not DIGEST_PATTERN.fullmatch(digest):
            raise ValueError(f"{digest!r} is no digest")
    return found
