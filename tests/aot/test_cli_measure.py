"""The commands `build --candidates`, `tune` and `bench`: whole outputs, files and endings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import fake_gpu
import pytest
from fake_gpu import artifact_for
from fake_lab import SM_90A, PricedDriver, candidates, make_lab
from llbf16_aot import builder, measure, survey, tune
from llbf16_aot.artifact import Artifact
from llbf16_aot.backends import DotprodConfig, OneshotConfig, OneshotTile
from llbf16_aot.cli.tokens import parse_tokens
from llbf16_aot.dispatch import LibraryTile, load_table, warmup_keys
from llbf16_aot.driver import LaunchConfig
from llbf16_aot.errors import DriverError, UsageError
from llbf16_aot.key import CompileKey
from llbf16_aot.problem import DType, Problem
from llbf16_aot.search import probe_keys
from llbf16_aot.survey import CellKey
from test_cli import Ran, Run, golden, run, world

__all__ = ["run", "world"]

MANIFEST = """schema: 1
name: tiny
targets: [sm_90a]
defaults: {tokens: "1-3", out_dtype: fp32, pdl: true, tuning: reference}
routers:
  - {model: one, hidden: 256, experts: 8}
"""


def price(compile_key: CompileKey, launch: LaunchConfig) -> float:
    """The more warps the dearer; splitk is dear; with three tokens all are dearer than torch."""
    if launch.grid[2] > 1 or compile_key.backend == "splitk":
        return 3.0
    config = compile_key.config
    if isinstance(config, OneshotConfig):
        return 1.0 + 0.1 * config.warps
    return 2.0 if isinstance(config, DotprodConfig) and config.tokens < 3 else 5.0


CELLS = [CellKey(256, 8, DType.BF16, tokens) for tokens in (1, 2, 3)]


@pytest.fixture
def lab(world: Path, monkeypatch: pytest.MonkeyPatch) -> PricedDriver:
    """A GPU, a store with the candidates and with the reference table's kernels, a manifest."""
    monkeypatch.setattr(measure, "RUNS", 2)
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(measure, "_driver_release", lambda: "580.0")
    monkeypatch.setattr(measure, "_version", lambda name: "1.2.3")
    # As `world` does where keys are made: digests that no source file changes.
    for module in (fake_gpu, tune):
        monkeypatch.setattr(module, "kernel_source_digest", lambda backend: "0" * 64)
    (world / "measured.yaml").write_text(MANIFEST)
    reference = warmup_keys([(256, 8)], (1, 2, 3), target=SM_90A, tuning="reference")
    artifacts: list[Artifact] = candidates(CELLS)
    held = {a.digest: a for a in (*artifacts, *map(artifact_for, reference))}
    found, driver, _ = make_lab(monkeypatch, held.values(), price, library_us=_library)
    monkeypatch.setattr(measure, "GpuLab", lambda store: found)
    return driver


def _library(x: object) -> float:
    return 1.2 if x.shape[0] == 3 else 7.0  # type: ignore[attr-defined]


def shown(ran: Ran, world: Path) -> str:
    """The output without what differs from day to day and from torch to torch."""
    text = ran.text(world)
    text = re.sub(r'"torch": ?"[^"]*"', '"torch": "TORCH"', text)
    return re.sub(r"20\d\d-\d\d-\d\d", "DATE", text)


@pytest.mark.parametrize("command", ["tune", "bench"])
def test_help_of_the_measuring_commands_is_as_reviewed(run: Run, world: Path, command: str) -> None:
    """Catches help that changes unnoticed."""
    ran = run(command, "--help")
    assert "\nExamples:\n  llbf16-aot " in ran.out
    golden(f"help-{command}", ran.text(world))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("tune", ("tune", "measured.yaml", "--out", "table.json")),
        ("tune-table", ("tune", "measured.yaml", "--tokens", "1", "-q")),
        ("tune-json", ("tune", "measured.yaml", "--tokens", "1,3", "--json")),
        ("bench", ("bench", "measured.yaml", "--cold", "--hot")),
        ("bench-json", ("bench", "measured.yaml", "--tokens", "2", "--json", "--commit", "abc")),
        ("error-tokens", ("bench", "measured.yaml", "--tokens", "1-99")),
        ("error-resume", ("tune", "measured.yaml", "--resume")),
        ("error-no-cells", ("tune", "measured.yaml", "--tokens", "9")),
    ],
)
@pytest.mark.usefixtures("lab")
def test_output_of_the_measuring_commands_is_as_reviewed(
    run: Run, world: Path, name: str, arguments: tuple[str, ...]
) -> None:
    """Catches tables, figures and messages that change unnoticed."""
    golden(name, shown(run(*arguments), world))


