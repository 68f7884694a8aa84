"""The target of each device: the closest code that there is, and a reason where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpu import FakeDriver, MemoryStore
from llbf16_aot import loader as loader_module
from llbf16_aot.artifact import Artifact
from llbf16_aot.errors import UntrustedStoreError
from llbf16_aot.launcher import Launcher
from llbf16_aot.loader import Loader, Missing
from llbf16_aot.problem import Problem, Target
from llbf16_aot.runtime import Runtime
from llbf16_aot.store import Miss, MissReason
from runtime_kit import Bench, artifact, error_of, operands

PROBLEM = Problem(1, 8, 64)


def loader(*targets: str, capability: tuple[int, int]) -> tuple[Loader, FakeDriver, MemoryStore]:
    """A loader over kernels of these targets, on one device of that compute capability."""
    kernels = [artifact(1, 8, 64, target=target) for target in targets]
    driver = FakeDriver(kernels)
    driver.capabilities = {0: capability}
    store = MemoryStore(kernels)
    return Loader(store, "reference", driver), driver, store


@pytest.mark.parametrize(
    ("stored", "capability", "served"),
    [
        (("sm_100f", "sm_103a", "sm_103f"), (10, 3), "sm_103a"),
        (("sm_100f", "sm_100a", "sm_103f"), (10, 3), "sm_103f"),
        (("sm_100f", "sm_100a"), (10, 3), "sm_100f"),
        (("sm_120f", "sm_100f"), (12, 1), "sm_120f"),
        (("sm_90a",), (9, 0), "sm_90a"),
    ],
)
def test_the_closest_target_in_the_store_serves(
    stored: tuple[str, ...], capability: tuple[int, int], served: str
) -> None:
    """Family code where specific code was built is slower; none at all is a miss for nothing."""
    one, driver, _ = loader(*stored, capability=capability)
    assert isinstance(one.find(PROBLEM, 0), Launcher)
    assert [a.record.key.target for a in driver.libraries.values()] == [served]


@pytest.mark.parametrize(
    ("stored", "capability"),
    [(("sm_100a",), (10, 3)), (("sm_103f",), (10, 0)), (("sm_120f", "sm_100f"), (9, 0))],
)
def test_code_that_does_not_run_there_is_never_loaded(
    stored: tuple[str, ...], capability: tuple[int, int]
) -> None:
    """The driver loads the wrong target and refuses only the launch (tried on an H200)."""
    one, driver, _ = loader(*stored, capability=capability)
    found = one.find(PROBLEM, 0)
    assert isinstance(found, Missing)
    own = Target(*capability, "a")
    assert found.reason == "absent"
    assert f"--target {own} " in found.hint
    assert driver.loads == 0


def test_a_damaged_entry_is_told_even_where_a_family_one_serves_nothing() -> None:
    """'Absent' for a family target that nobody built hides the entry that wants mending."""
    one, _, store = loader(capability=(10, 3))
    digest = artifact(1, 8, 64, target="sm_103a").digest
    store.entries[digest] = Miss(digest, MissReason.DAMAGED, "a flipped byte")
    found = one.find(PROBLEM, 0)
    assert isinstance(found, Missing)
    assert (found.reason, found.subject) == ("damaged", digest)
    assert len(store.asked) == 3


def test_a_plain_target_serves_last_where_a_backend_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order must hold for plain code as soon as the compiler's list names some."""
    known = ("sm_100f", "sm_100", "sm_103a")
    monkeypatch.setattr(
        loader_module, "targets_for", lambda capability: targets_for(capability, known)
    )
    from llbf16_aot.compat import targets_for

    one, _, store = loader(capability=(10, 3))
    assert [str(target) for target in one.targets(0)] == ["sm_103a", "sm_100f", "sm_100"]
    # No backend can be built for a plain target today: it is passed over, not an error.
    found = one.find(PROBLEM, 0)
    assert isinstance(found, Missing)
    assert (found.reason, len(store.asked)) == ("absent", 2)


def test_several_kinds_of_gpu_in_one_process_each_get_their_own_code() -> None:
    """Two kinds in a host: the target of device 0 for all loads nothing on the others."""
    kernels = [artifact(1, 8, 64, target=t) for t in ("sm_90a", "sm_100a", "sm_100f", "sm_120f")]
    driver = FakeDriver(kernels)
    driver.capabilities = {0: (9, 0), 1: (10, 0), 2: (10, 3), 3: (12, 1), 4: (8, 0), 5: (10, 3)}
    one = Loader(MemoryStore(kernels), "reference", driver)
    found = {device: one.find(PROBLEM, device) for device in driver.capabilities}
    assert [a.record.key.target for a in driver.libraries.values()] == [
        "sm_90a",
        "sm_100a",
        "sm_100f",
        "sm_120f",
    ]
    assert isinstance(found[4], Missing)
    assert found[4].reason == "target"
    assert all(isinstance(found[device], Launcher) for device in (0, 1, 2, 3, 5))
    assert [device for device, _ in driver.ready] == [0, 1, 2, 3, 5]


def test_each_target_is_looked_for_in_the_store_and_its_layers(tmp_path: Path) -> None:
    """Family code of a layer must serve below an empty store; specific code wins anywhere."""
    family, own = artifact(1, 8, 64, target="sm_100f"), artifact(1, 8, 64, target="sm_103a")
    for layers, served in (([[family]], family), ([[family], [own]], own)):
        driver = FakeDriver([family, own])
        driver.capabilities = {0: (10, 3)}
        bench = Bench()
        runtime = Runtime(
            MemoryStore(),
            layers=[MemoryStore(layer) for layer in layers],
            tuning="reference",
            driver=driver,
            devices=bench.devices,
            on_miss="error",
        )
        x, weight = operands(1, 8, 64)
        assert error_of(runtime.run(x, weight), x, weight) <= 2e-6
        assert [a.digest for a in driver.libraries.values()] == [served.digest]


class Foreign(MemoryStore):
    def get(self, digest: str) -> Artifact | Miss:
        raise UntrustedStoreError("the layer belongs to somebody else")


def test_layers_come_from_the_environment_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A layer that is not read is a miss at every boot; one that was not asked for, a surprise."""
    monkeypatch.setenv("LLBF16_AOT_LAYERS", f"{tmp_path}/a:{tmp_path}/b")
    kernel = artifact(1, 8, 64)
    options = {"tuning": "reference", "driver": FakeDriver([kernel])}
    runtime = Runtime(MemoryStore(), **options)  # type: ignore[arg-type]
    assert repr(runtime._loader._store).endswith(f"Store({tmp_path}/a), Store({tmp_path}/b))")
    alone = Runtime(MemoryStore(), layers=[], **options)  # type: ignore[arg-type]
    assert isinstance(alone._loader._store, MemoryStore)
    given = Runtime(MemoryStore(), layers=[Foreign()], devices=Bench().devices, **options)  # type: ignore[arg-type]
    with pytest.raises(UntrustedStoreError):
        given.run(*operands(1, 8, 64))
