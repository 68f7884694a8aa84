"""Reads from a cubin what it was built for and which kernels it holds; trusts no byte of it.

A cubin is an ELF of NVIDIA's own dialect. The dialect is not documented; what this module relies
on was found by compiling for every target with the ptxas of CUDA 12.9, 13.0 and 13.4 and comparing
with `cuobjdump -elf`, and the tests hold it against files that each of them made.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from .errors import InvalidArtifactError, TargetError
from .launch import LaunchRecord
from .problem import Target
from .sections import ElfFile, SectionType, cut

__all__ = ["Cubin", "KernelInfo", "check_cubin", "read_cubin", "toolkit_release"]

MAX_SYMBOLS = 1 << 16
MAX_ATTRIBUTES_BYTES = 4 << 20
MAX_MEMORY_BYTES = 1 << 30
"""Bounds on what a file states, so that a crafted one cannot keep the reader busy."""

_SYMBOL = struct.Struct("<IBBHQQ")
_NOTE = struct.Struct("<III")
_PARAM = struct.Struct("<IHHI")
_PARAM_V2 = struct.Struct("<IHHHH")
_TRIPLE = struct.Struct("<III")
_PAIR = struct.Struct("<II")
_ATTRIBUTE = struct.Struct("<BBH")

_SHF_EXECINSTR = 4
_STT_FUNC = 2
_STO_CUDA_ENTRY = 0x10

# (EI_OSABI, EI_ABIVERSION): ptxas before CUDA 13 writes the first for targets up to sm_90a, and the
# second for newer ones; from CUDA 13 on it writes the second for all.
_ABI_7 = (0x33, 7)
_ABI_8 = (0x41, 8)

# Attribute lists, in `.nv.info*` and `.nv.compat`: a byte of format, a byte of name, then two bytes
# that are the value, or in the sized format the size of the value that follows.
_EIFMT_NVAL, _EIFMT_BVAL, _EIFMT_HVAL, _EIFMT_SVAL = 1, 2, 3, 4
_EIATTR_MAX_THREADS = 0x05
_EIATTR_REQNTID = 0x10
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_MIN_STACK_SIZE = 0x12
_EIATTR_KPARAM_INFO = 0x17
_EIATTR_CBANK_PARAM_SIZE = 0x19
_EIATTR_REGCOUNT = 0x2F
_EIATTR_CTA_PER_CLUSTER = 0x3D
_EIATTR_KPARAM_INFO_V2 = 0x45
_TOTALS = (_EIATTR_REGCOUNT, _EIATTR_FRAME_SIZE, _EIATTR_MIN_STACK_SIZE)
_EICOMPAT_ACCELERATOR_TARGET = 0x09

_SHORT_FORMATS = frozenset((_EIFMT_NVAL, _EIFMT_BVAL, _EIFMT_HVAL))
_PARAMETERS = frozenset((_EIATTR_KPARAM_INFO, _EIATTR_KPARAM_INFO_V2))
_TRIPLES = frozenset((_EIATTR_REQNTID, _EIATTR_MAX_THREADS, _EIATTR_CTA_PER_CLUSTER))
_OF_KERNEL = _PARAMETERS | _TRIPLES | {_EIATTR_CBANK_PARAM_SIZE}
_OF_ALL = frozenset(_TOTALS)
_OF_TARGET = frozenset((_EICOMPAT_ACCELERATOR_TARGET,))

_COMPAT_SECTION = ".nv.compat"
_TOOLKIT_SECTION = ".note.nv.tkinfo"
_TOOLKIT_NOTE = (b"NVIDIA Corp\0", 2000)
_RELEASE = re.compile(rb"Cuda compilation tools, release ([0-9]{1,3})\.([0-9]{1,3}),")
_E_VERSION = slice(20, 24)
_ARCH_OPTION = re.compile(rb"(?:^|[\s\0])-?-(?:arch|gpu-name)[ =](sm_[0-9]{2,3}[af]?)(?=[\s\0]|$)")


class KernelInfo(msgspec.Struct, frozen=True):
    """One kernel as the ELF describes it.

    `params` holds offset and size in bytes of each parameter, in order. `static_shared_bytes` is
    what `cuobjdump -res-usage` prints as SHARED; from sm_90 on a kernel with static shared memory
    counts the 1024 bytes that the system reserves in it. `local_bytes` is the stack frame of a
    thread, in which spilled registers lie, and its local memory. The last three are None where
    nothing is stated.
    """

    symbol: str
    params: tuple[tuple[int, int], ...]
    registers: int
    static_shared_bytes: int
    local_bytes: int
    required_block: tuple[int, int, int] | None
    largest_block: tuple[int, int, int] | None
    required_cluster: tuple[int, int, int] | None


class Cubin(msgspec.Struct, frozen=True):
    """The target that a cubin was built for, and its kernels in the order of the symbol table."""

    target: Target
    kernels: tuple[KernelInfo, ...]


def read_cubin(data: bytes) -> Cubin:
    """Read target and kernels of a cubin; raises InvalidArtifactError for bytes that are not one.

    Promises that every section and segment lies within the file and that no two sections share
    bytes, so a file that was cut short is refused. Does not promise that the machine code is right:
    only a digest can.
    """
    elf = ElfFile(data)
    _check_bounds(elf)
    totals = _read_totals(elf)
    kernels = tuple(_read_kernel(elf, symbol, totals) for symbol in _entry_symbols(elf))
    return Cubin(_read_target(elf), kernels)


def check_cubin(launch: LaunchRecord, target: Target, data: bytes) -> KernelInfo:
    """The kernel that a launch record names, if launching it with that record is right.

    Raises InvalidArtifactError unless the bytes are a cubin for exactly this target, suffix
    included, that holds the symbol, takes parameters of the recorded offsets and sizes, and admits
    the recorded block and cluster.
    """
    cubin = read_cubin(data)
    if cubin.target != target:
        raise InvalidArtifactError(f"cubin was built for {cubin.target}, wanted is {target}")
    kernel = next((found for found in cubin.kernels if found.symbol == launch.symbol), None)
    if kernel is None:
        names = ", ".join(found.symbol for found in cubin.kernels) or "none"
        raise InvalidArtifactError(f"cubin lacks the kernel {launch.symbol}, it holds {names}")
    recorded = tuple((param.offset_bytes, param.size_bytes) for param in launch.params)
    if kernel.params != recorded:
        raise InvalidArtifactError(
            f"kernel {launch.symbol} takes parameters (offset, size) {_listed(kernel.params)}, "
            f"the launch record has {_listed(recorded)}"
        )
    if kernel.required_block is not None and kernel.required_block != launch.block:
        raise InvalidArtifactError(
            f"kernel {launch.symbol} requires blocks of {kernel.required_block}, "
            f"the launch record has {launch.block}"
        )
    largest = kernel.largest_block
    if largest is not None and _product(launch.block) > _product(largest):
        raise InvalidArtifactError(
            f"kernel {launch.symbol} admits blocks of at most {_product(largest)} threads, "
            f"the launch record has {launch.block}"
        )
    if kernel.required_cluster is not None and kernel.required_cluster != launch.cluster:
        raise InvalidArtifactError(
            f"kernel {launch.symbol} requires clusters of {kernel.required_cluster}, "
            f"the launch record has {launch.cluster}"
        )
    return kernel


def _listed(params: tuple[tuple[int, int], ...]) -> str:
    return " ".join(f"({offset}, {size})" for offset, size in params) or "none"


def _product(dims: tuple[int, int, int]) -> int:
    return dims[0] * dims[1] * dims[2]


def _check_bounds(elf: ElfFile) -> None:
    total = elf.size_of(SectionType.CUDA_INFO, (_COMPAT_SECTION, _TOOLKIT_SECTION))
    if total > MAX_ATTRIBUTES_BYTES:
        raise InvalidArtifactError(
            f"cubin has {total} bytes of attributes, at most {MAX_ATTRIBUTES_BYTES} are read"
        )


class _Symbol(NamedTuple):
    name: str
    number: int
    section: int


def _entry_symbols(elf: ElfFile) -> Iterator[_Symbol]:
    """The kernels in the symbol table: functions that are entry points, each in its own section."""
    table = elf.require(".symtab", SectionType.SYMTAB)
    count, rest = divmod(table.size, _SYMBOL.size)
    if rest or count > MAX_SYMBOLS:
        raise InvalidArtifactError(
            f"symbol table has {table.size} bytes, must be a multiple of {_SYMBOL.size} "
            f"and at most {MAX_SYMBOLS * _SYMBOL.size}"
        )
    names = elf.strings_of(table)
    seen: set[str] = set()
    for index, fields in enumerate(_SYMBOL.iter_unpack(elf.body(table))):
        name_offset, info, other, section_index, value, size = fields
        if info & 0xF != _STT_FUNC or not other & _STO_CUDA_ENTRY:
            continue
        name = names.at(name_offset)
        text = elf.require(f".text.{name}", SectionType.PROGBITS)
        if text.number != section_index or not text.flags & _SHF_EXECINSTR:
            raise InvalidArtifactError(
                f"kernel {name} does not lie in executable section .text.{name}"
            )
        if not size or value + size > text.size:
            raise InvalidArtifactError(
                f"kernel {name} takes {size} bytes at {value} of a section of {text.size}"
            )
        if name in seen:
            raise InvalidArtifactError(f"cubin has two kernels named {name}")
        seen.add(name)
        yield _Symbol(name, index, section_index)


def _attributes(body: bytes, where: str, wanted: frozenset[int]) -> list[tuple[int, int, bytes]]:
    """The wanted ones of a list's attributes, as (format, name, value); every one is checked."""
    found: list[tuple[int, int, bytes]] = []
    offset, end, head = 0, len(body), _ATTRIBUTE.unpack_from
    # In one loop, without a call for each: a kernel has dozens, and all are read at every load.
    while offset < end:
        if end - offset < 4:
            raise InvalidArtifactError(f"{where} ends within an attribute")
        form, name, size = head(body, offset)
        start = offset + 2
        if form == _EIFMT_SVAL:
            start += 2
            offset = start + size
            if offset > end:
                cut(body, start, size, "the value of an attribute")
        elif form in _SHORT_FORMATS:
            offset += 4
        else:
            raise InvalidArtifactError(f"attribute {name:#x} of {where} has unknown format {form}")
        if name in wanted:
            found.append((form, name, body[start:offset]))
    return found


