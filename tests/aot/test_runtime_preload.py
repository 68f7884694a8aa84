"""Preloading and freezing: after it no call reads a file, loads code or is refused in a capture."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from fake_gpu import FakeDevices, FakeDriver, MemoryStore, artifact_for
from llbf16_aot import runtime as runtime_module
from llbf16_aot.artifact import Artifact
from llbf16_aot.dispatch import dispatch, load_table, warmup_keys
from llbf16_aot.errors import ColdCaptureError, ManifestError, MissError
from llbf16_aot.manifest import Manifest
from llbf16_aot.problem import DType, Problem, Target
from llbf16_aot.runtime import Pdl, Runtime
from llbf16_aot.store import Miss, MissReason
from llbf16_aot.wanted import Wanted
from runtime_kit import TOLERANCE, Bench, artifact, error_of, operands

MANIFEST = """
schema: 1
name: small
targets: [sm_90a]
defaults: {tokens: [1, 2, 5, 9], out_dtype: [fp32, fp16], pdl: both, tuning: reference}
routers:
  - {model: one, hidden: 64, experts: 8}
  - {model: two, hidden: 2304, experts: 12}
"""


def manifest() -> Manifest:
    return Manifest.parse(MANIFEST, origin="small.yaml")


def artifacts(target: str = "sm_90a") -> list[Artifact]:
    """What a build of the manifest publishes."""
    where = Target.parse(target)
    table = load_table("reference", where)
    problems = [p for router in manifest().routers for p in router.problems()]
    return [artifact_for(key) for key in dict.fromkeys(dispatch(p, where, table) for p in problems)]


class SilentStore(MemoryStore):
    """Artifacts that can be taken away: then every question is a fault."""

    gone = False

    def get(self, digest: str) -> Artifact | Miss:
        assert not self.gone, "the store was asked"
        return super().get(digest)


def made(**options: object) -> Bench:
    bench = Bench(*artifacts(), pdl="auto", **options)  # type: ignore[arg-type]
    bench.driver.contexts = {0}
    return bench


def test_after_preloading_a_manifest_every_call_of_it_finds_its_kernel() -> None:
    """One shape, type or launch that was not bound stalls a request, or breaks a capture."""
    bench = made(on_miss="error")
    report = bench.runtime.preload(manifest(), devices=[0])
    asked, loads, ready = len(bench.store.asked), bench.driver.loads, len(bench.driver.ready)
    assert (report.ok, report.devices, report.deferred) == (True, (0,), ())
    assert (report.wanted, report.loads, report.library) == (32, loads, 0)
    assert loads == len(artifacts()) == ready
    pdls: tuple[Pdl | None, ...] = (None, True, False, "auto")
    for captured in (True, False):
        bench.devices.captured = captured
        for hidden, experts in ((64, 8), (2304, 12)):
            for tokens in (1, 2, 5, 9):
                x, weight = operands(tokens, experts, hidden)
                for out_dtype in (torch.float32, torch.float16):
                    for pdl in pdls:
                        result = bench.runtime.run(x, weight, out_dtype=out_dtype, pdl=pdl)
                        assert error_of(result, x, weight) <= TOLERANCE[out_dtype]
    assert (len(bench.store.asked), bench.driver.loads) == (asked, loads)
    assert len(bench.driver.ready) == ready
    assert bench.runtime.stats().misses == {}


@pytest.mark.parametrize("given", ["path", "name", "manifest"])
def test_a_manifest_may_be_given_as_people_name_it(given: str, tmp_path: Path) -> None:
    """A server's option is a string: it must mean what it means to `build`."""
    path = tmp_path / "small.yaml"
    path.write_text(MANIFEST)
    bench = made()
    named: dict[str, Wanted] = {"path": path, "name": str(path), "manifest": manifest()}
    what = named[given]
    assert bench.runtime.preload(what, devices=[0]).wanted == 32
    with pytest.raises(ManifestError, match="no such file"):
        bench.runtime.preload("no-such-manifest")


def test_keys_are_made_ready_for_whatever_problem_they_serve() -> None:
    """One splitk kernel serves many M: each of them must find it loaded, in a capture too."""
    bench = made(on_miss="error")
    keys = warmup_keys([(2304, 12)], [5, 9], target=Target.parse("sm_90a"), tuning="reference")
    report = bench.runtime.preload(keys)
    assert (report.ok, report.wanted, report.loads) == (True, len(keys), len(keys))
    asked = len(bench.store.asked)
    bench.devices.captured = True
    for tokens in (5, 9, 33):
        x, weight = operands(tokens, 12, 2304)
        assert error_of(bench.runtime.run(x, weight), x, weight) <= 2e-6
    assert (len(bench.store.asked), bench.driver.loads) == (asked, len(keys))


