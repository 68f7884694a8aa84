"""The loader: from a problem on a device to a launcher, or to the reason why there is none.

Imports neither torch nor the compiler. Writes nothing and takes no lock of the store.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple, Protocol

from .artifact import Artifact
from .dispatch import dispatch, load_table
from .driver import CudaDriver, Driver, Kernel
from .errors import (
    DriverError,
    InvalidArtifactError,
    LibraryChosenError,
    TargetError,
    UnsupportedProblemError,
)
from .files import command
from .key import CompileKey
from .launch import LaunchRecord
from .launcher import Launcher, check_record
from .problem import Problem, Target
from .store import Miss

__all__ = ["LIBRARY", "ArtifactSource", "Loader", "Missing"]

LIBRARY = "library"
"""The reason of a `Missing` that is none: the tuning table prefers the library's product."""


class ArtifactSource(Protocol):
    """Where artifacts come from: a `Store`, or what reads like one."""

    @property
    def root(self) -> Path:
        """Where it lies, for messages."""

    def get(self, digest: str) -> Artifact | Miss:
        """The verified artifact, or why there is none."""


class Missing(NamedTuple):
    """Why no kernel serves a problem.

    `reason` is one of the store's (`absent`, `damaged`, `wrong-cubin`, `unreadable`) or
    `library` (the tuning table says that the library is faster, which is no fault),
    `unsupported` (no kernel computes the problem), `target` (none for this GPU), `rejected` (the
    artifact contradicts itself or the driver), `driver` (a driver call failed while loading).
    `subject` is what is missing: a key's digest, or the problem where it has no key.
    """

    subject: str
    reason: str
    message: str
    hint: str


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
        self._loaded: dict[str, _Loaded] = {}
        self._targets: dict[int, Target] = {}
        self.loads = 0
        """Libraries that the driver has loaded and kept."""

    def find(self, problem: Problem, device: int) -> Launcher | Missing:
        """The launcher of a problem on a device, which must be the current one.

        Raises UntrustedStoreError and TuningTableError: trouble with trust or with the set-up is no
        miss.
        """
        try:
            target = self.target(device)
            key = dispatch(problem, target, load_table(self._tuning, target))
        except LibraryChosenError as error:
            return _missing(str(problem), LIBRARY, str(problem), error.message, error.hint)
        except UnsupportedProblemError as error:
            return _missing(str(problem), "unsupported", str(problem), error.message, error.hint)
        except TargetError as error:
            return _missing(str(problem), "target", str(problem), error.message, error.hint)
        except DriverError as error:
            return _missing(str(problem), "driver", str(problem), error.message, error.hint)
        return self.load_key(key, problem, device)

    def load_key(self, key: CompileKey, problem: Problem, device: int) -> Launcher | Missing:
        """The launcher of this very key for a problem, whatever the tuning table would choose.

        For measurements; the key must be of the problem's static sizes. `device` must be the
        current one. Raises UntrustedStoreError.
        """
        digest = key.digest()
        what = f"{problem} ({key}, {digest[:12]})"
        build = (
            f"list hidden {problem.hidden}, experts {problem.experts}, tokens {problem.tokens} in "
            f"a manifest and run: llbf16-aot build MANIFEST --target {key.target} "
            f"{command('--store', str(self._store.root))}"
        )
        try:
            loaded = self._loaded.get(digest)
            if loaded is None:
                found = self._store.get(digest)
                if isinstance(found, Miss):
                    return _missing(digest, found.reason.value, what, found.detail, build)
                loaded = self._load(key, found, device)
                self._loaded[digest] = loaded
            elif device not in loaded.devices:
                self._make_ready(loaded.kernel, loaded.launch, device)
                loaded.devices.add(device)
            return Launcher(self.driver, loaded.kernel, loaded.launch, problem)
        except InvalidArtifactError as error:
            return _missing(digest, "rejected", what, error.message, f"{build} --force")
        except DriverError as error:
            return _missing(digest, "driver", what, error.message, error.hint)

    @property
    def driver(self) -> Driver:
        """The driver, opened when it is first needed; raises DriverError."""
        if self._driver is None:
            self._driver = CudaDriver()
        return self._driver

    def target(self, device: int) -> Target:
        """The architecture-specific target of a device, each its own; raises DriverError."""
        target = self._targets.get(device)
        if target is None:
            major, minor = self.driver.compute_capability(device)
            target = Target(major, minor, "a")
            self._targets[device] = target
        return target

    def _load(self, key: CompileKey, artifact: Artifact, device: int) -> _Loaded:
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
            self._make_ready(kernel, launch, device)
        except (DriverError, InvalidArtifactError):
            with contextlib.suppress(DriverError):  # the first error is the one that tells
                self.driver.unload_library(library)
            raise
        self.loads += 1
        return _Loaded(kernel, launch, {device})

    def _make_ready(self, kernel: Kernel, launch: LaunchRecord, device: int) -> None:
        self.driver.bind_context(device)
        self.driver.make_ready(kernel, device, dynamic_shared_bytes=launch.dynamic_shared_bytes)


def _missing(subject: str, reason: str, what: str, detail: str, hint: str) -> Missing:
    return Missing(subject, reason, f"no kernel for {what}: {reason}: {detail}", hint)
