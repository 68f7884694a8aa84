"""The CUDA driver: every call that this package makes to it, each with its return code checked.

The only module that talks to the driver. It imports neither torch nor the compiler, and the driver
library is opened by `CudaDriver()`, not by the import.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
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

# Numbers of cuda.h.
_INVALID_VALUE = 1
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76
_MAX_DYNAMIC_SHARED_BYTES = 8
_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6

_out = ctypes.byref

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

    def use_stream(self, stream: int) -> None:
        """Enqueue on this stream from now on; before that, on the default stream."""

    @property
    def enqueue(self) -> Callable[[], int]:
        """Enqueues the kernel with what the buffer holds now; gives the driver's code."""

    def check(self, code: int) -> None:
        """Raise DriverError for a code of `enqueue` that is an error."""

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
    """The driver of this machine, called through ctypes: docs/notes/host.md has the comparison.

    Raises DriverError where libcuda is missing or too old.
    """

    def __init__(self) -> None:
        self._api = api = _Libcuda()
        self._primary_contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        api("cuInit", 0)
        version = api.number("cuDriverGetVersion")
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
        handle = self._device(device)
        major, minor = (
            self._api.number("cuDeviceGetAttribute", name, handle)
            for name in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR)
        )
        return major, minor

    def device_count(self) -> int:
        """How many GPUs the driver shows to this process."""
        return self._api.number("cuDeviceGetCount")

    def has_context(self, device: int) -> bool:
        """Whether the device's primary context, which torch uses, is active in this process."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        self._api("cuDevicePrimaryCtxGetState", self._device(device), _out(flags), _out(active))
        return bool(active.value)

    def device_name(self, device: int) -> str:
        """The product name of a device."""
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._api("cuDeviceGetName", name, _NAME_BYTES, self._device(device))
        return name.value.decode(errors="replace")

    def bind_context(self, device: int) -> None:
        """Make the device's primary context current, unless a context of this device is already.

        A new thread has none until its first call into the CUDA runtime, and torch's caching
        allocator serves memory without such a call.
        """
        handle = self._device(device)
        if self._api.handle("cuCtxGetCurrent") and self._api.number("cuCtxGetDevice") == handle:
            return
        with self._lock:
            primary = self._primary_contexts.get(device)
            if primary is None:
                primary = self._api.handle("cuDevicePrimaryCtxRetain", handle)
                self._primary_contexts[device] = primary
        self._api("cuCtxSetCurrent", ctypes.c_void_p(primary))

    def load_library(self, cubin: bytes) -> Library:
        """Load machine code from memory. The driver keeps its own copy.

        Only checked bytes may come here: a cubin that was cut short can hang the driver for good.
        Raises DriverTooOldError, with both versions, for code of a later CUDA than the driver's.
        """
        check_driver(cubin, self.cuda_release)
        options = (None, None, 0)
        return Library(self._api.handle("cuLibraryLoadData", cubin, *options, *options))

    def unload_library(self, library: Library) -> None:
        """Unload machine code of which no kernel was launched."""
        self._api("cuLibraryUnload", ctypes.c_void_p(library))

    def get_kernel(self, library: Library, symbol: str) -> Kernel:
        """The kernel of this symbol."""
        arguments = ctypes.c_void_p(library), symbol.encode()
        return Kernel(self._api.handle("cuLibraryGetKernel", *arguments, detail=symbol))

    def param_info(self, kernel: Kernel) -> tuple[tuple[int, int], ...]:
        """Offset and size in bytes of every parameter, in order.

        The driver has no call for their number: an index past the last one is an invalid value.
        """
        found: list[tuple[int, int]] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        name = "cuKernelGetParamInfo"
        for index in range(MAX_PARAMS):
            code = self._api.code(
                name, ctypes.c_void_p(kernel), ctypes.c_size_t(index), _out(offset), _out(size)
            )
            if code == _INVALID_VALUE:
                return tuple(found)
            self._api.check(code, f"{name}({index})")
            found.append((offset.value, size.value))
        raise DriverError(f"{name} reports more than {MAX_PARAMS} parameters")

    def make_ready(self, kernel: Kernel, device: int, *, dynamic_shared_bytes: int) -> None:
        """Load the kernel into the current context and allow its dynamic shared memory.

        With lazy loading, the driver's default, the first launch would load the code: inside a
        stream capture, or in the middle of a request. More than 48 KiB need the permission (CUDA
        C++ Programming Guide, "Shared Memory" of compute capability 9.0); static shared memory
        counts too, so it is asked for at any size.
        """
        handle = ctypes.c_void_p(kernel)
        if dynamic_shared_bytes:
            self._api(
                "cuKernelSetAttribute",
                _MAX_DYNAMIC_SHARED_BYTES,
                dynamic_shared_bytes,
                handle,
                self._device(device),
                detail=f"shared memory {dynamic_shared_bytes}",
            )
        function = self._api.handle("cuKernelGetFunction", handle)
        self._api("cuFuncLoad", ctypes.c_void_p(function))

    def prepare(self, kernel: Kernel, config: LaunchConfig) -> PreparedLaunch:
        """The driver's launch structure and parameter buffer, filled in once."""
        return _CudaLaunch(self._api, kernel, config)

    def _device(self, device: int) -> int:
        return self._api.number("cuDeviceGet", device, detail=str(device))


