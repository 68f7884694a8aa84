"""H1 and H2: compiler processes that misbehave, and builds that are interrupted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from children import heed_signals
from faults.harness import leftovers
from faults.tally import Tally
from llbf16_aot.builder import build
from llbf16_aot.child import CompilerProcess
from llbf16_aot.errors import CompileError
from llbf16_aot.manifest import Manifest
from llbf16_aot.store import Store

Sizes = Callable[[int, int], int]

DEEDS = {
    "CRASH": "about to crash",
    "HANG": "waiting for ever",
    "OUT_OF_MEMORY": "SIGKILL",
    "CHATTER_AND_CRASH": "its last words",
    "EXIT": "giving up",
    "LEAVE_GRANDCHILD": "exit status 4",
    "GARBAGE": "no JSON",
    "CLOSE_STDOUT": "closed its output",
}
"""What the fake compiler does, and what the error must end with or tell."""

LIMIT_S = 3.0


def tagged(tag: str) -> list[int]:
    """Processes that have this text in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes()
                command = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if tag.encode() in environ or tag.encode() in command:
                found.append(int(name))
    return found


def misbehave(
    tally: Tally, folder: Path, monkeypatch: pytest.MonkeyPatch, deeds: dict[str, str]
) -> None:
    """Build with a compiler that misbehaves for one key and answers for another."""
    from fake_builds import manifest_text, use_fake_compiler
    from fake_compiler import Deed

    monkeypatch.setenv("LLBF16_AOT_COMPILE_TIMEOUT_S", str(LIMIT_S))
    for name, words in deeds.items():
        place = folder / name
        scratch = place / "scratch"
        scratch.mkdir(parents=True)
        fifo = place / f"fifo-{name}"
        os.mkfifo(fifo)
        # A reader that lives as long as the test: nobody waits for one.
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        monkeypatch.setenv("TMPDIR", str(scratch))
        monkeypatch.setattr("tempfile.tempdir", str(scratch))
        use_fake_compiler(monkeypatch, str(fifo))
        store = Store(place / "store")
        manifest = Manifest.parse(
            manifest_text(Deed[name], Deed.ANSWER, tokens="1"), origin="tiny.yaml"
        )
        started = time.monotonic()
        said = ""
        try:
            build(manifest, store=store, jobs=1)
        except CompileError as error:
            said = error.message
        except Exception as error:
            said = repr(error)
            tally.wrong.append(f"{name}: {error!r}")
        took_s = time.monotonic() - started
        os.close(reader)
        tally.tried += 1
        if words not in said:
            tally.wrong.append(f"{name}: {said!r} does not tell {words!r}")
        if took_s > LIMIT_S + 15:
            tally.wrong.append(f"{name}: took {took_s:.1f} s with a limit of {LIMIT_S} s")
        if len(store.digests()) != 1:
            tally.wrong.append(f"{name}: stored {store.digests()}, wanted the other key alone")
        if left := leftovers(store) + os.listdir(scratch):
            tally.unhealed.append(f"{name}: left {left}")
        if alive := tagged(str(fifo)):
            tally.unhealed.append(f"{name}: processes {alive} live on")
            for process in alive:
                os.kill(process, signal.SIGKILL)


