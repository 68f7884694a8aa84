"""The ELF reader: right about sound cubins, and an InvalidArtifactError for everything else."""

from __future__ import annotations

import random
import re
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from llbf16_aot.elf import Cubin, KernelInfo, check_cubin, read_cubin
from llbf16_aot.errors import InvalidArtifactError
from llbf16_aot.launch import LaunchRecord
from llbf16_aot.problem import Target
from llbf16_aot.sections import MAX_CUBIN_BYTES, ElfFile, Section
from support import CUBINS, fixture_cubin, flipped, make_artifact

ALL = sorted(path.stem for path in CUBINS.glob("*.cubin"))

# One of each dialect: ABI 7, ABI 8 with the suffix in the flags, ABI 8 with it in .nv.compat.
DIALECTS = ("dsl_sm_90a", "dsl_sm_100a", "ptxas_sm_90a", "dsl13_sm_100a")

SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
HEADER_FIELDS = {
    "e_type": (16, "<H"),
    "e_machine": (18, "<H"),
    "e_phoff": (32, "<Q"),
    "e_shoff": (40, "<Q"),
    "e_flags": (48, "<I"),
    "e_ehsize": (52, "<H"),
    "e_phentsize": (54, "<H"),
    "e_phnum": (56, "<H"),
    "e_shentsize": (58, "<H"),
    "e_shnum": (60, "<H"),
    "e_shstrndx": (62, "<H"),
}
SECTION_FIELDS = {
    "sh_name": (0, "<I"),
    "sh_type": (4, "<I"),
    "sh_flags": (8, "<Q"),
    "sh_offset": (24, "<Q"),
    "sh_size": (32, "<Q"),
    "sh_link": (40, "<I"),
    "sh_info": (44, "<I"),
}


def read_or_refuse(data: bytes) -> Cubin | None:
    """What every input may do: be read, or be refused with the one error; nothing else."""
    try:
        return read_cubin(data)
    except InvalidArtifactError:
        return None


def kernel_of(name: str, symbol: str) -> KernelInfo:
    return next(k for k in read_cubin(fixture_cubin(name)).kernels if k.symbol == symbol)


def section_of(data: bytes, name: str) -> Section:
    section = ElfFile(data).find(name)
    assert section is not None
    return section


def with_header(data: bytes, field: str, value: int) -> bytes:
    offset, layout = HEADER_FIELDS[field]
    return overwritten(data, offset, struct.pack(layout, value))


def with_section(data: bytes, name: str, field: str, value: int) -> bytes:
    (table,) = struct.unpack_from("<Q", data, HEADER_FIELDS["e_shoff"][0])
    offset, layout = SECTION_FIELDS[field]
    place = table + section_of(data, name).number * SECTION_HEADER.size + offset
    return overwritten(data, place, struct.pack(layout, value))


def overwritten(data: bytes, offset: int, value: bytes) -> bytes:
    assert data[offset : offset + len(value)] != value, "the change must change something"
    return data[:offset] + value + data[offset + len(value) :]


@pytest.mark.parametrize("name", ALL)
def test_target_is_read_back_with_its_suffix(name: str) -> None:
    """Bug: a cubin built for the wrong target, or another suffix, passes the check."""
    stated = re.search(r"sm_[0-9]+[af]?$", name)
    assert stated is not None
    assert read_cubin(fixture_cubin(name)).target == Target.parse(stated[0])


@pytest.mark.parametrize("name", ["ptxas_sm_90a", "ptxas_sm_100a", "ptxas_sm_120a"])
def test_parameters_and_resources_are_those_of_the_source(name: str) -> None:
    """Bug: offset and size taken from the wrong bits, or parameters in the ELF's reversed order."""
    assert kernel_of(name, "fixture_dotprod") == KernelInfo(
        symbol="fixture_dotprod",
        params=((0, 8), (8, 8), (16, 8), (24, 4), (28, 4), (32, 4), (36, 4)),
        registers=10,
        static_shared_bytes=512 + 1024,
        local_bytes=0,
        required_block=(128, 1, 1),
        largest_block=None,
        required_cluster=None,
    )


def test_other_launch_attributes_are_read() -> None:
    """Bug: the second encoding of parameters, large ones, clusters or block limits are skipped."""
    name = "ptxas_bounds_sm_90a"
    assert kernel_of(name, "fixture_large").params == ((0, 4800), (4800, 8))
    assert kernel_of(name, "fixture_cluster").required_cluster == (4, 1, 1)
    assert kernel_of(name, "fixture_maxntid").largest_block == (128, 1, 1)
    assert kernel_of(name, "fixture_empty").params == ()


