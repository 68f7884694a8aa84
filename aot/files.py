"""Files that only we, or root, can have written: opened without following links, published whole.

Everything goes through descriptors of directories whose owner and mode were checked, so that
nothing can be exchanged between the check and the use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .errors import DamagedEntryError, UntrustedStoreError

__all__ = ["DIRECTORY_MODE", "FILE_MODE", "Directory", "command", "read_regular", "shown"]

DIRECTORY_MODE = 0o700
FILE_MODE = 0o444
LOCK_MODE = 0o600

MAX_LINKS = 40
"""Symbolic links followed on the way to a root: as many as the kernel follows."""

STALE_AFTER_S = 3600
"""Where the file system has no locks: seconds after which a temporary file has lost its writer."""

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_ANY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK opening a FIFO waits for a writer, for ever.
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_OPEN_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_TEMPORARY_NAME = re.compile(r"[0-9a-f]{32}")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def shown(path: str | os.PathLike[str]) -> str:
    r"""A path as text that every stream and JSON can carry: bytes outside UTF-8 become `\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def read_regular(path: str | os.PathLike[str], *, limit_bytes: int) -> bytes:
    """The bytes of a regular file that a user names; links are followed, nothing is waited for.

    Raises OSError for what cannot be read, is no regular file (a FIFO would wait for a writer, a
    device may never end) or is larger than the limit; ValueError where the path holds a NUL.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(limit_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"larger than {limit_bytes} bytes")
    return data


def command(*words: str) -> str:
    """A command line that can be pasted into a shell."""
    return " ".join(shlex.quote(shown(word)) for word in words)


class Directory:
    """An open directory that only we, or root, can change.

    A method that takes a name works on the entry of that name in this very directory, wherever
    that is by now, and follows no link. Methods raise OSError as the system reports it,
    DamagedEntryError where a file is not what it should be, and UntrustedStoreError where owner or
    mode would let somebody else choose what is read; its hint is the command that mends it. `path`
    is for messages.
    """

    def __init__(self, descriptor: int, path: str, *, root: str) -> None:
        self._descriptor = descriptor
        self.path = path
        self._root = root

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        # What had to be durable was synced: trouble afterwards is no trouble. A load leaves eight
        # directories, and suppress() takes as long as close().
        try:  # noqa: SIM105
            os.close(self._descriptor)
        except OSError:
            pass

    @classmethod
    def open_root(cls, path: str, *, create: bool) -> Directory:
        """Open an absolute path; with `create`, make what is missing of it.

        Links on the way, the root itself among them, may be links of ours or of root's. A link of
        somebody else is refused: it would let him choose which of our directories we read and fill.
        Owner and mode are checked of the root and not of its parents: who can write to a parent can
        put there only a directory of his own, which is refused.
        """
        descriptor = _walk(path, create=create)
        try:
            status = os.fstat(descriptor)
            _check_trust(path, status, root=path)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, path, root=path)

    def enter(self, name: str) -> Directory:
        """Open the directory of that name."""
        path = f"{self.path}/{name}"
        descriptor = _open_directory(self._descriptor, name, path)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISDIR(status.st_mode):
                if stat.S_ISLNK(status.st_mode):
                    raise UntrustedStoreError(
                        f"{shown(path)} is a symbolic link, must be a directory",
                        hint=command("rm", path),
                    )
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            _check_trust(path, status, root=self._root)
        except BaseException:
            os.close(descriptor)
            raise
        return Directory(descriptor, path, root=self._root)

    def make(self, name: str, *, replace: bool = True) -> Directory:
        """Open the directory of that name, made durably where it is missing.

        With `replace`, a file of that name is removed: for names that nobody else would use here.
        """
        try:
            return self.enter(name)
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            if not replace:
                raise
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._descriptor)
        _make_directory(self._descriptor, name)
        return self.enter(name)

    def names(self) -> list[str]:
        """Names of all entries, sorted."""
        descriptor = _open(self._descriptor, ".", _OPEN_DIRECTORY, self.path)
        try:
            return sorted(os.listdir(descriptor))
        except OSError as error:
            # The system's own error names the number of the descriptor.
            error.filename = self.path
            raise
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Make the entries durable: what was created or renamed here survives a power loss."""
        _sync_directory(self._descriptor, ".")

    def sync_parent(self) -> None:
        """Make this directory's own name durable, as far as we may read its parent."""
        with suppress(PermissionError):
            _sync_directory(self._descriptor, "..")

    def has(self, name: str) -> bool:
        """Whether anything has that name."""
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def stamp(self, name: str) -> tuple[int, int] | None:
        """What tells the file of that name from others before or after it; None for no file."""
        try:
            status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_ctime_ns

    def read(self, name: str, *, limit_bytes: int, size_bytes: int | None = None) -> bytes:
        """The bytes of a regular file that has the expected size, at most `limit_bytes`."""
        return self.read_dated(name, limit_bytes=limit_bytes, size_bytes=size_bytes)[0]

    def read_dated(
        self, name: str, *, limit_bytes: int, size_bytes: int | None = None
    ) -> tuple[bytes, int]:
        """As `read`, with the time of the file's last change, in nanoseconds."""
        descriptor, status, path = self._open_file(name)
        try:
            size = status.st_size
            if size > limit_bytes:
                raise DamagedEntryError(
                    f"{shown(path)} has {size} bytes, at most {limit_bytes} are read"
                )
            if size_bytes is not None and size_bytes != size:
                raise DamagedEntryError(f"{shown(path)} has {size} bytes, must have {size_bytes}")
            return _read_all(descriptor, size, path), status.st_mtime_ns
        except OSError as error:
            error.filename = error.filename or path
            raise
        finally:
            os.close(descriptor)

    def sizes(self) -> dict[str, int | None]:
        """Every name here with the size in bytes of its regular file, None for anything else."""
        found: dict[str, int | None] = {}
        descriptor = _open(self._descriptor, ".", _OPEN_DIRECTORY, self.path)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        regular = stat.S_ISREG(status.st_mode)
                        found[entry.name] = status.st_size if regular else None
        except OSError as error:
            error.filename = self.path
            raise
        finally:
            os.close(descriptor)
        return found

    def unlink(self, name: str) -> bool:
        """Take a name away, of an empty directory too; says whether there was one."""
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except FileNotFoundError:
            return False
        except IsADirectoryError:
            os.rmdir(name, dir_fd=self._descriptor)
        return True

    def touch(self, name: str) -> None:
        """Date a file now, by the clock of its file system."""
        os.utime(name, dir_fd=self._descriptor, follow_symlinks=False)

    def now_ns(self) -> int:
        """What the file system's clock says: the time, in nanoseconds, of a file made just now."""
        with self._new_file(keep=False) as (descriptor, _):
            return os.fstat(descriptor).st_mtime_ns

    def open_lock(self, name: str) -> int:
        """A descriptor of the lock file of that name, made where it is missing.

        Raises OSError, also where something that is no regular file has that name.
        """
        path = f"{self.path}/{name}"
        descriptor = _open(self._descriptor, name, _OPEN_LOCK, path, mode=LOCK_MODE)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.EACCES, "not a regular file", path)
            if stat.S_IMODE(mode) != LOCK_MODE:
                # The umask may have taken our own bits.
                with suppress(PermissionError):
                    os.fchmod(descriptor, LOCK_MODE)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def is_named(self, name: str, descriptor: int) -> bool:
        """Whether that name stands for the very file behind the descriptor."""
        try:
            named = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(descriptor))

    def holds(self, name: str, data: bytes) -> bool:
        """Whether a file of that name has exactly these bytes; if so, it is durable.

        A file that cannot be read or synced does not hold them.
        """
        try:
            descriptor, status, path = self._open_file(name)
            try:
                size = status.st_size
                if size != len(data) or _read_all(descriptor, size, path) != data:
                    return False
                # Whoever put it here need not have synced it yet, or at all.
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except (OSError, DamagedEntryError):
            return False
        self.sync()
        return True

    def put(self, name: str, data: bytes, *, temporary: Directory) -> None:
        """Give a name to these bytes: readers see what was there before or all of them, durably.

        They are written in `temporary`, on the same file system. On any failure nothing stays
        there, and the name means what it meant before, or the new bytes where only syncing failed.
        """
        with temporary._new_file() as (descriptor, temporary_name):
            _write_all(descriptor, data)
            os.fchmod(descriptor, FILE_MODE)
            os.fsync(descriptor)
            try:
                self._take(temporary_name, name, temporary)
            except IsADirectoryError:
                os.rmdir(name, dir_fd=self._descriptor)
                self._take(temporary_name, name, temporary)
            self.sync()

    def _take(self, source: str, name: str, directory: Directory) -> None:
        os.rename(source, name, src_dir_fd=directory._descriptor, dst_dir_fd=self._descriptor)

    def check_writable(self) -> None:
        """Raise OSError where no file can be made here; leaves none behind."""
        with self._new_file(keep=False):
            pass

    def sweep(self) -> None:
        """Remove the temporary files of writers that are gone; trouble with that is no trouble.

        A writer holds a kernel lock on its file as long as it lives, so a file whose lock is free
        has no writer: no clock and no process number is asked, which time changes and containers
        make wrong. A writer that finds its new file locked or gone met a sweeper and takes another
        name. Only where the file system has no locks age decides, by that file system's own clock;
        a time far in the future counts as old, so that a clock set back makes nothing immortal.
        """
        with suppress(OSError):
            for name in self.names():
                if _TEMPORARY_NAME.fullmatch(name):
                    with suppress(OSError):
                        self._sweep_one(name)

    def _sweep_one(self, name: str) -> None:
        descriptor = os.open(name, _OPEN_FILE, dir_fd=self._descriptor)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return
            locked = _try_lock(descriptor, fcntl.LOCK_SH)
            if locked is None:
                with self._new_file(keep=False) as (fresh, _):
                    age_s = os.fstat(fresh).st_mtime - status.st_mtime
                locked = abs(age_s) > STALE_AFTER_S
            if locked:
                os.unlink(name, dir_fd=self._descriptor)
        finally:
            os.close(descriptor)

    def _open_file(self, name: str) -> tuple[int, os.stat_result, str]:
        """Descriptor, status and path of a regular file that only we, or root, can have written."""
        path = f"{self.path}/{name}"
        try:
            descriptor = os.open(name, _OPEN_FILE, dir_fd=self._descriptor)
        except OSError as error:
            error.filename = path
            if error.errno == errno.ELOOP:
                raise DamagedEntryError(
                    f"{shown(path)} is a symbolic link, must be a regular file"
                ) from error
            if error.errno in (errno.ENXIO, errno.ENODEV):
                raise DamagedEntryError(f"{shown(path)} is not a regular file") from error
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedEntryError(f"{shown(path)} is not a regular file")
            _check_trust(path, status, root=self._root)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                error.filename = error.filename or path
            raise
        return descriptor, status, path

    @contextmanager
    def _new_file(self, *, keep: bool = True) -> Iterator[tuple[int, str]]:
        """A new file, locked where the file system can; removed on failure, or at once."""
        while True:
            name = os.urandom(16).hex()
            path = f"{self.path}/{name}"
            descriptor = _open(self._descriptor, name, _CREATE_FILE, path, mode=0o600)
            kept = False
            try:
                locked = _try_lock(descriptor, fcntl.LOCK_EX)
                if locked is not False and os.fstat(descriptor).st_nlink:
                    yield descriptor, name
                    kept = keep
                    return
            finally:
                if not kept:
                    with suppress(OSError):
                        os.unlink(name, dir_fd=self._descriptor)
                with suppress(OSError):
                    os.close(descriptor)


def _check_trust(path: str, status: os.stat_result, *, root: str) -> None:
    owner = status.st_uid
    if owner and owner != (us := os.geteuid()):
        raise UntrustedStoreError(
            f"{shown(path)} belongs to user {owner}, must belong to user {us} or to root",
            hint=command("chown", "-R", str(us), root),
        )
    if status.st_mode & _OTHERS_WRITE:
        raise UntrustedStoreError(
            f"{shown(path)} has mode {stat.S_IMODE(status.st_mode):04o}: "
            "others could change what is loaded",
            hint=command("chmod", "-R", "go-w", root),
        )


def _walk(path: str, *, create: bool) -> int:
    """A descriptor of the directory at an absolute path, every link on the way checked."""
    descriptor = os.open("/", _OPEN_ANY | os.O_DIRECTORY)
    here = "/"
    pending = [part for part in reversed(path.split("/")) if part]
    links = 0
    try:
        while pending:
            name = pending.pop()
            step = os.path.join(here, name)
            try:
                following = _open_directory(descriptor, name, step)
            except FileNotFoundError:
                if not create:
                    raise
                _make_directory(descriptor, name)
                following = _open_directory(descriptor, name, step)
            try:
                status = os.fstat(following)
                if stat.S_ISLNK(status.st_mode):
                    links += 1
                    target = _link_target(following, status, step, links)
                    pending.extend(part for part in reversed(target.split("/")) if part)
                    if target.startswith("/"):
                        pending.append("/")
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), step)
                descriptor, following = following, descriptor
                here = step
            finally:
                os.close(following)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _link_target(descriptor: int, status: os.stat_result, path: str, links: int) -> str:
    if links > MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedStoreError(
            f"{shown(path)} is a symbolic link of user {status.st_uid}, "
            f"must be one of user {os.geteuid()} or of root",
            hint=command("chown", "-h", str(os.geteuid()), path),
        )
    return os.readlink("", dir_fd=descriptor)


def _open(directory: int, name: str, flags: int, path: str, *, mode: int = 0) -> int:
    """os.open whose errors carry the whole path."""
    try:
        return os.open(name, flags, mode, dir_fd=directory)
    except OSError as error:
        error.filename = path
        raise


def _open_directory(directory: int, name: str, path: str) -> int:
    """A descriptor of the directory, or of whatever else has that name, for the caller to judge.

    An ordinary open comes first because it alone mounts what is mounted on demand; the other needs
    no permission to read and opens a link itself.
    """
    try:
        return os.open(name, _OPEN_DIRECTORY, dir_fd=directory)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EACCES):
            error.filename = path
            raise
    return _open(directory, name, _OPEN_ANY, path)


def _make_directory(parent: int, name: str) -> None:
    """Make a directory, durably, or leave it to the process that was faster."""
    with suppress(FileExistsError):
        os.mkdir(name, DIRECTORY_MODE, dir_fd=parent)
        # The umask may have taken our own bits, and a parent may have lent its set-group-ID bit.
        os.chmod(name, DIRECTORY_MODE, dir_fd=parent)
        with suppress(PermissionError):
            _sync_directory(parent, ".")


def _sync_directory(directory: int, name: str) -> None:
    descriptor = os.open(name, _OPEN_DIRECTORY, dir_fd=directory)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems in user space cannot sync a directory and say so with EINVAL.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, size: int, path: str) -> bytes:
    data = os.read(descriptor, size) if size else b""
    if len(data) == size:
        return data
    # A single read may take less.
    parts = [data]
    missing = size - len(data)
    while missing:
        part = os.read(descriptor, missing)
        if not part:
            raise DamagedEntryError(f"{shown(path)} ends {missing} bytes before its stated size")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _write_all(descriptor: int, data: bytes) -> None:
    """Write everything: a single write may take less, when the disk fills up or a signal comes."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _try_lock(descriptor: int, kind: int) -> bool | None:
    """Whether the kernel lock was free; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True
