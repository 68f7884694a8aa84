"""The layout of a store: its folders, the line that a ref is, and the parts of an entry, checked.

    <root>/CACHEDIR.TAG
    <root>/v1/refs/<k0k1>/<key>                  one line that names a record
    <root>/v1/blobs/sha256/<d0d1>/<digest>       records and cubins, by the digest of their bytes
    <root>/v1/pins/<k0k1>/<key>                  empty; its name alone keeps an entry from pruning
    <root>/v1/tmp/                               files that are being written
    <root>/v1/locks/                             kernel locks: of the store, and of a key in work

A ref is the line `sha256:<digest> <size>` and a line feed, with size in bytes as a decimal number
without leading zeros; nothing else is accepted.
"""

from __future__ import annotations

import re

from .artifact import Blob, Record
from .errors import AotError, DamagedEntryError
from .files import Directory, shown
from .key import DIGEST_PATTERN
from .problem import Target

__all__ = [
    "MAX_RECORD_BYTES",
    "MAX_REF_BYTES",
    "STORE_VERSION",
    "check_name",
    "decode_record",
    "decode_ref",
    "encode_ref",
    "is_digest_in",
    "read_blob",
    "shard_names",
]

STORE_VERSION = "v1"

MAX_REF_BYTES = 200
MAX_RECORD_BYTES = 1 << 20

_REF = re.compile(rb"sha256:(?P<digest>[0-9a-f]{64}) (?P<size>[1-9][0-9]{0,18})\n")
_SHARD = re.compile(r"[0-9a-f]{2}")


def encode_ref(name: Blob) -> bytes:
    """The line that names a record."""
    return b"sha256:%s %d\n" % (name.digest.encode("ascii"), name.size_bytes)


def decode_ref(line: bytes, path: str) -> Blob:
    """The record that a line names; raises DamagedEntryError for any other text."""
    match = _REF.fullmatch(line)
    if match is None:
        raise DamagedEntryError(f"{shown(path)} is not a ref: it holds {line[:80]!r}")
    return Blob(match["digest"].decode("ascii"), int(match["size"]))


def read_blob(shard: Directory, name: Blob, *, limit_bytes: int) -> tuple[str, bytes]:
    """Path and bytes of a blob in its shard, which are those that its name promises."""
    path = f"{shard.path}/{name.digest}"
    data = shard.read(name.digest, limit_bytes=limit_bytes, size_bytes=name.size_bytes)
    if not name.matches(data):
        raise DamagedEntryError(f"{shown(path)} has the digest {Blob.of(data).digest}")
    return path, data


def check_name(name: Blob, where: str, *, limit_bytes: int) -> None:
    """Raise DamagedEntryError unless a blob can be so named and is small enough to be read."""
    if not DIGEST_PATTERN.fullmatch(name.digest) or not 0 < name.size_bytes <= limit_bytes:
        raise DamagedEntryError(
            f"{shown(where)}: no blob can be named {name.digest!r} with "
            f"{name.size_bytes} bytes, at most {limit_bytes} are read"
        )


def decode_record(data: bytes, path: str, digest: str) -> Record:
    """The record in these bytes, which is that of the entry `digest`; else DamagedEntryError."""
    try:
        record = Record.decode(data)
        found = record.digest
        Target.parse(record.key.target)
    except AotError as error:
        raise DamagedEntryError(f"{shown(path)}: {error.message}") from error
    if found != digest:
        raise DamagedEntryError(f"{shown(path)} is the record of {found}, not of {digest}")
    return record


def shard_names(directory: Directory) -> list[str]:
    """The names of a folder's shards, sorted."""
    return [name for name in directory.names() if _SHARD.fullmatch(name)]


def is_digest_in(name: str, shard: str) -> bool:
    """Whether a name is a digest that belongs into this shard."""
    return name[:2] == shard and DIGEST_PATTERN.fullmatch(name) is not None