@pytest.mark.fault("H1")
def test_a_compiler_that_misbehaves_fails_its_key_and_leaves_nothing(
    tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a failed compile is stored, its log is lost, or its processes and files stay."""
    misbehave(tally, tmp_path, monkeypatch, DEEDS)
    tally.clean(at_least=6)


def log_is_lost(patch: pytest.MonkeyPatch) -> None:
    """What the compiler said is thrown away."""
    patch.setattr(CompilerProcess, "log", lambda self: "")


def only_the_child_is_ended(patch: pytest.MonkeyPatch) -> None:
    """Helpers of a compiler process live on after it."""
    patch.setattr(os, "killpg", os.kill)


@pytest.mark.fault("H1", control=True)
@pytest.mark.parametrize(
    ("plant", "name"), [(log_is_lost, "CRASH"), (only_the_child_is_ended, "LEAVE_GRANDCHILD")]
)
def test_misbehaving_compilers_find(
    tally: Tally,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    name: str,
) -> None:
    """Control: a lost log and a process that lives on must be found."""
    plant(monkeypatch)
    misbehave(tally, tmp_path, monkeypatch, {name: DEEDS[name]})
    tally.found()


PROGRAM = """
import os, sys
sys.path[:0] = [os.environ["FAULTS_TESTS"], os.environ["FAULTS_TESTS"] + "/aot"]
import pytest
from fake_builds import use_fake_compiler
with pytest.MonkeyPatch.context() as patch:
    use_fake_compiler(patch)
    {plant}
    from llbf16_aot.cli import main
    print("started", file=sys.stderr, flush=True)
    sys.exit(main())
"""

INTERRUPTS: dict[str, tuple[signal.Signals, int]] = {
    "Ctrl-C": (signal.SIGINT, 130),
    "SIGTERM": (signal.SIGTERM, 143),
}


class Interrupted:
    """A build of many keys in a process of its own, to be interrupted."""

    def __init__(self, folder: Path, plant: str = "pass") -> None:
        from fake_builds import manifest_text
        from fake_compiler import Deed

        folder.mkdir()
        (folder / "scratch").mkdir()
        (folder / "many.yaml").write_text(manifest_text(Deed.ANSWER, tokens="1-16", pdl="both"))
        self.folder = folder
        self.store = Store(folder / "store")
        self._plant = plant

    def start(self, *, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(plant=self._plant), "build", "many.yaml",
             "--store", str(self.store.root), "--jobs", "2"],
            stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=self.folder,
            env={**os.environ, "FAULTS_TESTS": str(Path(__file__).parents[1]),
                 "TMPDIR": str(self.folder / "scratch"), "LLBF16_AOT_TUNING": "reference"},
            preexec_fn=heed_signals,
        )  # fmt: skip

    def judge(self, tally: Tally, code: int, err: str, wanted: tuple[int, ...], where: str) -> None:
        tally.tried += 1
        if code not in wanted:
            tally.wrong.append(f"{where}: exit code {code}, wanted {wanted}: {err[-500:]}")
        if "Traceback" in err or "Exception ignored" in err:
            tally.wrong.append(f"{where}: {err[-1500:]}")
        if left := leftovers(self.store) + os.listdir(self.folder / "scratch"):
            tally.unhealed.append(f"{where}: left {left}")
        refs = self.store.root / "v1" / "refs"
        for ref in refs.rglob("?" * 64) if refs.exists() else ():
            if not ref.read_bytes().endswith(b"\n"):
                tally.wrong.append(f"{where}: half a ref")
        if alive := tagged(str(self.folder)):
            tally.unhealed.append(f"{where}: processes {alive} live on")
            for process in alive:
                os.kill(process, signal.SIGKILL)


def interrupt(
    tally: Tally,
    folder: Path,
    name: str,
    rounds: int,
    *,
    plant: str = "pass",
    latest_s: float = 0.6,
) -> None:
    number, code = INTERRUPTS[name]
    dice = random.Random(6)
    for each in range(rounds):
        build = Interrupted(folder / f"{name}-{each}", plant)
        program = build.start()
        assert program.stderr is not None
        assert program.stderr.readline() == "started\n"
        time.sleep(dice.uniform(min(0.05, latest_s), latest_s))
        program.send_signal(number)
        _, err = program.communicate(timeout=60)
        # A build that had ended already may be met by the signal on the interpreter's way out.
        late = (-number,) if len(build.store.digests()) == 32 else ()
        build.judge(tally, program.returncode, err, (code, 0, *late), f"{name}, round {each}")


@pytest.mark.fault("H2")
@pytest.mark.parametrize("name", INTERRUPTS)
def test_an_interrupted_build_says_so_and_leaves_a_clean_store(
    tally: Tally, tmp_path: Path, pick: Sizes, name: str
) -> None:
    """Bug: a traceback, a wrong exit code, compilers that live on, or half an entry."""
    rounds = pick(4, 20)
    interrupt(tally, tmp_path, name, rounds)
    tally.clean(at_least=rounds)


@pytest.mark.fault("H2")
def test_a_build_whose_reader_is_gone_ends_quietly(
    tally: Tally, tmp_path: Path, pick: Sizes
) -> None:
    """Bug: `llbf16-aot build | head -0` ends in a traceback, or loses what it has built."""
    rounds = pick(3, 20)
    for each in range(rounds):
        build = Interrupted(tmp_path / f"closed-{each}")
        reading, writing = os.pipe()
        program = build.start(stdout=writing)
        os.close(writing)
        os.close(reading)
        _, err = program.communicate(timeout=60)
        wanted = (128 + signal.SIGPIPE,)
        build.judge(tally, program.returncode, err, wanted, f"closed stdout, round {each}")
        if len(build.store.digests()) != 32:
            tally.lost.append(f"round {each}: {len(build.store.digests())} of 32 entries")
    tally.clean(at_least=rounds)


@pytest.mark.fault("H2", control=True)
def test_interrupts_find_a_program_that_the_signal_kills(tally: Tally, tmp_path: Path) -> None:
    """Control: a program without a handler, killed as it is, must be found."""
    plant = "import contextlib, llbf16_aot.cli.app as app; app._signals = contextlib.nullcontext"
    interrupt(tally, tmp_path, "SIGTERM", 6, plant=plant, latest_s=0.02)
    tally.found()
