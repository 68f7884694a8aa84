"""A pytest plugin: gathers what the tests of the bar tried and found, row by row.

With LLBF16_AOT_FAULTS_OUT set to a path, the rows are written there as JSON and shown at the end.
Works with pytest-xdist: the numbers travel with the test reports.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults.bar import REFERENCES, ROWS, Count, Reference
from faults.tally import Tally

__all__ = ["FULL", "TALLY"]

OUT = "LLBF16_AOT_FAULTS_OUT"
FULL = "LLBF16_AOT_FAULTS_FULL"
PROPERTY = "llbf16_aot_fault"
TALLY = pytest.StashKey[Tally]()
_GETS = pytest.StashKey[int]()


def reference_of(nodeid: str) -> Reference | None:
    """The row that a test elsewhere holds."""
    for reference in REFERENCES:
        _, found, _ = nodeid.partition("tests/" + reference.test)
        if found:
            return reference
    return None


@contextmanager
def _counted_gets(item: pytest.Item) -> Generator[None]:
    from llbf16_aot.store import Store

    real = Store.get

    def get(self: Store, digest: str) -> Any:
        item.stash[_GETS] = item.stash.get(_GETS, 0) + 1
        return real(self, digest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "get", get)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    reference = reference_of(item.nodeid)
    if reference is not None and reference.counted is Count.GETS:
        with _counted_gets(item):
            return (yield)
    result = yield
    tally = item.stash.get(TALLY, None)
    if tally is not None and not tally.judged:
        pytest.fail("the test ended without `clean` or `found`")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    entry = _entry(item, report)
    if entry is not None:
        report.user_properties.append((PROPERTY, json.dumps(entry)))
    return report


def _entry(item: pytest.Item, report: pytest.TestReport) -> dict[str, object] | None:
    """What this phase of a test adds to a row."""
    marker = item.get_closest_marker("fault")
    reference = reference_of(item.nodeid)
    if marker is None and reference is None:
        return None
    if report.when != "call" and report.passed:
        return None
    row = marker.args[0] if marker is not None else reference.row  # type: ignore[union-attr]
    control = marker is not None and marker.kwargs.get("control", False)
    name = item.nodeid.partition("[")[0].partition("tests/")[2]
    entry: dict[str, object] = {"row": row, "test": name, "control": control}
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return {**entry, "skipped": reason.removeprefix("Skipped: ")}
    tally = item.stash.get(TALLY, None)
    if tally is not None:
        counts = tally.to_data()
    else:
        tried = item.stash.get(_GETS, 1)
        counts = {"tried": tried, "lost": 0, "wrong": 0, "unhealed": 0, "notes": []}
    if report.failed and not control and not any(counts[k] for k in ("lost", "wrong", "unhealed")):
        # It ended before it could say what was wrong.
        counts["wrong"] += 1
    return {**entry, **counts, "failed": report.failed}


class _Rows:
    """All rows of one run, in the process that the user started."""

    def __init__(self, path: Path, *, full: bool) -> None:
        self._path = path
        self._full = full
        self._entries: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY:
                self._entries.append(json.loads(str(value)))

    def rows(self) -> list[dict[str, object]]:
        return [self._row(row) for row in ROWS]

    def _row(self, row: str) -> dict[str, object]:
        mine = [entry for entry in self._entries if entry["row"] == row]
        ran = [entry for entry in mine if "skipped" not in entry]
        faults = [entry for entry in ran if not entry["control"]]
        controls = [entry for entry in ran if entry["control"]]
        skipped = sorted(
            {f"{entry['test']}: {entry['skipped']}" for entry in mine if entry not in ran}
        )
        if not mine:
            skipped = ["no test ran"]
        return {
            "id": row,
            "fault": ROWS[row],
            **{
                name: sum(entry[name] for entry in faults)
                for name in ("tried", "lost", "wrong", "unhealed")
            },
            "control_found": (all(not entry["failed"] for entry in controls) if controls else None),
            "controls": len(controls),
            "notes": [note for entry in faults for note in entry["notes"]],
            "skipped": skipped,
            "tests": sorted({entry["test"] for entry in faults}),
        }

    def pytest_sessionfinish(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        data = {"schema": 1, "full": self._full, "rows": self.rows()}
        self._path.write_text(json.dumps(data, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("the reliability bar, " + ("full" if self._full else "CI size"))
        for row in self.rows():
            control = {True: "found", False: "NOT FOUND", None: "-"}[row["control_found"]]  # type: ignore[index]
            skipped = row["skipped"]
            terminalreporter.line(
                f"{row['id']:>3} {row['tried']:>8} tried {row['lost']:>3} lost "
                f"{row['wrong']:>3} wrong {row['unhealed']:>3} unhealed, control {control:<9}"
                + (f" skipped: {'; '.join(skipped)}" if skipped else "")  # type: ignore[arg-type]
            )


def pytest_configure(config: pytest.Config) -> None:
    out = os.environ.get(OUT)
    if out and not hasattr(config, "workerinput"):
        rows = _Rows(Path(out).resolve(), full=os.environ.get(FULL) == "1")
        config.pluginmanager.register(rows, "llbf16-aot-fault-rows")
