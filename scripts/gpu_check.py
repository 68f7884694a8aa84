"""The GPU check: stored kernels against float64 on a machine that has no compiler.

gpu_check.py manifests --out DIR            what to build beforehand, on any machine
gpu_check.py run --store DIR --out FILE     the check; exit status 1 where anything failed
gpu_check.py single BACKEND --store DIR     a few launches of one backend, for compute-sanitizer
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import gpu_plan
import torch
from gpu_case import Output, Run, Wide, call, exact_product, judge, operands
from gpu_plan import Case, WideCase
from gpu_producer import Producers
from gpu_report import Report, machine_facts, pytest_facts

REPEATS = 100
REPLAYS = 20
GRAPH_CALLS = 1_000
ENDURANCE_REPLAYS = 1_000
SANITIZER_TIMEOUT_S = 45
"""Each of these checks ends within ten seconds on an H200, or hangs."""


def check_grid(report: Report, runs: dict[str, Run]) -> None:
    """Every case of the plan once, fresh inputs each time."""
    for case in gpu_plan.cases():
        with report.case(case):
            x, weight = operands(case)
            out = Output(case)
            call(runs[case.table], case, x, weight, out)
            judge(report, case, out, exact_product(x, weight), case)
    with report.case("every case ran a stored kernel"):
        # A table may leave a problem to the library, which would then be what was checked.
        for table, run in runs.items():
            stats = run.__self__.stats()  # type: ignore[attr-defined]
            if stats.library or stats.fallbacks or stats.misses:
                raise ValueError(f"table {table}: {stats}")


def check_wide(report: Report, runs: dict[str, Run]) -> None:
    """fp32 weights and epilogues: right, the same bits in every run, and behind a late producer."""
    for case in gpu_plan.wide_cases():
        with report.case(case):
            wide = Wide(case)
            outs = [Output(case) for _ in range(3)]
            for out in outs:
                wide.call(runs[case.table], case, out.tensor, wide.x)
            judge(report, case, outs[0], wide.exact, case)
            first = outs[0].tensor.view(torch.uint8)
            if not all(out.tensor.view(torch.uint8).equal(first) for out in outs):
                raise ValueError("other bits in 3 runs")
    producers = Producers()
    for name, case in gpu_plan.WIDE_SINGLES.items():
        for pdl in (True, False):
            with report.case(f"{name} pdl={pdl}, x written late"):
                wide = Wide(case)
                asked = case._replace(pdl=pdl)
                out, x = Output(asked), torch.full_like(wide.x, float("nan"))
                wide.call(runs[case.table], asked, out.tensor, wide.x)
                out.poison()
                torch.cuda.synchronize()
                producers.late_copy(x, wide.x.contiguous())
                wide.call(runs[case.table], asked, out.tensor, x)
                judge(report, asked, out, wide.exact, asked)


def check_views(report: Report, runs: dict[str, Run]) -> None:
    """Rows further apart than K, with memory between them that must not be read."""
    for table in gpu_plan.FORCED:
        for hidden, experts in ((7168, 256), (2880, 7)):
            for tokens in (1, 3, 16, 17, 64):
                for x_pad, weight_pad in ((8, 0), (0, 8), (24, 128)):
                    case = Case(table, hidden, experts, tokens, "fp32", True)
                    what = f"{case} x_pad={x_pad} weight_pad={weight_pad}"
                    with report.case(what):
                        x, weight = operands(case, x_pad=x_pad, weight_pad=weight_pad)
                        out = Output(case)
                        call(runs[table], case, x, weight, out)
                        judge(report, case, out, exact_product(x, weight), what)


def check_same_bits(report: Report, runs: dict[str, Run]) -> None:
    """The same inputs give the same bits, launched back to back and launched alone."""
    for table in gpu_plan.FORCED:
        for hidden, experts in ((7168, 384), (2880, 264), (2304, 7)):
            for tokens in (1, 4, 7, 16, 17, 64):
                for pdl in (True, False):
                    case = Case(table, hidden, experts, tokens, "fp32", pdl)
                    with report.case(f"{case} x {REPEATS}"):
                        _same_bits(report, case, runs[table])


def _same_bits(report: Report, case: Case, run: Run) -> None:
    x, weight = operands(case)
    outs = [Output(case) for _ in range(REPEATS)]
    for out in outs:
        call(run, case, x, weight, out)
    judge(report, case, outs[0], exact_product(x, weight), case)
    first = outs[0].tensor.view(torch.int32)
    same = torch.stack([out.tensor.view(torch.int32).eq(first).all() for out in outs]).tolist()
    if not all(same):
        raise ValueError(f"other bits in {same.count(False)} of {REPEATS} runs")


def check_graphs(report: Report, runs: dict[str, Run]) -> None:
    """Captured behind a kernel and behind a copy, replayed with changed inputs."""
    for producer in ("kernel", "memcpy"):
        for table in gpu_plan.FORCED:
            for out_dtype in gpu_plan.OUT_DTYPES:
                for tokens in (1, 3, 16, 33):
                    for pdl in (True, False):
                        case = Case(table, 7168, 256, tokens, out_dtype, pdl)
                        what = f"{case} in a graph behind a {producer}, {REPLAYS} replays"
                        with report.case(what):
                            _replays(report, case, runs[table], producer, what)


def _replays(report: Report, case: Case, run: Run, producer: str, what: str) -> None:
    source, weight = operands(case)
    x = torch.full_like(source, float("nan"))
    first, second = Output(case), Output(case)
    call(run, case, source, weight, first)  # loads the kernel, which no capture may
    torch.cuda.synchronize()

    def body() -> None:
        if producer == "kernel":
            torch.add(source, 0, out=x)
        else:
            x.copy_(source)
        call(run, case, x, weight, first)
        call(run, case, x, weight, second)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    for replay in range(REPLAYS):
        x.fill_(float("nan"))
        source.copy_(torch.randn(source.shape, device="cuda"))
        weight.copy_(torch.randn(weight.shape, device="cuda"))
        first.poison()
        second.poison()
        graph.replay()
        exact = exact_product(source, weight)
        for out in (first, second):
            judge(report, case, out, exact, f"{what}, replay {replay}")


def check_endurance(report: Report, runs: dict[str, Run]) -> None:
    """A million dependent launches behind a producer each: no error, and the same bits throughout.

    What a cluster's exit protocol gets wrong shows only now and then: a block that ends while a
    peer still writes to it, or a launch that starts over the remains of the one before.
    """
    for table in gpu_plan.FORCED:
        for hidden, experts, tokens in ((7168, 256, 8), (2880, 32, 1)):
            case = Case(table, hidden, experts, tokens, "fp32", True)
            what = f"{case}, {GRAPH_CALLS * ENDURANCE_REPLAYS} launches in graphs"
            with report.case(what):
                _endure(report, case, runs[table], what)


def _endure(report: Report, case: Case, run: Run, what: str) -> None:
    source, weight = operands(case)
    x = torch.empty_like(source)
    out = Output(case)
    call(run, case, source, weight, out)
    judge(report, case, out, exact_product(source, weight), what)
    expected = out.tensor.clone().view(torch.int32)
    other_bits = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            torch.add(source, 0, out=x)
            call(run, case, x, weight, out)
        # On the device, so that no replay waits for the host.
        other_bits += out.tensor.view(torch.int32).ne(expected).sum()
    for replay in range(ENDURANCE_REPLAYS):
        graph.replay()
        if replay % 100 == 99:
            torch.cuda.synchronize()
            report.alive()
    if int(other_bits):
        raise ValueError(f"{int(other_bits)} elements with other bits")


def check_late_producer(report: Report, runs: dict[str, Run]) -> None:
    """Behind a kernel that lets its dependents start and writes 100 us later.

    The control comes first: a kernel that does not wait must see the old bytes, else these cases
    could not fail.
    """
    producers = Producers()
    with report.case("control: a dependent kernel that does not wait reads the old bytes"):
        new = torch.zeros(4096, dtype=torch.int32, device="cuda")
        late, seen = torch.full_like(new, -1), torch.full_like(new, 7)
        torch.cuda.synchronize()
        # Twice: a kernel's first launch may load code, and that waits for the GPU.
        for _ in range(2):
            late.fill_(-1)
            torch.cuda.synchronize()
            producers.late_copy(late, new)
            producers.copy_at_once(seen, late)
            torch.cuda.synchronize()
        old = int(seen.eq(-1).sum())
        report.facts["late_producer_control_found"] = old > 0
        if not old or int(late.abs().max()):
            raise ValueError(f"the control read {old} old words of {len(seen)}")
    for table in gpu_plan.FORCED:
        for hidden, experts in ((7168, 384), (2880, 32), (520, 32)):
            for tokens in (1, 4, 7, 16, 17, 64):
                for pdl in (True, False):
                    case = Case(table, hidden, experts, tokens, "fp32", pdl)
                    with report.case(f"{case}, x written late"):
                        _late_x(report, case, runs[table], producers)
                    with report.case(f"{case}, output read late"):
                        _late_reader(report, case, runs[table], producers)
                case = Case(table, hidden, experts, tokens, "fp32", False)
                with report.case(f"{case}, weight written late"):
                    _late_weight(report, case, runs[table], producers)


def _late_x(report: Report, case: Case, run: Run, producers: Producers) -> None:
    source, weight = (tensor.contiguous() for tensor in operands(case))
    x = torch.full_like(source, float("nan"))
    out = Output(case)
    call(run, case, source, weight, out)
    out.poison()
    exact = exact_product(source, weight)
    torch.cuda.synchronize()
    producers.late_copy(x, source)
    call(run, case, x, weight, out)
    judge(report, case, out, exact, case)


def _late_reader(report: Report, case: Case, run: Run, producers: Producers) -> None:
    """What the kernel ahead still reads of the output's memory must be what was there before."""
    x, weight = operands(case)
    out = Output(case)
    call(run, case, x, weight, out)
    out.poison()
    copy = torch.zeros_like(out.tensor)
    exact = exact_product(x, weight)
    torch.cuda.synchronize()
    producers.late_copy(copy, out.tensor)
    call(run, case, x, weight, out)
    judge(report, case, out, exact, case)
    written = int(copy.view(torch.int32).ne(-1).sum())
    if written:
        raise ValueError(f"{written} elements were written before the kernel ahead had ended")


