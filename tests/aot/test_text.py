"""Text for people: tables, sizes, ranges."""

from __future__ import annotations

import pytest
from llbf16_aot.text import numbers, size, table


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (6872, "6.7 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_sizes_are_in_iec_units(size_bytes: int, text: str) -> None:
    """Catches powers of ten under the names of powers of two, and 1024.0 KiB."""
    assert size(size_bytes) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [((), ""), ((3,), "3"), ((1, 2, 3, 5), "1-3, 5"), ((16, 9, 8, 8), "8-9, 16")],
)
def test_numbers_are_told_as_ranges(values: tuple[int, ...], text: str) -> None:
    """Catches ranges that lose a number, or that join what is not next to each other."""
    assert numbers(values) == text


def test_a_table_lines_up_and_leaves_no_white_space_at_line_ends() -> None:
    """Catches columns that are narrower than a cell, and golden files that editors change."""
    text = table(("a", "long name"), [("wide cell", ""), ("x", "y")])
    assert text == "a          long name\nwide cell\nx          y"
