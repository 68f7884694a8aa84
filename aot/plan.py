"""The build plan: what a manifest needs, what the store has, and so what must be compiled."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from .artifact import Artifact, Provenance
from .dispatch import dispatch, load_table
from .errors import LibraryChosenError, TargetError, UnsupportedProblemError, UsageError
from .key import CompileKey, check_target
from .problem import Epilogue, Problem, Target
from .search import probe_keys
from .text import counted, numbers, short, table
from .toolchain import COMPILE_OPTIONS, KNOWN_TARGETS, toolchain

if TYPE_CHECKING:
    from .layers import ArtifactSource
    from .manifest import Manifest

__all__ = [
    "PROBE_MODEL",
    "BuildPlan",
    "Coverage",
    "Need",
    "PlanItem",
    "State",
    "kernel_text",
    "manifest_targets",
    "needed_digests",
    "plan_build",
    "plan_keys",
    "staleness",
]


PROBE_MODEL = "measurements"
"""Who asks for the probe kernels, where an artifact's models are listed."""


class State(str, enum.Enum):
    """What the store has of a key."""

    FRESH = "fresh"
    MISSING = "missing"
    STALE = "stale"
    """There, and made by another compiler or with other options than the present ones."""
    DAMAGED = "damaged"


class Need(msgspec.Struct, frozen=True):
    """One problem that a router of a manifest can ask for on a target, and its artifact.

    `digest` is empty where no kernel serves the problem; `reason` says why. It is no fault where
    `library` is set: the tuning table leaves the problem to torch's library, which is faster there.
    """

    manifest: str
    router: int
    model: str
    tuning: str
    problem: Problem
    target: Target
    digest: str
    reason: str = ""
    library: bool = False

    def key(self) -> CompileKey:
        """What the runtime will ask for, by its own dispatch; raises what `dispatch` raises."""
        return dispatch(self.problem, self.target, load_table(self.tuning, self.target))


class Coverage(msgspec.Struct, frozen=True):
    """A need with the digest of the artifact that serves it, or the reason why none does.

    `library` is the reason why the library serves it: with one there is no gap.
    """

    need: Need
    digest: str
    gap: str = ""
    library: str = ""


class PlanItem(msgspec.Struct, frozen=True):
    """One artifact of a plan: its key, what the store has of it, and whether it is compiled."""

    key: CompileKey
    digest: str
    state: State
    detail: str
    compile: bool
    models: tuple[str, ...]
    layer: str = ""
    """The layer that has it, where the store itself has not."""


class BuildPlan(msgspec.Struct, frozen=True):
    """What a build will do. Printing it is the dry run."""

    manifests: tuple[str, ...]
    store: Path
    targets: tuple[str, ...]
    compiler: dict[str, str] | None
    force: bool
    items: tuple[PlanItem, ...]
    needs: tuple[Need, ...]

    @property
    def work(self) -> tuple[PlanItem, ...]:
        """The artifacts that must be compiled, target by target."""
        return tuple(item for item in self.items if item.compile)

    @property
    def gaps(self) -> tuple[Need, ...]:
        """The problems that neither a kernel nor, by choice, the library serves."""
        return tuple(need for need in self.needs if not need.digest and not need.library)

    def to_data(self) -> dict[str, object]:
        """The plan as plain values, ready for JSON."""
        return {
            "manifests": self.manifests,
            "store": str(self.store),
            "targets": self.targets,
            "compiler": self.compiler,
            "force": self.force,
            "compile": len(self.work),
            "artifacts": tuple(
                {
                    "digest": item.digest,
                    "state": item.state.value,
                    "detail": item.detail,
                    "compile": item.compile,
                    "layer": item.layer,
                    "models": item.models,
                    "key": msgspec.to_builtins(item.key),
                }
                for item in self.items
            ),
            "needs": tuple(need_data(need) for need in self.needs),
        }

    def __str__(self) -> str:
        rows = (
            (
                "compile" if item.compile else "keep",
                item.state.value,
                short(item.digest),
                *key_cells(item.key),
                item.detail or ", ".join(item.models),
            )
            for item in self.items
        )
        header = ("action", "state", "artifact", *KEY_HEADER, "asked for by, or why")
        return f"{table(header, rows)}\n\n{self.summary}"

    @property
    def summary(self) -> str:
        """One line: how many artifacts there are and how many of them will be compiled."""
        text = (
            f"{counted(len(self.items), 'artifact')} for {counted(len(self.targets), 'target')}: "
            f"{len(self.work)} to compile, {len(self.items) - len(self.work)} to keep"
        )
        if self.gaps:
            text += f"; no kernel for {counted(len(self.gaps), 'problem')}"
        return text

    def coverage_text(self) -> str:
        """The table router x tokens x target -> artifact that the build will prove."""
        rows = (
            Coverage(need, need.digest, library=need.reason)
            if need.library
            else Coverage(need, need.digest, need.reason)
            for need in self.needs
        )
        return coverage_table(rows, self.items)


