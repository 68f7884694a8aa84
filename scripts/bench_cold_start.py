"""From the start of a process to its first right answer: plain torch, our store, and the compiler.

bench_cold_start.py run --store STORE --out FILE [--many-store STORE] [--jit DIR] [--repeats N]

--store       has the keys of the manifest dsv4
--many-store  has at least 1,000 kernels for this GPU, as candidate builds make them: a key's cost
--jit         a folder with the unpacked compiler, for the children that compile and for no other

Exit status 1 where a child failed, answered wrongly, or did not load what it should.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import host_report
import msgspec
from gpu_report import machine_facts
from llbf16_aot.dispatch import dispatch, load_table
from llbf16_aot.driver import inventory
from llbf16_aot.errors import AotError, LibraryChosenError
from llbf16_aot.key import CompileKey
from llbf16_aot.manifest import Manifest
from llbf16_aot.problem import Problem, Target
from llbf16_aot.store import Miss, Store

MANIFEST = "dsv4"
COUNTS = (10, 100, 1000)
REPEATS = 11
JIT_REPEATS = 2
PRELOAD_REPEATS = 5
TIMEOUT_S = 240

LIMITS = {"ms_above_torch": 60.0, "mib_above_torch": 20.0}
"""What the figures are asked to be at most."""

PROTOCOL = (
    "Each figure is of fresh processes. Time runs from just before the parent starts the child to "
    "the end of a stage in the child, both on CLOCK_MONOTONIC. 'torch': import torch, "
    "torch.cuda.init, a tiny kernel, the operands on the GPU. 'ours': the same, then import "
    f"llbf16_aot, a runtime, preload of every kernel of {MANIFEST}, and the first answer (M = 1) "
    "with the GPU drained. 'jit': as 'torch', then import of CuTe DSL, cute.compile of the same "
    "keys for calls through TVM-FFI, and the first answer. Each answer is compared with float64 "
    "after its time was taken. Children of the kinds alternate; the first of each kind is dropped; "
    "medians. The page cache is warm: the store was copied beforehand and every child reads the "
    "same files. Python's bytecode is there, as after pip install (gpu_host.sh compiles it). "
    "ms_above_torch and mib_above_torch are medians of what one process adds after its operands "
    "are ready; the *_between_kinds figures are differences of the medians of two kinds, which say "
    "the same of quiet machines only: import torch takes 3 to 4 seconds, and a run of them differs "
    "by more than all that comes after. "
    "Memory: VmRSS, and Private_Dirty of smaps_rollup. Preload: children that load n keys of a "
    "candidate store, time of the call preload(keys) alone."
)


class Child(msgspec.Struct, frozen=True):
    """What one child told, and when it was started (CLOCK_MONOTONIC)."""

    started_ns: int
    stages: list[tuple[str, int]]
    before: dict[str, int]
    after: dict[str, int]
    facts: dict[str, Any]

    def stages_ms(self) -> dict[str, float]:
        """Milliseconds of each stage, the first one from the start of the process."""
        found: dict[str, float] = {}
        last = self.started_ns
        for name, at in self.stages:
            found[name] = (at - last) / 1e6
            last = at
        return found

    @property
    def total_ms(self) -> float:
        """Milliseconds from the start of the process to its last stage, without NOT_COUNTED."""
        return sum(ms for name, ms in self.stages_ms().items() if name not in NOT_COUNTED)

    @property
    def added_ms(self) -> float:
        """Milliseconds after the operands were ready."""
        return self.total_ms - sum(self.stages_ms()[name] for name in BASE)

    def added_mib(self, kind: str) -> float:
        """MiB of a kind of memory that came after the operands were ready."""
        return (self.after[kind] - self.before[kind]) / 1024


NOT_COUNTED = ("memory read", "keys read")
"""Stages that only the measurement has."""

BASE = ("python", "import torch", "context", "operands")
"""Stages of plain torch."""


class FailedChildError(Exception):
    """A child failed, or did not do what it should."""


def start(
    mode: str,
    keys: str,
    *,
    store: Path,
    shape: tuple[int, int],
    count: int = 0,
    jit: Path | None = None,
) -> Child:
    """Run one child and take in what it tells; raises FailedChildError."""
    program = str(Path(__file__).resolve().with_name("cold_child.py"))
    command = [sys.executable, program, mode, keys, str(count), *map(str, shape)]
    environment = {**os.environ, "LLBF16_AOT_STORE": str(store)}
    if jit is not None:
        environment = host_report.with_compiler(environment, jit)
    started = time.monotonic_ns()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise FailedChildError(f"{mode} took more than {TIMEOUT_S} s") from error
    if done.returncode:
        raise FailedChildError(f"{mode} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    told = json.loads(done.stdout.strip().rpartition("\n")[2])
    return msgspec.convert({"started_ns": started, **told}, type=Child)


def manifest_keys(name: str, target: Target) -> list[CompileKey]:
    """The keys that a manifest's problems need on a target, the first router's M = 1 first."""
    keys: dict[CompileKey, None] = {}
    for router in Manifest.load(name).routers:
        table = load_table(router.tuning, target)
        problems: Iterable[Problem] = sorted(router.problems(), key=lambda p: (p.tokens, not p.pdl))
        for problem in problems:
            try:
                keys[dispatch(problem, target, table)] = None
            except LibraryChosenError:
                continue
    return list(keys)


def stored_keys(store: Store, target: Target, count: int) -> list[CompileKey]:
    """So many keys that a store has for a target, without probes; ValueError where it has fewer."""
    found: list[CompileKey] = []
    for digest in store.digests():
        artifact = store.get(digest)
        if isinstance(artifact, Miss):
            continue
        key = artifact.record.key
        if key.target == str(target) and key.backend != "probe":
            found.append(key)
            if len(found) == count:
                return found
    raise ValueError(f"{store.root} has {len(found)} kernels for {target}, needed are {count}")


def stage_medians(children: Sequence[Child]) -> dict[str, float]:
    """The median of each stage, in milliseconds."""
    stages = [child.stages_ms() for child in children]
    return {name: statistics.median(one[name] for one in stages) for name in stages[0]}


def summary(children: Mapping[str, Sequence[Child]]) -> dict[str, Any]:
    """The figures of the kinds `torch`, `ours` and, where measured, `jit`."""
    base, ours, jit = children["torch"], children["ours"], children.get("jit")
    figures: dict[str, Any] = {
        "ms_above_torch": statistics.median(child.added_ms for child in ours),
        "ms_between_kinds": host_report.over(
            [child.total_ms for child in ours], [child.total_ms for child in base]
        ),
        "jit_ms_above_torch": None,
        "mib_above_torch": statistics.median(child.added_mib("resident_kib") for child in ours),
        "mib_between_kinds": _mib_over(ours, base, "resident_kib"),
        "private_dirty_mib_between_kinds": _mib_over(ours, base, "private_dirty_kib"),
        "jit_mib_above_torch": None,
    }
    if jit:
        figures["jit_ms_above_torch"] = statistics.median(child.added_ms for child in jit)
        figures["jit_mib_above_torch"] = statistics.median(
            child.added_mib("resident_kib") for child in jit
        )
    return figures


def _mib_over(children: Sequence[Child], base: Sequence[Child], kind: str) -> float:
    return host_report.over(
        [child.after[kind] / 1024 for child in children],
        [child.after[kind] / 1024 for child in base],
    )


def preload_summary(children: Mapping[int, Sequence[Child]]) -> dict[str, Any]:
    """What a key costs at each number of keys, the line through them, and whether it is one."""
    ms = {
        count: statistics.median(child.stages_ms()["preload"] for child in found)
        for count, found in children.items()
    }
    counts = sorted(ms)
    few, many = counts[0], counts[-1]
    return {
        "ms": {str(count): ms[count] for count in counts},
        "ms_per_key": {str(count): ms[count] / count for count in counts},
        "ms_per_further_key": {
            f"{low} to {high}": (ms[high] - ms[low]) / (high - low)
            for low, high in itertools.pairwise(counts)
        },
        "ratio_per_key": (ms[many] / many) / (ms[few] / few),
        "ratio_of": f"the cost of a key at {many} over that at {few}",
        "fit": host_report.fit(ms),
    }


def spread(children: Sequence[Child]) -> dict[str, Any]:
    """Quartiles of the totals, the stages' medians, memory: one kind of child."""
    low, middle, high = host_report.quartiles([child.total_ms for child in children])
    return {
        "children": len(children),
        "total_ms": middle,
        "total_low_ms": low,
        "total_high_ms": high,
        "stages_ms": stage_medians(children),
        "resident_mib": statistics.median(c.after["resident_kib"] / 1024 for c in children),
        "private_dirty_mib": statistics.median(
            c.after["private_dirty_kib"] / 1024 for c in children
        ),
        "facts": children[-1].facts,
    }


