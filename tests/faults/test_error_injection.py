"""C3 in one process: each call of the system that the store makes fails, with each error."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import bugs
from faults.calls import FUNCTIONS, AtCall, fail_with
from faults.harness import ERRNOS, check_entry, check_healed, numbered, replaced
from faults.tally import Tally
from llbf16_aot.artifact import Artifact
from llbf16_aot.errors import AotError, StoreError
from llbf16_aot.scan import scan
from llbf16_aot.store import Miss, MissReason, Store

OLD = numbered(0)
NEW = replaced(OLD, "9.9.9")
OTHER = numbered(1)


def ref_of(store: Store, artifact: Artifact) -> Path:
    return store.root / "v1" / "refs" / artifact.digest[:2] / artifact.digest


def damage_cubin(store: Store) -> None:
    path = store.cubin_path(OLD.record)
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    path.chmod(0o444)


def cold(store: Store) -> Artifact | None:
    return None


def warm(store: Store) -> Artifact | None:
    store.publish(OTHER)
    return None


def older(store: Store) -> Artifact | None:
    store.publish(OLD)
    return OLD


def litter(store: Store) -> Artifact | None:
    store.publish(OTHER)
    (store.root / "v1" / "tmp" / ("0" * 32)).write_bytes(b"half")
    return None


def folder_in_the_way(store: Store) -> Artifact | None:
    store.publish(OTHER)
    ref_of(store, NEW).parent.mkdir(mode=0o700, exist_ok=True)
    ref_of(store, NEW).mkdir()
    return None


STATES = [cold, warm, older, litter, folder_in_the_way]


def publish_with(store: Store, action: Callable[[], None], number: int) -> tuple[str, AtCall]:
    """What became of a publish, by the name of its error, and how far it came."""
    at_call = AtCall(number, action)
    with pytest.MonkeyPatch.context() as patch:
        at_call.install(patch)
        try:
            store.publish(NEW)
        except StoreError as error:
            outcome = error.code if str(store.root) in error.message else f"no path: {error}"
        except Exception as error:
            outcome = f"raw {type(error).__name__}: {error}"
        else:
            outcome = "ok"
    return outcome, at_call


def every_call_of_a_publish(
    tally: Tally, folder: Path, name: str, prepare: Callable[[Store], Artifact | None]
) -> None:
    number, done = 0, False
    while not done:
        number += 1
        store = Store(folder / "store")
        shutil.rmtree(store.root, ignore_errors=True)
        before = prepare(store)
        outcome, at_call = publish_with(store, fail_with(name), number)
        where = f"{name} at call {number} ({at_call.reached}), {prepare.__name__}: {outcome}"
        done = not at_call.reached
        tally.tried += not done
        if outcome == "ok":
            if store.get(NEW.digest) != NEW:
                tally.lost.append(where)
        elif outcome.startswith(("raw", "no path")):
            tally.wrong.append(where)
        elif prepare is not folder_in_the_way:
            check_entry(tally, store, NEW, before, where)
        check_healed(tally, store, NEW, where)


@pytest.mark.fault("C3")
@pytest.mark.parametrize("prepare", STATES)
@pytest.mark.parametrize("name", ERRNOS)
def test_a_publish_with_a_failing_call_is_ok_or_typed_and_heals(
    tally: Tally, fast_folder: Path, name: str, prepare: Callable[[Store], Artifact | None]
) -> None:
    """Bug: a raw OSError, "ok" without the entry, damage or litter that stays."""
    every_call_of_a_publish(tally, fast_folder, name, prepare)
    tally.clean(at_least=40)


@pytest.mark.fault("C3", control=True)
@pytest.mark.parametrize(
    "plant",
    [bugs.hides_failures, bugs.raw_errors, bugs.writes_in_place],
    ids=lambda plant: plant.__name__,
)
def test_the_sweep_over_a_publish_finds(
    tally: Tally,
    fast_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Control: failures hidden, raw or half done must be found."""
    plant(monkeypatch)
    every_call_of_a_publish(tally, fast_folder, "ENOSPC", warm)
    tally.found()


