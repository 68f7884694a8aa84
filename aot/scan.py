"""The scan: every entry of a store with its record, and every blob, without reading the cubins.

What a scan says of an entry's cubin is that a file of its name and size is there; only `Store.get`
checks its bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from .artifact import Artifact, Blob, Record
from .errors import DamagedEntryError
from .files import Directory, shown
from .layout import (
    MAX_RECORD_BYTES,
    MAX_REF_BYTES,
    check_name,
    decode_record,
    decode_ref,
    is_digest_in,
    read_blob,
    shard_names,
)
from .pins import pins_in
from .store import MissReason, Store

__all__ = ["Entry", "Scan", "scan", "scan_in", "uncollected"]


class Entry(msgspec.Struct, frozen=True):
    """One entry: its ref, and its record where that can be used.

    `line` is what the ref holds, empty where it cannot be read. `used_ns` is when the entry was
    published or last kept by a build, by the file system's clock. `reason` and `detail` say why the
    entry cannot be used, None and empty where nothing speaks against it.
    """

    digest: str
    line: bytes
    used_ns: int
    pinned: bool
    record_blob: Blob | None = None
    record: Record | None = None
    reason: MissReason | None = None
    detail: str = ""

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The blobs that the entry is known to need."""
        named = (self.record_blob, None if self.record is None else self.record.cubin)
        return tuple(blob for blob in named if blob is not None)


