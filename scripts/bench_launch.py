"""Prepared launches of one kernel, each by another way to `cuLaunchKernelEx`, to be timed.

Everything of a launch is filled in beforehand, parameters and stream too: a statement costs what
its way costs. Knows no kernel by name and does not use the package's own driver module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from llbf16_aot.errors import DriverError

__all__ = ["WAYS", "Launch", "Statement", "load"]

CLUSTER, PROGRAMMATIC = 4, 6
"""CUlaunchAttributeID of cluster dimension and programmatic stream serialization."""

_VERSION = 12_040
"""The CUDA version whose `cuLaunchKernelEx` is asked for."""


class Launch(NamedTuple):
    """A loaded kernel (CUkernel) and one whole launch of it; extents in blocks and threads."""

    kernel: int
    symbol: str
    cubin: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    programmatic: bool
    params: tuple[tuple[int, int], ...]
    """Value and size in bytes of each parameter, in order."""
    stream: int


class Statement(NamedTuple):
    """Python source to be timed, lines that end with an expression, and the names that it uses."""

    text: str
    names: dict[str, Any]

    def run(self) -> Any:
        """Run it once: what it calls `made`, or the value of its last expression.

        Raises DriverError where that value is a CUDA error code.
        """
        lines = self.text.split("\n")
        lines[-1] = f"value = {lines[-1]}"
        names = dict(self.names)
        exec("\n".join(lines), names)  # noqa: S102 - our own source
        value = names["value"]
        code = value[0] if isinstance(value, tuple) else value
        if isinstance(code, int) and code:
            raise DriverError(f"{self.text}: CUDA error {int(code)}")
        return names.get("made", value)


def load(cubin: bytes, symbol: str, *, dynamic_shared_bytes: int) -> int:
    """Load a checked cubin for device 0; the kernel's handle. Raises DriverError.

    Device 0 must have a current context.
    """
    from cuda.bindings import driver as api

    library = _value("cuLibraryLoadData", api.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    kernel = _value("cuLibraryGetKernel", api.cuLibraryGetKernel(library, symbol.encode()))
    _allow_shared(int(kernel), dynamic_shared_bytes)
    function = _value("cuKernelGetFunction", api.cuKernelGetFunction(kernel))
    _value("cuFuncLoad", api.cuFuncLoad(function))
    return int(kernel)


def _allow_shared(kernel: int, size_bytes: int) -> None:
    """Allow a kernel that much dynamic shared memory on device 0."""
    from cuda.bindings import driver as api

    if size_bytes:
        name = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = _value("cuDeviceGet", api.cuDeviceGet(0))
        result = api.cuKernelSetAttribute(name, size_bytes, api.CUkernel(kernel), device)
        _value("cuKernelSetAttribute", result)


def _value(call: str, result: tuple[Any, ...]) -> Any:
    if result[0]:
        raise DriverError(f"{call} failed with CUDA error {int(result[0])}")
    return result[1] if len(result) > 1 else None


class _Parameters:
    """The parameters' values in memory, and the list of their addresses that a launch takes."""

    def __init__(self, params: tuple[tuple[int, int], ...]) -> None:
        self.cells = [
            (ctypes.c_uint64 if size == 8 else ctypes.c_int32)(value) for value, size in params
        ]
        self.list = (ctypes.c_void_p * (len(params) or 1))(*map(ctypes.addressof, self.cells))
        self.address = ctypes.addressof(self.list)


def bindings_launch(launch: Launch) -> Statement:
    """Through `cuda.bindings.driver`."""
    from cuda.bindings import driver as api

    config = api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes = launch.dynamic_shared_bytes
    config.hStream = launch.stream
    attributes = []
    if launch.cluster != (1, 1, 1):
        cluster = api.CUlaunchAttribute()
        cluster.id = api.CUlaunchAttributeID(CLUSTER)
        dim = cluster.value.clusterDim
        dim.x, dim.y, dim.z = launch.cluster
        attributes.append(cluster)
    if launch.programmatic:
        programmatic = api.CUlaunchAttribute()
        programmatic.id = api.CUlaunchAttributeID(PROGRAMMATIC)
        programmatic.value.programmaticStreamSerializationAllowed = 1
        attributes.append(programmatic)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    parameters = _Parameters(launch.params)
    return Statement(
        "launch(config, function, parameters, 0)",
        {
            "launch": api.cuLaunchKernelEx,
            "config": config,
            "function": api.CUfunction(launch.kernel),
            "parameters": parameters.address,
            "keep": (attributes, parameters),
        },
    )


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint32),
    )


