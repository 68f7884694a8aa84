"""The CUDA driver: every call that this package makes to it, each with its return code checked.

The only module that talks to the driver. It imports neither torch nor the compiler, and the driver
library is opened by `CudaDriver()`, not by the import.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, NamedTuple, NewType, Protocol

from .compat import check_driver
from .errors import DriverError

__all__ = [
    "WORD_BYTES",
    "CudaDriver",
    "DeviceInfo",
    "Driver",
    "Inventory",
    "Kernel",
    "LaunchConfig",
    "Library",
    "PreparedLaunch",
    "inventory",
    "words_of",
]

Library = NewType("Library", int)
"""A loaded cubin, the driver's CUlibrary: it belongs to no context."""

Kernel = NewType("Kernel", int)
"""One kernel of a library, the driver's CUkernel: it belongs to no context."""

MIN_DRIVER_VERSION = 12040
"""CUDA 12.4, the first with cuKernelGetParamInfo and cuFuncLoad."""

_NAME_BYTES = 256

WORD_BYTES = 8
"""Bytes of a word of the parameter buffer, which is also those of a pointer."""

MAX_PARAMS = 64
"""More parameters than any kernel here has: the query of their layout ends there at the latest."""


class LaunchConfig(NamedTuple):
    """A launch with every extent resolved: thread blocks, threads, bytes; parameters in order."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    programmatic: bool
    params: tuple[tuple[int, int], ...]
    """Offset and size in bytes of each parameter in the packed buffer."""

    @property
    def params_size_bytes(self) -> int:
        """Bytes of the whole parameter buffer."""
        return max((offset + size for offset, size in self.params), default=0)


class DeviceInfo(NamedTuple):
    """A GPU: its name and its compute capability."""

    name: str
    major: int
    minor: int


class Inventory(NamedTuple):
    """What the driver sees: the CUDA version that it speaks, as 13.0, and its GPUs in order."""

    cuda_version: str
    devices: tuple[DeviceInfo, ...]


def words_of(size_bytes: int) -> int:
    """Words of the buffer for that many bytes of parameters, with a spare one at the end."""
    return -(-size_bytes // WORD_BYTES) + 1


class PreparedLaunch(Protocol):
    """A launch that lacks only its stream and its parameters. For one thread at a time."""

    @property
    def params(self) -> memoryview:
        """The bytes of the parameter buffer: whole words, the last of which the kernel ignores."""

    def launch(self, stream: int) -> None:
        """Enqueue the kernel with what the buffer holds now; raises DriverError."""

    def __call__(self, stream: int, params: bytes) -> None:
        """Enqueue the kernel with this parameter buffer; raises DriverError."""


class Driver(Protocol):
    """What the runtime needs of a driver. `device` is an ordinal, as torch numbers devices."""

    def device_count(self) -> int:
        """How many GPUs this process sees."""

    def compute_capability(self, device: int) -> tuple[int, int]:
        """Major and minor number."""

    def has_context(self, device: int) -> bool:
        """Whether this process has a context on the device already; makes none."""

    def bind_context(self, device: int) -> None:
        """Make sure that the calling thread's current context is one of this device."""

    def load_library(self, cubin: bytes) -> Library:
        """Load machine code. The driver keeps its own copy; the bytes must have been checked.

        Raises DriverTooOldError for code that this driver is too old for, and DriverError.
        """

    def unload_library(self, library: Library) -> None:
        """Unload machine code of which no kernel was launched."""

    def get_kernel(self, library: Library, symbol: str) -> Kernel:
        """The kernel of this symbol."""

    def param_info(self, kernel: Kernel) -> tuple[tuple[int, int], ...]:
        """Offset and size in bytes of every parameter of the kernel, in order."""

    def make_ready(self, kernel: Kernel, device: int, *, dynamic_shared_bytes: int) -> None:
        """Load the kernel into the current context, so that no launch must, and allow the bytes."""

    def prepare(self, kernel: Kernel, config: LaunchConfig) -> PreparedLaunch:
        """Everything of a launch that does not change from call to call."""