def test_spilled_registers_count_as_local_memory() -> None:
    """Bug: a kernel that spills passes for one that does not."""
    assert kernel_of("ptxas_spill_sm_90a", "fixture_spill").local_bytes == 24


@pytest.mark.parametrize("name", ALL)
def test_resources_agree_with_cuobjdump(name: str) -> None:
    """Bug: registers, shared or local memory read from the wrong place."""
    folder = Path(sysconfig.get_paths()["purelib"], "nvidia")
    tool = next(iter(sorted(folder.glob("*/bin/cuobjdump"))), None) or shutil.which("cuobjdump")
    if tool is None:
        pytest.skip("cuobjdump is not installed")
    output = subprocess.run(
        [str(tool), "-res-usage", str(CUBINS / f"{name}.cubin")],
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    pattern = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    told = {
        symbol: (int(registers), int(shared), int(stack) + int(local))
        for symbol, registers, stack, shared, local in re.findall(pattern, output)
    }
    read = {
        kernel.symbol: (kernel.registers, kernel.static_shared_bytes, kernel.local_bytes)
        for kernel in read_cubin(fixture_cubin(name)).kernels
    }
    assert told == read
    assert told


@pytest.mark.parametrize("name", DIALECTS)
def test_every_truncation_is_refused(name: str) -> None:
    """Bug: a cubin that was cut short reaches the driver, which can hang for good on it."""
    data = fixture_cubin(name)
    accepted = [size for size in range(len(data)) if read_or_refuse(data[:size]) is not None]
    assert accepted == []


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("mask", [0xFF, 0x01])
def test_every_flipped_byte_is_read_or_refused(name: str, mask: int) -> None:
    """Bug: an exception that callers do not expect, for one damaged byte."""
    data = fixture_cubin(name)
    refused = sum(read_or_refuse(bad) is None for _, bad in flipped(data, range(len(data)), mask))
    # The control: damage that matters is found, and machine code is not looked at.
    assert 0 < refused < len(data)


def test_random_damage_is_read_or_refused() -> None:
    """Bug: an exception that callers do not expect, for damage in several places at once."""
    dice = random.Random(20)
    sound = [fixture_cubin(name) for name in DIALECTS]
    for _ in range(3000):
        bad = bytearray(dice.choice(sound))
        for _ in range(dice.randint(1, 24)):
            # The tables, where numbers lead somewhere, lie at both ends.
            where = dice.choice((dice.randrange(64), dice.randrange(len(bad))))
            bad[where] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
        read_or_refuse(bytes(bad))
    for size in range(300):
        read_or_refuse(b"\x7fELF\x02\x01\x01" + dice.randbytes(size))


def symbol_place(data: bytes, name: str) -> int:
    """Offset in the file of a kernel's entry of the symbol table."""
    elf = ElfFile(data)
    table = section_of(data, ".symtab")
    names = elf.strings_of(table)
    for place in range(table.offset, table.offset + table.size, 24):
        (name_offset, info) = struct.unpack_from("<IB", data, place)
        if info & 0xF == 2 and names.at(name_offset) == name:
            return place
    raise AssertionError(name)


def attribute_place(data: bytes, section: str, head: bytes) -> int:
    """Offset in the file of an attribute by its first two bytes."""
    found = section_of(data, section)
    place = data.index(head, found.offset, found.offset + found.size)
    assert (place - found.offset) % 4 == 0
    return place


DOTPROD = ".nv.info.fixture_dotprod"

CRAFTED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty file": (lambda d: b"", "cut short"),
    "other machine": (lambda d: with_header(d, "e_machine", 62), "not a CUDA ELF"),
    "32 bits": (lambda d: overwritten(d, 4, b"\x01"), "not a 64-bit"),
    "not linked": (lambda d: with_header(d, "e_type", 1), "not a linked cubin"),
    "unknown ABI": (lambda d: overwritten(d, 8, b"\x63"), "OS ABI"),
    "section table at 2^64 - 1": (lambda d: with_header(d, "e_shoff", 2**64 - 1), "cut short"),
    "section table at 2^63": (lambda d: with_header(d, "e_shoff", 2**63), "cut short"),
    "section table on the header": (lambda d: with_header(d, "e_shoff", 0), "cut short"),
    "no sections": (lambda d: with_header(d, "e_shnum", 0), "states 0 sections"),
    "65535 sections": (lambda d: with_header(d, "e_shnum", 0xFFFF), "states 65535 sections"),
    "small section entries": (lambda d: with_header(d, "e_shentsize", 8), "entries have"),
    "no names": (lambda d: with_header(d, "e_shstrndx", 0xFFFF), "section names"),
    "names elsewhere": (lambda d: with_header(d, "e_shstrndx", 3), "section names"),
    "segments outside": (lambda d: with_header(d, "e_phoff", len(d)), "cut short"),
    "segment table of 65535": (lambda d: with_header(d, "e_phnum", 0xFFFF), "cut short"),
    "section of 2^63 bytes": (
        lambda d: with_section(d, ".symtab", "sh_size", 2**63),
        "cut short",
    ),
    "section at 2^64 - 8": (
        lambda d: with_section(d, ".symtab", "sh_offset", 2**64 - 8),
        "cut short",
    ),
    "overlapping sections": (
        lambda d: with_section(
            d, DOTPROD, "sh_offset", section_of(d, ".nv.info.fixture_splitk").offset
        ),
        "overlap",
    ),
    "name outside": (lambda d: with_section(d, ".symtab", "sh_name", 2**32 - 1), "has no end"),
    "symbols without names": (lambda d: with_section(d, ".symtab", "sh_link", 99), "links to"),
    "symbol table naming itself": (
        lambda d: with_section(d, ".symtab", "sh_link", section_of(d, ".symtab").number),
        "links to",
    ),
    "half a symbol": (
        lambda d: with_section(d, ".symtab", "sh_size", section_of(d, ".symtab").size - 1),
        "multiple of 24",
    ),
    "code that is not executable": (
        lambda d: with_section(d, ".text.fixture_dotprod", "sh_flags", 2),
        "executable",
    ),
    "two sections of one name": (
        lambda d: with_section(
            d,
            DOTPROD,
            "sh_name",
            struct.unpack_from(
                "<I",
                d,
                struct.unpack_from("<Q", d, 40)[0]
                + 64 * section_of(d, ".nv.info.fixture_splitk").number,
            )[0],
        ),
        "two sections",
    ),
    "no attributes": (lambda d: with_section(d, DOTPROD, "sh_type", 1), "lacks the section"),
    "attributes of another kernel": (
        lambda d: with_section(d, DOTPROD, "sh_info", 1),
        "does not describe",
    ),
    "shared memory of 2^63": (
        lambda d: with_section(d, ".nv.shared.fixture_dotprod", "sh_size", 2**63),
        "states",
    ),
    "kernel beyond its section": (
        lambda d: overwritten(d, symbol_place(d, "fixture_dotprod") + 16, struct.pack("<Q", 2**63)),
        "takes",
    ),
    "kernel in another section": (
        lambda d: overwritten(d, symbol_place(d, "fixture_dotprod") + 6, struct.pack("<H", 1)),
        "does not lie",
    ),
    "attribute longer than its list": (
        lambda d: overwritten(
            d, attribute_place(d, DOTPROD, b"\x04\x0a") + 2, struct.pack("<H", 0xFFFF)
        ),
        "value of an attribute",
    ),
    "attribute of unknown format": (
        lambda d: overwritten(d, attribute_place(d, DOTPROD, b"\x04\x0a"), b"\x09"),
        "unknown format",
    ),
    "parameter described twice": (
        lambda d: overwritten(d, attribute_place(d, DOTPROD, b"\x04\x17") + 8, b"\x05\x00"),
        "twice",
    ),
    "parameter left out": (
        lambda d: overwritten(d, attribute_place(d, DOTPROD, b"\x04\x17") + 8, b"\x09\x00"),
        "only",
    ),
    "parameters that overlap": (
        lambda d: overwritten(d, attribute_place(d, DOTPROD, b"\x04\x17") + 10, b"\x21\x00"),
        "overlap",
    ),
    "parameters beyond the stated bytes": (
        lambda d: overwritten(d, attribute_place(d, DOTPROD, b"\x03\x19") + 2, b"\x24\x00"),
        "end at 40",
    ),
    "no register count": (
        lambda d: overwritten(
            d, attribute_place(d, ".nv.info", b"\x04\x2f") + 4, struct.pack("<I", 2**31)
        ),
        "lacks attribute",
    ),
    "unknown accelerator target": (
        lambda d: overwritten(d, attribute_place(d, ".nv.compat", b"\x02\x09") + 2, b"\x07"),
        "accelerator target",
    ),
    "number that is no target": (lambda d: with_header(d, "e_flags", 0x06FFFF02), "marked"),
    "number that the note denies": (lambda d: with_header(d, "e_flags", 0x06006404), "note says"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_files_are_refused_for_the_reason(case: str) -> None:
    """Bug: a number in the file is believed: read out of bounds, hang, or wrong facts."""
    craft, reason = CRAFTED[case]
    with pytest.raises(InvalidArtifactError, match=reason):
        read_cubin(craft(fixture_cubin("ptxas_sm_90a")))


def test_huge_files_are_refused_unread() -> None:
    """Bug: the reader works through gigabytes that somebody put in place of a cubin."""
    with pytest.raises(InvalidArtifactError, match="at most"):
        read_cubin(fixture_cubin("ptxas_sm_90a") + bytes(MAX_CUBIN_BYTES))


def sound_launch() -> LaunchRecord:
    return make_artifact(backend="dotprod").record.launch


def test_check_accepts_the_kernel_that_the_record_describes() -> None:
    """Bug: the check refuses what the builder made."""
    for backend in ("dotprod", "splitk"):
        for target in ("sm_90a", "sm_100f"):
            artifact = make_artifact(backend=backend, target=target)
            found = check_cubin(artifact.record.launch, Target.parse(target), artifact.cubin)
            assert found.symbol == artifact.record.launch.symbol


@pytest.mark.parametrize(
    ("built", "wanted"),
    [
        ("ptxas_sm_90", "sm_90a"),
        ("ptxas_sm_90a", "sm_90"),
        ("ptxas_sm_90a", "sm_100a"),
        ("ptxas_sm_100f", "sm_100a"),
        ("ptxas_sm_100a", "sm_100f"),
        ("ptxas_sm_100f", "sm_100"),
        ("ptxas_sm_103a", "sm_100a"),
    ],
)
def test_check_refuses_another_target(built: str, wanted: str) -> None:
    """Bug: number compared without suffix; such a cubin fails in the driver, or later."""
    with pytest.raises(InvalidArtifactError, match=f"wanted is {wanted}$"):
        check_cubin(sound_launch(), Target.parse(wanted), fixture_cubin(built))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"symbol": "fixture_other"}, "lacks the kernel fixture_other"),
        ({"symbol": "fixture_splitk"}, "takes parameters"),
        ({"params": sound_launch().params[:-1]}, "takes parameters"),
        ({"params": sound_launch().params[::-1]}, "takes parameters"),
        ({"block": (256, 1, 1)}, "requires blocks"),
        ({"block": (1, 128, 1)}, "requires blocks"),
    ],
)
def test_check_refuses_a_record_that_the_kernel_contradicts(
    changes: dict[str, object], reason: str
) -> None:
    """Bug: a launch with other parameters than the kernel reads: garbage, or a crash on the GPU."""
    launch = msgspec.structs.replace(sound_launch(), **changes)
    with pytest.raises(InvalidArtifactError, match=reason):
        check_cubin(launch, Target.parse("sm_90a"), fixture_cubin("ptxas_sm_90a"))


@pytest.mark.parametrize(
    ("symbol", "changes", "reason"),
    [
        ("fixture_maxntid", {"block": (64, 3, 1)}, "at most 128 threads"),
        ("fixture_cluster", {"cluster": (2, 1, 1)}, "requires clusters"),
    ],
)
def test_check_refuses_blocks_and_clusters_that_the_kernel_forbids(
    symbol: str, changes: dict[str, object], reason: str
) -> None:
    """Bug: a launch that the driver can only refuse is published."""
    data = fixture_cubin("ptxas_bounds_sm_90a")
    launch = msgspec.structs.replace(
        sound_launch(), symbol=symbol, params=sound_launch().params[:1], cluster=(4, 1, 1)
    )
    assert check_cubin(launch, Target.parse("sm_90a"), data).symbol == symbol
    with pytest.raises(InvalidArtifactError, match=reason):
        check_cubin(msgspec.structs.replace(launch, **changes), Target.parse("sm_90a"), data)
