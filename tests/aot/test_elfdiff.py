"""Comparing cubins: the section that differs is named, and where."""

from __future__ import annotations

from llbf16_aot.elfdiff import OUTSIDE, compare_cubins
from llbf16_aot.sections import ElfFile
from support import fixture_cubin


def test_equal_bytes_have_no_difference() -> None:
    """Catches a difference that is told of everything."""
    data = fixture_cubin("ptxas_sm_90a")
    assert compare_cubins(data, bytes(data)) == ()


def test_each_section_is_named_when_it_alone_differs() -> None:
    """Catches a change of machine code that is told of another section, or of none."""
    data = fixture_cubin("ptxas_sm_90a")
    elf = ElfFile(data)
    names = 0
    for section in elf.sections:
        body = elf.body(section)
        # A changed name table renames sections instead.
        if not body or section.name in (".shstrtab", ""):
            continue
        place = len(body) // 2
        changed = bytearray(data)
        changed[section.offset + place] ^= 1
        (found,) = compare_cubins(data, bytes(changed))
        assert (found.section, found.first_offset) == (section.name, place)
        assert str(found) == f"{section.name} differs from byte {place} on ({len(body)} bytes)"
        names += 1
    assert names > 5


def test_what_lies_outside_of_sections_is_told_too() -> None:
    """Catches cubins that differ in a header and count as equal."""
    data = fixture_cubin("ptxas_sm_90a")
    changed = bytearray(data)
    changed[16 + 8] ^= 1  # e_entry
    assert [found.section for found in compare_cubins(data, bytes(changed))] == [OUTSIDE]
    assert [found.section for found in compare_cubins(data, data + b"x")] == [OUTSIDE]
    assert [found.section for found in compare_cubins(data, b"no ELF")] == [OUTSIDE]


def test_sections_that_one_file_lacks_are_named() -> None:
    """Catches a comparison of the sections that both have only."""
    one, other = fixture_cubin("ptxas_sm_90a"), fixture_cubin("ptxas_sm_100a")
    names = {section.name for section in ElfFile(one).sections}
    others = {section.name for section in ElfFile(other).sections}
    told = {found.section: str(found) for found in compare_cubins(one, other)}
    assert names != others
    assert all("is gone" in told[name] for name in names - others)
    assert all("is new" in told[name] for name in others - names)