def test_keys_of_another_target_are_left_out() -> None:
    """A list for the whole fleet must not report what this GPU never runs as missing."""
    bench = made()
    keys = [artifact(1, 8, 64).record.key, artifact(1, 8, 64, target="sm_100a").record.key]
    report = bench.runtime.preload(keys, devices=[0])
    assert (report.ok, report.wanted, report.loads) == (True, 1, 1)


@pytest.mark.parametrize("what", [[1], ["a", "b"], [Problem(1, 8, 64)]])
def test_what_is_neither_manifest_nor_key_is_refused(what: list[object]) -> None:
    """A list of names preloads nothing: the first request would find out."""
    with pytest.raises(TypeError, match="must be a manifest, its path or name, or CompileKeys"):
        made().runtime.preload(what)  # type: ignore[arg-type]


def test_what_is_missing_is_reported_once_and_the_rest_is_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A report that says 'ready' of what is not makes the stall happen in service."""
    bench = made()
    lost = artifact(1, 8, 64)
    bench.store.entries[lost.digest] = Miss(lost.digest, MissReason.DAMAGED, "a flipped byte")
    caplog.set_level(logging.WARNING, logger="llbf16_aot")
    report = bench.runtime.preload(manifest(), devices=[0])
    assert not report.ok
    (missing,) = report.missing
    assert (missing.subject, missing.reason) == (lost.digest, "damaged")
    assert report.loads == len(artifacts()) - 1
    (line,) = [r.getMessage() for r in caplog.records]
    assert "damaged: a flipped byte. torch computes it from now on. To mend it: list" in line
    bench.runtime.preload(manifest(), devices=[0])
    assert bench.runtime.stats().misses == {"damaged": 1}
    x, weight = operands(1, 8, 64)
    assert error_of(bench.runtime.run(x, weight, pdl=True), x, weight) <= 2e-6
    assert bench.runtime.stats().fallbacks == 1


def test_under_the_error_policy_a_missing_kernel_fails_the_preload() -> None:
    """A deployment that wants errors wants them before it takes traffic."""
    bench = made(on_miss="error")
    lost = artifact(1, 8, 64)
    del bench.store.entries[lost.digest]
    with pytest.raises(MissError, match=r"1 of what was to be preloaded .* absent") as raised:
        bench.runtime.preload(manifest(), devices=[0])
    assert "llbf16-aot build MANIFEST --target sm_90a" in raised.value.hint
    x, weight = operands(2, 8, 64)
    bench.devices.captured = True
    assert error_of(bench.runtime.run(x, weight), x, weight) <= 2e-6


def test_problems_that_the_table_leaves_to_the_library_are_counted_apart(tmp_path: Path) -> None:
    """Told as missing they send people to build what is chosen not to be there."""
    table = tmp_path / "table.json"
    table.write_text(
        '{"schema": 1, "name": "t", "source": "test", "rules": ['
        '{"tokens": [5, 64], "use": {"backend": "library"}},'
        '{"use": {"backend": "dotprod", "block": 128, "experts_per_block": 1}}]}'
    )
    where = Target.parse("sm_90a")
    rules = load_table(str(table), where)
    wanted = [
        Problem(tokens, experts, hidden, dtype, pdl)
        for tokens in (1, 2)
        for experts, hidden in ((8, 64), (12, 2304))
        for dtype in (DType.FP32, DType.FP16)
        for pdl in (True, False)
    ]
    kernels = [artifact_for(dispatch(problem, where, rules)) for problem in wanted]
    runtime = Runtime(
        MemoryStore(kernels),
        tuning=str(table),
        on_miss="error",
        driver=FakeDriver(kernels),
        devices=FakeDevices(),
    )
    report = runtime.preload(manifest(), devices=[0])
    assert (report.ok, report.wanted, report.library) == (True, 32, 16)
    runtime.freeze()
    for tokens in (5, 6):
        x, weight = operands(tokens, 8, 64)
        assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    assert (runtime.stats().library, runtime.stats().misses) == (2, {})


# ---- devices


def test_without_devices_all_that_the_process_sees_are_served_and_no_context_is_made() -> None:
    """Eight ranks that each open a context on eight GPUs waste half a gigabyte for each."""
    kernels = [*artifacts(), *artifacts("sm_100a")]
    bench = Bench(*kernels, pdl="auto", on_miss="error")
    bench.driver.capabilities = {0: (9, 0), 1: (10, 0), 2: (9, 0), 3: (9, 0)}
    bench.driver.contexts = {3}
    report = bench.runtime.preload(manifest())
    assert (report.ok, report.devices, report.deferred) == (True, (0, 3), (1, 2))
    assert report.wanted == 4 * 32
    assert {device for device, _ in bench.driver.ready} == {0, 3}
    assert {device for _, device in bench.driver.bound} == {0, 3}
    assert report.loads == bench.driver.loads == len(kernels)
    assert bench.devices.guarded == [0, 3]


def test_a_device_that_waits_for_its_context_is_served_without_the_disk() -> None:
    """Loaded for it only at its first call, a second kind of GPU would stall or miss."""
    kernels = artifacts("sm_100a")
    store = SilentStore(kernels)
    driver = FakeDriver(kernels)
    loader_device = 1  # compute capability 10.0
    runtime = Runtime(store, tuning="reference", driver=driver, devices=FakeDevices())
    driver.capabilities = {0: (8, 0), 1: (10, 0)}
    runtime.preload(manifest())
    store.gone = True
    runtime.freeze()
    loads = driver.loads
    found = runtime._first_call((Problem(2, 8, 64), True, loader_device))
    assert not isinstance(found, tuple), found
    assert driver.loads == loads
    assert [device for device, _ in driver.ready] == [1]


def test_a_device_that_is_not_there_is_refused() -> None:
    """Taken for a miss, a wrong ordinal would leave the right device cold."""
    with pytest.raises(ValueError, match="device is 2, this process sees 0 to 1"):
        made().runtime.preload(manifest(), devices=[2])


def test_preloading_during_a_capture_is_refused() -> None:
    """It would invalidate the graph, far from where that is noticed."""
    bench = made()
    bench.devices.captured = True
    with pytest.raises(ColdCaptureError, match="preload during stream capture"):
        bench.runtime.preload(manifest(), devices=[0])
    assert bench.driver.loads == 0


# ---- freezing


@pytest.mark.parametrize("on_miss", ["torch", "error"])
def test_after_freezing_nothing_is_read_or_loaded(on_miss: str) -> None:
    """One file read in a request on a slow mount is a stall that nobody finds."""
    kernels = artifacts()
    store = SilentStore(kernels)
    driver = FakeDriver(kernels)
    runtime = Runtime(
        store,
        tuning="reference",
        on_miss=on_miss,  # type: ignore[arg-type]
        driver=driver,
        devices=FakeDevices(),
    )
    served, cold = operands(2, 8, 64), operands(2, 12, 2304)
    runtime.run(*served)
    loads = driver.loads
    runtime.freeze()
    store.gone = True
    for _ in range(3):
        assert error_of(runtime.run(*served), *served) <= 2e-6
        if on_miss == "error":
            with pytest.raises(MissError, match="not-loaded: it was not preloaded") as raised:
                runtime.run(*cold)
            assert raised.value.hint == "name it in preload() before freeze()"
        else:
            assert error_of(runtime.run(*cold), *cold) <= 2e-6
    stats = runtime.stats()
    assert (driver.loads, stats.misses) == (loads, {"not-loaded": 1})
    assert (stats.fallbacks, stats.rejects) == ((0, 3) if on_miss == "error" else (3, 0))
    # A shape of a loaded kernel that was never called is no miss.
    assert error_of(runtime.run(*served, pdl=False), *served) <= 2e-6


def test_a_runtime_frozen_before_its_first_call_reads_no_tuning_table(tmp_path: Path) -> None:
    """The table is a file too: on a hung mount the first request would wait for it."""
    runtime = Runtime(
        MemoryStore(),
        tuning=str(tmp_path / "no-such-table.json"),
        driver=FakeDriver(),
        devices=FakeDevices(),
    )
    runtime.freeze()
    x, weight = operands(2, 8, 64)
    assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    assert runtime.stats().misses == {"not-loaded": 1}


def test_the_module_functions_act_on_the_process_runtime(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A second runtime behind one of them would be preloaded in vain."""
    import llbf16_aot

    bench = made(on_miss="error")
    monkeypatch.setattr(runtime_module._Process, "runtime", bench.runtime)
    assert llbf16_aot.preload(manifest(), devices=[0]).ok
    x, weight = operands(2, 8, 64)
    llbf16_aot.load_and_run(x, weight)
    llbf16_aot.load_and_run(x, weight)
    llbf16_aot.weights_updated(weight)
    llbf16_aot.load_and_run(x, weight)
    programmatic = [config.programmatic for _, config, _ in bench.driver.launches]
    assert programmatic == [False, True, False]
    llbf16_aot.freeze()
    with pytest.raises(MissError):
        llbf16_aot.load_and_run(*operands(3, 16, 64))
    assert llbf16_aot.stats() == bench.runtime.stats()
