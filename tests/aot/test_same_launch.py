"""Our launch is the DSL's own: the same grid, block, cluster, memory, attributes and parameters.

The host code that CuTe DSL generates for a kernel really runs here (`dsl_host_code`), up to the
launch, and what it asks for is compared with what our launch record says.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from dsl_host_code import CLUSTER, COOPERATIVE, PROGRAMMATIC, Answer, Argument, HostLaunch, Request
from fake_gpu import buffer_of
from llbf16_aot.backends import BACKENDS, Config, DotprodConfig, OneshotConfig, SplitkConfig
from llbf16_aot.builder import assemble
from llbf16_aot.child import child_environment
from llbf16_aot.key import CompileKey
from llbf16_aot.launch import Attribute, Extent, GridDim, LaunchRecord, ParamSource
from llbf16_aot.problem import DType, Problem
from llbf16_aot.protocol import Compiled
from llbf16_aot.toolchain import COMPILER, toolchain
from support import key_for

pytestmark = pytest.mark.compiler

STREAM = 0x0123_4567_89AB_CDE0
HIDDEN = 2880
CONFIGS: tuple[Config, ...] = (
    DotprodConfig(hidden=HIDDEN, tokens=3, block=128, experts_per_block=2),
    SplitkConfig(split_k=6, stages=4),
    OneshotConfig(hidden=HIDDEN, tokens=16, experts_tile=8, split_k=6, warps=5, vectors=3),
)
KEYS = tuple(
    key_for(config, pdl=pdl, out_dtype=out_dtype)
    for config in CONFIGS
    for pdl, out_dtype in ((True, DType.FP32), (False, DType.BF16))
)
SIZES = tuple(
    (tokens, experts) for tokens in (1, 3, 16, 17, 64) for experts in (1, 7, 256, 264, 65_536)
)
"""M and N around every tile of the configurations, and the largest N."""


def values_of(tokens: int, experts: int) -> dict[ParamSource, int]:
    """A value for every parameter there is, each unlike the others in every byte that counts."""
    return {
        ParamSource.X: 0x7F01_1213_1415_1610,
        ParamSource.WEIGHT: 0x7F21_2223_2425_2620,
        ParamSource.OUT: 0x7F31_3233_3435_3634,
        ParamSource.TOKENS: tokens,
        ParamSource.EXPERTS: experts,
        ParamSource.HIDDEN: HIDDEN,
        ParamSource.X_ROW_STRIDE: 0x0141_4248,
        ParamSource.WEIGHT_ROW_STRIDE: 0x0251_5258,
    }


def sources_of(key: CompileKey) -> tuple[ParamSource, ...]:
    """The parameters of a family's kernel: its host function takes them, then a stream."""
    params: tuple[ParamSource, ...] = BACKENDS[key.backend].PARAMS
    return params


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[CompileKey, Answer]:
    """Each key compiled and its host code run for each size, in one process of its own."""
    if toolchain() is None:
        pytest.skip(f"{COMPILER} is not installed")
    folder = tmp_path_factory.mktemp("host-code")
    (folder / "dump").mkdir()
    requests = tuple(
        Request(
            key,
            tuple(
                tuple(Argument(source, values_of(*size)[source]) for source in sources_of(key))
                for size in SIZES
            ),
            STREAM,
        )
        for key in KEYS
    )
    out = folder / "answers.json"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("dsl_host_code.py")), str(out)],
        input=msgspec.json.encode(requests),
        env=child_environment(folder),
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:]
    found = msgspec.json.decode(out.read_bytes(), type=tuple[Answer, ...])
    return dict(zip(KEYS, found, strict=True))


def record_of(key: CompileKey, answer: Answer) -> LaunchRecord:
    """The launch record that the builder stores with this machine code."""
    compiled = Compiled(answer.symbol, answer.cubin, b"")
    return assemble(key, compiled, compiler={"nvidia-cutlass-dsl": "any"}).record.launch


