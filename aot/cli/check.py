"""The command `check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .command import HelpfulCommand, common_options, store_option
from .opened import hint_command, open_store, quoted, resolve
from .output import Output

if TYPE_CHECKING:
    from ..check import Checked

__all__ = ["check_command"]


@click.command(
    "check",
    cls=HelpfulCommand,
    examples=("llbf16-aot check", "llbf16-aot check 3f2a9c1b --json"),
    variables=("LLBF16_AOT_STORE", "LLBF16_AOT_JOBS", "LLBF16_AOT_COMPILE_TIMEOUT_S"),
)
@click.argument("digests", metavar="[KEY...]", nargs=-1)
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Run N compiler processes at once; default: LLBF16_AOT_JOBS, else one for each core.",
)
@store_option
@common_options
@click.pass_obj
def check_command(
    output: Output, *, digests: tuple[str, ...], jobs: int | None, store_path: Path | None
) -> None:
    """Build entries anew and compare the bytes with the stored ones.

    Without KEY all entries are checked; nothing is written. Names the ELF sections that differ.
    Exit code 4 if one differs or cannot be used, else 1 if one could not be compared. Needs the
    compiler.
    """
    import msgspec

    from ..check import Verdict, check
    from ..errors import AotError, InvalidArtifactError
    from ..text import counted, short, table

    store = open_store(store_path)
    known = store.digests()
    chosen = tuple(resolve(d, known, store=store) for d in digests) or known
    found = check(store, chosen, jobs=jobs)
    rows = [(short(one.digest), one.verdict.value, str(one.key or ""), one.detail) for one in found]
    text = table(("artifact", "rebuilt", "kernel", "what differs, or why not"), rows)
    data = {"store": str(store.root), "entries": msgspec.to_builtins(found)}
    wrong = _of(found, Verdict.DIFFERENT, Verdict.UNUSABLE)
    if wrong:
        output.fail(
            InvalidArtifactError(
                f"{len(wrong)} of {counted(len(found), 'entry')} of {quoted(store)} are not what "
                "their inputs give",
                hint=f"build them anew with: {hint_command(store, 'build', 'MANIFEST', '--force')}",
            ),
            data,
            text,
        )
    open_ = _of(found, Verdict.INCOMPARABLE, Verdict.FAILED)
    if open_:
        output.fail(
            AotError(
                f"{len(open_)} of {counted(len(found), 'entry')} could not be compared",
                hint=f"bring them up to date with: {hint_command(store, 'build', 'MANIFEST')}",
            ),
            data,
            text,
        )
    if not found:
        output.note(f"the store at {quoted(store)} has no entries")
    output.result(data, text if found else "")


def _of(found: tuple[Checked, ...], *verdicts: object) -> list[Checked]:
    return [one for one in found if one.verdict in verdicts]
