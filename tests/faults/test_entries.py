"""I1 and I5: entries whose bytes are those that some digest promises, and wrong all the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from faults import bugs
from faults.harness import check_healed, numbered
from faults.tally import Tally
from llbf16_aot import layout
from llbf16_aot import store as store_module
from llbf16_aot.artifact import Artifact, Blob, Record
from llbf16_aot.errors import DamagedEntryError
from llbf16_aot.store import Miss, MissReason, Store
from support import fixture_cubin, make_artifact


def one_byte_edits(line: bytes, step: int) -> Iterator[tuple[str, bytes]]:
    """Every byte changed to every other, removed, and every byte put in between everywhere."""
    number = 0
    for place in range(len(line) + 1):
        if place < len(line):
            yield f"removed {place}", line[:place] + line[place + 1 :]
        for byte in range(256):
            number += 1
            if number % step:
                continue
            one = bytes([byte])
            if place < len(line) and line[place] != byte:
                yield f"changed {place} to {byte}", line[:place] + one + line[place + 1 :]
            longer = line[:place] + one + line[place:]
            yield f"put {byte} before {place}", longer


def edited_refs(tally: Tally, store: Store, step: int) -> None:
    artifact = numbered(0)
    store.publish(artifact)
    store.publish(numbered(1))
    path = store.root / "v1" / "refs" / artifact.digest[:2] / artifact.digest
    line = path.read_bytes()
    path.chmod(0o644)
    with path.open("r+b", buffering=0) as file:
        for where, edited in one_byte_edits(line, step):
            os.pwrite(file.fileno(), edited, 0)
            os.ftruncate(file.fileno(), len(edited))
            tally.tried += 1
            try:
                found = store.get(artifact.digest)
            except Exception as error:
                tally.wrong.append(f"{where}: {error!r}")
                continue
            if not isinstance(found, Miss) or found.reason is not MissReason.DAMAGED:
                tally.wrong.append(f"{where}: {found!r}")
    check_healed(tally, store, artifact, "after all edits")


@pytest.mark.fault("I1")
def test_every_one_byte_edit_of_a_ref_is_a_miss(
    tally: Tally, fast_folder: Path, pick: Callable[[int, int], int]
) -> None:
    """Bug: two texts name one record, or an edit leads to another one's."""
    edited_refs(tally, Store(fast_folder / "store"), pick(7, 1))
    tally.clean(at_least=pick(5_000, 35_000))


@pytest.mark.fault("I1", control=True)
def test_edits_find_a_lenient_ref(
    tally: Tally, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a reader that takes white space and leading zeros must be found."""

    def decode(line: bytes, path: str) -> Blob:
        try:
            name, size = line.decode().removeprefix("sha256:").split()
            return Blob(name, int(size))
        except ValueError as error:
            raise DamagedEntryError(f"{path}: {error}") from error

    for module in (layout, store_module):
        monkeypatch.setattr(module, "decode_ref", decode)
    edited_refs(tally, Store(fast_folder / "store"), 7)
    tally.found()


def plant(store: Store, record: Record, cubin: bytes) -> str:
    """Put an entry into a store behind its back, with every digest right; its digest."""
    artifact = make_artifact()
    store.publish(artifact)
    record = msgspec.structs.replace(record, cubin=Blob.of(cubin))
    encoded = record.encode()
    for data in (cubin, encoded):
        blob = Blob.of(data)
        folder = store.root / "v1" / "blobs" / "sha256" / blob.digest[:2]
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / blob.digest).write_bytes(data)
        (folder / blob.digest).chmod(0o444)
    digest = record.digest
    ref = store.root / "v1" / "refs" / digest[:2] / digest
    ref.parent.mkdir(mode=0o700, exist_ok=True)
    ref.unlink(missing_ok=True)
    named = Blob.of(encoded)
    ref.write_bytes(f"sha256:{named.digest} {named.size_bytes}\n".encode())
    ref.chmod(0o444)
    return digest


def wrong_entries() -> Iterator[tuple[str, Record, bytes]]:
    """A name, a record, and a cubin that does not fit it."""
    from test_elf import CRAFTED

    record = make_artifact().record
    sound = fixture_cubin("ptxas_sm_90a")
    for name, (craft, _) in CRAFTED.items():
        if data := craft(sound):
            yield name, record, data
    for name in ("ptxas_sm_90", "ptxas_sm_100a", "ptxas_sm_100f", "ptxas_sm_120a", "dsl_sm_90a"):
        yield f"cubin {name}", record, fixture_cubin(name)
    launch = record.launch
    yield "other symbol", with_launch(record, symbol="fixture_none"), sound
    yield "symbol of the other kernel", with_launch(record, symbol="fixture_splitk"), sound
    yield "fewer parameters", with_launch(record, params=launch.params[:-1]), sound
    first = launch.params[0]
    for size in (first.size_bytes // 2, first.size_bytes * 2):
        params = (msgspec.structs.replace(first, size_bytes=size), *launch.params[1:])
        yield f"first parameter of {size} bytes", with_launch(record, params=params), sound
    for name, data in (("text", b"hello"), ("a script", b"#!/bin/sh\n"), ("zeros", bytes(4096))):
        yield name, record, data


def with_launch(record: Record, **changes: object) -> Record:
    return msgspec.structs.replace(record, launch=msgspec.structs.replace(record.launch, **changes))


def wrong_cubins(tally: Tally, store: Store) -> None:
    artifact = make_artifact()
    for name, record, cubin in wrong_entries():
        digest = plant(store, record, cubin)
        tally.tried += 1
        try:
            found: Artifact | Miss = store.get(digest)
        except Exception as error:
            tally.wrong.append(f"{name}: {error!r}")
            continue
        if not isinstance(found, Miss):
            tally.wrong.append(f"{name}: handed out")
        elif found.reason not in (MissReason.WRONG_CUBIN, MissReason.DAMAGED) or not found.detail:
            tally.wrong.append(f"{name}: {found!r}")
        check_healed(tally, store, artifact, name)


@pytest.mark.fault("I5")
def test_an_entry_with_right_digests_and_a_wrong_cubin_is_refused_before_any_launch(
    tally: Tally, fast_folder: Path
) -> None:
    """Bug: the driver gets bytes that hang it, or a launch reads parameters that are not there."""
    wrong_cubins(tally, Store(fast_folder / "store"))
    tally.clean(at_least=40)


@pytest.mark.fault("I5", control=True)
def test_crafted_cubins_find_a_reader_that_checks_digests_alone(
    tally: Tally, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without the check of the ELF crafted cubins must come through."""
    bugs.no_cubin_check(monkeypatch)
    wrong_cubins(tally, Store(fast_folder / "store"))
    tally.found()
