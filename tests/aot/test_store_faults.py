"""The store under faults: entries whole or absent, typed errors, and the next publish heals."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from children import NOBODY, Child, Outcome, all_at_once, in_child
from llbf16_aot import files
from llbf16_aot.artifact import Artifact
from llbf16_aot.errors import (
    LockTimeoutError,
    StoreError,
    StoreFullError,
    StoreUnwritableError,
    UntrustedStoreError,
)
from llbf16_aot.store import Miss, MissReason, Store
from support import files_below, make_artifact

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")

SYSTEM_CALLS = ("open", "mkdir", "chmod", "fchmod", "write", "fsync", "rename", "close", "fstat")


@pytest.fixture
def artifact() -> Artifact:
    return make_artifact()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def temporary_files(store: Store) -> list[str]:
    folder = store.root / "v1" / "tmp"
    return os.listdir(folder) if folder.exists() else []


def run_tool(name: str, *arguments: str) -> None:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    subprocess.run([program, *arguments], check=True, capture_output=True)


def attempt(action: Callable[[], None]) -> StoreError | None:
    """The store error that an action ends with; any other exception fails the test."""
    try:
        action()
    except StoreError as error:
        return error
    return None


class AtCall:
    """Does something at the n-th system call that publishing makes, counted over all functions."""

    def __init__(self, number: int, action: Callable[[], None]) -> None:
        self.count = 0
        self._number = number
        self._action = action

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in SYSTEM_CALLS:
            patch.setattr(os, name, self._wrapped(getattr(os, name), name))

    def _wrapped(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            self.count += 1
            if self.count == self._number:
                if name == "close":
                    # Like the system, which gives the descriptor back whatever close reports.
                    real(*args, **keywords)
                self._action()
            return real(*args, **keywords)

        return call


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def without_syncing(patch: pytest.MonkeyPatch) -> None:
    """A disk's speed is not what these tests are about."""
    patch.setattr(os, "fsync", lambda descriptor: os.fstat(descriptor))


def publish_and_die(store: Store, artifact: Artifact, number: int) -> Outcome:
    def publish() -> int:
        with pytest.MonkeyPatch.context() as patch:
            without_syncing(patch)
            at_call = AtCall(number, kill_self)
            at_call.install(patch)
            store.publish(artifact)
        return at_call.count

    return in_child(publish)


def kill_everywhere(tmp_path: Path, old: Artifact, new: Artifact) -> list[str]:
    """Kill a publisher at every call in turn; what was wrong afterwards, as text."""
    wrong: list[str] = []
    store = Store(tmp_path / "store")
    number, done = 0, False
    while not done:
        number += 1
        shutil.rmtree(store.root, ignore_errors=True)
        # Two rounds of three find an empty root, the third an older entry of the same key.
        before: Artifact | None = None
        if number % 3 == 0:
            store.publish(old)
            before = old
        outcome = publish_and_die(store, new, number)
        done = outcome.signal != signal.SIGKILL
        found = store.get(new.digest)
        if isinstance(found, Miss):
            if found.reason is not MissReason.ABSENT or before is not None:
                wrong.append(f"call {number}: {found}")
        elif found not in (before, new):
            wrong.append(f"call {number}: another artifact")
        store.publish(new)
        if store.get(new.digest) != new:
            wrong.append(f"call {number}: not healed")
        if temporary_files(store):
            wrong.append(f"call {number}: left {temporary_files(store)}")
    assert outcome.value is not None, outcome
    assert number > 40, "the calls of a publish were not counted"
    return wrong