def meaning(attributes: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Launch attributes without those that state what CUDA does without them."""
    defaults = {COOPERATIVE: (0,), PROGRAMMATIC: (0,), CLUSTER: (1, 1, 1)}
    return {name: value for name, value in attributes.items() if defaults.get(name) != value}


def promised(record: LaunchRecord, tokens: int, experts: int) -> HostLaunch:
    """The launch that a record stands for."""
    problem = Problem(tokens, experts, HIDDEN)
    x, y, z = (dim.resolve(problem) for dim in record.grid)
    programmatic = Attribute.PROGRAMMATIC_STREAM_SERIALIZATION in record.attributes
    buffer = buffer_of(record, values_of(tokens, experts))
    return HostLaunch(
        grid=(x, y, z),
        block=record.block,
        dynamic_shared_bytes=record.dynamic_shared_bytes,
        stream=STREAM,
        attributes=meaning({CLUSTER: record.cluster, PROGRAMMATIC: (int(programmatic),)}),
        params=tuple(
            buffer[param.offset_bytes : param.offset_bytes + param.size_bytes]
            for param in record.params
        ),
    )


def differences(record: LaunchRecord, answer: Answer) -> list[str]:
    """Where the record's launches and the DSL's differ, for every size."""
    found = []
    for size, theirs in zip(SIZES, answer.launches, strict=True):
        theirs = msgspec.structs.replace(theirs, attributes=meaning(theirs.attributes))
        ours = promised(record, *size)
        found += [
            f"M={size[0]} N={size[1]} {name}: ours {getattr(ours, name)}, theirs "
            f"{getattr(theirs, name)}"
            for name in HostLaunch.__struct_fields__
            if getattr(ours, name) != getattr(theirs, name)
        ]
    return found


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_record_launches_what_the_dsl_launches(
    key: CompileKey, answers: dict[CompileKey, Answer]
) -> None:
    """A grid, cluster or attribute of ours that is not the DSL's is another kernel than was tuned.

    Nothing else would notice a missing programmatic attribute, or blocks that only waste time.
    """
    answer = answers[key]
    assert differences(record_of(key, answer), answer) == []


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_host_function_takes_our_parameters_and_a_stream(
    key: CompileKey, answers: dict[CompileKey, Answer]
) -> None:
    """An argument that we do not know of would be read from beyond the list that we pass."""
    assert answers[key].host_arguments == len(sources_of(key)) + 1


def test_the_dsl_states_the_attributes_that_we_think_of(
    answers: dict[CompileKey, Answer],
) -> None:
    """The control of the comparison: an attribute read at the wrong place would be a default."""
    for key, answer in answers.items():
        for launch in answer.launches:
            assert launch.attributes[PROGRAMMATIC] == (int(key.pdl),)
            if not isinstance(key.config, DotprodConfig):
                assert launch.attributes[CLUSTER] == (6, 1, 1)


def _swap(record: LaunchRecord, a: int, b: int) -> LaunchRecord:
    """The record with two parameters of one size in each other's place."""
    params = list(record.params)
    first, second = params[a], params[b]
    params[a] = msgspec.structs.replace(first, source=second.source)
    params[b] = msgspec.structs.replace(second, source=first.source)
    return msgspec.structs.replace(record, params=tuple(params))


_replace = msgspec.structs.replace
PLANTS: dict[str, Callable[[LaunchRecord], LaunchRecord]] = {
    "no attribute": lambda r: _replace(r, attributes=()),
    "no cluster": lambda r: _replace(r, cluster=(1, 1, 1)),
    "other block": lambda r: _replace(r, block=(r.block[0] * 2, 1, 1)),
    "no shared memory": lambda r: _replace(r, dynamic_shared_bytes=0),
    "grid axes swapped": lambda r: _replace(r, grid=(r.grid[1], r.grid[0], r.grid[2])),
    "tile too small": lambda r: _replace(
        r, grid=(r.grid[0], GridDim(Extent.EXPERTS, 8, 1), r.grid[2])
    ),
    "operands swapped": lambda r: _swap(r, 0, 1),
    "strides swapped": lambda r: _swap(r, 6, 7),
    "tokens swapped": lambda r: _swap(r, 3, 4),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_the_comparison_finds_a_planted_difference(
    plant: str, answers: dict[CompileKey, Answer]
) -> None:
    """The control: a comparison that overlooks a field would hold for any record."""
    key = next(k for k in KEYS if isinstance(k.config, SplitkConfig) and k.pdl)
    record = record_of(key, answers[key])
    assert differences(PLANTS[plant](record), answers[key]) != []


def test_every_size_of_every_key_was_launched(answers: dict[CompileKey, Answer]) -> None:
    """A comparison of no launches at all would pass."""
    assert {key: len(answer.launches) for key, answer in answers.items()} == {
        key: len(SIZES) for key in KEYS
    }
