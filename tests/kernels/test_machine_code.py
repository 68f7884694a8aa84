"""What the PTX and SASS of every kernel family must show, for Hopper and for Blackwell.

These read machine code that the compiler really made; none of it needs a GPU. Blackwell cubins are
compiled and inspected here, and were never run.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llbf16_aot.backends import (
    BACKENDS,
    Bf16x3Config,
    Config,
    DotprodConfig,
    Fp32Config,
    OneshotConfig,
    SplitkConfig,
    backend_name,
)
from llbf16_aot.elf import check_cubin
from llbf16_aot.launch import Attribute, LaunchRecord
from llbf16_aot.pool import CompilerPool
from llbf16_aot.problem import DType, Target
from llbf16_aot.protocol import Compiled
from llbf16_aot.toolchain import COMPILER, toolchain
from machine_code import cluster_barriers, sass_of
from support import key_for

pytestmark = pytest.mark.compiler

TARGETS = ("sm_90a", "sm_100a")
CONFIGS = (
    DotprodConfig(hidden=7168, tokens=4, block=128, experts_per_block=1),
    DotprodConfig(hidden=2880, tokens=16, block=128, experts_per_block=2),
    SplitkConfig(split_k=6, stages=4),
    SplitkConfig(split_k=8, stages=2),
    SplitkConfig(split_k=8, stages=4, experts_tile=64, hidden_tile=128),
    OneshotConfig(hidden=7168, tokens=8, experts_tile=16, split_k=8, warps=14, vectors=2),
    OneshotConfig(hidden=2880, tokens=16, experts_tile=8, split_k=6, warps=5, vectors=3),
    OneshotConfig(hidden=7168, tokens=32, experts_tile=8, split_k=4, warps=4, vectors=4),
    Fp32Config(
        hidden=6144, tokens=8, experts_tile=16, experts_per_thread=4, split_k=8, warps=8, vectors=3
    ),
    Fp32Config(
        hidden=6144, tokens=32, experts_tile=16, experts_per_thread=4, split_k=8, warps=4, vectors=6
    ),
    Fp32Config(
        hidden=2880, tokens=1, experts_tile=4, experts_per_thread=2, split_k=1, warps=16, vectors=3
    ),
    Bf16x3Config(tokens_tile=64, experts_tile=64, k_warps=2, split_k=8, stages=3),
    Bf16x3Config(tokens_tile=128, experts_tile=64, k_warps=1, split_k=4, stages=2),
    Bf16x3Config(tokens_tile=32, experts_tile=16, k_warps=4, split_k=1, stages=4),
)
CLUSTERED = tuple(c for c in CONFIGS if BACKENDS[backend_name(c)].geometry(c).cluster != (1, 1, 1))
PIPELINED = (SplitkConfig, Bf16x3Config)
"""Families that copy through shared memory with `cp.async`."""


def _name(value: object) -> str:
    return re.sub(r"[^0-9a-z]+", "-", repr(value).lower()).strip("-")


@pytest.fixture(scope="session")
def pool() -> Iterator[CompilerPool]:
    versions = toolchain()
    if versions is None:
        pytest.skip(f"{COMPILER} is not installed")
    with CompilerPool(jobs=1, version=versions[COMPILER], limit_s=120.0) as opened:
        yield opened


CompileFn = Callable[..., Compiled]


@pytest.fixture(scope="session")
def compiled(pool: CompilerPool) -> CompileFn:
    """Machine code of a configuration, each compiled once in this process's tests."""
    made: dict[tuple[Config, str, DType, bool], Compiled] = {}

    def get(
        config: Config, target: str, *, out_dtype: DType = DType.FP32, pdl: bool = True
    ) -> Compiled:
        wanted = (config, target, out_dtype, pdl)
        if wanted not in made:
            made[wanted] = pool.compile(
                key_for(config, target=target, out_dtype=out_dtype, pdl=pdl)
            )
        return made[wanted]

    return get


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", CONFIGS, ids=_name)
class TestEveryKernel:
    """Holds for each family on each architecture."""

    def test_matches_its_launch_record_and_spills_nothing(
        self, config: Config, target: str, compiled: CompileFn
    ) -> None:
        """A parameter list that drifts from the kernel's would make it read garbage addresses."""
        code = compiled(config, target)
        family = BACKENDS[key_for(config, target=target).backend]
        record = LaunchRecord.assemble(
            code.symbol,
            family.geometry(config),
            attributes=(Attribute.PROGRAMMATIC_STREAM_SERIALIZATION,),
            sources=family.PARAMS,
        )
        kernel = check_cubin(record, Target.parse(target), code.cubin)
        assert kernel.local_bytes == 0
        assert kernel.required_block == record.block
        assert not re.search(r"\b(ld|st)\.local|\.local\b", code.ptx.decode())

    def test_loads_128_bits_at_a_time(
        self, config: Config, target: str, compiled: CompileFn
    ) -> None:
        """Narrower loads take two to eight times the instructions for the same bytes."""
        ptx = compiled(config, target).ptx.decode()
        loads = re.findall(r"ld\.global\S*|cp\.async\.c[ag]\S*[^;]*", ptx)
        assert loads
        narrow = [
            load
            for load in loads
            if not (load.endswith(".v4.b32") or re.search(r"^cp\.async\.cg\..*, 16, %", load))
        ]
        assert narrow == []

    def test_has_no_aligned_cluster_barrier(
        self, config: Config, target: str, compiled: CompileFn
    ) -> None:
        """`.aligned` promises that every warp gets there, and hangs the GPU where one does not."""
        barriers = cluster_barriers(compiled(config, target).ptx.decode())
        assert [b for b in barriers if ".aligned" in b] == []
        assert bool(barriers) == (config in CLUSTERED)

    def test_reads_weights_before_the_wait_and_x_after_it(
        self, config: Config, target: str, compiled: CompileFn, tmp_path: Path
    ) -> None:
        """A load of x that slips before the wait reads what the kernel ahead has yet to write.

        And a weight load that the assembler sinks behind it gives the head start away.
        """
        if isinstance(config, PIPELINED):
            pytest.skip("it copies with cp.async: the tests below read its PTX instead")
        lines = sass_of(compiled(config, target).cubin, tmp_path)
        wait = next(i for i, line in enumerate(lines) if "ACQBULK" in line)
        loads = [(i, line) for i, line in enumerate(lines) if "LDG" in line]
        # Only weights are marked to take no place in L1.
        x_loads = [i for i, line in loads if ".NA" not in line]
        weight_loads = [i for i, line in loads if ".NA" in line]
        assert x_loads
        assert min(x_loads) > wait
        first_round = sum(1 for i in weight_loads if i < wait)
        if isinstance(config, DotprodConfig):
            assert first_round == len(weight_loads) == config.steps * config.experts_per_block
        elif isinstance(config, Fp32Config):
            assert first_round == config.vectors * config.experts_per_thread
        else:
            assert isinstance(config, OneshotConfig)
            assert first_round >= config.vectors * config.experts_tile // 8

    def test_without_dependent_launch_waits_for_nothing(
        self, config: Config, target: str, compiled: CompileFn
    ) -> None:
        """The safe variant must not release its dependents before its own writes are done."""
        assert "griddepcontrol" in compiled(config, target).ptx.decode()
        assert "griddepcontrol" not in compiled(config, target, pdl=False).ptx.decode()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", [c for c in CONFIGS if isinstance(c, SplitkConfig)], ids=_name)
