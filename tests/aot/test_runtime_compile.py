"""`on_miss="compile"`: a miss is compiled in a child process, published and served."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from fake_builds import use_fake_compiler
from fake_compiler import Deed
from fake_gpu import FakeDevices, FakeDriver, MemoryStore
from llbf16_aot import plan
from llbf16_aot.artifact import Artifact
from llbf16_aot.driver import Library
from llbf16_aot.errors import ColdCaptureError, CompilerMissingError, UsageError
from llbf16_aot.manifest import Manifest
from llbf16_aot.runtime import Runtime
from llbf16_aot.store import Store
from runtime_kit import artifact, error_of, operands

HIDDEN = int(Deed.ANSWER)
"""The fake compiler answers for this hidden size."""


class StoreDriver(FakeDriver):
    """Executes whatever the store on disk holds: what the fake compiler answers is no real code."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def load_library(self, cubin: bytes) -> Library:
        for digest in self._store.digests():
            found = self._store.get(digest)
            if isinstance(found, Artifact) and found.cubin == cubin:
                self.artifacts[cubin] = found
        return super().load_library(cubin)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    use_fake_compiler(monkeypatch)
    monkeypatch.setenv("LLBF16_AOT_COMPILE_TIMEOUT_S", "60")
    return Store(tmp_path / "store")


def made(store: Store) -> Runtime:
    return Runtime(
        store.root,
        tuning="reference",
        on_miss="compile",
        driver=StoreDriver(store),
        devices=FakeDevices(),
    )


def test_a_miss_is_compiled_published_and_served(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled and not published, every process of the fleet compiles it again."""
    runtime = made(store)
    caplog.set_level(logging.WARNING, logger="llbf16_aot")
    x, weight = operands(1, 32, HIDDEN)
    for _ in range(3):
        assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    stats = runtime.stats()
    assert (stats.hits, stats.loads, stats.compiled, stats.fallbacks) == (3, 1, 1, 0)
    assert stats.misses == {"absent": 1}
    (line,) = [r.getMessage() for r in caplog.records if r.name == "llbf16_aot"]
    assert "absent: " in line
    assert "does not exist. It is compiled now. To mend it: list hidden 8, experts 32" in line
    assert store.digests() == (artifact(1, 32, HIDDEN).digest,)
    again = made(store)
    again.run(x, weight)
    assert (again.stats().compiled, again.stats().loads) == (0, 1)


def test_a_manifest_is_compiled_as_far_as_it_is_missing_when_it_is_preloaded(store: Store) -> None:
    """Compiled one after the other, at the first calls, kernels stall what preload is for."""
    manifest = Manifest.parse(
        "schema: 1\nname: small\ntargets: [sm_90a]\n"
        "defaults: {tokens: [1, 2, 3], pdl: true, tuning: reference}\n"
        f"routers: [{{model: one, hidden: {HIDDEN}, experts: 32}}]\n",
        origin="small.yaml",
    )
    runtime = made(store)
    runtime.run(*operands(1, 32, HIDDEN))
    report = runtime.preload(manifest, devices=[0])
    assert (report.ok, report.wanted, report.loads) == (True, 3, 2)
    assert runtime.stats().compiled == 3
    runtime.freeze()
    for tokens in (1, 2, 3):
        x, weight = operands(tokens, 32, HIDDEN)
        assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    assert runtime.stats().hits == 4


def test_what_cannot_be_compiled_is_left_to_torch_with_the_compilers_reason(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled anew in every call, a kernel that fails takes a server down for good."""
    runtime = made(store)
    caplog.set_level(logging.WARNING, logger="llbf16_aot")
    x, weight = operands(1, 32, int(Deed.REFUSE))
    for _ in range(2):
        assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    stats = runtime.stats()
    assert (stats.compiled, stats.fallbacks) == (0, 2)
    assert stats.misses == {"absent": 1, "compile": 1}
    lines = [r.getMessage() for r in caplog.records if r.name == "llbf16_aot"]
    assert len(lines) == 2
    assert "compile: " in lines[1]
    assert "torch computes it from now on." in lines[1]


def test_what_no_build_can_mend_is_left_to_torch_at_once(store: Store) -> None:
    """Where no kernel exists, a compiler process for each prefill would be started in vain."""
    runtime = made(store)
    x, weight = operands(65, 32, HIDDEN)
    assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    assert (runtime.stats().misses, runtime.stats().library) == ({}, 1)
    x, weight = x.float(), weight.float()
    assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    assert (runtime.stats().misses, runtime.stats().compiled) == ({"unsupported": 1}, 0)


def test_nothing_is_compiled_in_a_capture_or_after_freezing(store: Store) -> None:
    """Seconds of compiling in a capture or in a frozen server are what these forbid."""
    runtime = made(store)
    devices = runtime._devices
    assert isinstance(devices, FakeDevices)
    devices.captured = True
    x, weight = operands(1, 32, HIDDEN)
    with pytest.raises(ColdCaptureError):
        runtime.run(x, weight)
    devices.captured = False
    runtime.freeze()
    assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    assert (runtime.stats().compiled, runtime.stats().misses) == (0, {"not-loaded": 1})
    assert store.digests() == ()


def test_without_the_build_extra_the_error_says_what_to_install(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to torch instead, a policy that somebody chose would silently not be there."""
    monkeypatch.setattr(plan, "toolchain", lambda: None)
    runtime = made(store)
    for _ in range(2):
        with pytest.raises(CompilerMissingError) as raised:
            runtime.run(*operands(1, 32, HIDDEN))
        assert raised.value.hint == "pip install 'llbf16-aot[build]'"


def test_a_store_that_nothing_can_be_published_in_is_refused_at_once() -> None:
    """Found out at the first miss, it is found out in service."""
    with pytest.raises(UsageError, match="nothing can be published there"):
        Runtime(MemoryStore(), on_miss="compile", driver=FakeDriver(), devices=FakeDevices())


def test_a_kernel_that_could_not_be_published_is_served_all_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a read-only store the seconds of compiling must at least serve this process."""
    from llbf16_aot.errors import StoreUnwritableError

    known: dict[bytes, Artifact] = {}

    def refuse(self: Store, artifact: Artifact) -> None:
        known[artifact.cubin] = artifact
        raise StoreUnwritableError("read-only")

    monkeypatch.setattr(Store, "publish", refuse)
    runtime = made(store)
    driver = runtime._loader.driver
    assert isinstance(driver, StoreDriver)
    driver.artifacts = known
    x, weight = operands(1, 32, HIDDEN)
    assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
    assert (runtime.stats().hits, runtime.stats().compiled) == (1, 1)


def test_this_process_never_imports_the_compiler(store: Store) -> None:
    """A compiler in the serving process is what the package exists to avoid."""
    made(store).run(*operands(1, 32, HIDDEN))
    assert not [name for name in sys.modules if name.partition(".")[0] == "cutlass"]
