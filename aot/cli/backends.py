"""Kernel families on the command line: `--backend dotprod --backend splitk`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..errors import UsageError
from ..text import nearest

__all__ = ["backend_option", "parse_backends"]

Function = TypeVar("Function", bound=Callable[..., Any])


def parse_backends(names: tuple[str, ...]) -> tuple[str, ...]:
    """These families, each once, or none where all are; raises UsageError for an unknown one."""
    from ..backends import BACKENDS

    families = [name for name in BACKENDS if name != "probe"]
    for name in names:
        if name not in families:
            meant = nearest(name, families)
            raise UsageError(
                f"--backend is {name!r}, must be one of {', '.join(families)}",
                hint="leave it out for all" if meant is None else f"did you mean {meant}?",
            )
    # All of them are what is tried without the option.
    return () if set(names) == set(families) else tuple(dict.fromkeys(names))


def backend_option(function: Function) -> Function:
    """Give a command --backend, as the parameter `backends`: empty where it is left out."""
    return click.option(
        "--backend",
        "backends",
        multiple=True,
        metavar="NAME",
        callback=lambda _, __, value: parse_backends(value),
        help="Only candidates of this kernel family, as splitk; repeatable; default: all.",
    )(function)
