"""The builder: does what a plan decided, and returns every artifact that it made or found.

Each missing artifact is compiled once, in a child process, checked against its launch record and
published. A lock for each artifact makes concurrent builders share the work; it is never needed for
a right result.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from .artifact import RECORD_SCHEMA, Artifact, Blob, Provenance, Record, Resources
from .backends import BACKENDS
from .environment import Environment
from .errors import (
    AotError,
    CompilerMissingError,
    InvalidArtifactError,
    LockTimeoutError,
    StoreError,
    UntrustedStoreError,
    UsageError,
)
from .key import CompileKey, kernel_source_digest
from .launch import EPILOGUE_PARAMS, Attribute, LaunchRecord
from .layers import ArtifactSource, open_layers
from .plan import BuildPlan, PlanItem, plan_build, staleness
from .problem import Target
from .report import BuildReport, BuildResult, Outcome
from .store import Miss, MissReason, Store
from .text import short
from .toolchain import COMPILE_OPTIONS, COMPILER, builder_version

if TYPE_CHECKING:
    from .manifest import Manifest
    from .pool import CompilerPool
    from .protocol import Compiled

__all__ = [
    "BuildPlan",
    "BuildReport",
    "CompileFinished",
    "CompileStarted",
    "Event",
    "Settled",
    "assemble",
    "build",
    "execute",
    "plan_build",
    "rehearse",
]

_log = logging.getLogger(__name__)

_LOCK_SLICE_S = 0.5
"""How long a thread waits for one contended artifact before it looks at the next one."""

_LOCK_MARGIN_S = 30.0
"""What the holder of a lock may take beyond the time limit of its compilation."""


class CompileStarted(msgspec.Struct, frozen=True):
    """A compiler process got this artifact's key."""

    item: PlanItem


class CompileFinished(msgspec.Struct, frozen=True):
    """Machine code came back and passed every check; it is not published yet."""

    item: PlanItem
    size_bytes: int


class Settled(msgspec.Struct, frozen=True):
    """Nothing more will happen to this artifact: it is published, found, or failed."""

    result: BuildResult


Event: TypeAlias = CompileStarted | CompileFinished | Settled
"""What `on_event` is called with, always by the thread that called `execute`."""


def assemble(key: CompileKey, compiled: Compiled, *, compiler: dict[str, str]) -> Artifact:
    """The artifact of compiled machine code, checked against its launch record.

    Raises InvalidArtifactError unless the cubin is a CUDA ELF for the key's target that holds the
    symbol with the record's parameters, and keeps every value in registers.
    """
    from .elf import check_cubin

    backend = BACKENDS[key.backend]
    launch = LaunchRecord.assemble(
        compiled.symbol,
        backend.geometry(key.config),
        attributes=(Attribute.PROGRAMMATIC_STREAM_SERIALIZATION,) if key.pdl else (),
        sources=(*backend.PARAMS, *EPILOGUE_PARAMS[key.epilogue]),
    )
    info = check_cubin(launch, Target.parse(key.target), compiled.cubin)
    if info.local_bytes:
        raise InvalidArtifactError(
            f"the kernel spills to local memory: {info.local_bytes} bytes a thread, "
            f"with {info.registers} registers",
            hint="choose a tile in the tuning table that holds fewer values a thread",
        )
    return Artifact(
        record=Record(
            schema=RECORD_SCHEMA,
            key=key,
            launch=launch,
            resources=Resources(
                registers=info.registers,
                static_shared_bytes=info.static_shared_bytes,
                local_bytes=info.local_bytes,
            ),
            provenance=Provenance(
                builder_version=builder_version(),
                toolchain=compiler,
                options=COMPILE_OPTIONS,
                kernel_source_digest=kernel_source_digest(key.backend),
            ),
            cubin=Blob.of(compiled.cubin),
        ),
        cubin=compiled.cubin,
    )


class _Task:
    """An artifact to build, and since when another process holds its lock."""

    def __init__(self, item: PlanItem) -> None:
        self.item = item
        self.blocked_since: float | None = None


