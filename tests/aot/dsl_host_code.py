"""The host code that CuTe DSL makes for a kernel, run on a machine without a GPU.

The DSL compiles a kernel together with a host function that fills in a launch and calls
`cudaLaunchKernelEx`. Here that very machine code runs, with a `cudaLaunchKernelEx` of ours, which
writes down what it was given. Run as a program in a process of its own: JSON requests on stdin,
JSON answers in the file that the first argument names.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from llbf16_aot.compiler import compile_key
from llbf16_aot.key import CompileKey
from llbf16_aot.launch import ParamKind, ParamSource
from llbf16_aot.protocol import Compiled

LAUNCH = "_cudaLaunchKernelEx"
"""The one entry point of the CUDA runtime that the host code may reach."""

COOPERATIVE, CLUSTER, PROGRAMMATIC = 2, 4, 6
"""cudaLaunchAttributeID of the attributes that the DSL states, from the CUDA runtime's headers."""

WORDS = {COOPERATIVE: 1, CLUSTER: 3, PROGRAMMATIC: 1}
"""32-bit words of each attribute's value; the rest of the union is not initialised."""


class Argument(msgspec.Struct, frozen=True):
    """One argument of the host function: a kernel parameter and its value in a call."""

    source: ParamSource
    value: int


class Request(msgspec.Struct, frozen=True):
    """Compile a key, then call its host code once for each list of arguments."""

    key: CompileKey
    calls: tuple[tuple[Argument, ...], ...]
    stream: int


class HostLaunch(msgspec.Struct, frozen=True):
    """What the host code handed to `cudaLaunchKernelEx`; `params` in their order, as bytes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared_bytes: int
    stream: int
    attributes: dict[int, tuple[int, ...]]
    params: tuple[bytes, ...]


class Answer(msgspec.Struct, frozen=True):
    """The machine code of a key, the host function's number of arguments, and its launches."""

    symbol: str
    cubin: bytes
    host_arguments: int
    launches: tuple[HostLaunch, ...]


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """`cudaLaunchConfig_t`."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint32),
    )


_LaunchFunction = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)
_OtherFunction = ctypes.CFUNCTYPE(ctypes.c_int32)
_NOT_SUPPORTED = 801  # cudaErrorNotSupported


def answer(request: Request) -> Answer:
    """Compile a key as the builder does, and run the host code that came with it."""
    code, compiled = _compile(request.key)
    host = _HostFunction(compiled)
    launches = tuple(host.launch(call, request.stream) for call in request.calls)
    return Answer(code.symbol, code.cubin, host.arguments, launches)


def _compile(key: CompileKey) -> tuple[Compiled, Any]:
    """What the builder's own compile of a key gives, and the DSL's object behind it."""
    from cutlass import cute

    made: list[Any] = []
    compile_ = cute.compile

    def keep(*arguments: Any, **options: Any) -> Any:
        made.append(compile_(*arguments, **options))
        return made[-1]

    cute.compile = keep
    try:
        code = compile_key(key)
    finally:
        cute.compile = compile_
    (compiled,) = made
    return code, compiled


class _HostFunction:
    """The host function of a compiled kernel, linked against a CUDA runtime of ours."""

    def __init__(self, compiled: Any) -> None:
        from cutlass._mlir import execution_engine, ir

        module = compiled.ir_module
        functions = {
            ir.StringAttr(one.attributes["sym_name"]).value: one
            for one in module.body.operations
            if one.operation.name == "llvm.func"
        }
        self.arguments = len(functions[compiled.function_name].regions[0].blocks[0].arguments)
        self._sizes: tuple[int, ...] = ()
        self._seen: list[HostLaunch] = []
        self._callbacks = (_LaunchFunction(self._note), _OtherFunction(lambda: _NOT_SUPPORTED))
        with module.context:
            self._engine = execution_engine.ExecutionEngine(module, opt_level=2, shared_libs=[])
            for name in functions:
                if name.startswith("_cu"):
                    callback = self._callbacks[name != LAUNCH]
                    pointer = ctypes.cast(callback, ctypes.c_void_p)
                    self._engine.raw_register_runtime(name, pointer)
            address = self._engine.raw_lookup(compiled.function_name)
        if not address:
            raise RuntimeError(f"no host function {compiled.function_name}")
        # MLIR's packed calling convention: an array with the address of each argument, then of
        # the result.
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def launch(self, call: Sequence[Argument], stream: int) -> HostLaunch:
        """Call the host function; exactly one launch must come of it."""
        cells: list[Any] = [
            ctypes.c_uint64(one.value)
            if one.source.kind is ParamKind.POINTER
            else ctypes.c_int32(one.value)
            for one in call
        ]
        self._sizes = tuple(one.source.kind.size_bytes for one in call)
        result = ctypes.c_int32(-1)
        cells += [ctypes.c_uint64(stream), result]
        packed = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        self._seen.clear()
        self._call(packed)
        if result.value or len(self._seen) != 1:
            raise RuntimeError(f"host code ended with {result.value}, launches {self._seen}")
        return self._seen[0]

    def _note(self, config: Any, kernel: int, params: Any) -> int:
        del kernel
        launch = config.contents
        self._seen.append(
            HostLaunch(
                grid=tuple(launch.grid),
                block=tuple(launch.block),
                dynamic_shared_bytes=launch.dynamic_shared_bytes,
                stream=launch.stream or 0,
                attributes={
                    attribute.id: tuple(attribute.value[: WORDS.get(attribute.id, 16)])
                    for attribute in launch.attributes[: launch.attribute_count]
                },
                params=tuple(
                    ctypes.string_at(params[place], size) for place, size in enumerate(self._sizes)
                ),
            )
        )
        return 0


def main(out: str) -> int:
    """Answer the requests on stdin."""
    requests = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[Request, ...])
    answers = tuple(answer(request) for request in requests)
    Path(out).write_bytes(msgspec.json.encode(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
