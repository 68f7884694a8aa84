#!/usr/bin/env python
"""Measures the store: reading, publishing, listing, and what an entry takes of a file system.

    scripts/bench_store.py [--entries N] [--folder PATH] [--output docs/results/store.json]

Prints one line for each figure with its limit, all from one run, and writes them as JSON. Needs no
GPU and no compiler: artifacts are made from cubins that the tests keep; those of 60 kB have one
kernel, as the compiler makes them, and are padded. Exit code 1 if a limit is missed. Run it on a
machine that does nothing else; of repeated times of reading and listing the least one counts.

An entry's inodes: all files and folders of the store's layout divided by the number of entries,
where every cubin is another one; the folders, at most 515, are shared out among the entries.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from llbf16_aot.artifact import Artifact  # noqa: E402
from llbf16_aot.doctor import find_mount  # noqa: E402
from llbf16_aot.store import Miss, Store  # noqa: E402
from support import artifact_for, compiled_artifact, fixture_cubin, make_key  # noqa: E402

CUBIN_BYTES = 60_000
FEW = 10


class Figure(NamedTuple):
    """One measured figure; `limit` is what it must not exceed, None where it is only told."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the limit is kept."""
        return self.limit is None or self.value <= self.limit

    def __str__(self) -> str:
        limit = "" if self.limit is None else f"  limit {self.limit:g}"
        mark = "" if self.holds else "  MISSED"
        return f"{self.name:34} {self.value:10.4g} {self.unit:8}{limit}{mark}"


def numbered(number: int, size_bytes: int = 0) -> Artifact:
    """An artifact with a key and a cubin of its own."""
    base = fixture_cubin("ptxas_sm_90a")
    tail = number.to_bytes(8, "little")
    cubin = base + bytes(max(0, size_bytes - len(base) - len(tail))) + tail
    key = make_key(tokens=1 + number % 64, hidden=8 * (1 + number // 64))
    return artifact_for(key, cubin=cubin, kernel_source_digest_text="0" * 64)


def median_s(action: Callable[[], object], rounds: int) -> float:
    """The median time of an action."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def fill(store: Store, entries: int) -> None:
    """Publish many small entries; syncing each would only take time."""
    with mock.patch.object(os, "fsync", return_value=None):
        for number in range(entries):
            store.publish(numbered(number))
    # Else the first that syncs would pay for all of them.
    os.sync()


def reading(few: Store, many: Store, large: Artifact, small: Artifact) -> list[Figure]:
    """Verified reads and misses in a store of few and one of many entries."""
    absent = "0" * 64
    for store in (few, many):
        assert store.get(large.digest) == large
        assert isinstance(store.get(absent), Miss)
    gets: dict[str, list[float]] = {"few": [], "many": []}
    misses: dict[str, list[float]] = {"few": [], "many": []}
    # In turns, so that what else the machine does hits both alike; of the turns' medians the least
    # counts, because what else the machine does only adds.
    for _ in range(20):
        for name, store in (("few", few), ("many", many)):
            gets[name].append(median_s(lambda s=store: s.get(large.digest), 100))  # type: ignore[misc]
            misses[name].append(median_s(lambda s=store: s.get(absent), 100))  # type: ignore[misc]
    few_s, many_s = min(gets["few"]), min(gets["many"])
    few_miss_s, many_miss_s = min(misses["few"]), min(misses["many"])
    small_s = min(median_s(lambda: many.get(small.digest), 100) for _ in range(5))
    return [
        Figure("verified get of 60 kB", few_s * 1e3, "ms", 0.3),
        Figure("  the same among many", many_s * 1e3, "ms", 0.3),
        Figure("  many over few", many_s / few_s, "ratio", 1.25),
        Figure("verified get of 6 kB", small_s * 1e3, "ms"),
        Figure("miss", few_miss_s * 1e3, "ms"),
        Figure("  many over few", many_miss_s / few_miss_s, "ratio", 1.25),
    ]


def publishing(store: Store) -> list[Figure]:
    """Publishing new entries of 60 kB, durable when it returns."""
    artifacts = [numbered(1_000_000 + number, CUBIN_BYTES) for number in range(50)]
    times = []
    for artifact in artifacts:
        start = time.perf_counter()
        store.publish(artifact)
        times.append(time.perf_counter() - start)
    again_s = median_s(lambda: store.publish(artifacts[0]), 30)
    return [
        Figure("publish of 60 kB", statistics.median(times) * 1e3, "ms", 20),
        Figure("  the slowest tenth", sorted(times)[-5] * 1e3, "ms"),
        Figure("publish of what is there", again_s * 1e3, "ms"),
    ]


def listing(store: Store) -> list[Figure]:
    """The command `list` as a process of its own, from start to end."""
    figures = []
    for name, arguments in (("list", ()), ("list --json", ("--json",)), ("prune --dry-run", None)):
        words = ("prune", "--max-size", "1G", "--dry-run") if arguments is None else ("list",)
        command = (sys.executable, "-m", "llbf16_aot", *words, *(arguments or ()))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run(
                [*command, "--store", str(store.root)], check=True, stdout=subprocess.DEVNULL
            )
            times.append(time.perf_counter() - start)
        limit = 1.5 if name.startswith("list") else None
        figures.append(Figure(name, min(times), "s", limit))
    return figures


def footprint(store: Store, entries: int) -> list[Figure]:
    """Files and folders an entry, and the longest file name."""
    files, folders, longest = 0, 0, 0
    for _, inner, names in os.walk(store.root / "v1"):
        files += len(names)
        folders += len(inner)
        longest = max([longest, *(len(os.fsencode(name)) for name in names)])
    # A key's lock exists while it is built: the longest name that there ever is.
    with store.key_lock("0" * 64, timeout_s=0):
        held = os.listdir(store.root / "v1" / "locks")
    longest = max([longest, *(len(os.fsencode(name)) for name in held)])
    locks = 2  # of the store, not of an entry
    return [
        Figure("files an entry", (files - locks) / entries, "inodes", 3),
        Figure("files and folders an entry", (files + folders) / entries, "inodes", 3.1),
        Figure("longest file name", longest, "bytes", 80),
    ]


def measure(folder: Path, entries: int) -> list[Figure]:
    """All figures."""
    few, many = Store(folder / "few"), Store(folder / "many")
    large = compiled_artifact(1, size_bytes=CUBIN_BYTES)
    print(f"filling a store with {entries} entries", file=sys.stderr)
    fill(few, FEW)
    fill(many, entries)
    figures = footprint(many, entries)
    figures += listing(many)
    few.publish(large)
    many.publish(large)
    figures += reading(few, many, large, numbered(0))
    figures += publishing(many)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="where to make the stores; default: TMPDIR")
    parser.add_argument(
        "--output", type=Path, help="JSON file, for example docs/results/store.json"
    )
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="llbf16-aot-bench-", dir=given.folder))
    try:
        figures = measure(folder, given.entries)
        mount = find_mount(folder, Path("/proc/self/mountinfo").read_text())
    finally:
        shutil.rmtree(folder)
    for figure in figures:
        print(figure)
    if given.output is not None:
        report = {
            "schema": 1,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "python": platform.python_version(),
            "file_system": "unknown" if mount is None else mount.kind,
            "cores": len(os.sched_getaffinity(0)),
            "entries": given.entries,
            "figures": [
                {**figure._asdict(), "name": figure.name.strip(), "holds": figure.holds}
                for figure in figures
            ],
        }
        given.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
