"""What a process wants ready before its first call: a manifest or keys, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from .key import CompileKey
from .loader import LIBRARY, Missing
from .manifest import Manifest
from .problem import Problem

__all__ = ["PreloadReport", "Wanted", "WantedItem", "wanted_items"]

Wanted: TypeAlias = Manifest | Path | str | Iterable[CompileKey]
"""What to preload: a manifest, its path or packaged name, or compile keys."""

WantedItem: TypeAlias = Problem | CompileKey


class PreloadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `Runtime.preload` did.

    `devices` are those on which kernels are ready; on the `deferred` ones, where this process has
    no context yet, they are loaded and the first call makes them ready, without the disk. `wanted`
    counts problems or keys, over all devices those that run on it; `loads` libraries that the
    driver loaded for them; `library` problems that the tuning table leaves to torch. `missing`
    tells what could not be made ready, each thing once.
    """

    devices: tuple[int, ...]
    deferred: tuple[int, ...]
    wanted: int
    loads: int
    library: int
    missing: tuple[Missing, ...]

    @property
    def ok(self) -> bool:
        """Whether all that was wanted can be launched."""
        return not self.missing

    @classmethod
    def of(
        cls,
        found: Iterable[Missing | None],
        *,
        devices: tuple[int, ...],
        deferred: tuple[int, ...],
        loads: int,
    ) -> PreloadReport:
        """Sum up what was found for each wanted item on each device."""
        results = tuple(found)
        faults = {one.subject: one for one in results if one is not None and one.reason != LIBRARY}
        return cls(
            devices=devices,
            deferred=deferred,
            wanted=len(results),
            loads=loads,
            library=sum(one is not None and one.reason == LIBRARY for one in results),
            missing=tuple(faults.values()),
        )


def wanted_items(what: Wanted) -> tuple[WantedItem, ...]:
    """The problems of a manifest, or the keys themselves, each once and in order.

    Raises ManifestError for a manifest that cannot be read, TypeError for anything else.
    """
    if isinstance(what, str | Path):
        what = Manifest.load(what)
    return tuple(dict.fromkeys(_items(what)))


def _items(what: Manifest | Iterable[CompileKey]) -> Iterator[WantedItem]:
    if isinstance(what, Manifest):
        for router in what.routers:
            yield from router.problems()
        return
    for key in what:
        if not isinstance(key, CompileKey):
            raise TypeError(
                f"preload got {key!r}, must be a manifest, its path or name, or CompileKeys"
            )
        yield key
