"""The loader: from a problem on a device to a launcher, or to the reason why there is none.

Imports neither torch nor the compiler. Writes nothing and takes no lock of the store.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from .artifact import Artifact
from .compat import targets_for
from .dispatch import Table, dispatch, load_table
from .driver import CudaDriver, Driver, Kernel
from .errors import (
    DriverError,
    InvalidArtifactError,
    LibraryChosenError,
    TargetError,
    TuningTableError,
    UnsupportedProblemError,
)
from .files import command
from .key import CompileKey
from .launch import LaunchRecord
from .launcher import Launcher, check_record
from .layers import ArtifactSource
from .problem import FEW_TOKENS, DType, Problem, Target
from .store import Miss, MissReason

__all__ = ["LIBRARY", "NOT_LOADED", "ArtifactSource", "Loader", "Missing", "Reach"]

LIBRARY = "library"
"""The reason of a `Missing` that is none: the tuning table prefers the library's product."""

NOT_LOADED = "not-loaded"
"""The reason of a `Missing` that was not looked for in the store, because nothing may be loaded."""


class Missing(NamedTuple):
    """Why no kernel serves a problem.

    `reason` is one of the store's (`absent`, `damaged`, `wrong-cubin`, `unreadable`) or
    `library` (the library is faster by the tuning table, or as good, which is no fault),
    `unsupported` (no kernel computes the problem), `target` (none for this GPU), `rejected` (the
    artifact contradicts itself or the driver), `driver` (a driver call failed while loading),
    `driver-too-old` (the code needs a driver of a later CUDA), `not-loaded` (nothing may be loaded
    any more). `subject` is what is missing: a key's digest, or the problem where it has no key.
    `key` is what would serve the problem if it were built, where there is such a key.
    """

    subject: str
    reason: str
    message: str
    hint: str
    key: CompileKey | None = None


class Reach(enum.Enum):
    """How far a search for a kernel may go."""

    DISK = "disk"
    """Everything: the store is read, code is loaded."""

    MEMORY = "memory"
    """Nothing is read from disk; loaded code may be made ready on another device."""

    READY = "ready"
    """Only what can be launched at once: no call that a stream capture forbids."""


class _Loaded(NamedTuple):
    """A kernel that the driver has loaded, its record, and the devices that it is ready on."""

    kernel: Kernel
    launch: LaunchRecord
    devices: set[int]


