"""Tiles of the families with fp32 weights: those that are tried, those chosen unmeasured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llbf16_aot.backends import Bf16x3Tile, Fp32Tile, OneshotTile, bf16x3, fp32, oneshot
from llbf16_aot.errors import UnsupportedProblemError
from llbf16_aot.fp32_tiles import SMS, bf16x3_space, default_tile, fp32_space
from llbf16_aot.problem import MAX_HIDDEN, DType, Problem

ROUTERS = ((6144, 256), (3072, 256), (6144, 128), (4096, 192), (8192, 64))


def wide(tokens: int, experts: int, hidden: int, x_dtype: DType = DType.BF16) -> Problem:
    return Problem(tokens, experts, hidden, x_dtype=x_dtype, weight_dtype=DType.FP32)


@given(st.integers(1, MAX_HIDDEN // 4), st.integers(1, 32))
def test_every_fp32_tile_that_is_tried_works_and_stands_once(quads: int, tokens: int) -> None:
    """Catches a candidate build that stops at a tile which its own family refuses."""
    x_dtype = DType.FP32 if quads % 2 else DType.BF16
    tiles = fp32_space(4 * quads, tokens, x_dtype)
    assert tiles
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        fp32.check(fp32.config_for(tile, wide(tokens, 1, 4 * quads, x_dtype)))


@given(st.integers(1, MAX_HIDDEN // 8), st.integers(1, 65_536))
def test_every_bf16x3_tile_that_is_tried_works_and_stands_once(eights: int, tokens: int) -> None:
    """Catches a candidate that is refused, and one whose blocks have no part of K."""
    tiles = bf16x3_space(8 * eights, tokens)
    assert tiles
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        bf16x3.check(bf16x3.config_for(tile, wide(tokens, 1, 8 * eights)))
        assert tile.split_k <= -(-8 * eights // bf16x3.HIDDEN_TILE)


@pytest.mark.parametrize(("hidden", "experts"), ROUTERS)
def test_the_tile_of_a_real_router_reads_its_weights_once_on_most_sms(
    hidden: int, experts: int
) -> None:
    """Catches a choice that leaves half of the GPU idle, or comes back to the weights in rounds."""
    for tokens, x_dtype in ((1, DType.BF16), (4, DType.FP32), (16, DType.FP32), (32, DType.FP32)):
        problem = wide(tokens, experts, hidden, x_dtype)
        tile = default_tile(problem)
        assert isinstance(tile, Fp32Tile)
        config = fp32.config_for(tile, problem)
        blocks = -(-experts // tile.experts_tile) * tile.split_k
        assert 0.7 * SMS <= blocks <= SMS
        assert config.rounds == 1
        assert config.exact
    for tokens in (3, 8, 16, 32, 64):
        problem = wide(tokens, experts, hidden)
        middle = default_tile(problem)
        assert isinstance(middle, OneshotTile)
        assert oneshot.config_for(middle, problem).rounds == 1
        assert -(-experts // middle.experts_tile) * middle.split_k >= SMS * 0.45
    for tokens in (256, 512, 1024):
        problem = wide(tokens, experts, hidden)
        big = default_tile(problem)
        assert isinstance(big, Bf16x3Tile)
        blocks = -(-experts // big.experts_tile) * -(-tokens // big.tokens_tile) * big.split_k
        assert blocks >= SMS * 0.45


def test_weights_that_are_no_fp32_have_no_tile_here() -> None:
    """Catches a table without a last rule that would be served by the wrong family."""
    with pytest.raises(UnsupportedProblemError, match="no tuning rule"):
        default_tile(Problem(1, 256, 2048))
    with pytest.raises(UnsupportedProblemError, match="tokens is 33"):
        default_tile(wide(33, 256, 2048, DType.FP32))
