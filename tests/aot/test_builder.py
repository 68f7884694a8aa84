"""The builder builds what is missing, once, and proves that nothing else is needed."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from fake_builds import (
    COMPILER,
    SPILLS,
    forbid_compiling,
    manifest_text,
    use_fake_compiler,
)
from fake_compiler import Deed
from llbf16_aot import builder, plan, toolchain
from llbf16_aot.artifact import Artifact
from llbf16_aot.builder import CompileFinished, CompileStarted, Settled, build, execute, plan_build
from llbf16_aot.errors import (
    CompileError,
    CompilerMissingError,
    CoverageError,
    InvalidArtifactError,
    StoreFullError,
    StoreUnwritableError,
    TargetError,
    UsageError,
)
from llbf16_aot.key import CompileKey
from llbf16_aot.manifest import Manifest
from llbf16_aot.plan import State
from llbf16_aot.pool import CompilerPool
from llbf16_aot.protocol import Compiled
from llbf16_aot.report import BuildReport, BuildResult, Outcome
from llbf16_aot.store import Miss, MissReason, Store


@pytest.fixture(autouse=True)
def fake_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_compiler(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def tiny(*hidden: Deed, **fields: str) -> Manifest:
    return Manifest.parse(manifest_text(*hidden, **fields), origin="tiny.yaml")


def outcomes(report: BuildReport) -> list[Outcome]:
    return [result.outcome for result in report.results]


def test_a_cold_build_compiles_each_key_once_and_stores_it(store: Store) -> None:
    """Catches keys compiled per problem instead of per key, and artifacts not published."""
    manifest = tiny(Deed.ANSWER, targets="sm_90a, sm_100a", out_dtype="[fp32, bf16]", pdl="both")
    report = build(manifest, store=store)
    assert outcomes(report) == [Outcome.COMPILED] * (3 * 2 * 2 * 2)
    assert set(store.digests()) == {result.item.digest for result in report.results}
    assert not report.gaps
    assert len(report.coverage) == 3 * 2 * 2 * 2


def test_a_second_build_starts_no_process(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a build that compiles what is there."""
    manifest = tiny(Deed.ANSWER)
    first = build(manifest, store=store)
    forbid_compiling(monkeypatch)
    second = build(manifest, store=store)
    assert outcomes(second) == [Outcome.KEPT] * 3
    assert [r.artifact for r in second.results] == [r.artifact for r in first.results]


def test_force_compiles_what_is_fresh(store: Store) -> None:
    """Catches --force that does nothing."""
    manifest = tiny(Deed.ANSWER)
    build(manifest, store=store)
    assert outcomes(build(manifest, store=store, force=True)) == [Outcome.COMPILED] * 3


def test_a_dry_run_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a dry run that compiles, or that makes the store's directories."""
    forbid_compiling(monkeypatch)
    report = build(tiny(Deed.ANSWER), store=store, dry_run=True)
    assert outcomes(report) == [Outcome.PLANNED] * 3
    assert not store.root.exists()


def test_a_missing_compiler_is_named_with_the_command_that_installs_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a child's ModuleNotFoundError as the only message."""
    monkeypatch.setattr(plan, "toolchain", lambda: None)
    with pytest.raises(CompilerMissingError) as caught:
        build(tiny(Deed.ANSWER), store=store)
    assert caught.value.hint == "pip install 'llbf16-aot[build]'"


