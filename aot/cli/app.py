"""The program `llbf16-aot`: finds the command, and turns every ending into a message and a code.

Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 integrity or trust, 5 store full or
unwritable, 6 lock time-out, and 128 plus the signal's number for an end by SIGHUP, SIGINT, SIGPIPE
or SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

import click

from ..errors import AotError, UsageError
from ..text import nearest
from .command import PrintsHelp
from .output import Output, silence_stdout

__all__ = ["PROGRAM", "main"]

PROGRAM = "llbf16-aot"

_COMMANDS = {
    "build": "build",
    "plan": "build",
    "list": "store",
    "show": "store",
    "explain": "explain",
    "verify": "store",
    "check": "check",
    "prune": "prune",
    "rm": "prune",
    "pin": "prune",
    "path": "store",
    "doctor": "doctor",
    "schema": "schema",
    "tune": "tune",
    "bench": "bench",
}
"""Each command and the module that holds it, in the order in which the help lists them."""


class _Terminated(BaseException):
    """A signal asked the process to end; no Exception, so nothing takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Program(PrintsHelp, click.Group):
    """A group that imports a command's module when it is asked for the command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f".{_COMMANDS[cmd_name]}", __package__)
        command = getattr(module, f"{cmd_name}_command")
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not ctx.resilient_parsing:
            raise UsageError(
                f"no such command {args[0]!r}",
                hint=_did_you_mean(args[0], _COMMANDS) or f"run '{PROGRAM} --help'",
            )
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from ..toolchain import builder_version

        ctx.ensure_object(Output).show(f"{PROGRAM} {builder_version()}")
        ctx.exit()


@click.group(
    cls=_Program,
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=(
        "Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 integrity or trust, "
        "5 store full or unwritable, 6 lock time-out."
    ),
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
@click.pass_context
def _program(ctx: click.Context) -> None:
    """Compile router GEMM kernels ahead of time and keep them, checked, in a store.

    Needs no GPU, no driver and no CUDA toolkit to build.
    """
    if ctx.invoked_subcommand is None:
        ctx.ensure_object(Output).show(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; never raises, never shows a traceback unasked."""
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments), Output())
    except BrokenPipeError:
        silence_stdout()
        return 128 + signal.SIGPIPE


def _main(given: list[str], output: Output) -> int:
    # Known before the options are parsed, because parsing them can fail.
    output.json = "--json" in given
    if hasattr(sys.stdout, "reconfigure"):
        # Paths are bytes: one that is not UTF-8 is printed as it is.
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        with _signals():
            _run(given, output)
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except AotError as error:
        output.error(error)
        return error.exit_code
    except click.ClickException as error:
        output.error(_usage_error(error))
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        output.note("interrupted")
        return 128 + signal.SIGINT
    except _Terminated as ending:
        output.note("terminated")
        return 128 + ending.number
    except BrokenPipeError:
        raise
    except Exception as error:
        if output.verbosity:
            traceback.print_exc()
        output.error(
            AotError(
                f"internal error: {type(error).__name__}: {error}",
                hint=f"run the command again with -v and report it with '{PROGRAM} doctor --json'",
            )
        )
        return 1
    return 0


def _run(given: list[str], output: Output) -> None:
    with (
        _program.make_context(PROGRAM, given, obj=output, color=output.color) as ctx,
        _logging(output),
    ):
        _program.invoke(ctx)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that compiler processes are ended first."""

    def terminate(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise _Terminated(number)

    before = {}
    with contextlib.suppress(ValueError):  # not in the main thread: the embedding program decides
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Handler(logging.Handler):
    """Shows the package's log on stderr, in the form of the program's other messages."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self._output.warn(record.getMessage())
        else:
            self._output.note(record.getMessage())


@contextlib.contextmanager
def _logging(output: Output) -> Iterator[None]:
    logger = logging.getLogger(__package__.partition(".")[0])
    handler = _Handler(output)
    before = logger.level
    logger.addHandler(handler)
    # The options are parsed when a command is invoked: the level is looked up at each message.
    handler.addFilter(lambda record: record.levelno >= _level(output))
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _level(output: Output) -> int:
    return (logging.WARNING, logging.INFO, logging.DEBUG)[min(output.verbosity, 2)]


def _usage_error(error: click.ClickException) -> UsageError:
    """A message of click in the form of ours, with what may have been meant."""
    command = (
        error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else PROGRAM
    )
    hint = f"run '{command} --help'"
    message = error.format_message()
    if isinstance(error, click.NoSuchOption):
        message = f"no such option {error.option_name}"
        known = [] if error.ctx is None else _options(error.ctx.command)
        hint = _did_you_mean(error.option_name, known) or hint
    elif isinstance(error, click.MissingParameter) and error.param is not None:
        message = f"missing {error.param.human_readable_name}"
    return UsageError(message[:1].lower() + message[1:].rstrip("."), hint=hint)


def _options(command: click.Command) -> list[str]:
    names = ["--help"]
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            names += [*parameter.opts, *parameter.secondary_opts]
    return names


def _did_you_mean(word: str, known: Sequence[str] | dict[str, str]) -> str:
    close = nearest(word, known)
    return "" if close is None else f"did you mean {close}?"
