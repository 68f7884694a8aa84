"""Every error that this package raises on purpose, each with a code, an exit code and a hint."""

from __future__ import annotations

__all__ = [
    "AotError",
    "ColdCaptureError",
    "CompileError",
    "CompilerMissingError",
    "ConfigError",
    "CoverageError",
    "DamagedEntryError",
    "DriverError",
    "ForkedProcessError",
    "InvalidArtifactError",
    "LibraryChosenError",
    "LockTimeoutError",
    "ManifestError",
    "MissError",
    "NotFoundError",
    "StoreError",
    "StoreFullError",
    "StoreUnwritableError",
    "TargetError",
    "TuningTableError",
    "UnsupportedProblemError",
    "UntrustedStoreError",
    "UsageError",
]


class AotError(Exception):
    """Base of every deliberate error.

    `code` is stable and documented, `exit_code` is what the command line returns, `hint` is the
    next thing to do (empty where nothing better than the message can be said).
    """

    code = "error"
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(AotError):
    """The command line or a function was called with values that make no sense."""

    code = "usage"
    exit_code = 2


class ManifestError(UsageError):
    """A manifest cannot be read or breaks the schema; the message starts with file and line."""

    code = "manifest"


class TargetError(UsageError):
    """A target is not written as `sm_90a`, or no backend can be built for it."""

    code = "target"


class TuningTableError(UsageError):
    """A tuning table cannot be read, breaks its schema or leaves a problem without a rule."""

    code = "tuning-table"


class ConfigError(AotError):
    """A backend configuration breaks a constraint of its kernel."""

    code = "config"


class UnsupportedProblemError(AotError):
    """No kernel of this package can compute the problem; the message names the property."""

    code = "unsupported-problem"


class LibraryChosenError(UnsupportedProblemError):
    """The tuning table leaves the problem to the library's product, which is faster there."""

    code = "library-chosen"


class CompilerMissingError(AotError):
    """A kernel must be compiled and nvidia-cutlass-dsl is not installed."""

    code = "compiler-missing"


class CompileError(AotError):
    """The compiler failed, crashed or ran out of time; the message ends with its log's tail."""

    code = "compile"


class InvalidArtifactError(AotError):
    """Bytes that should be an artifact are not: no CUDA ELF, other target, symbol or parameters."""

    code = "invalid-artifact"
    exit_code = 4


class CoverageError(AotError):
    """A manifest can ask for a problem that the build does not serve."""

    code = "coverage"


class NotFoundError(AotError):
    """What was named is not in the store."""

    code = "not-found"
    exit_code = 3


class MissError(AotError):
    """The runtime found no usable artifact and was told not to fall back."""

    code = "miss"
    exit_code = 3


class StoreError(AotError):
    """The store cannot be used."""

    code = "store"
    exit_code = 5


class StoreFullError(StoreError):
    """The file system or the quota is full; nothing was published."""

    code = "store-full"


class StoreUnwritableError(StoreError):
    """The store cannot be written (read-only file system, permissions); nothing was published."""

    code = "store-unwritable"


class UntrustedStoreError(StoreError):
    """Owner or mode of a store path lets somebody else change what would be loaded."""

    code = "untrusted-store"
    exit_code = 4


class DamagedEntryError(StoreError):
    """Stored bytes do not match their digest, size or schema."""

    code = "damaged-entry"
    exit_code = 4


class LockTimeoutError(StoreError):
    """Another process held a lock for longer than the caller wanted to wait."""

    code = "lock-timeout"
    exit_code = 6


class DriverError(AotError):
    """A CUDA driver call failed; the message names the call and the driver's own error name."""

    code = "driver"


class ColdCaptureError(AotError):
    """A kernel that is not loaded yet was asked for during stream capture."""

    code = "cold-capture"


class ForkedProcessError(DriverError):
    """A process that was forked after its parent used the GPU asked for a kernel."""

    code = "forked-process"
