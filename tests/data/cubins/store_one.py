"""A kernel of our own in CuTe DSL, compiled once to make the fixtures `dsl_*.cubin` (README.md)."""

import os
import sys
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_ptr


@cute.kernel
def store_one(out: cute.Pointer, value: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    tensor = cute.make_tensor(out, cute.make_layout(64))
    tensor[thread] = cutlass.Float32(value)


@cute.jit
def launch(out: cute.Pointer, value: cutlass.Int32, stream):
    store_one(out, value).launch(grid=(2, 1, 1), block=(64, 1, 1), cluster=(2, 1, 1), stream=stream)


def main() -> None:
    Path(os.environ["CUTE_DSL_DUMP_DIR"]).mkdir(parents=True, exist_ok=True)
    out = make_ptr(cutlass.Float32, 16, cute.AddressSpace.gmem, assumed_align=16)
    for target in sys.argv[1:]:
        compiled = cute.compile[cute.GPUArch(target), cute.KeepCUBIN](
            launch, out, cutlass.Int32(1), make_fake_stream()
        )
        Path(f"dsl_{target}.cubin").write_bytes(compiled.__cubin__)


main()
