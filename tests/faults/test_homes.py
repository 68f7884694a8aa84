"""T3: where the store is when HOME says nothing useful, and odd paths."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from children import NOBODY, in_child
from faults.harness import needs_root
from faults.tally import Tally
from llbf16_aot import location
from llbf16_aot.environment import Environment
from llbf16_aot.store import Store
from support import make_artifact


class Home(NamedTuple):
    """What the environment says, made in a folder of the user, and how a publish must end."""

    name: str
    environ: Callable[[Path], dict[str, str]]
    outcome: str
    """`ok`, or the class of the error."""


def home(text: str) -> Callable[[Path], dict[str, str]]:
    return lambda folder: {"HOME": text.format(folder=folder)}


def long_path(folder: Path) -> dict[str, str]:
    return {"HOME": str(folder / "/".join(["d" * 200] * 25))}


def long_name(folder: Path) -> dict[str, str]:
    return {"HOME": str(folder / ("d" * 300))}


def not_utf8(folder: Path) -> dict[str, str]:
    return {"HOME": os.fsdecode(os.fsencode(folder) + b"/caf\xe9")}


def unwritable(folder: Path) -> dict[str, str]:
    (folder / "closed").mkdir()
    (folder / "closed").chmod(0o500)
    return {"HOME": str(folder / "closed")}


def a_file(folder: Path) -> dict[str, str]:
    (folder / "file").write_text("mine")
    return {"HOME": str(folder / "file")}


HOMES = [
    Home("unset", lambda folder: {}, "StoreError"),
    Home("empty", home(""), "StoreError"),
    Home("relative", home("relative/home"), "StoreError"),
    Home("dot", home("."), "StoreError"),
    Home("another user's", home("{folder}/foreign"), "UntrustedStoreError"),
    Home("absent", home("{folder}/absent"), "ok"),
    Home("with spaces and quotes", home("{folder}/a 'b' \"c\""), "ok"),
    Home("with a line break", home("{folder}/a\nb"), "ok"),
    Home("with dots", home("{folder}/x/../y"), "ok"),
    Home("very long", long_path, "ok"),
    Home("one long name", long_name, "StoreError"),
    Home("not UTF-8", not_utf8, "ok"),
    Home("unwritable", unwritable, "StoreUnwritableError"),
    Home("a file", a_file, "StoreError"),
    Home("relative cache", lambda f: {"HOME": str(f / "h"), "XDG_CACHE_HOME": "relative"}, "ok"),
    Home("relative store", lambda f: {"LLBF16_AOT_STORE": "here"}, "UsageError"),
]


def publish_from(environ: dict[str, str], working: Path) -> str:
    """Publish into the store that this environment names, from that working directory."""
    os.chdir(working)
    store = Store(Environment(environ).store_location().root)
    artifact = make_artifact()
    store.publish(artifact)
    assert store.get(artifact.digest) == artifact
    return os.fspath(store.root)


def names_of(folder: str) -> set[str]:
    """What the child's user has there: tests beside this one make folders as another user."""
    found = set()
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            if entry.stat(follow_symlinks=False).st_uid == NOBODY:
                found.add(entry.name)
    return {name for name in found if not name.startswith(("pytest", "llbf16-aot-f"))}


def try_homes(tally: Tally, folder: Path) -> None:
    for case in HOMES:
        place = folder / case.name.replace("'", "").replace(" ", "-")
        for each in (place, place / "work"):
            each.mkdir()
            os.chown(each, NOBODY, NOBODY)
        (place / "foreign").mkdir()
        os.chown(place / "foreign", 1234, 1234)
        environ = in_child(lambda c=case, p=place: c.environ(p), uid=NOBODY).value  # type: ignore[misc]
        assert isinstance(environ, dict), environ
        before = names_of("/tmp")
        ended = in_child(
            lambda e=environ, p=place: publish_from(e, p / "work"),  # type: ignore[misc]
            uid=NOBODY,
        )
        tally.tried += 1
        if (ended.error or "ok") != case.outcome:
            tally.wrong.append(f"{case.name}: {ended}")
        if ended.error and not ended.hint and case.name != "one long name":
            tally.wrong.append(f"{case.name}: no hint: {ended.message}")
        if os.listdir(place / "work"):
            tally.wrong.append(f"{case.name}: wrote into the working directory")
        if grown := [n for n in names_of("/tmp") - before if "llbf16" in n]:
            tally.wrong.append(f"{case.name}: wrote into /tmp: {grown}")
        if not ended.error and not str(ended.value).startswith(str(place)):
            tally.wrong.append(f"{case.name}: wrote to {ended.value}")


@needs_root
@pytest.mark.fault("T3")
def test_every_home_gives_a_defined_place_or_a_typed_error(
    tally: Tally, nobody_folder: Path
) -> None:
    """Bug: the store lands in the working directory or /tmp, or an OSError comes out."""
    try_homes(tally, nobody_folder)
    tally.clean(at_least=12)


@needs_root
@pytest.mark.fault("T3", control=True)
def test_homes_find_a_store_in_the_working_directory(
    tally: Tally, nobody_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: falling back to the working directory must be found."""
    monkeypatch.setattr(location, "_home", lambda environ: os.getcwd())
    try_homes(tally, nobody_folder)
    tally.found()