class CudaDriver:
    """The driver of this machine. Raises DriverError where libcuda or cuda-bindings is missing."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DriverError(
                f"cuda.bindings.driver cannot be imported: {error}",
                hint="pip install 'llbf16-aot[runtime]'",
            ) from error
        self._api: Any = driver
        self._primary_contexts: dict[int, Any] = {}
        self._lock = threading.Lock()
        try:
            result = driver.cuInit(0)
        except (RuntimeError, OSError) as error:  # the bindings open libcuda on the first call
            raise DriverError(
                f"libcuda.so.1 cannot be opened: {error}",
                hint="install the NVIDIA driver, or start the container with its GPUs",
            ) from error
        self._value("cuInit", result)
        version = int(self._value("cuDriverGetVersion", driver.cuDriverGetVersion()))
        self.cuda_version = _dotted(version)
        """The CUDA version that the driver speaks, as 13.0."""
        self.cuda_release = (version // 1000, version % 1000 // 10)
        """The same as numbers."""
        if version < MIN_DRIVER_VERSION:
            raise DriverError(
                f"the driver speaks CUDA {self.cuda_version}, needed is "
                f"{_dotted(MIN_DRIVER_VERSION)}: older ones cannot tell a kernel's parameters",
                hint="install an NVIDIA driver of release 550 or newer",
            )

    def compute_capability(self, device: int) -> tuple[int, int]:
        """Major and minor number of a device."""
        names = self._api.CUdevice_attribute
        handle = self._device(device)
        major, minor = (
            int(self._value("cuDeviceGetAttribute", self._api.cuDeviceGetAttribute(name, handle)))
            for name in (
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        return major, minor

    def device_count(self) -> int:
        """How many GPUs the driver shows to this process."""
        return int(self._value("cuDeviceGetCount", self._api.cuDeviceGetCount()))

    def has_context(self, device: int) -> bool:
        """Whether the device's primary context, which torch uses, is active in this process."""
        result = self._api.cuDevicePrimaryCtxGetState(self._device(device))
        if result[0]:
            raise _error(self._api, "cuDevicePrimaryCtxGetState", result[0])
        return bool(result[2])

    def device_name(self, device: int) -> str:
        """The product name of a device."""
        result = self._api.cuDeviceGetName(_NAME_BYTES, self._device(device))
        name: bytes = self._value("cuDeviceGetName", result)
        return name.split(b"\0")[0].decode(errors="replace")

    def bind_context(self, device: int) -> None:
        """Make the device's primary context current, unless a context of this device is already.

        A new thread has none until its first call into the CUDA runtime, and torch's caching
        allocator serves memory without such a call.
        """
        handle = self._device(device)
        context = self._value("cuCtxGetCurrent", self._api.cuCtxGetCurrent())
        if int(context):
            owner = self._value("cuCtxGetDevice", self._api.cuCtxGetDevice())
            if int(owner) == int(handle):
                return
        with self._lock:
            primary = self._primary_contexts.get(device)
            if primary is None:
                primary = self._value(
                    "cuDevicePrimaryCtxRetain", self._api.cuDevicePrimaryCtxRetain(handle)
                )
                self._primary_contexts[device] = primary
        self._value("cuCtxSetCurrent", self._api.cuCtxSetCurrent(primary))

    def load_library(self, cubin: bytes) -> Library:
        """Load machine code from memory. The driver keeps its own copy.

        Only checked bytes may come here: a cubin that was cut short can hang the driver for good.
        Raises DriverTooOldError, with both versions, for code of a later CUDA than the driver's.
        """
        check_driver(cubin, self.cuda_release)
        result = self._api.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
        return Library(int(self._value("cuLibraryLoadData", result)))

    def unload_library(self, library: Library) -> None:
        """Unload machine code of which no kernel was launched."""
        self._value("cuLibraryUnload", self._api.cuLibraryUnload(self._api.CUlibrary(library)))

    def get_kernel(self, library: Library, symbol: str) -> Kernel:
        """The kernel of this symbol."""
        result = self._api.cuLibraryGetKernel(self._api.CUlibrary(library), symbol.encode())
        return Kernel(int(self._value(f"cuLibraryGetKernel({symbol})", result)))

    def param_info(self, kernel: Kernel) -> tuple[tuple[int, int], ...]:
        """Offset and size in bytes of every parameter, in order.

        The driver has no call for their number: an index past the last one is an invalid value.
        """
        handle = self._api.CUkernel(kernel)
        found: list[tuple[int, int]] = []
        for index in range(MAX_PARAMS):
            error, offset, size = self._api.cuKernelGetParamInfo(handle, index)
            if error == self._api.CUresult.CUDA_ERROR_INVALID_VALUE:
                return tuple(found)
            self._value(f"cuKernelGetParamInfo({index})", (error, None))
            found.append((int(offset), int(size)))
        raise DriverError(f"cuKernelGetParamInfo reports more than {MAX_PARAMS} parameters")

    def make_ready(self, kernel: Kernel, device: int, *, dynamic_shared_bytes: int) -> None:
        """Load the kernel into the current context and allow its dynamic shared memory.

        With lazy loading, the driver's default, the first launch would load the code: inside a
        stream capture, or in the middle of a request. More than 48 KiB need the permission (CUDA
        C++ Programming Guide, "Shared Memory" of compute capability 9.0); static shared memory
        counts too, so it is asked for at any size.
        """
        handle = self._api.CUkernel(kernel)
        if dynamic_shared_bytes:
            attribute = self._api.CUfunction_attribute
            result = self._api.cuKernelSetAttribute(
                attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                dynamic_shared_bytes,
                handle,
                self._device(device),
            )
            self._value(f"cuKernelSetAttribute(shared memory {dynamic_shared_bytes})", result)
        function = self._value("cuKernelGetFunction", self._api.cuKernelGetFunction(handle))
        self._value("cuFuncLoad", self._api.cuFuncLoad(function))

    def prepare(self, kernel: Kernel, config: LaunchConfig) -> PreparedLaunch:
        """The driver's launch structure and parameter buffer, filled in once."""
        return _CudaLaunch(self._api, kernel, config)

    def _device(self, device: int) -> Any:
        return self._value(f"cuDeviceGet({device})", self._api.cuDeviceGet(device))

    def _value(self, call: str, result: tuple[Any, ...]) -> Any:
        """The value of a call's `(code, value)`; raises DriverError where the code is an error."""
        if result[0]:
            raise _error(self._api, call, result[0])
        return result[1] if len(result) > 1 else None