@pytest.mark.usefixtures("lab")
def test_the_written_table_is_what_the_runtime_would_load(run: Run, world: Path) -> None:
    """Catches a table file that `load_table` refuses, or that forgets the library's cells."""
    assert run("tune", "measured.yaml", "--out", "deep/table.json").code == 0
    table = load_table(str(world / "deep" / "table.json"), SM_90A)
    uses = [survey.tile_text(table.tile_for(Problem(m, 8, 256))) for m in (1, 2, 3)]
    assert uses == ["oneshot(8,1,4,2)", "oneshot(8,1,4,2)", "library"]
    assert table.measured is not None
    assert table.measured.device == "cpu"


@pytest.mark.usefixtures("lab")
def test_a_run_goes_on_where_the_last_one_ended(
    run: Run, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a second run that measures again, or that loses what it does not ask for."""
    first = run("tune", "measured.yaml", "--tokens", "1", "--report", "report.json")
    assert (first.code, first.err.count("K=256")) == (0, 1)
    arguments = ("tune", "measured.yaml", "--report", "report.json", "--resume", "--json")
    second = run(*arguments, "--tokens", "2")
    assert second.err.count("K=256") == 1
    assert [cell["M"] for cell in second.data["cells"]] == [1, 2]  # type: ignore[attr-defined]
    assert run(*arguments).err.count("K=256") == 1

    def no_gpu(store: object) -> object:
        raise DriverError("there is no GPU here")

    monkeypatch.setattr(measure, "GpuLab", no_gpu)
    done = run(*arguments, "--out", "table.json")
    assert (done.code, done.err) == (0, "wrote table.json: 23 rules\n".replace("23", _count(world)))


def _count(world: Path) -> str:
    return str(len(json.loads((world / "table.json").read_text())["rules"]))


@pytest.mark.usefixtures("lab")
def test_a_report_of_other_kernels_is_measured_anew(
    run: Run, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a table whose figures are those of kernels that are no longer there."""
    run("tune", "measured.yaml", "--tokens", "1", "--report", "report.json")
    text = (world / "report.json").read_text()
    changed = re.sub(r'"oneshot":"[0-9a-f]{64}"', f'"oneshot":"{"1" * 64}"', text)
    assert changed != text
    (world / "report.json").write_text(changed)
    again = run("tune", "measured.yaml", "--tokens", "1", "--report", "report.json", "--resume")
    assert "report.json is of other kernels: measuring all cells anew" in again.err
    assert again.err.count("K=256") == 1


@pytest.mark.usefixtures("lab")
def test_a_report_of_another_gpu_is_not_gone_on_with(run: Run, world: Path) -> None:
    """Catches a table that mixes the figures of two machines."""
    run("tune", "measured.yaml", "--tokens", "1", "--report", "report.json")
    text = (world / "report.json").read_text()
    (world / "report.json").write_text(text.replace('"device":"cpu"', '"device":"another GPU"'))
    again = run("tune", "measured.yaml", "--report", "report.json", "--resume")
    assert again.code == 2
    assert "was measured on another GPU, this is cpu" in again.err


@pytest.mark.usefixtures("lab")
def test_bench_writes_the_report_and_the_plot(run: Run, world: Path) -> None:
    """Catches files that lack what documents cite: date, machine, protocol, commit, summary."""
    anchors = {
        "cells": [
            {
                "K": 256,
                "N": 8,
                "M": m,
                "cublas_us": {"after_producer": 6.0},
                "reference_best_us": {"after_producer": 3.0},
            }
            for m in (1, 2)
        ]
    }
    (world / "anchors.json").write_text(json.dumps(anchors))
    files = ("--json-out", "out/b.json", "--svg", "out/b.svg", "--anchors", "anchors.json")
    ran = run("bench", "measured.yaml", *files, "--commit", "abc")
    assert ran.code == 0, ran.err
    assert "published kernels: 1.75 times as fast, least " in ran.out
    data = json.loads((world / "out" / "b.json").read_text())
    assert {"date", "device", "driver", "versions", "commit", "protocol"} <= set(data)
    assert len(data["cells"]) == 3
    assert {"K", "N", "M", "ours_us", "config", "cublas_us", "floor_us"} <= set(data["cells"][0])
    assert data["summary"]["cells"] == 2
    assert data["summary"]["geomean_vs_published"] == 1.75
    assert (world / "out" / "b.svg").read_text().startswith("<svg ")


@pytest.mark.parametrize(
    ("command", "option"),
    [("tune", "--out"), ("tune", "--report"), ("bench", "--json-out"), ("bench", "--svg")],
)
@pytest.mark.usefixtures("lab")
def test_a_file_that_cannot_be_written_is_refused_before_the_gpu_is_asked(
    run: Run, world: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str
) -> None:
    """Catches an hour of measuring whose figures have nowhere to go."""

    def measured(store: object) -> object:
        raise DriverError("the GPU was asked")

    monkeypatch.setattr(measure, "GpuLab", measured)
    (world / "file").touch()
    ran = run(command, "measured.yaml", option, "file/result")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: file/result: cannot write the file: Not a directory\nhint: ")


@pytest.mark.parametrize(("command", "option"), [("tune", "--out"), ("bench", "--svg")])
@pytest.mark.usefixtures("lab")
def test_a_disk_that_fills_up_while_measuring_loses_no_figures(
    run: Run, command: str, option: str
) -> None:
    """Catches figures that are thrown away because the file for them could not be written."""
    ran = run(command, "measured.yaml", option, "/dev/full")
    assert ran.code == 2
    assert "error: /dev/full: cannot write the file: No space left on device\n" in ran.err
    assert "cuBLAS" in ran.out
    assert " 2.00 " in ran.out or '"use"' in ran.out


def test_a_kernel_that_bench_lacks_is_exit_3(
    run: Run, lab: PricedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a benchmark of the fallback under our name."""
    found, _, _ = make_lab(monkeypatch, candidates([]), price)
    monkeypatch.setattr(measure, "GpuLab", lambda store: found)
    ran = run("bench", "measured.yaml")
    assert ran.code == 3
    assert "absent" in ran.err


def test_build_candidates_names_what_is_no_candidate_and_ends_well(
    run: Run, world: Path, lab: PricedDriver
) -> None:
    """Catches a candidate build that one tile with spills fails, or that hides it."""
    ran = run("build", "measured.yaml", "--candidates", "--json")
    assert ran.code == 0, ran.err
    built = ran.data["counts"]["compiled"]  # type: ignore[index]
    assert built == len(candidates(CELLS))
    again = run("build", "measured.yaml", "--candidates")
    assert again.code == 0
    assert again.out.startswith(f"{built} artifacts ({built} kept)")
    dry = run("build", "measured.yaml", "--candidates", "--dry-run")
    assert f"0 to compile, {built} to keep" in dry.out


def test_a_spilling_candidate_is_told_of_and_left_out(
    run: Run, world: Path, lab: PricedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches silence about a tile that tuning will then miss."""
    from llbf16_aot.errors import InvalidArtifactError

    real = builder.assemble

    def spills(asked: CompileKey, *arguments: object, **named: object) -> Artifact:
        if isinstance(asked.config, OneshotConfig) and asked.config.warps == 8:
            raise InvalidArtifactError("the kernel spills to local memory")
        return real(asked, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(builder, "assemble", spills)
    ran = run("build", "measured.yaml", "--candidates")
    assert ran.code == 0
    assert "no candidate: oneshot hidden=256" in ran.err
    assert "warps=8" in ran.err
    assert "spills" in ran.err
    assert " failed" in ran.out


@pytest.mark.usefixtures("lab")
def test_a_run_of_some_backends_measures_no_other(run: Run, world: Path) -> None:
    """Catches a table of one family that another one's tile is in, and reports that mix the two."""
    arguments = ("tune", "measured.yaml", "--tokens", "1", "--report", "report.json")
    some = run(*arguments, "--backend", "splitk", "--backend", "dotprod", "--json")
    assert some.code == 0, some.err
    report = json.loads((world / "report.json").read_text())
    assert report["header"]["backends"] == ["dotprod", "splitk"]
    tried = {trial["use"]["backend"] for cell in report["cells"] for trial in cell["trials"]}
    assert tried == {"splitk"}  # no tile of dotprod is worth trying at this K
    assert [cell["config"] for cell in some.data["cells"]] == ["splitk(6,4,16,256)"]  # type: ignore[attr-defined]

    written = (world / "report.json").read_bytes()
    again = run(*arguments, "--resume")
    assert (again.code, again.out) == (2, "")
    assert "report.json is of a run over dotprod, splitk" in again.err
    assert (world / "report.json").read_bytes() == written
    none = run("tune", "measured.yaml", "--backend", "fp32")
    assert none.code == 2
    assert "no family that was named has a tile for one" in none.err


@pytest.mark.usefixtures("lab")
def test_a_table_of_some_backends_has_no_tile_of_another_and_says_so(run: Run, world: Path) -> None:
    """Catches a general rule that falls back to a family that was not tried."""
    ran = run("tune", "measured.yaml", "--backend", "oneshot", "--out", "table.json")
    assert ran.code == 0, ran.err
    table = load_table(str(world / "table.json"), SM_90A)
    uses = {type(rule.use) for rule in table.rules}
    assert uses == {OneshotTile, LibraryTile}
    assert "of kernels only oneshot were tried" in table.source
    every = ("dotprod", "splitk", "oneshot", "fp32", "bf16x3")
    named = (word for name in every for word in ("--backend", name))
    assert run("tune", "measured.yaml", *named, "--out", "all.json").code == 0
    assert "were tried" not in load_table(str(world / "all.json"), SM_90A).source


def test_a_build_with_probes_is_all_that_bench_needs(
    run: Run, world: Path, lab: PricedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a benchmark of one's own routers that asks for hours of candidates first."""

    def backends(*options: str) -> list[str]:
        ran = run("build", "measured.yaml", "--json", "--dry-run", *options)
        assert ran.code == 0, ran.err
        return [item["key"]["config"]["backend"] for item in ran.data["artifacts"]]  # type: ignore[attr-defined]

    plain, with_probes = backends(), backends("--probes")
    assert "probe" not in plain
    assert sorted(with_probes) == sorted([*plain, "probe", "probe"])
    keys = warmup_keys([(256, 8)], (1, 2, 3), target=SM_90A, tuning="reference")
    held = map(artifact_for, (*keys, *probe_keys([SM_90A])))
    found, _, _ = make_lab(monkeypatch, held, price)
    monkeypatch.setattr(measure, "GpuLab", lambda store: found)
    ran = run("bench", "measured.yaml")
    assert ran.code == 0, ran.err
    assert "geometric mean over 3 cells" in ran.out


def test_candidates_of_some_backends_are_built_alone(
    run: Run, world: Path, lab: PricedDriver
) -> None:
    """Catches minutes of compiling what was not asked for, and a filter that a build ignores."""
    ran = run("build", "measured.yaml", "--candidates", "--backend", "splitk", "--json")
    assert ran.code == 0, ran.err
    built = {a["key"]["config"]["backend"] for a in ran.data["artifacts"]}  # type: ignore[attr-defined]
    assert built == {"splitk", "probe"}
    for options, wrong in (
        (("--backend", "splitk"), "--backend without --candidates"),
        (("--backend", "fp32", "--candidates"), "no candidate of fp32 for these manifests"),
    ):
        ran = run("build", "measured.yaml", *options)
        assert (ran.code, ran.out) == (2, "")
        assert wrong in ran.err


@pytest.mark.parametrize("command", [("build", "--candidates"), ("tune",)])
@pytest.mark.usefixtures("lab")
def test_a_backend_that_does_not_exist_is_refused(run: Run, command: tuple[str, ...]) -> None:
    """Catches a typo that leaves nothing to measure; `probe` serves no router."""
    for name, hint in (("split", "did you mean splitk?"), ("probe", ""), ("", "leave it out")):
        ran = run(*command, "measured.yaml", "--backend", name)
        assert (ran.code, ran.out) == (2, "")
        assert f"--backend is {name!r}, must be one of dotprod, splitk, oneshot" in ran.err
        assert hint in ran.err


@pytest.mark.parametrize("text", ["", "0", "60-70", "4-2", "a", "1,,2", "1-2-3", "-1", "65537"])
def test_numbers_of_tokens_that_make_no_sense_are_refused(text: str) -> None:
    """Catches a range that silently measures nothing."""
    with pytest.raises(UsageError, match="--tokens has"):
        parse_tokens(text)


def test_numbers_of_tokens_are_ranges_and_lists() -> None:
    """Catches a list that is read as its first entry."""
    assert parse_tokens("8, 1-3,2") == (1, 2, 3, 8)
    assert parse_tokens("64") == (64,)


def test_plan_shows_what_the_library_serves(run: Run, world: Path, lab: PricedDriver) -> None:
    """Catches a cell that the table leaves to the library shown as a gap, or not at all."""
    assert run("tune", "measured.yaml", "--out", "table.json").code == 0
    text = MANIFEST.replace("reference", "./table.json")
    (world / "tuned.yaml").write_text(text)
    ran = run("plan", "tuned.yaml")
    assert ran.code == 0
    (row,) = (line for line in ran.out.splitlines() if " library " in line)
    assert re.search(r" 3 +fp32 +on +sm_90a +library +the library is faster here", row)
    assert "no kernel for" not in ran.out
    needs = run("plan", "tuned.yaml", "--json").data["needs"]
    assert [need["library"] for need in needs] == [False, False, True]  # type: ignore[attr-defined]
    built = run("build", "tuned.yaml")
    assert built.code == 0, built.err
    assert "3 of 3 problems covered, 1 of them by the library" in built.out
