"""Fixtures of the reliability bar: the tally of a test, its size, and places to run in."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults.builds import instant_compiler
from faults.harness import run_tool
from faults.recorder import FULL, TALLY
from faults.tally import Tally

# The tests that other rows refer to, and their fake compiler.
sys.path.append(str(Path(__file__).parents[1] / "aot"))

IS_FULL = os.environ.get(FULL) == "1"


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """Counts for the row in the test's marker `fault`; the test must judge them."""
    marker = request.node.get_closest_marker("fault")
    counts = Tally(marker.args[0], control=marker.kwargs.get("control", False))
    request.node.stash[TALLY] = counts
    return counts


@pytest.fixture(scope="session")
def pick() -> Callable[[int, int], int]:
    """Chooses between a number for CI and the number of the full bar."""
    return lambda ci, full: full if IS_FULL else ci


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """A folder in memory where there is one: for faults that have nothing to do with a disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="llbf16-aot-faults-", dir=memory))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system on a new folder, and takes it away at the end; skips where it cannot."""
    places: list[Path] = []

    def mount(*arguments: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        run_tool("mount", *arguments, str(place), or_skip=True)
        places.append(place)
        return place

    yield mount
    for place in reversed(places):
        run_tool("umount", str(place))


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets builds compile at once, to cubins of as many bytes as it is called with."""
    return lambda size_bytes: instant_compiler(monkeypatch, size_bytes, lambda key: None)