def test_a_publisher_killed_at_any_call_leaves_the_entry_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a builder that the kernel killed for memory leaves half an entry, or litter for ever."""
    without_syncing(monkeypatch)
    old = make_artifact(target="sm_90a")
    new = Artifact(
        old.record.__class__.decode(old.record.encode().replace(b'"0.1.0"', b'"0.2.0"')), old.cubin
    )
    assert old.digest == new.digest
    assert kill_everywhere(tmp_path, old, new) == []


def test_the_harness_finds_a_publish_that_writes_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with files written under their own name the same rounds must find damage."""

    def in_place(
        self: files.Directory, name: str, data: bytes, *, temporary: files.Directory
    ) -> None:
        path = f"{self.path}/{name}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for start in range(0, len(data), 50):
            os.write(descriptor, data[start : start + 50])
        os.close(descriptor)

    without_syncing(monkeypatch)
    monkeypatch.setattr(files.Directory, "put", in_place)
    artifact = make_artifact()
    assert any("damaged" in text for text in kill_everywhere(tmp_path, artifact, artifact))


ERRORS = {
    errno.EIO: StoreError,
    errno.ENOSPC: StoreFullError,
    errno.EDQUOT: StoreFullError,
    errno.EROFS: StoreUnwritableError,
    errno.EACCES: StoreUnwritableError,
    errno.EPERM: StoreUnwritableError,
    errno.EMFILE: StoreError,
    errno.ESTALE: StoreError,
}


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_an_error_of_any_call_is_typed_and_leaves_nothing(
    tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Bug: a raw OSError, "ok" without the entry, or temporary files after a full disk."""

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    store = Store(tmp_path / "store")
    call, reached, failures = 0, True, 0
    while reached:
        call += 1
        shutil.rmtree(store.root, ignore_errors=True)
        at_call = AtCall(call, fail)
        with monkeypatch.context() as patch:
            without_syncing(patch)
            at_call.install(patch)
            error = attempt(functools.partial(store.publish, artifact))
        if error is None:
            assert store.get(artifact.digest) == artifact, call
        else:
            failures += 1
            assert type(error) is ERRORS[number], (call, error)
            assert str(store.root) in error.message
        reached = at_call.count >= call
        assert temporary_files(store) == [], call
        with monkeypatch.context() as patch:
            without_syncing(patch)
            store.publish(artifact)
        assert store.get(artifact.digest) == artifact, call
    assert failures > 20


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE])
def test_an_error_of_any_call_while_reading_is_a_miss(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Bug: a reader raises OSError, or takes an entry that it could not check."""

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    store.publish(artifact)
    call, reached, misses = 0, True, 0
    while reached:
        call += 1
        at_call = AtCall(call, fail)
        with monkeypatch.context() as patch:
            at_call.install(patch)
            found = store.get(artifact.digest)
        if isinstance(found, Miss):
            misses += 1
            assert found.reason is MissReason.UNREADABLE, (call, found)
            assert found.detail.startswith("/")
        else:
            assert found == artifact
        reached = at_call.count >= call
    assert misses > 10
    assert store.get(artifact.digest) == artifact


def test_readers_and_writers_give_every_descriptor_back(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a server that loads a thousand kernels, or fails to, runs out of descriptors."""
    without_syncing(monkeypatch)

    def round_trip() -> None:
        store.publish(artifact)
        store.get(artifact.digest)
        store.get("0" * 64)
        store.digests()
        with store.key_lock(artifact.digest, timeout_s=0):
            pass
        ref = store.root / "v1" / "refs" / artifact.digest[:2] / artifact.digest
        ref.chmod(0o666)
        with pytest.raises(UntrustedStoreError):
            store.get(artifact.digest)

    round_trip()
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(50):
        round_trip()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_short_writes_are_continued(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a write that took only a part is taken for whole."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:100]))
    store.publish(artifact)
    assert store.get(artifact.digest) == artifact


class Event(NamedTuple):
    """What a publish asked of the file system: `sync`, `rename` to `path`, or `mkdir`."""

    kind: str
    path: str
    source: str = ""


def recorded(patch: pytest.MonkeyPatch, events: list[Event]) -> None:
    real_fsync, real_rename, real_mkdir = os.fsync, os.rename, os.mkdir

    def path_of(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def fsync(descriptor: int) -> None:
        events.append(Event("sync", path_of(descriptor)))
        real_fsync(descriptor)

    def rename(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        real_rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        events.append(
            Event("rename", f"{path_of(dst_dir_fd)}/{target}", f"{path_of(src_dir_fd)}/{source}")
        )

    def mkdir(name: str, mode: int, *, dir_fd: int) -> None:
        real_mkdir(name, mode, dir_fd=dir_fd)
        events.append(Event("mkdir", f"{path_of(dir_fd)}/{name}"))

    patch.setattr(os, "fsync", fsync)
    patch.setattr(os, "rename", rename)
    patch.setattr(os, "mkdir", mkdir)


def broken_promises(events: list[Event]) -> list[str]:
    """What a power loss at some moment could take although it was promised."""
    found: list[str] = []
    refs = [number for number, event in enumerate(events) if "/refs/" in event.path]
    commits = [number for number in refs if events[number].kind == "rename"]
    if len(commits) != 1:
        return [f"{len(commits)} refs were written"]
    (commit,) = commits

    def synced(path: str, start: int, end: int) -> bool:
        return Event("sync", path) in events[start:end]

    for number, event in enumerate(events):
        parent = os.path.dirname(event.path)
        if event.kind == "rename":
            if not synced(event.source, 0, number):
                found.append(f"bytes of {event.path} not synced before the rename")
            if number > commit:
                found.append(f"{event.path} written after the ref")
            end = len(events) if number == commit else commit
            if not synced(parent, number, end):
                found.append(f"name of {event.path} not synced")
        elif event.kind == "mkdir" and not synced(parent, number, commit):
            found.append(f"name of directory {event.path} not synced before the ref")
    return found


def test_everything_is_durable_before_the_ref_and_the_ref_before_the_return(
    tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: after a power loss an acknowledged entry is gone, or a ref names missing blobs."""
    events: list[Event] = []
    recorded(monkeypatch, events)
    Store(tmp_path / "a" / "b" / "store").publish(artifact)
    assert broken_promises(events) == []
    assert sum(event.kind == "mkdir" for event in events) >= 9
    events.clear()
    Store(tmp_path / "a" / "b" / "store").publish(make_artifact(tokens=2))
    assert broken_promises(events) == []


def test_a_blob_that_is_kept_is_synced_too(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a blob that another publisher wrote a moment ago, or `cp`, is lost under our ref."""
    store.publish(artifact)
    events: list[Event] = []
    recorded(monkeypatch, events)
    store.publish(make_artifact(tokens=2))
    path = str(store.cubin_path(artifact.record))
    assert Event("sync", path) in events
    assert Event("sync", os.path.dirname(path)) in events


def test_directories_that_another_publisher_just_made_are_synced(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the other one was not yet done syncing, and its directory takes our entry along."""
    store.publish(artifact)
    events: list[Event] = []
    recorded(monkeypatch, events)
    other = make_artifact(tokens=2)
    store.publish(other)
    ref = next(n for n, event in enumerate(events) if event.path.endswith(other.digest))
    synced = {event.path for event in events[:ref] if event.kind == "sync"}
    version = store.root / "v1"
    places = (version / "refs", version / "blobs" / "sha256", version / "blobs", version)
    assert synced >= {str(path) for path in (*places, store.root, store.root.parent)}


@pytest.mark.parametrize("skipped", ["files", "directories"])
def test_the_recorder_finds_missing_syncs(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, skipped: str
) -> None:
    """Control: with syncing off the same check must find broken promises."""
    events: list[Event] = []
    recorded(monkeypatch, events)
    recording = os.fsync

    def fsync(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if is_directory is not (skipped == "directories"):
            recording(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store.publish(artifact)
    assert broken_promises(events) != []


def test_the_recorder_finds_a_ref_that_comes_first() -> None:
    """Control: the same check must find blobs that are named before they are there."""
    events = [
        Event("sync", "/s/tmp/1"),
        Event("rename", "/s/refs/00/0", "/s/tmp/1"),
        Event("sync", "/s/refs/00"),
        Event("sync", "/s/tmp/2"),
        Event("rename", "/s/blobs/1", "/s/tmp/2"),
        Event("sync", "/s/blobs"),
    ]
    assert "/s/blobs/1 written after the ref" in broken_promises(events)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077, 0o777])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, artifact: Artifact, umask: int) -> None:
    """Bug: a store that others can write, or that its owner cannot, after an unusual umask."""
    store = Store(tmp_path / "new" / "store")
    (tmp_path / "new").mkdir()

    def publish() -> None:
        os.umask(umask)
        store.publish(artifact)
        with store.key_lock(artifact.digest, timeout_s=0):
            pass

    outcome = in_child(publish)
    assert outcome.error == "", outcome
    assert store.get(artifact.digest) == artifact
    for path in [store.root, *store.root.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_dir():
            assert mode == 0o700, path
        elif path.parent.name == "locks":
            assert mode & 0o077 == 0, path
        else:
            assert mode == 0o444, path


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system on a new folder, and takes it away at the end."""
    places: list[Path] = []

    def mount(*arguments: str, at: Path | None = None) -> Path:
        place = at or tmp_path / f"mount{len(places)}"
        place.mkdir(exist_ok=True)
        try:
            run_tool("mount", *arguments, str(place))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot mount here: {error.stderr.decode().strip()}")
        places.append(place)
        return place

    yield mount
    for place in reversed(places):
        run_tool("umount", str(place))


def test_a_full_disk_is_told_and_leaves_no_ref_and_no_temporary_file(
    mounted: Callable[..., Path], artifact: Artifact
) -> None:
    """Bug: half an entry on a full disk, or space lost to it for good."""
    full = 0
    for size in range(4096, 49_152, 4096):
        place = mounted("-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs")
        store = Store(place / "store")
        error = attempt(functools.partial(store.publish, artifact))
        if error is None:
            assert store.get(artifact.digest) == artifact
        else:
            full += 1
            assert isinstance(error, StoreFullError)
            assert "df -h" in error.hint
            assert store.digests() == ()
            assert isinstance(store.get(artifact.digest), Miss)
            assert temporary_files(store) == []
        run_tool("mount", "-o", "remount,size=1M", str(place))
        store.publish(artifact)
        assert store.get(artifact.digest) == artifact
    assert 0 < full < 11


def test_a_read_only_file_system_serves_hits_and_refuses_writes(
    tmp_path: Path, mounted: Callable[..., Path], artifact: Artifact
) -> None:
    """Bug: an image layer cannot be read because reading wants to lock or to write."""
    writable = Store(tmp_path / "store")
    writable.publish(artifact)
    place = mounted("--bind", str(writable.root))
    run_tool("mount", "-o", "remount,ro,bind", str(place))
    layer = Store(place)
    assert layer.get(artifact.digest) == artifact
    assert layer.digests() == (artifact.digest,)
    with pytest.raises(StoreUnwritableError):
        layer.publish(make_artifact(tokens=2))
    with layer.key_lock(artifact.digest, timeout_s=0) as held:
        assert held is False


@needs_root
@pytest.mark.parametrize("mode", [0o000, 0o400, 0o500, 0o300])
@pytest.mark.parametrize("name", [".", "v1", "v1/tmp", "v1/refs", "v1/blobs/sha256"])
def test_missing_permissions_are_typed(
    nobody_folder: Path, artifact: Artifact, name: str, mode: int
) -> None:
    """Bug: a PermissionError comes out, or "ok" without the entry."""
    store = Store(nobody_folder / "store")
    other = make_artifact(tokens=2)
    assert in_child(lambda: store.publish(artifact), uid=NOBODY).error == ""
    (store.root / name).chmod(mode)

    def read() -> object:
        found = store.get(artifact.digest)
        return found.reason.value if isinstance(found, Miss) else found == artifact

    assert in_child(read, uid=NOBODY).value in (True, "unreadable")
    outcome = in_child(lambda: store.publish(other), uid=NOBODY)
    (store.root / name).chmod(0o700)
    # A folder that cannot be written or listed does no harm where all that is needed lies in it.
    assert outcome.error in ("StoreUnwritableError", ""), outcome
    there = in_child(lambda: store.get(other.digest) == other, uid=NOBODY)
    assert there.value is (outcome.error == "")
    assert outcome.error or mode not in (0o000, 0o400)
    assert in_child(lambda: store.publish(other), uid=NOBODY).error == ""
    assert temporary_files(store) == []


def spoil_owner(path: str) -> Callable[[Path, Artifact], Path]:
    return lambda root, artifact: spoilt(root, artifact, path, lambda p: os.chown(p, 1234, 1234))


def spoil_mode(path: str, mode: int) -> Callable[[Path, Artifact], Path]:
    return lambda root, artifact: spoilt(root, artifact, path, lambda p: p.chmod(mode))


def spoilt(root: Path, artifact: Artifact, name: str, spoil: Callable[[Path], None]) -> Path:
    digest = artifact.digest
    cubin = Store(root).cubin_path(artifact.record).relative_to(root)
    spoil(root / name.format(ref=f"v1/refs/{digest[:2]}/{digest}", cubin=cubin))
    return root


def linked_root(root: Path, artifact: Artifact) -> Path:
    link = root.parent / "link"
    link.symlink_to(root)
    os.lchown(link, 1234, 1234)
    return link


def linked_parent(root: Path, artifact: Artifact) -> Path:
    link = root.parent / "link"
    link.symlink_to(root.parent)
    os.lchown(link, 1234, 1234)
    return link / root.name


def linked_relative(root: Path, artifact: Artifact) -> Path:
    link = root.parent / "deep" / "link"
    link.parent.mkdir()
    link.symlink_to(f"../{root.name}")
    os.lchown(link, 1234, 1234)
    return link


UNTRUSTED: dict[str, Callable[[Path, Artifact], Path]] = {
    "root world-writable": spoil_mode(".", 0o777),
    "root group-writable": spoil_mode(".", 0o770),
    "root world-writable and sticky": spoil_mode(".", 0o1777),
    "root of another user": spoil_owner("."),
    "version of another user": spoil_owner("v1"),
    "version group-writable": spoil_mode("v1", 0o775),
    "refs of another user": spoil_owner("v1/refs"),
    "refs world-writable": spoil_mode("v1/refs", 0o707),
    "blobs of another user": spoil_owner("v1/blobs"),
    "blobs group-writable": spoil_mode("v1/blobs/sha256", 0o770),
    "ref of another user": spoil_owner("{ref}"),
    "ref group-writable": spoil_mode("{ref}", 0o464),
    "ref world-writable": spoil_mode("{ref}", 0o446),
    "cubin of another user": spoil_owner("{cubin}"),
    "cubin group-writable": spoil_mode("{cubin}", 0o664),
    "cubin world-writable": spoil_mode("{cubin}", 0o646),
    "root linked by another user": linked_root,
    "parent linked by another user": linked_parent,
    "root linked by another user, relative": linked_relative,
}


@needs_root
@pytest.mark.parametrize("case", UNTRUSTED)
def test_what_others_could_have_written_is_refused_with_the_command_that_mends_it(
    nobody_folder: Path, artifact: Artifact, case: str
) -> None:
    """Bug: another user of the machine chooses what code our process loads."""
    root = nobody_folder / "store with space"
    published = in_child(lambda: Store(root).publish(artifact), uid=NOBODY)
    assert published.error == "", published
    path = UNTRUSTED[case](root, artifact)
    outcome = in_child(lambda: Store(path).get(artifact.digest), uid=NOBODY)
    assert outcome.error == "UntrustedStoreError", outcome
    subprocess.run(outcome.hint, shell=True, check=True)  # noqa: S602 - the hint is a command
    mended = in_child(lambda: Store(path).get(artifact.digest) == artifact, uid=NOBODY)
    assert mended.value is True, mended


@needs_root
@pytest.mark.parametrize("name", [".", "v1", "v1/refs", "v1/tmp", "v1/blobs/sha256"])
@pytest.mark.parametrize("spoil", [lambda p: p.chmod(0o777), lambda p: os.chown(p, 1234, 1234)])
def test_nothing_is_written_where_others_could_write(
    nobody_folder: Path, artifact: Artifact, name: str, spoil: Callable[[Path], None]
) -> None:
    """Bug: a publisher fills a folder that belongs to somebody else, and trusts it."""
    store = Store(nobody_folder / "store")
    assert in_child(lambda: store.publish(artifact), uid=NOBODY).error == ""
    spoil(store.root / name)
    before = files_below(store.root)
    other = make_artifact(tokens=2, target="sm_100a")
    outcome = in_child(lambda: store.publish(other), uid=NOBODY)
    assert outcome.error == "UntrustedStoreError", outcome
    assert len(files_below(store.root)) - len(before) <= 2
    assert other.digest not in store_names(store)


def store_names(store: Store) -> set[str]:
    return {os.path.basename(name) for name in files_below(store.root)}


def own_link(root: Path) -> Path:
    link = root.parent / "link"
    link.symlink_to(root)
    os.lchown(link, NOBODY, NOBODY)
    return link


def root_link(root: Path) -> Path:
    link = root.parent / "link"
    link.symlink_to(root.parent)
    return link / root.name


def writable_parent(root: Path) -> Path:
    root.parent.chmod(0o777)
    return root


def root_owned(root: Path) -> Path:
    run_tool("chown", "-R", "0:0", str(root))
    run_tool("chmod", "-R", "a+rX", str(root))
    return root


@needs_root
@pytest.mark.parametrize("arrange", [own_link, root_link, writable_parent, root_owned])
def test_ordinary_arrangements_are_trusted(
    nobody_folder: Path, artifact: Artifact, arrange: Callable[[Path], Path]
) -> None:
    """Bug: a cache on another disk, a volume of a container or an installed layer is refused."""
    root = nobody_folder / "store"
    assert in_child(lambda: Store(root).publish(artifact), uid=NOBODY).error == ""
    path = arrange(root)
    outcome = in_child(lambda: Store(path).get(artifact.digest) == artifact, uid=NOBODY)
    assert outcome.value is True, outcome
    published = in_child(lambda: Store(path).publish(make_artifact(tokens=2)), uid=NOBODY)
    assert published.error == ("StoreUnwritableError" if arrange is root_owned else "")


def test_links_in_a_circle_end(tmp_path: Path, artifact: Artifact) -> None:
    """Bug: the walk to the root follows a loop of links for ever."""
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    store = Store(tmp_path / "a" / "store")
    outcome = in_child(lambda: store.get(artifact.digest))
    assert isinstance(outcome.value, Miss), outcome
    assert outcome.value.reason is MissReason.UNREADABLE
    assert in_child(lambda: store.publish(artifact)).error == "UntrustedStoreError"


def test_publishers_of_one_key_do_not_disturb_each_other(store: Store, artifact: Artifact) -> None:
    """Bug: one of eight cold processes fails because another made a directory or file first."""

    def publish() -> bool:
        store.publish(artifact)
        return store.get(artifact.digest) == artifact

    outcomes = all_at_once([publish] * 8)
    assert [outcome.value for outcome in outcomes] == [True] * 8, outcomes
    assert temporary_files(store) == []


def test_publishers_of_many_keys_all_succeed(store: Store) -> None:
    """Bug: a shared cubin or a sweep of temporary files makes a publisher fail."""
    artifacts = [make_artifact(tokens=count) for count in range(1, 9)]

    def publisher(first: int) -> Callable[[], None]:
        def publish() -> None:
            for number in range(8):
                store.publish(artifacts[(first + number) % 8])

        return publish

    outcomes = all_at_once([publisher(first) for first in range(8)])
    assert [outcome.error for outcome in outcomes] == [""] * 8, outcomes
    assert [store.get(each.digest) for each in artifacts] == artifacts
    assert temporary_files(store) == []


def test_one_of_many_builders_compiles(tmp_path: Path, artifact: Artifact) -> None:
    """Bug: thirty cold ranks compile the same kernel thirty times."""
    store = Store(tmp_path / "store")
    log = tmp_path / "log"

    def build() -> bool:
        with store.key_lock(artifact.digest, timeout_s=20) as held:
            if isinstance(store.get(artifact.digest), Miss):
                with log.open("a") as file:
                    file.write("compiled\n")
                store.publish(artifact)
        return held

    outcomes = all_at_once([build] * 8)
    assert [outcome.value for outcome in outcomes] == [True] * 8, outcomes
    assert log.read_text() == "compiled\n"
    assert store.get(artifact.digest) == artifact


def test_a_lock_that_another_process_holds_times_out_by_name(
    store: Store, artifact: Artifact
) -> None:
    """Bug: a waiter waits for ever, or does not say for what."""

    def wait() -> None:
        with store.key_lock(artifact.digest, timeout_s=0):
            pass

    with store.key_lock(artifact.digest, timeout_s=0) as held:
        assert held
        outcome = in_child(wait)
        other = in_child(lambda: store.key_lock("1" * 64, timeout_s=0).__enter__())
    assert outcome.error == LockTimeoutError.__name__
    assert str(store.root / "v1" / "locks" / artifact.digest) in outcome.message
    assert other.value is True
    assert in_child(wait).error == ""


def test_a_lock_is_free_when_its_holder_was_killed(store: Store, artifact: Artifact) -> None:
    """Bug: the lock is a file, and a killed builder blocks all others for good."""

    def hold_and_die() -> None:
        store.key_lock(artifact.digest, timeout_s=0).__enter__()
        kill_self()

    assert in_child(hold_and_die).signal == signal.SIGKILL
    with store.key_lock(artifact.digest, timeout_s=0) as held:
        assert held


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_kernel_locks_work_goes_on(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Bug: a file system without locks stops the build, or a lock file outlives its holder."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with store.key_lock(artifact.digest, timeout_s=0) as held:
        assert held is False
        with store.key_lock(artifact.digest, timeout_s=0) as again:
            assert again is False
        store.publish(artifact)
    assert store.get(artifact.digest) == artifact
    assert temporary_files(store) == []


def test_errors_of_the_body_come_out_of_a_lock(store: Store, artifact: Artifact) -> None:
    """Bug: a failed compile inside the lock is swallowed, or the lock stays taken."""
    with (
        pytest.raises(OSError, match="from the body"),
        store.key_lock(artifact.digest, timeout_s=0),
    ):
        raise OSError("from the body")
    assert in_child(lambda: store.key_lock(artifact.digest, timeout_s=0).__enter__()).value is True


def plant_temporary(store: Store, name: str, *, age_s: float = 0) -> Path:
    path = store.root / "v1" / "tmp" / name
    path.write_bytes(b"half")
    now = path.stat().st_mtime
    os.utime(path, (now - age_s, now - age_s))
    return path


TEN_YEARS_S = 10 * 365 * 86_400


@pytest.mark.parametrize("age_s", [0, TEN_YEARS_S, -TEN_YEARS_S])
def test_files_of_dead_writers_are_swept_whatever_the_clock_says(
    store: Store, artifact: Artifact, age_s: float
) -> None:
    """Bug: a clock that was wrong once makes litter immortal."""
    store.publish(artifact)
    dead = plant_temporary(store, "0" * 32, age_s=age_s)
    foreign = plant_temporary(store, "notes.txt", age_s=age_s)
    store.publish(make_artifact(tokens=2))
    assert not dead.exists()
    assert foreign.exists()


@pytest.mark.parametrize("age_s", [0, TEN_YEARS_S, -TEN_YEARS_S])
def test_files_of_living_writers_are_kept_whatever_the_clock_says(
    store: Store, artifact: Artifact, age_s: float
) -> None:
    """Bug: a slow writer, or one in another container, loses its file to a sweeper."""
    store.publish(artifact)
    path = plant_temporary(store, "0" * 32, age_s=age_s)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert in_child(lambda: store.publish(make_artifact(tokens=2))).error == ""
        assert path.exists()


@pytest.mark.parametrize(
    ("age_s", "kept"),
    [(0, True), (600, True), (7200, False), (TEN_YEARS_S, False), (-TEN_YEARS_S, False)],
)
def test_without_kernel_locks_age_decides(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, age_s: float, kept: bool
) -> None:
    """Bug: on a file system without locks everything is swept, or nothing ever."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    store.publish(artifact)
    path = plant_temporary(store, "0" * 32, age_s=age_s)
    monkeypatch.setattr(fcntl, "flock", flock)
    store.publish(make_artifact(tokens=2))
    assert path.exists() is kept
    assert len(temporary_files(store)) == kept


@pytest.mark.parametrize("moment", ["locked", "removed"])
def test_a_writer_that_meets_a_sweeper_takes_another_name(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Bug: between making and locking its file a writer looks dead, and then loses its bytes."""
    store.publish(artifact)
    real = fcntl.flock
    met: list[str] = []

    def flock(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and not met:
            met.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            if moment == "locked":
                raise BlockingIOError(errno.EWOULDBLOCK, "held by a sweeper")
            os.unlink(met[0])
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    other = make_artifact(tokens=2)
    store.publish(other)
    assert met
    assert store.get(other.digest) == other
    assert temporary_files(store) == []


def test_trouble_with_cleaning_up_is_no_trouble(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: EBUSY for a stale file fails a build whose entry is already there."""
    store.publish(artifact)
    plant_temporary(store, "0" * 32)

    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    for name in ("unlink", "listdir"):
        monkeypatch.setattr(os, name, busy)
        other = make_artifact(tokens=len(name))
        store.publish(other)
        assert store.get(other.digest) == other


def test_a_failed_clean_up_does_not_hide_the_cause(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the user reads EBUSY where the disk is full."""

    def failing(number: int) -> Callable[..., None]:
        def call(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        return call

    monkeypatch.setattr(os, "unlink", failing(errno.EBUSY))
    monkeypatch.setattr(os, "write", failing(errno.ENOSPC))
    with pytest.raises(StoreFullError):
        store.publish(artifact)


def test_readers_see_the_old_or_the_new_entry_while_a_writer_replaces_it(
    store: Store, artifact: Artifact
) -> None:
    """Bug: files are changed in place, and a reader at the wrong moment finds a mixture."""
    newer = Artifact(
        type(artifact.record).decode(
            artifact.record.encode().replace(b'"builder_version":"0.1.0"', b'"builder_version":"2"')
        ),
        artifact.cubin,
    )
    store.publish(artifact)

    def write() -> None:
        for _ in range(20):
            store.publish(newer)
            store.publish(artifact)

    writer = Child(write)
    seen = [store.get(artifact.digest) for _ in range(200)]
    assert writer.join().error == ""
    assert [found for found in seen if found not in (artifact, newer)] == []
