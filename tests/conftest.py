"""Keeps tests away from the user's store, home and settings.

pytest puts this file's folder on the import path, so tests can write `from support import ...`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

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
