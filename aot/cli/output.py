"""Output of a command: data on stdout, as text or as one JSON object, all else on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

import click

from ..errors import AotError

__all__ = ["JSON_SCHEMA", "Output", "color_from", "error_data", "silence_stdout"]

JSON_SCHEMA = 1
"""The number of the JSON output's form, in every object."""


def color_from(environ: Mapping[str, str]) -> bool | None:
    """What the environment says of colour, NO_COLOR first; None: ask the terminal."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return None


class Output:
    """Where and how one run of the program writes."""

    def __init__(self) -> None:
        self.json = False
        self.quiet = False
        self.verbosity = 0
        self.color = color_from(os.environ)
        self._printed = False
        self._broken = False

    def result(self, data: Mapping[str, object], text: str) -> None:
        """Print a command's data, in the form that was asked for."""
        if self.json:
            self._print_json(data)
        elif text:
            self.show(text)

    def show(self, text: str) -> None:
        """Print text on stdout as it is; raises AotError where stdout cannot be written."""
        try:
            click.echo(text, color=self.color)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._broken = True
            silence_stdout()
            raise AotError(
                f"cannot write to standard output: {error.strerror}",
                hint="send the output to a file system that has room",
            ) from error

    def fail(self, error: AotError, data: Mapping[str, object], text: str) -> NoReturn:
        """Print what a command found although it failed, and raise the error."""
        try:
            self.result({**data, "error": error_data(error)} if self.json else data, text)
        except AotError as lost:
            # Told besides: the command's own failure decides on the exit code.
            self.error(lost)
        raise error

    def note(self, text: str) -> None:
        """Tell something on stderr, unless the user wants quiet."""
        if not self.quiet:
            click.echo(text, err=True, color=self.color)

    def warn(self, text: str) -> None:
        """Tell on stderr what may be wrong, unless the user wants quiet."""
        self.note(f"{click.style('warning:', fg='yellow', bold=True)} {text}")

    def error(self, error: AotError) -> None:
        """Tell what went wrong: on stderr as text, or on stdout as the run's one JSON object.

        Where standard output cannot be written, on stderr whatever was asked for.
        """
        if self.json and not self._broken:
            try:
                if not self._printed:
                    self._print_json({"error": error_data(error)})
                return
            except AotError as lost:
                self.error(lost)
        label = click.style("error:", fg="red", bold=True)
        click.echo(f"{label} {error.message}", err=True, color=self.color)
        if error.hint:
            label = click.style("hint:", fg="cyan", bold=True)
            click.echo(f"{label} {error.hint}", err=True, color=self.color)

    @property
    def shows_progress(self) -> bool:
        """Whether a line that changes makes sense: a terminal reads it, and nobody wants quiet."""
        return not self.quiet and not os.environ.get("CI") and sys.stderr.isatty()

    def _print_json(self, data: Mapping[str, object]) -> None:
        self.show(_laid_out({"schema": JSON_SCHEMA, **data}))
        self._printed = True


def _laid_out(data: Mapping[str, object]) -> str:
    import msgspec

    # json itself takes seconds for the list of a large store.
    try:
        encoded = msgspec.json.encode(data)
    except UnicodeEncodeError:  # a path with bytes that are no text
        encoded = b""
    if encoded and encoded.isascii():
        return msgspec.json.format(encoded, indent=2).decode("ascii")
    # ASCII goes through every stream.
    return json.dumps(msgspec.to_builtins(data), indent=2)


def error_data(error: AotError) -> dict[str, str]:
    """An error as plain values, ready for JSON."""
    return {"code": error.code, "message": error.message, "hint": error.hint}


def silence_stdout() -> None:
    """Send what is still buffered nowhere: the interpreter flushes once more when it ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
