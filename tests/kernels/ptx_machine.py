"""Runs a kernel's PTX without a GPU, on numpy arrays: slow, strict, warps in shuffled order.

Covers the part of PTX that the kernels use, and refuses the rest. Each warp runs as far as it can
before another, picked at random, goes on: data that is used without a barrier between is found
missing. Refused are accesses outside the tensors or unaligned ones, shared memory that is read
before it is written, stores to a block that has ended or whose mbarrier is raw, barriers that not
all reach, and blocks that end while bytes are still due to them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint64]
Lanes = npt.NDArray[Any]

WARP = 32
SHARED_WINDOW = 1 << 24
"""Shared addresses of the block of rank r of a cluster start at r of these."""

_INSTRUCTION = re.compile(
    r"(?:@(?P<not>!?)(?P<guard>%?\w+)\s+)?(?P<op>[a-z][\w.:]*)\s*(?P<rest>.*)"
)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_SHARED = re.compile(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];")
_ADDRESS = re.compile(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+))?\s*\]")

_TYPES: dict[str, Any] = {
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "b32": np.uint32, "u32": np.uint32,
    "s32": np.int32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f32": np.float32,
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8,
}  # fmt: skip


class MachineError(Exception):
    """What a GPU would get wrong, or what this machine does not know, with the line of PTX."""


@dataclass
class Mbarrier:
    """Pending arrivals and bytes of the present phase, and how many phases are complete."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


@dataclass
class Block:
    """One thread block: shared memory with what of it was written, barriers, mbarriers."""

    rank: int
    shared: npt.NDArray[np.uint8]
    written: npt.NDArray[np.bool_]
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    arrived: dict[int, int] = field(default_factory=dict)
    alive: int = 0


@dataclass
class Warp:
    """32 lanes: where each is, which have ended, which wait at a barrier."""

    block: Block
    number: int
    pc: npt.NDArray[np.int64]
    ended: npt.NDArray[np.bool_]
    waiting: npt.NDArray[np.bool_]
    lanes: slice
    copies: list[list[tuple[Lanes, npt.NDArray[np.uint8]]]] = field(default_factory=lambda: [[]])


class Memory:
    """Global memory: named regions, with gaps between, at 16-byte-aligned addresses."""

    def __init__(self) -> None:
        self._regions: list[tuple[int, npt.NDArray[np.uint8], bool]] = []
        self._next = 1 << 32

    def add(self, data: npt.NDArray[Any], *, writable: bool = False) -> int:
        """Place an array's bytes; returns the address. A writable region is written in place."""
        raw = data.reshape(-1).view(np.uint8)
        address = self._next
        self._regions.append((address, raw, writable))
        self._next = (address + raw.size + (1 << 20)) & ~0xFFFF
        return address

    def read(self, addresses: Lanes, size: int) -> npt.NDArray[np.uint8]:
        """The bytes of accesses to one region, one a row."""
        raw, places, _ = self._find(addresses, size)
        return raw[places]

    def write(self, addresses: Lanes, rows: npt.NDArray[np.uint8]) -> None:
        """Write the bytes of accesses to one region, one a row."""
        raw, places, writable = self._find(addresses, rows.shape[1])
        if not writable:
            raise MachineError(f"write at {int(addresses[0]):#x} to an input")
        raw[places] = rows

    def _find(self, addresses: Lanes, size: int) -> tuple[npt.NDArray[np.uint8], Lanes, bool]:
        if (addresses % size).any():
            raise MachineError(f"access of {size} bytes is not aligned")
        for start, raw, writable in self._regions:
            offsets = addresses - start
            if 0 <= offsets[0] < raw.size:
                if (offsets < 0).any() or (offsets + size > raw.size).any():
                    raise MachineError(f"access of {size} bytes beyond the end of a tensor")
                return raw, offsets[:, None] + np.arange(size), writable
        raise MachineError(f"access of {size} bytes at {int(addresses[0]):#x} outside the tensors")


class _BlockedError(Exception):
    """The warp's lanes stay where they are until another warp has done something."""


_Step = Callable[["_Run", Warp, npt.NDArray[np.int64]], None]


