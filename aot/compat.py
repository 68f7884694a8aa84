"""Compatibility: whose machine code runs on a GPU, and which driver a cubin needs."""

from __future__ import annotations

from collections.abc import Iterable

from .elf import toolkit_release
from .errors import DriverError
from .problem import Target
from .toolchain import KNOWN_TARGETS

__all__ = ["DriverTooOldError", "check_driver", "runs_on", "targets_for"]

_ELF_MAGIC = b"\x7fELF"


class DriverTooOldError(DriverError):
    """The driver's CUDA is of an older major version than the toolkit that made the cubin."""

    code = "driver-too-old"


def runs_on(target: Target, capability: tuple[int, int]) -> bool:
    """Whether code for a target runs on a GPU of this compute capability.

    Architecture-specific code (`a`) runs on its own only, family code (`f`) and plain code also on
    later minor versions of the same major one (CUDA C++ Programming Guide, "Feature Set Compiler
    Targets" and "Binary Compatibility").
    """
    major, minor = capability
    if target.suffix == "a":
        return (target.major, target.minor) == capability
    return target.major == major and target.minor <= minor


def targets_for(
    capability: tuple[int, int], known: Iterable[str] = KNOWN_TARGETS
) -> tuple[Target, ...]:
    """The targets whose code runs on a GPU, the one that was made for it most closely first.

    Its own architecture-specific one, known or not; then, of the known, family targets and plain
    ones, each by falling minor version.
    """
    own = Target(*capability, "a")
    others = [
        target
        for target in map(Target.parse, known)
        if target.suffix != "a" and runs_on(target, capability)
    ]
    others.sort(key=lambda target: (target.suffix != "f", -target.minor))
    return (own, *others)


def check_driver(cubin: bytes, cuda_release: tuple[int, int]) -> None:
    """Raise DriverTooOldError where the driver cannot load a cubin of its toolkit.

    `cuda_release` is the CUDA version that the driver speaks. Machine code of any minor version
    loads on a driver of the same major version or a later one (CUDA Compatibility, "Minor Version
    Compatibility"). A cubin that does not state its toolkit is not refused, nor is PTX text, which
    the driver compiles itself.
    """
    toolkit = toolkit_release(cubin) if cubin.startswith(_ELF_MAGIC) else None
    if toolkit is None or toolkit[0] <= cuda_release[0]:
        return
    raise DriverTooOldError(
        f"the cubin was made by CUDA {toolkit[0]}.{toolkit[1]} and needs a driver for CUDA "
        f"{toolkit[0]}.0 or newer, this one is for {cuda_release[0]}.{cuda_release[1]}",
        hint=f"install a driver for CUDA {toolkit[0]}, or build with the libraries of "
        f"nvidia-cutlass-dsl for CUDA {cuda_release[0]}",
    )