def test_splitk_copies_weights_without_a_wait_and_x_behind_one(
    config: SplitkConfig, target: str, compiled: CompileFn
) -> None:
    """The copies of x stand behind the wait of their own warps, those of the weights before it.

    So does what L2 is asked for: to ask for x there would bring old bytes.
    """
    ptx = compiled(config, target).ptx.decode()
    wait = ptx.index("griddepcontrol.wait")
    copies = [match.start() for match in re.finditer(r"cp\.async\.cg", ptx)]
    rows_at_once = 64 * 8 // config.hidden_tile
    # Each copy stands in the loop of the first round and in that of all others.
    assert sum(1 for place in copies if place < wait) == 2 * config.experts_tile // rows_at_once
    assert sum(1 for place in copies if place > wait) == 2 * 16 // rows_at_once
    assert ptx.count("griddepcontrol.wait") == 1
    assert ptx.count("cp.async.bulk.prefetch.L2") == 1
    assert ptx.index("cp.async.bulk.prefetch.L2") < wait


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "config", [c for c in CONFIGS if not isinstance(c, (Bf16x3Config, Fp32Config))], ids=_name
)
def test_x_is_asked_for_right_behind_the_wait(
    config: Config, target: str, compiled: CompileFn, tmp_path: Path
) -> None:
    """Catches addresses that are computed behind the wait: a hundred instructions cost 0.15 us.

    The assembler moves them there where nothing keeps them, whatever the PTX says.
    """
    lines = sass_of(compiled(config, target).cubin, tmp_path)
    wait = next(i for i, line in enumerate(lines) if "ACQBULK" in line)
    first = next(i for i, line in enumerate(lines) if i > wait and "LDG" in line)
    assert first - wait <= 40


