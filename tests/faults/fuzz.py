"""Mutations of records and manifests, the same ones for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["SEEDS", "mutated_manifests", "mutated_records"]

SEEDS = Path(__file__).parent / "seeds"

_JSON_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 1.0, 1e308, "", "x", "\x00", "é",
    "sm_90a", "sm_10a", "../../etc/passwd", [], {}, [[]], {"a": 1}, "0" * 64, "f" * 64,
)  # fmt: skip

_BYTES = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b".", b"e9", b"true", b"null",
          b" ", b"\n", b"\\u0000", b"\xff", b"\xc3\xa9", b"//", b"\x00", b"NaN",
          b"1.0")  # fmt: skip

_YAML_PIECES = (
    "-", "- ", ":", ": ", "?", "|", ">", "&a", "*a", "!!str ", "!x ", "{", "}", "[", "]", ",", "#",
    "'", '"', "\\", "%", "@", "`", "~", "<<: *a", "---\n", "...\n", "\t", "\n", "  ", "\0",
    "\u0085",
    "\u2028", "\ufeff", "null", "true", "Yes", "0x10", "0o7", "1e9", "12:30:45", ".inf", "9" * 400,
    "1-64", "64-1", "[" * 50, "{" * 50, "- " * 50, "a: " * 20, "é", "schema: 1\n", "routers:\n",
)  # fmt: skip


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree of JSON: its container and its key there."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(pairs):
        yield value, key
        if isinstance(child, dict | list):
            yield from _nodes(child)


def _change_tree(dice: random.Random, data: bytes) -> bytes:
    """Change one place of the tree, and write it as a record would be."""
    tree = json.loads(data)
    container, key = dice.choice(list(_nodes(tree)))
    kind = dice.randrange(5)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[dice.choice(("zzz", "", "schema", str(key) + "2"))] = dice.choice(_JSON_VALUES)
    elif kind == 2 and isinstance(container[key], int | str):
        value = container[key]
        container[key] = value + dice.choice((-1, 1, 8)) if isinstance(value, int) else value[:-1]
    elif kind == 3 and isinstance(container, list):
        container.append(container[key])
    else:
        container[key] = dice.choice(_JSON_VALUES)
    order = dice.random() < 0.8
    text = json.dumps(
        tree, sort_keys=order, separators=(",", ":"), ensure_ascii=dice.random() < 0.3
    )
    return text.encode("utf-8", "surrogatepass")


def _change_bytes(dice: random.Random, data: bytes) -> bytes:
    """One to four cuts, insertions, repetitions and changed bytes."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        start = dice.randrange(len(changed) + 1)
        end = start + dice.randint(0, 24)
        kind = dice.randrange(5)
        if kind == 0 and start < len(changed):
            changed[start] = dice.randrange(256)
        elif kind == 1:
            del changed[start:end]
        elif kind == 2:
            changed[start:start] = dice.choice(_BYTES)
        elif kind == 3:
            changed[start:start] = changed[start:end]
        elif digits := [i for i, byte in enumerate(changed) if 0x30 <= byte <= 0x39]:
            changed[dice.choice(digits)] = dice.randint(0x30, 0x39)
    return bytes(changed)


def mutated_records(sources: list[bytes], count: int, seed: int) -> Iterator[bytes]:
    """`count` byte strings, each a record changed in its tree or in its bytes."""
    dice = random.Random(seed)
    for _ in range(count):
        change = dice.choice((_change_tree, _change_bytes))
        data = change(dice, dice.choice(sources))
        if dice.random() < 0.1:
            data = _change_bytes(dice, data)
        yield data


def mutated_manifests(sources: list[str], count: int, seed: int) -> Iterator[str]:
    """`count` texts, each a manifest with lines or pieces of it changed."""
    dice = random.Random(seed)
    changes: tuple[Callable[[random.Random, str, list[str]], str], ...] = (
        _put_piece, _cut, _move_line, _drop_line, _splice, _change_word,
    )  # fmt: skip
    for _ in range(count):
        text = dice.choice(sources)
        for _ in range(dice.randint(1, 5)):
            text = dice.choice(changes)(dice, text, sources)
        yield text


def _put_piece(dice: random.Random, text: str, _: list[str]) -> str:
    place = dice.randrange(len(text) + 1)
    return text[:place] + dice.choice(_YAML_PIECES) * dice.choice((1, 1, 1, 40)) + text[place:]


def _cut(dice: random.Random, text: str, _: list[str]) -> str:
    place = dice.randrange(len(text) + 1)
    return text[:place] + text[place + dice.randint(1, 12) :]


def _move_line(dice: random.Random, text: str, _: list[str]) -> str:
    lines = text.splitlines(keepends=True) or [""]
    line = dice.choice(lines)
    lines.insert(dice.randrange(len(lines) + 1), dice.choice(("", " ", "  ")) + line)
    return "".join(lines)


def _drop_line(dice: random.Random, text: str, _: list[str]) -> str:
    lines = text.splitlines(keepends=True) or [""]
    del lines[dice.randrange(len(lines))]
    return "".join(lines)


def _splice(dice: random.Random, text: str, sources: list[str]) -> str:
    other = dice.choice(sources)
    return text[: dice.randrange(len(text) + 1)] + other[dice.randrange(len(other) + 1) :]


def _change_word(dice: random.Random, text: str, _: list[str]) -> str:
    words = text.split(" ")
    words[dice.randrange(len(words))] = dice.choice(_YAML_PIECES)
    return " ".join(words)
