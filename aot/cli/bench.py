"""The command `bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .command import HelpfulCommand, common_options, store_option
from .output import Output
from .tokens import tokens_option

if TYPE_CHECKING:
    from ..bench import BenchCell, BenchReport
    from ..manifest import Manifest
    from ..problem import Problem

__all__ = ["bench_command"]

Function = TypeVar("Function", bound=Callable[..., Any])


def _file(
    option: str, parameter: str, text: str, *, exists: bool = False
) -> Callable[[Function], Function]:
    return click.option(
        option,
        parameter,
        type=click.Path(dir_okay=False, exists=exists, path_type=Path),
        metavar="FILE",
        help=text,
    )


@click.command(
    "bench",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot bench dsv4",
        "llbf16-aot bench anchors --json-out kernels.json --svg kernels.svg",
        "llbf16-aot bench dsv4 --tokens 1,8 --cold --hot",
    ),
    variables=("LLBF16_AOT_STORE",),
)
@store_option
@tokens_option
@_file("--json-out", "json_path", "Write the report here, too.")
@_file("--svg", "svg_path", "Write a plot here.")
@_file("--anchors", "anchors_path", "Compare with published figures of this file.", exists=True)
@click.option("--tuning", metavar="NAME", help="This tuning table in place of the manifests' own.")
@click.option("--cold", is_flag=True, help="Measure without a producer ahead, too.")
@click.option("--hot", is_flag=True, help="Measure on one weight again and again, too.")
@click.option("--torch-compile", is_flag=True, help="Measure torch.compile, too, where it works.")
@click.option("--commit", default="unknown", metavar="SHA", help="What the report says was run.")
@click.argument("manifests", metavar="MANIFEST...", nargs=-1, required=True)
@common_options
@click.pass_obj
def bench_command(
    output: Output,
    *,
    manifests: tuple[str, ...],
    store_path: Path | None,
    tokens: tuple[int, ...] | None,
    json_path: Path | None,
    svg_path: Path | None,
    anchors_path: Path | None,
    tuning: str | None,
    cold: bool,
    hot: bool,
    torch_compile: bool,
    commit: str,
) -> None:
    """Measure stored kernels beside cuBLAS on this machine's GPU.

    MANIFEST is a path, or the name of a manifest that comes with the package. Each of its problems
    (fp32 output, dependent launch) is measured with the kernel that the tuning table chooses,
    behind a kernel that writes x, beside the faster of F.linear and torch.mm, and beside the floor:
    an empty kernel plus the time to read the weights. x is bf16, also where the weights are fp32;
    the library's product is then F.linear with a cast. Needs a GPU and no compiler.
    """
    from ..bench import BenchReport, bench_cell, read_anchors, summarize
    from ..dispatch import load_table
    from ..environment import Environment
    from ..errors import AotError
    from ..manifest import Manifest
    from ..measure import GpuLab
    from ..outfile import check_writable, write_whole
    from ..plot import plot
    from ..store import Store
    from ..timing import Way
    from ..tune import header_of

    anchors = () if anchors_path is None else read_anchors(anchors_path)
    problems = _problems((Manifest.load(name) for name in manifests), tokens, tuning)
    for path in (json_path, svg_path):
        if path is not None:
            check_writable(path)
    lab = GpuLab(Store(Environment().store_location(store_path).root))
    header = header_of(lab)
    ways = [way for way, wanted in ((Way.COLD, cold), (Way.HOT, hot)) if wanted]
    cells: list[BenchCell] = []
    for number, (problem, table) in enumerate(problems.items(), 1):
        cell = bench_cell(
            lab,
            problem,
            table=load_table(table, lab.target),
            copy_bytes_per_s=header.copy_bytes_per_s,
            ways=ways,
            torch_compile=torch_compile,
        )
        cells.append(cell)
        output.note(
            f"[{number}/{len(problems)}] K={cell.hidden} N={cell.experts} M={cell.tokens}: "
            f"{cell.config} {cell.ours_us:.2f} us, cuBLAS {cell.cublas_us:.2f}, "
            f"floor {cell.floor_us:.2f}"
        )
    report = BenchReport(
        what=(
            "Microseconds a call of router kernels after a producer: ours beside cuBLAS and the "
            "floor, in one run; bf16 x [M, K], weight [N, K] of bf16 unless a cell says otherwise, "
            "fp32 output, dependent launch."
        ),
        commit=commit,
        target=header.target,
        tuning=", ".join(dict.fromkeys(problems.values())),
        origin=header.origin,
        copy_bytes_per_s=header.copy_bytes_per_s,
        summary=summarize(cells, anchors),
        cells=tuple(cells),
    )
    try:
        if json_path is not None:
            write_whole(json_path, report.encode())
        if svg_path is not None:
            title = f"Router kernels on {header.origin.device}, {header.origin.date}"
            write_whole(svg_path, plot(cells, title=title, anchors=anchors))
    except AotError as error:
        # What was measured is shown all the same.
        output.fail(error, report.to_data(), _text(report))
    output.result(report.to_data(), _text(report))


def _problems(
    manifests: Iterable[Manifest], tokens: tuple[int, ...] | None, tuning: str | None
) -> dict[Problem, str]:
    """What to measure, shape by shape, with the name of the tuning table that chooses."""
    from ..problem import Problem

    found: dict[Problem, str] = {}
    for manifest in manifests:
        for router in manifest.routers:
            for count in router.tokens:
                if tokens is None or count in tokens:
                    problem = Problem(
                        count, router.experts, router.hidden, weight_dtype=router.weight_dtype
                    )
                    found.setdefault(problem, tuning or router.tuning)
    return found


def _text(report: BenchReport) -> str:
    from ..text import table

    extra = (
        ("cold", "cold_us"),
        ("cuBLAS cold", "cublas_cold_us"),
        ("hot", "hot_us"),
        ("cuBLAS hot", "cublas_hot_us"),
        ("torch.compile", "torch_compile_us"),
    )
    shown = [(name, f) for name, f in extra if any(getattr(c, f) for c in report.cells)]
    header = ("K", "N", "M", "config", "us", "spread", "cuBLAS", "floor", "x cuBLAS", "x floor")
    rows = [
        (
            str(cell.hidden),
            str(cell.experts),
            str(cell.tokens),
            cell.config,
            f"{cell.ours_us:.2f}",
            f"{cell.ours_spread_us:.2f}",
            f"{cell.cublas_us:.2f}",
            f"{cell.floor_us:.2f}",
            f"{cell.vs_cublas:.2f}",
            f"{cell.over_floor:.2f}",
            *(
                "" if (value := getattr(cell, field)) is None else f"{value:.2f}"
                for _, field in shown
            ),
        )
        for cell in report.cells
    ]
    summary = report.summary
    lines = [
        f"geometric mean over {summary.cells} cells: {summary.geomean_vs_cublas:.2f} x cuBLAS, "
        f"{summary.geomean_over_floor:.2f} x floor; least {summary.min_vs_cublas:.2f} x cuBLAS"
    ]
    if summary.geomean_vs_cublas_m1_8 is not None:
        lines.append(f"M up to 8: {summary.geomean_vs_cublas_m1_8:.2f} x cuBLAS")
    if summary.geomean_vs_published is not None:
        least = summary.min_vs_published
        lines.append(
            f"published kernels: {summary.geomean_vs_published:.2f} times as fast, least "
            f"{'none away from the floor' if least is None else f'{least:.2f}'}"
        )
    return "\n".join([table((*header, *(name for name, _ in shown)), rows), "", *lines])
