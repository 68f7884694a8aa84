"""D1, D2, D3: full, read-only and forbidden file systems."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from children import NOBODY, in_child
from faults import bugs
from faults.builds import built_artifact, plan_of
from faults.harness import leftovers, needs_root, run_tool
from faults.tally import Tally
from llbf16_aot.builder import execute
from llbf16_aot.errors import StoreFullError, StoreUnwritableError
from llbf16_aot.report import BuildReport, Outcome
from llbf16_aot.store import Miss, Store

CUBIN_BYTES = 60_000

Mount = Callable[..., Path]


@pytest.fixture
def build(fake_compiler: Callable[[int], None]) -> Callable[[Store], BuildReport]:
    """Builds three artifacts with cubins of 60 kB."""
    fake_compiler(CUBIN_BYTES)
    return lambda store: built(store, 3)


def built(store: Store, count: int) -> BuildReport:
    return execute(plan_of(count, store), store=store, jobs=1, limit_s=20)


def refs(store: Store) -> list[str]:
    try:
        return list(store.digests())
    except Exception as error:
        return [f"cannot list: {error}"]


def every_size(
    tally: Tally, mounted: Mount, build: Callable[[Store], BuildReport], sizes: range
) -> None:
    """Build on a file system of each size in KiB, then give it room and build again."""
    for size in sizes:
        place = mounted("-t", "tmpfs", "-o", f"size={size}k,mode=700", "tmpfs")
        store = Store(place / "store")
        tally.tried += 1
        report = build(store)
        for result in report.results:
            where = f"{size} KiB, {result.item.digest[:8]}"
            if result.artifact != built_artifact(result.item.key):
                tally.lost.append(f"{where}: the build did not return its artifact")
            found = store.get(result.item.digest)
            if result.unpublished is None and found != result.artifact:
                tally.lost.append(f"{where}: ok, and not in the store: {found!r}")
            if result.unpublished is not None:
                if not isinstance(result.unpublished, StoreFullError):
                    tally.wrong.append(f"{where}: {result.unpublished!r}")
                if not isinstance(found, Miss) or result.item.digest in refs(store):
                    tally.wrong.append(f"{where}: refused, and there is a ref")
        if left := leftovers(store):
            tally.wrong.append(f"{size} KiB: left {left}")
        run_tool("mount", "-o", "remount,size=4M", str(place))
        again = build(store)
        if [result.unpublished for result in again.results] != [None] * 3 or leftovers(store):
            tally.unhealed.append(f"{size} KiB: {again.results}")
        run_tool("umount", str(place))
        run_tool("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(place))


@needs_root
@pytest.mark.fault("D1")
def test_a_build_on_a_full_disk_returns_its_artifacts(
    tally: Tally,
    mounted: Mount,
    build: Callable[[Store], BuildReport],
    pick: Callable[[int, int], int],
) -> None:
    """Bug: compiled kernels are thrown away, a ref without blobs, space lost to temporary files."""
    every_size(tally, mounted, build, range(4, 161, pick(16, 4)))
    tally.clean(at_least=pick(10, 40))


@needs_root
@pytest.mark.fault("D1", control=True)
@pytest.mark.parametrize("plant", [bugs.hides_failures, bugs.writes_in_place])
def test_small_disks_find(
    tally: Tally,
    mounted: Mount,
    build: Callable[[Store], BuildReport],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Control: a full disk that counts as success, and files that are half written."""
    plant(monkeypatch)
    every_size(tally, mounted, build, range(60, 140, 4))
    tally.found()


