"""The store: what was published is read back, and nothing else ever is."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from children import in_child
from llbf16_aot.artifact import Artifact, Blob
from llbf16_aot.errors import (
    InvalidArtifactError,
    StoreError,
    UntrustedStoreError,
    UsageError,
)
from llbf16_aot.files import Directory
from llbf16_aot.problem import DType
from llbf16_aot.store import Miss, MissReason, Store
from support import artifact_for, files_below, fixture_cubin, flipped, make_artifact, make_key

ABSENT = "0" * 64


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def artifact() -> Artifact:
    return make_artifact()


def ref_path(store: Store, artifact: Artifact) -> Path:
    digest = artifact.digest
    return store.root / "v1" / "refs" / digest[:2] / digest


def record_path(store: Store, artifact: Artifact) -> Path:
    digest = Blob.of(artifact.record.encode()).digest
    return store.root / "v1" / "blobs" / "sha256" / digest[:2] / digest


def cubin_path(store: Store, artifact: Artifact) -> Path:
    return store.cubin_path(artifact.record)


PARTS = {"ref": ref_path, "record": record_path, "cubin": cubin_path}


def overwrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(0o444)


def miss(found: Artifact | Miss) -> Miss:
    assert isinstance(found, Miss)
    return found


def test_published_artifacts_are_read_back(store: Store) -> None:
    """Bug: bytes, launch record or provenance change on the way through the store."""
    artifacts = [
        make_artifact(tokens=1),
        make_artifact(tokens=2),
        make_artifact(backend="splitk"),
        make_artifact(backend="splitk", target="sm_100f"),
        make_artifact(out_dtype=DType.BF16, pdl=False),
    ]
    for artifact in artifacts:
        store.publish(artifact)
    assert [store.get(artifact.digest) for artifact in artifacts] == artifacts
    assert store.digests() == tuple(sorted(artifact.digest for artifact in artifacts))


def test_layout_is_the_documented_one(store: Store, artifact: Artifact) -> None:
    """Bug: another version of this package, or cuobjdump, does not find what lies in the store."""
    store.publish(artifact)
    record = artifact.record.encode()
    named = Blob.of(record)
    assert files_below(store.root) == {
        "CACHEDIR.TAG": (store.root / "CACHEDIR.TAG").read_bytes(),
        f"v1/refs/{artifact.digest[:2]}/{artifact.digest}": (
            f"sha256:{named.digest} {named.size_bytes}\n".encode()
        ),
        f"v1/blobs/sha256/{named.digest[:2]}/{named.digest}": record,
        str(cubin_path(store, artifact).relative_to(store.root)): artifact.cubin,
        "v1/locks/gate.lock": b"",
        "v1/locks/store.lock": b"",
    }
    tag = (store.root / "CACHEDIR.TAG").read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")
    assert store.usage() == sum(
        len(data) for name, data in files_below(store.root).items() if name.startswith("v1/")
    )


def test_reading_what_is_not_there_writes_nothing(store: Store, tmp_path: Path) -> None:
    """Bug: every process that only looks makes a directory, thousands at once on one server."""
    assert miss(store.get(ABSENT)).reason is MissReason.ABSENT
    assert str(store.root) in miss(store.get(ABSENT)).detail
    assert store.digests() == ()
    assert store.usage() == 0
    assert os.listdir(tmp_path) == []


def test_reading_an_entry_changes_no_file(store: Store, artifact: Artifact) -> None:
    """Bug: a read takes a lock, touches a time or leaves a file."""
    store.publish(artifact)
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    store.get(artifact.digest)
    store.get(ABSENT)
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*")} == before


@pytest.mark.parametrize(
    "digest", ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "../" + "0" * 61, "0" * 63 + "\n"]
)
def test_digests_of_other_forms_are_usage_errors(store: Store, digest: str) -> None:
    """Bug: a name that a caller made up leads out of the store."""
    with pytest.raises(UsageError):
        store.get(digest)
    with pytest.raises(UsageError), store.key_lock(digest, timeout_s=0):
        pass


@pytest.mark.parametrize("part", PARTS)
def test_every_flipped_byte_is_a_miss(store: Store, artifact: Artifact, part: str) -> None:
    """Bug: a byte that no digest covers. The control is that the sound entry is a hit."""
    store.publish(artifact)
    assert store.get(artifact.digest) == artifact
    path = PARTS[part](store, artifact)
    sound = path.read_bytes()
    path.chmod(0o644)
    with path.open("r+b", buffering=0) as file:
        for offset, bad in flipped(sound, range(len(sound))):
            os.pwrite(file.fileno(), bad[offset : offset + 1], offset)
            assert miss(store.get(artifact.digest)).reason is MissReason.DAMAGED, offset
            os.pwrite(file.fileno(), sound[offset : offset + 1], offset)
    assert store.get(artifact.digest) == artifact


@pytest.mark.parametrize("part", PARTS)
def test_every_truncation_and_appended_byte_is_a_miss(
    store: Store, artifact: Artifact, part: str
) -> None:
    """Bug: size not checked: a file cut by a full disk, or grown, counts as whole."""
    store.publish(artifact)
    path = PARTS[part](store, artifact)
    sound = path.read_bytes()
    for added in range(1, 65):
        overwrite(path, sound + bytes(added))
        assert miss(store.get(artifact.digest)).reason is MissReason.DAMAGED
    overwrite(path, sound)
    path.chmod(0o644)
    for size in range(len(sound) - 1, -1, -1):
        os.truncate(path, size)
        assert miss(store.get(artifact.digest)).reason is MissReason.DAMAGED
    store.publish(artifact)
    assert store.get(artifact.digest) == artifact


def test_swapped_parts_of_valid_entries_are_misses(store: Store) -> None:
    """Bug: an entry put together from two valid ones runs one kernel for another's key."""
    entries = [
        make_artifact(),
        make_artifact(tokens=2),
        make_artifact(backend="splitk", target="sm_100a"),
        make_artifact(target="sm_103a"),
    ]
    for entry in entries:
        store.publish(entry)
    swapped = 0
    for place in PARTS.values():
        for one in entries:
            for other in entries:
                data = place(store, other).read_bytes()
                sound = place(store, one).read_bytes()
                if data == sound:
                    continue
                overwrite(place(store, one), data)
                assert miss(store.get(one.digest)).reason is MissReason.DAMAGED
                overwrite(place(store, one), sound)
                swapped += 1
    assert swapped > 30
    assert [store.get(entry.digest) for entry in entries] == entries