def test_without_a_compiler_valid_entries_are_fresh(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a runtime machine on which a complete store cannot be confirmed by `build`."""
    build(tiny(Deed.ANSWER), store=store)
    monkeypatch.setattr(plan, "toolchain", lambda: None)
    assert outcomes(build(tiny(Deed.ANSWER), store=store)) == [Outcome.KEPT] * 3


def test_another_compiler_makes_entries_stale(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches kernels of an old compiler that are served for ever after an upgrade."""
    build(tiny(Deed.ANSWER), store=store)
    upgraded = {**COMPILER, "nvidia-cutlass-dsl-libs-base": "1.2.4"}
    monkeypatch.setattr(plan, "toolchain", lambda: upgraded)
    decided = plan_build(tiny(Deed.ANSWER), store=store)
    assert {item.state for item in decided.items} == {State.STALE}
    assert decided.items[0].detail == (
        "built with nvidia-cutlass-dsl-libs-base 1.2.3, installed is 1.2.4"
    )
    report = execute(decided, store=store)
    assert outcomes(report) == [Outcome.COMPILED] * 3
    found = store.get(decided.items[0].digest)
    assert isinstance(found, Artifact)
    assert found.record.provenance.toolchain == upgraded


def test_other_options_make_entries_stale(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches options that change machine code without a rebuild."""
    build(tiny(Deed.ANSWER), store=store)
    monkeypatch.setattr(plan, "COMPILE_OPTIONS", ("--opt-level 2",))
    decided = plan_build(tiny(Deed.ANSWER), store=store)
    assert {item.state for item in decided.items} == {State.STALE}
    assert "--opt-level 2" in decided.items[0].detail
    assert " ".join(toolchain.COMPILE_OPTIONS) in decided.items[0].detail


def test_a_damaged_entry_is_built_again(store: Store) -> None:
    """Catches an entry that fails its check for ever because it exists."""
    first = build(tiny(Deed.ANSWER), store=store)
    artifact = first.results[0].artifact
    assert artifact is not None
    path = store.cubin_path(artifact.record)
    os.chmod(path, 0o644)
    path.write_bytes(b"x" * len(artifact.cubin))
    decided = plan_build(tiny(Deed.ANSWER), store=store)
    assert [item.state for item in decided.work] == [State.DAMAGED]
    report = execute(decided, store=store)
    assert not report.gaps
    assert store.get(artifact.digest) == artifact


def test_a_failing_key_stops_no_other_and_is_named(store: Store) -> None:
    """Catches a build that ends at the first bad kernel, or that hides which one it was."""
    manifest = tiny(Deed.ANSWER, Deed.REFUSE, Deed.CRASH, tokens="1")
    report = execute(plan_build(manifest, store=store), store=store)
    assert outcomes(report) == [Outcome.COMPILED, Outcome.FAILED, Outcome.FAILED]
    assert len(store.digests()) == 1
    with pytest.raises(CompileError) as caught:
        report.check()
    message = caught.value.message
    assert message.startswith("2 of 3 artifacts could not be built\n- dotprod hidden=16 ")
    assert "\n  no such instruction" in message
    assert "\n- dotprod hidden=24 " in message
    assert "crashed with SIGSEGV" in message
    assert [row.need.model for row in report.gaps] == ["router-16", "router-24"]


def test_a_reason_that_all_keys_share_is_told_once(store: Store) -> None:
    """Catches a broken installation reported in hundreds of equal blocks."""
    report = execute(
        plan_build(tiny(Deed.ANSWER), store=store),
        store=store,
        command=("/nonexistent/python",),
    )
    with pytest.raises(CompileError) as caught:
        report.check()
    assert caught.value.message.count("cannot be started") == 1
    assert caught.value.message.count("\n- dotprod") == 3


def test_a_kernel_that_spills_is_not_published(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a kernel in local memory, which is slow without a sign of it."""
    monkeypatch.setattr(
        CompilerPool, "compile", lambda self, key: Compiled("kernel", SPILLS, b"ptx")
    )
    report = execute(plan_build(tiny(Deed.ANSWER, tokens="1"), store=store), store=store)
    assert isinstance(report.results[0].error, InvalidArtifactError)
    assert "spills to local memory: 16 bytes" in report.results[0].error.message
    assert store.digests() == ()


def test_a_full_store_leaves_the_artifacts_with_the_caller(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a full disk that throws compiled kernels away, and one that counts as success."""

    def full(self: Store, artifact: Artifact) -> None:
        raise StoreFullError("no room", hint="free some")

    monkeypatch.setattr(Store, "publish", full)
    report = build(tiny(Deed.ANSWER), store=store)
    assert all(result.artifact is not None for result in report.results)
    assert len(report.unpublished) == 3
    with pytest.raises(StoreFullError) as caught:
        report.check()
    assert caught.value.exit_code == 5
    assert caught.value.message == "3 of 3 artifacts were built but not stored: no room"


def test_an_artifact_that_is_not_visible_yet_counts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a build that dies on a network file system which shows new names late."""
    monkeypatch.setattr(
        Store, "get", lambda self, digest: Miss(digest, MissReason.ABSENT, "no such entry")
    )
    report = build(tiny(Deed.ANSWER), store=store)
    assert not report.gaps
    assert all(result.artifact is not None for result in report.results)


def test_a_store_that_gives_back_something_else_fails_the_build(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a coverage table that claims what a bad disk did not keep."""
    decided = plan_build(tiny(Deed.ANSWER, tokens="1"), store=store)
    answers = [MissReason.ABSENT, MissReason.DAMAGED]
    monkeypatch.setattr(Store, "get", lambda self, digest: Miss(digest, answers.pop(0), "flipped"))
    report = execute(decided, store=store)
    assert [row.gap for row in report.gaps] == [
        "the store cannot give back what was published: flipped"
    ]


def test_the_proof_fails_for_a_key_that_the_plan_lacks(store: Store) -> None:
    """Catches a coverage proof that believes the plan instead of asking the dispatch again."""
    report = build(tiny(Deed.ANSWER), store=store)
    with pytest.raises(CoverageError, match="1 of 3 problems have no artifact"):
        BuildReport.prove(report.plan, report.results[:-1]).check()


def test_the_proof_fails_for_an_artifact_of_another_key(store: Store) -> None:
    """Catches a proof that matches digests by position or name only."""
    report = build(tiny(Deed.ANSWER), store=store)
    first, second, third = report.results
    swapped = BuildResult(first.item, Outcome.COMPILED, artifact=second.artifact)
    proof = BuildReport.prove(report.plan, (swapped, second, third))
    assert [row.need.problem.tokens for row in proof.gaps] == [1]


def test_a_problem_that_no_kernel_serves_is_a_named_gap(store: Store, tmp_path: Path) -> None:
    """Catches a manifest that is built in part and reported as covered."""
    table = tmp_path / "narrow.json"
    table.write_text(
        '{"schema": 1, "name": "narrow", "source": "test", "rules": [{"use": '
        '{"backend": "dotprod", "block": 32, "experts_per_block": 2}}]}'
    )
    text = manifest_text(8, 16384, tokens="1").replace("reference", str(table))
    report = execute(plan_build(Manifest.parse(text, origin="x"), store=store), store=store)
    assert outcomes(report) == [Outcome.COMPILED]
    with pytest.raises(CoverageError, match="1 of 2 problems") as caught:
        report.check()
    assert "router-16384" in caught.value.message
    assert "weight loads a thread" in caught.value.message


@pytest.mark.parametrize("dry_run", [False, True])
def test_jobs_are_checked_before_anything_is_read(store: Store, dry_run: bool) -> None:
    """Catches a wrong number that only the first build with work to do complains of."""
    with pytest.raises(UsageError, match="jobs is 0, must be at least 1"):
        build("no such manifest", store=store, jobs=0, dry_run=dry_run)
    build(tiny(Deed.ANSWER), store=store)
    done = plan_build(tiny(Deed.ANSWER), store=store)
    assert not done.work
    with pytest.raises(UsageError, match="jobs is -1"):
        execute(done, store=store, jobs=-1)


def test_a_store_may_be_given_by_its_path(store: Store) -> None:
    """Catches a path that is text and fails with an AttributeError deep inside."""
    build(tiny(Deed.ANSWER), store=str(store.root))
    assert len(build(tiny(Deed.ANSWER), store=store.root, dry_run=True).plan.work) == 0
    with pytest.raises(UsageError, match="must be an absolute path"):
        build(tiny(Deed.ANSWER), store="here")


def test_what_the_table_leaves_to_the_library_is_no_gap(store: Store, tmp_path: Path) -> None:
    """Catches a build that fails, or compiles, where the library was chosen on purpose."""
    table = tmp_path / "half.json"
    table.write_text(
        '{"schema": 1, "name": "half", "source": "test", "rules": ['
        '{"tokens": [2, 2], "use": {"backend": "library"}}, '
        '{"use": {"backend": "dotprod", "block": 128, "experts_per_block": 1}}]}'
    )
    text = manifest_text(8).replace("reference", str(table))
    report = build(Manifest.parse(text, origin="x"), store=store)
    report.check()
    assert outcomes(report) == [Outcome.COMPILED] * 2
    assert [bool(row.library) for row in report.coverage] == [False, True, False]
    assert "half" in report.coverage[1].library


def test_targets_of_the_caller_take_the_place_of_the_manifests(store: Store) -> None:
    """Catches --target that adds, and a target built twice because it was named twice."""
    manifest = tiny(Deed.ANSWER, targets="sm_90a, sm_100a")
    decided = plan_build(manifest, store=store, targets=("sm_103a", "sm_103a"))
    assert decided.targets == ("sm_103a",)
    assert {item.key.target for item in decided.items} == {"sm_103a"}
    assert len(decided.items) == 3


@pytest.mark.parametrize("target", ["sm_95a", "sm_80", "sm_90", "hopper"])
def test_a_target_that_cannot_be_built_is_refused_before_anything_is_compiled(
    store: Store, target: str
) -> None:
    """Catches a compiler error, or a silent build for another architecture, late in the build."""
    with pytest.raises(TargetError):
        plan_build(tiny(Deed.ANSWER), store=store, targets=(target,))


def test_two_manifests_share_their_artifacts(store: Store) -> None:
    """Catches a key that is compiled once for each manifest that names it."""
    other = Manifest.parse(manifest_text(8).replace("tiny", "other"), origin="other.yaml")
    decided = plan_build(tiny(Deed.ANSWER), other, store=store)
    assert len(decided.items) == 3
    assert len(decided.needs) == 6


def test_nothing_to_build_is_a_usage_error(store: Store) -> None:
    """Catches an empty list of manifests that succeeds."""
    with pytest.raises(UsageError):
        plan_build(store=store)
    with pytest.raises(UsageError, match="jobs is 0"):
        build(tiny(Deed.ANSWER), store=store, jobs=0)


def test_an_entry_that_vanished_after_planning_is_built(store: Store) -> None:
    """Catches a build that reports an artifact which a concurrent clean-up took away."""
    manifest = tiny(Deed.ANSWER, tokens="1")
    build(manifest, store=store)
    decided = plan_build(manifest, store=store)
    assert decided.work == ()
    empty = Store(store.root.with_name("empty"))
    assert outcomes(execute(decided, store=empty)) == [Outcome.COMPILED]
    assert len(empty.digests()) == 1


def test_events_come_in_order_and_in_the_callers_thread(store: Store) -> None:
    """Catches a progress display that is called by several threads at once."""
    seen: dict[str, list[type]] = {}
    threads = set()

    def watch(event: builder.Event) -> None:
        threads.add(threading.get_ident())
        item = event.result.item if isinstance(event, Settled) else event.item
        seen.setdefault(item.digest, []).append(type(event))

    build(tiny(Deed.ANSWER), store=store, jobs=3, on_event=watch)
    assert list(seen.values()) == [[CompileStarted, CompileFinished, Settled]] * 3
    assert threads == {threading.get_ident()}


def test_an_error_in_a_callback_ends_the_build(store: Store) -> None:
    """Catches a build that goes on, or hangs, after its caller's own code failed."""

    def broken(event: builder.Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tiny(Deed.ANSWER), store=store, on_event=broken)


def test_a_defect_in_a_worker_reaches_the_caller(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a thread that dies silently while the caller waits for its result for ever."""

    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(builder, "assemble", broken)
    with pytest.raises(ZeroDivisionError):
        build(tiny(Deed.ANSWER), store=store)


def count_compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    counted: list[str] = []
    real = CompilerPool.compile

    def counting(self: CompilerPool, key: CompileKey) -> Compiled:
        counted.append(key.digest())
        return real(self, key)

    monkeypatch.setattr(CompilerPool, "compile", counting)
    return counted


def test_concurrent_builders_compile_each_key_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches N ranks that all compile the same cold key (reliability table, row P1)."""
    counted = count_compiles(monkeypatch)
    manifest = tiny(Deed.ANSWER)
    plans = [plan_build(manifest, store=store) for _ in range(8)]
    barrier = threading.Barrier(8)

    def one(decided: plan.BuildPlan) -> BuildReport:
        barrier.wait()
        return execute(decided, store=Store(store.root), jobs=1)

    with ThreadPoolExecutor(8) as threads:
        reports = list(threads.map(one, plans))
    assert len(counted) == len(set(counted)) == 3
    bytes_of = {tuple(r.artifact.cubin for r in rep.results if r.artifact) for rep in reports}
    assert len(bytes_of) == 1
    assert sum(rep.count(Outcome.COMPILED) for rep in reports) == 3
    assert sum(rep.count(Outcome.FOUND) for rep in reports) == 7 * 3


def test_a_contended_key_is_left_for_later(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a builder that waits for one key while others could be built."""
    counted = count_compiles(monkeypatch)
    decided = plan_build(tiny(Deed.ANSWER), store=store)
    first = decided.work[0].digest
    released = threading.Event()
    held = store.key_lock(first, timeout_s=10)
    held.__enter__()

    def watch(event: builder.Event) -> None:
        # The lock is given up only after both other keys are there.
        if isinstance(event, Settled) and len(counted) == 2 and not released.is_set():
            released.set()
            held.__exit__(None, None, None)

    report = execute(decided, store=Store(store.root), jobs=1, on_event=watch)
    assert counted == [decided.work[1].digest, decided.work[2].digest, first]
    assert outcomes(report) == [Outcome.COMPILED] * 3


def test_a_lock_that_is_never_given_up_delays_and_does_not_stop(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a stopped process that blocks every build: locks only save work."""
    monkeypatch.setattr(builder, "_LOCK_SLICE_S", 0.0)
    monkeypatch.setattr(builder, "_LOCK_MARGIN_S", -10.0)
    decided = plan_build(tiny(Deed.ANSWER, tokens="1"), store=store)
    with store.key_lock(decided.work[0].digest, timeout_s=10):
        report = execute(decided, store=Store(store.root), limit_s=10.0)
    assert outcomes(report) == [Outcome.COMPILED]
    assert "building without the lock" in caplog.text


def test_the_plan_prints_itself(store: Store) -> None:
    """Catches a printed plan that is not the plan."""
    decided = plan_build(tiny(Deed.ANSWER), store=store)
    text = str(decided)
    for item in decided.items:
        assert item.digest[:12] in text
    assert text.count("compile  missing") == 3
    assert text.endswith("3 artifacts for 1 target: 3 to compile, 0 to keep")
    data = decided.to_data()
    assert data["compile"] == 3


def test_what_a_layer_has_is_kept_and_says_which_layer(tmp_path: Path) -> None:
    """Catches an image that compiles again what its base layer brings."""
    layer, store = Store(tmp_path / "layer"), Store(tmp_path / "store")
    built = build(tiny(Deed.ANSWER, tokens="1-2"), store=layer)
    assert built.count(Outcome.COMPILED) == 2
    report = build(tiny(Deed.ANSWER, tokens="1-3"), store=store, layers=[layer.root])
    assert (report.count(Outcome.KEPT), report.count(Outcome.COMPILED)) == (2, 1)
    kept = [result for result in report.results if result.outcome is Outcome.KEPT]
    assert {result.item.layer for result in kept} == {str(layer.root)}
    assert f"2 of them in the layer {layer.root}" in report.summary
    assert len(store.digests()) == 1
    assert len(layer.digests()) == 2
    dry = build(tiny(Deed.ANSWER), store=Store(tmp_path / "x"), layers=[layer], dry_run=True)
    assert (dry.count(Outcome.KEPT), dry.count(Outcome.PLANNED)) == (2, 1)


def test_layers_come_from_the_environment_unless_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches LLBF16_AOT_LAYERS that only the runtime reads: every build compiles again."""
    layer = Store(tmp_path / "layer")
    build(tiny(Deed.ANSWER), store=layer)
    monkeypatch.setenv("LLBF16_AOT_LAYERS", str(layer.root))
    assert build(tiny(Deed.ANSWER), store=tmp_path / "a").count(Outcome.KEPT) == 3
    assert build(tiny(Deed.ANSWER), store=tmp_path / "b", layers=()).count(Outcome.KEPT) == 0


def test_a_stale_entry_above_a_fresh_layer_is_built_anew(tmp_path: Path) -> None:
    """Catches a build that is content with a layer's entry that the runtime would never reach."""
    layer, store = Store(tmp_path / "layer"), Store(tmp_path / "store")
    build(tiny(Deed.ANSWER, tokens="1"), store=layer)
    found = layer.get(layer.digests()[0])
    assert isinstance(found, Artifact)
    provenance = msgspec.structs.replace(found.record.provenance, options=("--old",))
    store.publish(
        Artifact(msgspec.structs.replace(found.record, provenance=provenance), found.cubin)
    )
    report = build(tiny(Deed.ANSWER, tokens="1"), store=store, layers=[layer])
    assert report.count(Outcome.COMPILED) == 1
    assert store.get(found.digest) == found


def test_a_damaged_layer_is_built_over(tmp_path: Path) -> None:
    """Catches a layer that is trusted by its names: its entry is damaged and nobody builds."""
    layer, store = Store(tmp_path / "layer"), Store(tmp_path / "store")
    build(tiny(Deed.ANSWER, tokens="1"), store=layer)
    found = layer.get(layer.digests()[0])
    assert isinstance(found, Artifact)
    layer.cubin_path(found.record).unlink()
    report = build(tiny(Deed.ANSWER, tokens="1"), store=store, layers=[layer])
    assert report.results[0].item.state is State.DAMAGED
    assert report.count(Outcome.COMPILED) == 1
    assert store.get(found.digest) == found


def test_a_store_that_turns_out_read_only_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a hundred warnings for one mount, and a build that returns nothing."""

    def refuse(self: Store, artifact: Artifact) -> None:
        raise StoreUnwritableError("read-only file system")

    monkeypatch.setattr(Store, "publish", refuse)
    with caplog.at_level("WARNING", logger="llbf16_aot"):
        report = build(tiny(Deed.ANSWER), store=tmp_path / "store")
    assert len([r for r in caplog.records if "not stored" in r.getMessage()]) == 1
    assert len(report.unpublished) == 3
    assert all(result.artifact is not None for result in report.results)


def test_a_build_that_keeps_an_entry_marks_it_as_used(tmp_path: Path) -> None:
    """Catches kernels of every deployment that prune takes because they were built long ago."""
    store = Store(tmp_path / "store")
    build(tiny(Deed.ANSWER, tokens="1-2"), store=store)
    refs = sorted((store.root / "v1" / "refs").glob("*/*"))
    for path in refs:
        os.utime(path, (0, 0))
    build(tiny(Deed.ANSWER, tokens="1"), store=store)
    assert sorted(path.stat().st_mtime > 0 for path in refs) == [False, True]
