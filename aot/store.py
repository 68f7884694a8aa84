"""The store: artifacts on disk, found by their digest, every byte checked on every read.

    <root>/CACHEDIR.TAG
    <root>/v1/refs/<k0k1>/<key>                  one line that names a record
    <root>/v1/blobs/sha256/<d0d1>/<digest>       records and cubins, by the digest of their bytes
    <root>/v1/tmp/                               files that are being written
    <root>/v1/locks/                             one file a key; locks save work, no more

A ref is the line `sha256:<digest> <size>` and a line feed, with size in bytes as a decimal number
without leading zeros; nothing else is accepted.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .artifact import Artifact, Blob, Record
from .elf import check_cubin
from .errors import (
    AotError,
    DamagedEntryError,
    InvalidArtifactError,
    LockTimeoutError,
    StoreError,
    StoreFullError,
    StoreUnwritableError,
    UntrustedStoreError,
    UsageError,
)
from .files import Directory, command, shown
from .key import DIGEST_PATTERN
from .location import default_root
from .problem import Target
from .sections import MAX_CUBIN_BYTES

if TYPE_CHECKING:
    import filelock

__all__ = ["MAX_RECORD_BYTES", "Miss", "MissReason", "Store", "default_root"]

STORE_VERSION = "v1"

MAX_REF_BYTES = 200
LOCK_MODE = 0o600
MAX_RECORD_BYTES = 1 << 20

CACHE_TAG = "CACHEDIR.TAG"
CACHE_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# This directory is a store of llbf16-aot: it can be built again, backups may leave it out.
# See https://bford.info/cachedir/
"""

_REF = re.compile(rb"sha256:(?P<digest>[0-9a-f]{64}) (?P<size>[1-9][0-9]{0,18})\n")
_SHARD = re.compile(r"[0-9a-f]{2}")
_VERSION = re.compile(r"v[0-9]+")
_NOT_STRANGE = (CACHE_TAG, "lost+found")


class MissReason(str, enum.Enum):
    """Why an entry cannot be used."""

    ABSENT = "absent"
    """Nothing was published under this digest."""

    DAMAGED = "damaged"
    """A part is missing, or its bytes are not those that were published."""

    WRONG_CUBIN = "wrong-cubin"
    """The bytes are those that were published, but the cubin does not fit its own record."""

    UNREADABLE = "unreadable"
    """The system refuses to read it."""


class Miss(msgspec.Struct, frozen=True):
    """No usable entry, and why: `detail` names the path and the check that failed."""

    digest: str
    reason: MissReason
    detail: str