@pytest.mark.parametrize("config", [c for c in CONFIGS if isinstance(c, SplitkConfig)], ids=_name)
def test_no_warp_of_splitk_waits_for_another_before_it_has_left_the_cluster_barrier(
    config: SplitkConfig, compiled: CompileFn
) -> None:
    """Catches a hang under racecheck, which lets nobody out before every warp of a block is there.

    Three kinds of warps each leave the barrier once, and wait on mbarriers only behind it: those
    that multiply, those that copy weights, those that copy x, in this order in the PTX.
    """
    ptx = compiled(config, "sm_90a").ptx.decode()
    parts = [part.count("mbarrier.try_wait") for part in ptx.split("barrier.cluster.wait")]
    assert len(parts) == 4
    assert parts[0] == 0
    assert parts[1] > 1
    assert parts[2:] == [1, 1]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", [c for c in CONFIGS if isinstance(c, Bf16x3Config)], ids=_name)
def test_bf16x3_copies_the_first_weights_before_the_wait_and_all_x_behind_it(
    config: Bf16x3Config, target: str, compiled: CompileFn
) -> None:
    """Copies of x before the wait read old bytes; none of the weights there wastes the head start.

    Before it stand the weights of the stages that are filled in advance, 16 vectors a row.
    """
    ptx = compiled(config, target).ptx.decode()
    wait = ptx.index("griddepcontrol.wait")
    copies = [match.start() for match in re.finditer(r"cp\.async\.cg", ptx)]
    threads = config.warps * 32
    weights, x = config.experts_tile * 16 // threads, config.tokens_tile * 8 // threads
    assert sum(1 for place in copies if place < wait) == (config.stages - 1) * weights
    assert len(copies) == config.stages * (weights + x)


@pytest.mark.parametrize("config", [c for c in CONFIGS if isinstance(c, Bf16x3Config)], ids=_name)
def test_bf16x3_multiplies_three_terms_and_rounds_no_weight(
    config: Bf16x3Config, compiled: CompileFn
) -> None:
    """A lost term, or one that is rounded instead of cut, costs eight of the weights' 24 bits."""
    ptx = compiled(config, "sm_90a").ptx.decode()
    steps = 4 // config.k_warps
    assert ptx.count("mma.sync.aligned.m16n8k16") == 3 * steps * config.warp_tokens // 8
    assert not re.search(r"cvt\.rn\.bf16", ptx)
    assert ptx.count("0x7632") == 3 * 4 * steps


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", CLUSTERED, ids=_name)
def test_cluster_members_meet_before_they_write_to_each_other(
    config: Config, target: str, compiled: CompileFn
) -> None:
    """A store into a block that has not started, or whose mbarrier is raw, is lost or traps."""
    ptx = compiled(config, target).ptx.decode()
    arrive = ptx.index("barrier.cluster.arrive")
    assert ptx.index("fence.mbarrier_init") < arrive
    assert ptx.index("barrier.cluster.wait") < ptx.index("st.async")
    assert arrive < ptx.index("st.async")
    # What the peers sent is read only behind the wait that acquires it from the whole cluster.
    assert "mbarrier.try_wait.parity.acquire.cluster" in ptx[ptx.index("st.async") :]


@pytest.mark.parametrize("out_dtype", list(DType))
@pytest.mark.parametrize(
    "config", [CONFIGS[0], CONFIGS[2], CONFIGS[5], CONFIGS[8], CONFIGS[13]], ids=_name
)
def test_rounds_once_to_the_output_type(
    config: Config, out_dtype: DType, compiled: CompileFn
) -> None:
    """Sums stay fp32 until the write: a second rounding would cost a bit of accuracy."""
    ptx = compiled(config, "sm_90a", out_dtype=out_dtype).ptx.decode()
    conversions = set(re.findall(r"cvt\.rn\.(?:bf16|f16)\S*", ptx))
    if out_dtype is DType.FP32:
        assert conversions == set()
        assert re.search(r"st\.global\S*\.[bf]32", ptx)
    else:
        wanted = "cvt.rn.bf16" if out_dtype is DType.BF16 else "cvt.rn.f16"
        assert conversions
        assert all(conversion.startswith(wanted) for conversion in conversions)
        assert re.search(r"st\.global\S*\.b16", ptx)


def test_two_out_dtypes_are_two_cubins(compiled: CompileFn) -> None:
    """Equal machine code for two output types would mean that one of them is wrong."""
    cubins = {compiled(CONFIGS[0], "sm_90a", out_dtype=dtype).cubin for dtype in DType}
    assert len(cubins) == len(DType)


class TestTheChecksThemselves:
    """Negative controls: each reader finds what it is there to find."""

    def test_an_aligned_cluster_barrier_is_seen(self) -> None:
        ptx = "barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.acquire.aligned;\n"
        assert cluster_barriers(ptx) == [
            "barrier.cluster.arrive.relaxed.aligned",
            "barrier.cluster.wait.acquire.aligned",
        ]

    def test_sass_of_a_broken_cubin_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(subprocess.CalledProcessError):
            sass_of(b"\x7fELF no cubin", tmp_path)
