"""The command `tune`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .backends import backend_option
from .command import HelpfulCommand, common_options, store_option
from .output import Output
from .tokens import tokens_option

if TYPE_CHECKING:
    from ..manifest import Manifest
    from ..survey import CellKey, Survey, SurveyCell, SurveyHeader
    from ..timing import Lab

__all__ = ["tune_command"]


@click.command(
    "tune",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot build all-routers --candidates --target sm_90a",
        "llbf16-aot tune all-routers --out tables/sm_90.json --report tuning.json",
        "llbf16-aot tune all-routers --tokens 1-16 --report tuning.json --resume",
    ),
    variables=("LLBF16_AOT_STORE",),
)
@store_option
@tokens_option
@backend_option
@click.option(
    "--out",
    "table_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the tuning table here; default: print it.",
)
@click.option(
    "--report",
    "report_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write every figure here, anew after each shape.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Take over the cells that the report has of these kernels; measure the others.",
)
@click.option("--name", default="default", show_default=True, help="The table's name.")
@click.argument("manifests", metavar="MANIFEST...", nargs=-1, required=True)
@common_options
@click.pass_obj
def tune_command(
    output: Output,
    *,
    manifests: tuple[str, ...],
    store_path: Path | None,
    tokens: tuple[int, ...] | None,
    backends: tuple[str, ...],
    table_path: Path | None,
    report_path: Path | None,
    resume: bool,
    name: str,
) -> None:
    """Measure candidates on this machine's GPU; write a tuning table.

    MANIFEST is a path, or the name of a manifest that comes with the package; its routers are
    measured with the kernels that `build --candidates` has put into the store; those whose x is
    fp32 are left out. Needs a GPU and no compiler. Chosen is the fastest tile that computes the
    right thing with the same bits every time, or the library where that is faster.
    """
    from ..errors import AotError, UsageError
    from ..outfile import check_writable, write_whole
    from ..survey import cell_key
    from ..tablewriter import format_table, write_table
    from ..tune import tune

    if resume and report_path is None:
        raise UsageError("--resume without --report", hint="name the report to go on with")
    loaded = _manifests(manifests)
    wanted = _cells(loaded, tokens, backends)
    for path in (table_path, report_path) if wanted else ():
        if path is not None:
            check_writable(path)
    run = _Run(output, store_path, report_path, len(wanted), backends)
    if resume:
        run.take_over()
    shape: tuple[int, int] | None = None
    for cell in tune(wanted, lab=run.lab, known=run.known, on_cell=run.told, backends=backends):
        if shape is not None and shape != (cell.hidden, cell.experts):
            run.save()
        shape = (cell.hidden, cell.experts)
        run.cells[cell_key(cell)] = cell
    survey = run.save()
    header = survey.header
    table = write_table(
        survey.cells,
        header.origin,
        name=name,
        target=header.target,
        backends=header.backends,
    )
    text = format_table(table)
    if table_path is not None:
        try:
            write_whole(table_path, text)
        except AotError as error:
            # What was measured is shown all the same.
            output.fail(error, _data(survey, None, report_path), text.rstrip("\n"))
        output.note(f"wrote {table_path}: {len(table.rules)} rules")
        text = _overview(survey.cells)
    output.result(_data(survey, table_path, report_path), text.rstrip("\n"))


class _Run:
    """One tuning run: the GPU, opened when it is needed, and the cells so far."""

    def __init__(
        self,
        output: Output,
        store_path: Path | None,
        report_path: Path | None,
        total: int,
        backends: tuple[str, ...],
    ) -> None:
        self.known: dict[CellKey, SurveyCell] = {}
        self.cells: dict[CellKey, SurveyCell] = {}
        self._output = output
        self._store_path = store_path
        self._report_path = report_path
        self._total = total
        self._backends = backends
        self._lab: Lab | None = None
        self._header: SurveyHeader | None = None
        self._done = 0

    def take_over(self) -> None:
        """Read the report, and keep its cells if they speak of the kernels that are installed."""
        from ..backends import BACKENDS
        from ..errors import UsageError
        from ..key import kernel_source_digest
        from ..survey import cell_key, read_survey

        if self._report_path is None or not self._report_path.exists():
            return
        survey = read_survey(self._report_path)
        present = {name: kernel_source_digest(name) for name in BACKENDS}
        if survey.header.kernel_sources != present:
            self._output.warn(f"{self._report_path} is of other kernels: measuring all cells anew")
            return
        if survey.header.backends != tuple(sorted(self._backends)):
            before = ", ".join(survey.header.backends) or "all families"
            raise UsageError(
                f"{self._report_path} is of a run over {before}",
                hint="name another report, or leave out --resume",
            )
        self._header = survey.header
        self.known = {cell_key(cell): cell for cell in survey.cells}
        # What is not wanted this time is kept: reports grow, manifest by manifest.
        self.cells = dict(self.known)

    def lab(self) -> Lab:
        """The GPU; raises DriverError."""
        if self._lab is None:
            from ..environment import Environment
            from ..errors import UsageError
            from ..measure import GpuLab
            from ..store import Store
            from ..tune import header_of

            store = Store(Environment().store_location(self._store_path).root)
            self._lab = GpuLab(store)
            header = header_of(self._lab, backends=self._backends)
            before = self._header
            if before is not None and (before.target, before.origin.device) != (
                header.target,
                header.origin.device,
            ):
                raise UsageError(
                    f"{self._report_path} was measured on {before.origin.device}, "
                    f"this is {header.origin.device}",
                    hint="leave out --resume, or name another report",
                )
            self._header = header
        return self._lab

    def told(self, cell: SurveyCell) -> None:
        """Tell of a cell that was just measured."""
        self._done += 1
        rejected = sum(bool(t.rejected) for t in cell.trials)
        self._output.note(
            f"[{self._done}/{self._total}] {_line(cell)}"
            + (f", {rejected} rejected" if rejected else "")
            + (f", {cell.lacking} not in the store" if cell.lacking else "")
        )

    def save(self) -> Survey:
        """The survey so far, written to the report if there is one."""
        from ..errors import UsageError
        from ..survey import SURVEY_SCHEMA, Survey, cell_key, write_survey

        if self._header is None:
            raise UsageError(
                "nothing to measure: the manifests have no router with these tokens, or no family "
                "that was named has a tile for one",
                hint="name other manifests, or leave out --tokens and --backend",
            )
        cells = tuple(sorted(self.cells.values(), key=cell_key))
        survey = Survey(schema=SURVEY_SCHEMA, header=self._header, cells=cells)
        if self._report_path is not None:
            write_survey(survey, self._report_path)
        return survey


def _manifests(names: tuple[str, ...]) -> tuple[Manifest, ...]:
    from ..manifest import Manifest

    return tuple(Manifest.load(name) for name in names)


def _cells(
    manifests: Iterable[Manifest], tokens: tuple[int, ...] | None, backends: tuple[str, ...]
) -> tuple[CellKey, ...]:
    """What the manifests' routers ask to measure, as far as these families have a tile for it.

    Without routers whose x is fp32.
    """
    from ..problem import DType, Problem
    from ..search import candidate_tiles
    from ..survey import CellKey
    from ..tune import measured_tokens

    found: dict[CellKey, None] = {}
    for manifest in manifests:
        for router in manifest.routers:
            if router.x_dtype is not DType.BF16:
                continue
            counts = router.tokens if tokens is None else set(router.tokens) & set(tokens)
            for count in measured_tokens(counts, router.weight_dtype):
                one = CellKey(router.hidden, router.experts, router.weight_dtype, count)
                problem = Problem(count, one.experts, one.hidden, weight_dtype=one.weight_dtype)
                if candidate_tiles(problem, backends):
                    found[one] = None
    return tuple(sorted(found))


def _line(cell: SurveyCell) -> str:
    from ..survey import tile_text

    return (
        f"K={cell.hidden} N={cell.experts} M={cell.tokens} {cell.weight_dtype.value}: "
        f"{tile_text(cell.use)} {cell.chosen.us:.2f} us, cuBLAS {cell.cublas.us:.2f}"
    )


def _overview(cells: Iterable[SurveyCell]) -> str:
    from ..survey import tile_text
    from ..text import table

    two: Callable[[float], str] = "{:.2f}".format
    rows = (
        (
            str(cell.hidden),
            str(cell.experts),
            str(cell.tokens),
            cell.weight_dtype.value,
            tile_text(cell.use),
            two(cell.chosen.us),
            two(cell.chosen.spread_us),
            two(cell.cublas.us),
            two(cell.cublas.us / cell.chosen.us),
        )
        for cell in cells
    )
    return table(("K", "N", "M", "weight", "choice", "us", "spread", "cuBLAS us", "ratio"), rows)


def _data(survey: Survey, table_path: Path | None, report_path: Path | None) -> dict[str, object]:
    import msgspec

    from ..survey import tile_text

    return {
        "table": None if table_path is None else str(table_path),
        "report": None if report_path is None else str(report_path),
        "header": msgspec.to_builtins(survey.header),
        "cells": tuple(
            {
                "K": cell.hidden,
                "N": cell.experts,
                "M": cell.tokens,
                "weight_dtype": cell.weight_dtype.value,
                "config": tile_text(cell.use),
                "us": cell.chosen.us,
                "spread_us": cell.chosen.spread_us,
                "cublas_us": cell.cublas.us,
            }
            for cell in survey.cells
        ),
    }
