"""Launchers: what a record says becomes grid, attributes and parameter bytes, or is refused."""

from __future__ import annotations

import threading

import msgspec
import pytest
from fake_gpu import FakeDriver, FakeLaunch, artifact_for, buffer_of
from hypothesis import given
from hypothesis import strategies as st
from llbf16_aot.backends import DotprodTile, SplitkTile
from llbf16_aot.dispatch import Rule, Table, dispatch
from llbf16_aot.driver import Kernel, LaunchConfig
from llbf16_aot.errors import DriverError, InvalidArtifactError
from llbf16_aot.launch import (
    Attribute,
    Extent,
    GridDim,
    LaunchGeometry,
    LaunchRecord,
    Param,
    ParamKind,
    ParamSource,
)
from llbf16_aot.launcher import Launcher, Operands, check_record, resolve
from llbf16_aot.problem import Problem, Target

SM90 = Target.parse("sm_90a")
OPERANDS = Operands(0x7F00_0000_0010, 0x7F00_0000_0020, 5, 264, 2880, 2888, 2**31 - 1, 0)
OUT_ADDRESS = 0xFFFF_8000_0000_0004
EXTRAS = {ParamSource.BIAS: 0x7F00_0000_0030, ParamSource.SCALE: 1.5}
VALUES = {
    ParamSource.X: OPERANDS.x_address,
    ParamSource.WEIGHT: OPERANDS.weight_address,
    ParamSource.OUT: OUT_ADDRESS,
    ParamSource.BIAS: 0x7F00_0000_0030,
    ParamSource.SCALE: 0x3FC0_0000,  # 1.5 as the bits of a float
    ParamSource.TOKENS: 5,
    ParamSource.EXPERTS: 264,
    ParamSource.HIDDEN: 2880,
    ParamSource.X_ROW_STRIDE: 2888,
    ParamSource.WEIGHT_ROW_STRIDE: 2**31 - 1,
}


def record_with(*sources: ParamSource) -> LaunchRecord:
    one = GridDim(Extent.ONE, 1, 1)
    geometry = LaunchGeometry((one, one, one), (32, 1, 1), (1, 1, 1), 0)
    return LaunchRecord.assemble("kernel", geometry, attributes=(), sources=sources)


GOOD = record_with(ParamSource.X, ParamSource.TOKENS, ParamSource.OUT)


class RecordingDriver(FakeDriver):
    """Keeps the parameter buffers that it is given and executes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[tuple[int, bytes]] = []
        self.prepared = 0
        self.fail = False

    def prepare(self, kernel: Kernel, config: LaunchConfig) -> FakeLaunch:
        self.prepared += 1

        def launch(stream: int, params: bytes) -> None:
            self.before_launch()
            if self.fail:
                raise DriverError("refused")
            self.buffers.append((stream, params))

        return FakeLaunch(config, launch)


@given(st.lists(st.sampled_from(list(ParamSource)), max_size=12))
def test_parameter_bytes_follow_the_record_for_any_list_of_parameters(
    sources: list[ParamSource],
) -> None:
    """A loader that assumes an order or a count reads the next kernel family's buffer wrongly."""
    driver = RecordingDriver()
    record = record_with(*sources)
    check_record(record)
    launcher = Launcher(driver, Kernel(1), record, Problem(5, 264, 2880))
    launcher(9, OPERANDS, OUT_ADDRESS, EXTRAS)
    assert driver.buffers == [(9, buffer_of(record, VALUES))]


@pytest.mark.parametrize("source", [ParamSource.BIAS, ParamSource.SCALE])
def test_a_kernel_is_not_launched_without_what_its_epilogue_takes(source: ParamSource) -> None:
    """It would read address 0, which ends the process's use of the GPU, or scale all to zero."""
    driver = RecordingDriver()
    launcher = Launcher(
        driver, Kernel(1), record_with(ParamSource.X, source), Problem(5, 264, 2880)
    )
    with pytest.raises(ValueError, match=f"takes {source.value}, and the call brings none"):
        launcher(9, OPERANDS, OUT_ADDRESS)
    assert (driver.buffers, launcher.calls) == ([], 0)


def test_a_record_with_gaps_between_parameters_is_followed() -> None:
    """Offsets come from the record: packing parameters back to back would shift all after a gap."""
    params = (
        Param(ParamSource.TOKENS, ParamKind.INT32, 4, 4),
        Param(ParamSource.X, ParamKind.POINTER, 24, 8),
        Param(ParamSource.HIDDEN, ParamKind.INT32, 44, 4),
    )
    record = msgspec.structs.replace(GOOD, params=params)
    driver = RecordingDriver()
    Launcher(driver, Kernel(1), record, Problem(5, 264, 2880))(0, OPERANDS, OUT_ADDRESS)
    assert driver.buffers[0][1] == (
        bytes(4) + b"\x05\0\0\0" + bytes(16) + b"\x10\0\0\0\0\x7f\0\0" + bytes(12) + b"\x40\x0b\0\0"
    )


