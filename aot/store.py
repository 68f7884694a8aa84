"""The store: artifacts on disk, found by their digest, every byte checked on every read.

`layout` says what lies where; `docs/store.md` what is promised.
"""

from __future__ import annotations

import enum
import errno
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from .artifact import Artifact, Blob, Record
from .elf import check_cubin
from .errors import (
    AotError,
    DamagedEntryError,
    InvalidArtifactError,
    StoreError,
    StoreFullError,
    StoreUnwritableError,
    UntrustedStoreError,
    UsageError,
)
from .files import Directory, command, shown
from .key import DIGEST_PATTERN
from .layout import (
    MAX_RECORD_BYTES,
    MAX_REF_BYTES,
    STORE_VERSION,
    check_name,
    decode_record,
    decode_ref,
    encode_ref,
    is_digest_in,
    read_blob,
    shard_names,
)
from .location import default_root
from .locks import NO_LOCKS, acquire
from .problem import Target
from .sections import MAX_CUBIN_BYTES

__all__ = ["MAX_RECORD_BYTES", "Miss", "MissReason", "Store", "default_root"]

LOCK_WAIT_S = 60.0
"""How long a publisher waits for somebody who prunes: ten thousand entries take some seconds."""

STORE_LOCK = "store.lock"
GATE_LOCK = "gate.lock"

_REREADS = 8
"""How often a ref may change under a reader before it gives up."""

