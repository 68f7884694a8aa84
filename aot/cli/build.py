"""The commands `build` and `plan`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .backends import backend_option
from .command import HelpfulCommand, common_options, layer_option, store_option
from .opened import STORE_VARIABLES, open_below, open_store
from .output import Output

if TYPE_CHECKING:
    from ..builder import BuildPlan, Event
    from ..layers import ArtifactSource
    from ..manifest import Manifest
    from ..store import Store

__all__ = ["build_command", "plan_command"]

Function = TypeVar("Function", bound=Callable[..., Any])


def _plan_options(function: Function) -> Function:
    for decorate in (
        click.option(
            "--force", is_flag=True, help="Compile what the store has and is up to date, too."
        ),
        layer_option,
        store_option,
        click.option(
            "--target",
            "targets",
            metavar="TARGET",
            multiple=True,
            help="Build for this target, as sm_90a, in place of the manifests' own; repeatable.",
        ),
        click.argument("manifests", metavar="MANIFEST...", nargs=-1, required=True),
    ):
        function = decorate(function)
    return function


@click.command(
    "build",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot build dsv4",
        "llbf16-aot build my-routers.yaml --target sm_90a --store /opt/kernels",
        "llbf16-aot build dsv4 --dry-run",
        "llbf16-aot build dsv4 --probes --target sm_90a",
        "llbf16-aot build all-routers --candidates --target sm_90a",
    ),
    variables=(*STORE_VARIABLES, "LLBF16_AOT_JOBS", "LLBF16_AOT_COMPILE_TIMEOUT_S"),
)
@_plan_options
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Run N compiler processes at once; default: LLBF16_AOT_JOBS, else one for each core.",
)
@click.option(
    "--candidates",
    is_flag=True,
    help="Compile every tile that `tune` measures for these routers, not what a table chooses.",
)
@backend_option
@click.option(
    "--probes",
    is_flag=True,
    help="Compile the two kernels that `bench` measures with, too; --candidates always does.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@click.option("--no-progress", is_flag=True, help="Show no progress line on the terminal.")
@common_options
@click.pass_obj
def build_command(
    output: Output,
    *,
    manifests: tuple[str, ...],
    targets: tuple[str, ...],
    store_path: Path | None,
    layer_paths: tuple[Path, ...] | None,
    force: bool,
    jobs: int | None,
    candidates: bool,
    backends: tuple[str, ...],
    probes: bool,
    dry_run: bool,
    no_progress: bool,
) -> None:
    """Compile what manifests need and the store lacks; prove coverage.

    MANIFEST is a path, or the name of a manifest that comes with the package. The build ends with
    a table of every router, number of tokens and target with the artifact that serves it; a gap
    fails it. Needs no GPU.
    """
    from ..builder import execute, rehearse
    from ..errors import AotError, UsageError

    if backends and not candidates:
        raise UsageError(
            "--backend without --candidates: a tuning table chooses among all families",
            hint="add --candidates, or name a table in the manifest's field tuning",
        )
    store, layers = open_store(store_path), open_below(layer_paths)
    source = _source(store, layers)
    loaded, plan = _plan(
        manifests,
        targets=targets,
        source=source,
        force=force,
        candidates=candidates,
        backends=backends,
        probes=probes,
    )
    if not candidates:
        _warn_of_other_tuning(output, loaded)
    if dry_run:
        try:
            rehearse(plan, store=source).check_coverage()
        except AotError as error:
            output.fail(error, plan.to_data(), str(plan))
        output.result(plan.to_data(), str(plan))
        return
    if plan.work:
        # Before minutes of compiling whose results could not be kept.
        store.prepare()
    progress = _Progress(len(plan.work), shown=output.shows_progress and not no_progress)
    try:
        report = execute(plan, store=store, layers=layers, jobs=jobs, on_event=progress)
    finally:
        progress.clear()
    for result in report.refused if candidates else ():
        reason = "" if result.error is None else result.error.message
        output.note(f"no candidate: {result.item.key}: {reason}")
    try:
        if candidates:
            report.check_candidates()
        else:
            report.check()
    except AotError as error:
        output.fail(error, report.to_data(), str(report))
    output.result(report.to_data(), str(report))


@click.command(
    "plan",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot plan dsv4",
        "llbf16-aot plan my-routers.yaml --target sm_100a --json",
    ),
    variables=STORE_VARIABLES,
)
@_plan_options
@common_options
@click.pass_obj
def plan_command(
    output: Output,
    *,
    manifests: tuple[str, ...],
    targets: tuple[str, ...],
    store_path: Path | None,
    layer_paths: tuple[Path, ...] | None,
    force: bool,
) -> None:
    """Show what a build would do, and what would serve which problem.

    MANIFEST is a path, or the name of a manifest that comes with the package.
    """
    source = _source(open_store(store_path), open_below(layer_paths))
    loaded, plan = _plan(manifests, targets=targets, source=source, force=force)
    _warn_of_other_tuning(output, loaded)
    compiler = "not installed" if plan.compiler is None else _versions(plan.compiler)
    text = f"store: {plan.store}\ncompiler: {compiler}\n\n{plan}\n\n{plan.coverage_text()}"
    output.result(plan.to_data(), text)


def _versions(compiler: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in compiler.items())


def _plan(
    names: tuple[str, ...],
    *,
    targets: tuple[str, ...],
    source: ArtifactSource,
    force: bool,
    candidates: bool = False,
    backends: tuple[str, ...] = (),
    probes: bool = False,
) -> tuple[tuple[Manifest, ...], BuildPlan]:
    from ..candidates import plan_candidates
    from ..manifest import Manifest
    from ..plan import plan_build

    manifests = tuple(Manifest.load(name) for name in names)
    if candidates:
        return manifests, plan_candidates(
            *manifests, store=source, targets=targets, force=force, backends=backends
        )
    return manifests, plan_build(
        *manifests, store=source, targets=targets, force=force, probes=probes
    )


def _source(store: Store, layers: tuple[Store, ...]) -> ArtifactSource:
    """The store with its layers, as the runtime reads them."""
    from ..layers import open_layers

    return open_layers(store, layers)


def _warn_of_other_tuning(output: Output, manifests: tuple[Manifest, ...]) -> None:
    """A runtime with another table asks for keys that this build does not make."""
    from ..environment import Environment

    wanted = Environment().tuning
    used = {router.tuning for manifest in manifests for router in manifest.routers}
    others = sorted(name for name in used if _table_name(name) != _table_name(wanted or "default"))
    if others:
        follows = "the default" if wanted is None else f"{wanted}, as LLBF16_AOT_TUNING says"
        output.warn(
            f"the manifests name the tuning table {', '.join(others)}; a runtime that is not told "
            f"otherwise follows {follows}, and may look for kernels that this build does not make"
        )


def _table_name(name: str) -> str:
    """A tuning table's name in the one form in which two can be compared."""
    from ..dispatch import PACKAGED_TABLES

    return name if name in PACKAGED_TABLES else os.path.abspath(name)


class _Progress:
    """One line on the terminal that tells how far a build is."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._done = 0
        self._width = 0

    def __call__(self, event: Event) -> None:
        """Show an event of the build."""
        from ..builder import CompileStarted, Settled

        if isinstance(event, Settled):
            self._done += 1
            self._show(f"{event.result.outcome.value} {event.result.item.key}")
        elif isinstance(event, CompileStarted):
            self._show(f"compiling {event.item.key}")

    def clear(self) -> None:
        """Leave no trace on the terminal."""
        if self._width:
            self._write(f"\r{'':{self._width}}\r")
            self._width = 0

    def _show(self, text: str) -> None:
        import shutil

        columns = shutil.get_terminal_size().columns
        line = f"[{self._done}/{self._total}] {text}"[: max(columns - 1, 10)]
        self._write(f"\r{line:{self._width}}")
        self._width = len(line)

    def _write(self, text: str) -> None:
        if self._shown:
            sys.stderr.write(text)
            sys.stderr.flush()
