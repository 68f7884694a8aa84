"""The search space: every tile works, every winner so far is in it, and its order never changes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llbf16_aot.backends import BACKENDS, DotprodTile, OneshotTile, SplitkTile, backend_name
from llbf16_aot.problem import FEW_TOKENS, MAX_HIDDEN, DType, Problem, Target
from llbf16_aot.search import (
    PROBES,
    candidate_keys,
    key_for,
    probe_key,
    representative_tokens,
    search_space,
    tokens_span,
)

SM_90A = Target.parse("sm_90a")

HIDDEN = (1024, 2048, 2304, 2688, 2880, 3072, 4096, 5120, 6144, 7168, 8192)

MOST = 160
"""Tiles of a cell: what a tuning run can measure in the time that a GPU is lent for."""

# The fastest tile of each cell in earlier measurements on an H200 (K, M, tile), clusters up to 8.
WINNERS = [
    (2048, 1, OneshotTile(32, 4, 4, 4)),
    (2048, 2, OneshotTile(16, 1, 22, 3)),
    (2048, 4, OneshotTile(16, 1, 11, 6)),
    (2048, 8, OneshotTile(32, 8, 4, 2)),
    (2048, 16, OneshotTile(8, 8, 4, 2)),
    (2048, 16, OneshotTile(32, 8, 4, 2)),
    (2880, 1, OneshotTile(32, 6, 4, 4)),
    (2880, 1, OneshotTile(32, 8, 4, 3)),
    (2880, 8, OneshotTile(16, 8, 4, 3)),
    (2880, 16, OneshotTile(16, 8, 6, 2)),
    (2880, 16, OneshotTile(32, 8, 6, 2)),
    (3072, 1, OneshotTile(32, 4, 24, 1)),
    (3072, 2, OneshotTile(8, 1, 24, 4)),
    (3072, 8, OneshotTile(32, 6, 4, 4)),
    (3072, 16, OneshotTile(32, 8, 4, 3)),
    (4096, 1, OneshotTile(32, 8, 4, 4)),
    (4096, 2, OneshotTile(8, 1, 16, 8)),
    (4096, 12, OneshotTile(32, 4, 11, 3)),
    (4096, 16, OneshotTile(32, 8, 8, 2)),
    (5120, 1, OneshotTile(32, 8, 7, 3)),
    (5120, 12, OneshotTile(16, 8, 5, 4)),
    (6144, 1, OneshotTile(32, 4, 12, 4)),
    (6144, 4, OneshotTile(8, 6, 8, 4)),
    (6144, 8, OneshotTile(16, 6, 4, 8)),
    (6144, 8, OneshotTile(16, 8, 8, 3)),
    (6144, 8, OneshotTile(32, 8, 6, 4)),
    (6144, 16, OneshotTile(16, 8, 12, 2)),
    (7168, 1, OneshotTile(32, 4, 14, 4)),
    (7168, 2, OneshotTile(16, 2, 14, 8)),
    (7168, 8, OneshotTile(32, 8, 7, 4)),
    (7168, 16, OneshotTile(16, 8, 7, 4)),
    (7168, 16, OneshotTile(32, 8, 14, 2)),
    (2880, 16, OneshotTile(16, 8, 4, 3, release="wait")),
    (4096, 16, OneshotTile(32, 8, 8, 2, release="wait")),
    (7168, 1, DotprodTile(256, 1)),
    (7168, 1, DotprodTile(512, 1)),
    (7168, 5, SplitkTile(6, 4)),
]


@settings(deadline=None)
@given(st.integers(1, MAX_HIDDEN // 8).map(lambda n: 8 * n), st.integers(1, FEW_TOKENS))
def test_every_tile_works_for_its_problem_and_stands_once(hidden: int, tokens: int) -> None:
    """Catches a candidate that the compiler refuses after an hour, or that is built twice."""
    tiles = search_space(hidden, tokens)
    problem = Problem(tokens, 1, hidden)
    for tile in tiles:
        backend = BACKENDS[backend_name(tile)]
        backend.check(backend.config_for(tile, problem))
    assert len(set(tiles)) == len(tiles) <= MOST
    assert SplitkTile(6, 4) in tiles


@pytest.mark.parametrize(("hidden", "tokens", "tile"), WINNERS)
def test_what_won_before_is_a_candidate(hidden: int, tokens: int, tile: object) -> None:
    """Catches a rule that prunes the best tile of a cell: tuning would then make kernels slower."""
    assert tile in search_space(hidden, tokens)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_cell_has_enough_candidates_and_not_too_many(hidden: int) -> None:
    """Catches a space that no GPU lease can measure, and one that offers no choice."""
    for tokens in (1, 4, 8, 16, *representative_tokens(DType.BF16)):
        tiles = search_space(hidden, tokens)
        assert 20 <= len(tiles) <= MOST, (hidden, tokens)
        assert len([t for t in tiles if isinstance(t, OneshotTile)]) >= 15


def test_a_late_release_is_tried_where_x_is_large() -> None:
    """Catches a space that doubles where an early release wins, or lacks what wins elsewhere."""

    def late(tokens: int) -> int:
        tiles = search_space(4096, tokens)
        return sum(isinstance(t, OneshotTile) and t.release == "wait" for t in tiles)

    assert late(1) == late(8) == 0
    assert late(9) == late(16) > 10


@pytest.mark.parametrize("tokens", [9, 16, 17, 64])
def test_dotprod_is_no_candidate_where_tensor_cores_win(tokens: int) -> None:
    """Catches hours of compiling a family that has lost every such cell."""
    assert not any(isinstance(tile, DotprodTile) for tile in search_space(7168, tokens))
    assert any(isinstance(tile, DotprodTile) for tile in search_space(7168, 8))


def test_candidate_keys_are_each_tile_of_each_problem_once() -> None:
    """Catches a build that lacks what tuning asks for, and a splitk key for every shape."""
    problems = [Problem(m, n, k) for k, n in ((2048, 64), (2880, 32)) for m in (1, 2, 17)]
    keys = list(candidate_keys(problems, SM_90A))
    wanted = {
        key_for(tile, problem, SM_90A)
        for problem in problems
        for tile in search_space(problem.hidden, problem.tokens)
    }
    assert set(keys) == wanted
    assert len(keys) == len(set(keys))
    for key in keys:
        key.check()
        assert (key.target, key.out_dtype, key.pdl) == ("sm_90a", DType.FP32, True)


def test_probe_keys_write_what_x_is() -> None:
    """Catches a producer that writes x in another type than the kernels read."""
    for kind in PROBES:
        key = probe_key(kind, SM_90A)
        key.check()
        assert (key.backend, key.out_dtype, key.pdl) == ("probe", DType.BF16, True)


def test_every_number_of_tokens_has_one_that_speaks_for_it() -> None:
    """Catches an M that no measurement covers, or that two cover."""
    for weight_dtype, most in ((DType.BF16, 256), (DType.FP32, 65_536)):
        measured = (*range(1, 17), *representative_tokens(weight_dtype))
        covered = [m for count in measured for m in range(*_ends(tokens_span(count, weight_dtype)))]
        assert sorted(covered) == list(range(1, most + 1))
        for count in measured:
            first, last = tokens_span(count, weight_dtype)
            assert first <= count <= last


def _ends(span: tuple[int, int]) -> tuple[int, int]:
    return span[0], span[1] + 1


def test_the_order_is_the_same_in_every_process() -> None:
    """Catches an order that follows hashes: two runs would break ties differently."""
    code = (
        "from llbf16_aot.search import search_space\n"
        "print([str(t) for m in (1, 8, 16, 24) for t in search_space(2880, m)])"
    )

    def printed(seed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    assert printed("1") == printed("2")


@pytest.mark.parametrize("hidden", [8, 16, 64, 4096, 32_768, 65_536])
def test_fp32_weights_have_something_to_measure_at_every_size(hidden: int) -> None:
    """Catches a span of M that no family is tried for, where K is short or long."""
    for tokens in (*range(1, 17), *representative_tokens(DType.FP32)):
        assert search_space(hidden, tokens, DType.FP32), (hidden, tokens)
