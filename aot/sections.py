"""The sections of a CUDA ELF file: each lies within the file, and no two share a byte."""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from .errors import InvalidArtifactError

__all__ = ["MAX_CUBIN_BYTES", "ElfFile", "Section", "SectionType", "cut"]

MAX_CUBIN_BYTES = 64 << 20
"""Largest cubin that is read: a router kernel takes some 10 kB."""

MAX_SECTIONS = 4096
MAX_NAME_BYTES = 4096
"""Bounds on what a file states, so that a crafted one cannot keep the reader busy."""

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")

_MAGIC = b"\x7fELF\x02\x01\x01"
_ET_EXEC = 2
_EM_CUDA = 190


class SectionType(enum.IntEnum):
    """The types of sections that this package reads."""

    NULL = 0
    PROGBITS = 1
    SYMTAB = 2
    STRTAB = 3
    NOTE = 7
    NOBITS = 8
    CUDA_INFO = 0x70000000
    CUDA_RESERVED_SHARED = 0x70000015


_WITHOUT_BYTES = (
    int(SectionType.NULL),
    int(SectionType.NOBITS),
    int(SectionType.CUDA_RESERVED_SHARED),
)


class Section(NamedTuple):
    """One entry of the section table."""

    name: str
    number: int
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int


class ElfFile:
    """A linked CUDA ELF file with a section table that can be trusted not to lead out of the file.

    `abi` is (EI_OSABI, EI_ABIVERSION), `flags` is e_flags. Raises InvalidArtifactError for bytes
    that are not such a file: no part of it is read before its place was checked.
    """

    def __init__(self, data: bytes) -> None:
        if len(data) > MAX_CUBIN_BYTES:
            raise InvalidArtifactError(
                f"cubin has {len(data)} bytes, at most {MAX_CUBIN_BYTES} are read"
            )
        header = _HEADER.unpack(cut(data, 0, _HEADER.size, "the ELF header"))
        ident, kind, machine, _, _, self._segments_offset, self._sections_offset = header[:7]
        self.flags, header_size, segment_size, self._segments = header[7:11]
        section_size, self._sections, names_index = header[11:]
        if ident[:7] != _MAGIC:
            raise InvalidArtifactError(
                f"not a 64-bit little-endian ELF: it starts with {ident[:7].hex()}"
            )
        if machine != _EM_CUDA:
            raise InvalidArtifactError(
                f"not a CUDA ELF: e_machine is {machine}, must be {_EM_CUDA}"
            )
        if kind != _ET_EXEC:
            raise InvalidArtifactError(f"not a linked cubin: e_type is {kind}, must be {_ET_EXEC}")
        sizes = (header_size, section_size, segment_size if self._segments else _SEGMENT.size)
        if sizes != (_HEADER.size, _SECTION.size, _SEGMENT.size):
            raise InvalidArtifactError(
                f"ELF header, section and segment entries have {sizes} bytes, "
                f"must be {(_HEADER.size, _SECTION.size, _SEGMENT.size)}"
            )
        if not 0 < self._sections <= MAX_SECTIONS:
            raise InvalidArtifactError(
                f"cubin states {self._sections} sections, must be 1 to {MAX_SECTIONS}"
            )
        self._data = data
        self.abi: tuple[int, int] = (ident[7], ident[8])
        self._raw = self._read_table()
        self._names = self._read_names(names_index)
        self._check_extents()
        self._by_name = self._index_names()

    @property
    def sections(self) -> tuple[Section, ...]:
        """All sections, in the order of the table."""
        return tuple(self._section(index) for index in range(len(self._raw)))

    def size_of(self, kind: SectionType, names: tuple[str, ...]) -> int:
        """Bytes that all sections of a type, and those of these names, state together."""
        return sum(
            fields[5]
            for name, fields in zip(self._names, self._raw, strict=True)
            if fields[1] == kind or name in names
        )

    def body(self, section: Section) -> bytes:
        """The bytes of a section that has some; of any other, none."""
        if section.type in _WITHOUT_BYTES:
            return b""
        return self._data[section.offset : section.offset + section.size]

    def find(self, name: str) -> Section | None:
        """The section of that name."""
        index = self._by_name.get(name)
        return None if index is None else self._section(index)

    def require(self, name: str, kind: SectionType) -> Section:
        """The section of that name and type."""
        index = self._by_name.get(name)
        if index is None or self._raw[index][1] != kind:
            raise InvalidArtifactError(f"cubin lacks the section {name}")
        return self._section(index)

    def strings_of(self, section: Section) -> Strings:
        """The string table that a section links to."""
        linked = self._section(section.link) if section.link < len(self._raw) else None
        if linked is None or linked.type != SectionType.STRTAB:
            raise InvalidArtifactError(
                f"{section.name} links to section {section.link}, which is no string table"
            )
        return Strings(self.body(linked))

    # Every load reads this: a section becomes an object only when somebody asks for it.

    def _section(self, index: int) -> Section:
        _, kind, flags, _, offset, size, link, info, _, _ = self._raw[index]
        return Section(self._names[index], index, kind, flags, offset, size, link, info)

    def _read_table(self) -> list[tuple[int, ...]]:
        """The section table's fields; every section lies in the file."""
        size = self._sections * _SECTION.size
        table = cut(self._data, self._sections_offset, size, "the section table")
        raw = list(_SECTION.iter_unpack(table))
        limit = len(self._data)
        for index, fields in enumerate(raw):
            if fields[4] + fields[5] > limit and fields[1] not in _WITHOUT_BYTES:
                cut(self._data, fields[4], fields[5], f"section {index}")
        return raw

    def _read_names(self, names_index: int) -> list[str]:
        """The name of each section."""
        raw = self._raw
        if names_index >= len(raw) or raw[names_index][1] != SectionType.STRTAB:
            raise InvalidArtifactError(
                f"section {names_index} should hold the section names but is no string table"
            )
        start, length = raw[names_index][4:6]
        name_at = Strings(self._data[start : start + length]).at
        return [name_at(fields[0]) for fields in raw]

    def _check_extents(self) -> None:
        """Every segment lies in the file; headers, tables and sections share no byte."""
        extents = [
            (fields[4], fields[5], name)
            for name, fields in zip(self._names, self._raw, strict=True)
            if fields[5] and fields[1] not in _WITHOUT_BYTES
        ]
        extents.append((0, _HEADER.size, "the ELF header"))
        extents.append((self._sections_offset, self._sections * _SECTION.size, "the section table"))
        if self._segments:
            size = self._segments * _SEGMENT.size
            table = cut(self._data, self._segments_offset, size, "the segment table")
            limit = len(self._data)
            for fields in _SEGMENT.iter_unpack(table):
                if fields[2] + fields[5] > limit:
                    cut(self._data, fields[2], fields[5], "a segment")
            extents.append((self._segments_offset, size, "the segment table"))
        extents.sort()
        end, before = 0, ""
        for offset, size, what in extents:
            if offset < end:
                raise InvalidArtifactError(
                    f"cubin is damaged: {before} and {what} overlap at {offset}"
                )
            end, before = offset + size, what

    def _index_names(self) -> dict[str, int]:
        named = [(name, index) for index, name in enumerate(self._names) if self._raw[index][1]]
        by_name = dict(named)
        if len(by_name) != len(named):
            twice = next(name for name, index in named if by_name[name] != index)
            raise InvalidArtifactError(f"cubin has two sections named {twice!r}")
        return by_name


class Strings:
    """A table of NUL-terminated names."""

    def __init__(self, table: bytes) -> None:
        # As text, so that a name costs no call to decode it: a byte stays a character.
        self._table = table.decode("latin-1")
        self._ascii = table.isascii()

    def at(self, offset: int) -> str:
        """The name at an offset; names are ASCII and no longer than a compiler makes them."""
        end = self._table.find("\0", offset, offset + MAX_NAME_BYTES)
        if end < 0:
            raise InvalidArtifactError(f"name at {offset} of a string table has no end")
        name = self._table[offset:end]
        if not self._ascii and not name.isascii():
            raise InvalidArtifactError(f"name {name.encode('latin-1')!r} is not ASCII")
        return name


def cut(data: bytes, offset: int, size: int, what: str) -> bytes:
    """The bytes at a stated place, which may lie anywhere; raises InvalidArtifactError outside."""
    if offset + size > len(data):
        raise InvalidArtifactError(
            f"cubin is cut short or damaged: {what} at {offset} takes {size} bytes of {len(data)}"
        )
    return data[offset : offset + size]
