"""Kernels ahead of a router call: one that writes late, and one that reads without waiting.

PTX, so that the check needs no compiler; launched through the package's own driver module.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import torch
from llbf16_aot.driver import CudaDriver, LaunchConfig, Library
from llbf16_aot.errors import DriverError

PARAMS = ((0, 8), (8, 8), (16, 4), (20, 4))
BLOCKS = 32
THREADS = 128
SPIN_NS = 100_000

_COPY = """
.visible .entry {name}(
    .param .u64 destination, .param .u64 source, .param .u32 words, .param .u32 spin_ns)
{{
    .reg .pred %done, %early;
    .reg .b32 %index, %words, %step, %value, %spin, %block, %threads;
    .reg .b64 %to, %from, %at, %offset, %start, %now, %wait;
    {trigger}
    ld.param.u64 %to, [destination];
    ld.param.u64 %from, [source];
    ld.param.u32 %words, [words];
    ld.param.u32 %spin, [spin_ns];
    cvta.to.global.u64 %to, %to;
    cvta.to.global.u64 %from, %from;
    cvt.u64.u32 %wait, %spin;
    mov.u64 %start, %globaltimer;
SPIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %early, %now, %wait;
    @%early bra SPIN;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %index, %tid.x;
    mad.lo.u32 %index, %block, %threads, %index;
    mov.u32 %step, %nctaid.x;
    mul.lo.u32 %step, %step, %threads;
COPY:
    setp.ge.u32 %done, %index, %words;
    @%done bra END;
    mul.wide.u32 %offset, %index, 4;
    add.u64 %at, %from, %offset;
    ld.volatile.global.u32 %value, [%at];
    add.u64 %at, %to, %offset;
    st.volatile.global.u32 [%at], %value;
    add.u32 %index, %index, %step;
    bra COPY;
END:
    ret;
}}
"""

PTX = (
    ".version 7.8\n.target sm_90\n.address_size 64\n"
    + _COPY.format(name="late_copy", trigger="griddepcontrol.launch_dependents;")
    + _COPY.format(name="copy_at_once", trigger="")
)
"""`late_copy` lets its dependents start, then spins, then copies; `copy_at_once` never waits."""


class Producers:
    """Launches the two kernels on torch's current stream."""

    def __init__(self) -> None:
        driver = CudaDriver()
        device = torch.cuda.current_device()
        driver.bind_context(device)
        library = _load(driver)
        self._launches = {}
        for symbol, programmatic in (("late_copy", False), ("copy_at_once", True)):
            kernel = driver.get_kernel(library, symbol)
            if driver.param_info(kernel) != PARAMS:
                raise DriverError(f"{symbol} takes parameters {driver.param_info(kernel)}")
            driver.make_ready(kernel, device, dynamic_shared_bytes=0)
            config = LaunchConfig(
                (BLOCKS, 1, 1), (THREADS, 1, 1), (1, 1, 1), 0, programmatic, PARAMS
            )
            self._launches[symbol] = driver.prepare(kernel, config)

    def late_copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy after 100 us, having let the next kernel start if it was launched as dependent."""
        self._launch("late_copy", destination, source, SPIN_NS)

    def copy_at_once(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy as a dependent launch that does not wait for the kernel ahead of it."""
        self._launch("copy_at_once", destination, source, 0)

    def _launch(
        self, symbol: str, destination: torch.Tensor, source: torch.Tensor, spin_ns: int
    ) -> None:
        size_bytes = source.numel() * source.element_size()
        same = destination.numel() * destination.element_size() == size_bytes
        if not (same and destination.is_contiguous() and source.is_contiguous()):
            raise ValueError("the copy kernels take contiguous tensors of one size")
        if size_bytes % 4 or (destination.data_ptr() | source.data_ptr()) % 4:
            raise ValueError("the copy kernels move 4 bytes at a time")
        params = struct.pack(
            "<QQII", destination.data_ptr(), source.data_ptr(), size_bytes // 4, spin_ns
        )
        self._launches[symbol](torch.cuda.current_stream().cuda_stream, params)


def _load(driver: CudaDriver) -> Library:
    """Let the driver compile the PTX, or ptxas where the driver's compiler is not installed."""
    try:
        return driver.load_library(PTX.encode() + b"\0")
    except DriverError:
        ptxas = shutil.which("ptxas", path="/usr/local/cuda/bin") or shutil.which("ptxas")
        if ptxas is None:
            raise
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "producer.ptx", Path(folder) / "producer.cubin"
        source.write_text(PTX, encoding="utf-8")
        subprocess.run([ptxas, "-arch=sm_90a", "-o", cubin, source], check=True)
        return driver.load_library(cubin.read_bytes())