class _CudaLaunch:
    """`cuLaunchKernelEx` with everything but stream and parameters in place."""

    def __init__(self, api: _Libcuda, kernel: Kernel, config: LaunchConfig) -> None:
        self._api = api
        self._describe = f"grid {config.grid}, block {config.block}, cluster {config.cluster}"
        self._attributes = (_LaunchAttribute * 2)()
        count = 0
        if config.cluster != (1, 1, 1):
            self._attributes[count].id = _CLUSTER_DIMENSION
            self._attributes[count].value[:3] = config.cluster
            count += 1
        if config.programmatic:
            self._attributes[count].id = _PROGRAMMATIC_STREAM_SERIALIZATION
            self._attributes[count].value[0] = 1
            count += 1
        self._config = _LaunchConfig(
            grid=config.grid,
            block=config.block,
            dynamic_shared_bytes=config.dynamic_shared_bytes,
            stream=None,
            attributes=ctypes.addressof(self._attributes),
            attribute_count=count,
        )
        self._buffer = (ctypes.c_uint64 * words_of(config.params_size_bytes))()
        self.params = memoryview(self._buffer).cast("B")
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * (len(config.params) or 1))(
            *(base + offset for offset, _ in config.params)
        )
        # A kernel handle stands in for a function handle: the stream's context decides. A partial
        # has no frame of Python's own.
        self.enqueue: Callable[[], int] = functools.partial(
            api.launch_function(),
            ctypes.addressof(self._config),
            kernel,
            ctypes.addressof(self._pointers),
            None,
        )

    def __call__(self, stream: int, params: bytes) -> None:
        self.params[: len(params)] = params
        self.use_stream(stream)
        self.check(self.enqueue())

    def use_stream(self, stream: int) -> None:
        self._config.stream = stream

    def check(self, code: int) -> None:
        self._api.check(code, f"cuLaunchKernelEx({self._describe})")


class _LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute`: an identifier and a union of 64 bytes, aligned to 8."""

    _fields_ = (
        ("id", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("value", ctypes.c_uint32 * 16),
    )


class _LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


class _Libcuda:
    """libcuda.so.1: calls by name. Raises DriverError where it, or a function of it, is missing.

    Functions are those that the library exports under the plain name: of none that is used here
    does cuda.h give a newer form to the same name. Arguments are ints for C's int and unsigned,
    bytes for text, and ctypes objects for all else.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(
                f"libcuda.so.1 cannot be opened: {error}",
                hint="install the NVIDIA driver, or start the container with its GPUs",
            ) from error

    def __call__(self, name: str, *arguments: Any, detail: str = "") -> None:
        """Call a function; raises DriverError for a code that is an error."""
        code = self.code(name, *arguments)
        if code:
            self.check(code, f"{name}({detail})" if detail else name)

    def number(self, name: str, *arguments: Any, detail: str = "") -> int:
        """What a function writes behind its first argument, an int that is not given here."""
        result = ctypes.c_int()
        self(name, _out(result), *arguments, detail=detail)
        return result.value

    def handle(self, name: str, *arguments: Any, detail: str = "") -> int:
        """The same with a pointer or a handle."""
        result = ctypes.c_void_p()
        self(name, _out(result), *arguments, detail=detail)
        return result.value or 0

    def code(self, name: str, *arguments: Any) -> int:
        """Call a function and give its code to who wants to look at it."""
        code: int = self._function(name)(*arguments)
        return code

    def check(self, code: int, call: str) -> None:
        """Raise DriverError for a code that is an error, with the driver's own words for it."""
        if not code:
            return
        name, text = (self._text(what, code) for what in ("cuGetErrorName", "cuGetErrorString"))
        label = f"{name} ({code})" if name else f"error {code}"
        raise DriverError(f"{call} failed with {label}{f': {text}' if text else ''}")

    def launch_function(self) -> Callable[[int, int, int, None], int]:
        """`cuLaunchKernelEx` of addresses, which lets other threads run while it does."""
        self._function("cuLaunchKernelEx")
        # Declared as addresses: ctypes converts an int faster than it checks a pointer's type.
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        function: Callable[[int, int, int, None], int] = prototype(
            ("cuLaunchKernelEx", self._library)
        )
        return function

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, name)
        except AttributeError as error:
            raise DriverError(
                f"libcuda.so.1 has no function {name}",
                hint="install an NVIDIA driver of release 550 or newer",
            ) from error

    def _text(self, name: str, code: int) -> str:
        found = ctypes.c_char_p()
        if self.code(name, code, _out(found)) or found.value is None:
            return ""
        return found.value.decode(errors="replace")


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
