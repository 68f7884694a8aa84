"""The runtime: router logits from stored kernels, by torch where none is stored."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec
import torch

from .artifact import Artifact
from .devices import CudaDevices, Devices
from .driver import Driver
from .environment import Environment
from .errors import (
    ColdCaptureError,
    ForkedProcessError,
    MissError,
    UsageError,
)
from .fallback import TorchProduct
from .forks import watch_forks
from .key import CompileKey
from .launch import ParamSource
from .launcher import Extras, Launcher, Operands
from .layers import ArtifactSource, open_layers
from .loader import LIBRARY, NOT_LOADED, Loader, Missing, Reach
from .problem import ALIGNMENT_BYTES, FEW_TOKENS, OPERAND_TOKENS, Epilogue, Problem
from .routes import Memory
from .store import MissReason, Store
from .tensors import DTYPES, check_bias, check_operands, check_out, check_scale, guard_of
from .wanted import PreloadReport, Wanted, WantedItem, wanted_items

__all__ = [
    "OnMiss",
    "Pdl",
    "Runtime",
    "Stats",
    "freeze",
    "load_and_run",
    "preload",
    "stats",
    "weights_updated",
]

logger = logging.getLogger("llbf16_aot")

OnMiss: TypeAlias = Literal["torch", "error", "compile"]
"""What a call does that no stored kernel serves."""

Pdl: TypeAlias = bool | Literal["auto"]
"""Whether a launch may begin before the kernel ahead of it in the stream has ended."""

_FP32 = torch.float32
_MISALIGNED = ALIGNMENT_BYTES - 1

MAX_LARGE = 1024
"""Calls of more than FEW_TOKENS tokens that are remembered: a prefill may have any number."""

_MENDED_BY_BUILD = (MissReason.ABSENT.value, MissReason.DAMAGED.value, MissReason.WRONG_CUBIN.value)
"""Reasons that a build mends."""


class Stats(msgspec.Struct, frozen=True):
    """What a runtime has done so far.

    `hits` counts launches of stored kernels (without those that other threads made of large batches
    just when these were forgotten), `fallbacks` calls that torch computed, `loads`
    libraries that the driver loaded. `misses` counts, by reason, what was found missing, each
    compile key (or, where there is none, each problem) once; the reasons are those of
    `llbf16_aot.loader.Missing`. `library` counts calls that torch computed because the tuning table
    says that its library is faster there, and large batches without a kernel of their own: neither
    misses nor fallbacks. `rejects` counts calls that were refused with an error before anything was
    computed: malformed ones, those of a cold kernel during capture, and misses where these are
    errors. `compiled` counts kernels that `on_miss="compile"` had compiled.
    """

    hits: int
    loads: int
    misses: dict[str, int]
    fallbacks: int
    library: int
    rejects: int = 0
    compiled: int = 0


class _Bound(threading.local):
    """The devices whose context this thread is known to have."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_Slot: TypeAlias = tuple[Problem, bool, int]
"""What a call asks for, whether it leaves dependent launch to the runtime, and its device."""