KEY_HEADER = ("kernel", "tile", "x", "weight", "out", "pdl", "target")


def kernel_text(key: CompileKey) -> str:
    """The configuration of a key's kernel family, as `block=128 tokens=1`."""
    return " ".join(f"{name}={getattr(key.config, name)}" for name in key.config.__struct_fields__)


def result_text(what: CompileKey | Problem) -> str:
    """The element type of the logits and what is done to the sums, as `fp32` or `fp32 scale`."""
    epilogue = "" if what.epilogue is Epilogue.NONE else f" {what.epilogue.value}"
    return f"{what.out_dtype.value}{epilogue}"


def key_cells(key: CompileKey) -> tuple[str, ...]:
    """A key as the cells of a table under KEY_HEADER."""
    return (
        key.backend,
        kernel_text(key),
        key.x_dtype.value,
        key.weight_dtype.value,
        result_text(key),
        "on" if key.pdl else "off",
        key.target,
    )


def need_data(need: Need) -> dict[str, object]:
    """A need as plain values, ready for JSON."""
    return {
        "manifest": need.manifest,
        "model": need.model,
        "target": str(need.target),
        "tuning": need.tuning,
        **cast("dict[str, object]", msgspec.to_builtins(need.problem)),
        "digest": need.digest,
        "reason": need.reason,
        "library": need.library,
    }


def coverage_table(rows: Iterable[Coverage], items: Iterable[PlanItem]) -> str:
    """Needs with what serves each, or the reason why nothing does, tokens as ranges.

    `items` tell which kernel a digest stands for.
    """
    kernels = {item.digest: f"{item.key.backend} {kernel_text(item.key)}" for item in items}

    def alike(row: Coverage) -> tuple[object, ...]:
        need = row.need
        problem = need.problem
        return (
            need.manifest,
            need.router,
            str(need.target),
            problem.out_dtype,
            problem.epilogue,
            problem.pdl,
            row.digest,
            # Reasons often name M: those of neighbours would differ by nothing else.
            bool(row.gap),
            bool(row.library),
        )

    lines = []
    for _, members in groupby(rows, key=alike):
        group = tuple(members)
        first = group[0]
        need, problem = first.need, first.need.problem
        lines.append(
            (
                need.model,
                str(problem.hidden),
                str(problem.experts),
                numbers(row.need.problem.tokens for row in group),
                result_text(problem),
                "on" if problem.pdl else "off",
                str(need.target),
                "gap" if first.gap else "library" if first.library else short(first.digest),
                first.gap or first.library or kernels.get(first.digest, ""),
            )
        )
    header = ("router", "K", "N", "M", "out", "pdl", "target", "artifact", "kernel, or why none")
    return table(header, lines)


def staleness(provenance: Provenance, compiler: Mapping[str, str] | None) -> str:
    """Why an artifact of this provenance should be built anew, empty where it need not be.

    Without an installed compiler nothing is stale: what is there is the best that can be had.
    """
    if compiler is None:
        return ""
    for name in sorted({*provenance.toolchain, *compiler}):
        built, present = provenance.toolchain.get(name), compiler.get(name)
        if built != present:
            return f"built with {name} {built or '(none)'}, installed is {present or '(none)'}"
    if provenance.options != COMPILE_OPTIONS:
        return (
            f"built with options {' '.join(provenance.options) or '(none)'}, "
            f"present are {' '.join(COMPILE_OPTIONS)}"
        )
    return ""


def plan_build(
    *manifests: Manifest,
    store: ArtifactSource,
    targets: Iterable[Target | str] = (),
    force: bool = False,
    probes: bool = False,
) -> BuildPlan:
    """Decide what to compile so that the store serves all that the manifests can ask for.

    Reads the store, with its layers where it is a LayeredSource, and changes nothing. What the
    runtime would find first counts: an entry of a layer is kept, unless it is stale or the store
    above it has one that is. `targets` take the place of the manifests' own; `force` compiles what
    is fresh too; `probes` adds the kernels that `bench` measures with. Each artifact stands once,
    however many routers ask for it. Raises UsageError and its subclasses for bad input,
    UntrustedStoreError where the store is not to be trusted.
    """
    needs: list[Need] = []
    keys: dict[str, CompileKey] = {}
    models: dict[str, list[str]] = {}
    for manifest, wanted in manifest_targets(manifests, targets):
        for probe in probe_keys(wanted) if probes else ():
            keys[probe.digest()] = probe
            models[probe.digest()] = [PROBE_MODEL]
        for need, key in _needs(manifest, wanted):
            needs.append(need)
            if key is None:
                continue
            keys[need.digest] = key
            askers = models.setdefault(need.digest, [])
            if need.model not in askers:
                askers.append(need.model)

    return plan_keys(keys, models, manifests, store=store, force=force, needs=tuple(needs))