class Scan(msgspec.Struct, frozen=True):
    """A store at one moment, or nearly so without its lock.

    `blobs` holds the size in bytes of every blob by its digest; `odd` the paths, below the folder
    of blobs, of what has a blob's name and is no regular file.
    """

    entries: tuple[Entry, ...]
    blobs: dict[str, int]
    pins: frozenset[str]
    odd: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all refs and blobs: what pruning can make smaller."""
        return sum(len(entry.line) for entry in self.entries) + sum(self.blobs.values())

    @property
    def unreadable(self) -> tuple[Entry, ...]:
        """Entries of which nobody can say what they need."""
        return tuple(e for e in self.entries if e.reason is MissReason.UNREADABLE)


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector still: it would walk through ten thousand records many times.

    For work that makes many objects, none of them in a circle.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def scan(store: Store) -> Scan:
    """Look at a whole store without its lock; raises StoreError and UntrustedStoreError.

    An entry that seems unusable is asked for once more, because it may have been replaced or
    removed meanwhile: what is reported of it is what `Store.get` says.
    """
    with store.reading() as version:
        if version is None:
            return Scan((), {}, frozenset())
        with uncollected():
            found = scan_in(version)
            second: dict[str, Entry] = {}
            if any(entry.reason is not None for entry in found.entries):
                # With date and ref: what an error hid the first time would be taken for old.
                second = {entry.digest: entry for entry in scan_in(version).entries}
    entries = []
    for first in found.entries:
        entry = first if first.reason is None else second.get(first.digest, first)
        if entry.reason is None:
            entries.append(entry)
            continue
        again = store.get(entry.digest)
        if isinstance(again, Artifact):
            sound = msgspec.structs.replace(
                entry, record=again.record, record_blob=Blob.of(again.record.encode()), reason=None
            )
            entries.append(msgspec.structs.replace(sound, detail=""))
        elif again.reason is not MissReason.ABSENT:
            entries.append(msgspec.structs.replace(entry, reason=again.reason, detail=again.detail))
    return msgspec.structs.replace(found, entries=tuple(entries))


class _Ref(NamedTuple):
    digest: str
    path: str
    line: bytes
    used_ns: int
    reason: MissReason | None
    detail: str


def scan_in(version: Directory) -> Scan:
    """Look at the open folder of a store; raises OSError where a folder cannot be read."""
    pinned = pins_in(version)
    refs = _read_refs(version)
    names: dict[str, Blob] = {}
    entries: dict[str, Entry] = {}
    for ref in refs:
        blob: Blob | None = None
        reason, detail = ref.reason, ref.detail
        if reason is None:
            try:
                blob = decode_ref(ref.line, ref.path)
                check_name(blob, ref.path, limit_bytes=MAX_RECORD_BYTES)
                names[ref.digest] = blob
            except DamagedEntryError as error:
                blob, reason, detail = None, MissReason.DAMAGED, error.message
        entries[ref.digest] = Entry(
            ref.digest,
            ref.line,
            ref.used_ns,
            ref.digest in pinned,
            record_blob=blob,
            reason=reason,
            detail=detail,
        )
    wanted: dict[str, list[str]] = {}
    for digest, blob in names.items():
        wanted.setdefault(blob.digest[:2], []).append(digest)
    blobs: dict[str, int] = {}
    odd: list[str] = []
    with suppress(FileNotFoundError), version.enter("blobs") as top, top.enter("sha256") as folder:
        for name in shard_names(folder):
            # What is no folder is damage to the blobs that belong into it: their entries say so.
            with suppress(FileNotFoundError, NotADirectoryError), folder.enter(name) as shard:
                for blob_name, size in shard.sizes().items():
                    if not is_digest_in(blob_name, name):
                        continue
                    if size is None:
                        odd.append(f"{name}/{blob_name}")
                    else:
                        blobs[blob_name] = size
                for digest in wanted.pop(name, ()):
                    entries[digest] = _with_record(shard, entries[digest], names[digest])
    for digests in wanted.values():
        for digest in digests:
            entries[digest] = _damaged(entries[digest], f"{names[digest].digest} is missing")
    return Scan(
        tuple(_with_cubin(entry, blobs) for entry in entries.values()),
        blobs,
        pinned,
        tuple(odd),
    )


def _read_refs(version: Directory) -> list[_Ref]:
    found: list[_Ref] = []
    with suppress(FileNotFoundError), version.enter("refs") as refs:
        for name in shard_names(refs):
            with suppress(FileNotFoundError, NotADirectoryError), refs.enter(name) as shard:
                for digest in shard.names():
                    if is_digest_in(digest, name):
                        with suppress(FileNotFoundError):
                            found.append(_read_ref(shard, digest))
    return found


def _read_ref(shard: Directory, digest: str) -> _Ref:
    path = f"{shard.path}/{digest}"
    try:
        line, used_ns = shard.read_dated(digest, limit_bytes=MAX_REF_BYTES)
    except FileNotFoundError:
        raise
    except DamagedEntryError as error:
        return _Ref(digest, path, b"", 0, MissReason.DAMAGED, error.message)
    except OSError as error:
        detail = f"{shown(path)}: {error.strerror}"
        return _Ref(digest, path, b"", 0, MissReason.UNREADABLE, detail)
    return _Ref(digest, path, line, used_ns, None, "")


def _with_record(shard: Directory, entry: Entry, name: Blob) -> Entry:
    try:
        path, data = read_blob(shard, name, limit_bytes=MAX_RECORD_BYTES)
        record = decode_record(data, path, entry.digest)
    except FileNotFoundError:
        return _damaged(entry, f"{shown(shard.path)}/{name.digest} is missing")
    except OSError as error:
        return msgspec.structs.replace(
            entry,
            reason=MissReason.UNREADABLE,
            detail=f"{shown(shard.path)}/{name.digest}: {error.strerror}",
        )
    except DamagedEntryError as error:
        return _damaged(entry, error.message)
    return msgspec.structs.replace(entry, record=record)


def _with_cubin(entry: Entry, blobs: dict[str, int]) -> Entry:
    if entry.record is None:
        return entry
    cubin = entry.record.cubin
    size = blobs.get(cubin.digest)
    if size is None:
        return _damaged(entry, f"the cubin {cubin.digest} is missing")
    if size != cubin.size_bytes:
        return _damaged(
            entry, f"the cubin {cubin.digest} has {size} bytes, must have {cubin.size_bytes}"
        )
    return entry


def _damaged(entry: Entry, detail: str) -> Entry:
    return msgspec.structs.replace(entry, reason=MissReason.DAMAGED, detail=detail)
