"""Layers: read-only stores below the writable one, read as if all were a single store.

An image layer or an installed package brings artifacts of its own; the store above them can replace
any. Reading writes nothing and takes no lock, in any of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from .artifact import Artifact
from .store import Miss, MissReason, Store

__all__ = ["ArtifactSource", "LayeredSource", "open_layers"]


class ArtifactSource(Protocol):
    """Where artifacts come from: a `Store`, or what reads like one."""

    @property
    def root(self) -> Path:
        """Where it lies, for messages."""

    def get(self, digest: str) -> Artifact | Miss:
        """The verified artifact, or why there is none."""


class LayeredSource:
    """Several sources as one, asked in order: the first sound artifact wins.

    The first source is the writable store, those after it are its layers. An entry that is absent,
    damaged or unreadable in one is looked for in the next, so a damaged store is healed by a layer
    below it without anybody's help.
    """

    def __init__(self, sources: Iterable[ArtifactSource]) -> None:
        self.sources = tuple(sources)
        if not self.sources:
            raise ValueError("no source to read artifacts from")

    def __repr__(self) -> str:
        return f"LayeredSource({', '.join(map(repr, self.sources))})"

    @property
    def root(self) -> Path:
        """Where the writable store lies: what mends a miss is built into it."""
        return self.sources[0].root

    def get(self, digest: str) -> Artifact | Miss:
        """The first sound artifact of that digest, or why there is none in any source.

        Of several misses the first is told that is more than an absence, because its entry wants
        mending; else that of the first source. Raises UntrustedStoreError for any source that it
        comes to: trouble with trust never falls through, and sources after a hit are not read.
        """
        told: Miss | None = None
        for source in self.sources:
            found = source.get(digest)
            if isinstance(found, Artifact):
                return found
            if told is None or (
                told.reason is MissReason.ABSENT and found.reason is not MissReason.ABSENT
            ):
                told = found
        assert told is not None  # noqa: S101 - the constructor refuses to have no source
        return told


def open_layers(
    store: ArtifactSource, layers: Iterable[ArtifactSource | Path | str]
) -> ArtifactSource:
    """The store with its layers, each a source or the absolute path of a store; in this order.

    Without layers the store itself. A layer that does not exist has no artifacts. Raises UsageError
    for a path that is not absolute.
    """
    below = tuple(
        Store(Path(layer)) if isinstance(layer, str | Path) else layer for layer in layers
    )
    return LayeredSource((store, *below)) if below else store
