"""Planted bugs, for the controls: each takes one promise away from the product."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os

import pytest
from llbf16_aot import files, store
from llbf16_aot.artifact import Artifact, Blob, Record
from llbf16_aot.errors import StoreError
from llbf16_aot.files import Directory
from llbf16_aot.store import Store

__all__ = [
    "follows_links",
    "forgets_descriptors",
    "hides_failures",
    "keeps_temporary_files",
    "lenient_records",
    "no_cubin_check",
    "no_digests",
    "no_locks",
    "no_modes",
    "no_syncs",
    "no_trust_check",
    "raw_errors",
    "sizes_unchecked",
    "writes_in_place",
]


def writes_in_place(patch: pytest.MonkeyPatch) -> None:
    """Files grow under their own name, in twenty pieces."""

    def put(self: Directory, name: str, data: bytes, *, temporary: Directory) -> None:
        descriptor = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=self._descriptor
        )
        try:
            step = len(data) // 20 + 1
            for start in range(0, len(data), step):
                os.write(descriptor, data[start : start + step])
        finally:
            os.close(descriptor)

    patch.setattr(Directory, "put", put)


def no_digests(patch: pytest.MonkeyPatch) -> None:
    """Bytes count as those that were named if their number is right."""
    patch.setattr(Blob, "matches", lambda self, data: len(data) == self.size_bytes)
    patch.setattr(store, "check_cubin", lambda *_: None)


def sizes_unchecked(patch: pytest.MonkeyPatch) -> None:
    """A file of any size counts as the file that was named."""
    real = Directory.read

    def read(
        self: Directory, name: str, *, limit_bytes: int, size_bytes: int | None = None
    ) -> bytes:
        return real(self, name, limit_bytes=limit_bytes)

    patch.setattr(Directory, "read", read)
    patch.setattr(Blob, "matches", lambda self, data: True)
    patch.setattr(store, "check_cubin", lambda *_: None)


def no_cubin_check(patch: pytest.MonkeyPatch) -> None:
    """Bytes with the right digest are handed out, whatever they are."""
    patch.setattr(store, "check_cubin", lambda *_: None)


def follows_links(patch: pytest.MonkeyPatch) -> None:
    """A link in place of a file is followed."""
    patch.setattr(files, "_OPEN_FILE", files._OPEN_FILE & ~os.O_NOFOLLOW)


def hides_failures(patch: pytest.MonkeyPatch) -> None:
    """Publishing says ok whatever happened."""
    real = Store.publish

    def publish(self: Store, artifact: Artifact) -> None:
        with contextlib.suppress(StoreError):
            real(self, artifact)

    patch.setattr(Store, "publish", publish)


def raw_errors(patch: pytest.MonkeyPatch) -> None:
    """What the system said comes out as it is."""

    def failure(self: Store, error: OSError) -> OSError:
        return error

    patch.setattr(Store, "_failure", failure)


def keeps_temporary_files(patch: pytest.MonkeyPatch) -> None:
    """Nobody removes what a writer that is gone has left."""
    patch.setattr(Directory, "sweep", lambda self: None)


def no_syncs(patch: pytest.MonkeyPatch) -> None:
    """Nothing is written through to the disk."""
    patch.setattr(os, "fsync", lambda descriptor: None)


def no_locks(patch: pytest.MonkeyPatch) -> None:
    """The file system has no kernel locks."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    patch.setattr(fcntl, "flock", flock)


def no_modes(patch: pytest.MonkeyPatch) -> None:
    """Modes are left to the umask."""
    patch.setattr(os, "chmod", lambda *_, **__: None)
    patch.setattr(os, "fchmod", lambda *_, **__: None)


def no_trust_check(patch: pytest.MonkeyPatch) -> None:
    """Owner and mode of what is found do not matter."""
    patch.setattr(files, "_check_trust", lambda *_, **__: None)


def forgets_descriptors(patch: pytest.MonkeyPatch) -> None:
    """Directories stay open after use."""
    patch.setattr(Directory, "__exit__", lambda self, *_: None)


def lenient_records(patch: pytest.MonkeyPatch) -> None:
    """Any JSON with the right fields is a record."""
    import msgspec

    def decode(data: bytes) -> Record:
        try:
            return msgspec.json.decode(data, type=Record)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            from llbf16_aot.errors import DamagedEntryError

            raise DamagedEntryError(str(error)) from error

    patch.setattr(Record, "decode", staticmethod(decode))
