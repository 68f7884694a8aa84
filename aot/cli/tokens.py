"""Numbers of tokens on the command line: `1-16`, `24`, or a list of both."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..errors import UsageError

__all__ = ["parse_tokens", "tokens_option"]

Function = TypeVar("Function", bound=Callable[..., Any])

_PART = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def parse_tokens(text: str) -> tuple[int, ...]:
    """The numbers of `1-4,8`, in order; raises UsageError naming the faulty part."""
    from ..problem import FEW_TOKENS, OPERAND_TOKENS

    largest = max(OPERAND_TOKENS.values())

    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= (largest if first == last else FEW_TOKENS):
            raise UsageError(
                f"--tokens has {part.strip()!r}, must be numbers from 1 to {largest}, or ranges up "
                f"to {FEW_TOKENS}",
                hint="write for example --tokens 1-16,32",
            )
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def tokens_option(function: Function) -> Function:
    """Give a command --tokens, as the parameter `tokens`: None where it is left out."""
    return click.option(
        "--tokens",
        metavar="LIST",
        callback=_tokens,
        help="Only these numbers of tokens, as 1-16,32; default: those of the manifests.",
    )(function)


def _tokens(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    return None if value is None else parse_tokens(value)
