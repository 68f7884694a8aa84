"""What the harnesses share: artifacts, tools of the system, and the check after every fault."""

from __future__ import annotations

import os
import shutil
import subprocess

import msgspec
import pytest
from faults.tally import Tally
from llbf16_aot.artifact import Artifact
from llbf16_aot.errors import StoreError
from llbf16_aot.store import Miss, MissReason, Store
from support import make_artifact

__all__ = [
    "ERRNOS",
    "check_entry",
    "check_healed",
    "leftovers",
    "needs_root",
    "numbered",
    "replaced",
    "run_tool",
]

ERRNOS = ("EIO", "ENOSPC", "EDQUOT", "EACCES", "EROFS", "EMFILE", "ESTALE", "EINTR", "EBUSY")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def run_tool(name: str, *arguments: str, or_skip: bool = False) -> str:
    """Run a program of the system; skips the test where it is missing or, if told, refuses."""
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if program is None:
        pytest.skip(f"{name} is not installed")
    ended = subprocess.run([program, *arguments], check=False, capture_output=True, text=True)
    if ended.returncode:
        said = ended.stderr.strip() or f"exit status {ended.returncode}"
        if or_skip:
            pytest.skip(f"{name} does not work here: {said}")
        pytest.fail(f"{name} {' '.join(arguments)}: {said}")
    return ended.stdout


def numbered(number: int) -> Artifact:
    """A valid artifact, another one for every number."""
    return make_artifact(tokens=1 + number % 64, hidden=8 + 8 * (number // 64))


def replaced(artifact: Artifact, version: str) -> Artifact:
    """Another artifact under the same digest: made by another version of the builder."""
    provenance = msgspec.structs.replace(artifact.record.provenance, builder_version=version)
    record = msgspec.structs.replace(artifact.record, provenance=provenance)
    return Artifact(record, artifact.cubin)


def leftovers(store: Store) -> list[str]:
    """Temporary files that lie in a store."""
    folder = store.root / "v1" / "tmp"
    return sorted(os.listdir(folder)) if folder.exists() else []


def check_entry(
    tally: Tally, store: Store, new: Artifact, before: Artifact | None, where: str
) -> None:
    """After a fault: the old entry or the new one, whole, or absence where there was none."""
    found = store.get(new.digest)
    if isinstance(found, Miss):
        if before is not None:
            tally.lost.append(f"{where}: {found.reason.value}: {found.detail}")
        elif found.reason is not MissReason.ABSENT:
            tally.wrong.append(f"{where}: {found.reason.value}: {found.detail}")
    elif found not in (before, new):
        tally.wrong.append(f"{where}: an entry that nobody published")


def check_healed(tally: Tally, store: Store, new: Artifact, where: str) -> None:
    """The next ordinary publish works, is read back, and sweeps what the fault left."""
    try:
        store.publish(new)
    except StoreError as error:
        tally.unhealed.append(f"{where}: {error.message}")
        return
    if store.get(new.digest) != new:
        tally.unhealed.append(f"{where}: cannot be read after the next publish")
    if left := leftovers(store):
        tally.unhealed.append(f"{where}: left {left}")