class Warnings(logging.Handler):
    """Collects warnings of the package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def warned() -> Iterator[list[str]]:
    handler = Warnings()
    logger = logging.getLogger("llbf16_aot")
    logger.addHandler(handler)
    yield handler.texts
    logger.removeHandler(handler)


def bind_read_only(mounted: Mount, lower: Path) -> Path:
    place = mounted("--bind", str(lower))
    run_tool("mount", "-o", "remount,ro,bind", str(place))
    return place


def overlay(mounted: Mount, lower: Path) -> Path:
    empty = lower.parent / "empty"
    empty.mkdir(exist_ok=True)
    return mounted("-t", "overlay", "-o", f"lowerdir={lower}:{empty}", "overlay")


def read_only_tmpfs(mounted: Mount, lower: Path) -> Path:
    place = mounted("-t", "tmpfs", "-o", "size=1M,mode=700", "tmpfs")
    shutil.copytree(lower, place, dirs_exist_ok=True)
    run_tool("mount", "-o", "remount,ro", str(place))
    return place


PLACES = [bind_read_only, overlay, read_only_tmpfs]


def read_only_place(
    tally: Tally,
    place: Path,
    known: BuildReport,
    warned: list[str],
) -> None:
    """Hits work; a build of one more artifact than there are keeps it, with one warning."""
    store = Store(place)
    for result in known.results:
        tally.tried += 1
        if store.get(result.item.digest) != result.artifact:
            tally.lost.append(f"{result.item.digest[:8]} is no hit")
    warned.clear()
    report = built(store, 3)
    missing = [result for result in report.results if result.outcome is not Outcome.KEPT]
    assert len(missing) == 1
    tally.tried += 1
    if missing[0].artifact != built_artifact(missing[0].item.key):
        tally.lost.append("the build did not return its artifact")
    if not isinstance(missing[0].unpublished, StoreUnwritableError):
        tally.wrong.append(f"not told as unwritable: {missing[0].unpublished!r}")
    if len(warned) != 1:
        tally.wrong.append(f"{len(warned)} warnings: {warned}")


@needs_root
@pytest.mark.fault("D2")
@pytest.mark.parametrize("arrange", PLACES)
def test_a_read_only_store_serves_hits_and_degrades_with_one_warning(
    tally: Tally,
    tmp_path: Path,
    mounted: Mount,
    fake_compiler: Callable[[int], None],
    warned: list[str],
    arrange: Callable[[Mount, Path], Path],
) -> None:
    """Bug: an image layer cannot be read, or a build on it fails instead of saying so once."""
    fake_compiler(1000)
    lower = Store(tmp_path / "lower")
    known = built(lower, 2)
    place = arrange(mounted, lower.root)
    read_only_place(
        tally,
        place,
        known,
        warned,
    )
    again = built(lower, 3)
    if any(result.unpublished for result in again.results):
        tally.unhealed.append("the writable store below takes nothing more")
    tally.clean(at_least=3)


@needs_root
@pytest.mark.fault("D2", control=True)
def test_read_only_places_find_a_hidden_failure(
    tally: Tally,
    tmp_path: Path,
    mounted: Mount,
    fake_compiler: Callable[[int], None],
    warned: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: a publisher that says ok on a read-only file system must be found."""
    fake_compiler(1000)
    lower = Store(tmp_path / "lower")
    known = built(lower, 2)
    bugs.hides_failures(monkeypatch)
    read_only_place(
        tally,
        bind_read_only(mounted, lower.root),
        known,
        warned,
    )
    tally.found()


def without_permission(tally: Tally, folder: Path, modes: tuple[int, ...]) -> None:
    """Build as another user where one folder of the store has a mode that forbids something."""
    nowhere = Store(folder / "nowhere")
    for name in (".", "v1", "v1/refs", "v1/blobs", "v1/blobs/sha256", "v1/tmp", "v1/locks"):
        for mode in modes:
            store = Store(folder / "store")
            shutil.rmtree(store.root, ignore_errors=True)
            # Two of the three that the build will want.
            before = in_child(functools.partial(_stored, store, 2), uid=NOBODY)
            assert before.value is True, before
            wanted = [built_artifact(item.key) for item in plan_of(3, nowhere).items]
            (store.root / name).chmod(mode)
            where = f"{name} with mode {mode:04o}"
            tally.tried += 1
            ended = in_child(functools.partial(_artifacts, store), uid=NOBODY)
            (store.root / name).chmod(0o700)
            if ended.error not in ("", "UntrustedStoreError"):
                tally.wrong.append(f"{where}: {ended.error}: {ended.message}")
            elif ended.error == "" and ended.value != wanted:
                tally.lost.append(f"{where}: the build did not return its artifacts")
            healed = in_child(functools.partial(_stored, store, 3), uid=NOBODY)
            if healed.value is not True:
                tally.unhealed.append(f"{where}: {healed}")


def _artifacts(store: Store) -> object:
    return [result.artifact for result in built(store, 3).results]


def _stored(store: Store, count: int) -> bool:
    return all(store.get(one.item.digest) == one.artifact for one in built(store, count).results)


@needs_root
@pytest.mark.fault("D3")
def test_a_build_without_permission_returns_its_artifacts(
    tally: Tally, nobody_folder: Path, fake_compiler: Callable[[int], None]
) -> None:
    """Bug: a PermissionError comes out of a build, or its artifacts are lost."""
    fake_compiler(1000)
    without_permission(tally, nobody_folder, (0o000, 0o400, 0o500, 0o300))
    tally.clean(at_least=28)


@needs_root
@pytest.mark.fault("D3", control=True)
def test_missing_permissions_find_raw_errors(
    tally: Tally,
    nobody_folder: Path,
    fake_compiler: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: the system's own PermissionError must be found."""
    fake_compiler(1000)
    bugs.raw_errors(monkeypatch)
    without_permission(tally, nobody_folder, (0o500,))
    tally.found()
