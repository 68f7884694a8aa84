"""What the families with fp32 weights compute: their PTX, run without a GPU, against float64.

The machine that runs it is strict about barriers, bounds and the exit of blocks; see `ptx_machine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from llbf16_aot.backends import BACKENDS, Bf16x3Config, Config, Fp32Config, backend_name
from llbf16_aot.key import CompileKey
from llbf16_aot.launch import ParamSource
from llbf16_aot.pool import CompilerPool
from llbf16_aot.problem import DType, Problem
from llbf16_aot.toolchain import COMPILER, toolchain
from ptx_machine import Machine, Memory, round_bf16
from support import key_for

pytestmark = pytest.mark.compiler

MAX_ERROR = 5e-7
"""Relative Frobenius error: sums of some hundred products in fp32, in any order, stay below."""


class Case(NamedTuple):
    """A product: sizes, and the elements that rows lie apart beyond their own."""

    config: Config
    tokens: int
    experts: int
    hidden: int
    x_dtype: DType = DType.BF16
    out_dtype: DType = DType.FP32
    pdl: bool = True
    gap: int = 0


def _fp32(hidden: int, *rest: int) -> Fp32Config:
    tokens, experts_tile, experts_per_thread, split_k, warps, vectors = rest
    return Fp32Config(hidden, tokens, experts_tile, experts_per_thread, split_k, warps, vectors)


CASES = (
    # One token, all levels of the exchange between lanes by experts or not at all.
    Case(_fp32(520, 1, 16, 4, 2, 2, 3), 1, 17, 520),
    Case(_fp32(520, 1, 4, 1, 2, 2, 2), 1, 6, 520, pdl=False),
    # Fewer tokens than the tile, K that ends within a warp's part, rows that lie apart.
    Case(_fp32(520, 2, 8, 4, 3, 2, 2), 2, 9, 520, gap=8),
    Case(_fp32(524, 4, 4, 4, 2, 2, 2), 3, 7, 524, x_dtype=DType.FP32, gap=4),
    Case(_fp32(524, 8, 8, 2, 1, 2, 3), 7, 9, 524, x_dtype=DType.FP32),
    Case(_fp32(8, 8, 16, 4, 2, 1, 1), 5, 20, 8),
    # Several passes, several rounds, eight experts a thread.
    Case(_fp32(520, 16, 16, 4, 4, 2, 2), 13, 9, 520),
    Case(_fp32(520, 24, 4, 4, 2, 2, 1), 20, 5, 520, out_dtype=DType.BF16),
    Case(_fp32(264, 32, 32, 8, 2, 1, 2), 31, 20, 264),
    # All exact, as real routers are.
    Case(_fp32(768, 8, 16, 4, 4, 2, 3), 8, 16, 768, out_dtype=DType.FP16),
    # One K tile, fewer tiles than blocks, tails in all three sizes.
    Case(Bf16x3Config(32, 16, 4, 3, 4), 33, 17, 8),
    Case(Bf16x3Config(64, 16, 4, 8, 3), 5, 7, 520),
    Case(Bf16x3Config(16, 32, 2, 4, 4), 13, 20, 776),
    Case(Bf16x3Config(32, 32, 2, 2, 2), 20, 40, 264, gap=8),
    Case(Bf16x3Config(64, 32, 2, 1, 3), 40, 20, 328, out_dtype=DType.BF16),
    Case(Bf16x3Config(128, 32, 2, 2, 2), 70, 20, 136, pdl=False),
)


MachineFor = Callable[[Case], Machine]


@pytest.fixture(scope="module")
def machine_for() -> Iterator[MachineFor]:
    """The parsed PTX of a case's kernel, each compiled once."""
    versions = toolchain()
    if versions is None:
        pytest.skip(f"{COMPILER} is not installed")
    made: dict[CompileKey, Machine] = {}
    with CompilerPool(jobs=1, version=versions[COMPILER], limit_s=120.0) as pool:

        def get(case: Case) -> Machine:
            key = key_for(case.config, x_dtype=case.x_dtype, out_dtype=case.out_dtype, pdl=case.pdl)
            if key not in made:
                made[key] = Machine(pool.compile(key).ptx.decode())
            return made[key]

        yield get