def _unpacked(layout: struct.Struct, value: bytes, what: str) -> tuple[int, ...]:
    if len(value) != layout.size:
        raise InvalidArtifactError(f"{what} has {len(value)} bytes, must be {layout.size}")
    return layout.unpack(value)


def _read_kernel(elf: ElfFile, symbol: _Symbol, totals: dict[tuple[int, int], int]) -> KernelInfo:
    name = symbol.name
    where = f".nv.info.{name}"
    own = elf.require(where, SectionType.CUDA_INFO)
    if own.info != symbol.section:
        raise InvalidArtifactError(f"section {where} does not describe .text.{name}")
    params: dict[int, tuple[int, int]] = {}
    triples: dict[int, tuple[int, int, int]] = {}
    params_end = 0
    for form, attribute, value in _attributes(elf.body(own), where, _OF_KERNEL):
        if attribute in _PARAMETERS:
            if attribute == _EIATTR_KPARAM_INFO:
                _, ordinal, offset, packed = _unpacked(_PARAM, value, "a parameter")
                size = packed >> 18
            else:
                _, ordinal, offset, size, _ = _unpacked(_PARAM_V2, value, "a parameter")
            if ordinal in params:
                raise InvalidArtifactError(f"kernel {name} describes parameter {ordinal} twice")
            params[ordinal] = (offset, size)
        elif attribute in _TRIPLES:
            x, y, z = _unpacked(_TRIPLE, value, "a block or cluster")
            if triples.setdefault(attribute, (x, y, z)) != (x, y, z):
                raise InvalidArtifactError(f"kernel {name} states attribute {attribute:#x} twice")
        elif attribute == _EIATTR_CBANK_PARAM_SIZE and form == _EIFMT_HVAL:
            params_end = int.from_bytes(value, "little")
    ordered = tuple(params[ordinal] for ordinal in sorted(params))
    if sorted(params) != list(range(len(params))):
        raise InvalidArtifactError(f"kernel {name} describes the parameters {sorted(params)} only")
    end = 0
    for offset, size in ordered:
        if offset < end or not size:
            raise InvalidArtifactError(f"parameters of {name} overlap: {_listed(ordered)}")
        end = offset + size
    if end != params_end:
        raise InvalidArtifactError(
            f"parameters of {name} end at {end}, the kernel states {params_end} bytes"
        )
    for attribute in _TOTALS:
        if (attribute, symbol.number) not in totals:
            raise InvalidArtifactError(f"kernel {name} lacks attribute {attribute:#x}")
    registers, frame, stack = (totals[attribute, symbol.number] for attribute in _TOTALS)
    shared = _stated_size(elf, f".nv.shared.{name}")
    local = _stated_size(elf, f".nv.local.{name}")
    return KernelInfo(
        symbol=name,
        params=ordered,
        registers=registers,
        static_shared_bytes=shared,
        local_bytes=max(frame, stack) + local,
        required_block=triples.get(_EIATTR_REQNTID),
        largest_block=triples.get(_EIATTR_MAX_THREADS),
        required_cluster=triples.get(_EIATTR_CTA_PER_CLUSTER),
    )


