"""The pool keeps the parent whole whatever a compiler process does (reliability table, row H1)."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_compiler import Deed
from llbf16_aot import child
from llbf16_aot.backends import DotprodConfig
from llbf16_aot.child import TAIL_BYTES
from llbf16_aot.errors import CompileError
from llbf16_aot.key import CompileKey
from llbf16_aot.pool import CompilerPool
from llbf16_aot.problem import DType, Epilogue, Layout

VERSION = "1.2.3"
FAKE = Path(__file__).with_name("fake_compiler.py")


def key(deed: Deed, target: str = "sm_90a", *, tokens: int = 1) -> CompileKey:
    return CompileKey(
        target=target,
        config=DotprodConfig(hidden=int(deed), tokens=tokens, block=128, experts_per_block=1),
        x_dtype=DType.BF16,
        weight_dtype=DType.BF16,
        out_dtype=DType.FP32,
        layout=Layout.K_MAJOR,
        alignment_bytes=16,
        epilogue=Epilogue.NONE,
        pdl=True,
    )


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which private directories are made; must be empty in the end."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@pytest.fixture
def make_pool(scratch: Path) -> Iterator[Callable[..., CompilerPool]]:
    """Makes pools of fake compilers; afterwards nothing of them may be left in the file system."""
    pools: list[CompilerPool] = []

    def make(
        *arguments: str, jobs: int = 1, limit_s: float = 60.0, keys_per_child: int = 40
    ) -> CompilerPool:
        command = (sys.executable, "-I", "-S", str(FAKE), *(arguments or (VERSION,)))
        pool = CompilerPool(
            jobs=jobs,
            version=VERSION,
            limit_s=limit_s,
            command=command,
            keys_per_child=keys_per_child,
        )
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()
    assert list(scratch.iterdir()) == []


def pid_of(pool: CompilerPool, target: str = "sm_90a") -> int:
    pid = json.loads(pool.compile(key(Deed.TELL, target)).cubin)["pid"]
    assert isinstance(pid, int)
    return pid


def test_each_answer_belongs_to_its_key(make_pool: Callable[..., CompilerPool]) -> None:
    """Catches replies that are paired with the wrong request when many threads share children."""
    pool = make_pool(jobs=3)
    keys = [
        key(Deed.ANSWER, target, tokens=n) for target in ("sm_90a", "sm_100a") for n in range(1, 17)
    ]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(pool.compile, keys))
    for asked, answer in zip(keys, answers, strict=True):
        assert json.loads(answer.cubin)["target"] == asked.target
        assert json.loads(answer.cubin)["config"]["tokens"] == asked.config.tokens  # type: ignore[union-attr]
        assert (answer.symbol, answer.ptx) == ("kernel", b"ptx")


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        (Deed.REFUSE, "no such instruction"),
        (Deed.CRASH, "crashed with SIGSEGV"),
        (Deed.EXIT, "ended with exit status 3"),
        (Deed.OUT_OF_MEMORY, "killed by SIGKILL"),
        (Deed.CHATTER_AND_CRASH, "crashed with SIGABRT"),
        (Deed.GARBAGE, "answered 'hello, this is no JSON', which is no reply"),
        (Deed.FLOOD_STDOUT, "which is no reply"),
        (Deed.TOO_LARGE, "announced 1099511627776 bytes"),
        (Deed.CUT_SHORT, "ended with exit status 0"),
        (Deed.CLOSE_STDOUT, "closed its output"),
    ],
)
def test_a_process_that_misbehaves_costs_its_own_key_only(
    make_pool: Callable[..., CompilerPool], deed: Deed, message: str
) -> None:
    """Catches a failure that hangs, is reported as something else, or stops the keys after it."""
    pool = make_pool()
    with pytest.raises(CompileError) as caught:
        pool.compile(key(deed))
    assert message in caught.value.message
    assert json.loads(pool.compile(key(Deed.ANSWER)).cubin)["config"]["hidden"] == Deed.ANSWER


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (Deed.REFUSE, "  a diagnostic"),
        (Deed.EXIT, "  giving up"),
        (Deed.CRASH, "  ?[31mabout to crash"),
        (Deed.CHATTER_AND_CRASH, "  its last words"),
    ],
)
def test_an_error_ends_with_the_end_of_the_log(
    make_pool: Callable[..., CompilerPool], deed: Deed, words: str
) -> None:
    """Catches a lost diagnosis, one without bound, and escape codes that reach the terminal."""
    pool = make_pool()
    with pytest.raises(CompileError) as caught:
        pool.compile(key(deed))
    assert caught.value.message.endswith(words)
    assert len(caught.value.message) < 2 * TAIL_BYTES


def test_a_log_of_100_megabytes_takes_no_memory(make_pool: Callable[..., CompilerPool]) -> None:
    """Catches a log that is collected whole, and a child that blocks because nobody reads it."""
    pool = make_pool()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert pool.compile(key(Deed.CHATTER)).cubin == b"cubin"
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 20 * 1024


def test_a_process_over_its_time_limit_is_ended(make_pool: Callable[..., CompilerPool]) -> None:
    """Catches a hang of the compiler that becomes a hang of the build; it ignores SIGTERM."""
    pool = make_pool(limit_s=2.0)
    with pytest.raises(CompileError) as caught:
        pool.compile(key(Deed.HANG))
    assert "ended after the limit of 2 seconds" in caught.value.message
    assert "LLBF16_AOT_COMPILE_TIMEOUT_S" in caught.value.hint
    assert pool.compile(key(Deed.ANSWER)).symbol == "kernel"


def test_the_whole_process_group_is_ended(
    make_pool: Callable[..., CompilerPool], tmp_path: Path
) -> None:
    """Catches helpers of a dead compiler that live on; they hold the write end of a FIFO."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        pool = make_pool(VERSION, str(fifo))
        with pytest.raises(CompileError, match="exit status 4"):
            pool.compile(key(Deed.LEAVE_GRANDCHILD))
        assert select.select([reader], [], [], 30)[0], "a process of the group is still alive"
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