@pytest.mark.parametrize("function", ["listdir", "scandir"])
@pytest.mark.parametrize("action", [Store.digests, scan])
def test_an_error_that_names_a_descriptor_by_its_number_is_typed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    action: Callable[[Store], object],
) -> None:
    """Bug: `os.listdir` of a descriptor fails with a number as file name: TypeError."""
    store = Store(tmp_path / "store")
    store.publish(OLD)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), descriptor)

    monkeypatch.setattr(os, function, fail)
    if function == "scandir" and action is Store.digests:
        assert action(store) == (OLD.digest,)
        return
    with pytest.raises(StoreError) as caught:
        action(store)
    assert str(store.root / "v1") in caught.value.message


def every_call_of_a_read(tally: Tally, store: Store, name: str) -> None:
    number, done = 0, False
    while not done:
        number += 1
        at_call = AtCall(number, fail_with(name))
        found: object
        with pytest.MonkeyPatch.context() as patch:
            at_call.install(patch)
            try:
                found = store.get(OLD.digest)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
        done = not at_call.reached
        tally.tried += not done
        where = f"{name} at call {number} ({at_call.reached}): {found!r}"
        if isinstance(found, Miss):
            if found.reason is not MissReason.UNREADABLE or not found.detail.startswith("/"):
                tally.wrong.append(where)
        elif found != OLD:
            tally.wrong.append(where)
    if store.get(OLD.digest) != OLD:
        tally.unhealed.append(f"{name}: the entry can no longer be read")


@pytest.mark.fault("C3")
@pytest.mark.parametrize("name", ERRNOS)
def test_a_read_with_a_failing_call_is_a_hit_or_a_miss(
    tally: Tally, fast_folder: Path, name: str
) -> None:
    """Bug: a reader raises, tells absence where it could not look, or takes unchecked bytes."""
    store = Store(fast_folder / "store")
    store.publish(OLD)
    every_call_of_a_read(tally, store, name)
    tally.clean(at_least=20)


@pytest.mark.fault("C3", control=True)
def test_the_sweep_over_a_read_finds_a_raw_error(
    tally: Tally, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a reader that lets the system's errors out must be found."""
    store = Store(fast_folder / "store")
    store.publish(OLD)
    monkeypatch.setattr(Store, "get", Store._read)
    every_call_of_a_read(tally, store, "EIO")
    tally.found()


def look(store: Store) -> object:
    return store.digests()


def lock(store: Store) -> object:
    with store.key_lock(NEW.digest, timeout_s=5) as held:
        store.publish(NEW)
        return held


def prepare_store(store: Store) -> object:
    store.prepare()
    return None


ACTIONS: list[Callable[[Store], object]] = [look, lock, prepare_store]


@pytest.mark.fault("C3")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", ERRNOS)
def test_other_actions_with_a_failing_call_are_typed_and_do_no_harm(
    tally: Tally, fast_folder: Path, name: str, action: Callable[[Store], object]
) -> None:
    """Bug: listing, locking or preparing lets the system's errors out, or loses an entry."""
    store = Store(fast_folder / "store")
    store.publish(OLD)
    number, done = 0, False
    while not done:
        number += 1
        at_call = AtCall(number, fail_with(name))
        outcome = "ok"
        with pytest.MonkeyPatch.context() as patch:
            at_call.install(patch)
            try:
                action(store)
            except AotError as error:
                outcome = error.code
            except Exception as error:
                tally.wrong.append(f"{name} at {number} ({at_call.reached}): raw {error!r}")
        done = not at_call.reached
        tally.tried += not done
        where = f"{action.__name__}: {name} at call {number} ({at_call.reached}): {outcome}"
        check_entry(tally, store, NEW, OLD, where)
        check_healed(tally, store, OLD, where)
    with store.key_lock(OLD.digest, timeout_s=0) as held:
        assert held, "a lock stayed taken"
    tally.clean(at_least=5)


def test_the_calls_are_those_of_the_sources() -> None:
    """Bug: a function that the store starts to use is never made to fail."""
    names = {name for _, name in FUNCTIONS}
    assert names >= {"open", "fsync", "rename", "write", "read", "flock", "mkdir", "unlink"}
    assert all(callable(getattr(owner, name)) for owner, name in FUNCTIONS)
    assert "close" not in names
