"""The candidate build: everything that tuning measures, and nothing that a table chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_builds import manifest_text, use_fake_compiler
from llbf16_aot.builder import execute
from llbf16_aot.candidates import plan_candidates
from llbf16_aot.errors import CompileError, InvalidArtifactError, TargetError, UsageError
from llbf16_aot.manifest import Manifest
from llbf16_aot.problem import DType, Problem, Target
from llbf16_aot.report import BuildReport, BuildResult, Outcome
from llbf16_aot.search import PROBES, candidate_keys, probe_key
from llbf16_aot.store import Store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    use_fake_compiler(monkeypatch)
    return Store(tmp_path / "store")


def manifest(*hidden: int, **fields: str) -> Manifest:
    return Manifest.parse(manifest_text(*hidden, **fields), origin="test.yaml")


def test_the_plan_has_every_candidate_and_the_probes_once(store: Store) -> None:
    """Catches a tuning run that lacks kernels, or an hour of compiling what nobody measures."""
    one = manifest(256, 520, targets="sm_90a, sm_100a", tokens="1-3", out_dtype="[fp32, bf16]")
    plan = plan_candidates(one, store=store)
    wanted = set()
    for text in ("sm_90a", "sm_100a"):
        target = Target.parse(text)
        wanted |= {probe_key(kind, target) for kind in PROBES}
        wanted |= set(
            candidate_keys((Problem(m, 32, k) for k in (256, 520) for m in (1, 2, 3)), target)
        )
    keys = [item.key for item in plan.items]
    assert set(keys) == wanted
    assert len(keys) == len(wanted)
    assert plan.targets == ("sm_90a", "sm_100a")
    assert all(item.compile for item in plan.items)
    assert {key.out_dtype for key in keys if key.backend != "probe"} == {DType.FP32}
    assert plan.needs == ()
    assert [key.target for key in keys] == sorted((k.target for k in keys), reverse=True)


def test_routers_of_one_hidden_size_share_their_candidates(store: Store) -> None:
    """Catches a space that multiplies with the number of models."""
    plan = plan_candidates(manifest(256), manifest(256), store=store)
    assert len(plan.items) == len(plan_candidates(manifest(256), store=store).items)


def test_other_targets_and_bad_ones_are_as_in_a_build(store: Store) -> None:
    """Catches two ways of reading the same options."""
    plan = plan_candidates(manifest(256), store=store, targets=["sm_103a"])
    assert plan.targets == ("sm_103a",)
    with pytest.raises(TargetError):
        plan_candidates(manifest(256), store=store, targets=["sm_95a"])
    with pytest.raises(UsageError):
        plan_candidates(store=store)


def test_a_candidate_build_stores_what_it_planned_and_then_compiles_nothing(store: Store) -> None:
    """Catches candidates that are built anew every time, which takes an hour."""
    one = manifest(256, tokens="1")
    plan = plan_candidates(one, store=store)
    report = execute(plan, store=store, jobs=1)
    report.check_candidates()
    assert len(report.results) == len(plan.items) > 15
    assert {result.outcome for result in report.results} == {Outcome.COMPILED}
    assert "covered" not in str(report)
    assert store.digests() == tuple(sorted(item.digest for item in plan.items))
    assert plan_candidates(one, store=store).work == ()


def test_a_tile_that_spills_is_no_candidate_and_any_other_failure_is_one(store: Store) -> None:
    """Catches a build that one greedy tile fails, and one that hides a broken compiler."""
    plan = plan_candidates(manifest(1024, tokens="1"), store=store)
    first, second, third = plan.items[:3]
    spilled = BuildResult(first, Outcome.FAILED, error=InvalidArtifactError("it spills"))
    built = BuildResult(second, Outcome.PLANNED)
    broken = BuildResult(third, Outcome.FAILED, error=CompileError("it crashed"))
    report = BuildReport(plan, (spilled, built), ())
    assert report.refused == (spilled,)
    report.check_candidates()
    with pytest.raises(CompileError):
        report.check()
    with pytest.raises(CompileError, match="1 of 2 artifacts could not be built"):
        BuildReport(plan, (spilled, built, broken), ()).check_candidates()
