"""Explaining: the field that differs is named, and nothing that does not."""

from __future__ import annotations

import enum
from collections.abc import Iterator

import msgspec
import pytest
from llbf16_aot import explain
from llbf16_aot.artifact import Artifact, Blob
from llbf16_aot.backends import BACKENDS
from llbf16_aot.errors import ConfigError
from llbf16_aot.explain import Status, differences, explain_entry, explain_item
from llbf16_aot.key import CompileKey, kernel_source_digest
from llbf16_aot.plan import PlanItem, State
from llbf16_aot.scan import Entry
from llbf16_aot.store import MissReason
from llbf16_aot.toolchain import COMPILE_OPTIONS, builder_version
from support import artifact_for, make_key

COMPILER = {"nvidia-cutlass-dsl": "4.8.1"}


def artifact(key: CompileKey | None = None) -> Artifact:
    """An artifact whose provenance is the present one."""
    made = artifact_for(key or make_key(), toolchain=dict(COMPILER), options=COMPILE_OPTIONS)
    provenance = msgspec.structs.replace(made.record.provenance, builder_version=builder_version())
    return Artifact(msgspec.structs.replace(made.record, provenance=provenance), made.cubin)


def entry(found: Artifact, **changes: object) -> Entry:
    provenance = msgspec.structs.replace(found.record.provenance, **changes)
    record = msgspec.structs.replace(found.record, provenance=provenance)
    return Entry(record.digest, b"", 0, pinned=False, record_blob=Blob("", 1), record=record)


def by_digest(*entries: Entry) -> dict[str, Entry]:
    return {one.digest: one for one in entries}


def item(key: CompileKey) -> PlanItem:
    return PlanItem(key, key.digest(), State.MISSING, "", True, ("a model",))


def test_an_entry_of_the_present_inputs_is_present() -> None:
    """Catches a cry of staleness where nothing changed."""
    found = entry(artifact())
    told = explain_entry(found, by_digest(found), COMPILER)
    assert (told.status, told.changes, told.detail) == (Status.PRESENT, (), "")


@pytest.mark.parametrize(
    ("changes", "field", "wanted", "has"),
    [
        ({"toolchain": {"nvidia-cutlass-dsl": "4.8.0"}}, "nvidia-cutlass-dsl", "4.8.1", "4.8.0"),
        ({"options": ("--opt-level 2",)}, "options", "--opt-level 3", "--opt-level 2"),
        (
            {"kernel_source_digest": "0" * 64},
            "kernel_source_digest",
            kernel_source_digest("dotprod"),
            "0" * 64,
        ),
    ],
)
def test_a_stale_entry_names_the_input_that_changed(
    changes: dict[str, object], field: str, wanted: str, has: str
) -> None:
    """Catches `stale` without a reason, and other inputs that are blamed along."""
    found = entry(artifact(), **changes)
    told = explain_entry(found, by_digest(found), COMPILER)
    assert told.status is Status.STALE
    assert [(c.field, c.wanted, c.found) for c in told.changes] == [(field, wanted, has)]
    assert told.detail


def test_another_builder_version_is_told_and_makes_nothing_stale() -> None:
    """Catches an explanation that disagrees with `build`, which keeps such an entry."""
    found = entry(artifact(), builder_version="0.0.1")
    told = explain_entry(found, by_digest(found), COMPILER)
    assert told.status is Status.PRESENT
    assert [change.field for change in told.changes] == ["builder_version"]


def test_without_a_compiler_its_version_is_not_compared() -> None:
    """Catches a GPU machine on which everything is stale."""
    found = entry(artifact(), toolchain={"nvidia-cutlass-dsl": "4.8.0"})
    assert explain_entry(found, by_digest(found), None).status is Status.PRESENT


def test_a_damaged_entry_is_told_with_the_check_that_failed() -> None:
    """Catches damage that is explained as absence."""
    found = Entry("0" * 64, b"", 0, pinned=False, reason=MissReason.DAMAGED, detail="cut short")
    told = explain_entry(found, by_digest(found), COMPILER)
    assert (told.status, told.detail) == (Status.DAMAGED, "cut short")