def _late_weight(report: Report, case: Case, run: Run, producers: Producers) -> None:
    x, source = (tensor.contiguous() for tensor in operands(case))
    weight = torch.full_like(source, float("nan"))
    out = Output(case)
    call(run, case, x, source, out)
    out.poison()
    exact = exact_product(x, source)
    torch.cuda.synchronize()
    producers.late_copy(weight, source)
    call(run, case, x, weight, out)
    judge(report, case, out, exact, case)


def check_sanitizer(report: Report, store: Path) -> None:
    """compute-sanitizer on a few launches of each backend."""
    found = shutil.which("compute-sanitizer")
    tool = found or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    results: dict[str, dict[str, object]] = {}
    report.facts["sanitizer"] = results
    for backend in (*gpu_plan.FORCED, *gpu_plan.WIDE_SINGLES):
        for check in ("memcheck", "racecheck"):
            report.alive()
            with report.case(f"{check} {backend}"):
                if tool is None:
                    raise FileNotFoundError("compute-sanitizer is not installed")
                command = [tool, "--tool", check, "--error-exitcode", "9"]
                command += ["--report-api-errors", "no", "--print-limit", "20"]
                command += [sys.executable, str(Path(__file__).resolve()), "single", backend]
                try:
                    done = subprocess.run(
                        [*command, "--store", str(store)],
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                        timeout=SANITIZER_TIMEOUT_S,
                        # Cached blocks would hide accesses beyond the end of a tensor.
                        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                    )
                except subprocess.TimeoutExpired:
                    # Not its own message, which is this machine's command line.
                    raise TimeoutError(f"did not end within {SANITIZER_TIMEOUT_S} s") from None
                tail = done.stdout[-3000:]
                clean = done.returncode == 0 and "0 errors" in tail and "SINGLE OK" in tail
                if check == "racecheck":
                    clean = done.returncode == 0 and "SINGLE OK" in tail and "0 hazards" in tail
                results.setdefault(backend, {})[check] = {
                    "clean": clean,
                    "exit_status": done.returncode,
                    "tail": [line for line in tail.splitlines() if "====" in line][-8:],
                }
                if not clean:
                    raise ValueError(f"exit status {done.returncode}:\n{tail}")