def test_what_a_process_writes_into_its_directory_is_removed(
    make_pool: Callable[..., CompilerPool], scratch: Path
) -> None:
    """Catches litter, and a clean-up that follows links or stops at a closed directory."""
    pool = make_pool()
    folder = Path(pool.compile(key(Deed.LITTER)).symbol)
    assert folder.parent == scratch
    assert (folder / "left behind").exists()
    pool.close()
    assert not folder.exists()
    assert Path("/").is_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_closed_directory_is_removed_without_roots_powers() -> None:
    """Catches a clean-up that needs root's powers, and one that opens up what a link leads to."""
    folder, outside = (Path(tempfile.mkdtemp(dir="/tmp")) for _ in range(2))
    os.chown(folder, 65534, 65534)
    os.chown(outside, 65534, 65534)
    outside.chmod(0o550)
    process = os.fork()
    if process == 0:  # pragma: no cover - ends without returning
        try:
            os.setgid(65534)
            os.setuid(65534)
            (folder / "deep" / "down").mkdir(parents=True)
            (folder / "deep" / "down" / "file").touch()
            (folder / "deep" / "link").symlink_to(outside)
            (folder / "deep" / "down").chmod(0)
            (folder / "deep").chmod(0o500)
            child._remove(folder)
        finally:
            os._exit(folder.exists())
    status = os.waitpid(process, 0)[1]
    mode = outside.stat().st_mode & 0o777
    shutil.rmtree(outside)
    assert os.waitstatus_to_exitcode(status) == 0
    assert mode == 0o550


