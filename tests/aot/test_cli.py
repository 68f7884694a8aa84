"""The command line: whole outputs against golden files, and every ending with its code.

`LLBF16_AOT_UPDATE_GOLDEN=1 pytest tests/aot/test_cli.py` writes the golden files anew.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from children import heed_signals
from fake_builds import forbid_compiling, manifest_text, use_fake_compiler
from fake_compiler import Deed
from llbf16_aot import builder, check, explain, key
from llbf16_aot.artifact import Artifact, Blob
from llbf16_aot.cli import main
from llbf16_aot.cli.output import color_from
from llbf16_aot.errors import StoreFullError
from llbf16_aot.store import Miss, MissReason, Store
from llbf16_aot.toolchain import builder_version

GOLDEN = Path(__file__).parent.parent / "golden"
UPDATE = os.environ.get("LLBF16_AOT_UPDATE_GOLDEN") == "1"


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, a fake compiler, and digests that no source file changes."""
    use_fake_compiler(monkeypatch)
    monkeypatch.setattr(key, "kernel_source_digest", lambda backend: "0" * 64)
    for module in (builder, check, explain):
        monkeypatch.setattr(module, "kernel_source_digest", lambda backend: "0" * 64)
    for name in tuple(os.environ):
        if name.startswith("LLBF16_AOT_") or name in ("CI", "NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name)
    # What the manifests of these tests name: with another table every build warns.
    monkeypatch.setenv("LLBF16_AOT_TUNING", "reference")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home/cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "tiny.yaml").write_text(manifest_text(Deed.ANSWER))
    (tmp_path / "typo.yaml").write_text(
        manifest_text(Deed.ANSWER, tokens="0-3").replace("hidden:", "hidden_size:")
    )
    (tmp_path / "bad.yaml").write_text(manifest_text(Deed.ANSWER, Deed.EXIT, tokens="1"))
    return tmp_path


Run = Callable[..., "Ran"]


class Ran:
    """What one run of the program printed, and its exit code."""

    def __init__(self, arguments: tuple[str, ...], code: int, out: str, err: str) -> None:
        self.arguments = arguments
        self.code = code
        self.out = out
        self.err = err

    @property
    def data(self) -> dict[str, object]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        assert found["schema"] == 1
        return found

    def text(self, root: Path) -> str:
        """Everything, in the form of a golden file."""
        shown = " ".join(("llbf16-aot", *self.arguments))
        text = f"$ {shown}\n--- stdout\n{self.out}--- stderr\n{self.err}--- exit {self.code}\n"
        return text.replace(str(root), "/work").replace(builder_version(), "VERSION")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> Ran:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return Ran(arguments, code, captured.out, captured.err)

    return call


def golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if UPDATE:
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.skip(f"wrote {path.name}")
    assert text == path.read_text(), f"{path.name} differs; look, then update"


COMMANDS = (
    *("build", "plan", "list", "show", "explain", "verify", "check", "prune", "rm", "pin"),
    *("path", "doctor", "schema"),
)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_as_reviewed(run: Run, world: Path, command: str) -> None:
    """Catches help that changes unnoticed, and a command without examples or variables."""
    ran = run(*([command] if command else []), "--help")
    assert ran.code == 0
    if command:
        assert "\nExamples:\n  llbf16-aot " in ran.out
    golden(f"help-{command or 'all'}", ran.text(world))