def measure_kinds(
    store: Path, jit: Path | None, keys_file: str, shape: tuple[int, int], repeats: int, jits: int
) -> dict[str, list[Child]]:
    """Children of each kind in turns, the first of each dropped."""
    found: dict[str, list[Child]] = {"torch": [], "ours": []}
    for number in range(repeats + 1):
        kinds = ["torch", "ours"]
        if jit is not None and number <= jits:
            kinds.append("jit")
        for mode in kinds:
            if mode == "jit":
                child = start(mode, keys_file, store=store, shape=shape, jit=jit)
            else:
                child = start(mode, MANIFEST, store=store, shape=shape)
            if number:
                found.setdefault(mode, []).append(child)
            print(f"{mode} {number}: {child.total_ms:.0f} ms", flush=True)
    return found


def measure_preload(
    store: Path, keys_file: str, shape: tuple[int, int], counts: Sequence[int]
) -> dict[int, list[Child]]:
    """Children that load so many keys, in turns, the first of each dropped."""
    found: dict[int, list[Child]] = {count: [] for count in counts}
    for number in range(PRELOAD_REPEATS + 1):
        for count in counts:
            child = start("preload", keys_file, store=store, shape=shape, count=count)
            loads = child.facts["loads"]
            if loads != count:
                raise FailedChildError(f"preload of {count} keys loaded {loads}")
            if number:
                found[count].append(child)
    return found