def perturbed(key: CompileKey) -> Iterator[tuple[str, CompileKey]]:
    """The key with one field changed, for each of its fields that has another value."""
    for name in key.config.__struct_fields__:
        value = getattr(key.config, name)
        config = msgspec.structs.replace(key.config, **{name: value + 1})
        yield f"config.{name}", msgspec.structs.replace(key, config=config)
    for name in key.__struct_fields__:
        value = getattr(key, name)
        other: object
        if name == "config":
            continue
        if isinstance(value, bool):
            other = not value
        elif isinstance(value, enum.Enum):
            others = [member for member in type(value) if member is not value]
            if not others:
                continue
            other = others[0]
        else:
            other = value + 1 if isinstance(value, int) else f"{value}x"
        yield name, msgspec.structs.replace(key, **{name: other})


@pytest.mark.parametrize("backend", ["dotprod", "splitk"])
def test_every_field_of_a_key_is_named_when_it_alone_differs(backend: str) -> None:
    """Catches a field that is missing from the comparison: `absent`, and nobody knows why."""
    key = make_key(backend=backend)
    seen = set()
    for name, other in perturbed(key):
        (change,) = differences(key, "s", other, "s")
        assert change.field == name
        assert change.wanted != change.found
        seen.add(name)
    assert seen >= {f"config.{name}" for name in key.config.__struct_fields__}
    assert seen >= {"target", "x_dtype", "out_dtype", "pdl", "alignment_bytes"}
    (change,) = differences(key, "s", key, "t")
    assert change.field == "kernel_source_digest"


def test_an_absent_key_is_compared_with_the_nearest_entry() -> None:
    """Catches a comparison with the first entry, or with one of another kernel family."""
    wanted = make_key(tokens=3)
    near = entry(artifact(make_key(tokens=2)))
    far = entry(artifact(make_key(tokens=2, target="sm_100a", pdl=False)))
    other_family = entry(artifact(make_key(backend="splitk")))
    told = explain_item(item(wanted), by_digest(far, other_family, near), COMPILER)
    assert (told.status, told.nearest, told.models) == (Status.ABSENT, near.digest, ("a model",))
    assert [(c.field, c.wanted, c.found) for c in told.changes] == [("config.tokens", "3", "2")]
    told = explain_item(item(wanted), by_digest(far, other_family), COMPILER)
    assert told.nearest == far.digest
    assert {c.field for c in told.changes} == {"config.tokens", "target", "pdl"}
    told = explain_item(item(wanted), by_digest(other_family), COMPILER)
    assert told.changes[0].field == "kernel"
    empty = explain_item(item(wanted), {}, COMPILER)
    assert (empty.status, empty.nearest, empty.changes) == (Status.ABSENT, "", ())


def test_an_entry_of_older_kernel_sources_is_stale_under_its_former_identity() -> None:
    """Catches `absent` where the entry is there and only a kernel's source was edited."""
    key = make_key()
    old = entry(artifact(key), kernel_source_digest="0" * 64)
    assert old.digest != key.digest()
    told = explain_item(item(key), by_digest(old), COMPILER)
    assert (told.status, told.nearest) == (Status.STALE, old.digest)
    assert [change.field for change in told.changes] == ["kernel_source_digest"]
    assert "is not in the store" in explain_entry(old, by_digest(old), COMPILER).detail
    new = entry(artifact(key))
    assert "is in the store" in explain_entry(old, by_digest(old, new), COMPILER).detail


def test_every_family_has_sources_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a family whose sources are not installed: that must be told, not raised."""
    assert all(kernel_source_digest(name) for name in BACKENDS)

    def missing(backend: str) -> str:
        raise ConfigError("not installed")

    found = entry(artifact())
    monkeypatch.setattr(explain, "kernel_source_digest", missing)
    told = explain_entry(found, by_digest(found), COMPILER)
    assert told.status is Status.STALE
    assert "no kernels of the family dotprod are installed" in told.detail