@pytest.mark.parametrize(
    ("name", "before", "arguments"),
    [
        ("build", (), ("build", "tiny.yaml")),
        ("build-again", ("build tiny.yaml",), ("build", "tiny.yaml")),
        ("build-force", ("build tiny.yaml",), ("build", "tiny.yaml", "--force")),
        ("build-json", (), ("build", "tiny.yaml", "--json")),
        ("build-dry-run", (), ("build", "tiny.yaml", "--dry-run", "--target", "sm_100a")),
        ("build-failed", (), ("build", "bad.yaml")),
        ("build-failed-json", (), ("build", "bad.yaml", "--json")),
        ("plan", ("build bad.yaml",), ("plan", "tiny.yaml")),
        ("plan-json", (), ("plan", "tiny.yaml", "--json")),
        ("list", ("build tiny.yaml",), ("list",)),
        ("list-json", ("build bad.yaml",), ("list", "--json")),
        ("list-empty", (), ("list",)),
        ("list-empty-json", (), ("list", "--json")),
        ("show-json", ("build bad.yaml",), ("show", "DIGEST", "--json")),
        ("show", ("build bad.yaml",), ("show", "DIGEST")),
        ("show-none", (), ("show", "abc")),
        ("show-no-digest", (), ("show", "xyz")),
        ("verify", ("build tiny.yaml",), ("verify",)),
        ("verify-json", ("build bad.yaml",), ("verify", "--json")),
        ("verify-one", ("build tiny.yaml",), ("verify", "DIGEST")),
        ("verify-none", (), ("verify", "abc")),
        ("verify-repair", ("build tiny.yaml",), ("verify", "--repair")),
        ("explain", ("build tiny.yaml",), ("explain", "DIGEST")),
        ("explain-manifest", ("build bad.yaml",), ("explain", "tiny.yaml")),
        ("explain-json", (), ("explain", "bad.yaml", "--json")),
        ("explain-none", (), ("explain", "abc")),
        ("check", ("build tiny.yaml",), ("check",)),
        ("check-json", ("build bad.yaml",), ("check", "--json")),
        ("prune-nothing", ("build tiny.yaml",), ("prune",)),
        ("prune-refused", ("build tiny.yaml",), ("prune", "--max-size", "0")),
        ("prune-bad-size", (), ("prune", "--max-size", "many")),
        ("prune-bad-age", (), ("prune", "--older-than", "90")),
        ("rm-none", (), ("rm", "abc")),
        ("pin", ("build tiny.yaml",), ("pin", "DIGEST")),
        ("pin-json", ("build bad.yaml",), ("pin", "DIGEST", "--json")),
        ("pin-empty", (), ("pin",)),
        ("pin-remove-what", (), ("pin", "--remove")),
        ("path", (), ("path",)),
        ("path-json", (), ("path", "--json", "--store", "elsewhere")),
        ("path-of-a-cubin", ("build bad.yaml",), ("path", "DIGEST")),
        ("error-command", (), ("bild", "tiny.yaml")),
        ("error-command-unlike-any", (), ("frobnicate",)),
        ("error-option", (), ("build", "tiny.yaml", "--forse")),
        ("error-option-json", (), ("build", "tiny.yaml", "--forse", "--json")),
        ("error-missing-manifest", (), ("build",)),
        ("error-target", (), ("build", "tiny.yaml", "--target", "sm_95a")),
        ("error-target-form", (), ("plan", "tiny.yaml", "--target", "hopper", "--json")),
        ("error-manifest", (), ("build", "typo.yaml")),
        ("error-manifest-json", (), ("plan", "typo.yaml", "--json")),
        ("error-empty-store", (), ("list", "--store", "")),
    ],
)
def test_output_is_as_reviewed(
    run: Run, world: Path, name: str, before: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    """Catches output, messages and exit codes that change unnoticed: people parse them."""
    for earlier in before:
        run(*earlier.split())
    # What is said of ages and their order must not depend on how long the test took.
    used_s = time.time() - 3 * 86_400 - 60
    for path in store_of(world).root.glob("v1/refs/*/*"):
        os.utime(path, (used_s, used_s))
    if "DIGEST" in arguments:
        digest = Store(world / "home/cache/llbf16-aot").digests()[0]
        arguments = tuple(digest[:12] if a == "DIGEST" else a for a in arguments)
    golden(name, run(*arguments).text(world))


def test_a_misspelt_packaged_manifest_is_suggested(run: Run) -> None:
    """Catches `no such file` as the only answer to a typing error in a name."""
    ran = run("build", "dsv5")
    assert ran.code == 2
    assert "did you mean 'dsv4'?" in ran.err


def store_of(world: Path) -> Store:
    return Store(world / "home/cache/llbf16-aot")


def damage_one(world: Path, *, cut: int = 0) -> str:
    store = store_of(world)
    digest = store.digests()[0]
    found = store.get(digest)
    assert not isinstance(found, Miss)
    path = store.cubin_path(found.record)
    os.chmod(path, 0o644)
    path.write_bytes(b"x" * (len(found.cubin) - cut))
    return digest


@pytest.mark.parametrize("command", ["list", "verify", "show DIGEST", "verify --json"])
def test_output_for_a_damaged_entry_is_as_reviewed(run: Run, world: Path, command: str) -> None:
    """Catches damage that is shown as health, or that hides the entries beside it."""
    run("build", "tiny.yaml")
    # A list sees that a cubin was cut short; its bytes are read by the others.
    digest = damage_one(world, cut=1 if command == "list" else 0)
    arguments = tuple(digest if word == "DIGEST" else word for word in command.split())
    name = "-".join(command.replace("--", "").lower().split())
    golden(f"damaged-{name}", run(*arguments).text(world))


def test_a_damaged_entry_is_healed_by_the_next_build(run: Run, world: Path) -> None:
    """Catches damage that only removing the store would mend."""
    run("build", "tiny.yaml")
    damage_one(world)
    assert run("verify").code == 4
    assert run("build", "tiny.yaml").code == 0
    assert run("verify").code == 0


def test_repair_leaves_a_store_that_verifies(run: Run, world: Path) -> None:
    """Catches a repair after which `verify` still fails, or that hides what it removed."""
    run("build", "tiny.yaml")
    digest = damage_one(world)
    ran = run("verify", "--repair", "--json")
    assert ran.code == 0
    assert [one["digest"] for one in ran.data["repaired"]["entries"]] == [digest]  # type: ignore[index]
    assert len(ran.data["entries"]) == 2  # type: ignore[arg-type]
    assert run("verify").code == 0
    assert len(store_of(world).digests()) == 2
    assert run("build", "tiny.yaml").code == 0
    assert len(store_of(world).digests()) == 3
    text = run("verify", "--repair").out
    assert text.startswith("nothing to repair\n")


def test_verify_tells_what_cannot_be_read_from_what_is_damaged(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches exit code 4, and a repair, for a disk or a mount that has a bad moment."""
    run("build", "tiny.yaml")
    real = Store.get

    def unreadable(self: Store, digest: str) -> object:
        return Miss(digest, MissReason.UNREADABLE, "Input/output error")

    monkeypatch.setattr(Store, "get", unreadable)
    for arguments in (("verify",), ("verify", "--repair")):
        ran = run(*arguments, "--json")
        assert (ran.code, ran.data["error"]["code"]) == (5, "store")  # type: ignore[index]
    monkeypatch.setattr(Store, "get", real)
    assert run("verify").code == 0


def weight_of(world: Path) -> int:
    """Bytes of the refs and blobs of the store."""
    files = (store_of(world).root / "v1").rglob("*")
    kept = ("refs", "blobs")
    return sum(f.stat().st_size for f in files if f.is_file() and f.parts[-3] in (*kept, "sha256"))


def test_prune_keeps_its_limit_and_dry_runs_keep_everything(run: Run, world: Path) -> None:
    """Catches a dry run that removes, a plan that differs from the deed, a limit that is missed."""
    run("build", "tiny.yaml")
    before = weight_of(world)
    limit = str(before - 1)
    dry = run("prune", "--max-size", limit, "--dry-run", "--json")
    assert (dry.code, dry.data["done"], weight_of(world)) == (0, None, before)
    refused = run("prune", "--max-size", limit, "--json")
    assert (refused.code, refused.data["error"]["code"]) == (2, "usage")  # type: ignore[index]
    assert weight_of(world) == before
    done = run("prune", "--max-size", limit, "--yes", "--json")
    assert done.code == 0
    plan = done.data["plan"]
    assert plan["after_bytes"] == weight_of(world) < before  # type: ignore[index]
    removed = done.data["done"]["removed"]  # type: ignore[index]
    assert removed == [one["digest"] for one in plan["remove"]]  # type: ignore[index]
    assert removed == [one["digest"] for one in dry.data["plan"]["remove"]]  # type: ignore[index]
    assert len(store_of(world).digests()) == 2


@pytest.mark.parametrize(("answer", "left"), [("y", 0), ("n", 3)])
def test_prune_asks_on_a_terminal(
    run: Run, world: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    """Catches a question that nobody is asked, and a no that is taken for a yes."""
    run("build", "tiny.yaml")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert run("prune", "--older-than", "0s", "--yes", "--dry-run").code == 0
    ran = run("prune", "--max-size", "0")
    assert ran.code == 0
    assert "3 entries to remove" in ran.err
    assert len(store_of(world).digests()) == left


def test_prune_goes_by_manifests_and_pins(run: Run, world: Path) -> None:
    """Catches an entry that a manifest needs or somebody pinned, and that goes all the same."""
    (world / "one.yaml").write_text(manifest_text(Deed.ANSWER, tokens="1"))
    (world / "two.yaml").write_text(manifest_text(Deed.ANSWER, tokens="2"))
    run("build", "tiny.yaml")
    needed = []
    for name in ("one.yaml", "two.yaml"):
        artifacts = run("explain", name, "--json").data["artifacts"]
        assert isinstance(artifacts, list)
        needed.append(artifacts[0]["digest"])
    assert run("pin", "--manifest", "two.yaml").out == f"{needed[1]}\n"
    ran = run("prune", "--unreferenced-by", "one.yaml", "--yes")
    assert ran.code == 0
    assert store_of(world).digests() == tuple(sorted(needed))
    ran = run("prune", "--max-size", "0", "--yes", "--json")
    assert (ran.code, ran.data["error"]["code"]) == (1, "error")  # type: ignore[index]
    assert store_of(world).digests() == (needed[1],)
    assert run("rm", needed[1]).code == 1
    assert run("pin", "--remove", needed[1][:8]).code == 0
    assert run("rm", needed[1][:8], "--dry-run").code == 0
    assert store_of(world).digests() == (needed[1],)
    assert run("rm", needed[1][:8]).code == 0
    assert weight_of(world) == 0


def test_a_pin_may_come_before_its_entry_and_is_listed(run: Run, world: Path) -> None:
    """Catches pins that only work after a build, and a list that hides them."""
    (world / "one.yaml").write_text(manifest_text(Deed.ANSWER, tokens="1"))
    assert "(no entry yet)" in run("pin", "--manifest", "one.yaml").out
    run("build", "tiny.yaml")
    assert "(no entry yet)" not in run("pin").out
    assert run("list").out.count("pinned") == 1
    assert [e["pinned"] for e in run("list", "--json").data["entries"]].count(True) == 1  # type: ignore[attr-defined]
    assert run("pin", "--manifest", "one.yaml", "--remove").code == 0
    assert "pinned" not in run("list").out


def test_check_finds_machine_code_that_its_inputs_do_not_give(
    run: Run, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a stored cubin that nobody compiled, with digests that are all right."""
    run("build", "tiny.yaml")
    assert run("check").code == 0
    store = store_of(world)
    digest = store.digests()[0]
    found = store.get(digest)
    assert not isinstance(found, Miss)
    other = Artifact(msgspec.structs.replace(found.record, cubin=Blob.of(b"other")), b"other")
    store.publish(other)
    assert run("verify").code == 0
    ran = run("check", "--json")
    assert (ran.code, ran.data["error"]["code"]) == (4, "invalid-artifact")  # type: ignore[index]
    verdicts = {one["digest"]: one["verdict"] for one in ran.data["entries"]}  # type: ignore[attr-defined]
    assert verdicts.pop(digest) == "different"
    assert set(verdicts.values()) == {"same"}
    stale = msgspec.structs.replace(found.record.provenance, options=("--other",))
    store.publish(Artifact(msgspec.structs.replace(found.record, provenance=stale), found.cubin))
    ran = run("check", digest)
    assert ran.code == 1
    assert "built with options --other" in ran.out
    assert store.get(digest) != found, "check must write nothing"


def test_commands_tell_which_layer_an_entry_is_from(run: Run, world: Path) -> None:
    """Catches layers that only some commands read, and an entry that is listed twice."""
    (world / "one.yaml").write_text(manifest_text(Deed.ANSWER, tokens="1"))
    layer = str(world / "layer")
    store = str(store_of(world).root)
    run("build", "tiny.yaml", "--store", layer)
    run("build", "one.yaml")
    built = run("build", "tiny.yaml", "--layer", layer)
    assert f"2 of them in the layer {layer}" in built.out
    listed = run("list", "--layer", layer, "--json").data
    assert listed["layers"] == [layer]
    sources = {one["digest"]: one["from"] for one in listed["entries"]}  # type: ignore[attr-defined]
    (own,) = store_of(world).digests()
    assert sources.pop(own) == store
    assert set(sources.values()) == {layer}
    assert len(sources) == 2
    below = min(sources)
    assert run("show", below).code == 3
    shown = run("show", below, "--layer", layer, "--json").data
    assert shown["from"] == layer
    assert str(shown["cubin_path"]).startswith(layer)
    assert run("path", below, "--layer", layer).out.startswith(layer)
    assert run("explain", "tiny.yaml", "--layer", layer).out.endswith("3 present\n")
    ran = run("verify", "--layer", layer)
    assert ran.code == 0
    assert ran.out.count(" ok ") == 4
    (world / "layer" / "v1" / "refs" / below[:2] / below).unlink()
    (world / "layer" / "v1" / "refs" / below[:2] / below).write_text("damaged")
    ran = run("verify", "--layer", layer, "--repair")
    assert ran.code == 4, "layers are never repaired"
    assert (world / "layer" / "v1" / "refs" / below[:2] / below).exists()
    assert "cannot be used" in run("list", "--layer", layer).err


def test_an_ambiguous_beginning_names_the_candidates(run: Run, world: Path) -> None:
    """Catches `show` that picks one of several artifacts."""
    (world / "many.yaml").write_text(
        manifest_text(Deed.ANSWER, tokens="1-16", out_dtype="[fp32, bf16]")
    )
    run("build", "many.yaml")
    digests = store_of(world).digests()
    beginning = next(d[0] for d, e in itertools.pairwise(digests) if d[0] == e[0])
    alike = [digest for digest in digests if digest.startswith(beginning)]
    ran = run("show", beginning)
    assert ran.code == 3
    assert f"{len(alike)} entries begin with {beginning}" in ran.err
    assert alike[0] in ran.err
    unique = next(d for d in digests if sum(e.startswith(d[:3]) for e in digests) == 1)
    assert run("show", unique[:3]).code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_speaks_json(run: Run, command: str) -> None:
    """Catches text in a pipe to jq: one object with its schema number, and nothing else."""
    run("build", "tiny.yaml")
    given: dict[str, tuple[str, ...]] = {
        "build": ("tiny.yaml",),
        "plan": ("tiny.yaml",),
        "show": ("f" * 64,),
    }
    given |= {"explain": ("tiny.yaml",), "rm": ("f" * 64,), "pin": ("--manifest", "tiny.yaml")}
    ran = run(command, *given.get(command, ()), "--json")
    assert ran.data
    assert ran.err == ""


@pytest.mark.parametrize("flag", ["-q", "--quiet"])
def test_quiet_keeps_data_and_drops_notes(run: Run, flag: str) -> None:
    """Catches notes in scripts that asked for none, and data that quiet swallows."""
    assert run("list", flag).err == ""
    assert run("path", flag).out
    assert run("bild", flag).err.startswith("error: ")


def test_verbose_tells_what_the_library_logs(
    run: Run, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches -v that tells nothing, and log lines without -v."""
    import llbf16_aot.cli.store as module

    def told(path: Path | None) -> Store:
        builder._log.info("a note")
        builder._log.debug("a detail")
        builder._log.warning("a danger")
        return store_of(world)

    monkeypatch.setattr(module, "open_store", told)
    assert run("path").err == "warning: a danger\n"
    assert run("path", "-v").err == "a note\nwarning: a danger\n"
    assert run("path", "-vv").err == "a note\na detail\nwarning: a danger\n"
    assert run("path", "-q").err == ""


def test_a_table_that_the_runtime_would_not_follow_is_warned_of(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a store built for one tuning table and served with another, where all misses."""
    build = ("build", "tiny.yaml", "--dry-run")
    assert run(*build).err == ""
    monkeypatch.setenv("LLBF16_AOT_TUNING", "default")
    ran = run(*build)
    assert ran.err.startswith("warning: the manifests name the tuning table reference; ")
    assert "default, as LLBF16_AOT_TUNING says" in ran.err
    monkeypatch.delenv("LLBF16_AOT_TUNING")
    assert "follows the default, and may look for kernels" in run(*build).err
    assert "follows the default" in run("plan", "tiny.yaml").err
    assert run(*build, "--candidates").err == ""
    assert run(*build, "-q").err == ""


def test_a_table_is_the_same_by_its_relative_and_its_absolute_path(
    run: Run, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a warning of a mismatch between a path and itself."""
    (world / "mine.json").write_text(
        '{"schema": 1, "name": "mine", "source": "test", "rules": '
        '[{"use": {"backend": "dotprod", "block": 128, "experts_per_block": 1}}]}'
    )
    text = manifest_text(Deed.ANSWER).replace("reference", "./mine.json")
    (world / "tiny.yaml").write_text(text)
    for name in ("./mine.json", str(world / "mine.json"), "mine.json"):
        monkeypatch.setenv("LLBF16_AOT_TUNING", name)
        assert run("plan", "tiny.yaml").err == ""
    monkeypatch.setenv("LLBF16_AOT_TUNING", "./other.json")
    assert "follows ./other.json" in run("plan", "tiny.yaml").err


def test_a_gap_fails_the_dry_run_as_it_would_the_build(run: Run, world: Path) -> None:
    """Catches a dry run in CI that is green although the build will fail."""
    (world / "narrow.json").write_text(
        '{"schema": 1, "name": "narrow", "source": "test", "rules": '
        '[{"use": {"backend": "dotprod", "block": 32, "experts_per_block": 2}}]}'
    )
    text = manifest_text(8, 16384, tokens="1").replace("reference", "./narrow.json")
    (world / "gap.yaml").write_text(text)
    dry = run("build", "gap.yaml", "--dry-run", "-q")
    assert dry.code == 1
    assert "no kernel for 1 problem" in dry.out
    assert dry.err.startswith("error: 1 of 2 problems have no artifact\n")
    assert re.search("router-16384.* gap .*weight loads a thread", dry.err)
    as_json = run("build", "gap.yaml", "--dry-run", "--json")
    assert (as_json.code, as_json.data["error"]["code"]) == (1, "coverage")  # type: ignore[index]
    assert run("build", "gap.yaml", "-q").err == dry.err
    plan = run("plan", "gap.yaml")
    assert plan.code == 0
    assert re.search("router-16384.* gap .*weight loads a thread", plan.out)


def test_a_relative_store_in_the_environment_is_exit_2(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a wrong setting that ends like a full disk."""
    monkeypatch.setenv("LLBF16_AOT_STORE", "here")
    ran = run("list", "--json")
    assert (ran.code, ran.data["error"]["code"]) == (2, "usage")  # type: ignore[index]


def test_hints_can_be_pasted_and_name_the_store_that_was_meant(run: Run, world: Path) -> None:
    """Catches a hint that looks into another store, or that a space in a path breaks."""
    quoted = f"'{world}/my store'"
    ran = run("show", "abc", "--store", "my store")
    assert f"the store at {quoted} has no entry abc" in ran.err
    assert ran.err.endswith(f"hint: see the entries with: llbf16-aot list --store {quoted}\n")


def test_a_full_store_is_exit_5_with_the_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches success although nothing was kept, and a JSON error without what was built."""

    def full(self: Store, artifact: object) -> None:
        raise StoreFullError("no room on the disk", hint="free some")

    monkeypatch.setattr(Store, "publish", full)
    ran = run("build", "tiny.yaml", "--json")
    assert ran.code == 5
    assert ran.data["error"] == {
        "code": "store-full",
        "message": "3 of 3 artifacts were built but not stored: no room on the disk",
        "hint": "free some",
    }
    assert len(ran.data["artifacts"]) == 3  # type: ignore[arg-type]


def test_an_unexpected_exception_is_a_message_and_a_traceback_only_with_v(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches tracebacks in front of users, and defects that cannot be reported."""

    def broken(self: Store) -> tuple[str, ...]:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Store, "digests", broken)
    ran = run("verify")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: internal error: ZeroDivisionError: a defect\nhint: ")
    assert "Traceback" not in ran.err
    assert "Traceback" in run("verify", "-v").err
    as_json = run("verify", "--json")
    assert as_json.data["error"]["code"] == "error"  # type: ignore[index]
    assert as_json.err == ""


@pytest.mark.parametrize(
    ("environ", "color"),
    [
        ({}, None),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, None),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "0"}, None),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
)
def test_the_environment_decides_on_colour(environ: dict[str, str], color: bool | None) -> None:
    """Catches NO_COLOR overruled by FORCE_COLOR, and empty variables that count as set."""
    assert color_from(environ) is color


def test_the_flag_decides_over_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches --color that NO_COLOR overrules, and escape codes nobody asked for."""
    assert "\x1b[" not in run("show", "abc").err
    assert "\x1b[" in run("show", "abc", "--color").err
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" in run("show", "abc", "--color").err
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in run("show", "abc").err
    assert "\x1b[" not in run("show", "abc", "--no-color").err


def test_a_build_tells_before_it_compiles_that_nothing_can_be_stored(
    run: Run, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches minutes of compiling whose results nobody can keep."""
    started: list[object] = []
    monkeypatch.setattr(builder, "execute", lambda *a, **k: started.append(a))
    (world / "file").write_text("mine")
    ran = run("build", "tiny.yaml", "--store", str(world / "file" / "store"))
    assert ran.code == 5
    assert "cannot write the store" in ran.err
    assert "hint: see what is in the way" in ran.err
    assert not started


def test_doctor_tells_the_versions_and_the_store(
    run: Run, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a doctor that needs a GPU, and one that is silent about what it looked at."""
    monkeypatch.setenv("LLBF16_AOT_STORE", str(world / "mine"))
    ran = run("doctor", "--json")
    assert ran.code == 0
    findings = {(f["section"], f["name"]): f for f in ran.data["findings"]}  # type: ignore[attr-defined]
    for name in (
        ("versions", "python"),
        ("versions", "llbf16-aot"),
        ("versions", "torch"),
        ("driver", "driver"),
        ("store", "path"),
        ("store", "file system"),
        ("store", "free space"),
        ("settings", "tuning table"),
    ):
        assert name in findings
    assert findings["store", "path"]["value"] == str(world / "mine")
    assert "LLBF16_AOT_STORE" in findings["store", "path"]["text"]


def test_doctor_fails_only_where_something_is_broken(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a health check in a container that never fails, or always."""
    assert run("doctor").code == 0
    monkeypatch.setenv("LLBF16_AOT_JOBS", "many")
    ran = run("doctor")
    assert ran.code == 1
    assert "LLBF16_AOT_JOBS is 'many'" in ran.err
    assert "python" in ran.out


def test_the_module_is_the_same_program() -> None:
    """Catches `python -m llbf16_aot` that lacks the exit code or calls itself __main__.py."""
    ended = subprocess.run(
        [sys.executable, "-m", "llbf16_aot", "bild"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr == "error: no such command 'bild'\nhint: did you mean build?\n"


def test_help_and_version_import_next_to_nothing() -> None:
    """Catches a slow start: each of these modules costs 10 ms to seconds."""
    code = """
import sys
from llbf16_aot.cli import main
main(["--help"])
main(["build", "--help"])
heavy = {"torch", "cutlass", "ruamel.yaml", "msgspec", "filelock", "platformdirs", "cuda",
    "subprocess", "hashlib", "llbf16_aot.store", "llbf16_aot.builder"}
sys.exit(" ".join(sorted(heavy & set(sys.modules))) or None)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.stderr == ""
    assert ended.returncode == 0


PROGRAM = """
import os, sys
sys.path.insert(0, os.environ["TESTS"])
import pytest
from fake_builds import use_fake_compiler
with pytest.MonkeyPatch.context() as patch:
    use_fake_compiler(patch, *filter(None, [os.environ.get("FIFO")]))
    from llbf16_aot.cli import main
    sys.exit(main())
"""
"""The program with the fake compiler, to be run in a process of its own."""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "TESTS": str(Path(__file__).parent), **more}


def start_program(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**environ),
        preexec_fn=heed_signals,
    )


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "terminated"),
    ],
)
def test_a_signal_ends_the_build_and_its_processes(
    world: Path, number: signal.Signals, code: int, word: str
) -> None:
    """Catches a traceback, a wrong exit code, children that live on and directories left behind."""
    (world / "hang.yaml").write_text(manifest_text(Deed.HANG, tokens="1"))
    scratch = world / "scratch"
    scratch.mkdir()
    fifo = world / "fifo"
    os.mkfifo(fifo)
    program = start_program("build", "hang.yaml", TMPDIR=str(scratch), FIFO=str(fifo))
    try:
        # Blocks until the compiler process works on the key.
        with open(fifo, "rb") as reader:
            program.send_signal(number)
            assert select.select([reader], [], [], 60)[0], "the compiler process lives on"
            assert reader.read() == b""
        out, err = program.communicate(timeout=60)
    finally:
        program.kill()
        program.wait()
    assert (program.returncode, out, err) == (code, "", f"{word}\n")
    assert list(scratch.iterdir()) == []
    assert store_of(world).digests() == ()


def test_a_closed_pipe_ends_the_program_quietly(world: Path, run: Run) -> None:
    """Catches `llbf16-aot list | head -0` with a traceback or an ignored exception."""
    run("build", "tiny.yaml")
    program = start_program("list")
    assert program.stdout is not None
    program.stdout.close()
    assert program.stderr is not None
    err = program.stderr.read()
    program.stderr.close()
    assert (program.wait(timeout=60), err) == (128 + signal.SIGPIPE, "")


def test_a_full_disk_behind_stdout_is_an_error(world: Path, run: Run) -> None:
    """Catches exit code 0 although the output is lost."""
    run("build", "tiny.yaml")
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "llbf16_aot", "path"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: cannot write to standard output: No space left")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("--help", 1, ()),
        ("build --help", 1, ()),
        ("--version", 1, ()),
        ("path --json", 1, ()),
        ("list --json", 1, ()),
        # The run's own failure is not lost, and decides on the exit code.
        ("show abc --json", 3, ("has no entry abc",)),
        ("build bad.yaml --json", 1, ("artifacts could not be built",)),
    ],
)
def test_an_output_that_is_lost_is_told_on_stderr(
    world: Path, arguments: str, code: int, told: tuple[str, ...]
) -> None:
    """Catches silence with --json, and help for which users are asked to report a defect."""
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment(),
        )
    assert ended.returncode == code
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert errors[0].startswith("error: cannot write to standard output: No space left")
    assert len(errors) == 1 + len(told)
    assert all(text in ended.stderr for text in told)
    assert "internal error" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


def test_progress_is_shown_on_a_terminal_only(world: Path) -> None:
    """Catches escape codes in the logs of a CI job, and a terminal left with half a line."""

    def on_terminal(*arguments: str, **environ: str) -> str:
        ours, theirs = os.openpty()
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=theirs,
            env=environment(**environ),
        )
        os.close(theirs)
        text = b""
        try:
            while chunk := os.read(ours, 4096):
                text += chunk
        except OSError:
            pass  # how Linux says that the other end of a terminal is closed
        os.close(ours)
        assert program.wait(timeout=60) == 0
        return text.decode()

    shown = on_terminal("build", "tiny.yaml", "--store", "a")
    assert "[0/3] compiling dotprod hidden=8" in shown
    assert "[3/3] compiled dotprod hidden=8" in shown
    assert re.search(r"\r *\r\Z", shown)
    assert on_terminal("build", "tiny.yaml", "--store", "b", "--no-progress") == ""
    assert on_terminal("build", "tiny.yaml", "--store", "c", "-q") == ""
    assert on_terminal("build", "tiny.yaml", "--store", "d", CI="true") == ""


def test_dry_run_prints_the_very_plan(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a dry run that starts a compiler, or shows another plan than the build follows."""
    forbid_compiling(monkeypatch)
    dry = run("build", "tiny.yaml", "--dry-run", "--json").data
    assert dry == run("plan", "tiny.yaml", "--json").data