class Loader:
    """Loads each artifact once, however many problems and devices it serves.

    For one thread at a time: the caller holds a lock. `tuning` names the tuning table; `driver` is
    by default the machine's, opened when it is first needed.
    """

    def __init__(self, store: ArtifactSource, tuning: str, driver: Driver | None = None) -> None:
        self._store = store
        self._tuning = tuning
        self._driver = driver
        self._loaded: dict[CompileKey, _Loaded] = {}
        self._targets: dict[int, tuple[Target, ...]] = {}
        self._tables: dict[Target, Table] = {}
        self.loads = 0
        """Libraries that the driver has loaded and kept."""

    def find(
        self, problem: Problem, device: int, *, reach: Reach = Reach.DISK, ready: bool = True
    ) -> Launcher | Missing:
        """The launcher of a problem on a device.

        Looks through the device's targets, the one made for it most closely first; of several
        misses the first that is more than an absence is told. A problem without dependent launch
        that has no kernel of its own is served by the one with it, launched without.

        What is out of `reach` is Missing, `not-loaded`. A large batch with bf16 weights is then the
        library's, as where its kernel is absent: kernels for such batches are an offer to the
        manifests that list them. With `ready` the device must be the current one; without, the
        kernel is loaded and not made ready there, for a device on which nothing runs yet.

        Raises UntrustedStoreError and TuningTableError: trouble with trust or with the set-up is no
        miss.
        """
        told: Missing | None = None
        try:
            for key, served in self._keys(problem, device, reach=reach):
                found = self._launcher(key, served, device, reach=reach, ready=ready)
                if isinstance(found, Launcher):
                    return found if problem.pdl else found.ordinary
                if told is None or (told.reason == MissReason.ABSENT.value != found.reason):
                    told = found
        except _NoTableError:
            pass
        except LibraryChosenError as error:
            told = told or _missing(str(problem), LIBRARY, str(problem), error.message, error.hint)
        except UnsupportedProblemError as error:
            told = told or _missing(
                str(problem), "unsupported", str(problem), error.message, error.hint
            )
        except TargetError as error:
            told = told or _missing(str(problem), "target", str(problem), error.message, error.hint)
        except DriverError as error:
            told = told or _missing(
                str(problem), error.code, str(problem), error.message, error.hint
            )
        told = told or _not_loaded(str(problem), str(problem))
        large = problem.tokens > FEW_TOKENS and problem.weight_dtype is DType.BF16
        if large and told.reason in (MissReason.ABSENT.value, NOT_LOADED):
            return told._replace(reason=LIBRARY)
        return told

    def served_by(self, problem: Problem, device: int, *, reach: Reach) -> CompileKey | Missing:
        """The key of the launcher that `find` gives, made ready as there; or why it gives none."""
        found = self.find(problem, device, reach=reach)
        if isinstance(found, Missing):
            return found
        for key, _ in self._keys(problem, device, reach=reach):
            loaded = self._loaded.get(key)
            if loaded is not None and device in loaded.devices:
                return key
        raise AssertionError(f"a launcher of {problem} without its key")

    def load_key(
        self, key: CompileKey, problem: Problem, device: int, *, ready: bool = True
    ) -> Launcher | Missing:
        """The launcher of this very key for a problem, whatever the tuning table would choose.

        For measurements; the key must be of the problem's static sizes. `device` must be the
        current one, see `find` for `ready`. Raises UntrustedStoreError.
        """
        return self._launcher(key, problem, device, reach=Reach.DISK, ready=ready)

    def load(
        self, key: CompileKey, device: int, *, reach: Reach = Reach.DISK, ready: bool = True
    ) -> Missing | None:
        """Load a key's kernel for whatever problems it serves, or tell why that is not possible.

        See `find` for `reach` and `ready`. Raises UntrustedStoreError.
        """
        found = self._ready(key, f"{key}{_name(key, reach)}", device, reach=reach, ready=ready)
        return found if isinstance(found, Missing) else None

    def adopt(self, artifact: Artifact) -> Missing | None:
        """Load an artifact that the caller holds, to be made ready later; or why that fails."""
        key = artifact.record.key
        found = self._accept(key, artifact, f"{key}{_name(key, Reach.DISK)}", None)
        return found if isinstance(found, Missing) else None

    @property
    def used(self) -> bool:
        """Whether the driver was asked for anything."""
        return bool(self._targets or self._loaded)

    @property
    def driver(self) -> Driver:
        """The driver, opened when it is first needed; raises DriverError."""
        if self._driver is None:
            self._driver = CudaDriver()
        return self._driver

    def target(self, device: int) -> Target:
        """The architecture-specific target of a device, each its own; raises DriverError."""
        return self.targets(device)[0]

    def targets(self, device: int) -> tuple[Target, ...]:
        """All targets whose code runs on a device, its own first; raises DriverError."""
        targets = self._targets.get(device)
        if targets is None:
            targets = targets_for(self.driver.compute_capability(device))
            self._targets[device] = targets
        return targets

    def read_tables(self, device: int) -> None:
        """Read the tuning tables of a device's targets, so that later searches need no file.

        Raises DriverError, and TuningTableError for the device's own target.
        """
        for number, target in enumerate(self.targets(device)):
            try:
                self._table(target, Reach.DISK)
            except TuningTableError:
                if number == 0:
                    raise

    def _keys(
        self, problem: Problem, device: int, *, reach: Reach
    ) -> Iterator[tuple[CompileKey, Problem]]:
        """The keys that serve a problem on a device, the best first, each with what it serves.

        Raises what `dispatch` raises for the device's own target.
        """
        alike = (problem,) if problem.pdl else (problem, msgspec.structs.replace(problem, pdl=True))
        for number, target in enumerate(self.targets(device)):
            for variant in alike:
                try:
                    yield dispatch(variant, target, self._table(target, reach)), variant
                except (UnsupportedProblemError, TargetError, TuningTableError):
                    if number == 0:
                        raise

    def _table(self, target: Target, reach: Reach) -> Table:
        table = self._tables.get(target)
        if table is None:
            if reach is not Reach.DISK:
                raise _NoTableError
            table = self._tables[target] = load_table(self._tuning, target)
        return table

    def _launcher(
        self, key: CompileKey, problem: Problem, device: int, *, reach: Reach, ready: bool
    ) -> Launcher | Missing:
        what = f"{problem} ({key}{_name(key, reach)})"
        loaded = self._ready(key, what, device, reach=reach, ready=ready, problem=problem)
        if isinstance(loaded, Missing):
            return loaded
        try:
            return Launcher(self.driver, loaded.kernel, loaded.launch, problem)
        except InvalidArtifactError as error:
            return self._refused(key, what, problem, error)

    def _ready(
        self,
        key: CompileKey,
        what: str,
        device: int,
        *,
        reach: Reach,
        ready: bool,
        problem: Problem | None = None,
    ) -> _Loaded | Missing:
        """A kernel that is loaded and, if asked for, ready on the device."""
        loaded = self._loaded.get(key)
        if loaded is None:
            if reach is not Reach.DISK:
                return _not_loaded(str(key), what, key)
            found = self._store.get(key.digest())
            if isinstance(found, Miss):
                return _missing(
                    key.digest(),
                    found.reason.value,
                    what,
                    found.detail,
                    self._build(key, problem),
                    key,
                )
            return self._accept(key, found, what, device if ready else None, problem=problem)
        if not ready or device in loaded.devices:
            return loaded
        if reach is Reach.READY:
            return _not_loaded(str(key), what, key)
        try:
            self._make_ready(loaded, device)
        except DriverError as error:
            return _missing(key.digest(), error.code, what, error.message, error.hint)
        return loaded

    def _accept(
        self,
        key: CompileKey,
        artifact: Artifact,
        what: str,
        device: int | None,
        *,
        problem: Problem | None = None,
    ) -> _Loaded | Missing:
        """Load an artifact and keep it, ready on a device if one is given; or why that fails."""
        try:
            loaded = self._load(key, artifact, device)
        except InvalidArtifactError as error:
            return self._refused(key, what, problem, error)
        except DriverError as error:
            return _missing(key.digest(), error.code, what, error.message, error.hint)
        self._loaded[key] = loaded
        return loaded

    def _load(self, key: CompileKey, artifact: Artifact, device: int | None) -> _Loaded:
        """Load an artifact; raises InvalidArtifactError where it is not what was asked for."""
        launch = artifact.record.launch
        if artifact.record.key != key:
            raise InvalidArtifactError(f"the artifact is of another key: {artifact.record.key}")
        check_record(launch)
        library = self.driver.load_library(artifact.cubin)
        try:
            kernel = self.driver.get_kernel(library, launch.symbol)
            wanted = tuple((param.offset_bytes, param.size_bytes) for param in launch.params)
            params = self.driver.param_info(kernel)
            if params != wanted:
                raise InvalidArtifactError(
                    f"{launch.symbol} takes parameters (offset, size) {params} by the driver, "
                    f"{wanted} by its launch record"
                )
            loaded = _Loaded(kernel, launch, set())
            if device is not None:
                self._make_ready(loaded, device)
        except (DriverError, InvalidArtifactError):
            with contextlib.suppress(DriverError):  # the first error is the one that tells
                self.driver.unload_library(library)
            raise
        self.loads += 1
        return loaded

    def _make_ready(self, loaded: _Loaded, device: int) -> None:
        self.driver.bind_context(device)
        self.driver.make_ready(
            loaded.kernel, device, dynamic_shared_bytes=loaded.launch.dynamic_shared_bytes
        )
        loaded.devices.add(device)

    def _refused(
        self, key: CompileKey, what: str, problem: Problem | None, error: InvalidArtifactError
    ) -> Missing:
        hint = f"{self._build(key, problem)} --force"
        return _missing(key.digest(), "rejected", what, error.message, hint, key)

    def _build(self, key: CompileKey, problem: Problem | None) -> str:
        """The command that builds what is missing."""
        rest = f"--target {key.target} {command('--store', str(self._store.root))}"
        if problem is None:
            return f"build the manifest that lists it: llbf16-aot build MANIFEST {rest}"
        return (
            f"list hidden {problem.hidden}, experts {problem.experts}, tokens {problem.tokens} in "
            f"a manifest and run: llbf16-aot build MANIFEST {rest}"
        )


def _name(key: CompileKey, reach: Reach) -> str:
    """The beginning of the digest for messages, where computing one may read kernel sources."""
    return f", {key.digest()[:12]}" if reach is Reach.DISK else ""


class _NoTableError(Exception):
    """A tuning table would have to be read, and nothing may be read any more."""


def _missing(
    subject: str,
    reason: str,
    what: str,
    detail: str,
    hint: str,
    key: CompileKey | None = None,
) -> Missing:
    return Missing(subject, reason, f"no kernel for {what}: {reason}: {detail}", hint, key)


def _not_loaded(subject: str, what: str, key: CompileKey | None = None) -> Missing:
    return _missing(
        subject,
        NOT_LOADED,
        what,
        "it was not preloaded",
        "name it in preload() before freeze()",
        key,
    )
