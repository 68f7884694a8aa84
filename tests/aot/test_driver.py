"""The driver module against a libcuda that prints its calls: a real library, no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import CUBINS

SOURCE = Path(__file__).with_name("fake_libcuda.c")

PRELUDE = """
import struct
from pathlib import Path
from llbf16_aot.driver import CudaDriver, LaunchConfig
from llbf16_aot.errors import DriverError
CONFIG = LaunchConfig((6, 16, 2), (256, 1, 1), (6, 1, 1), 67584, True, ((0, 8), (8, 4), (16, 8)))
def pack(*values):
    return struct.pack("<Qi4xQ", *values)
driver = CudaDriver()
CUBIN = Path(@CUBIN@).read_bytes()
""".replace("@CUBIN@", repr(str(CUBINS / "dsl13_sm_90a.cubin")))


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the printing libcuda")
    folder = tmp_path_factory.mktemp("libcuda")
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", folder / "libcuda.so.1", SOURCE], check=True)
    return folder


def run(program: str, libcuda: Path | None, **variables: str) -> str:
    """What a program prints after the driver was opened, or its last line where it failed."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment |= variables
    if libcuda is not None:
        environment["LD_LIBRARY_PATH"] = str(libcuda)
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        return done.stderr.splitlines()[-1]
    return done.stdout.removeprefix("cuInit 0\n").rstrip("\n")


def test_a_launch_reaches_the_driver_with_every_field_of_its_configuration(libcuda: Path) -> None:
    """A swapped extent, a lost attribute or a shifted parameter launches something else."""
    program = "driver.prepare(0x3000, CONFIG)(0x4d, pack(0x1122334455667788, -5, 0x99))"
    assert run(program, libcuda) == (
        "cuLaunchKernelEx 0x3000 grid 6 16 2 block 256 1 1 shared 67584 stream 0x4d "
        "cluster 6 1 1 attribute 6 = 1 params 0x1122334455667788 -5 0x99 extra 0"
    )


def test_a_launch_without_cluster_and_dependence_carries_no_attribute(libcuda: Path) -> None:
    """Programmatic serialization left on would let a kernel that never waits read too early."""
    program = """
plain = CONFIG._replace(cluster=(1, 1, 1), programmatic=False, dynamic_shared_bytes=0)
driver.prepare(0x3000, plain)(0, pack(1, 2, 3))
"""
    assert run(program, libcuda) == (
        "cuLaunchKernelEx 0x3000 grid 6 16 2 block 256 1 1 shared 0 stream 0 "
        "params 0x1 2 0x3 extra 0"
    )


def test_a_prepared_launch_takes_stream_and_parameters_of_each_call(libcuda: Path) -> None:
    """A stream or a pointer that stuck from an earlier call would write into a freed tensor."""
    program = """
launch = driver.prepare(0x3000, CONFIG)
for stream, value in ((7, 1), (7, 2), (0, 3), (9, 4)):
    launch(stream, pack(value, value, value))
"""
    lines = run(program, libcuda).splitlines()
    assert [line.split(" stream ")[1].split()[0] for line in lines] == ["0x7", "0x7", "0", "0x9"]
    assert [line.split(" params ")[1] for line in lines] == [
        f"0x{value} {value} 0x{value} extra 0" for value in (1, 2, 3, 4)
    ]


def test_making_ready_allows_shared_memory_then_loads_the_function(libcuda: Path) -> None:
    """Without the permission a launch above 48 KiB fails; without the load the first is slow."""
    program = """
driver.bind_context(1)
driver.make_ready(0x3000, 1, dynamic_shared_bytes=67584)
driver.make_ready(0x3000, 1, dynamic_shared_bytes=0)
"""
    assert run(program, libcuda).splitlines()[2:] == [
        "cuKernelSetAttribute 8 67584 0x3000 1",
        "cuKernelGetFunction 0x3000",
        "cuFuncLoad 0x4000",
        "cuKernelGetFunction 0x3000",
        "cuFuncLoad 0x4000",
    ]


