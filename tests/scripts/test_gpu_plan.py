"""The plan of the GPU check, on any machine: what it asks for is what its manifests build."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from llbf16_aot.backends import BACKENDS
from llbf16_aot.dispatch import dispatch, load_table
from llbf16_aot.key import CompileKey
from llbf16_aot.manifest import Manifest
from llbf16_aot.problem import DType, Epilogue, Problem, Target

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load_plan():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("gpu_plan", SCRIPTS / "gpu_plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_plan = load_plan()


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    folder = tmp_path_factory.mktemp("plan")
    return [Manifest.load(path) for path in gpu_plan.write_manifests(folder)]


def key_of(problem: Problem, target: Target, tuning: str) -> CompileKey:
    return dispatch(problem, target, load_table(tuning, target))


def test_the_manifests_build_every_key_that_the_check_asks_for(
    manifests: list[Manifest], tmp_path: Path
) -> None:
    """A key that was not built is a failed case on the GPU machine, where nothing can be built."""
    built = {
        key_of(problem, target, router.tuning)
        for manifest in manifests
        for target in manifest.targets
        for router in manifest.routers
        for problem in router.problems()
    }
    tables = gpu_plan.write_tables(tmp_path)
    target = Target.parse(gpu_plan.TARGET)
    asked = {
        key_of(
            Problem(case.tokens, case.experts, case.hidden, DType(case.out_dtype), case.pdl),
            target,
            tables[case.table],
        )
        for case in gpu_plan.cases()
    }
    asked |= {
        key_of(
            Problem(
                case.tokens,
                case.experts,
                case.hidden,
                DType(case.out_dtype),
                case.pdl,
                DType(case.x_dtype),
                DType(case.weight_dtype),
                epilogue=Epilogue(case.epilogue),
            ),
            target,
            tables[case.table],
        )
        for case in (*gpu_plan.wide_cases(), *gpu_plan.WIDE_SINGLES.values())
    }
    assert asked == built


def test_the_grid_holds_every_combination_once() -> None:
    """A loop in the wrong place leaves out a type or a size without anybody noticing."""
    cases = list(gpu_plan.cases())
    assert len(cases) == len(set(cases)) == 7 * 14 * 19 * 3 * 2


def test_the_forced_tables_send_every_case_to_their_backend(tmp_path: Path) -> None:
    """A rule that lets some problems through to another backend leaves this one unchecked there."""
    tables = gpu_plan.write_tables(tmp_path)
    target = Target.parse(gpu_plan.TARGET)
    for case in gpu_plan.cases():
        if case.table in gpu_plan.FORCED:
            problem = Problem(case.tokens, case.experts, case.hidden)
            wanted = gpu_plan.FORCED[case.table]["backend"]
            assert key_of(problem, target, tables[case.table]).backend == wanted
    assert {str(tile["backend"]) for tile in gpu_plan.FORCED.values()} <= set(BACKENDS)
