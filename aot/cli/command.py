"""The base of every command: common options, and help with examples and environment variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ..environment import VARIABLES
from ..errors import UsageError
from .output import Output

__all__ = ["HelpfulCommand", "PrintsHelp", "common_options", "layer_option", "store_option"]

Function = TypeVar("Function", bound=Callable[..., Any])


class PrintsHelp(click.Command):
    """A command whose help goes where its output does, so that a full disk is told of alike."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """The option --help."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _print_help
        return option


class HelpfulCommand(PrintsHelp):
    """A command whose help ends with examples and with the environment variables that it reads."""

    def __init__(
        self, *args: Any, examples: Sequence[str], variables: Sequence[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self.variables = tuple(variables)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the two sections, each line as it stands."""
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")
        if self.variables:
            with formatter.section("Environment"):
                formatter.write_dl([(name, VARIABLES[name]) for name in self.variables])


def common_options(function: Function) -> Function:
    """Give a command --json, -q, -v and --color, which set up the run's Output."""
    for decorate in (
        click.option(
            "--color/--no-color",
            default=None,
            expose_value=False,
            callback=_set_color,
            help="Colour the output or not; default: as NO_COLOR, FORCE_COLOR and terminal say.",
        ),
        click.option(
            "-v",
            "--verbose",
            count=True,
            expose_value=False,
            callback=_set_verbosity,
            help="Tell more on stderr; twice for debugging.",
        ),
        click.option(
            "-q",
            "--quiet",
            is_flag=True,
            expose_value=False,
            callback=_set_quiet,
            help="Tell nothing on stderr but errors.",
        ),
        click.option(
            "--json",
            is_flag=True,
            expose_value=False,
            callback=_set_json,
            help="Print one JSON object instead of text.",
        ),
    ):
        function = decorate(function)
    return function


def store_option(function: Function) -> Function:
    """Give a command --store, as the parameter `store_path`."""
    return click.option(
        "--store",
        "store_path",
        metavar="PATH",
        callback=_store_path,
        help="The store; default: LLBF16_AOT_STORE, else the user's cache directory.",
    )(function)


def layer_option(function: Function) -> Function:
    """Give a command --layer, as the parameter `layer_paths`: None where it is not given."""
    return click.option(
        "--layer",
        "layer_paths",
        metavar="PATH",
        multiple=True,
        callback=_layer_paths,
        help="A read-only store below the store; repeatable; default: LLBF16_AOT_LAYERS.",
    )(function)


def _layer_paths(
    _: click.Context, __: click.Parameter, values: tuple[str, ...]
) -> tuple[Path, ...] | None:
    if "" in values:
        raise UsageError("--layer is empty", hint="name a directory, or leave the option out")
    return tuple(Path(value).absolute() for value in values) or None


def _store_path(_: click.Context, __: click.Parameter, value: str | None) -> Path | None:
    if value == "":
        # An unset variable in a script: the present directory is never what was meant.
        raise UsageError("--store is empty", hint="name a directory, or leave the option out")
    # A path that somebody types counts from where they are; the store itself wants it absolute.
    return None if value is None else Path(value).absolute()


def _print_help(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.ensure_object(Output).show(ctx.get_help())
        ctx.exit()


def _set_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.ensure_object(Output).json = value


def _set_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.ensure_object(Output).quiet = value


def _set_verbosity(ctx: click.Context, _: click.Parameter, value: int) -> None:
    ctx.ensure_object(Output).verbosity = value


def _set_color(ctx: click.Context, _: click.Parameter, value: bool | None) -> None:
    output = ctx.ensure_object(Output)
    if value is not None:
        output.color = value
    # Help and click's own messages ask the context.
    ctx.color = output.color