def test_a_thread_without_context_gets_the_primary_one_of_the_device(libcuda: Path) -> None:
    """A fresh thread's launch on the default stream fails with an invalid context otherwise."""
    program = """
import threading
driver.bind_context(1)
thread = threading.Thread(target=driver.bind_context, args=(1,))
thread.start()
thread.join()
"""
    assert run(program, libcuda).splitlines() == [
        "cuDevicePrimaryCtxRetain 1",
        "cuCtxSetCurrent 0x1001",
        "cuCtxSetCurrent 0x1001",
    ]


def test_a_context_of_the_device_stays_and_one_of_another_device_is_replaced(
    libcuda: Path,
) -> None:
    """The default stream belongs to the current context: another device's would run the kernel."""
    program = "for device in (0, 0, 1, 1, 0): driver.bind_context(device)"
    assert run(program, libcuda).splitlines() == [
        "cuDevicePrimaryCtxRetain 0",
        "cuCtxSetCurrent 0x1000",
        "cuDevicePrimaryCtxRetain 1",
        "cuCtxSetCurrent 0x1001",
        "cuCtxSetCurrent 0x1000",
    ]


def test_a_prepared_launch_serves_every_context_of_a_device(libcuda: Path) -> None:
    """A function handle belongs to one context, and a launch with it fails in another."""
    program = """
driver.bind_context(0)
launch = driver.prepare(0x3000, CONFIG)
launch(7, pack(1, 1, 1))
driver.bind_context(1)
launch(9, pack(1, 1, 1))
"""
    launches = [line for line in run(program, libcuda).splitlines() if "Ctx" not in line]
    assert [line.split()[:2] for line in launches] == [["cuLaunchKernelEx", "0x3000"]] * 2


def test_parameters_may_be_written_into_the_buffer_before_a_launch(libcuda: Path) -> None:
    """The fast way writes words in place: were there a second buffer, it would launch old ones."""
    program = """
launch = driver.prepare(0x3000, CONFIG)
launch(1, pack(1, 2, 3))
words = launch.params.cast("Q")
assert len(words) == 4, len(words)
words[0], words[2], words[3] = 5, 7, 0xFFFF
driver_code = launch.enqueue()
assert driver_code == 0
"""
    lines = run(program, libcuda).splitlines()
    assert [line.split(" params ")[1] for line in lines] == [
        "0x1 2 0x3 extra 0",
        "0x5 2 0x7 extra 0",
    ]


def test_whether_a_device_has_a_context_is_asked_without_making_one(libcuda: Path) -> None:
    """A context on every GPU of the host, in each of eight ranks, wastes their memory."""
    program = "print(driver.has_context(0), driver.has_context(1), driver.device_count())"
    assert run(program, libcuda) == "False True 2"


def test_code_of_a_later_cuda_is_refused_before_the_driver_sees_it(libcuda: Path) -> None:
    """The driver's own words for it name neither version (flashinfer 5145)."""
    line = run("driver.load_library(CUBIN)", libcuda, CUDA_FAKE_VERSION="12090")
    assert line == (
        "llbf16_aot.compat.DriverTooOldError: the cubin was made by CUDA 13.4 and needs a driver "
        "for CUDA 13.0 or newer, this one is for 12.9"
    )
    assert "cuLibraryLoadData ELF" in run("driver.load_library(CUBIN)", libcuda)


def test_parameters_are_listed_up_to_the_last_one(libcuda: Path) -> None:
    """The driver cannot tell their number: stopping early would accept a kernel that takes more."""
    program = "print(driver.param_info(driver.get_kernel(driver.load_library(CUBIN), 'kernel')))"
    assert run(program, libcuda).splitlines()[-1] == "((0, 8), (8, 4), (16, 8))"


