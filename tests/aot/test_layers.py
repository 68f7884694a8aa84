"""Stores below the store: the first sound artifact wins, and distrust never falls through."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpu import MemoryStore
from llbf16_aot.artifact import Artifact
from llbf16_aot.environment import Environment
from llbf16_aot.errors import UntrustedStoreError, UsageError
from llbf16_aot.layers import LayeredSource, open_layers
from llbf16_aot.store import Miss, MissReason, Store
from support import make_artifact


class Foreign(MemoryStore):
    def get(self, digest: str) -> Artifact | Miss:
        raise UntrustedStoreError("the layer belongs to somebody else")


def layered(
    *contents: Artifact | MissReason | None,
) -> tuple[LayeredSource, list[MemoryStore], str]:
    """Sources that hold each one thing for the same digest, and that digest."""
    digest = make_artifact().digest
    stores = []
    for content in contents:
        store = MemoryStore()
        if isinstance(content, Artifact):
            store.entries[digest] = content
        elif content is not None:
            store.entries[digest] = Miss(digest, content, f"what is {content.value}")
        stores.append(store)
    return LayeredSource(stores), stores, digest


def test_the_first_sound_artifact_wins_and_nothing_below_it_is_read() -> None:
    """An image layer that shadows the store would serve the kernel that a rebuild replaced."""
    upper, lower = make_artifact(), make_artifact()
    source, stores, digest = layered(upper, lower)
    assert source.get(digest) is upper
    assert [len(store.asked) for store in stores] == [1, 0]


@pytest.mark.parametrize("reason", list(MissReason))
def test_an_entry_that_cannot_be_used_falls_through_to_the_next_layer(reason: MissReason) -> None:
    """A damaged store above a good image must not take the good one out of service."""
    good = make_artifact()
    source, _, digest = layered(reason, None, good)
    assert source.get(digest) is good


def test_of_several_misses_the_one_that_wants_mending_is_told() -> None:
    """Told 'absent', nobody would look at the entry that is damaged."""
    source, _, digest = layered(None, MissReason.DAMAGED, MissReason.UNREADABLE)
    assert source.get(digest) == Miss(digest, MissReason.DAMAGED, "what is damaged")
    source, _, digest = layered(None, MissReason.ABSENT)
    assert source.get(digest) == Miss(digest, MissReason.ABSENT, "no such entry")


def test_a_layer_that_is_not_to_be_trusted_is_an_error() -> None:
    """Skipped quietly, a planted layer would be found out only by the slow server."""
    good = MemoryStore([make_artifact()])
    digest = make_artifact().digest
    with pytest.raises(UntrustedStoreError):
        LayeredSource([MemoryStore(), Foreign(), good]).get(digest)
    assert isinstance(LayeredSource([good, Foreign()]).get(digest), Artifact)


def test_messages_name_the_writable_store() -> None:
    """A command that builds into a read-only layer mends nothing."""
    lower = MemoryStore()
    lower.root = Path("/layer")
    assert LayeredSource([MemoryStore(), lower]).root == Path("/the/store")


def test_no_source_at_all_is_refused() -> None:
    """Every lookup would end in an error that names nothing."""
    with pytest.raises(ValueError, match="no source"):
        LayeredSource([])


def test_layers_on_disk_are_read_after_the_store_and_need_not_exist(tmp_path: Path) -> None:
    """A mount that is not there yet is an empty layer, not a crash of every process."""
    artifact = make_artifact()
    image = Store(tmp_path / "image")
    image.publish(artifact)
    store = Store(tmp_path / "store")
    source = open_layers(store, [tmp_path / "none", str(image.root)])
    found = source.get(artifact.digest)
    assert isinstance(found, Artifact)
    assert found.cubin == artifact.cubin
    assert not (tmp_path / "store").exists()
    assert open_layers(store, []) is store
    with pytest.raises(UsageError, match="not absolute"):
        open_layers(store, ["image"])


def test_the_variable_lists_layers_in_their_order() -> None:
    """Read in another order, an old image would win over a new one."""

    def layers(text: str) -> tuple[str, ...]:
        return tuple(map(str, Environment({"LLBF16_AOT_LAYERS": text}).layers))

    assert layers("/b:/a//x/../y") == ("/b", "/a/y")
    assert layers("") == layers(":") == ()
    with pytest.raises(UsageError, match="LLBF16_AOT_LAYERS has the part 'image'"):
        layers("/b:image")