SOUND_REF = "sha256:{digest} {size}\n"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "\n",
        "sha256:{digest} {size}",
        "sha256:{digest} {size}\r\n",
        "sha256:{digest} {size}\n\n",
        "sha256:{digest}  {size}\n",
        " sha256:{digest} {size}\n",
        "sha256:{digest} 0{size}\n",
        "sha256:{digest} +{size}\n",
        "sha256:{digest} 0\n",
        "sha256:{digest} -1\n",
        "sha256:{digest} 9223372036854775808\n",
        "sha256:{digest} 18446744073709551616\n",
        "sha256:{upper} {size}\n",
        "sha512:{digest} {size}\n",
        "{digest} {size}\n",
        "sha256:{digest} \u0661\n",
        "sha256:../../../../../../etc/passwd {size}\n",
    ],
)
def test_refs_of_any_other_form_are_misses(store: Store, artifact: Artifact, line: str) -> None:
    """Bug: two texts name one entry, or a number in a ref makes the reader take memory."""
    store.publish(artifact)
    named = Blob.of(artifact.record.encode())

    def ref(text: str) -> bytes:
        return text.format(
            digest=named.digest, upper=named.digest.upper(), size=named.size_bytes
        ).encode()

    assert ref_path(store, artifact).read_bytes() == ref(SOUND_REF)
    overwrite(ref_path(store, artifact), ref(line))
    assert miss(store.get(artifact.digest)).reason is MissReason.DAMAGED


