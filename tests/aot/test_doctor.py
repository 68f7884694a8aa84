"""The doctor tells what is there and what is wrong, and is broken by nothing that it finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from llbf16_aot import doctor
from llbf16_aot.doctor import Diagnosis, Finding, Mount, Status, diagnose, find_mount
from llbf16_aot.environment import Environment
from llbf16_aot.pins import pin
from llbf16_aot.store import Store
from support import make_artifact

MOUNTS = """\
22 1 254:1 / / rw,relatime - ext4 /dev/vda1 rw
30 22 0:25 / /tmp rw,nosuid - tmpfs tmpfs rw,size=1g
31 22 0:40 / /mnt/shared\\040disk rw shared:1 master:2 - nfs4 server:/export rw
32 22 0:41 / /data rw - ext4 /dev/vdb rw
33 32 0:42 / /data rw - overlay overlay rw
garbage
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/home/user/cache", Mount("/", "ext4")),
        ("/tmp", Mount("/tmp", "tmpfs")),
        ("/tmpfiles/x", Mount("/", "ext4")),
        ("/mnt/shared disk/store", Mount("/mnt/shared disk", "nfs4")),
        ("/data/store", Mount("/data", "overlay")),
    ],
)
def test_a_path_belongs_to_the_nearest_mount(path: str, mount: Mount) -> None:
    """Catches /tmpfiles taken for /tmp, escaped names, optional fields, and mounts over mounts."""
    assert find_mount(Path(path), MOUNTS) == mount


def of(diagnosis: Diagnosis, section: str, name: str) -> Finding:
    return next(f for f in diagnosis.findings if (f.section, f.name) == (section, name))


@pytest.fixture
def on_ext4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run on any file system: the real one must not decide whether there are warnings."""
    monkeypatch.setattr(doctor, "find_mount", lambda path, text: Mount("/", "ext4"))


@pytest.mark.usefixtures("on_ext4")
def test_a_store_that_does_not_exist_yet_is_no_fault(tmp_path: Path) -> None:
    """Catches a doctor that calls a fresh machine broken."""
    diagnosis = diagnose(tmp_path / "none", Environment({}))
    assert of(diagnosis, "store", "exists").value is False
    assert diagnosis.status is Status.OK


@pytest.mark.usefixtures("on_ext4")
def test_the_origin_of_the_store_setting_is_named(tmp_path: Path) -> None:
    """Catches the question `why does it look there?` without an answer."""
    environment = Environment({"LLBF16_AOT_STORE": str(tmp_path / "a"), "HOME": str(tmp_path)})
    assert "from LLBF16_AOT_STORE" in of(diagnose(None, environment), "store", "path").text
    explicit = of(diagnose(tmp_path / "b", environment), "store", "path")
    assert "from --store" in explicit.text
    assert explicit.value == str(tmp_path / "b")


@pytest.mark.usefixtures("on_ext4")
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_store_that_others_can_write_is_broken(tmp_path: Path, mode: int) -> None:
    """Catches a store whose kernels another user can replace; the advice is a command."""
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(mode)
    diagnosis = diagnose(root, Environment({}))
    assert of(diagnosis, "store", "mode").value == f"{mode:04o}"
    finding = of(diagnosis, "store", "trusted")
    assert finding.status is Status.BROKEN
    assert "chmod" in finding.advice
    assert str(root) in finding.advice


@pytest.mark.usefixtures("on_ext4")
def test_a_file_in_place_of_the_store_is_broken(tmp_path: Path) -> None:
    """Catches a doctor that reports file system and space of what is no store."""
    root = tmp_path / "store"
    root.touch()
    diagnosis = diagnose(root, Environment({}))
    assert of(diagnosis, "store", "kind").status is Status.BROKEN
    assert diagnosis.status is Status.BROKEN


@pytest.mark.parametrize(
    ("kind", "word"), [("nfs4", "network"), ("fuse.sshfs", "network"), ("tmpfs", "memory")]
)
def test_network_and_memory_file_systems_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, word: str
) -> None:
    """Catches caches on a mount where locks fail, or that are gone after a restart, unnoticed."""
    monkeypatch.setattr(doctor, "find_mount", lambda path, text: Mount("/", kind))
    finding = of(diagnose(tmp_path, Environment({})), "store", "file system")
    assert finding.status is Status.WARNING
    assert word in finding.advice


@pytest.mark.usefixtures("on_ext4")
def test_low_space_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a disk that fills up in the middle of a build without a word before."""
    real = os.statvfs(tmp_path)
    low = os.statvfs_result((*real[:2], 1000, 1000, 1000, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: low)
    finding = of(diagnose(tmp_path, Environment({})), "store", "free space")
    assert finding.status is Status.WARNING
    assert finding.value == 1000 * real.f_frsize


@pytest.mark.usefixtures("on_ext4")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LLBF16_AOT_JOBS", "many"),
        ("LLBF16_AOT_COMPILE_TIMEOUT_S", "soon"),
        ("LLBF16_AOT_TUNING", "no-such-table"),
    ],
)
def test_a_setting_that_cannot_work_is_broken(tmp_path: Path, name: str, value: str) -> None:
    """Catches a doctor that says all is well while every build fails."""
    diagnosis = diagnose(tmp_path, Environment({name: value}))
    assert diagnosis.status is Status.BROKEN
    assert any(value in f.text for f in diagnosis.findings if f.status is Status.BROKEN)