class _Workers:
    """Threads that take artifacts from one queue and report on another."""

    def __init__(
        self,
        items: Iterable[PlanItem],
        *,
        store: Store,
        pool: CompilerPool,
        compiler: dict[str, str],
        force: bool,
        lock_limit_s: float,
    ) -> None:
        self.reports: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._tasks = deque(_Task(item) for item in items)
        self._stop = threading.Event()
        self._store = store
        self._pool = pool
        self._compiler = compiler
        self._force = force
        self._lock_limit_s = lock_limit_s
        self._threads: list[threading.Thread] = []
        self._telling = threading.Lock()
        self._told = False

    def start(self, count: int) -> None:
        """Start the threads; they end when nothing is left to do."""
        for number in range(count):
            thread = threading.Thread(target=self._run, name=f"build-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Take on nothing new. Work under way ends when its compiler process does."""
        self._stop.set()

    def join(self) -> None:
        """Wait for the threads: they end at once after `stop` and the pool's `close`."""
        for thread in self._threads:
            thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    task = self._tasks.popleft()
                except IndexError:
                    return
                result = self._attend(task)
                if result is None:
                    self._tasks.append(task)
                else:
                    self.reports.put(Settled(result))
        except BaseException as error:
            # Whatever it is, the caller's thread must raise it: here nobody would see it.
            self.reports.put(error)

    def _attend(self, task: _Task) -> BuildResult | None:
        """The task's result, or None if another process is building the same artifact.

        The first look does not wait: as long as anything else can be built, it is built first.
        """
        item = task.item
        wait_s = 0.0 if task.blocked_since is None else _LOCK_SLICE_S
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._store.key_lock(item.digest, timeout_s=wait_s))
            except LockTimeoutError as error:
                now = time.monotonic()
                if task.blocked_since is None:
                    task.blocked_since = now
                    _log.info("%s: another process builds it, waiting", short(item.digest))
                if now - task.blocked_since < self._lock_limit_s:
                    return None
                _log.warning("building without the lock: %s", error.message)
            return self._settle(item)

    def _settle(self, item: PlanItem) -> BuildResult:
        try:
            if not self._force:
                found = self._store.get(item.digest)
                if isinstance(found, Artifact) and not staleness(
                    found.record.provenance, self._compiler
                ):
                    return BuildResult(item, Outcome.FOUND, artifact=found)
            self.reports.put(CompileStarted(item))
            compiled = self._pool.compile(item.key)
            artifact = assemble(item.key, compiled, compiler=self._compiler)
        except UntrustedStoreError:
            raise
        except AotError as error:
            return BuildResult(item, Outcome.FAILED, error=error)
        self.reports.put(CompileFinished(item, len(artifact.cubin)))
        try:
            self._store.publish(artifact)
        except UntrustedStoreError:
            raise
        except StoreError as error:
            self._tell(item, error)
            return BuildResult(item, Outcome.COMPILED, artifact=artifact, unpublished=error)
        return BuildResult(item, Outcome.COMPILED, artifact=artifact)

    def _tell(self, item: PlanItem, error: StoreError) -> None:
        """Warn of the first artifact that the store does not take: the others say no more."""
        with self._telling:
            level = logging.INFO if self._told else logging.WARNING
            self._told = True
        _log.log(level, "%s: built, not stored: %s", short(item.digest), error.message)


def execute(
    plan: BuildPlan,
    *,
    store: Store,
    layers: Iterable[ArtifactSource] = (),
    jobs: int | None = None,
    on_event: Callable[[Event], None] | None = None,
    limit_s: float | None = None,
    command: Sequence[str] | None = None,
) -> BuildReport:
    """Do what the plan says, and prove the coverage; all that is compiled goes into `store`.

    `layers` are those below the store that the plan was made with.

    The report holds every artifact, those that the store would not take too; its `check` raises
    what went wrong with single ones. A key that fails stops no other. Raises UsageError for `jobs`
    below 1 and for variables that make no sense, CompilerMissingError where something must be
    compiled and no compiler is installed, UntrustedStoreError, and what `on_event` raises. `jobs`
    defaults to LLBF16_AOT_JOBS, else one process for each core, `limit_s` to
    LLBF16_AOT_COMPILE_TIMEOUT_S; `command` is the program of a compiler process.
    """
    _check_jobs(jobs)
    results: dict[str, BuildResult] = {}
    work = list(plan.work)
    source = open_layers(store, layers)
    for item in plan.items:
        if item.compile:
            continue
        found = source.get(item.digest)
        if isinstance(found, Artifact):
            # Not written in a layer: what it has is not in the store.
            store.touch(item.digest)
            results[item.digest] = BuildResult(item, Outcome.KEPT, artifact=found)
        else:
            _log.info("%s: gone since the plan was made: %s", short(item.digest), found.detail)
            work.append(item)
    if work:
        for result in _compile(
            work,
            plan=plan,
            store=store,
            jobs=_job_count(jobs, len(work)),
            limit_s=Environment().compile_timeout_s if limit_s is None else limit_s,
            command=command,
            on_event=on_event or _ignore,
        ):
            results[result.item.digest] = _read_back(store, result)
    return BuildReport.prove(plan, tuple(results[item.digest] for item in plan.items))