def test_compute_capability_is_that_of_the_device_asked_for(libcuda: Path) -> None:
    """Read from device 0 for every device, it picks code that cannot run (tilelang 2516)."""
    program = "print(driver.compute_capability(0), driver.compute_capability(1))"
    assert run(program, libcuda) == "(9, 0) (10, 0)"


def test_the_inventory_lists_every_gpu_by_name_and_capability(libcuda: Path) -> None:
    """`doctor` is asked why a kernel does not load: a wrong device there misleads."""
    program = "from llbf16_aot.driver import inventory; print(*inventory())"
    assert run(program, libcuda) == (
        "cuInit 0\n13.0 (DeviceInfo(name='Paper GPU 0', major=9, minor=0), "
        "DeviceInfo(name='Paper GPU 1', major=10, minor=0))"
    )


@pytest.mark.parametrize(
    ("program", "call"),
    [
        ("driver.load_library(CUBIN)", "cuLibraryLoadData"),
        ("driver.unload_library(1)", "cuLibraryUnload"),
        ("driver.bind_context(0)", "cuDevicePrimaryCtxRetain"),
        ("driver.has_context(0)", "cuDevicePrimaryCtxGetState"),
        ("driver.param_info(0x3000)", "cuKernelGetParamInfo"),
        ("driver.make_ready(0x3000, 0, dynamic_shared_bytes=1)", "cuKernelSetAttribute"),
        ("driver.prepare(0x3000, CONFIG)(0, pack(0, 0, 0))", "cuLaunchKernelEx"),
    ],
)
def test_a_refused_call_raises_with_its_name_and_the_drivers_words(
    libcuda: Path, program: str, call: str
) -> None:
    """A return code that nobody looks at turns into a wrong answer."""
    line = run(program, libcuda, CUDA_FAKE_FAIL=f"{call}:209")
    assert line.startswith(f"llbf16_aot.errors.DriverError: {call}")
    assert line.endswith(
        " failed with CUDA_ERROR_NO_BINARY_FOR_GPU (209): no kernel image is available"
    )


def test_an_error_that_the_driver_has_no_name_for_is_told_by_number(libcuda: Path) -> None:
    """Asking for the name of an unknown code must not hide the code."""
    line = run("driver.get_kernel(0x2000, 'other')", libcuda)
    assert line == "llbf16_aot.errors.DriverError: cuLibraryGetKernel(other) failed with error 500"


def test_an_older_driver_is_refused_with_both_versions(libcuda: Path) -> None:
    """Calls that it lacks would surface as an unknown function in the middle of a load."""
    line = run("", libcuda, CUDA_FAKE_VERSION="12030")
    assert line.startswith(
        "llbf16_aot.errors.DriverError: the driver speaks CUDA 12.3, needed is 12.4"
    )


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
def test_a_machine_without_libcuda_gives_a_driver_error() -> None:
    """The bare OSError of the loader says nothing that helps, and no caller of ours catches it."""
    assert run("", None).startswith(
        "llbf16_aot.errors.DriverError: libcuda.so.1 cannot be opened: "
    )


def test_a_function_that_the_library_lacks_is_told_by_name(libcuda: Path) -> None:
    """A damaged or foreign libcuda would end in a bare AttributeError in the middle of a load."""
    line = run("driver._api('cuNothing')", libcuda)
    assert line == "llbf16_aot.errors.DriverError: libcuda.so.1 has no function cuNothing"


def test_the_module_needs_neither_torch_nor_the_bindings_nor_the_compiler(libcuda: Path) -> None:
    """Importing cuda-python takes longer than loading every kernel of a model."""
    program = """
import sys
for name in ("torch", "cuda", "cutlass"):
    sys.modules[name] = None
import llbf16_aot.driver, llbf16_aot.launcher, llbf16_aot.loader
print(llbf16_aot.driver.CudaDriver().cuda_version)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_LIBRARY_PATH": str(libcuda)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "cuInit 0\n13.0\n"
