"""V1, V3, R1: other versions of the store, and what keys and bytes must not depend on."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.harness import check_healed
from faults.tally import Tally
from llbf16_aot.artifact import Artifact
from llbf16_aot.store import Miss, MissReason, Store
from support import files_below, make_artifact

Sizes = Callable[[int, int], int]

PACKAGE = Path(sys.modules["llbf16_aot"].__file__ or "").parent
GOLDEN = Path(__file__).parent / "golden_store"


def golden_copy(folder: Path) -> Store:
    """A store that an earlier release wrote, with the modes that a repository does not keep."""
    root = folder / "store"
    shutil.copytree(GOLDEN, root)
    for path in (root, *root.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o444)
    return Store(root)


def beside_others(tally: Tally, folder: Path) -> None:
    """Read a store of today's layout, publish beside newer and older layouts, and read again."""
    store = golden_copy(folder)
    (digest,) = store.digests()
    found = store.get(digest)
    tally.tried += 1
    if isinstance(found, Artifact):
        if found.digest != digest:
            tally.wrong.append(f"the golden entry is {found.digest}")
    elif found.reason is not MissReason.DAMAGED or "schema" not in found.detail:
        # Only a change of the record's schema may make an earlier release's entry a miss.
        tally.lost.append(f"the golden entry: {found.detail}")
    for version, names in (("v0", ("index.db",)), ("v2", ("refs/x", "blobs/y")), ("v10", ("z",))):
        for name in names:
            path = store.root / version / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(version)
    others = {k: v for k, v in files_below(store.root).items() if not k.startswith("v1/")}
    check_healed(tally, store, make_artifact(), "beside other layouts")
    tally.tried += 3
    for name, data in others.items():
        if files_below(store.root).get(name) != data:
            tally.lost.append(f"{name} of another layout was changed")
    if digest not in store.digests():
        tally.lost.append("the golden ref is gone")


@pytest.mark.fault("V1")
def test_stores_of_other_releases_are_read_or_left_alone(tally: Tally, tmp_path: Path) -> None:
    """Bug: an upgrade throws a store away, or an older release the newer one's."""
    beside_others(tally, tmp_path)
    tally.clean(at_least=4)


