"""The report of the GPU check: what ran, what failed, how large the errors were; written once."""

from __future__ import annotations

import datetime
import faulthandler
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import threading
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_plan

MAX_FAILURES = 50
"""Failures that are told in full; all are counted."""

STALL_S = 150
"""Seconds without a finished case after which the GPU counts as hung."""


class BrokenContextError(Exception):
    """The CUDA context is broken: nothing that runs after it would mean anything."""


class Report:
    """Collects outcomes by section and ends as one JSON file, also where the GPU hangs."""

    def __init__(self, path: Path, commit: str) -> None:
        self.path = path
        self.commit = commit
        self.facts: dict[str, Any] = {}
        self.sections: dict[str, dict[str, Any]] = {}
        self.failures: list[dict[str, str]] = []
        self.failed = 0
        self.broken = False
        """Whether the CUDA context has failed for good."""
        self.largest: dict[str, dict[str, Any]] = {}
        self._section = "start"
        self._what = "start"
        self._last = time.monotonic()
        self._written = threading.Lock()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Run a part of the check: whatever it raises is a failure of that part."""
        self._section = name
        self.sections[name] = {"cases": 0, "failed": 0, "wall_s": 0.0}
        start = time.monotonic()
        try:
            yield
        except BrokenContextError as error:
            print(f"{name} ends: {error}", flush=True)
        except Exception:
            self.fail(f"{name} (outside of a case)", traceback.format_exc())
        finally:
            self.sections[name]["wall_s"] = round(time.monotonic() - start, 2)
            print(f"{name}: {self.sections[name]}", flush=True)

    @contextmanager
    def case(self, what: object) -> Iterator[None]:
        """Run one case: whatever it raises is its failure; a broken CUDA context ends the check."""
        self._what = str(what)
        self.sections[self._section]["cases"] += 1
        try:
            yield
        except Exception as error:
            self.fail(str(what), f"{type(error).__name__}: {error}")
            if _is_fatal(error):
                self.broken = True
                raise BrokenContextError(f"{what}: {error}") from error
        finally:
            self._last = time.monotonic()

    def fail(self, what: str, detail: str) -> None:
        """Count a failure, and keep its details while there is room."""
        self.failed += 1
        section = self.sections.setdefault(self._section, {"cases": 0, "failed": 0, "wall_s": 0.0})
        section["failed"] += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append({"section": self._section, "case": what, "detail": detail[-2000:]})
            print(f"FAILED {self._section}: {what}: {detail}", flush=True)

    def error(self, out_dtype: str, value: float, where: object) -> None:
        """Keep the largest error of each output type."""
        if not value <= self.largest.get(out_dtype, {"value": -1.0})["value"]:
            self.largest[out_dtype] = {"value": value, "case": str(where)}

    def watch(self) -> None:
        """End the process, with a report, where no case finishes for too long."""
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while time.monotonic() - self._last < STALL_S:
            time.sleep(1)
        self.fail(self._what, f"no case finished for {STALL_S} s: the GPU hangs")
        faulthandler.dump_traceback()
        self.write()
        os._exit(3)

    def alive(self) -> None:
        """Tell the watch that a long step is under way as it should be."""
        self._last = time.monotonic()

    def write(self) -> int:
        """Write the report; the exit status that it means."""
        with self._written:
            report = {
                "schema": 1,
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "commit": self.commit,
                **self.facts,
                "compiler_installed": importlib.util.find_spec("cutlass") is not None,
                "compiler_imported": "cutlass" in sys.modules,
                "cases": sum(section["cases"] for section in self.sections.values()),
                "failed": self.failed,
                "failures": self.failures,
                "largest_error": self.largest,
                "tolerance": gpu_plan.TOLERANCE,
                "sections": self.sections,
            }
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(report, indent=2) + "\n"
            self.path.write_text(text, encoding="utf-8")
        print(text, flush=True)
        return 1 if self.failed else 0


def machine_facts() -> dict[str, Any]:
    """Device, driver and versions, as far as they can be told."""
    import torch

    facts: dict[str, Any] = {"device": None, "driver": _driver_version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["device"] = properties.name
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
    packages = ("llbf16-aot", "cuda-bindings", "msgspec", "nvidia-cutlass-dsl")
    facts["versions"] = {"torch": str(torch.__version__), "python": platform.python_version()}
    facts["versions"] |= {name: _version(name) for name in packages}
    return facts


def pytest_facts(junit: Path) -> dict[str, Any]:
    """The totals of a pytest run and the names of what did not pass, from its JUnit file."""
    totals: dict[str, Any] = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    names: list[str] = []
    for suite in ElementTree.parse(junit).getroot().iter("testsuite"):  # noqa: S314 - our own file
        for name in totals:
            totals[name] += int(suite.get(name, "0"))
        for test in suite.iter("testcase"):
            for child in test:
                if child.tag in ("failure", "error", "skipped"):
                    message = (child.get("message") or "")[:300]
                    names.append(f"{child.tag}: {test.get('name')}: {message}")
    totals["passed"] = totals["tests"] - sum(totals[k] for k in ("failures", "errors", "skipped"))
    totals["not_passed"] = names[:MAX_FAILURES]
    return totals


def _is_fatal(error: BaseException) -> bool:
    """Whether an error leaves a CUDA context in which nothing works any more."""
    words = ("illegal memory access", "unspecified launch failure", "misaligned address")
    text = str(error)
    if any(word in text for word in words) or "CUDA_ERROR_ILLEGAL" in text:
        return True
    import torch

    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except Exception:
        return True
    return False


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
