"""S3 and S4: records and manifests that no program of ours has written."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import bugs
from faults.fuzz import SEEDS, mutated_manifests, mutated_records
from faults.tally import Tally
from llbf16_aot import manifest_reader
from llbf16_aot.artifact import Record
from llbf16_aot.errors import DamagedEntryError, ManifestError
from llbf16_aot.manifest import Manifest, packaged_manifests
from support import make_artifact

Sizes = Callable[[int, int], int]

RECORD_SEED, MANIFEST_SEED = 20261129, 20261130


def record_sources() -> list[bytes]:
    made = [
        make_artifact(),
        make_artifact(backend="splitk", target="sm_100a", pdl=False),
        make_artifact(target="sm_120a", tokens=64),
    ]
    return [artifact.record.encode() for artifact in made]


def fuzzed_records(tally: Tally, count: int) -> None:
    """A record is accepted only if it encodes to the same bytes; anything else is damage."""
    kept = [path.read_bytes() for path in sorted((SEEDS / "records").iterdir())]
    accepted = 0
    for number, data in enumerate([*kept, *mutated_records(record_sources(), count, RECORD_SEED)]):
        tally.tried += 1
        try:
            record = Record.decode(data)
            again = record.encode()
            digest = record.digest
        except DamagedEntryError:
            continue
        except Exception as error:
            tally.wrong.append(f"{number}: {error!r} for {data!r}")
            continue
        accepted += 1
        if again != data or len(digest) != 64:
            tally.wrong.append(f"{number}: accepted, and encodes otherwise: {data!r}")
    assert accepted > 0, "no changed record was accepted: the mutations are too coarse"


@pytest.mark.fault("S3")
def test_fuzzed_records_are_damage_or_encode_to_the_same_bytes(tally: Tally, pick: Sizes) -> None:
    """Bug: two texts are one record, or a disk's rubbish raises something that nobody expects."""
    fuzzed_records(tally, pick(10_000, 100_000))
    tally.clean(at_least=pick(10_000, 100_000))


@pytest.mark.fault("S3", control=True)
def test_fuzzed_records_find_a_lenient_reader(
    tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a reader that takes any JSON with the right fields must be found."""
    bugs.lenient_records(monkeypatch)
    fuzzed_records(tally, 2000)
    tally.found()


def manifest_sources() -> list[str]:
    folder = Path(__file__).parents[2] / "manifests"
    return [(folder / f"{name}.yaml").read_text() for name in packaged_manifests()]


LIMIT_S = 1.0


def fuzzed_manifests(tally: Tally, count: int) -> int:
    """A manifest, or a ManifestError that starts with file and line, within a second; how many."""
    kept = [path.read_text() for path in sorted((SEEDS / "manifests").iterdir())]
    sources = [*manifest_sources(), *kept]
    refused = 0
    for number, text in enumerate([*kept, *mutated_manifests(sources, count, MANIFEST_SEED)]):
        tally.tried += 1
        started = time.thread_time()
        try:
            Manifest.parse(text, origin="m.yaml")
        except ManifestError as error:
            refused += 1
            if not re.match(r"m\.yaml:[1-9][0-9]*: \S", error.message):
                tally.wrong.append(f"{number}: no line: {error.message[:200]!r}")
        except Exception as error:
            tally.wrong.append(f"{number}: {error!r} for {text[:2000]!r}")
        took_s = time.thread_time() - started
        if took_s > LIMIT_S:
            tally.wrong.append(f"{number}: took {took_s:.2f} s for {len(text)} characters")
    return refused


@pytest.mark.fault("S4")
def test_fuzzed_manifests_are_manifests_or_errors_with_a_line(tally: Tally, pick: Sizes) -> None:
    """Bug: an exception of the YAML library, an endless parse, or a message without a line."""
    refused = fuzzed_manifests(tally, pick(300, 10_000))
    assert refused > tally.tried // 4, "too few manifests were refused"
    tally.clean(at_least=pick(300, 10_000))


@pytest.mark.fault("S4", control=True)
def test_fuzzed_manifests_find_a_reader_that_lets_errors_out(
    tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the YAML library's own errors must be found."""
    from ruamel.yaml import YAML

    def compose(text: str, origin: str) -> object:
        return YAML(typ="safe", pure=True).compose(text)

    monkeypatch.setattr(manifest_reader, "_compose", compose)
    fuzzed_manifests(tally, 100)
    tally.found()