def run(options: argparse.Namespace) -> int:
    """Measure everything and write the report."""
    device = inventory().devices[0]
    target = Target(device.major, device.minor, "a")
    keys = manifest_keys(MANIFEST, target)
    router = Manifest.load(MANIFEST).routers[0]
    shape = (router.hidden, router.experts)
    reasons: dict[str, str] = {}
    preload: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory() as folder:
        keys_file = _write_keys(Path(folder) / "manifest.json", keys)
        children = measure_kinds(
            options.store, options.jit, keys_file, shape, options.repeats, options.jit_repeats
        )
        for child in children["ours"]:
            if child.facts["loads"] != len(keys):
                raise FailedChildError(
                    f"preload of {MANIFEST} loaded {child.facts['loads']} of {len(keys)} kernels"
                )
        if options.many_store is None:
            reasons["preload"] = "measured without --many-store"
        else:
            many = stored_keys(Store(options.many_store), target, max(COUNTS))
            many_file = _write_keys(Path(folder) / "many.json", many)
            preload = preload_summary(measure_preload(options.many_store, many_file, shape, COUNTS))
    if options.jit is None:
        reasons["jit_ms_above_torch"] = "measured without --jit: no compiler was given"
    figures = summary(children)
    report = {
        "schema": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": options.commit,
        **machine_facts(),
        "cpu": host_report.cpu_name(),
        "protocol": PROTOCOL,
        **figures,
        "limits": LIMITS,
        "met": {name: figures[name] <= limit for name, limit in LIMITS.items()},
        "reasons": reasons,
        "keys": len(keys),
        "page_cache": "warm",
        "preload": preload,
        "kinds": {kind: spread(found) for kind, found in children.items()},
    }
    host_report.write(options.out, report)
    for name in (*figures, "preload"):
        print(f"{name}: {report[name]} {reasons.get(name, '')}")
    return 0


def _write_keys(path: Path, keys: Sequence[CompileKey]) -> str:
    path.write_bytes(msgspec.json.encode(keys))
    return str(path)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    whole = commands.add_parser("run")
    whole.add_argument("--store", type=_folder, required=True)
    whole.add_argument("--out", type=Path, required=True)
    whole.add_argument("--many-store", type=_folder)
    whole.add_argument("--jit", type=_folder)
    whole.add_argument("--repeats", type=int, default=REPEATS)
    whole.add_argument("--jit-repeats", type=int, default=JIT_REPEATS)
    whole.add_argument("--commit", default="unknown")
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except (AotError, FailedChildError, ValueError) as error:
        hint = getattr(error, "hint", "")
        print(f"bench_cold_start: {error}" + (f"\nhint: {hint}" if hint else ""), file=sys.stderr)
        return 1


def _folder(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return path


if __name__ == "__main__":
    sys.exit(main())
