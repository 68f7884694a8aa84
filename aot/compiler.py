"""The compiler: turns one compile key into a cubin, in a process of its own.

Together with the kernels, the only module that imports CuTe DSL. Run as
`python -m llbf16_aot.compiler` it is the child that the builder talks to, by the protocol of
`llbf16_aot.protocol` on stdin and stdout.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import traceback
from typing import BinaryIO

import msgspec

from .backends import OPERANDS
from .errors import AotError, CompileError
from .key import CompileKey
from .problem import Epilogue
from .protocol import Compiled, Ready, Reply, Request
from .toolchain import COMPILE_OPTIONS

__all__ = ["compile_key", "main"]


def compile_key(key: CompileKey) -> Compiled:
    """Compile the kernel of a key for the key's target; needs no GPU, driver or CUDA toolkit.

    The environment variable CUTE_DSL_DUMP_DIR must name an existing folder before CuTe DSL is first
    imported: without one CuTe DSL keeps no machine code, and says so to nobody. Not thread-safe.
    Raises CompileError.
    """
    key.check()
    dump = os.environ.get("CUTE_DSL_DUMP_DIR", "")
    if not os.path.isdir(dump):
        raise CompileError(f"CUTE_DSL_DUMP_DIR is {dump!r}, must name an existing folder")

    import cutlass.cute as cute

    family = importlib.import_module(f"{__package__}.kernels.{key.backend}")
    options: dict[str, object] = {"out_dtype": key.out_dtype, "pdl": key.pdl}
    if key.epilogue is not Epilogue.NONE:
        options["epilogue"] = key.epilogue
    if len({x for x, _ in OPERANDS[key.backend]}) > 1:
        options["x_dtype"] = key.x_dtype
    function, arguments = family.entry(key.config, **options)
    function.kernel.set_name_prefix(
        f"llbf16_aot_{key.backend}", remove_cutlass_symbol=True, keep_mangled_name=False
    )
    # One string: options given as `cute.compile[...]` would be dropped beside it.
    flags = " ".join((f"--gpu-arch {key.target}", "--keep-cubin", "--keep-ptx", *COMPILE_OPTIONS))
    compiled = cute.compile(function, *arguments, options=flags)
    symbols = list(compiled.kernel_info)
    if len(symbols) != 1:
        raise CompileError(f"{key}: expected one kernel, the compiler made {symbols}")
    cubin, ptx = compiled.__cubin__, compiled.__ptx__
    if not isinstance(cubin, bytes):
        raise CompileError(f"{key}: the compiler kept no machine code, but {cubin!r}")
    return Compiled(symbols[0], cubin, ptx.encode() if isinstance(ptx, str) else bytes(ptx))


def _private_stdout() -> BinaryIO:
    """The replies' own channel. The compiler's chatter on stdout goes to stderr from here on."""
    sys.stdout.flush()
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return channel


def main() -> int:
    """Serve requests until stdin ends. A key that fails is answered, and the next one is served."""
    channel = _private_stdout()
    version = importlib.metadata.version("nvidia-cutlass-dsl")
    channel.write(msgspec.json.encode(Ready(ready=True, version=version)) + b"\n")
    channel.flush()
    for line in sys.stdin.buffer:
        try:
            request = msgspec.json.decode(line, type=Request)
            compiled = compile_key(request.key)
        except AotError as error:
            channel.write(msgspec.json.encode(Reply(ok=False, error=error.message)) + b"\n")
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
            channel.write(msgspec.json.encode(Reply(ok=False, error=text)) + b"\n")
        else:
            reply = Reply(
                ok=True,
                symbol=compiled.symbol,
                cubin_size=len(compiled.cubin),
                ptx_size=len(compiled.ptx),
            )
            channel.write(msgspec.json.encode(reply) + b"\n" + compiled.cubin + compiled.ptx)
        channel.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