def single(backend: str, store: Path) -> int:
    """A few launches of one backend, judged on the CPU so that few other kernels run."""
    runs = runtimes(store, Path(tempfile.mkdtemp()))
    if backend in gpu_plan.WIDE_SINGLES:
        return _single_wide(gpu_plan.WIDE_SINGLES[backend], runs)
    faults = 0
    for hidden, experts, tokens in ((2880, 7, 17), (7168, 256, 3), (2304, 264, 16)):
        case = Case(backend, hidden, experts, tokens, "fp32", True)
        x, weight = operands(case, device="cpu")
        room = Output(case, device="cpu")
        out = torch.empty_like(room.tensor, device="cuda")
        out.copy_(room.tensor)
        runs[backend](x.contiguous().cuda(), weight.contiguous().cuda(), out=out, pdl=True)
        room.tensor.copy_(out)
        error, finite, _ = room.faults(exact_product(x, weight))
        good = finite and error <= gpu_plan.TOLERANCE["fp32"]
        print(f"{case}: relative error {error:.3e}, finite {finite}", flush=True)
        faults += not good
    print("SINGLE WRONG" if faults else "SINGLE OK", flush=True)
    return 1 if faults else 0


def _single_wide(case: WideCase, runs: dict[str, Run]) -> int:
    wide, room = Wide(case, device="cpu"), Output(case, device="cpu")
    out = torch.empty_like(room.tensor, device="cuda")
    out.copy_(room.tensor)
    runs[case.table](wide.x.contiguous().cuda(), wide.weight.contiguous().cuda(), out=out, pdl=True)
    room.tensor.copy_(out)
    error, finite, _ = room.faults(wide.exact)
    good = finite and error <= gpu_plan.TOLERANCE["fp32"]
    print(f"{case}: relative error {error:.3e}, finite {finite}", flush=True)
    print("SINGLE OK" if good else "SINGLE WRONG", flush=True)
    return 0 if good else 1