CACHE_TAG = "CACHEDIR.TAG"
CACHE_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# This directory is a store of llbf16-aot: it can be built again, backups may leave it out.
# See https://bford.info/cachedir/
"""

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
        # Shared with other publishers, and from the first blob to the ref: who prunes meanwhile
        # would take a blob that no ref names yet.
        with (
            self.changing(exclusive=False, timeout_s=LOCK_WAIT_S) as (root, version),
            version.make("tmp") as temporary,
            version.make("blobs") as blobs,
            blobs.make("sha256") as sha256,
            version.make("refs") as refs,
            refs.make(digest[:2]) as ref_shard,
        ):
            temporary.sweep()
            if not root.has(CACHE_TAG):
                root.put(CACHE_TAG, CACHE_TAG_TEXT, temporary=temporary)
            for blob, data in ((artifact.record.cubin, artifact.cubin), (name, record)):
                with sha256.make(blob.digest[:2]) as shard:
                    if not shard.holds(blob.digest, data):
                        shard.put(blob.digest, data, temporary=temporary)
            # A directory that another publisher made a moment ago may not be durable yet.
            for directory in (sha256, blobs, refs, version, root):
                directory.sync()
            root.sync_parent()
            ref_shard.put(digest, encode_ref(name), temporary=temporary)

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
        with self.reading() as version, ExitStack() as stack:
            try:
                if version is None:
                    return ()
                refs = stack.enter_context(version.enter("refs"))
            except FileNotFoundError:
                return ()
            for shard_name in shard_names(refs):
                with suppress(FileNotFoundError, NotADirectoryError):
                    with refs.enter(shard_name) as shard:
                        names = shard.names()
                    found.extend(name for name in names if is_digest_in(name, shard_name))
        return tuple(found)

    def touch(self, digest: str) -> None:
        """Note that an entry was used, for `prune`: what was used last goes last.

        Loading never does this. Where the store cannot be written nothing happens.
        """
        _check_digest(digest)
        with suppress(OSError), ExitStack() as stack:
            self._open_refs(stack, digest)[1].touch(digest)

    @contextmanager
    def reading(self) -> Iterator[Directory | None]:
        """The folder of this layout, None where there is none: for those who look after a store.

        What the system refuses in the body comes out as StoreError.
        """
        try:
            with ExitStack() as stack:
                version: Directory | None = None
                with suppress(FileNotFoundError):
                    root = stack.enter_context(Directory.open_root(str(self.root), create=False))
                    version = stack.enter_context(root.enter(STORE_VERSION))
                yield version
        except OSError as error:
            raise StoreError(
                f"cannot list the store {shown(self.root)}: {_described(error)}",
                hint=command("ls", "-la", str(self.root)),
            ) from error

    @contextmanager
    def changing(
        self, *, exclusive: bool, timeout_s: float
    ) -> Iterator[tuple[Directory, Directory]]:
        """The root and its folder of this layout, made where missing, under the store's lock.

        Publishers share the lock; who takes anything away must be alone. Who waits to be alone is
        not overtaken. Without kernel locks publishing goes on, and nobody is alone. Raises
        LockTimeoutError; what the system refuses in the body comes out as the StoreError of
        `publish`.
        """
        try:
            with ExitStack() as stack:
                root, version = self._make_version(stack)
                try:
                    self._lock(stack, version, exclusive=exclusive, timeout_s=timeout_s)
                except OSError as error:
                    if error.errno not in NO_LOCKS:
                        raise
                    if exclusive:
                        raise StoreUnwritableError(
                            f"cannot lock the store {shown(self.root)}: {_described(error)}",
                            hint="only with a lock is it safe to remove what a builder may need: "
                            "run this where the store can be locked",
                        ) from error
                yield root, version
        except OSError as error:
            raise self._failure(error) from error

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
        with ExitStack() as stack:
            held = True
            try:
                _, version = self._make_version(stack)
                locks = stack.enter_context(version.make("locks"))
                lock = acquire(
                    locks, f"{digest}.lock", exclusive=True, timeout_s=timeout_s, temporary=True
                )
                stack.callback(lock.release)
            except OSError:
                held = False
            yield held

    def _lock(
        self, stack: ExitStack, version: Directory, *, exclusive: bool, timeout_s: float
    ) -> None:
        locks = stack.enter_context(version.make("locks"))
        # Who wants to be alone keeps the gate while waiting for those who are inside, so that the
        # stream of newcomers cannot keep it waiting for ever.
        gate = acquire(locks, GATE_LOCK, exclusive=exclusive, timeout_s=timeout_s)
        stack.callback(gate.release)
        lock = acquire(locks, STORE_LOCK, exclusive=exclusive, timeout_s=timeout_s)
        stack.callback(lock.release)
        if not exclusive:
            gate.release()

    def _open_refs(self, stack: ExitStack, digest: str) -> tuple[Directory, Directory]:
        """The folder of this layout, and the shard of refs that holds a digest."""
        root = stack.enter_context(Directory.open_root(str(self.root), create=False))
        version = stack.enter_context(root.enter(STORE_VERSION))
        refs = stack.enter_context(version.enter("refs"))
        return version, stack.enter_context(refs.enter(digest[:2]))

    def _read(self, digest: str) -> Artifact:
        opened = False
        # Without an ExitStack, whose bookkeeping costs as much as a tenth of the checks.
        try:
            with (
                Directory.open_root(str(self.root), create=False) as root,
                root.enter(STORE_VERSION) as version,
                version.enter("refs") as refs,
                refs.enter(digest[:2]) as shard,
            ):
                opened = True
                return _read_from(version, shard, digest)
        except FileNotFoundError as error:
            if opened:
                raise
            raise _AbsentError(f"{shown(error.filename)} does not exist") from error

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


def _read_from(version: Directory, shard: Directory, digest: str) -> Artifact:
    """The artifact that the ref of a digest in its shard leads to."""
    missing = ""
    stamp: tuple[int, int] | None = (0, 0)
    for _ in range(_REREADS):
        try:
            line = shard.read(digest, limit_bytes=MAX_REF_BYTES)
        except FileNotFoundError as error:
            raise _AbsentError(f"{shown(error.filename)} does not exist") from error
        try:
            return _read_entry(version, line, f"{shard.path}/{digest}", digest)
        except FileNotFoundError as error:
            missing = f"{shown(error.filename)} is missing"
        # A blob that goes after its ref was read was pruned, or its entry replaced, perhaps by the
        # same bytes: then the ref is another file by now, or none. Only one that stayed, while its
        # blob was looked for once more, is damaged.
        before, stamp = stamp, shard.stamp(digest)
        if stamp == before:
            break
    raise DamagedEntryError(missing)


def _read_entry(version: Directory, line: bytes, path: str, digest: str) -> Artifact:
    """The artifact that a ref's line leads to; FileNotFoundError where a part of it is missing."""
    name = decode_ref(line, path)
    with version.enter("blobs") as blobs, blobs.enter("sha256") as sha256:
        check_name(name, sha256.path, limit_bytes=MAX_RECORD_BYTES)
        with sha256.enter(name.digest[:2]) as shard:
            path, data = read_blob(shard, name, limit_bytes=MAX_RECORD_BYTES)
        record = decode_record(data, path, digest)
        check_name(record.cubin, sha256.path, limit_bytes=MAX_CUBIN_BYTES)
        with sha256.enter(record.cubin.digest[:2]) as shard:
            path, cubin = read_blob(shard, record.cubin, limit_bytes=MAX_CUBIN_BYTES)
    try:
        check_cubin(record.launch, Target.parse(record.key.target), cubin)
    except InvalidArtifactError as error:
        raise InvalidArtifactError(f"{shown(path)}: {error.message}") from error
    return Artifact(record, cubin)


def _is_ours(name: str) -> bool:
    return name in _NOT_STRANGE or _VERSION.fullmatch(name) is not None


def _described(error: OSError) -> str:
    text = error.strerror or type(error).__name__
    return f"{shown(error.filename)}: {text}" if error.filename else text


def _near(path: Path) -> str:
    """The path or, where it does not exist, the nearest of its parents that does."""
    text = str(path)
    while not os.path.exists(text):
        text = os.path.dirname(text)
    return text