def _stated_size(elf: ElfFile, name: str) -> int:
    """Size of a section that has no bytes in the file, so that any number may stand there."""
    section = elf.find(name)
    if section is None:
        return 0
    if section.size > MAX_MEMORY_BYTES:
        raise InvalidArtifactError(
            f"section {name} states {section.size} bytes, more than {MAX_MEMORY_BYTES}"
        )
    return section.size


def _read_totals(elf: ElfFile) -> dict[tuple[int, int], int]:
    """What `.nv.info` states of functions: (attribute, index in the symbol table) -> amount."""
    found: dict[tuple[int, int], int] = {}
    common = elf.require(".nv.info", SectionType.CUDA_INFO)
    for _, attribute, value in _attributes(elf.body(common), ".nv.info", _OF_ALL):
        index, amount = _unpacked(_PAIR, value, "an attribute of .nv.info")
        if found.setdefault((attribute, index), amount) != amount:
            raise InvalidArtifactError(f"attribute {attribute:#x} of symbol {index} has two values")
    return found


def _read_target(elf: ElfFile) -> Target:
    """The target in the header's flags; suffix `a` there or in `.nv.compat`, `f` in a note.

    A plain and a family cubin have the same header: only the command line that ptxas leaves in its
    note tells them apart. Where the note names a target it must agree with the rest.
    """
    if elf.abi == _ABI_7:
        number, specific = elf.flags & 0xFF, bool(elf.flags & 0x800)
    elif elf.abi == _ABI_8:
        number = elf.flags >> 8 & 0xFFFF
        specific = bool(elf.flags & 0x8) or _is_accelerated(elf)
    else:
        raise InvalidArtifactError(
            f"cubin has OS ABI {elf.abi[0]:#x} version {elf.abi[1]}, known are "
            f"{_ABI_7[0]:#x} version {_ABI_7[1]} and {_ABI_8[0]:#x} version {_ABI_8[1]}",
            hint="update llbf16-aot: this cubin's compiler is newer than this version knows",
        )
    stated = f"sm_{number}{'a' if specific else ''}"
    noted = _noted_targets(elf)
    if not specific and noted == {f"{stated}f"}:
        stated = f"{stated}f"
    elif noted and noted != {stated}:
        raise InvalidArtifactError(
            f"cubin is marked {stated}, its compiler's note says {', '.join(sorted(noted))}"
        )
    try:
        return Target.parse(stated)
    except TargetError as error:
        raise InvalidArtifactError(
            f"cubin is marked for no known target: {error.message}"
        ) from error


