"""What a call costs on the host: ours beside torch's, a bare launch, and CuTe DSL's own call.

bench_host.py run --out FILE [--jit DIR]    measure on this machine's GPU; the report
bench_host.py manifest --out FILE           a manifest of what it asks of the store

The store is LLBF16_AOT_STORE. Exit status 1 where an answer was wrong or no stored kernel gave it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import host_report
import msgspec
from bench_launch import Statement
from gpu_report import machine_facts
from host_report import Timing

SHAPES = ((7168, 256), (2048, 128))
"""Hidden size and experts: DeepSeek-V3's router and Qwen3-30B-A3B's."""

TOKENS = (1, 8, 16)
MODES = ("ordinary", "inference_mode")

CALLS = 200
"""Calls of a loop: fewer than the launches that a queue holds, so that none waits for the GPU."""

ROUNDS = 21
WARMUP_CALLS = 20
TIMEOUT_S = 300
"""Limit of each measuring process; it takes half a minute where nothing hangs."""

LIMITS = {"ratio_to_linear": 0.5, "ratio_to_jit_call": 0.6, "us_above_floor": 2.5}
"""What the figures are asked to be at most."""

PROTOCOL = (
    f"Host time a call: a loop of {CALLS} asynchronous calls, timed with time.perf_counter_ns by "
    "timeit (the statement inlined, garbage collection off), over the number of calls; before each "
    "loop the GPU is drained, so the queue never fills. All rows of a cell are timed in turns, "
    f"{ROUNDS} rounds after {WARMUP_CALLS} warm-up calls, each round starting with another row; "
    "median and quartiles of the rounds. Ratios are of medians of one process. Run 'plain' has no "
    "compiler; run 'compiler' (only with --jit) has the same rows and the DSL's own calls beside "
    "them, and only ratio_to_jit_call is taken from it. Floor: torch.empty and the "
    "cheapest launch with everything prepared, as one statement. Headline figures are of the worst "
    "of all cells. Every row's answer is checked against float64 first."
)


def manifest() -> str:
    """A manifest with every key that the runs ask for, whichever launch a runtime chooses.

    And one of each older family, which the proof of the same launch wants to see.
    """
    lines = ["# What scripts/bench_host.py asks for.", "schema: 1", "name: bench-host"]
    lines += ["targets: [sm_90a]", "defaults:", f"  tokens: [{', '.join(map(str, TOKENS))}]"]
    lines += ["  out_dtype: fp32", "  pdl: both", "routers:"]
    lines += [f"  - {{model: {k} x {n}, hidden: {k}, experts: {n}}}" for k, n in SHAPES]
    lines += ["  - model: launch proof", "    hidden: 4096", "    experts: 256"]
    lines += ["    tokens: [1, 8]", "    tuning: reference"]
    return "\n".join(lines) + "\n"


class Measured(msgspec.Struct, frozen=True):
    """What one measuring process found."""

    facts: dict[str, Any]
    timings: list[Timing]
    statements: dict[str, str]
    unavailable: dict[str, str]
    compiler_imported: bool


def measure(store: Path, out: Path, *, run: str) -> int:
    """Measure every cell in this process; 1, with the reason on stderr, where that cannot be."""
    import torch
    from llbf16_aot.errors import AotError
    from llbf16_aot.store import Store

    if not torch.cuda.is_available():
        print("bench_host: torch sees no GPU: run this on a GPU machine", file=sys.stderr)
        return 1
    torch.cuda.init()
    # After the check: the rows are made of calls that only a GPU machine has.
    from host_rows import Bench, WrongAnswerError

    timings: list[Timing] = []
    statements: dict[str, str] = {}
    try:
        bench = Bench(Store(store), compiler=run == "compiler")
        for hidden, experts in SHAPES:
            for tokens in TOKENS:
                rows = bench.rows(hidden, experts, tokens)
                statements |= {name: row.text for name, row in rows.items()}
                for mode in MODES:
                    with torch.inference_mode(mode == "inference_mode"):
                        found = time_rows(rows, torch.cuda.synchronize)
                    timings += [
                        Timing(run, mode, hidden, experts, tokens, row, middle, low, high)
                        for row, (low, middle, high) in found.items()
                    ]
                    print(f"{run}: {mode} K={hidden} N={experts} M={tokens}", flush=True)
        bench.check_stored()
    except (AotError, WrongAnswerError) as error:
        hint = getattr(error, "hint", "")
        print(f"bench_host: {error}" + (f"\nhint: {hint}" if hint else ""), file=sys.stderr)
        return 1
    facts = {**machine_facts(), "cpu": host_report.cpu_name()}
    imported = "cutlass" in sys.modules
    measured = Measured(facts, timings, statements, bench.unavailable, imported)
    out.write_bytes(msgspec.json.encode(measured))
    return 0


def time_rows(
    rows: dict[str, Statement],
    drain: Callable[[], object],
    *,
    clock: Callable[[], int] = time.perf_counter_ns,
    rounds: int = ROUNDS,
    calls: int = CALLS,
) -> dict[str, tuple[float, float, float]]:
    """Quartiles of the microseconds a call of each row, all rows measured in turns."""
    timers = {
        name: timeit.Timer(row.text, timer=clock, globals=row.names) for name, row in rows.items()
    }
    for timer in timers.values():
        timer.timeit(WARMUP_CALLS)
    found: dict[str, list[float]] = {name: [] for name in rows}
    for order in host_report.turns(tuple(rows), rounds):
        for name in order:
            drain()
            found[name].append(host_report.micros(int(timers[name].timeit(calls)), calls))
    drain()
    return {name: host_report.quartiles(values) for name, values in found.items()}


def report_of(runs: Mapping[str, Measured], *, commit: str, date: str) -> dict[str, Any]:
    """The report of one or two measuring processes; without "compiler" the ratio to it is null."""
    plain = runs["plain"]
    timings = [timing for run in runs.values() for timing in run.timings]
    found = host_report.cells(timings)
    figures = host_report.headline(found)
    reasons: dict[str, str] = {}
    if figures["ratio_to_jit_call"] is None:
        absent = "measured without --jit: no compiler was given"
        compiler = runs.get("compiler")
        reasons["ratio_to_jit_call"] = (
            absent if compiler is None else compiler.unavailable.get(host_report.JIT, "not timed")
        )
    met = {
        name: None if (figure := figures[name]) is None else figure <= limit
        for name, limit in LIMITS.items()
    }
    statements = dict(item for run in runs.values() for item in run.statements.items())
    facts = dict(plain.facts)
    if "compiler" in runs:
        facts["versions_with_compiler"] = runs["compiler"].facts["versions"]
    return {
        "schema": 1,
        "date": date,
        "commit": commit,
        **facts,
        "protocol": PROTOCOL,
        **figures,
        "limits": LIMITS,
        "met": met,
        "reasons": reasons,
        "compiler_imported": {name: run.compiler_imported for name, run in runs.items()},
        "cells": found,
        "unavailable": {name: run.unavailable for name, run in runs.items()},
        "statements": statements,
        "rows": timings,
    }


def run(store: Path, out: Path, *, jit: Path | None, commit: str) -> int:
    """Measure in a process without the compiler, and in one with it if asked; write the report."""
    runs: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("plain",) if jit is None else ("plain", "compiler"):
            result = Path(folder) / f"{name}.json"
            command = [sys.executable, str(Path(__file__).resolve()), "measure"]
            command += ["--store", str(store), "--out", str(result), "--run", name]
            environment = {**os.environ, "LLBF16_AOT_STORE": str(store)}
            if name == "compiler" and jit is not None:
                environment = host_report.with_compiler(environment, jit)
            try:
                subprocess.run(command, env=environment, timeout=TIMEOUT_S, check=True)
            except subprocess.SubprocessError as error:
                late = isinstance(error, subprocess.TimeoutExpired)
                how = f"took more than {TIMEOUT_S} s" if late else "failed"
                print(f"bench_host: the run {name} {how}", file=sys.stderr)
                return 1
            runs[name] = msgspec.json.decode(result.read_bytes(), type=Measured)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    report = report_of(runs, commit=commit, date=date)
    host_report.write(out, report)
    for name in LIMITS:
        print(f"{name}: {report[name]} (at most {LIMITS[name]}) {report['reasons'].get(name, '')}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    asked = commands.add_parser("manifest")
    asked.add_argument("--out", type=Path, required=True)
    whole = commands.add_parser("run")
    single = commands.add_parser("measure")
    for command in (whole, single):
        command.add_argument("--store", type=Path, required=True)
        command.add_argument("--out", type=Path, required=True)
    whole.add_argument("--jit", type=Path)
    whole.add_argument("--commit", default="unknown")
    single.add_argument("--run", choices=("plain", "compiler"), required=True)
    options = parser.parse_args(arguments)
    if options.command == "manifest":
        options.out.write_text(manifest(), encoding="utf-8")
        return 0
    store = options.store.resolve()
    if options.command == "measure":
        return measure(store, options.out, run=options.run)
    return run(store, options.out, jit=options.jit, commit=options.commit)


if __name__ == "__main__":
    sys.exit(main())
