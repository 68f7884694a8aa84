"""Explaining why the store has an artifact or has not, field by field."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

import msgspec

from .artifact import Provenance
from .errors import ConfigError
from .key import DIGEST_PATTERN, CompileKey, kernel_source_digest
from .plan import PlanItem, staleness
from .scan import Entry
from .text import counted, short, table
from .toolchain import COMPILE_OPTIONS, builder_version

__all__ = ["Change", "Explanation", "Status", "differences", "explain_entry", "explain_item"]

KERNEL_SOURCES = "kernel_source_digest"
BUILDER = "builder_version"


class Status(str, enum.Enum):
    """What the store has of a key."""

    PRESENT = "present"
    STALE = "stale"
    """There, from inputs that are not the present ones; or there under its former identity."""
    ABSENT = "absent"
    DAMAGED = "damaged"


class Change(msgspec.Struct, frozen=True):
    """One field: what is wanted now and what the entry was made with; empty where there is none."""

    field: str
    wanted: str
    found: str


class Explanation(msgspec.Struct, frozen=True):
    """What the store has of one key, and why.

    `nearest` is the entry that `changes` compare with, empty where the store has none; `key` is
    None where the entry's own record cannot be read.
    """

    digest: str
    status: Status
    detail: str
    key: CompileKey | None = None
    nearest: str = ""
    changes: tuple[Change, ...] = ()
    models: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{short(self.digest)}  {self.status.value}"
        lines = [f"{head}  {self.key}" if self.key is not None else head]
        if self.models:
            lines.append(f"  asked for by {', '.join(self.models)}")
        if self.detail:
            lines.append(f"  {self.detail}")
        if self.changes:
            rows = (("", c.field, _shown(c.wanted), _shown(c.found)) for c in self.changes)
            lines.append(table(("", "field", "wanted", "entry has"), rows))
        return "\n".join(lines)


def _shown(value: str) -> str:
    return short(value) if DIGEST_PATTERN.fullmatch(value) else value or "(none)"


def explain_entry(
    entry: Entry, known: Mapping[str, Entry], compiler: Mapping[str, str] | None
) -> Explanation:
    """What an entry of the store is worth to the present inputs.

    `known` holds the store's entries by digest, `compiler` the installed versions as `toolchain`
    gives them; without a compiler its versions are not compared.
    """
    record = entry.record
    if record is None or entry.reason is not None:
        return Explanation(entry.digest, Status.DAMAGED, entry.detail)
    present = _sources(record.key)
    changes = _input_changes(record.provenance, present, compiler)
    fields = {change.field for change in changes}
    detail = ""
    status = Status.PRESENT
    if KERNEL_SOURCES in fields:
        status = Status.STALE
        if present:
            now = record.key.digest_for(present)
            state = "is in the store" if now in known else "is not in the store"
            detail = f"the kernel sources changed: the runtime asks for {short(now)}, which {state}"
        else:
            detail = f"no kernels of the family {record.key.backend} are installed"
    elif reason := staleness(record.provenance, compiler):
        status, detail = Status.STALE, reason
    elif fields:
        detail = "made by another version of this package from the same inputs"
    return Explanation(
        entry.digest, status, detail, key=record.key, nearest=entry.digest, changes=changes
    )


def explain_item(
    item: PlanItem, known: Mapping[str, Entry], compiler: Mapping[str, str] | None
) -> Explanation:
    """What the store has of a key that a plan needs; compares with the nearest entry if nothing.

    Nearest is an entry of the same kernel family with the fewest fields that differ.
    """
    entry = known.get(item.digest)
    if entry is not None:
        found = explain_entry(entry, known, compiler)
        return msgspec.structs.replace(found, key=item.key, models=item.models)
    wanted = _sources(item.key)
    nearest = _nearest(item.key, wanted, known.values())
    if nearest is None or nearest.record is None:
        return Explanation(
            item.digest,
            Status.ABSENT,
            "the store has no entry to compare with",
            key=item.key,
            models=item.models,
        )
    record = nearest.record
    changes = differences(item.key, wanted, record.key, record.provenance.kernel_source_digest)
    only_sources = {change.field for change in changes} <= {KERNEL_SOURCES}
    if only_sources:
        detail = f"the kernel sources changed since {short(nearest.digest)} was built"
        changes = _input_changes(record.provenance, wanted, compiler)
    else:
        detail = (
            f"the nearest entry, {short(nearest.digest)}, differs in "
            f"{counted(len(changes), 'field')}"
        )
    return Explanation(
        item.digest,
        Status.STALE if only_sources else Status.ABSENT,
        detail,
        key=item.key,
        nearest=nearest.digest,
        changes=changes,
        models=item.models,
    )


def differences(
    wanted: CompileKey, wanted_sources: str, found: CompileKey, found_sources: str
) -> tuple[Change, ...]:
    """The fields of an identity that differ, in the order in which keys have them."""
    one, other = _fields(wanted, wanted_sources), _fields(found, found_sources)
    return tuple(
        Change(name, one.get(name, ""), other.get(name, ""))
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name)
    )


def _fields(key: CompileKey, sources: str) -> dict[str, str]:
    """Every field of an identity as text."""
    fields = {"kernel": key.backend}
    for name in key.config.__struct_fields__:
        fields[f"config.{name}"] = _text(getattr(key.config, name))
    for name in key.__struct_fields__:
        if name != "config":
            fields[name] = _text(getattr(key, name))
    fields[KERNEL_SOURCES] = sources
    return fields


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value.value) if isinstance(value, enum.Enum) else str(value)


def _nearest(key: CompileKey, sources: str, entries: Iterable[Entry]) -> Entry | None:
    def distance(entry: Entry) -> tuple[bool, int, str]:
        record = entry.record
        if record is None:
            return True, 1 << 30, entry.digest
        changes = differences(key, sources, record.key, record.provenance.kernel_source_digest)
        return record.key.backend != key.backend, len(changes), entry.digest

    usable = (entry for entry in entries if entry.record is not None)
    return min(usable, key=distance, default=None)


def _input_changes(
    provenance: Provenance, sources: str, compiler: Mapping[str, str] | None
) -> tuple[Change, ...]:
    """The inputs of a build that are others now than they were for an entry."""
    wanted: dict[str, str] = {}
    found: dict[str, str] = {}
    if compiler is not None:
        wanted.update(compiler)
        found.update(provenance.toolchain)
    wanted["options"] = " ".join(COMPILE_OPTIONS)
    found["options"] = " ".join(provenance.options)
    wanted[KERNEL_SOURCES] = sources
    found[KERNEL_SOURCES] = provenance.kernel_source_digest
    wanted[BUILDER] = builder_version()
    found[BUILDER] = provenance.builder_version
    return tuple(
        Change(name, wanted.get(name, ""), found.get(name, ""))
        for name in dict.fromkeys((*wanted, *found))
        if wanted.get(name) != found.get(name)
    )


def _sources(key: CompileKey) -> str:
    """The digest of the family's kernel sources as installed, empty where they are not."""
    try:
        return kernel_source_digest(key.backend)
    except ConfigError:
        return ""