class Runtime:
    """Computes `x @ weight.T` with the kernels of a store, without a compiler.

    `store` is a Store or its path; without one, LLBF16_AOT_STORE or the user's cache. `layers` are
    read-only stores below it, or their absolute paths, searched after it in their order; without
    any, those of LLBF16_AOT_LAYERS, which an empty list leaves out. `tuning` names the tuning
    table; without one, LLBF16_AOT_TUNING or `default`. Threads may share a runtime. It writes
    nothing and takes no lock of the store, but under `on_miss="compile"`.

    `pdl`: launch with programmatic dependent launch. The kernel may then read `weight`, but not
    `x`, before the kernel ahead of it in the stream has ended, so a call that directly follows a
    kernel that writes `weight` must go without. "auto" sees to that for a weight that is new, has
    been changed in place by torch, or is named in `weights_updated`; docs/runtime.md tells exactly
    what it notices. False goes without in every call, True in none.

    `on_miss`: where no stored kernel serves a call, "torch" lets torch compute it, counted in
    `stats()`; "error" raises MissError; "compile" compiles the kernel in a child process, which
    needs the build extra and takes seconds, publishes and launches it, and leaves to torch what no
    build can mend. Each thing that is missing is logged once, as a warning with its key, the reason
    and what mends it. Where the tuning table prefers torch's library, torch computes, and none of
    this applies. Trouble with the trust in a store (UntrustedStoreError) and with the tuning table
    (TuningTableError) is always raised.

    Raises StoreError where no store is given and the environment names none, UsageError for a store
    path that is not absolute and for `on_miss="compile"` with a store that cannot be written to,
    ValueError for another `on_miss`, TypeError for another `pdl`.
    """

    def __init__(
        self,
        store: ArtifactSource | Path | str | None = None,
        *,
        layers: Iterable[ArtifactSource | Path | str] | None = None,
        tuning: str | None = None,
        pdl: Pdl = "auto",
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
        if on_miss == "compile" and not isinstance(store, Store):
            raise UsageError(
                f"on_miss is 'compile' and the store is {store!r}, nothing can be published there",
                hint="pass a Store or its path",
            )
        self._store = store
        source = open_layers(store, environment.layers if layers is None else layers)
        self._loader = Loader(source, tuning or environment.tuning or "default", driver)
        self._pdl = _check_pdl(pdl)
        self._on_miss = on_miss
        self._devices: Devices = CudaDevices() if devices is None else devices
        self._current = self._devices.current
        self._stream = self._devices.stream
        self._empty = self._devices.empty
        self._torch = TorchProduct()
        self._memory = Memory()
        self._weights = self._memory.weights
        self._entries: dict[_Slot, Launcher | Missing] = {}
        self._large: list[_Slot] = []
        self._forgotten_hits = 0
        self._frozen = False
        self._forked = False
        self._fallbacks = 0
        self._library = 0
        self._rejects = 0
        self._compiled = 0
        self._misses: dict[str, int] = {}
        self._reported: set[str] = set()
        self._make_locks()
        watch_forks(self)

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.float32,
        pdl: Pdl | None = None,
        bias: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Router logits `x @ weight.T`: x [M, K], weight [N, K] bf16 -> [M, N] of `out_dtype`.

        A weight of fp32 is taken, too, with x of bf16 or fp32. To the fp32 sums `bias` [N], fp32 or
        bf16, is added, or they are multiplied by `scale`; not both in one call.

        Enqueues one kernel on torch's current stream of the tensors' device and returns `out`, or
        a new tensor. Sums are fp32 and the same bits in every run of one kernel; `out_dtype` is
        float32, bfloat16 or float16. `pdl` overrides the runtime's setting for this call. M = 0 and
        N = 0 give an empty result and K = 0 zeros, without a kernel.

        A malformed call raises TypeError or ValueError that names tensor and value: type, layout,
        number of dimensions, dtype, device (CUDA, the same for all), equal K, K % 8 (K % 4 where x
        and weight are fp32), contiguous rows, row stride (at least K, a multiple of 16 bytes, below
        2^31), 16-byte address, autograd (the kernels have no backward); `out` besides: `out_dtype`,
        shape [M, N], contiguous, outside the memory span of x and weight; `bias` besides: shape
        [N], contiguous.

        Where the tuning table prefers the library, torch computes; so it is with bf16 weights and M
        above 64, unless a kernel was measured to be faster there. A well-formed call that no kernel
        computes is a miss: M above 65,536, or above 32 where x is fp32, N above 65,536, K above
        1,048,576, a GPU older than compute capability 9.0, an artifact that is absent from the
        store and its layers or does not pass its checks, or is not loaded after `freeze`. See
        `on_miss` of the class.

        During stream capture the kernel must have been loaded, by `preload` or by a call before,
        else ColdCaptureError: loading code there would break the capture. A launch that the driver
        refuses raises DriverError; a call in a process forked after its parent used a kernel,
        ForkedProcessError.
        """
        if bias is not None or scale is not None:
            return self._checked(x, weight, out, out_dtype, pdl, bias, scale)
        # Calls like an earlier one take this short way; whatever is in doubt takes the other.
        known = self._weights.get(id(weight))
        if known is not None:
            route = known.last
            if (
                out is not None
                or route is None
                or route.out_dtype is not out_dtype
                or not route.admits(x, weight)
            ):
                try:
                    route = known.routes.get((x.shape, out_dtype))
                except (AttributeError, TypeError):
                    route = None
                while route is not None:
                    if out is None:
                        if route.admits(x, weight):
                            known.last = route
                            break
                    elif route.admits_out is not None and route.admits_out(x, weight, out):
                        break
                    route = route.next
            if route is not None:
                mode = self._pdl if pdl is None else pdl
                launcher = None
                if mode == "auto":
                    launcher = route.auto
                elif mode is True:
                    launcher = route.always
                elif mode is False:
                    launcher = route.never
                address = weight.data_ptr()
                x_address = x.data_ptr()
                if (
                    launcher is not None
                    and not (x_address | address) & _MISALIGNED
                    and self._current() == route.device
                    and route.device in self._bound.devices
                    and not (route.grads and torch.is_grad_enabled())
                    and (
                        mode != "auto"
                        or (
                            known.address == address
                            and known.version == (weight._version if known.versioned else 0)
                        )
                    )
                ):
                    if out is None:
                        out = self._empty(route.shape, route.out_strides, out_dtype)
                        out_address = out.data_ptr()
                    else:
                        out_address = out.data_ptr()
                        if (
                            out_address < x_address + route.x_bytes
                            and x_address < out_address + route.out_bytes
                        ) or (
                            out_address < address + route.weight_bytes
                            and address < out_address + route.out_bytes
                        ):
                            return self._checked(x, weight, out, out_dtype, pdl)
                    launcher.launch(
                        self._stream(route.device), x_address, address, out_address, route.strides
                    )
                    return out
        return self._checked(x, weight, out, out_dtype, pdl)

    def preload(self, what: Wanted, *, devices: Iterable[int] | None = None) -> PreloadReport:
        """Make all kernels of a manifest, or of some compile keys, ready before the first call.

        `what` is a Manifest, its path or packaged name, or CompileKeys. Afterwards a call of any
        problem of the manifest finds its kernel without the disk, also during stream capture and
        after `freeze`. Problems are dispatched by this runtime's tuning table, as its calls are;
        keys of targets that do not run on a device are left out there.

        `devices` are ordinals, as torch numbers them. Without any, all GPUs that this process sees:
        ready on the current one and on those where it has a context already; on the others code is
        loaded and the first call, which makes the context anyhow, makes it ready.

        What is missing is in the report, and counted and logged as a call would. Under
        `on_miss="compile"` it is compiled first, all at once; under "error" MissError is raised
        after all else is ready. Raises ManifestError, DriverError where there is no driver,
        ColdCaptureError during stream capture, and what else a call raises.
        """
        self._check_process()
        items = wanted_items(what)
        driver = self._loader.driver
        ready, deferred = self._ready_devices(driver, devices)
        if self._devices.capturing():
            raise ColdCaptureError(
                "preload during stream capture", hint="preload before the capture"
            )
        before = self._loader.loads
        found: list[Missing | None] = []
        with self._lock:
            for index in ready:
                with self._devices.guard(index):
                    found += self._preload_on(items, index, ready=True)
            for index in deferred:
                found += self._preload_on(items, index, ready=False)
        report = PreloadReport.of(
            found, devices=ready, deferred=deferred, loads=self._loader.loads - before
        )
        if report.missing and self._on_miss == "error":
            first = report.missing[0]
            raise MissError(
                f"{len(report.missing)} of what was to be preloaded is missing, first: "
                f"{first.message}",
                hint=first.hint,
            )
        return report

    def freeze(self) -> None:
        """Load and compile nothing from now on, and read nothing from disk.

        What is loaded goes on being served, on other devices too; everything else is a miss of the
        reason `not-loaded`, left to torch or, under `on_miss="error"`, a MissError. There is no way
        back: make a new Runtime.
        """
        with self._lock:
            self._frozen = True

    def weights_updated(self, weight: torch.Tensor | None = None) -> None:
        """Say that a weight, or without one all weights, are being changed.

        Under `pdl="auto"` the next call of each then waits for all that is ahead of it in the
        stream. To be called after the change was enqueued and before that call. A tensor stands for
        all that shares its storage. Changes that torch itself makes in place to the very tensor
        need no call, see docs/runtime.md.
        """
        if weight is not None and not isinstance(weight, torch.Tensor):
            raise TypeError(f"weight is {type(weight).__name__}, must be a torch.Tensor or None")
        self._memory.changed(weight)

    @property
    def device_type(self) -> str:
        """The type of device that tensors of a call must be on, as torch names it."""
        return self._devices.device_type

    @property
    def on_miss(self) -> OnMiss:
        """What a call does that no stored kernel serves."""
        return self._on_miss

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return self._devices.capturing()

    def capability(self, device: int) -> tuple[int, int]:
        """A device's compute capability, as (9, 0); raises DriverError."""
        return self._loader.driver.compute_capability(device)

    def lookup(self, problem: Problem, device: int) -> CompileKey | Missing:
        """The key of the kernel that serves such calls on a device, made ready; or why none is.

        Whether launches are dependent is the runtime's setting, not the problem's. Counts and logs
        nothing and compiles nothing; after `freeze` and during stream capture it loads nothing.
        """
        self._check_process()
        problem = msgspec.structs.replace(problem, pdl=self._pdl is not False)
        if self._devices.capturing():
            reach = Reach.READY
        else:
            reach = Reach.MEMORY if self._frozen else Reach.DISK
        with self._lock, self._devices.guard(device):
            found = self._loader.served_by(problem, device, reach=reach)
            if isinstance(found, Missing) and self._pdl == "auto":
                plain = msgspec.structs.replace(problem, pdl=False)
                other = self._loader.served_by(plain, device, reach=reach)
                return other if isinstance(other, CompileKey) else found
            return found

    def stats(self) -> Stats:
        """What was done so far, in all threads."""
        with self._counts:
            return Stats(
                hits=self._forgotten_hits + _hits(self._entries.values()),
                loads=self._loader.loads,
                misses=dict(self._misses),
                fallbacks=self._fallbacks,
                library=self._library,
                rejects=self._rejects,
                compiled=self._compiled,
            )

    def after_fork(self) -> None:
        """In a forked child: forget what belongs to the parent's driver. Called by `forks`."""
        self._forked = self._loader.used
        self._memory = Memory()
        self._weights = self._memory.weights
        self._entries = {}
        self._large = []
        self._forgotten_hits = 0
        self._make_locks()

    def _make_locks(self) -> None:
        # A log handler may ask for stats() while a miss is logged under the lock.
        self._lock = threading.RLock()
        """Held while a kernel is looked for and loaded: one load for all threads."""
        self._counts = threading.RLock()
        self._bound = _Bound()

    def _check_process(self) -> None:
        if self._forked:
            raise ForkedProcessError(
                "this process was forked after its parent loaded kernels, and CUDA does not "
                "survive a fork",
                hint='start workers with multiprocessing.get_context("spawn"), or fork before the '
                "first call",
            )

    def _checked(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None,
        out_dtype: torch.dtype,
        pdl: Pdl | None,
        bias: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """A call with everything checked."""
        try:
            return self._run(x, weight, out, out_dtype, pdl, bias, scale)
        except (TypeError, ValueError, ColdCaptureError, MissError):
            with self._counts:
                self._rejects += 1
            raise

    def _run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None,
        out_dtype: torch.dtype,
        pdl: Pdl | None,
        bias: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        if out_dtype not in DTYPES:
            raise TypeError(
                f"out_dtype is {out_dtype!r}, must be one of {', '.join(map(str, DTYPES))}"
            )
        mode = self._pdl if pdl is None else _check_pdl(pdl)
        self._check_process()
        operands = check_operands(x, weight, self._devices.device_type)
        if out is not None:
            check_out(out, out_dtype, operands, x.device)
        finish = _Finish.of(bias, scale, operands, x.device)
        if not (operands.tokens and operands.experts and operands.hidden):
            return _empty_sum(x, weight, out, out_dtype, bias)
        if self._current() == operands.device_index:
            return self._run_here(mode, operands, x, weight, out, out_dtype, finish)
        with self._devices.guard(operands.device_index):
            return self._run_here(mode, operands, x, weight, out, out_dtype, finish)

    def _run_here(
        self,
        mode: Pdl,
        operands: Operands,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None,
        out_dtype: torch.dtype,
        finish: _Finish,
    ) -> torch.Tensor:
        """The call, with the tensors' device current."""
        types = DTYPES[x.dtype], DTYPES[weight.dtype]
        problem = Problem(
            min(operands.tokens, OPERAND_TOKENS[types] + 1),
            operands.experts,
            operands.hidden,
            DTYPES[out_dtype],
            mode is not False,
            *types,
            epilogue=finish.epilogue,
        )
        index = operands.device_index
        slot = (problem, mode == "auto", index)
        entry = self._entries.get(slot)
        if entry is None:
            entry = self._first_call(slot)
        if isinstance(entry, Missing):
            return self._fall_back(entry, x, weight, out, out_dtype, finish)
        if index not in self._bound.devices:
            self._loader.driver.bind_context(index)
            self._bound.devices.add(index)
        memory = self._memory
        known = memory.weight(weight, index)
        route = memory.route(known, x, weight, operands, out_dtype)
        if finish.epilogue is Epilogue.NONE:
            if mode == "auto":
                route.auto = entry
            elif mode:
                route.always = entry
            else:
                route.never = entry
        if out is None:
            out = self._empty(route.shape, route.out_strides, out_dtype)
        elif not out.requires_grad and not (route.admits_out and route.admits_out(x, weight, out)):
            route.admits_out = guard_of(x, weight, out)
        launcher = entry
        # A bias is read as early as the weight.
        read = [(known, known.sight_of(weight, operands.weight_address))]
        if finish.bias is not None:
            other = memory.weight(finish.bias, index)
            read.append((other, other.sight_of(finish.bias, finish.bias.data_ptr())))
        unseen = [(one, sight) for one, sight in read if not one.saw(sight)]
        capturing = bool(unseen) and self._devices.capturing()
        captured = capturing and all(one.captured(sight) for one, sight in unseen)
        if mode == "auto" and unseen and not captured:
            launcher = entry.ordinary
        launcher.launch(
            self._stream(index),
            operands.x_address,
            operands.weight_address,
            out.data_ptr(),
            route.strides,
            finish.extras,
        )
        if not launcher.programmatic:
            for one, sight in unseen:
                memory.note(one, sight, capturing=capturing)
        return out

    def _first_call(self, slot: _Slot) -> Launcher | Missing:
        """Find and load what serves a slot, once for all threads."""
        problem = slot[0]
        if self._devices.capturing():
            with self._lock:
                entry = self._find(slot, Reach.READY)
            if isinstance(entry, Missing) and entry.reason == NOT_LOADED:
                raise ColdCaptureError(
                    f"first call for {problem} during stream capture: its kernel is not loaded",
                    hint="preload it, or make the same call once before the capture",
                )
            if isinstance(entry, Launcher):
                with self._lock:
                    self._remember(slot, entry)
            return entry
        with self._lock:
            known = self._entries.get(slot)
            if known is not None:
                return known
            reach = Reach.MEMORY if self._frozen else Reach.DISK
            entry = self._find(slot, reach)
            if isinstance(entry, Missing):
                entry = self._mend((entry,)).get(entry.subject) or self._find(slot, reach)
            self._remember(slot, entry)
        return entry

    def _remember(self, slot: _Slot, entry: Launcher | Missing) -> None:
        """Keep what serves a slot; of large calls only so many, and then they begin anew.

        What is forgotten is loaded all the same: the next such call finds it in memory.
        """
        if slot[0].tokens > FEW_TOKENS:
            if len(self._large) >= MAX_LARGE:
                with self._counts:
                    before = _hits(self._entries.values())
                    for old in self._large:
                        self._entries.pop(old, None)
                    self._forgotten_hits += before - _hits(self._entries.values())
                self._large.clear()
                self._memory.forget_routes(FEW_TOKENS)
            self._large.append(slot)
        self._entries[slot] = entry

    def _find(self, slot: _Slot, reach: Reach, *, ready: bool = True) -> Launcher | Missing:
        """What serves a slot.

        Where dependent launch is left to the runtime, a kernel without it serves if there is no
        other.
        """
        problem, auto, index = slot
        if not auto:
            return self._loader.find(problem, index, reach=reach, ready=ready)
        explicit = self._entries.get((problem, False, index))
        if isinstance(explicit, Launcher):
            return explicit
        found = self._loader.find(problem, index, reach=reach, ready=ready)
        if isinstance(found, Missing) and found.key is not None:
            plain = msgspec.structs.replace(problem, pdl=False)
            other = self._loader.find(plain, index, reach=reach, ready=ready)
            if isinstance(other, Launcher):
                return other
        return found

    def _mend(self, missing: Iterable[Missing]) -> dict[str, Missing]:
        """Report misses, compile what is wanted and can be, and tell what remains, by subject."""
        lacking: dict[CompileKey, Missing] = {}
        rest: dict[str, Missing] = {}
        for one in missing:
            compiles = self._on_miss == "compile" and not self._frozen
            if compiles and one.key is not None and one.reason in _MENDED_BY_BUILD:
                lacking[one.key] = one
                self._report(one, "It is compiled now.")
            else:
                rest[one.subject] = one
                self._report(one)
        if lacking:
            rest |= self._compile(lacking)
        return rest

    def _compile(self, lacking: dict[CompileKey, Missing]) -> dict[str, Missing]:
        """Compile and load these; what fails is told by the miss's subject.

        Raises CompilerMissingError.
        """
        from .mend import compile_keys

        store = self._store
        if not isinstance(store, Store):
            raise UsageError(f"nothing can be published in {store!r}")
        failed: dict[str, Missing] = {}
        for key, result in compile_keys(lacking, store).items():
            old = lacking[key]
            fault: Missing | None
            if isinstance(result, Artifact):
                fault = self._loader.adopt(result)
                with self._counts:
                    self._compiled += fault is None
            else:
                message = f"no kernel for {key}: compile: {result.message}"
                fault = Missing(old.subject, "compile", message, result.hint)
            if fault is not None:
                failed[old.subject] = fault
                self._report(fault, again=True)
        return failed

    def _ready_devices(
        self, driver: Driver, devices: Iterable[int] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The devices to make kernels ready on, and those to load them for only."""
        count = driver.device_count()
        if devices is None:
            current = self._current()
            ready = tuple(i for i in range(count) if i == current or driver.has_context(i))
            return ready, tuple(i for i in range(count) if i not in ready)
        ready = tuple(dict.fromkeys(devices))
        for index in ready:
            if not 0 <= index < count:
                raise ValueError(f"device is {index}, this process sees 0 to {count - 1}")
        return ready, ()

    def _preload_on(
        self, items: tuple[WantedItem, ...], index: int, *, ready: bool
    ) -> list[Missing | None]:
        """Bind all that runs on a device; with `ready` it must be the current one."""
        if not self._frozen:
            self._loader.read_tables(index)
        targets = {str(target) for target in self._loader.targets(index)}
        wanted = [one for one in items if isinstance(one, Problem) or one.target in targets]
        found = [self._bind(item, index, ready=ready) for item in wanted]
        misses = {one.subject: one for one in found if one is not None}
        if misses:
            rest = self._mend(misses.values())
            for place, one in enumerate(found):
                if one is not None:
                    mended = one.subject not in rest
                    found[place] = (
                        self._bind(wanted[place], index, ready=ready)
                        if mended
                        else rest[one.subject]
                    )
        return found

    def _bind(self, item: WantedItem, index: int, *, ready: bool) -> Missing | None:
        """Let the calls that an item stands for find their kernel; or why they will not."""
        reach = Reach.MEMORY if self._frozen else Reach.DISK
        if isinstance(item, CompileKey):
            return self._loader.load(item, index, reach=reach, ready=ready)
        slot = (item, False, index)
        plain = self._entries.get(slot)
        if not isinstance(plain, Launcher):
            plain = self._find(slot, reach, ready=ready)
        if ready:
            self._entries[slot] = plain
            slot = (msgspec.structs.replace(item, pdl=True), True, index)
            if not isinstance(self._entries.get(slot), Launcher):
                left = plain if item.pdl else self._find(slot, reach, ready=ready)
                if item.pdl or isinstance(left, Launcher):
                    self._entries[slot] = left
        return plain if isinstance(plain, Missing) else None

    def _report(self, missing: Missing, then: str = "", *, again: bool = False) -> None:
        """Count and log a miss, once for each thing that is missing."""
        if missing.reason == LIBRARY or (missing.subject in self._reported and not again):
            return
        self._reported.add(missing.subject)
        with self._counts:
            self._misses[missing.reason] = self._misses.get(missing.reason, 0) + 1
        if not then:
            raises = self._on_miss == "error"
            then = f"{'Calls raise MissError' if raises else 'torch computes it'} from now on."
        mend = f" To mend it: {missing.hint}" if missing.hint else ""
        logger.warning("%s. %s%s", missing.message, then, mend)

    def _fall_back(
        self,
        missing: Missing,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None,
        out_dtype: torch.dtype,
        finish: _Finish,
    ) -> torch.Tensor:
        chosen = missing.reason == LIBRARY
        if self._on_miss == "error" and not chosen:
            raise MissError(missing.message, hint=missing.hint)
        with self._counts:
            if chosen:
                self._library += 1
            else:
                self._fallbacks += 1
        product = self._torch(x, weight, out_dtype, bias=finish.bias, scale=finish.scale)
        return product if out is None else out.copy_(product)


def _hits(entries: Iterable[Launcher | Missing]) -> int:
    """Launches of all launchers among these, each counted once."""
    launchers = {id(one): one for one in tuple(entries) if isinstance(one, Launcher)}
    return sum(launcher.all_calls for launcher in launchers.values())


class _Finish(NamedTuple):
    """What becomes of a call's sums before they are rounded."""

    epilogue: Epilogue = Epilogue.NONE
    bias: torch.Tensor | None = None
    scale: float | None = None
    extras: Extras | None = None

    @classmethod
    def of(
        cls,
        bias: torch.Tensor | None,
        scale: float | None,
        operands: Operands,
        device: torch.device,
    ) -> _Finish:
        """Check bias and scale of a call; raises TypeError and ValueError."""
        if bias is not None:
            if scale is not None:
                raise ValueError("bias and scale are both given, a call takes one of them")
            epilogue, address = check_bias(bias, operands, device)
            return cls(epilogue, bias=bias, extras={ParamSource.BIAS: address})
        if scale is not None:
            scale = check_scale(scale)
            return cls(Epilogue.SCALE, scale=scale, extras={ParamSource.SCALE: scale})
        return cls()


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
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Router logits `x @ weight.T`: x [M, K], weight [N, K] bf16 -> [M, N] of `out_dtype`.

    `Runtime().run(...)` on one runtime for the whole process, made by the first call from the
    environment's store, layers and tuning table; what is checked, raised and fallen back from is
    said there. Where a kernel of your own, or a copy through another tensor, writes `weight`, say
    so with `weights_updated(weight)` before the next call.
    """
    runtime = _Process.runtime
    if runtime is None:
        runtime = process_runtime()
    if out is None and bias is None and scale is None and out_dtype is _FP32:
        # Keywords cost a twentieth of the call.
        return runtime.run(x, weight)
    return runtime.run(x, weight, out=out, out_dtype=out_dtype, bias=bias, scale=scale)


def preload(what: Wanted, *, devices: Iterable[int] | None = None) -> PreloadReport:
    """`Runtime.preload` of the process's runtime."""
    return process_runtime().preload(what, devices=devices)


def freeze() -> None:
    """`Runtime.freeze` of the process's runtime."""
    process_runtime().freeze()


def weights_updated(weight: torch.Tensor | None = None) -> None:
    """`Runtime.weights_updated` of the process's runtime."""
    process_runtime().weights_updated(weight)


def stats() -> Stats:
    """`Runtime.stats` of the process's runtime."""
    return process_runtime().stats()


def process_runtime() -> Runtime:
    """The runtime of the process's `load_and_run`, made by the first call; raises as Runtime."""
    with _Process.lock:
        if _Process.runtime is None:
            _Process.runtime = Runtime()
        return _Process.runtime


def _empty_sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The result where an extent is zero: nothing, or sums of nothing with their bias."""
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    return out.zero_() if bias is None else out.copy_(bias.expand(out.shape))


def _check_pdl(pdl: Pdl) -> Pdl:
    if not isinstance(pdl, bool) and pdl != "auto":
        raise TypeError(f'pdl is {pdl!r}, must be True, False or "auto"')
    return pdl
