"""Text for people: tables, sizes, ranges and short digests, in one form everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["counted", "duration", "nearest", "numbers", "short", "size", "table"]

SHORT_DIGEST = 12
"""Digits of a digest that are shown: enough to tell the entries of any real store apart."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """What somebody who wrote this word may have meant; None where nothing is close."""
    import difflib

    # Nothing that is known is nearly as long as what a broken file can hold.
    close = difflib.get_close_matches(word[:64], list(known), n=1)
    return close[0] if close else None


def short(digest: str) -> str:
    """The beginning of a digest, which every command accepts in its place."""
    return digest[:SHORT_DIGEST]


def size(size_bytes: int) -> str:
    """A size in IEC units, with one decimal from 1 KiB on."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def duration(seconds: float) -> str:
    """A time in its largest whole unit: `45 seconds`, `3 hours`, `90 days`."""
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return counted(int(seconds // length), unit)
    return counted(int(seconds), "second")


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 artifact`, `3 artifacts`, `2 entries`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}s"


def numbers(values: Iterable[int]) -> str:
    """Whole numbers as ranges: `1-4, 8`."""
    spans: list[list[int]] = []
    for value in sorted(set(values)):
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns under a header, parted by two spaces, without white space at the ends of lines."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    line = "  ".join(f"{{:{width}}}" for width in widths).format
    return "\n".join([line(*cells).rstrip() for cells in lines])