def runtimes(store: Path, folder: Path) -> dict[str, Run]:
    """For each tuning table the `run` of a runtime that never falls back."""
    from llbf16_aot.runtime import Runtime

    tables = gpu_plan.write_tables(folder)
    return {t: Runtime(store, tuning=path, on_miss="error").run for t, path in tables.items()}


def check(options: argparse.Namespace) -> int:
    report = Report(options.out, options.commit)
    report.watch()
    with report.section("machine"):
        report.facts |= machine_facts()
        with report.case("a GPU of compute capability 9.0"):
            if report.facts.get("compute_capability") != "9.0":
                raise ValueError(f"found {report.facts.get('device')}")
        with report.case("no compiler"):
            if report.facts["versions"]["nvidia-cutlass-dsl"] is not None:
                raise ValueError("nvidia-cutlass-dsl is installed: this shows nothing about images")
    if report.failed:
        return report.write()
    torch.manual_seed(options.seed)
    report.facts["seed"] = options.seed
    with tempfile.TemporaryDirectory() as folder:
        runs = runtimes(options.store, Path(folder))
        for name, part in (
            ("grid", check_grid),
            ("wide", check_wide),
            ("views", check_views),
            ("same_bits", check_same_bits),
            ("graphs", check_graphs),
            ("late_producer", check_late_producer),
            ("endurance", check_endurance),
        ):
            with report.section(name):
                # A stream of its own: the default one may serialize what others overlap.
                with torch.cuda.stream(torch.cuda.Stream()):
                    part(report, runs)
                torch.cuda.synchronize()
            if report.broken:
                break
    with report.section("sanitizer"):
        check_sanitizer(report, options.store)
    with report.section("pytest"):
        _take_pytest(report, options.junit)
    return report.write()


def _take_pytest(report: Report, junit: Path | None) -> None:
    if junit is None:
        return
    with report.case(f"pytest, {junit}"):
        facts = pytest_facts(junit)
        report.facts["pytest"] = facts
        if facts["failures"] or facts["errors"] or not facts["passed"]:
            raise ValueError(f"pytest: {facts}")


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    manifests = commands.add_parser("manifests", help="write the manifests to build beforehand")
    manifests.add_argument("--out", type=_absolute, required=True)
    run = commands.add_parser("run", help="run the check")
    run.add_argument("--store", type=_absolute, required=True)
    run.add_argument("--out", type=_absolute, required=True)
    run.add_argument("--commit", default="unknown")
    run.add_argument("--junit", type=Path, help="result file of the pytest run to take in")
    run.add_argument("--seed", type=int, default=0)
    one = commands.add_parser("single", help="a few launches of one backend")
    one.add_argument("backend", choices=[*gpu_plan.FORCED, *gpu_plan.WIDE_SINGLES])
    one.add_argument("--store", type=_absolute, required=True)
    options = parser.parse_args()
    if options.command == "manifests":
        for path in gpu_plan.write_manifests(options.out):
            print(path)
        return 0
    if options.command == "single":
        return single(options.backend, options.store)
    return check(options)


if __name__ == "__main__":
    sys.exit(main())