@pytest.mark.parametrize(
    ("tile", "problem", "expected"),
    [
        (
            DotprodTile(block=256, experts_per_block=2),
            Problem(17, 7, 2304),
            ((4, 2, 1), (256, 1, 1), (1, 1, 1), 0, True),
        ),
        (
            SplitkTile(split_k=6, stages=4),
            Problem(17, 264, 2880, pdl=False),
            ((6, 17, 2), (256, 1, 1), (6, 1, 1), 4 * 32 * 528, False),
        ),
    ],
)
def test_a_launch_is_resolved_from_the_record_of_each_family(
    tile: DotprodTile | SplitkTile, problem: Problem, expected: tuple[object, ...]
) -> None:
    """A grid short of a tile leaves rows or columns unwritten; a lost cluster hangs the kernel."""
    table = Table(1, "one", "test", (Rule(tile),))
    record = artifact_for(dispatch(problem, SM90, table)).record.launch
    assert tuple(resolve(record, problem))[:5] == expected


def replaced(**fields: object) -> LaunchRecord:
    return msgspec.structs.replace(GOOD, **fields)


BAD = [
    (replaced(symbol=""), "empty symbol"),
    (replaced(block=(0, 1, 1)), r"block \(0, 1, 1\), its product must be 1 to 1024"),
    (replaced(block=(1024, 2, 1)), "block"),
    (replaced(block=(-32, -1, 1)), "block"),
    (replaced(cluster=(17, 1, 1)), r"cluster \(17, 1, 1\), its product must be 1 to 16"),
    (replaced(cluster=(2, 1, 1)), "grid.x of 1 blocks for each 1 one.* whole clusters of 2"),
    (replaced(grid=(GOOD.grid[0], GridDim(Extent.TOKENS, 0, 1), GOOD.grid[2])), "grid.y"),
    (replaced(grid=(GOOD.grid[0], GOOD.grid[1], GridDim(Extent.ONE, 1, 0))), "grid.z"),
    (replaced(dynamic_shared_bytes=-1), "-1 bytes of dynamic shared memory"),
    (
        replaced(params=(Param(ParamSource.X, ParamKind.INT32, 0, 4),)),
        "passes x as int32 of 4 bytes, must be pointer of 8",
    ),
    (
        replaced(params=(Param(ParamSource.TOKENS, ParamKind.INT32, 0, 8),)),
        "passes tokens as int32 of 8 bytes, must be int32 of 4",
    ),
    (
        replaced(params=(Param(ParamSource.X, ParamKind.POINTER, 4, 8),)),
        "puts x at byte 4, must be a multiple of 8",
    ),
    (
        replaced(
            params=(
                Param(ParamSource.X, ParamKind.POINTER, 0, 8),
                Param(ParamSource.TOKENS, ParamKind.INT32, 4, 4),
            )
        ),
        "puts tokens at byte 4, must be a multiple of 4 and at least 8",
    ),
    (replaced(params=(Param(ParamSource.X, ParamKind.POINTER, -8, 8),)), "puts x at byte -8"),
]


@pytest.mark.parametrize(("record", "message"), BAD)
def test_a_record_that_no_driver_could_execute_is_refused(
    record: LaunchRecord, message: str
) -> None:
    """Found by the launch it is an error in a request; overlapping parameters are never found."""
    with pytest.raises(InvalidArtifactError, match=message):
        check_record(record)


def test_a_grid_larger_than_cuda_allows_is_refused() -> None:
    """grid.y ends at 65,535: the launch of such a problem would fail in service."""
    record = replaced(grid=(GOOD.grid[0], GridDim(Extent.EXPERTS, 1, 1), GOOD.grid[2]))
    assert resolve(record, Problem(1, 65_535, 64)).grid == (1, 65_535, 1)
    with pytest.raises(InvalidArtifactError, match=r"grid \(1, 65536, 1\)"):
        resolve(record, Problem(1, 65_536, 64))


def test_only_the_programmatic_attribute_makes_a_launch_programmatic() -> None:
    """A kernel without the wait, launched with it, reads x before its producer has written it."""
    assert not resolve(GOOD, Problem(1, 1, 8)).programmatic
    record = replaced(attributes=(Attribute.PROGRAMMATIC_STREAM_SERIALIZATION,))
    assert resolve(record, Problem(1, 1, 8)).programmatic


def test_threads_that_launch_at_once_never_share_a_parameter_buffer() -> None:
    """With one buffer for all, two threads would launch with each other's pointers."""
    driver = RecordingDriver()
    inside = threading.Barrier(8)

    def meet() -> None:
        inside.wait(30)

    driver.before_launch = meet
    launcher = Launcher(driver, Kernel(1), GOOD, Problem(5, 264, 2880))
    threads = [
        threading.Thread(target=launcher, args=(n, OPERANDS._replace(x_address=n), n))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(driver.buffers) == sorted(
        (n, buffer_of(GOOD, VALUES | {ParamSource.X: n, ParamSource.OUT: n})) for n in range(8)
    )
    assert (driver.prepared, launcher.calls) == (8, 8)
    driver.before_launch = lambda: None
    for _ in range(100):
        launcher(1, OPERANDS, 2)
    assert (driver.prepared, launcher.calls) == (8, 108)


def test_a_refused_launch_is_not_counted_and_keeps_its_slot() -> None:
    """A slot lost at each failure would leak; one counted would report a hit that never was."""
    driver = RecordingDriver()
    launcher = Launcher(driver, Kernel(1), GOOD, Problem(5, 264, 2880))
    driver.fail = True
    for _ in range(3):
        with pytest.raises(DriverError, match="refused"):
            launcher(1, OPERANDS, 2)
    driver.fail = False
    launcher(1, OPERANDS, 2)
    assert (driver.prepared, launcher.calls) == (1, 1)