def _is_accelerated(elf: ElfFile) -> bool:
    """Whether `.nv.compat` marks an architecture-specific target, as ptxas does from CUDA 13 on."""
    compat = elf.find(_COMPAT_SECTION)
    if compat is None:
        return False
    accelerated = False
    for form, name, value in _attributes(elf.body(compat), _COMPAT_SECTION, _OF_TARGET):
        if name == _EICOMPAT_ACCELERATOR_TARGET and form == _EIFMT_BVAL:
            if value[0] > 1:
                raise InvalidArtifactError(f"cubin has the unknown accelerator target {value[0]}")
            accelerated = accelerated or value[0] == 1
    return accelerated


def toolkit_release(data: bytes) -> tuple[int, int] | None:
    """Major and minor number of the CUDA toolkit whose assembler made a cubin, None if not stated.

    Up to CUDA 12 files for targets up to sm_90a state it in the header's version, as 129; all
    others in a note, as `release 13.4`. Raises InvalidArtifactError for bytes that are no cubin.
    """
    elf = ElfFile(data)
    if elf.abi == _ABI_7:
        major, minor = divmod(int.from_bytes(data[_E_VERSION], "little"), 10)
        return (major, minor) if major else None
    stated = {match for text in _toolkit_notes(elf) for match in _RELEASE.findall(text)}
    if len(stated) != 1:
        return None
    ((major_text, minor_text),) = stated
    return int(major_text), int(minor_text)


def _noted_targets(elf: ElfFile) -> set[str]:
    """Targets on the command lines in the toolkit notes."""
    return {
        match.decode("ascii")
        for text in _toolkit_notes(elf)
        for match in _ARCH_OPTION.findall(text)
    }


def _toolkit_notes(elf: ElfFile) -> Iterator[bytes]:
    """The text of each note that the toolkit left; files of ABI 7 have none."""
    section = elf.find(_TOOLKIT_SECTION)
    if section is None or section.type != SectionType.NOTE:
        return
    body = elf.body(section)
    offset = 0
    while offset < len(body):
        owner_size, text_size, kind = _NOTE.unpack(cut(body, offset, _NOTE.size, "a note"))
        offset += _NOTE.size
        owner = cut(body, offset, owner_size, "a note's owner")
        offset += -(-owner_size // 4) * 4
        text = cut(body, offset, text_size, "a note's text")
        offset += -(-text_size // 4) * 4
        if (owner, kind) == _TOOLKIT_NOTE:
            yield text
