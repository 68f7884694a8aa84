"""The runtime: router logits from stored kernels, by torch where none is stored."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Literal, get_args

import msgspec
import torch

from .devices import CudaDevices, Devices
from .driver import Driver
from .environment import Environment
from .errors import ColdCaptureError, MissError
from .fallback import TorchProduct
from .launcher import Launcher, Operands
from .loader import LIBRARY, ArtifactSource, Loader, Missing
from .problem import MAX_TOKENS, Problem
from .store import Store
from .tensors import DTYPES, check_operands, check_out

__all__ = ["OnMiss", "Runtime", "Stats", "load_and_run"]

logger = logging.getLogger("llbf16_aot")

OnMiss = Literal["torch", "error"]
"""What a call does that no stored kernel serves."""


class Stats(msgspec.Struct, frozen=True):
    """What a runtime has done so far.

    `hits` counts launches of stored kernels, `fallbacks` calls that torch computed, `loads`
    libraries that the driver loaded. `misses` counts, by reason, what was found missing, each
    compile key (or, where there is none, each problem) once; the reasons are those of
    `llbf16_aot.loader.Missing`. `library` counts calls that torch computed because the tuning table
    says that its library is faster there: neither misses nor fallbacks.
    """

    hits: int
    loads: int
    misses: dict[str, int]
    fallbacks: int
    library: int


class _Bound(threading.local):
    """The devices whose context this thread is known to have."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_Slot = tuple[int, int, int, torch.dtype, bool, int]
"""Tokens (all above the supported ones alike), experts, hidden, output type, pdl, device."""