@pytest.mark.fault("V1", control=True)
def test_the_golden_store_finds_a_schema_that_changed_its_meaning(
    tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a digest computed otherwise, with the schema's number unchanged, must be found."""
    from llbf16_aot.key import CompileKey

    monkeypatch.setattr(CompileKey, "digest_for", lambda self, source_digest: "0" * 64)
    store = golden_copy(tmp_path)
    (digest,) = store.digests()
    found = store.get(digest)
    tally.tried += 1
    if isinstance(found, Miss):
        tally.lost.append(found.detail)
    tally.found()


PRINT_KEYS = """
import json, os, random, sys
from pathlib import Path
sys.path[:0] = json.loads(os.environ["FAULTS_PATH"])
{plant}
from llbf16_aot.dispatch import load_table
from llbf16_aot.manifest import Manifest
from llbf16_aot.plan import plan_build
from llbf16_aot.store import Store
order = random.Random(os.environ["PYTHONHASHSEED"])
names = ["dsv4", "qwen3"]
order.shuffle(names)
plan = plan_build(*map(Manifest.load, names), store=Store(Path("/nonexistent/llbf16")))
from support import make_artifact
fields = list(make_artifact().record.provenance.toolchain.items()) + [("b", "1"), ("a", "2")]
order.shuffle(fields)
from support import artifact_for, make_key
record = artifact_for(make_key(), toolchain=dict(fields)).record.encode().hex()
print(json.dumps([sorted(item.digest for item in plan.items), record]))
"""

DEPENDENT = """
import llbf16_aot.key as key
real = key.CompileKey.digest_for
key.CompileKey.digest_for = lambda self, source: real(self, source + str(hash("seed")))
"""

LOCALES = ("C", "C.UTF-8", "POSIX", "de_DE.UTF-8", "tr_TR.UTF-8")
ZONES = ("UTC", "Asia/Tokyo", "America/St_Johns", ":/nonexistent")


def keys_everywhere(tally: Tally, folder: Path, count: int, plant: str) -> None:
    """Print keys and a record in processes that differ in everything that must not count."""
    elsewhere = folder / "an other place"
    shutil.copytree(PACKAGE, elsewhere / "llbf16_aot", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kernels", "manifests"):
        source = Path(__import__(f"llbf16_aot.{name}", fromlist=[name]).__file__ or "").parent
        if not (elsewhere / "llbf16_aot" / name).exists():
            shutil.copytree(source, elsewhere / "llbf16_aot" / name)
    dice = random.Random(3)
    said: dict[str, list[str]] = {}
    tests = str(Path(__file__).parents[1])
    for number in range(count):
        path = [str(elsewhere), tests] if number % 2 else [tests]
        working = folder / f"work {number}"
        working.mkdir()
        environ = {
            "PATH": os.defpath,
            "HOME": str(working),
            "PYTHONHASHSEED": str(dice.randrange(2**32)),
            "LC_ALL": LOCALES[number % len(LOCALES)],
            "TZ": ZONES[number % len(ZONES)],
            "FAULTS_PATH": json.dumps(path),
        }
        ended = subprocess.run(
            [sys.executable, "-c", PRINT_KEYS.format(plant=plant)],
            env=environ, cwd=working, capture_output=True, text=True, check=False,
        )  # fmt: skip
        tally.tried += 1
        assert ended.returncode == 0, ended.stderr
        said.setdefault(ended.stdout, []).append(str(environ))
    if len(said) > 1:
        tally.wrong.append(f"{len(said)} different answers")


@pytest.mark.fault("V3")
def test_keys_depend_on_nothing_but_what_is_built(
    tally: Tally, tmp_path: Path, pick: Sizes
) -> None:
    """Bug: a server asks for another key than the image's build has stored, and always misses."""
    keys_everywhere(tally, tmp_path, pick(8, 32), "")
    tally.clean(at_least=pick(8, 32))


@pytest.mark.fault("V3", control=True)
def test_many_processes_find_a_key_with_a_hash_in_it(tally: Tally, tmp_path: Path) -> None:
    """Control: a digest that depends on the hash seed must be found."""
    keys_everywhere(tally, tmp_path, 2, DEPENDENT)
    tally.found()


BUILD = """
import os, sys
sys.path.insert(0, os.environ["FAULTS_TESTS"])
from llbf16_aot.cli import main
sys.exit(main(sys.argv[1:]))
"""

CONFIGS = {
    "dotprod": "  - {model: A, hidden: 2880, experts: 32, tokens: 1, tuning: reference}\n",
    "splitk": "  - {model: B, hidden: 2880, experts: 32, tokens: 5, tuning: reference}\n",
    "default": "  - {model: C, hidden: 7168, experts: 256, tokens: [1, 8]}\n",
}


def manifest(rows: list[str], targets: list[str]) -> str:
    return (
        f"schema: 1\nname: again\ntargets: [{', '.join(targets)}]\n"
        "defaults: {out_dtype: fp32, pdl: true}\nrouters:\n" + "".join(rows)
    )


def built(folder: Path, text: str, **environ: str) -> dict[str, bytes]:
    """What a build in a folder of its own has stored, by digest: record and cubin."""
    (folder / "scratch").mkdir(parents=True)
    (folder / "again.yaml").write_text(text)
    ended = subprocess.run(
        [sys.executable, "-c", BUILD, "build", "again.yaml", "--store", str(folder / "store"),
         "--jobs", "1"],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "TMPDIR": str(folder / "scratch"), "HOME": str(folder),
             "FAULTS_TESTS": str(Path(__file__).parents[1]), **environ},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    store = Store(folder / "store")
    found = {digest: store.get(digest) for digest in store.digests()}
    return {
        digest: artifact.record.encode() + artifact.cubin
        for digest, artifact in found.items()
        if isinstance(artifact, Artifact)
    }


def compare(tally: Tally, first: dict[str, bytes], second: dict[str, bytes]) -> None:
    tally.tried += len(first)
    if first.keys() != second.keys():
        tally.lost.append(f"keys differ: {sorted(first.keys() ^ second.keys())}")
    for digest in first.keys() & second.keys():
        if first[digest] != second[digest]:
            tally.wrong.append(f"{digest}: {len(first[digest])} and {len(second[digest])} bytes")


@pytest.mark.compiler
@pytest.mark.fault("R1")
def test_two_builds_give_the_same_bytes(tally: Tally, tmp_path: Path, pick: Sizes) -> None:
    """Bug: a path, a time or the order of work gets into machine code, and `check` cries wolf."""
    names = [*CONFIGS][: pick(1, 3)]
    targets = ["sm_90a", "sm_100a", "sm_103a", "sm_120a"][: pick(1, 4)]
    rows = [CONFIGS[name] for name in names]
    first = built(tmp_path / "one", manifest(rows, targets), PYTHONHASHSEED="1", TZ="UTC")
    second = built(
        tmp_path / "an other one",
        manifest(rows[::-1], targets[::-1]),
        PYTHONHASHSEED="77",
        TZ="Asia/Tokyo",
        LC_ALL="C",
    )
    compare(tally, first, second)
    tally.clean(at_least=pick(1, 12))


@pytest.mark.fault("R1", control=True)
def test_two_builds_find_a_compiler_that_tells_its_directory(
    tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a compiler whose output holds its process and its folder must be found."""
    from fake_builds import manifest_text, use_fake_compiler
    from fake_compiler import Deed
    from llbf16_aot.builder import build
    from llbf16_aot.manifest import Manifest

    use_fake_compiler(monkeypatch)
    results = []
    for name in ("one", "two"):
        store = Store(tmp_path / name)
        build(Manifest.parse(manifest_text(Deed.TELL, tokens="1"), origin="m"), store=store)
        found = [store.get(digest) for digest in store.digests()]
        results.append({a.digest: a.cubin for a in found if isinstance(a, Artifact)})
    compare(tally, *results)
    tally.found()


def test_the_golden_store_is_one_of_this_schema() -> None:
    """Bug: the golden store was made anew by a newer release, and so proves nothing."""
    (ref,) = [path for path in GOLDEN.rglob("*") if "refs" in path.parts and path.is_file()]
    assert ref.name == GOLDEN_DIGEST
    assert json.loads((GOLDEN / "v1" / "blobs").joinpath(*_blob(ref)).read_bytes())["schema"] == 1


GOLDEN_DIGEST = "f75ef465323065bb22b650c72c40ad764dc2a22404d33366738f78b52777270a"


def _blob(ref: Path) -> tuple[str, str, str]:
    digest = ref.read_text().split()[0].removeprefix("sha256:")
    return "sha256", digest[:2], digest