def build(
    *manifests: Manifest | str | Path,
    store: Store | Path | str | None = None,
    layers: Iterable[Store | Path | str] | None = None,
    targets: Iterable[Target | str] = (),
    jobs: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    on_event: Callable[[Event], None] | None = None,
) -> BuildReport:
    """Build all that the manifests need into a store, by default the user's.

    A manifest may be given by its path or, if it comes with the package, its name. `store` is a
    Store or its absolute path; without one, LLBF16_AOT_STORE or the user's cache. `layers` are the
    read-only stores below it, by default those of LLBF16_AOT_LAYERS: what they have is not compiled
    again. A store that cannot be written is warned of once. `targets`, as
    `sm_90a`, take the place of the manifests' own. At most `jobs` compiler processes run at once,
    by default LLBF16_AOT_JOBS, else one for each core. `force` compiles what the store has and is
    up to date, too. `on_event` is called in this thread with each Event; what it raises ends the
    build. With `dry_run` nothing is compiled, no event comes, and the outcomes are what would be.

    Raises, before anything is compiled: UsageError for `jobs` below 1, no manifest, a store path
    that is not absolute or variables that make no sense, and its subclasses ManifestError,
    TargetError and TuningTableError; StoreError where nothing says where the store is;
    CompilerMissingError where something must be compiled and no compiler is installed. Raises
    UntrustedStoreError where others could change the store. After the build, raises CompileError
    where an artifact could not be built, else CoverageError (in a dry run, too) where a problem has
    none. Artifacts that could be built but not stored raise nothing: they are in the report, and in
    its `unpublished`.
    """
    from .manifest import Manifest

    _check_jobs(jobs)
    if not isinstance(store, Store):
        explicit = None if store is None else Path(store)
        store = Store(Environment().store_location(explicit).root)
    below = Environment().layers if layers is None else tuple(layers)
    opened = tuple(each if isinstance(each, Store) else Store(Path(each)) for each in below)
    source = open_layers(store, opened)
    loaded = (m if isinstance(m, Manifest) else Manifest.load(m) for m in manifests)
    plan = plan_build(*loaded, store=source, targets=targets, force=force)
    if dry_run:
        report = rehearse(plan, store=source)
    else:
        report = execute(plan, store=store, layers=opened, jobs=jobs, on_event=on_event)
    report.check_coverage()
    return report


def rehearse(plan: BuildPlan, *, store: ArtifactSource) -> BuildReport:
    """The report of a build in which every compilation works: compiles nothing, proves coverage.

    Raises UntrustedStoreError.
    """
    return BuildReport.prove(
        plan,
        tuple(
            BuildResult(item, Outcome.PLANNED) if item.compile else _kept(store, item)
            for item in plan.items
        ),
    )


def _kept(store: ArtifactSource, item: PlanItem) -> BuildResult:
    found = store.get(item.digest)
    if isinstance(found, Artifact):
        return BuildResult(item, Outcome.KEPT, artifact=found)
    return BuildResult(item, Outcome.PLANNED)


def _ignore(event: Event) -> None:
    del event


def _check_jobs(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs is {jobs}, must be at least 1")


def _job_count(jobs: int | None, keys: int) -> int:
    wanted = jobs or Environment().jobs or len(os.sched_getaffinity(0))
    return max(1, min(wanted, keys))


def _compile(
    work: list[PlanItem],
    *,
    plan: BuildPlan,
    store: Store,
    jobs: int,
    limit_s: float,
    command: Sequence[str] | None,
    on_event: Callable[[Event], None],
) -> list[BuildResult]:
    from .pool import CompilerPool

    if plan.compiler is None:
        raise CompilerMissingError(
            f"{len(work)} artifacts must be compiled and {COMPILER} is not installed",
            hint="pip install 'llbf16-aot[build]'",
        )
    settled: list[BuildResult] = []
    with CompilerPool(
        jobs=jobs, version=plan.compiler[COMPILER], limit_s=limit_s, command=command
    ) as pool:
        workers = _Workers(
            work,
            store=store,
            pool=pool,
            compiler=plan.compiler,
            force=plan.force,
            lock_limit_s=limit_s + _LOCK_MARGIN_S,
        )
        try:
            workers.start(jobs)
            while len(settled) < len(work):
                report = workers.reports.get()
                if isinstance(report, BaseException):
                    raise report
                if isinstance(report, Settled):
                    settled.append(report.result)
                on_event(report)
        finally:
            # In this order: no thread may start a process after the pool has ended them all.
            workers.stop()
            pool.close()
            workers.join()
    return settled


def _read_back(store: Store, result: BuildResult) -> BuildResult:
    """The result, failed if the store took the artifact and now gives back something else.

    One that cannot be seen yet is no failure: file systems across a network show a new name late,
    and this process holds the bytes.
    """
    if result.artifact is None or result.unpublished is not None:
        return result
    found = store.get(result.item.digest)
    if not isinstance(found, Miss):
        return result
    if found.reason is MissReason.ABSENT:
        _log.warning("%s: published, and not visible yet", short(result.item.digest))
        return result
    error = InvalidArtifactError(
        f"the store cannot give back what was published: {found.detail}",
        hint="check the disk, then run the build again",
    )
    return BuildResult(result.item, Outcome.FAILED, error=error)