def planted(store: Store, artifact: Artifact, data: bytes) -> Miss:
    """Get an entry whose ref and blobs are consistent, but whose record is these bytes."""
    named = Blob.of(data)
    blob = store.root / "v1" / "blobs" / "sha256" / named.digest[:2] / named.digest
    blob.parent.mkdir(mode=0o700, exist_ok=True)
    blob.write_bytes(data)
    overwrite(ref_path(store, artifact), f"sha256:{named.digest} {named.size_bytes}\n".encode())
    return miss(store.get(artifact.digest))


def test_a_cubin_that_does_not_fit_its_record_is_a_miss(store: Store, artifact: Artifact) -> None:
    """Bug: right digests vouch for a cubin of another target, symbol or parameter list."""
    store.publish(artifact)
    other = fixture_cubin("ptxas_sm_100a")
    text = b"no ELF at all"
    for data in (other, text):
        path = store.root / "v1" / "blobs" / "sha256" / Blob.of(data).digest[:2]
        path.mkdir(mode=0o700, exist_ok=True)
        (path / Blob.of(data).digest).write_bytes(data)
        record = msgspec.structs.replace(artifact.record, cubin=Blob.of(data))
        found = planted(store, artifact, record.encode())
        assert found.reason is MissReason.WRONG_CUBIN
        assert Blob.of(data).digest in found.detail
    launch = msgspec.structs.replace(artifact.record.launch, symbol="fixture_other")
    record = msgspec.structs.replace(artifact.record, launch=launch)
    assert planted(store, artifact, record.encode()).reason is MissReason.WRONG_CUBIN


def test_a_record_that_is_sound_but_not_this_one_is_a_miss(
    store: Store, artifact: Artifact
) -> None:
    """Bug: schema, canonical form or identity of a record are not checked."""
    store.publish(artifact)
    record = artifact.record
    sound = record.encode()
    cases = [
        msgspec.structs.replace(record, schema=2).encode(),
        msgspec.structs.replace(record, key=make_key(tokens=7)).encode(),
        msgspec.structs.replace(
            record, key=msgspec.structs.replace(record.key, target="sm_90b")
        ).encode(),
        sound + b"\n",
        sound.replace(b":", b": ", 1),
        sound.replace(b'"schema":1', b'"schema":1.0'),
        b"{}",
        b"[" * 100_000,
        b"\xff" * 10,
        msgspec.structs.replace(record, cubin=Blob("../x", 3)).encode(),
        msgspec.structs.replace(record, cubin=Blob(record.cubin.digest, 2**63)).encode(),
        msgspec.structs.replace(record, cubin=Blob(record.cubin.digest, -1)).encode(),
    ]
    for data in cases:
        assert data != sound
        assert planted(store, artifact, data).reason is MissReason.DAMAGED, data[:80]
    store.publish(artifact)
    assert store.get(artifact.digest) == artifact


def test_an_entry_that_comes_back_the_same_while_it_is_read_is_found(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruned behind the reader's look at the ref, and built again: the ref's text is the same."""
    store.publish(artifact)
    real = Directory.read
    happened: list[str] = []

    def read(self: Directory, name: str, **limits: Any) -> bytes:
        try:
            data = real(self, name, **limits)
        except FileNotFoundError:
            if happened == ["pruned"]:
                store.publish(artifact)
                happened.append("built")
            raise
        if not happened:
            for path in PARTS.values():
                path(store, artifact).unlink()
            happened.append("pruned")
        return data

    monkeypatch.setattr(Directory, "read", read)
    assert store.get(artifact.digest) == artifact
    assert happened == ["pruned", "built"]


def test_a_missing_blob_is_damage_and_not_absence(store: Store, artifact: Artifact) -> None:
    """Bug: `explain` says that nothing was built where a blob was deleted."""
    for part in (record_path, cubin_path):
        store.publish(artifact)
        path = part(store, artifact)
        path.unlink()
        found = miss(store.get(artifact.digest))
        assert found.reason is MissReason.DAMAGED
        assert str(path) in found.detail
        path.parent.rmdir()
        assert miss(store.get(artifact.digest)).reason is MissReason.DAMAGED


def test_unreadable_entries_are_misses_that_say_so(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: an I/O error of a file system stops a server, or is told as absence."""
    store.publish(artifact)

    def failing(*_: object, **__: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "read", failing)
    assert miss(store.get(artifact.digest)).reason is MissReason.UNREADABLE


def make_fifo(path: Path) -> None:
    os.mkfifo(path, 0o444)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        # Socket names are at most 108 bytes long, so it is made elsewhere.
        short = Path(f"/tmp/llbf16-{os.getpid()}.socket")
        bound.bind(str(short))
        os.chmod(short, 0o444)
        os.rename(short, path)


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o444, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("making a device needs root")


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)
    path.chmod(0o444)


