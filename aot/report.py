"""The build report: what became of every artifact, and the proof that every need is served."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from .artifact import Artifact
from .errors import (
    AotError,
    CompileError,
    CoverageError,
    InvalidArtifactError,
    LibraryChosenError,
    StoreError,
    UnsupportedProblemError,
)
from .key import CompileKey
from .plan import BuildPlan, Coverage, PlanItem, coverage_table, need_data
from .text import counted, short, size

__all__ = ["BuildReport", "BuildResult", "Coverage", "Outcome"]


class Outcome(str, enum.Enum):
    """What became of an artifact."""

    KEPT = "kept"
    """It was in the store and is up to date."""
    COMPILED = "compiled"
    FOUND = "found"
    """Another process built it while this one waited."""
    FAILED = "failed"
    PLANNED = "planned"
    """It would be compiled: a dry run."""


class BuildResult(msgspec.Struct, frozen=True):
    """An artifact of the plan after the build.

    `artifact` is what this process holds, verified; `error` says why there is none; `unpublished`
    why the store did not take it.
    """

    item: PlanItem
    outcome: Outcome
    artifact: Artifact | None = None
    error: AotError | None = None
    unpublished: StoreError | None = None


class BuildReport(msgspec.Struct, frozen=True):
    """What a build did. `check` raises what went wrong; the artifacts are here all the same."""

    plan: BuildPlan
    results: tuple[BuildResult, ...]
    coverage: tuple[Coverage, ...]

    @classmethod
    def prove(cls, plan: BuildPlan, results: tuple[BuildResult, ...]) -> BuildReport:
        """Ask for every need as the runtime will, and look whether the answer is in hand.

        Uses nothing that the plan decided: the dispatch runs again, and the artifact that serves a
        need must be of the very key that the dispatch gives.
        """
        by_digest = {result.item.digest: result for result in results}
        digests: dict[CompileKey, str] = {}
        rows = []
        for need in plan.needs:
            try:
                key = need.key()
            except LibraryChosenError as error:
                rows.append(Coverage(need, "", library=error.message))
                continue
            except UnsupportedProblemError as error:
                rows.append(Coverage(need, "", error.message))
                continue
            digest = digests.get(key) or digests.setdefault(key, key.digest())
            rows.append(Coverage(need, digest, _gap(key, digest, by_digest.get(digest))))
        return cls(plan, results, tuple(rows))

    @property
    def failures(self) -> tuple[BuildResult, ...]:
        """The artifacts that could not be built."""
        return tuple(result for result in self.results if result.error is not None)

    @property
    def unpublished(self) -> tuple[BuildResult, ...]:
        """The artifacts that were built and that the store did not take."""
        return tuple(result for result in self.results if result.unpublished is not None)

    @property
    def refused(self) -> tuple[BuildResult, ...]:
        """The artifacts whose machine code did not pass its checks, mostly because it spills."""
        return tuple(r for r in self.failures if isinstance(r.error, InvalidArtifactError))

    @property
    def gaps(self) -> tuple[Coverage, ...]:
        """The needs that nothing serves."""
        return tuple(row for row in self.coverage if row.gap)

    def count(self, outcome: Outcome) -> int:
        """How many artifacts had this outcome."""
        return sum(result.outcome is outcome for result in self.results)

    def check_coverage(self) -> None:
        """Raise CompileError or CoverageError unless an artifact serves every need."""
        if self.failures:
            reasons = _grouped((str(r.item.key), r.error) for r in self.failures)
            raise CompileError(
                f"{len(self.failures)} of {len(self.results)} artifacts could not be built\n"
                f"{reasons}",
                hint=next((r.error.hint for r in self.failures if r.error and r.error.hint), ""),
            )
        if self.gaps:
            raise CoverageError(
                f"{len(self.gaps)} of {len(self.coverage)} problems have no artifact\n"
                f"{coverage_table(self.gaps, self.plan.items)}",
                hint="change the routers of the manifest, or the tuning table that they name",
            )

    def check(self) -> None:
        """Raise as `check_coverage`, then the StoreError that kept artifacts out."""
        self.check_coverage()
        for result in self.unpublished:
            error = result.unpublished
            if error is not None:
                raise type(error)(
                    f"{len(self.unpublished)} of {len(self.results)} artifacts were built but not "
                    f"stored: {error.message}",
                    hint=error.hint,
                )

    def check_candidates(self) -> None:
        """Raise as `check`, but let the refused ones pass: a tile that spills is no candidate."""
        refused = {result.item.digest for result in self.refused}
        rest = (result for result in self.results if result.item.digest not in refused)
        BuildReport(self.plan, tuple(rest), self.coverage).check()

    def to_data(self) -> dict[str, object]:
        """The report as plain values, ready for JSON."""
        return {
            "manifests": self.plan.manifests,
            "store": str(self.plan.store),
            "targets": self.plan.targets,
            "compiler": self.plan.compiler,
            "counts": {outcome.value: self.count(outcome) for outcome in Outcome},
            "artifacts": tuple(_result_data(result) for result in self.results),
            "coverage": tuple(
                {
                    **need_data(row.need),
                    "digest": row.digest,
                    "reason": row.gap or row.library,
                    "library": bool(row.library),
                }
                for row in self.coverage
            ),
        }

    def __str__(self) -> str:
        if not self.coverage:
            return self.summary
        return f"{coverage_table(self.coverage, self.plan.items)}\n\n{self.summary}"

    @property
    def summary(self) -> str:
        """Two lines: how many problems are served, and what became of the artifacts."""
        counts = ", ".join(f"{n} {o.value}" for o in Outcome if (n := self.count(o)))
        layers = [r.item.layer for r in self.results if r.outcome is Outcome.KEPT and r.item.layer]
        for layer in dict.fromkeys(layers):
            counts += f", {layers.count(layer)} of them in the layer {layer}"
        total = sum(r.artifact.record.cubin.size_bytes for r in self.results if r.artifact)
        text = f"{counted(len(self.results), 'artifact')} ({counts}), {size(total)} of machine code"
        if not self.coverage:
            return text
        covered = f"{len(self.coverage) - len(self.gaps)} of {len(self.coverage)} problems covered"
        library = sum(bool(row.library) for row in self.coverage)
        if library:
            covered += f", {library} of them by the library"
        return f"{covered}\n{text}"


def _gap(key: CompileKey, digest: str, result: BuildResult | None) -> str:
    if result is None:
        return f"the plan lacks {short(digest)}, {key}"
    if result.error is not None:
        return result.error.message.partition("\n")[0]
    if result.outcome is Outcome.PLANNED:
        return ""
    if result.artifact is None or result.artifact.digest != digest:
        return f"no artifact of {short(digest)}, {key}"
    if result.artifact.record.key != key:
        return f"the artifact {short(digest)} was built for {result.artifact.record.key}"
    return ""


def _grouped(failures: Iterable[tuple[str, AotError | None]]) -> str:
    """Each reason once, under the names of all that failed for it."""
    names: dict[str, list[str]] = {}
    for name, error in failures:
        names.setdefault("" if error is None else error.message, []).append(name)
    lines = []
    for reason, failed in names.items():
        lines += [f"- {name}" for name in failed]
        lines += [f"  {line}" for line in reason.splitlines()]
    return "\n".join(lines)


def _result_data(result: BuildResult) -> dict[str, object]:
    data: dict[str, object] = {
        "digest": result.item.digest,
        "outcome": result.outcome.value,
        "state_before": result.item.state.value,
        "models": result.item.models,
        "layer": result.item.layer,
        "key": msgspec.to_builtins(result.item.key),
    }
    if result.artifact is not None:
        record = result.artifact.record
        data["size_bytes"] = record.cubin.size_bytes
        data["cubin"] = record.cubin.digest
        data["resources"] = msgspec.to_builtins(record.resources)
    for name, error in (("error", result.error), ("unpublished", result.unpublished)):
        if error is not None:
            data[name] = {"code": error.code, "message": error.message, "hint": error.hint}
    return data