class Machine:
    """One kernel's PTX, parsed; `launch` runs a grid of it."""

    def __init__(self, ptx: str) -> None:
        text = re.sub(r"//[^\n]*", "", ptx)
        head, _, rest = text.partition(".entry")
        signature, _, body = rest.partition("\n{")
        self.params = re.findall(r"\.param\s+\.u(\d+)[^,)]*?(\w+)\s*[,)\n]", signature)
        reqntid = re.search(r"\.reqntid (\d+), 1, 1", signature)
        if reqntid is None:
            raise MachineError("no .reqntid")
        self.threads = int(reqntid[1])
        self.symbols: dict[str, int] = {}
        end = 1024  # what the system reserves
        for align, name, size in _SHARED.findall(body):
            end = -(-end // int(align)) * int(align)
            self.symbols[name] = end
            end += int(size)
        end = -(-end // 128) * 128
        for name in re.findall(r"\.extern \.shared \.align \d+ \.b8 (\w+)\[\];", head):
            self.symbols[name] = end
        self.static_end = end
        self.registers: dict[str, int] = {}
        self.steps: list[tuple[str, _Step]] = []
        self.labels: dict[str, int] = {}
        self._parse(body)

    def launch(
        self,
        *,
        grid: tuple[int, int, int],
        cluster: int,
        dynamic_shared_bytes: int,
        arguments: Sequence[int],
        memory: Memory,
        seed: int = 0,
    ) -> None:
        """Run every cluster of a grid, one after the other."""
        if len(arguments) != len(self.params):
            raise MachineError(f"{len(arguments)} arguments for {len(self.params)} parameters")
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(0, grid[0], cluster):
                    run = _Run(self, (x, y, z), cluster, dynamic_shared_bytes, arguments, memory)
                    run.execute(random.Random(seed + 7919 * y + z))

    # --- Parsing ------------------------------------------------------------------------------

    def _parse(self, body: str) -> None:
        # Labels of inline code are local to it; there is one such piece, which may stand often.
        pieces = re.split(r"(\{\{.*?\}\}|\{\n.*?\n\})", body, flags=re.S)
        lines: list[str] = []
        for number, piece in enumerate(pieces):
            if piece.startswith(("{{", "{\n")):
                piece = re.sub(r"\b(again|done)\b", rf"\1_{number}", piece.strip("{}"))
            lines.extend(piece.replace("\n\t", "\n").split("\n"))
        for line in ";\n".join(lines).split(";"):
            text = line.strip()
            while (label := re.match(r"([$\w]+):\s*", text)) is not None:
                self.labels[label[1]] = len(self.steps)
                text = text[label.end() :].strip()
            if text and text not in "{}" and not text.startswith("."):
                self.steps.append((text, self._step(text)))

    def _register(self, name: str) -> int:
        return self.registers.setdefault(name, len(self.registers))

    def _step(self, text: str) -> _Step:
        match = _INSTRUCTION.fullmatch(text)
        if match is None:
            raise MachineError(f"cannot read: {text}")
        parts = match["op"].split(".")
        operands = [o.strip() for o in _OPERAND.findall(match["rest"])]
        for length in range(len(parts), 0, -1):
            handler = _HANDLERS.get(".".join(parts[:length]))
            if handler is not None:
                break
        else:
            raise MachineError(f"unknown instruction: {text}")
        # Known registers keep their place; new ones get one when they are first met.
        for name in re.findall(r"%[a-z]+\d+|\bdone_\d+", text):
            self._register(name)
        action = handler(self, match["op"], operands)
        jumps = parts[0] in ("bra", "ret")
        blocks = parts[0] in ("bar", "barrier") and match["op"] not in _NO_WAIT
        guard = None if match["guard"] is None else self._register(match["guard"])
        negated = match["not"] == "!"

        def step(run: _Run, warp: Warp, lanes: npt.NDArray[np.int64]) -> None:
            chosen = lanes
            if guard is not None:
                held = run.registers[guard, warp.lanes][lanes] != 0
                chosen = lanes[held != negated]
            if not jumps and not blocks:
                if chosen.size:
                    action(run, warp, chosen)
                warp.pc[lanes] += 1
                return
            if guard is not None:
                warp.pc[np.setdiff1d(lanes, chosen)] += 1
            if chosen.size:
                action(run, warp, chosen)

        return step

    # --- Operands -----------------------------------------------------------------------------

    def reader(self, operand: str, type_: str) -> Callable[[_Run, Warp, Lanes], Lanes]:
        """Values of an operand in lanes, as a numpy array of a type."""
        dtype = _TYPES[type_]
        if operand in ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%cluster_ctarank"):
            return lambda run, warp, lanes: run.special(operand, warp, lanes).astype(dtype)
        if operand.startswith(("%", "done_")):
            place = self._register(operand)

            def read(run: _Run, warp: Warp, lanes: Lanes) -> Lanes:
                return _as(run.registers[place, warp.lanes][lanes], type_)

            return read
        if operand in self.symbols:
            address = self.symbols[operand]
            return lambda run, warp, lanes: np.full(lanes.size, address, dtype)
        if operand.startswith("0f"):
            bits = np.full(1, int(operand[2:], 16), np.uint64)
        else:
            bits = np.full(1, int(operand, 0) & (1 << 64) - 1, np.uint64)
        value = _as(bits, type_)
        return lambda run, warp, lanes: np.repeat(value, lanes.size)

    def writer(self, operand: str) -> Callable[[_Run, Warp, Lanes, Lanes], None]:
        """Stores values of lanes in a register, by their bits."""
        if operand == "_":
            return lambda run, warp, lanes, values: None
        place = self._register(operand)

        def write(run: _Run, warp: Warp, lanes: Lanes, values: Lanes) -> None:
            run.registers[place, warp.lanes][lanes] = _bits(values)

        return write

    def address(self, operand: str) -> Callable[[_Run, Warp, Lanes], Lanes]:
        match = _ADDRESS.fullmatch(operand)
        if match is None:
            raise MachineError(f"cannot read the address {operand}")
        base, offset = self.reader(match[1], "s64"), int(match[2] or 0)
        return lambda run, warp, lanes: base(run, warp, lanes) + offset


def _as(bits: Bits, type_: str) -> Lanes:
    dtype = np.dtype(_TYPES[type_])
    if dtype == np.bool_:
        return np.not_equal(bits, 0)
    unsigned: Lanes = bits.astype(f"u{dtype.itemsize}")
    values: Lanes = unsigned.view(dtype)
    return values


def _bits(values: Lanes) -> Bits:
    if values.dtype == np.bool_:
        return values.astype(np.uint64)
    return values.view(f"u{values.dtype.itemsize}").astype(np.uint64)


def _split(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{}").split(",")]


class _Run:
    """One cluster on its way."""

    def __init__(
        self,
        machine: Machine,
        origin: tuple[int, int, int],
        cluster: int,
        dynamic_shared_bytes: int,
        arguments: Sequence[int],
        memory: Memory,
    ) -> None:
        self.machine, self.origin, self.cluster = machine, origin, cluster
        self.arguments, self.memory = arguments, memory
        size = machine.static_end + dynamic_shared_bytes
        threads = machine.threads
        self.registers = np.zeros((len(machine.registers), threads * cluster), np.uint64)
        self.blocks = [
            Block(r, np.zeros(size, np.uint8), np.zeros(size, np.bool_), alive=threads)
            for r in range(cluster)
        ]
        self.cluster_arrived = 0
        self.cluster_releases = 0
        self.warps = [
            Warp(
                block,
                number,
                np.zeros(WARP, np.int64),
                np.zeros(WARP, np.bool_),
                np.zeros(WARP, np.bool_),
                slice(start := block.rank * threads + number * WARP, start + WARP),
            )
            for block in self.blocks
            for number in range(threads // WARP)
        ]

    def execute(self, rng: random.Random) -> None:
        left = list(self.warps)
        while left:
            progress = False
            rng.shuffle(left)
            for warp in left:
                progress = self._advance(warp) or progress
            left = [warp for warp in left if not warp.ended.all()]
            if left and not progress:
                raise MachineError(f"nobody can go on: {self._where(left[0])}")
        for block in self.blocks:
            for mbarrier in block.mbarriers.values():
                if mbarrier.bytes:
                    raise MachineError(f"block {block.rank} ended with {mbarrier.bytes} bytes due")

    def _advance(self, warp: Warp) -> bool:
        """Run a warp until it must wait; lanes that are behind go first."""
        progress = False
        while True:
            able = np.flatnonzero(~warp.ended & ~warp.waiting)
            if not able.size:
                return progress
            pc = int(warp.pc[able].min())
            lanes = able[warp.pc[able] == pc]
            text, step = self.machine.steps[pc]
            try:
                step(self, warp, lanes)
            except _BlockedError:
                return progress
            except MachineError as error:
                raise MachineError(f"{error} at: {text}") from error
            progress = True

    def _where(self, warp: Warp) -> str:
        pc = int(warp.pc[~warp.ended].min())
        return self.machine.steps[pc][0]

    def special(self, name: str, warp: Warp, lanes: Lanes) -> Lanes:
        if name == "%tid.x":
            return warp.number * WARP + lanes
        x, y, z = self.origin
        value = {
            "%ctaid.x": x + warp.block.rank,
            "%ctaid.y": y,
            "%ctaid.z": z,
            "%cluster_ctarank": warp.block.rank,
        }[name]
        return np.full(lanes.size, value)

    def shared_block(self, address: int, warp: Warp) -> tuple[Block, int]:
        rank, offset = divmod(int(address), SHARED_WINDOW)
        # Without mapa an address means the own block.
        block = warp.block if rank == 0 else self.blocks[rank - 1]
        return block, offset

    def read_shared(self, warp: Warp, addresses: Lanes, size: int) -> npt.NDArray[np.uint8]:
        """The bytes of accesses to shared memory of one block, one a row."""
        block, _ = self.shared_block(addresses[0], warp)
        places = self._shared_places(block, addresses, size)
        if not block.written[places].all():
            raise MachineError("shared memory is read before it is written")
        return block.shared[places]

    def write_shared(self, warp: Warp, addresses: Lanes, rows: npt.NDArray[np.uint8]) -> None:
        """Write the bytes of accesses to shared memory, one a row, of whichever block each."""
        ranks = addresses // SHARED_WINDOW
        for rank in np.unique(ranks):
            block, _ = self.shared_block(addresses[ranks == rank][0], warp)
            if block.alive == 0:
                raise MachineError(f"store to block {block.rank}, which has ended")
            places = self._shared_places(block, addresses[ranks == rank], rows.shape[1])
            block.shared[places] = rows[ranks == rank]
            block.written[places] = True

    def _shared_places(self, block: Block, addresses: Lanes, size: int) -> Lanes:
        offsets = addresses.astype(np.int64) % SHARED_WINDOW
        if (offsets % size).any():
            raise MachineError(f"shared access of {size} bytes is not aligned")
        if (offsets < 1024).any() or (offsets + size > block.shared.size).any():
            raise MachineError(f"shared access of {size} bytes is outside")
        return np.asarray(offsets[:, None] + np.arange(size))

    def mbarrier(self, warp: Warp, address: int) -> Mbarrier:
        block, offset = self.shared_block(address, warp)
        if offset not in block.mbarriers:
            raise MachineError(f"the mbarrier at {offset} of block {block.rank} is not initialised")
        return block.mbarriers[offset]

    def release(self, block: Block | None) -> None:
        """Let the lanes that wait at a barrier of a block, or of the cluster, go on."""
        for warp in self.warps:
            if block is None or warp.block is block:
                warp.pc[warp.waiting] += 1
                warp.waiting[:] = False


# --- Instructions -----------------------------------------------------------------------------

_Action = Callable[[_Run, Warp, Lanes], None]
_Handler = Callable[[Machine, str, list[str]], _Action]
_HANDLERS: dict[str, _Handler] = {}
_NO_WAIT = ("barrier.cluster.arrive", "barrier.cluster.arrive.relaxed", "bar.warp.sync")


def _handles(*names: str) -> Callable[[_Handler], _Handler]:
    def note(handler: _Handler) -> _Handler:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return note


def _refuse(op: str) -> NoReturn:
    raise MachineError(f"unknown form of an instruction: {op}")


_OPS: dict[str, Callable[..., Lanes]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "min": np.minimum,
    "max": np.maximum,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
}


@_handles("add", "sub", "and", "or", "xor", "min", "max", "not", "neg")
def _plain(machine: Machine, op: str, operands: list[str]) -> _Action:
    name, *_, type_ = op.split(".")
    write = machine.writer(operands[0])
    sources = [machine.reader(o, type_) for o in operands[1:]]
    function = _OPS[name]

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        with np.errstate(over="ignore"):
            write(run, warp, lanes, function(*(s(run, warp, lanes) for s in sources)))

    return action


@_handles("mul", "mad", "fma")
def _multiply(machine: Machine, op: str, operands: list[str]) -> _Action:
    parts = op.split(".")
    type_ = parts[-1]
    write = machine.writer(operands[0])
    sources = [machine.reader(o, type_) for o in operands[1:3]]
    wide = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}.get(type_, type_)
    third = (
        machine.reader(operands[3], wide if "wide" in parts else type_) if operands[3:] else None
    )
    if type_ == "f32" and parts[1] not in ("rn", "f32"):
        _refuse(op)

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        a, b = (s(run, warp, lanes) for s in sources)
        c = third(run, warp, lanes) if third is not None else None
        with np.errstate(over="ignore", invalid="ignore"):
            if type_ == "f32":
                exact = a.astype(np.float64) * b.astype(np.float64)
                result = (exact if c is None else exact + c).astype(np.float32)
            elif "wide" in parts:
                result = a.astype(_TYPES[wide]) * b.astype(_TYPES[wide])
                result = result if c is None else result + c
            elif "hi" in parts:
                result = ((a.astype(_TYPES[wide]) * b.astype(_TYPES[wide])) >> 32).astype(a.dtype)
            else:
                result = a * b if c is None else a * b + c
        write(run, warp, lanes, result)

    return action


@_handles("shl", "shr")
def _shift(machine: Machine, op: str, operands: list[str]) -> _Action:
    name, type_ = op.split(".")
    write, value = machine.writer(operands[0]), machine.reader(operands[1], type_)
    amount = machine.reader(operands[2], "u32")

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        a, n = value(run, warp, lanes), amount(run, warp, lanes).astype(np.int64)
        if (n >= a.dtype.itemsize * 8).any():
            raise MachineError("shift by the width or more")
        by = n.astype(a.dtype)
        write(run, warp, lanes, a << by if name == "shl" else a >> by)

    return action


@_handles("mov")
def _move(machine: Machine, op: str, operands: list[str]) -> _Action:
    type_ = op.split(".")[1]
    target, source = operands
    if source.startswith("{"):
        low, high = (machine.reader(o, "u32") for o in _split(source))
        width, write = int(type_[1:]) // 2, machine.writer(target)

        def pack(run: _Run, warp: Warp, lanes: Lanes) -> None:
            a, b = low(run, warp, lanes).astype(np.uint64), high(run, warp, lanes).astype(np.uint64)
            write(run, warp, lanes, a & np.uint64((1 << width) - 1) | b << np.uint64(width))

        return pack
    if target.startswith("{"):
        whole, width = machine.reader(source, type_), int(type_[1:]) // 2
        writes = [machine.writer(o) for o in _split(target)]

        def unpack(run: _Run, warp: Warp, lanes: Lanes) -> None:
            bits = _bits(whole(run, warp, lanes))
            for place, write in enumerate(writes):
                write(
                    run, warp, lanes, bits >> np.uint64(place * width) & np.uint64((1 << width) - 1)
                )

        return unpack
    read, put = machine.reader(source, type_), machine.writer(target)
    return lambda run, warp, lanes: put(run, warp, lanes, read(run, warp, lanes))


@_handles("cvt")
def _convert(machine: Machine, op: str, operands: list[str]) -> _Action:
    parts = op.split(".")
    write = machine.writer(operands[0])
    if parts[1:] == ["rn", "bf16x2", "f32"]:
        high, low = (machine.reader(o, "f32") for o in operands[1:])

        def pair(run: _Run, warp: Warp, lanes: Lanes) -> None:
            words = round_bf16(high(run, warp, lanes)) << 16 | round_bf16(low(run, warp, lanes))
            write(run, warp, lanes, words)

        return pair
    if parts[1] == "rn" and parts[2] in ("bf16", "f16") and parts[3] == "f32":
        value = machine.reader(operands[1], "f32")

        def narrow(run: _Run, warp: Warp, lanes: Lanes) -> None:
            given = value(run, warp, lanes)
            if parts[2] == "bf16":
                write(run, warp, lanes, round_bf16(given))
            else:
                write(run, warp, lanes, given.astype(np.float16).view(np.uint16))

        return narrow
    if parts[1:] == ["f32", "bf16"]:
        bits = machine.reader(operands[1], "u16")
        return lambda run, warp, lanes: write(
            run, warp, lanes, bits(run, warp, lanes).astype(np.uint32) << np.uint32(16)
        )
    if len(parts) != 3:
        _refuse(op)
    source, target = machine.reader(operands[1], parts[2]), _TYPES[parts[1]]
    return lambda run, warp, lanes: write(run, warp, lanes, source(run, warp, lanes).astype(target))


def round_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """The upper halves of fp32 values, rounded to nearest even."""
    bits = values.view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    rounded: npt.NDArray[np.uint32] = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return rounded


_COMPARE: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


@_handles("setp")
def _compare(machine: Machine, op: str, operands: list[str]) -> _Action:
    _, relation, *combined, type_ = op.split(".")
    write = machine.writer(operands[0])
    a, b = (machine.reader(o, type_) for o in operands[1:3])
    third = machine.reader(operands[3], "pred") if combined else None

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        found = _COMPARE[relation](a(run, warp, lanes), b(run, warp, lanes))
        if third is not None:
            other = third(run, warp, lanes)
            found = found & other if combined[0] == "and" else found | other
        write(run, warp, lanes, found)

    return action


@_handles("selp")
def _select(machine: Machine, op: str, operands: list[str]) -> _Action:
    type_ = op.split(".")[1]
    write = machine.writer(operands[0])
    a, b = (machine.reader(o, type_) for o in operands[1:3])
    chooser = machine.reader(operands[3], "pred")
    return lambda run, warp, lanes: write(
        run,
        warp,
        lanes,
        np.where(chooser(run, warp, lanes), a(run, warp, lanes), b(run, warp, lanes)),
    )


@_handles("prmt")
def _permute(machine: Machine, op: str, operands: list[str]) -> _Action:
    write = machine.writer(operands[0])
    a, b, order = (machine.reader(o, "u32") for o in operands[1:])

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        both = a(run, warp, lanes).astype(np.uint64)
        both = both | b(run, warp, lanes).astype(np.uint64) << np.uint64(32)
        selectors = order(run, warp, lanes).astype(np.uint64)
        result = np.zeros(lanes.size, np.uint64)
        for place in range(4):
            nibble = selectors >> np.uint64(4 * place) & np.uint64(15)
            if (nibble > 7).any():
                raise MachineError("prmt with sign replication")
            byte = both >> (nibble * np.uint64(8)) & np.uint64(255)
            result |= byte << np.uint64(8 * place)
        write(run, warp, lanes, result)

    return action


@_handles("ld.param")
def _load_parameter(machine: Machine, op: str, operands: list[str]) -> _Action:
    write = machine.writer(operands[0])
    names = [name for _, name in machine.params]
    match = re.fullmatch(r"\[(\w+)\]", operands[1])
    if match is None:
        _refuse(op)
    index = names.index(match[1])
    type_ = op.split(".")[-1]

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        value = np.full(lanes.size, run.arguments[index] & (1 << 64) - 1, np.uint64)
        write(run, warp, lanes, _as(value, type_))

    return action


@_handles("ld.global", "ld.shared")
def _load(machine: Machine, op: str, operands: list[str]) -> _Action:
    parts = op.split(".")
    targets = _split(operands[0])
    writes = [machine.writer(o) for o in targets]
    width = np.dtype(_TYPES[parts[-1]]).itemsize
    size, place = width * len(targets), machine.address(operands[1])

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        addresses = place(run, warp, lanes)
        if parts[1] == "global":
            rows = run.memory.read(addresses, size)
        else:
            rows = run.read_shared(warp, addresses, size)
        values = np.ascontiguousarray(rows).view(f"u{width}")
        for column, write in enumerate(writes):
            write(run, warp, lanes, values[:, column].copy())

    return action


def _rows(columns: list[Lanes]) -> npt.NDArray[np.uint8]:
    """The bytes of each lane's values, one after the other, a lane a row."""
    return np.stack([np.ascontiguousarray(c) for c in columns], axis=1).view(np.uint8)


@_handles("st.global", "st.shared")
def _store(machine: Machine, op: str, operands: list[str]) -> _Action:
    parts = op.split(".")
    type_ = parts[-1]
    place = machine.address(operands[0])
    sources = [machine.reader(o, type_) for o in _split(operands[1])]

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        rows = _rows([s(run, warp, lanes) for s in sources])
        if parts[1] == "global":
            run.memory.write(place(run, warp, lanes), rows)
        else:
            run.write_shared(warp, place(run, warp, lanes), rows)

    return action


@_handles("st.async")
def _store_async(machine: Machine, op: str, operands: list[str]) -> _Action:
    place, counter = machine.address(operands[0]), machine.address(operands[2])
    sources = [machine.reader(o, "u32") for o in _split(operands[1])]

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        rows = _rows([s(run, warp, lanes) for s in sources])
        run.write_shared(warp, place(run, warp, lanes), rows)
        for address in counter(run, warp, lanes):
            mbarrier = run.mbarrier(warp, int(address))
            mbarrier.bytes -= rows.shape[1]
            mbarrier.settle()

    return action


@_handles("cp.async")
def _copy_async(machine: Machine, op: str, operands: list[str]) -> _Action:
    if "commit_group" in op:
        return lambda run, warp, lanes: warp.copies.append([])
    if "wait_group" in op:
        keep = int(operands[0])

        def wait(run: _Run, warp: Warp, lanes: Lanes) -> None:
            # Copies land when they are waited for, and not before: the latest that a GPU may do it.
            done, warp.copies = (
                warp.copies[: len(warp.copies) - 1 - keep],
                warp.copies[len(warp.copies) - 1 - keep :],
            )
            for group in done:
                for addresses, rows in group:
                    run.write_shared(warp, addresses, rows)

        return wait
    target, source = machine.address(operands[0]), machine.address(operands[1])
    count = machine.reader(operands[3], "u32") if operands[3:] else None
    size = int(operands[2])

    def copy(run: _Run, warp: Warp, lanes: Lanes) -> None:
        given = np.full(lanes.size, size) if count is None else count(run, warp, lanes)
        if not np.isin(given, (0, size)).all():
            raise MachineError(f"a copy of a part of {size} bytes")
        rows = np.zeros((lanes.size, size), np.uint8)
        if given.any():
            rows[given > 0] = run.memory.read(source(run, warp, lanes)[given > 0], size)
        warp.copies[-1].append((target(run, warp, lanes), rows))

    return copy


@_handles("shfl")
def _shuffle(machine: Machine, op: str, operands: list[str]) -> _Action:
    kind = op.split(".")[2]
    write, value = machine.writer(operands[0].split("|")[0]), machine.reader(operands[1], "u32")
    amount = int(operands[2], 0)
    if operands[3:] != ["31", "-1"] or kind not in ("bfly", "idx"):
        _refuse(f"{op} {operands}")

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        if lanes.size != WARP:
            raise MachineError(f"{lanes.size} lanes at a shuffle of all")
        source = lanes ^ amount if kind == "bfly" else np.full(WARP, amount)
        write(run, warp, lanes, value(run, warp, lanes)[source])

    return action


@_handles("mma")
def _mma(machine: Machine, op: str, operands: list[str]) -> _Action:
    if op != "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32":
        _refuse(op)
    writes = [machine.writer(o) for o in _split(operands[0])]
    a, b = ([machine.reader(o, "u32") for o in _split(p)] for p in operands[1:3])
    c = [machine.reader(o, "f32") for o in _split(operands[3])]

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        if lanes.size != WARP:
            raise MachineError(f"{lanes.size} lanes at an mma")
        g, t = lanes // 4, lanes % 4
        left, right, sums = np.zeros((16, 16)), np.zeros((8, 16)), np.zeros((16, 8))
        for i, read in enumerate(a):
            for half, values in enumerate(_halves(read(run, warp, lanes))):
                left[g + 8 * (i % 2), 2 * t + half + 8 * (i // 2)] = values
        for i, read in enumerate(b):
            for half, values in enumerate(_halves(read(run, warp, lanes))):
                right[g, 2 * t + half + 8 * i] = values
        for i, read in enumerate(c):
            sums[g + 8 * (i // 2), 2 * t + i % 2] = read(run, warp, lanes)
        result = (left @ right.T + sums).astype(np.float32)
        for i, write in enumerate(writes):
            write(run, warp, lanes, result[g + 8 * (i // 2), 2 * t + i % 2])

    return action


def _halves(words: npt.NDArray[np.uint32]) -> tuple[Lanes, Lanes]:
    low = (words << np.uint32(16)).view(np.float32)
    return low, (words & np.uint32(0xFFFF0000)).view(np.float32)


@_handles("ldmatrix")
def _load_matrix(machine: Machine, op: str, operands: list[str]) -> _Action:
    targets = _split(operands[0])
    if f".x{len(targets)}." not in op or ".trans" in op:
        _refuse(op)
    writes, place = [machine.writer(o) for o in targets], machine.address(operands[1])

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        if lanes.size != WARP:
            raise MachineError(f"{lanes.size} lanes at an ldmatrix")
        addresses = place(run, warp, lanes)
        for i, write in enumerate(writes):
            rows = run.read_shared(warp, addresses[8 * i : 8 * i + 8], 16).view(np.uint32)
            write(run, warp, lanes, rows[lanes // 4, lanes % 4])

    return action


@_handles("mapa.shared::cluster")
def _map_address(machine: Machine, op: str, operands: list[str]) -> _Action:
    write, address = machine.writer(operands[0]), machine.reader(operands[1], "u32")
    rank = machine.reader(operands[2], "u32")

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        ranks = rank(run, warp, lanes)
        if (ranks >= run.cluster).any():
            raise MachineError(f"rank {int(ranks.max())} of a cluster of {run.cluster}")
        write(run, warp, lanes, address(run, warp, lanes) + (ranks + 1) * np.uint32(SHARED_WINDOW))

    return action


@_handles("mbarrier.init")
def _init_mbarrier(machine: Machine, op: str, operands: list[str]) -> _Action:
    place, count = machine.address(operands[0]), machine.reader(operands[1], "u32")

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        for address, n in zip(place(run, warp, lanes), count(run, warp, lanes), strict=True):
            block, offset = run.shared_block(int(address), warp)
            block.mbarriers[offset] = Mbarrier(int(n), int(n))

    return action


@_handles("mbarrier.arrive.expect_tx")
def _arrive_expecting(machine: Machine, op: str, operands: list[str]) -> _Action:
    place, count = machine.address(operands[1]), machine.reader(operands[2], "u32")

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        for address, n in zip(place(run, warp, lanes), count(run, warp, lanes), strict=True):
            mbarrier = run.mbarrier(warp, int(address))
            mbarrier.pending -= 1
            mbarrier.bytes += int(n)
            mbarrier.settle()

    return action


@_handles("mbarrier.try_wait")
def _try_wait(machine: Machine, op: str, operands: list[str]) -> _Action:
    write, place = machine.writer(operands[0]), machine.address(operands[1])
    parity = machine.reader(operands[2], "u32")

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        for address, wanted in zip(place(run, warp, lanes), parity(run, warp, lanes), strict=True):
            # Complete is the phase of this parity: the present one has the other.
            if run.mbarrier(warp, int(address)).phase % 2 == wanted:
                raise _BlockedError
        write(run, warp, lanes, np.ones(lanes.size, np.bool_))

    return action


@_handles("bar.sync", "barrier.sync")
def _block_barrier(machine: Machine, op: str, operands: list[str]) -> _Action:
    number = int(operands[0])
    if operands[1:]:
        _refuse(op)

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        block = warp.block
        block.arrived[number] = block.arrived.get(number, 0) + lanes.size
        warp.waiting[lanes] = True
        if block.arrived[number] == run.machine.threads:
            block.arrived[number] = 0
            run.release(block)

    return action


@_handles("barrier.cluster.arrive")
def _cluster_arrive(machine: Machine, op: str, operands: list[str]) -> _Action:
    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        run.cluster_arrived += lanes.size
        if run.cluster_arrived > run.machine.threads * run.cluster:
            raise MachineError("more threads arrive at the cluster's barrier than there are")

    return action


@_handles("barrier.cluster.wait")
def _cluster_wait(machine: Machine, op: str, operands: list[str]) -> _Action:
    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        if run.cluster_arrived != run.machine.threads * run.cluster:
            raise _BlockedError
        warp.pc[lanes] += 1

    return action


@_handles("bra")
def _branch(machine: Machine, op: str, operands: list[str]) -> _Action:
    label = operands[0]

    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        warp.pc[lanes] = run.machine.labels[label]

    return action


@_handles("ret")
def _return(machine: Machine, op: str, operands: list[str]) -> _Action:
    def action(run: _Run, warp: Warp, lanes: Lanes) -> None:
        if any(warp.copies):
            raise MachineError("a warp ends while its copies are under way")
        warp.ended[lanes] = True
        warp.block.alive -= lanes.size

    return action


@_handles("bar.warp.sync", "griddepcontrol", "fence")
def _nothing(machine: Machine, op: str, operands: list[str]) -> _Action:
    # Lanes of a warp run together here: what is behind goes first.
    return lambda run, warp, lanes: None