def make_directory(path: Path) -> None:
    path.mkdir(0o700)


def make_empty(path: Path) -> None:
    path.touch(0o444)


def make_copy_link(path: Path) -> None:
    """A link that leads to exactly the right bytes."""
    path.symlink_to(f"{path}.moved")


def make_loop_link(path: Path) -> None:
    path.symlink_to(path.name)


ODD_KINDS: list[Callable[[Path], None]] = [
    make_fifo,
    make_socket,
    make_device,
    make_sparse,
    make_directory,
    make_empty,
    make_copy_link,
    make_loop_link,
]


def got(store: Store, digest: str) -> tuple[str, str]:
    """Reason and detail of a miss, got in a child that a hang would kill."""
    outcome = in_child(lambda: store.get(digest))
    assert outcome.signal != signal.SIGALRM, "the reader hangs"
    assert isinstance(outcome.value, Miss), outcome
    return outcome.value.reason.value, outcome.value.detail


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("plant", ODD_KINDS)
def test_odd_files_in_place_of_a_file_are_misses_and_heal(
    store: Store, artifact: Artifact, part: str, plant: Callable[[Path], None]
) -> None:
    """Bug: a FIFO hangs the server, a link is followed, a sparse file fills the memory."""
    store.publish(artifact)
    path = PARTS[part](store, artifact)
    path.rename(f"{path}.moved")
    plant(path)
    reason, detail = got(store, artifact.digest)
    assert reason == "damaged"
    assert str(path) in detail
    store.publish(artifact)
    assert store.get(artifact.digest) == artifact


@pytest.mark.parametrize("part", PARTS)
def test_a_hard_link_counts_by_its_bytes(store: Store, artifact: Artifact, part: str) -> None:
    """Bug: another file of this name is taken, or a layer made of hard links is refused."""
    store.publish(artifact)
    path = PARTS[part](store, artifact)
    os.link(path, f"{path}.twin")
    assert store.get(artifact.digest) == artifact
    path.unlink()
    os.link(store.root / "CACHEDIR.TAG", path)
    assert got(store, artifact.digest)[0] == "damaged"
    store.publish(artifact)
    assert store.get(artifact.digest) == artifact
    assert (store.root / "CACHEDIR.TAG").read_bytes().startswith(b"Signature")


FOLDERS = ["refs", "refs/{ref}", "blobs", "blobs/sha256", "blobs/sha256/{cubin}"]


def folder_path(store: Store, artifact: Artifact, name: str) -> Path:
    named = name.format(ref=artifact.digest[:2], cubin=artifact.record.cubin.digest[:2])
    return store.root / "v1" / named


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("plant", [make_fifo, make_socket, make_device, make_empty])
def test_odd_files_in_place_of_a_folder_are_misses_and_heal(
    store: Store, artifact: Artifact, name: str, plant: Callable[[Path], None]
) -> None:
    """Bug: a FIFO where a folder should be hangs the server, or stops every later build."""
    store.publish(artifact)
    path = folder_path(store, artifact, name)
    path.rename(store.root / "moved")
    plant(path)
    reason, detail = got(store, artifact.digest)
    assert reason == "damaged"
    assert str(path) in detail
    store.publish(artifact)
    assert store.get(artifact.digest) == artifact


