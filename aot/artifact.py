"""The artifact: one cubin with its key, launch record, resources and provenance."""

from __future__ import annotations

import hashlib

import msgspec

from .errors import DamagedEntryError
from .key import CompileKey, canonical_json
from .launch import LaunchRecord

__all__ = ["RECORD_SCHEMA", "Artifact", "Blob", "Provenance", "Record", "Resources"]

RECORD_SCHEMA = 1


class Blob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes named by their sha256 digest (hexadecimal) and their size."""

    digest: str
    size_bytes: int

    @classmethod
    def of(cls, data: bytes) -> Blob:
        """The name of these bytes."""
        return cls(hashlib.sha256(data).hexdigest(), len(data))

    def matches(self, data: bytes) -> bool:
        """Whether these are the named bytes."""
        return len(data) == self.size_bytes and hashlib.sha256(data).hexdigest() == self.digest


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a kernel takes of an SM, read back from its ELF: registers a thread, bytes a block."""

    registers: int
    static_shared_bytes: int
    local_bytes: int


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where machine code comes from. No time and no host: the same inputs give the same bytes."""

    builder_version: str
    toolchain: dict[str, str]
    options: tuple[str, ...]
    kernel_source_digest: str


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the store keeps beside a cubin, and what names the cubin."""

    schema: int
    key: CompileKey
    launch: LaunchRecord
    resources: Resources
    provenance: Provenance
    cubin: Blob

    @property
    def digest(self) -> str:
        """The identity under which the store files this record."""
        return self.key.digest_for(self.provenance.kernel_source_digest)

    def encode(self) -> bytes:
        """Canonical JSON."""
        return canonical_json(self)

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Read canonical JSON; raises DamagedEntryError for anything that would not encode back."""
        try:
            record = msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedEntryError(f"record cannot be read: {error}") from error
        if record.schema != RECORD_SCHEMA:
            raise DamagedEntryError(
                f"record has schema {record.schema}, this version reads {RECORD_SCHEMA}"
            )
        if record.encode() != data:
            raise DamagedEntryError("record is not in canonical form")
        return record


class Artifact(msgspec.Struct, frozen=True):
    """A record and the bytes that it names."""

    record: Record
    cubin: bytes

    @property
    def digest(self) -> str:
        """The identity under which the store files this artifact."""
        return self.record.digest