@pytest.mark.usefixtures("on_ext4")
@pytest.mark.parametrize("text", ["/" + "x" * 300, "/x" * 4000])
def test_a_path_that_is_too_long_is_a_finding(text: str) -> None:
    """Catches a doctor that dies of the very setting that it was asked to look at."""
    diagnosis = diagnose(Path(text), Environment({"LLBF16_AOT_TUNING": text}))
    for finding in (of(diagnosis, "store", "exists"), of(diagnosis, "settings", "tuning table")):
        assert finding.status is Status.BROKEN
        assert "File name too long" in finding.text


@pytest.mark.usefixtures("on_ext4")
def test_layers_are_told_in_their_order_with_owner_mode_and_trust(tmp_path: Path) -> None:
    """Catches a layer that hides another, one that others can write, and one that is not there."""
    sound, open_to_all, gone = (tmp_path / name for name in ("sound", "open", "gone"))
    Store(sound).publish(make_artifact())
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    environment = Environment({"LLBF16_AOT_LAYERS": os.pathsep.join(map(str, (gone, open_to_all)))})
    diagnosis = diagnose(tmp_path / "store", environment)
    assert of(diagnosis, "layers", "order").value == ("store", str(gone), str(open_to_all))
    assert of(diagnosis, "layer 1", "exists").status is Status.WARNING
    untrusted = of(diagnosis, "layer 2", "trusted")
    assert (untrusted.status, untrusted.value) == (Status.BROKEN, False)
    assert "chmod" in untrusted.advice
    assert of(diagnosis, "layer 2", "mode").value == "0777"
    diagnosis = diagnose(tmp_path / "store", environment, layer_paths=[sound])
    assert of(diagnosis, "layers", "order").value == ("store", str(sound))
    assert of(diagnosis, "layer 1", "entries").value == 1
    assert of(diagnosis, "layer 1", "owner").value
    assert of(diagnosis, "layer 1", "trusted").value is True
    assert diagnosis.status is Status.OK


def test_a_layer_on_a_network_or_in_memory_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a warning for the store's file system only."""
    monkeypatch.setattr(doctor, "find_mount", lambda path, text: Mount("/mnt", "nfs4"))
    (tmp_path / "layer").mkdir()
    diagnosis = diagnose(tmp_path / "store", Environment({}), layer_paths=[tmp_path / "layer"])
    finding = of(diagnosis, "layer 1", "file system")
    assert (finding.status, finding.value) == (Status.WARNING, "nfs4")


def test_layers_that_make_no_sense_are_broken(tmp_path: Path) -> None:
    """Catches a diagnosis that ends at the first bad setting."""
    diagnosis = diagnose(tmp_path / "store", Environment({"LLBF16_AOT_LAYERS": "here"}))
    finding = of(diagnosis, "layers", "bad value")
    assert finding.status is Status.BROKEN
    assert "LLBF16_AOT_LAYERS" in finding.text


def test_pins_without_an_entry_are_told(tmp_path: Path) -> None:
    """Catches pins of kernels that no build makes any more, which nobody would notice."""
    store = Store(tmp_path / "store")
    artifact = make_artifact()
    store.publish(artifact)
    pin(store, [artifact.digest, "0" * 64])
    diagnosis = diagnose(store.root, Environment({}))
    assert of(diagnosis, "store", "pins").text == "2, 1 of them without an entry"