def _numbers(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    words: npt.NDArray[np.uint32] = bits.astype(np.uint32) << np.uint32(16)
    return words.view(np.float32)


def _spread(values: npt.NDArray[np.generic], gap: int) -> npt.NDArray[np.generic]:
    """The same rows, further apart, with what no product may read in between."""
    filler = np.full((values.shape[0], gap), np.iinfo(np.uint16).max, np.uint16)
    return np.concatenate([values, filler.astype(values.dtype)], axis=1) if gap else values


def _run(
    case: Case, machine: Machine, *, order: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The kernel's result and the exact one."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((case.tokens, case.hidden)).astype(np.float32)
    weight = rng.standard_normal((case.experts, case.hidden)).astype(np.float32)
    stored: npt.NDArray[np.generic] = x
    if case.x_dtype is DType.BF16:
        stored = round_bf16(x).astype(np.uint16)
        x = _numbers(stored.astype(np.uint16))
    out = np.full(
        (case.tokens, case.experts), -1, np.int32 if case.out_dtype is DType.FP32 else np.int16
    )
    memory = Memory()
    values = {
        ParamSource.X: memory.add(_spread(stored, case.gap)),
        ParamSource.WEIGHT: memory.add(_spread(weight, case.gap)),
        ParamSource.OUT: memory.add(out, writable=True),
        ParamSource.TOKENS: case.tokens,
        ParamSource.EXPERTS: case.experts,
        ParamSource.HIDDEN: case.hidden,
        ParamSource.X_ROW_STRIDE: case.hidden + case.gap,
        ParamSource.WEIGHT_ROW_STRIDE: case.hidden + case.gap,
    }
    family = BACKENDS[backend_name(case.config)]
    geometry = family.geometry(case.config)
    problem = Problem(
        case.tokens, case.experts, case.hidden, x_dtype=case.x_dtype, weight_dtype=DType.FP32
    )
    x_, y, z = (dim.resolve(problem) for dim in geometry.grid)
    machine.launch(
        grid=(x_, y, z),
        cluster=geometry.cluster[0],
        dynamic_shared_bytes=geometry.dynamic_shared_bytes,
        arguments=[values[source] for source in family.PARAMS],
        memory=memory,
        seed=order,
    )
    if case.out_dtype is DType.FP32:
        found = out.view(np.float32)
    elif case.out_dtype is DType.FP16:
        found = out.view(np.float16)
    else:
        found = _numbers(out.view(np.uint16))
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    return found.astype(np.float64), exact


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.config).lower())
def test_the_product_is_right(case: Case, machine_for: MachineFor) -> None:
    """Catches a weight that is added twice or not at all, a sum in the wrong place, a lost tail.

    And a barrier that is missing, or a block that ends too soon, by what the machine refuses.
    """
    found, exact = _run(case, machine_for(case), order=1)
    error = np.abs(found - exact)
    worst = np.unravel_index(np.argmax(error), error.shape)
    limit = {DType.FP32: MAX_ERROR, DType.BF16: 3e-3, DType.FP16: 4e-4}[case.out_dtype]
    relative = np.linalg.norm(error) / np.linalg.norm(exact)
    assert relative <= limit, f"{relative:.2e}, largest at {worst}: {found[worst]} {exact[worst]}"


@pytest.mark.parametrize(
    "case", [CASES[2], CASES[3], CASES[10]], ids=lambda case: str(case.config).lower()
)
def test_any_order_of_warps_gives_the_same_bits(case: Case, machine_for: MachineFor) -> None:
    """Catches a sum whose order depends on who comes first: logits would change from run to run."""
    first, *others = (_run(case, machine_for(case), order=order)[0] for order in range(4))
    for other in others:
        np.testing.assert_array_equal(other, first)