def needed_digests(*manifests: Manifest, targets: Iterable[Target | str] = ()) -> frozenset[str]:
    """The digests of all artifacts that these manifests ask for; reads no store.

    `targets` take the place of the manifests' own. Raises UsageError and its subclasses.
    """
    return frozenset(
        need.digest
        for manifest, wanted in manifest_targets(manifests, targets)
        for need, key in _needs(manifest, wanted)
        if key is not None
    )


def manifest_targets(
    manifests: tuple[Manifest, ...], targets: Iterable[Target | str]
) -> Iterator[tuple[Manifest, tuple[Target, ...]]]:
    """Each manifest with the targets to build it for; raises UsageError and its subclasses."""
    if not manifests:
        raise UsageError("no manifest to build", hint="name a manifest, for example dsv4")
    override = tuple(dict.fromkeys(_parse(target) for target in targets))
    for manifest in manifests:
        wanted = override or manifest.targets
        for target in wanted:
            _check_known(target)
        yield manifest, wanted


def plan_keys(
    keys: Mapping[str, CompileKey],
    models: Mapping[str, Iterable[str]],
    manifests: Iterable[Manifest],
    *,
    store: ArtifactSource,
    force: bool,
    needs: tuple[Need, ...],
) -> BuildPlan:
    """The plan of these keys by digest, with the models that ask for each, target by target."""
    compiler = toolchain()
    used = tuple(
        dict.fromkeys(
            (*(str(need.target) for need in needs), *(key.target for key in keys.values()))
        )
    )
    # One target after the other, so that a compiler process serves many keys before it is replaced.
    ordered = sorted(keys, key=lambda digest: used.index(keys[digest].target))
    items = []
    for digest in ordered:
        state, detail, layer = _look_up(store, digest, compiler)
        items.append(
            PlanItem(
                key=keys[digest],
                digest=digest,
                state=state,
                detail=detail,
                compile=force or state is not State.FRESH,
                models=tuple(models[digest]),
                layer=layer,
            )
        )
    return BuildPlan(
        manifests=tuple(manifest.name for manifest in manifests),
        store=store.root,
        targets=used,
        compiler=compiler,
        force=force,
        items=tuple(items),
        needs=needs,
    )


def _parse(target: Target | str) -> Target:
    return Target.parse(target) if isinstance(target, str) else target


def _check_known(target: Target) -> None:
    check_target(target)
    if str(target) not in KNOWN_TARGETS:
        raise TargetError(
            f"target {target} is unknown to the compiler",
            hint=f"supported are {', '.join(KNOWN_TARGETS)}",
        )


def _needs(
    manifest: Manifest, targets: tuple[Target, ...]
) -> Iterator[tuple[Need, CompileKey | None]]:
    digests: dict[CompileKey, str] = {}
    for target in targets:
        for number, router in enumerate(manifest.routers):
            tuning = load_table(router.tuning, target)
            for problem in router.problems():
                key: CompileKey | None = None
                digest = reason = ""
                library = False
                try:
                    key = dispatch(problem, target, tuning)
                    digest = digests.get(key) or digests.setdefault(key, key.digest())
                except UnsupportedProblemError as error:
                    reason = error.message
                    library = isinstance(error, LibraryChosenError)
                yield (
                    Need(
                        manifest=manifest.name,
                        router=number,
                        model=router.model,
                        tuning=router.tuning,
                        problem=problem,
                        target=target,
                        digest=digest,
                        reason=reason,
                        library=library,
                    ),
                    key,
                )


def _look_up(
    store: ArtifactSource, digest: str, compiler: Mapping[str, str] | None
) -> tuple[State, str, str]:
    """What there is of a key, why it is not fresh, and the layer that has it."""
    from .layers import LayeredSource
    from .store import Miss, MissReason

    sources = store.sources if isinstance(store, LayeredSource) else (store,)
    told: Miss | None = None
    for number, source in enumerate(sources):
        found = source.get(digest)
        if isinstance(found, Artifact):
            reason = staleness(found.record.provenance, compiler)
            layer = str(source.root) if number else ""
            if reason:
                return State.STALE, reason, layer
            return State.FRESH, f"in the layer {layer}" if layer else "", layer
        if told is None or told.reason is MissReason.ABSENT:
            told = found
    if told is None or told.reason is MissReason.ABSENT:
        return State.MISSING, "", ""
    return State.DAMAGED, told.detail, ""
