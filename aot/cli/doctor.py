"""The command `doctor`."""

from __future__ import annotations

from pathlib import Path

import click

from ..environment import VARIABLES
from .command import HelpfulCommand, common_options, layer_option, store_option
from .output import Output

__all__ = ["doctor_command"]


@click.command(
    "doctor",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot doctor",
        "llbf16-aot doctor --store /opt/kernels --json",
    ),
    variables=tuple(VARIABLES),
)
@store_option
@layer_option
@common_options
@click.pass_obj
def doctor_command(
    output: Output, *, store_path: Path | None, layer_paths: tuple[Path, ...] | None
) -> None:
    """Tell what is here - versions, GPUs, store - and what is wrong.

    Exit code 1 only where something is broken: no GPU, no driver and no compiler are no faults.
    """
    from ..doctor import Status, diagnose
    from ..errors import AotError

    diagnosis = diagnose(store_path, layer_paths=layer_paths)
    broken = [f for f in diagnosis.findings if f.status is Status.BROKEN]
    if broken:
        output.fail(
            AotError(
                "; ".join(f"{f.section} {f.name}: {f.text}" for f in broken),
                hint=next((f.advice for f in broken if f.advice), ""),
            ),
            diagnosis.to_data(),
            str(diagnosis),
        )
    output.result(diagnosis.to_data(), str(diagnosis))
