"""One process start, told in stages: what bench_cold_start starts and times.

cold_child.py MODE KEYS COUNT HIDDEN EXPERTS    stages as JSON, the last line of stdout

MODE: `torch` stops before any package of ours, `ours` goes on with the store in LLBF16_AOT_STORE,
`jit` with CuTe DSL, `preload` loads COUNT keys. KEYS is a JSON file of compile keys; for `ours` it
is a manifest's name. Times are CLOCK_MONOTONIC, which all processes of a machine share.
"""

import sys
import time

_START_NS = time.monotonic_ns()

ROWS = 1
"""M of the first answer: a router's first decoded token."""


def stage(name: str) -> None:
    """Note that a stage has ended."""
    _STAGES.append((name, time.monotonic_ns()))


_STAGES = [("python", _START_NS)]


def memory() -> dict[str, int]:
    """Resident and privately written memory of this process in KiB, from /proc."""
    found = {"resident_kib": 0, "private_dirty_kib": 0}
    with open("/proc/self/status", encoding="utf-8") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                found["resident_kib"] = int(line.split()[1])
    with open("/proc/self/smaps_rollup", encoding="utf-8") as maps:
        for line in maps:
            if line.startswith("Private_Dirty:"):
                found["private_dirty_kib"] = int(line.split()[1])
    return found


def main(mode: str, keys: str, count: int, hidden: int, experts: int) -> int:
    """Run one mode; 1 where the first answer is wrong or a kernel was not loaded."""
    import torch

    stage("import torch")
    if not torch.cuda.is_available():
        print("cold_child: torch sees no GPU", file=sys.stderr)
        return 1
    torch.cuda.init()
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    stage("context")
    generator = torch.Generator().manual_seed(7)
    host_x = torch.randn((ROWS, hidden), generator=generator).bfloat16()
    host_weight = torch.randn((experts, hidden), generator=generator).bfloat16()
    x, weight = host_x.cuda(), host_weight.cuda()
    torch.cuda.synchronize()
    stage("operands")
    before = memory()
    stage("memory read")
    facts: dict[str, object] = {}
    answer = None
    if mode == "ours":
        answer = _ours(x, weight, keys, facts)
    elif mode == "jit":
        answer = _jit(x, weight, keys, facts)
    elif mode == "preload":
        _preload(keys, count, facts)
    after = memory()
    if answer is not None:
        exact = host_x.double() @ host_weight.double().t()
        error = float((answer.cpu().double() - exact).norm() / exact.norm())
        facts["relative_error"] = error
        if not error <= 2e-6:
            print(f"cold_child: the first answer has relative error {error:.2e}", file=sys.stderr)
            return 1
    import json

    told = {"stages": _STAGES, "before": before, "after": after, "facts": facts}
    print(json.dumps(told), flush=True)
    return 0


def _ours(x, weight, manifest, facts):  # type: ignore[no-untyped-def]
    """Preload a manifest and compute: the way of a server."""
    import torch
    from llbf16_aot import Runtime

    stage("import llbf16_aot")
    runtime = Runtime(on_miss="error")
    stage("runtime")
    report = runtime.preload(manifest)
    stage("preload")
    _refuse_missing(report)
    answer = runtime.run(x, weight)
    torch.cuda.synchronize()
    stage("answer")
    facts["loads"] = runtime.stats().loads
    facts["compiler_imported"] = "cutlass" in sys.modules
    return answer


def _jit(x, weight, keys, facts):  # type: ignore[no-untyped-def]
    """Compile the same keys in this process and compute with the first of them."""
    import torch

    wanted = _read_keys(keys)
    stage("keys read")
    import bench_jit

    stage("import compiler")
    calls = [bench_jit.compile_call(key) for key in wanted]
    stage("compile")
    answer = torch.empty((x.shape[0], weight.shape[0]), device="cuda")
    calls[0](x, weight, answer, bench_jit.stream_of(torch.cuda.current_stream().cuda_stream))
    torch.cuda.synchronize()
    stage("answer")
    facts["compiled"] = len(calls)
    return answer


def _preload(keys, count, facts):  # type: ignore[no-untyped-def]
    """Load so many kernels, and none before."""
    from llbf16_aot import Runtime

    wanted = _read_keys(keys)[:count]
    runtime = Runtime(on_miss="error")
    stage("runtime")
    report = runtime.preload(wanted)
    stage("preload")
    _refuse_missing(report)
    facts["loads"] = runtime.stats().loads


def _refuse_missing(report):  # type: ignore[no-untyped-def]
    """End the process where a kernel is missing, in the runtime's own words."""
    if report.missing:
        first = report.missing[0]
        sys.exit(f"cold_child: {len(report.missing)} kernels missing: {first.message}")


def _read_keys(path):  # type: ignore[no-untyped-def]
    import msgspec
    from llbf16_aot.key import CompileKey

    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=list[CompileKey])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], *(int(text) for text in sys.argv[3:6])))
