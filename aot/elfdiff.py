"""Two cubins compared: which sections differ, and where."""

from __future__ import annotations

import msgspec

from .errors import InvalidArtifactError
from .sections import ElfFile

__all__ = ["Difference", "compare_cubins"]

OUTSIDE = "(headers)"


class Difference(msgspec.Struct, frozen=True):
    """One section that differs: sizes in bytes, -1 where a file lacks it; first differing byte."""

    section: str
    stored_bytes: int
    rebuilt_bytes: int
    first_offset: int

    def __str__(self) -> str:
        if self.stored_bytes < 0:
            return f"{self.section} is new, {self.rebuilt_bytes} bytes"
        if self.rebuilt_bytes < 0:
            return f"{self.section} is gone, {self.stored_bytes} bytes"
        sizes = (
            f"{self.stored_bytes} bytes"
            if self.stored_bytes == self.rebuilt_bytes
            else f"{self.stored_bytes} bytes stored, {self.rebuilt_bytes} rebuilt"
        )
        return f"{self.section} differs from byte {self.first_offset} on ({sizes})"


def compare_cubins(stored: bytes, rebuilt: bytes) -> tuple[Difference, ...]:
    """The sections that differ, in the order of the stored file; empty for the same bytes.

    Where the files differ in no section, as in a header or in padding, there is one Difference for
    all of that; so there is where one of them is no CUDA ELF.
    """
    if stored == rebuilt:
        return ()
    outside = Difference(OUTSIDE, len(stored), len(rebuilt), _first(stored, rebuilt))
    try:
        one, other = ElfFile(stored), ElfFile(rebuilt)
    except InvalidArtifactError:
        return (outside,)
    bodies = {section.name: one.body(section) for section in one.sections}
    others = {section.name: other.body(section) for section in other.sections}
    found = []
    for name in dict.fromkeys((*bodies, *others)):
        a, b = bodies.get(name), others.get(name)
        if a != b:
            found.append(
                Difference(
                    name,
                    -1 if a is None else len(a),
                    -1 if b is None else len(b),
                    _first(a or b"", b or b""),
                )
            )
    return tuple(found) or (outside,)


def _first(one: bytes, other: bytes) -> int:
    """Where two byte strings part."""
    for offset, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return offset
    return min(len(one), len(other))