def ctypes_launch(launch: Launch) -> Statement:
    """Through ctypes, which releases the interpreter's lock for the call."""
    return _ctypes_launch(launch, ctypes.CFUNCTYPE)


def ctypes_locked_launch(launch: Launch) -> Statement:
    """Through ctypes, the interpreter's lock held: cheaper, but a full queue stops all threads."""
    return _ctypes_launch(launch, ctypes.PYFUNCTYPE)


def _ctypes_launch(launch: Launch, prototype: Callable[..., Any]) -> Statement:
    attributes = (_Attribute * 2)()
    count = 0
    if launch.cluster != (1, 1, 1):
        attributes[count].id = CLUSTER
        attributes[count].value[:3] = launch.cluster
        count += 1
    if launch.programmatic:
        attributes[count].id = PROGRAMMATIC
        attributes[count].value[0] = 1
        count += 1
    config = _Config(
        (ctypes.c_uint32 * 3)(*launch.grid),
        (ctypes.c_uint32 * 3)(*launch.block),
        launch.dynamic_shared_bytes,
        launch.stream or None,
        ctypes.cast(attributes, ctypes.POINTER(_Attribute)),
        count,
    )
    parameters = _Parameters(launch.params)
    # Declared as addresses: ctypes converts a Python int faster than it checks a pointer's type.
    types = [ctypes.c_void_p] * 4
    function = prototype(ctypes.c_int, *types)(_entry_point("cuLaunchKernelEx"))
    return Statement(
        "launch(config, kernel, parameters, None)",
        {
            "launch": function,
            "config": ctypes.addressof(config),
            "kernel": launch.kernel,
            "parameters": parameters.address,
            "keep": (config, attributes, parameters),
        },
    )


def _entry_point(name: str) -> int:
    """The address of a driver function, as the driver itself tells it."""
    libcuda = ctypes.CDLL("libcuda.so.1")
    address, status = ctypes.c_void_p(), ctypes.c_int()
    code = libcuda.cuGetProcAddress_v2(
        name.encode(), ctypes.byref(address), _VERSION, ctypes.c_uint64(0), ctypes.byref(status)
    )
    if code or not address.value:
        raise DriverError(f"cuGetProcAddress({name}) failed with CUDA error {code}")
    return address.value


def core_launch(launch: Launch) -> Statement:
    """Through `cuda.core`, which packs the parameters anew in every call.

    Raises ImportError, or TypeError where this version knows no programmatic serialization.
    """
    try:
        from cuda import core
        from cuda.core import LaunchConfig, ObjectCode, Stream
        from cuda.core import launch as run
    except ImportError:
        from cuda.core import experimental as core  # its place before version 0.5
        from cuda.core.experimental import LaunchConfig, ObjectCode, Stream
        from cuda.core.experimental import launch as run

    core.Device(0).set_current()
    clusters = tuple(g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
    config = LaunchConfig(
        grid=clusters,
        block=launch.block,
        shmem_size=launch.dynamic_shared_bytes,
        **({} if launch.cluster == (1, 1, 1) else {"cluster": launch.cluster}),
        **({"programmatic_stream_serialization": True} if launch.programmatic else {}),
    )
    code = ObjectCode.from_cubin(launch.cubin)
    kernel = code.get_kernel(launch.symbol)
    handle = kernel.handle if hasattr(kernel, "handle") else kernel._handle
    _allow_shared(int(handle), launch.dynamic_shared_bytes)
    stream = Stream.from_handle(launch.stream) if launch.stream else core.Device(0).default_stream
    names: dict[str, Any] = {"run": run, "stream": stream, "config": config, "kernel": kernel}
    # A Python int is passed as a pointer, a ctypes object by its own type.
    for place, (value, size) in enumerate(launch.params):
        names[f"p{place}"] = value if size == 8 else ctypes.c_int32(value)
    arguments = ", ".join(f"p{place}" for place in range(len(launch.params)))
    return Statement(f"run(stream, config, kernel, {arguments})", {**names, "keep": code})


WAYS: dict[str, Callable[[Launch], Statement]] = {
    "cuda.bindings": bindings_launch,
    "ctypes": ctypes_launch,
    "ctypes, lock held": ctypes_locked_launch,
    "cuda.core": core_launch,
}
"""Every way to launch, by name; each raises where this machine does not offer it."""