@pytest.mark.parametrize("name", ["../v1", *FOLDERS])
def test_a_link_in_place_of_a_folder_is_refused(
    store: Store, artifact: Artifact, name: str
) -> None:
    """Bug: a link inside the store leads readers and writers out of it."""
    store.publish(artifact)
    path = Path(os.path.normpath(folder_path(store, artifact, name)))
    path.rename(store.root / "moved")
    path.symlink_to(store.root / "moved")
    with pytest.raises(UntrustedStoreError) as caught:
        store.get(artifact.digest)
    assert caught.value.hint == f"rm {path}"
    with pytest.raises(UntrustedStoreError):
        store.publish(artifact)
    path.unlink()
    store.publish(artifact)
    assert store.get(artifact.digest) == artifact


def test_a_full_directory_in_the_way_is_named(store: Store, artifact: Artifact) -> None:
    """Bug: somebody's files are deleted, or the error does not say where they are."""
    store.publish(artifact)
    path = cubin_path(store, artifact)
    path.unlink()
    path.mkdir()
    (path / "precious").write_text("data")
    with pytest.raises(StoreError) as caught:
        store.publish(artifact)
    assert "not empty" in caught.value.message
    assert (path / "precious").read_text() == "data"
    assert os.listdir(store.root / "v1" / "tmp") == []


def test_damage_heals_with_the_next_publish(store: Store, artifact: Artifact) -> None:
    """Bug: existence counts as validity, and damaged bytes stay for good."""
    for part in PARTS.values():
        for data in (b"", b"x", part(store, artifact).name.encode()):
            store.publish(artifact)
            overwrite(part(store, artifact), data)
            store.publish(artifact)
            assert store.get(artifact.digest) == artifact


def test_identical_blobs_are_kept(store: Store) -> None:
    """Bug: each of a thousand refs writes the shared cubin again, under its readers."""
    one, other = make_artifact(tokens=1), make_artifact(tokens=2)
    store.publish(one)
    before = cubin_path(store, one).stat()
    store.publish(other)
    store.publish(one)
    after = cubin_path(store, one).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_newer_record_replaces_the_older_one(store: Store) -> None:
    """Bug: a stale entry wins over what the present toolchain made."""
    old = artifact_for(make_key(), toolchain={"nvidia-cutlass-dsl": "4.8.0"})
    new = artifact_for(make_key(), toolchain={"nvidia-cutlass-dsl": "4.8.1"})
    assert old.digest == new.digest
    store.publish(old)
    store.publish(new)
    assert store.get(new.digest) == new


def test_artifacts_that_reading_would_refuse_are_not_published(
    store: Store, artifact: Artifact
) -> None:
    """Bug: a build says ok and every load afterwards is a miss."""
    record = artifact.record
    bad = [
        Artifact(record, artifact.cubin + b"\0"),
        Artifact(record, b""),
        Artifact(
            msgspec.structs.replace(record, cubin=Blob.of(b"no ELF")),
            b"no ELF",
        ),
        Artifact(
            msgspec.structs.replace(
                record, launch=msgspec.structs.replace(record.launch, symbol="other")
            ),
            artifact.cubin,
        ),
        Artifact(msgspec.structs.replace(record, schema=7), artifact.cubin),
    ]
    for each in bad:
        with pytest.raises(InvalidArtifactError):
            store.publish(each)
    assert not store.root.exists()


def test_listing_ignores_what_is_no_ref(store: Store, artifact: Artifact) -> None:
    """Bug: temporary, hidden or foreign names are listed as artifacts."""
    store.publish(artifact)
    refs = store.root / "v1" / "refs"
    (refs / ".hidden").touch()
    (refs / "00").touch()
    (refs / "zz").mkdir()
    shard = refs / artifact.digest[:2]
    (shard / f"{artifact.digest}.tmp").touch()
    (shard / ("0" * 64)).touch() if artifact.digest[:2] != "00" else None
    (refs / "11").mkdir()
    (refs / "11" / ("1" * 63)).touch()
    assert store.digests() == (artifact.digest,)