class _CudaLaunch:
    """`cuLaunchKernelEx` with everything but stream and parameters in place."""

    def __init__(self, api: Any, kernel: Kernel, config: LaunchConfig) -> None:
        self._api = api
        self._describe = f"grid {config.grid}, block {config.block}, cluster {config.cluster}"
        # A kernel handle stands in for a function handle: the stream's context decides.
        self._function = api.CUfunction(kernel)
        self._launch = api.cuLaunchKernelEx
        launch = api.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = config.grid
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = config.block
        launch.sharedMemBytes = config.dynamic_shared_bytes
        launch.hStream = 0
        attributes = self._attributes(config)
        launch.attrs = attributes
        launch.numAttrs = len(attributes)
        self._config = launch
        self._stream = 0
        self._buffer = (ctypes.c_uint64 * words_of(config.params_size_bytes))()
        self.params = memoryview(self._buffer).cast("B")
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * (len(config.params) or 1))(
            *(base + offset for offset, _ in config.params)
        )
        self._pointers_address = ctypes.addressof(self._pointers)

    def _attributes(self, config: LaunchConfig) -> list[Any]:
        names = self._api.CUlaunchAttributeID
        found: list[Any] = []
        if config.cluster != (1, 1, 1):
            cluster = self._api.CUlaunchAttribute()
            cluster.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dim = cluster.value.clusterDim
            dim.x, dim.y, dim.z = config.cluster
            found.append(cluster)
        if config.programmatic:
            programmatic = self._api.CUlaunchAttribute()
            programmatic.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            programmatic.value.programmaticStreamSerializationAllowed = 1
            found.append(programmatic)
        return found

    def __call__(self, stream: int, params: bytes) -> None:
        self.params[: len(params)] = params
        self.launch(stream)

    def launch(self, stream: int) -> None:
        if stream != self._stream:
            self._config.hStream = stream
            self._stream = stream
        result = self._launch(self._config, self._function, self._pointers_address, 0)
        if result[0]:
            raise _error(self._api, f"cuLaunchKernelEx({self._describe})", result[0])


def inventory() -> Inventory:
    """The driver's version and GPUs; raises DriverError where there is no driver or no GPU."""
    driver = CudaDriver()
    return Inventory(
        driver.cuda_version,
        tuple(
            DeviceInfo(driver.device_name(device), *driver.compute_capability(device))
            for device in range(driver.device_count())
        ),
    )


def _dotted(version: int) -> str:
    """A version of the driver as people write it: 12.4 for 12040."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _error(api: Any, call: str, code: Any) -> DriverError:
    """The error of a call, with the driver's own name and words for its code."""
    named, name = api.cuGetErrorName(code)
    told, text = api.cuGetErrorString(code)
    label = f"{name.decode()} ({int(code)})" if not named and name else f"error {int(code)}"
    words = f": {text.decode()}" if not told and text else ""
    return DriverError(f"{call} failed with {label}{words}")