def test_a_process_sees_a_clean_environment(
    make_pool: Callable[..., CompilerPool], monkeypatch: pytest.MonkeyPatch, scratch: Path
) -> None:
    """Catches variables of the caller that change machine code, and a shared HOME or hash seed."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    monkeypatch.setenv("LLBF16_AOT_JOBS", "7")
    monkeypatch.setenv("PYTHONHASHSEED", "11")
    told = json.loads(make_pool().compile(key(Deed.TELL)).cubin)
    seen = told["environment"]
    assert Path(told["directory"]).parent == scratch
    assert seen["HOME"] == seen["TMPDIR"] == told["directory"]
    assert seen["CUTE_DSL_DUMP_DIR"] == told["directory"] + "/dump"
    assert seen["PYTHONHASHSEED"] == "0"
    assert "CUTE_DSL_ARCH" not in seen
    assert "LLBF16_AOT_JOBS" not in seen
    assert set(sys.path) - {""} >= set(seen["PYTHONPATH"].split(os.pathsep))


def test_a_process_serves_one_target_only(make_pool: Callable[..., CompilerPool]) -> None:
    """Catches a child that is used for two targets: the compiler reads its target at import."""
    pool = make_pool(jobs=1)
    first = pid_of(pool, "sm_90a")
    assert pid_of(pool, "sm_90a") == first
    assert pid_of(pool, "sm_100a") != first
    assert pid_of(pool, "sm_90a") != first


def test_a_process_is_replaced_after_its_share_of_keys(
    make_pool: Callable[..., CompilerPool],
) -> None:
    """Catches children that gather idle compiler threads for ever."""
    pool = make_pool(keys_per_child=2)
    pids = [pid_of(pool) for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_no_more_processes_than_jobs(make_pool: Callable[..., CompilerPool]) -> None:
    """Catches a pool that starts a process for each thread that asks."""
    pool = make_pool(jobs=2)
    with ThreadPoolExecutor(8) as threads:
        pids = set(threads.map(lambda _: pid_of(pool), range(40)))
    assert len(pids) <= 2


def test_a_process_of_another_compiler_version_is_refused(
    make_pool: Callable[..., CompilerPool],
) -> None:
    """Catches artifacts whose provenance names a compiler that did not make them."""
    with pytest.raises(CompileError, match=r"runs version 9\.9, installed is 1\.2\.3"):
        make_pool("9.9").compile(key(Deed.ANSWER))


def test_a_compiler_that_never_starts_is_tried_twice_in_all(scratch: Path, tmp_path: Path) -> None:
    """Catches a broken installation that is tried once more for each of hundreds of keys."""
    starts = tmp_path / "starts"
    code = f"open({str(starts)!r}, 'a').write('x'); raise SystemExit('cannot import the compiler')"
    command = (sys.executable, "-I", "-S", "-c", code)
    with CompilerPool(jobs=1, version=VERSION, limit_s=60, command=command) as pool:
        for _ in range(5):
            with pytest.raises(CompileError) as caught:
                pool.compile(key(Deed.ANSWER))
            assert caught.value.message.endswith("  cannot import the compiler")
    assert starts.read_text() == "xx"
    assert list(scratch.iterdir()) == []


def test_a_program_that_does_not_exist_is_a_compile_error(scratch: Path) -> None:
    """Catches an OSError outside the package's errors, and its private directory left behind."""
    command = ("/nonexistent/python",)
    with (
        CompilerPool(jobs=1, version=VERSION, limit_s=60, command=command) as pool,
        pytest.raises(CompileError, match="cannot be started"),
    ):
        pool.compile(key(Deed.ANSWER))
    assert list(scratch.iterdir()) == []


def test_closing_ends_a_busy_process_and_its_call(
    make_pool: Callable[..., CompilerPool], tmp_path: Path
) -> None:
    """Catches Ctrl-C that waits for a compilation, and one that leaves its process running."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pool = make_pool(VERSION, str(fifo))
    errors: list[BaseException] = []

    def call() -> None:
        try:
            pool.compile(key(Deed.HANG))
        except CompileError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    # Opening blocks until the child has opened the other end: it works on the key then.
    with open(fifo, "rb") as reader:
        pool.close()
        assert reader.read() == b""
    thread.join(timeout=30)
    assert len(errors) == 1
    with pytest.raises(CompileError, match="interrupted"):
        pool.compile(key(Deed.ANSWER))


@pytest.mark.parametrize("where", ["end", "_remove"])
def test_closing_goes_on_where_a_signal_cut_it_short(
    make_pool: Callable[..., CompilerPool],
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """SIGTERM at the end of a build raises in the middle of this: directories were left behind."""
    pool = make_pool(jobs=2)
    for target in ("sm_90a", "sm_100a"):
        pool.compile(key(Deed.ANSWER, target))
    assert len(list(scratch.iterdir())) == 2
    place = child.CompilerProcess if where == "end" else child
    real, calls = getattr(place, where), []

    def cut_short(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(place, where, cut_short)
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    pool.close()
    assert list(scratch.iterdir()) == []
    assert pool._children == set()


def test_a_process_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    """Catches orphans of a build that was killed: an idle child ends with its input."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"""
import os, signal, sys
sys.path[:0] = [{str(FAKE.parent)!r}]
from test_pool import Deed, FAKE, VERSION, CompilerPool, key
wrapped = "import os, runpy, sys; os.open(sys.argv[3], os.O_WRONLY); sys.argv = sys.argv[1:]; " \\
    "runpy.run_path(sys.argv[0], run_name='__main__')"
command = (sys.executable, "-I", "-S", "-c", wrapped, str(FAKE), VERSION, {str(fifo)!r})
CompilerPool(jobs=1, version=VERSION, limit_s=60, command=command).compile(key(Deed.ANSWER))
os.kill(os.getpid(), signal.SIGKILL)
"""
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    try:
        ended = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert select.select([reader], [], [], 30)[0], "the child lives on"
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)
