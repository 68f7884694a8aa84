"""Repair: damaged parts of a store go, so that the next build makes them anew.

Only what was read and found wrong is removed. What the system refuses to read stays: it may be
sound, and a build replaces it all the same.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import msgspec

from .artifact import Artifact, Blob
from .errors import DamagedEntryError
from .files import Directory, shown
from .layout import read_blob
from .scan import Scan, scan_in
from .sections import MAX_CUBIN_BYTES
from .store import LOCK_WAIT_S, Miss, MissReason, Store

__all__ = ["Repair", "bad_blobs", "repair"]

_REMOVED = (MissReason.DAMAGED, MissReason.WRONG_CUBIN)


class Repair(msgspec.Struct, frozen=True):
    """What was removed: entries by digest, files by path below the folder of blobs.

    `left` holds what could not be repaired, with the reason.
    """

    entries: tuple[Miss, ...]
    blobs: tuple[str, ...]
    left: tuple[Miss, ...]


def bad_blobs(version: Directory, found: Scan) -> tuple[str, ...]:
    """The blobs that are not what their name says, by path below the folder of blobs."""
    bad = list(found.odd)
    with suppress(FileNotFoundError), version.enter("blobs") as top, top.enter("sha256") as folder:
        for digest, size_bytes in sorted(found.blobs.items()):
            with suppress(FileNotFoundError), folder.enter(digest[:2]) as shard:
                try:
                    read_blob(shard, Blob(digest, size_bytes), limit_bytes=MAX_CUBIN_BYTES)
                except DamagedEntryError:
                    bad.append(f"{digest[:2]}/{digest}")
    return tuple(bad)


def repair(
    store: Store, digests: Collection[str] | None = None, *, timeout_s: float = LOCK_WAIT_S
) -> Repair:
    """Remove the damaged ones of these entries; without `digests`, of all, and damaged blobs too.

    Works alone in the store, and judges what it finds then. The ref of an entry goes first, so that
    readers find a clean miss. Raises StoreError, LockTimeoutError, UntrustedStoreError.
    """
    removed: list[Miss] = []
    left: list[Miss] = []
    blobs: list[str] = []
    with store.changing(exclusive=True, timeout_s=timeout_s) as (_, version):
        found = scan_in(version)
        for entry in found.entries:
            if digests is not None and entry.digest not in digests:
                continue
            state = store.get(entry.digest)
            if isinstance(state, Artifact) or state.reason is MissReason.ABSENT:
                continue
            if state.reason in _REMOVED and _removed(version, entry.digest, left, state):
                removed.append(state)
            elif state.reason not in _REMOVED:
                left.append(state)
        for path in bad_blobs(version, found) if digests is None else ():
            shard_name, _, name = path.partition("/")
            with (
                version.enter("blobs") as top,
                top.enter("sha256") as folder,
                folder.enter(shard_name) as shard,
            ):
                try:
                    shard.unlink(name)
                except OSError as error:
                    detail = f"{shown(shard.path)}/{name}: {error.strerror}"
                    left.append(Miss(name, MissReason.DAMAGED, detail))
                    continue
                shard.sync()
                blobs.append(path)
    return Repair(tuple(removed), tuple(blobs), tuple(left))


def _removed(version: Directory, digest: str, left: list[Miss], state: Miss) -> bool:
    with version.enter("refs") as refs, refs.enter(digest[:2]) as shard:
        try:
            shard.unlink(digest)
        except OSError as error:
            detail = f"{state.detail}; it cannot be removed: {error.strerror}"
            left.append(msgspec.structs.replace(state, detail=detail))
            return False
        shard.sync()
    return True
