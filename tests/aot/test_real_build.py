"""Whole builds with the real compiler: a manifest becomes artifacts that the store gives back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_builds import forbid_compiling, manifest_text
from llbf16_aot.artifact import Artifact
from llbf16_aot.builder import build
from llbf16_aot.elf import read_cubin
from llbf16_aot.launch import Attribute
from llbf16_aot.manifest import Manifest
from llbf16_aot.problem import Target
from llbf16_aot.report import Outcome
from llbf16_aot.store import Store

pytestmark = pytest.mark.compiler

MANIFEST = manifest_text(2880, targets="sm_90a, sm_100a", tokens="[1, 5]")
"""Both backends for two targets: one token takes dotprod, five take splitk."""

DRIVE = """
import sys
from llbf16_aot.cli import main
for name in filter(None, sys.argv[1].split(",")):
    sys.modules[name] = None
code = main(sys.argv[2:])
loaded = sorted({"cutlass", "torch"} & set(m for m, v in sys.modules.items() if v is not None))
print(*loaded, file=sys.stderr)
sys.exit(code)
"""
"""Runs the program with modules that cannot be imported, and tells which of two it imported."""


def drive(
    *arguments: str, blocked: str = "", cwd: Path, **environ: str
) -> tuple[dict[str, object], str]:
    ended = subprocess.run(
        [sys.executable, "-c", DRIVE, blocked, *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        # The table that the manifest names, as the runtime would follow it.
        env={**os.environ, "LLBF16_AOT_TUNING": "reference", **environ},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout), ended.stderr.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the manifest and a store that was built from it by the program."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "tiny.yaml").write_text(MANIFEST)
    report, imported = drive("build", "tiny.yaml", "--store", "store", cwd=folder)
    assert report["counts"] == {"kept": 0, "compiled": 4, "found": 0, "failed": 0, "planned": 0}
    assert imported == ""
    return folder


def artifacts(folder: Path) -> list[Artifact]:
    store = Store(folder / "store")
    found = [store.get(digest) for digest in store.digests()]
    return [artifact for artifact in found if isinstance(artifact, Artifact)]


def test_every_artifact_is_there_for_its_own_target(built: Path) -> None:
    """Catches a cubin for the compiler's default target, or for the target of another child."""
    found = artifacts(built)
    assert {(a.record.key.backend, a.record.key.target) for a in found} == {
        (backend, target) for backend in ("dotprod", "splitk") for target in ("sm_90a", "sm_100a")
    }
    for artifact in found:
        cubin = read_cubin(artifact.cubin)
        assert cubin.target == Target.parse(artifact.record.key.target)
        assert [kernel.symbol for kernel in cubin.kernels] == [artifact.record.launch.symbol]


def test_the_record_tells_launch_resources_and_origin(built: Path) -> None:
    """Catches a record from which no launch can be computed, or nobody can tell its compiler."""
    for artifact in artifacts(built):
        record = artifact.record
        assert record.launch.attributes == (Attribute.PROGRAMMATIC_STREAM_SERIALIZATION,)
        assert record.resources.local_bytes == 0
        assert 16 <= record.resources.registers <= 255
        assert record.provenance.toolchain["nvidia-cutlass-dsl"]
        assert record.provenance.options


def test_a_second_build_compiles_nothing_and_imports_no_compiler(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a warm build that pays for the compiler."""
    forbid_compiling(monkeypatch)
    report = build(Manifest.load(built / "tiny.yaml"), store=Store(built / "store"))
    assert {result.outcome for result in report.results} == {Outcome.KEPT}
    data, imported = drive(
        "build", "tiny.yaml", "--store", "store", cwd=built, blocked="cutlass,torch,subprocess"
    )
    assert data["counts"]["kept"] == 4  # type: ignore[index]
    assert imported == ""


def test_a_dry_run_needs_neither_torch_nor_compiler(built: Path) -> None:
    """Catches an import that keeps `build --dry-run` from a machine without torch and CUDA."""
    data, imported = drive(
        "build", "tiny.yaml", "--dry-run", "--store", "other", cwd=built, blocked="cutlass,torch"
    )
    assert data["compile"] == 4
    assert imported == ""


def test_bytes_depend_on_nothing_but_the_inputs(built: Path, tmp_path: Path) -> None:
    """Catches paths, hash seeds, locales and times in machine code or records."""
    folder = tmp_path / "an other place"
    scratch = tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    (folder / "tiny.yaml").write_text(MANIFEST.replace("sm_90a, sm_100a", "sm_100a, sm_90a"))
    drive(
        *("build", "tiny.yaml", "--store", "store", "--jobs", "1"),
        cwd=folder,
        TMPDIR=str(scratch),
        HOME=str(folder),
        PYTHONHASHSEED="77",
        TZ="Asia/Tokyo",
        LC_ALL="C",
        CUTE_DSL_ARCH="sm_80",
        CUTE_DSL_LINEINFO="1",
    )
    assert artifacts(folder) == artifacts(built)
    assert list(scratch.iterdir()) == []


def test_the_launch_record_of_every_artifact_is_checked_against_its_cubin(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches parameters that are not the kernel's: its launch would read rubbish."""
    from llbf16_aot.backends import splitk
    from llbf16_aot.errors import CompileError

    monkeypatch.setattr(splitk, "PARAMS", splitk.PARAMS[:-1])
    with pytest.raises(CompileError, match="splitk"):
        build(
            Manifest.load(built / "tiny.yaml"), store=Store(tmp_path / "store"), targets=("sm_90a",)
        )
    assert {a.record.key.backend for a in artifacts(tmp_path)} == {"dotprod"}