class Store:
    """Artifacts below one directory.

    Reading writes nothing, takes no lock and needs no directory to exist. The first `publish` makes
    the root. Any number of processes may read and publish at once, with or without locks. What is
    not promised: that an entry stays, because somebody may prune or remove the store.
    """

    def __init__(self, root: Path) -> None:
        text = os.fspath(root)
        if "\0" in text:
            raise UsageError(f"store path {text!r} contains a NUL character")
        if not root.is_absolute():
            raise UsageError(
                f"store path {shown(root)} is not absolute",
                hint=f"write {command(os.path.join(os.getcwd(), text))}",
            )
        self.root = Path(os.path.normpath(text))

    def __repr__(self) -> str:
        return f"Store({shown(self.root)})"

    def get(self, digest: str) -> Artifact | Miss:
        """The artifact of that digest after every check of its bytes, or why there is none.

        Raises UntrustedStoreError where somebody else could have written what was found, with the
        command that mends it as hint: that is never a miss.
        """
        _check_digest(digest)
        try:
            return self._read(digest)
        except _AbsentError as error:
            reason, detail = MissReason.ABSENT, error.message
        except UntrustedStoreError:
            raise
        except InvalidArtifactError as error:
            reason, detail = MissReason.WRONG_CUBIN, error.message
        except NotADirectoryError as error:
            reason, detail = MissReason.DAMAGED, _described(error)
        except OSError as error:
            error.filename = error.filename or str(self.root)
            reason, detail = MissReason.UNREADABLE, _described(error)
        except AotError as error:
            reason, detail = MissReason.DAMAGED, error.message
        return Miss(digest, reason, detail)

    def publish(self, artifact: Artifact) -> None:
        """File an artifact under its digest; when this returns it is there, power loss or not.

        Blobs come first, the ref last, each whole or not at all, so at every moment a reader finds
        the entry that was there before or the new one. Raises StoreFullError, StoreUnwritableError,
        UntrustedStoreError or another StoreError; then nothing was published. Raises
        InvalidArtifactError for an artifact that reading would refuse.
        """
        record = _checked_record(artifact)
        name = Blob.of(record)
        digest = artifact.digest
        try:
            with ExitStack() as stack:
                root, version = self._make_version(stack)
                temporary = stack.enter_context(version.make("tmp"))
                temporary.sweep()
                if not root.has(CACHE_TAG):
                    root.put(CACHE_TAG, CACHE_TAG_TEXT, temporary=temporary)
                blobs = stack.enter_context(version.make("blobs"))
                sha256 = stack.enter_context(blobs.make("sha256"))
                for blob, data in ((artifact.record.cubin, artifact.cubin), (name, record)):
                    with sha256.make(blob.digest[:2]) as shard:
                        if not shard.holds(blob.digest, data):
                            shard.put(blob.digest, data, temporary=temporary)
                refs = stack.enter_context(version.make("refs"))
                shard = stack.enter_context(refs.make(digest[:2]))
                # A directory that another publisher made a moment ago may not be durable yet.
                for directory in (sha256, blobs, refs, version, root):
                    directory.sync()
                root.sync_parent()
                shard.put(digest, _encode_ref(name), temporary=temporary)
        except OSError as error:
            raise self._failure(error) from error

    def prepare(self) -> None:
        """Make the folder in which files are written, and so tell early whether that is possible.

        Raises what `publish` raises: for a builder, before it spends minutes on compiling.
        """
        try:
            with ExitStack() as stack:
                _, version = self._make_version(stack)
                stack.enter_context(version.make("tmp")).check_writable()
        except OSError as error:
            raise self._failure(error) from error

    def digests(self) -> tuple[str, ...]:
        """Digests under which something was published, sorted; says nothing of its soundness.

        Raises StoreError where the store cannot be listed. Files of other names are ignored.
        """
        found: list[str] = []
        try:
            with ExitStack() as stack:
                refs = self._open_refs(stack)
                if refs is None:
                    return ()
                for shard_name in filter(_SHARD.fullmatch, refs.names()):
                    with suppress(FileNotFoundError, NotADirectoryError):
                        with refs.enter(shard_name) as shard:
                            names = shard.names()
                        found.extend(
                            name
                            for name in names
                            if DIGEST_PATTERN.fullmatch(name) and name[:2] == shard_name
                        )
        except OSError as error:
            raise StoreError(
                f"cannot list the store {shown(self.root)}: {_described(error)}",
                hint=command("ls", "-la", str(self.root)),
            ) from error
        return tuple(found)

    def usage(self) -> int:
        """Bytes of all files of the store, without what the file system adds."""
        total = 0
        waiting = [os.path.join(self.root, STORE_VERSION)]
        while waiting:
            with suppress(OSError), os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        elif entry.is_file(follow_symlinks=False):
                            total += entry.stat(follow_symlinks=False).st_size
        return total

    def cubin_path(self, record: Record) -> Path:
        """Where the cubin of a record lies: for messages and tools, not for loading."""
        digest = record.cubin.digest
        return self.root / STORE_VERSION / "blobs" / "sha256" / digest[:2] / digest

    @contextmanager
    def key_lock(self, digest: str, *, timeout_s: float) -> Iterator[bool]:
        """Hold the lock of a key, so that one of many builders does the work; yields whether.

        A kernel lock: it is free as soon as its holder is gone. Where the store or its file system
        allows no lock, the body runs without one: locks save work, publishing is right without.
        Raises LockTimeoutError after `timeout_s` seconds; `math.inf` waits for ever.
        """
        _check_digest(digest)
        lock = self._acquire(digest, timeout_s)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                with suppress(OSError):
                    lock.release()

    def _read(self, digest: str) -> Artifact:
        with ExitStack() as stack:
            try:
                root = stack.enter_context(Directory.open_root(str(self.root), create=False))
                version = stack.enter_context(root.enter(STORE_VERSION))
                refs = stack.enter_context(version.enter("refs"))
                shard = stack.enter_context(refs.enter(digest[:2]))
                line = shard.read(digest, limit_bytes=MAX_REF_BYTES)
            except FileNotFoundError as error:
                raise _AbsentError(f"{shown(error.filename)} does not exist") from error
            name = _decode_ref(line, f"{shard.path}/{digest}")
            try:
                blobs = stack.enter_context(version.enter("blobs"))
                sha256 = stack.enter_context(blobs.enter("sha256"))
                path, data = _read_blob(sha256, name, limit_bytes=MAX_RECORD_BYTES)
                record = _decode_record(data, path, digest)
                path, cubin = _read_blob(sha256, record.cubin, limit_bytes=MAX_CUBIN_BYTES)
            except FileNotFoundError as error:
                raise DamagedEntryError(f"{shown(error.filename)} is missing") from error
        try:
            check_cubin(record.launch, Target.parse(record.key.target), cubin)
        except InvalidArtifactError as error:
            raise InvalidArtifactError(f"{shown(path)}: {error.message}") from error
        return Artifact(record, cubin)

    def _make_version(self, stack: ExitStack) -> tuple[Directory, Directory]:
        """The root and its folder of this version, made where they are missing."""
        root = stack.enter_context(Directory.open_root(str(self.root), create=True))
        if not root.has(CACHE_TAG):
            # A folder marked as a cache is left out of backups: never mark somebody's documents.
            strange = [name for name in root.names() if not _is_ours(name)]
            if strange:
                raise StoreError(
                    f"{shown(self.root)} is no store and not empty: it holds {shown(strange[0])}",
                    hint="name a new or an empty directory with --store or LLBF16_AOT_STORE",
                )
        return root, stack.enter_context(root.make(STORE_VERSION, replace=False))

    def _acquire(self, digest: str, timeout_s: float) -> filelock.BaseFileLock | None:
        try:
            with ExitStack() as stack:
                _, version = self._make_version(stack)
                locks = stack.enter_context(version.make("locks"))
                path = f"{locks.path}/{digest}.lock"
                if not _can_lock(path):
                    return None
        except OSError:
            return None
        # Here, because some releases of filelock write to the folder for temporary files on import.
        import filelock

        timeout = -1.0 if timeout_s == math.inf else max(0.0, timeout_s)
        lock = filelock.FileLock(path, mode=LOCK_MODE)
        try:
            lock.acquire(timeout=timeout)
        except filelock.Timeout as error:
            raise LockTimeoutError(
                f"{shown(path)} was held by another process for {timeout_s:g} seconds",
                hint=f"see who holds it: {command('fuser', '-v', path)}",
            ) from error
        except (OSError, NotImplementedError):
            return None
        return lock

    def _failure(self, error: OSError) -> StoreError:
        """The error that tells a caller what to do about what the system said."""
        text = f"cannot write the store {shown(self.root)}: {_described(error)}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFullError(
                text, hint=f"free some space: {command('df', '-h', _near(self.root))}"
            )
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return StoreUnwritableError(
                text, hint="name a directory that you can write with --store or LLBF16_AOT_STORE"
            )
        if error.errno == errno.ELOOP:
            return UntrustedStoreError(text, hint=command("namei", "-l", str(self.root)))
        if error.errno in (errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
            return StoreError(
                text, hint=f"see what is in the way: {command('ls', '-la', str(self.root))}"
            )
        return StoreError(text)

    def _open_refs(self, stack: ExitStack) -> Directory | None:
        try:
            root = stack.enter_context(Directory.open_root(str(self.root), create=False))
            version = stack.enter_context(root.enter(STORE_VERSION))
            return stack.enter_context(version.enter("refs"))
        except FileNotFoundError:
            return None


class _AbsentError(StoreError):
    """Nothing was published under a digest."""


def _check_digest(digest: str) -> None:
    if not DIGEST_PATTERN.fullmatch(digest):
        raise UsageError(
            f"digest {digest!r} is not 64 lower-case hexadecimal digits",
            hint="llbf16-aot list prints the digests of a store",
        )


def _checked_record(artifact: Artifact) -> bytes:
    """The encoded record of an artifact that `get` will accept."""
    record, cubin = artifact.record, artifact.cubin
    if not record.cubin.matches(cubin):
        raise InvalidArtifactError(
            f"record names a cubin {record.cubin.digest} of {record.cubin.size_bytes} bytes, "
            f"the artifact has {Blob.of(cubin).digest} of {len(cubin)}"
        )
    check_cubin(record.launch, Target.parse(record.key.target), cubin)
    encoded = record.encode()
    try:
        decoded = Record.decode(encoded)
    except DamagedEntryError as error:
        raise InvalidArtifactError(error.message) from error
    if decoded != record or len(encoded) > MAX_RECORD_BYTES:
        raise InvalidArtifactError(
            f"record does not read back as it is written, or exceeds {MAX_RECORD_BYTES} bytes"
        )
    return encoded


def _encode_ref(name: Blob) -> bytes:
    return b"sha256:%s %d\n" % (name.digest.encode("ascii"), name.size_bytes)


def _decode_ref(line: bytes, path: str) -> Blob:
    match = _REF.fullmatch(line)
    if match is None:
        raise DamagedEntryError(f"{shown(path)} is not a ref: it holds {line[:80]!r}")
    return Blob(match["digest"].decode("ascii"), int(match["size"]))


def _read_blob(sha256: Directory, name: Blob, *, limit_bytes: int) -> tuple[str, bytes]:
    """Path and bytes of a blob, which are those that its name promises."""
    if not DIGEST_PATTERN.fullmatch(name.digest) or not 0 < name.size_bytes <= limit_bytes:
        raise DamagedEntryError(
            f"{shown(sha256.path)}: no blob can be named {name.digest!r} with "
            f"{name.size_bytes} bytes, at most {limit_bytes} are read"
        )
    with sha256.enter(name.digest[:2]) as shard:
        path = f"{shard.path}/{name.digest}"
        data = shard.read(name.digest, limit_bytes=limit_bytes, size_bytes=name.size_bytes)
    if not name.matches(data):
        raise DamagedEntryError(f"{shown(path)} has the digest {Blob.of(data).digest}")
    return path, data


def _decode_record(data: bytes, path: str, digest: str) -> Record:
    try:
        record = Record.decode(data)
        found = record.digest
        Target.parse(record.key.target)
    except AotError as error:
        raise DamagedEntryError(f"{shown(path)}: {error.message}") from error
    if found != digest:
        raise DamagedEntryError(f"{shown(path)} is the record of {found}, not of {digest}")
    return record


def _is_ours(name: str) -> bool:
    return name in _NOT_STRANGE or _VERSION.fullmatch(name) is not None


def _can_lock(path: str) -> bool:
    """Whether the file system has kernel locks; makes the file.

    Asked beforehand because filelock, where there are none, goes on with a lock that is a file, and
    that one outlives its holder.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, LOCK_MODE)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        # Giving back what is not held changes nothing, and fails where there are no locks.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
    return True


def _described(error: OSError) -> str:
    text = error.strerror or type(error).__name__
    return f"{shown(error.filename)}: {text}" if error.filename else text


def _near(path: Path) -> str:
    """The path or, where it does not exist, the nearest of its parents that does."""
    text = str(path)
    while not os.path.exists(text):
        text = os.path.dirname(text)
    return text