class Runtime:
    """Computes `x @ weight.T` with the kernels of a store, without a compiler.

    `store` is a Store or its path; without one, LLBF16_AOT_STORE or the user's cache. `tuning`
    names the tuning table; without one, LLBF16_AOT_TUNING or `default`. Threads may share a
    runtime. It writes nothing and takes no lock of the store.

    `pdl`: launch with programmatic dependent launch. The kernel may then read `weight`, but not
    `x`, before the kernel ahead of it in the stream has ended. So a call that directly follows a
    kernel that writes `weight` must pass `pdl=False`.

    `on_miss`: where no stored kernel serves a call, "torch" lets torch compute it, counted in
    `stats()` and logged as one warning a key with the reason and what mends it; "error" raises
    MissError. Where the tuning table prefers torch's library, torch computes without either.
    Trouble with the trust in a store (UntrustedStoreError) and with the tuning table
    (TuningTableError) is always raised.

    Raises StoreError where no store is given and the environment names none, UsageError for a store
    path that is not absolute, ValueError for another `on_miss`, TypeError for a `pdl` that is no
    bool.
    """

    def __init__(
        self,
        store: ArtifactSource | Path | str | None = None,
        *,
        tuning: str | None = None,
        pdl: bool = True,
        on_miss: OnMiss = "torch",
        driver: Driver | None = None,
        devices: Devices | None = None,
    ) -> None:
        if on_miss not in get_args(OnMiss):
            raise ValueError(f"on_miss is {on_miss!r}, must be one of {get_args(OnMiss)}")
        environment = Environment()
        if store is None:
            store = environment.store_location().root
        if isinstance(store, str | Path):
            store = Store(Path(store))
        self._loader = Loader(store, tuning or environment.tuning or "default", driver)
        self._pdl = _check_pdl(pdl)
        self._on_miss = on_miss
        self._devices: Devices = CudaDevices() if devices is None else devices
        self._torch = TorchProduct()
        # A log handler may ask for stats() while a miss is logged under the lock.
        self._lock = threading.RLock()
        self._bound = _Bound()
        self._entries: dict[_Slot, Launcher | Missing] = {}
        self._fallbacks = 0
        self._library = 0
        self._misses: dict[str, int] = {}
        self._reported: set[str] = set()

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.float32,
        pdl: bool | None = None,
    ) -> torch.Tensor:
        """Router logits `x @ weight.T`: x [M, K] bf16, weight [N, K] bf16 -> [M, N] of `out_dtype`.

        Enqueues one kernel on torch's current stream of the tensors' device and returns `out`, or
        a new tensor. Sums are fp32 and the same bits in every run of one kernel; `out_dtype` is
        float32, bfloat16 or float16. `pdl` overrides the runtime's setting for this call. M = 0 and
        N = 0 give an empty result and K = 0 zeros, without a kernel.

        A malformed call raises TypeError or ValueError that names tensor and value: type, layout,
        number of dimensions, dtype, device (CUDA, the same for all), equal K, K % 8, contiguous
        rows, row stride (at least K, a multiple of 16 bytes, below 2^31), 16-byte address, autograd
        (the kernels have no backward); `out` besides: `out_dtype`, shape [M, N], contiguous,
        outside the memory span of x and weight.

        A well-formed call that no kernel computes is a miss: M above 64, N above 65,536, K above
        1,048,576, a GPU older than compute capability 9.0, an artifact that is absent from the
        store or does not pass its checks. See `on_miss` of the class.

        During stream capture a call must have been made once before with the same M, N, K, output
        type, pdl and device, else ColdCaptureError: loading code there would break the capture. A
        launch that the driver refuses raises DriverError.
        """
        if out_dtype not in DTYPES:
            raise TypeError(
                f"out_dtype is {out_dtype!r}, must be one of {', '.join(map(str, DTYPES))}"
            )
        pdl = self._pdl if pdl is None else _check_pdl(pdl)
        operands = check_operands(x, weight, self._devices.device_type)
        if out is not None:
            check_out(out, out_dtype, operands, x.device)
        if not (operands.tokens and operands.experts and operands.hidden):
            return _empty_sum(x, weight, out, out_dtype)
        slot = (
            min(operands.tokens, MAX_TOKENS + 1),
            operands.experts,
            operands.hidden,
            out_dtype,
            pdl,
            operands.device_index,
        )
        if self._devices.current() == operands.device_index:
            return self._run_here(slot, operands, x, weight, out)
        with self._devices.guard(operands.device_index):
            return self._run_here(slot, operands, x, weight, out)

    def stats(self) -> Stats:
        """What was done so far, in all threads."""
        with self._lock:
            launchers = [entry for entry in self._entries.values() if isinstance(entry, Launcher)]
            return Stats(
                hits=sum(launcher.calls for launcher in launchers),
                loads=self._loader.loads,
                misses=dict(self._misses),
                fallbacks=self._fallbacks,
                library=self._library,
            )

    def _run_here(
        self,
        slot: _Slot,
        operands: Operands,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """The call, with the tensors' device current."""
        entry = self._entries.get(slot)
        if entry is None:
            entry = self._first_call(slot, operands)
        if isinstance(entry, Missing):
            return self._fall_back(entry, x, weight, out, slot[3])
        index = operands.device_index
        if index not in self._bound.devices:
            self._loader.driver.bind_context(index)
            self._bound.devices.add(index)
        if out is None:
            out = torch.empty((operands.tokens, operands.experts), dtype=slot[3], device=x.device)
        entry(self._devices.stream(index), operands, out.data_ptr())
        return out

    def _first_call(self, slot: _Slot, operands: Operands) -> Launcher | Missing:
        """Find and load what serves a slot, once for all threads."""
        problem = Problem(
            operands.tokens, operands.experts, operands.hidden, DTYPES[slot[3]], slot[4]
        )
        if self._devices.capturing():
            raise ColdCaptureError(
                f"first call for {problem} during stream capture: its kernel is not loaded",
                hint="make the same call once before the capture",
            )
        with self._lock:
            entry = self._entries.get(slot)
            if entry is None:
                entry = self._loader.find(problem, slot[5])
                if isinstance(entry, Missing):
                    self._report(entry)
                self._entries[slot] = entry
        return entry

    def _report(self, missing: Missing) -> None:
        """Count and log a miss, once for each thing that is missing."""
        if missing.reason == LIBRARY or missing.subject in self._reported:
            return
        self._reported.add(missing.subject)
        self._misses[missing.reason] = self._misses.get(missing.reason, 0) + 1
        if self._on_miss == "torch":
            mend = f" To mend it: {missing.hint}" if missing.hint else ""
            logger.warning("%s. torch computes it from now on.%s", missing.message, mend)

    def _fall_back(
        self,
        missing: Missing,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        chosen = missing.reason == LIBRARY
        if self._on_miss == "error" and not chosen:
            raise MissError(missing.message, hint=missing.hint)
        with self._lock:
            if chosen:
                self._library += 1
            else:
                self._fallbacks += 1
        product = self._torch(x, weight, out_dtype)
        return product if out is None else out.copy_(product)


class _Process:
    """The runtime that all of a process's `load_and_run` calls share."""

    lock = threading.Lock()
    runtime: Runtime | None = None


def load_and_run(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Router logits `x @ weight.T`: x [M, K] bf16, weight [N, K] bf16 -> [M, N] of `out_dtype`.

    `Runtime().run(...)` on one runtime for the whole process, made by the first call from the
    environment's store and tuning table; what is checked, raised and fallen back from is said
    there. Launches with programmatic dependent launch: where the kernel that directly precedes the
    call in the stream writes `weight`, use `Runtime.run(..., pdl=False)`.
    """
    runtime = _Process.runtime
    if runtime is None:
        with _Process.lock:
            runtime = _Process.runtime
            if runtime is None:
                runtime = _Process.runtime = Runtime()
    return runtime.run(x, weight, out=out, out_dtype=out_dtype)


def _empty_sum(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """The result where an extent is zero: nothing, or sums of nothing."""
    if out is None:
        return torch.zeros((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    return out.zero_()


def _check_pdl(pdl: bool) -> bool:
    if not isinstance(pdl, bool):
        raise TypeError(f"pdl is {pdl!r}, must be True or False")
    return pdl
