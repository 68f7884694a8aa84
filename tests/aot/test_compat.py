"""Whose code runs on a GPU, and which driver a cubin needs."""

from __future__ import annotations

import pytest
from llbf16_aot.compat import DriverTooOldError, check_driver, runs_on, targets_for
from llbf16_aot.elf import toolkit_release
from llbf16_aot.problem import Target
from llbf16_aot.toolchain import KNOWN_TARGETS
from support import fixture_cubin


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a sm_100f"),
        ((10, 3), "sm_103a sm_103f sm_100f"),
        ((12, 0), "sm_120a sm_120f"),
        ((12, 1), "sm_121a sm_121f sm_120f"),
        ((8, 0), "sm_80a"),
        ((11, 0), "sm_110a"),
    ],
)
def test_targets_of_a_gpu_go_from_the_closest_to_the_most_general(
    capability: tuple[int, int], expected: str
) -> None:
    """A wrong order serves general code where better was built; a wrong member does not load."""
    assert " ".join(map(str, targets_for(capability))) == expected


def test_plain_targets_come_last_and_newest_first() -> None:
    """The rule must hold before a backend has plain targets: their code runs on later minors."""
    known = ("sm_100", "sm_100f", "sm_103", "sm_103a", "sm_107", "sm_90", "sm_100a")
    found = targets_for((10, 3), known)
    assert " ".join(map(str, found)) == "sm_103a sm_100f sm_103 sm_100"


@pytest.mark.parametrize(
    ("target", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_103a", (10, 0), False),
        ("sm_100f", (10, 3), True),
        ("sm_103f", (10, 0), False),
        ("sm_100f", (12, 0), False),
        ("sm_90", (10, 0), False),
        ("sm_100", (10, 3), True),
    ],
)
def test_code_runs_where_cuda_says(target: str, capability: tuple[int, int], runs: bool) -> None:
    """Architecture-specific code on another minor version fails at the first call of a server."""
    assert runs_on(Target.parse(target), capability) is runs


def test_every_known_target_runs_on_its_own_gpu() -> None:
    """A target that `build` accepts and no runtime ever asks for is wasted work."""
    for name in KNOWN_TARGETS:
        target = Target.parse(name)
        assert target in targets_for((target.major, target.minor))


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("dsl_sm_90a", (12, 9)),
        ("dsl_sm_100a", (12, 9)),
        ("dsl_sm_100f", (12, 9)),
        ("dsl13_sm_90a", (13, 4)),
        ("dsl13_sm_100a", (13, 4)),
        ("ptxas_sm_90a", (13, 0)),
        ("ptxas_sm_120a", (13, 0)),
    ],
)
def test_the_toolkit_is_read_from_the_cubin_of_each_compiler(
    name: str, release: tuple[int, int]
) -> None:
    """Each generation states it elsewhere; read wrongly, good code is refused."""
    assert toolkit_release(fixture_cubin(name)) == release


def test_a_cubin_that_does_not_state_its_toolkit_is_not_refused() -> None:
    """A note that some tool removed must not take a working kernel out of service."""
    bare = fixture_cubin("dsl13_sm_90a").replace(
        b"Cuda compilation tools", b"Some other toolkit    "
    )
    assert toolkit_release(bare) is None
    check_driver(bare, (12, 4))


@pytest.mark.parametrize(
    ("name", "driver", "accepted"),
    [
        ("dsl13_sm_90a", (13, 0), True),  # the 580 driver: tried on an H200
        ("dsl13_sm_90a", (14, 0), True),
        ("dsl13_sm_90a", (12, 9), False),
        ("ptxas_sm_100a", (12, 9), False),
        ("dsl_sm_90a", (12, 4), True),
        ("dsl_sm_100a", (13, 0), True),
    ],
)
def test_only_a_driver_of_an_older_major_version_is_too_old(
    name: str, driver: tuple[int, int], accepted: bool
) -> None:
    """Compared by minor versions too, a 580 driver would be refused what it runs."""
    if accepted:
        check_driver(fixture_cubin(name), driver)
        return
    with pytest.raises(DriverTooOldError) as raised:
        check_driver(fixture_cubin(name), driver)
    made = toolkit_release(fixture_cubin(name))
    assert made is not None
    assert f"made by CUDA {made[0]}.{made[1]}" in raised.value.message
    assert f"this one is for {driver[0]}.{driver[1]}" in raised.value.message
    assert raised.value.hint.startswith("install a driver for CUDA 13, or build with")


def test_text_that_the_driver_compiles_is_not_refused() -> None:
    """PTX has no toolkit to be too new: the GPU check's own producers are loaded so."""
    check_driver(b".version 7.8\n.target sm_90\n.address_size 64\n\0", (12, 4))
