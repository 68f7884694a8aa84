"""Rows that tests elsewhere hold: the tests are there, and each finds the bug that it is for."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from faults import bugs
from faults.bar import REFERENCES, ROWS, Reference
from faults.tally import Tally
from llbf16_aot import key
from llbf16_aot.store import Store
from support import make_artifact

TESTS = Path(__file__).parents[1]
HERE = Path(__file__).parent


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda one: f"{one.row}-{one.test}")
def test_the_tests_that_rows_refer_to_are_there(reference: Reference) -> None:
    """Bug: a test that holds a row was renamed, and the row is counted no more."""
    file, _, name = reference.test.partition("::")
    source = (TESTS / file).read_text()
    found = re.findall(rf"^def {re.escape(name)}\w*\(", source, re.MULTILINE)
    assert len(found) == 1, found


def test_every_row_has_its_tests() -> None:
    """Bug: a row of the bar that nothing holds."""
    marked = {
        row
        for file in HERE.glob("test_*.py")
        for row in re.findall(r'^@pytest\.mark\.fault\("(\w+)"\)', file.read_text(), re.MULTILINE)
    }
    assert marked <= set(ROWS)
    assert {one.row for one in REFERENCES} <= set(ROWS)
    assert marked | {one.row for one in REFERENCES} == set(ROWS)


def test_every_row_has_a_control() -> None:
    """Bug: a harness that nobody has seen find anything."""
    controlled = {
        row
        for file in HERE.glob("test_*.py")
        for row in re.findall(r'mark\.fault\("(\w+)", control=True\)', file.read_text())
    } | {row for row, *_ in CONTROLS}
    assert controlled == set(ROWS)


def digest_without_output_type(patch: pytest.MonkeyPatch) -> None:
    """Two specialisations that differ in the type of their output have one name."""
    real = key.canonical_json

    def encode(value: object) -> bytes:
        return re.sub(rb'"out_dtype":"\w+"', b'"out_dtype":"*"', real(value))

    patch.setattr(key, "canonical_json", encode)


def working_directory_as_home(patch: pytest.MonkeyPatch) -> None:
    """Where no home is known the store is in the working directory."""
    from llbf16_aot import location

    patch.setattr(location, "_home", lambda environ: os.getcwd())


def other_schemas_are_removed(patch: pytest.MonkeyPatch) -> None:
    """Publishing clears away what other versions of the package have stored."""
    import shutil

    real = Store.publish

    def publish(self: Store, artifact: object) -> None:
        for folder in self.root.glob("v[0-9]*"):
            if folder.name != "v1":
                shutil.rmtree(folder)
        real(self, artifact)  # type: ignore[arg-type]

    patch.setattr(Store, "publish", publish)


class Case(NamedTuple):
    """A planted bug, and the test elsewhere that must fail with it."""

    row: str
    plant: Callable[[pytest.MonkeyPatch], None]
    module: str
    test: str
    arguments: dict[str, object] = {}  # noqa: RUF012 - never changed


_FAULTS, _STORE = "test_store_faults", "test_store"

CONTROLS = (
    Case("I1", bugs.no_digests, _STORE, "test_every_flipped_byte_is_a_miss", {"part": "cubin"}),
    Case(
        "I2",
        bugs.sizes_unchecked,
        _STORE,
        "test_every_truncation_and_appended_byte_is_a_miss",
        {"part": "cubin"},
    ),
    Case("I3", bugs.no_digests, _STORE, "test_swapped_parts_of_valid_entries_are_misses"),
    Case(
        "I4",
        bugs.follows_links,
        _STORE,
        "test_odd_files_in_place_of_a_file_are_misses_and_heal",
        {"part": "cubin", "plant": "make_copy_link"},
    ),
    *(
        Case(
            "T1",
            bugs.no_trust_check,
            _FAULTS,
            "test_what_others_could_have_written",
            {"case": case},
        )
        for case in ("root of another user", "ref group-writable", "cubin world-writable")
    ),
    Case("T2", bugs.no_modes, _FAULTS, "test_modes_do_not_depend_on_the_umask", {"umask": 0}),
    Case("T2", bugs.no_modes, _FAULTS, "test_modes_do_not_depend_on_the_umask", {"umask": 0o777}),
    Case(
        "T3",
        working_directory_as_home,
        "test_location",
        "test_an_environment_without_a_home_is_refused_with_a_hint",
        {"explicit": None, "environ": {}},
    ),
    Case("V1", other_schemas_are_removed, _STORE, "test_other_versions_of_the_store"),
    Case(
        "V2",
        digest_without_output_type,
        "test_key",
        "test_every_field_alone_changes_the_digest",
        {"backend": "splitk"},
    ),
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.fault(case.row, control=True)) for case in CONTROLS],
    ids=lambda one: f"{one.row}-{one.plant.__name__}",
)
def test_the_test_finds(
    request: pytest.FixtureRequest, tally: Tally, tmp_path: Path, case: Case
) -> None:
    """Control: with its bug planted, the test that holds the row must fail."""
    module = importlib.import_module(case.module)
    (name,) = [one for one in vars(module) if one.startswith(case.test)]
    function = getattr(module, name)
    given = {"store": Store(tmp_path / "store"), "artifact": make_artifact(), **case.arguments}
    arguments = {
        parameter: given[parameter] if parameter in given else request.getfixturevalue(parameter)
        for parameter in inspect.signature(function).parameters
    }
    if "plant" in arguments:
        arguments["plant"] = getattr(module, str(arguments["plant"]))
    tally.tried += 1
    with pytest.MonkeyPatch.context() as patch:
        case.plant(patch)
        try:
            function(**arguments)
        except (Exception, pytest.fail.Exception) as error:
            tally.wrong.append(str(error))
    tally.found()