def test_a_folder_with_other_files_does_not_become_a_store(
    tmp_path: Path, artifact: Artifact
) -> None:
    """Bug: `--store ~` marks a home as a cache, and backups leave it out."""
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        Store(tmp_path).publish(artifact)
    with pytest.raises(StoreError), Store(tmp_path).key_lock(artifact.digest, timeout_s=0):
        pass
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_other_versions_of_the_store_are_left_alone(store: Store, artifact: Artifact) -> None:
    """Bug: two releases of this package cannot share one root."""
    (store.root / "v2" / "refs").mkdir(parents=True)
    (store.root / "v2" / "refs" / "x").write_text("newer")
    store.publish(artifact)
    assert store.get(artifact.digest) == artifact
    assert (store.root / "v2" / "refs" / "x").read_text() == "newer"


def test_relative_and_impossible_roots_are_refused() -> None:
    """Bug: the store follows the working directory, or an exception of another kind comes."""
    with pytest.raises(UsageError, match="not absolute") as caught:
        Store(Path("some store"))
    assert caught.value.hint == f"write '{os.getcwd()}/some store'"
    with pytest.raises(UsageError, match="NUL"):
        Store(Path("/tmp/a\0b"))


@pytest.mark.parametrize("name", [b"\xff\xfe store", b"a" * 200, "größe".encode(), b"new\nline"])
def test_unusual_names_of_roots_work(tmp_path: Path, artifact: Artifact, name: bytes) -> None:
    """Bug: a message with the path cannot be printed or put into JSON."""
    store = Store(tmp_path / os.fsdecode(name))
    store.publish(artifact)
    assert store.get(artifact.digest) == artifact
    cubin_path(store, artifact).unlink()
    msgspec.json.encode(store.get(artifact.digest))
    store.root.chmod(0o777)
    with pytest.raises(UntrustedStoreError) as caught:
        store.get(artifact.digest)
    caught.value.message.encode()
    caught.value.hint.encode()


def test_a_path_longer_than_the_system_allows_is_a_store_error(
    tmp_path: Path, artifact: Artifact
) -> None:
    """Bug: an OSError comes out of the package."""
    store = Store(tmp_path / ("a" * 300))
    assert miss(store.get(artifact.digest)).reason is MissReason.UNREADABLE
    with pytest.raises(StoreError):
        store.publish(artifact)


def test_a_store_that_cannot_be_written_is_told_before_work_is_done(tmp_path: Path) -> None:
    """Bug: minutes of compiling end with artifacts that nobody can keep."""
    store = Store(tmp_path / "store")
    store.prepare()
    assert [path.name for path in (store.root / "v1" / "tmp").iterdir()] == []
    assert store.digests() == ()
    in_the_way = tmp_path / "file"
    in_the_way.write_text("mine")
    with pytest.raises(StoreError, match="cannot write the store"):
        Store(in_the_way / "store").prepare()
    proc = Store(Path("/proc/llbf16-aot"))
    with pytest.raises(StoreError):
        proc.prepare()


def test_a_root_that_is_a_file_is_a_store_error(tmp_path: Path, artifact: Artifact) -> None:
    """Bug: a file of the user is deleted because a folder is wanted there."""
    for name in ("root", "root/v1"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        store = Store(tmp_path / "root")
        assert miss(store.get(artifact.digest)).reason is MissReason.DAMAGED
        with pytest.raises(StoreError):
            store.publish(artifact)
        assert path.read_text() == "mine"
        path.unlink()


def test_details_are_one_line_that_names_what_was_found(store: Store, artifact: Artifact) -> None:
    """Bug: the message does not say which file is wrong and how."""
    store.publish(artifact)
    path = cubin_path(store, artifact)
    bad = bytes(len(artifact.cubin))
    overwrite(path, bad)
    detail = miss(store.get(artifact.digest)).detail
    assert re.fullmatch(rf"{re.escape(str(path))} has the digest {Blob.of(bad).digest}", detail)
    overwrite(path, bad[1:])
    detail = miss(store.get(artifact.digest)).detail
    assert detail == f"{path} has {len(bad) - 1} bytes, must have {len(bad)}"
