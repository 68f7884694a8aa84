"""Keeps tests away from the user's store, home and settings; gives them another user's folder.

pytest puts this file's folder on the import path, so tests can write `from support import ...`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import NOBODY, in_child

# Counts what the tests of the reliability bar tried: see tests/faults/README.md.
pytest_plugins = ("faults.recorder",)

_STORE_NUMBERS = itertools.count()


@pytest.fixture(autouse=True, scope="session")
def _empty_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home without anything in it, for every test and every process that a test starts."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.startswith(("XDG_", "CUTE_DSL_")):
                patch.delenv(name)
        patch.setenv("HOME", str(home))
        yield home


@pytest.fixture(autouse=True)
def _own_store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _empty_home: Path
) -> None:
    """A store of its own for every test, not there yet; none of the user's LLBF16_AOT_* settings.

    Tests on a GPU are the exception: they use the store that was built for them.
    """
    if request.node.get_closest_marker("gpu"):
        return
    for name in [*os.environ]:
        if name.startswith("LLBF16_AOT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LLBF16_AOT_STORE", str(_empty_home / "stores" / str(next(_STORE_NUMBERS))))


@pytest.fixture
def nobody_folder() -> Iterator[Path]:
    """A folder that user NOBODY owns and can reach, which pytest's own folders do not allow.

    Skips the test where that user cannot read this checkout, as in a clone below a closed folder:
    what a child imports or reads late would be denied to it, and no fault of the code shown.
    """
    denied = in_child(_read_what_tests_read, uid=NOBODY)
    if denied.error:
        pytest.skip(f"another user cannot read the tests and their packages: {denied.message}")
    # The prefix that tests which look for strangers in /tmp leave out.
    path = Path(tempfile.mkdtemp(prefix="llbf16-aot-faults-"))
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def _read_what_tests_read() -> None:
    Path(__file__).read_bytes()
    os.listdir(sys.prefix)
