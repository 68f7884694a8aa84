"""The short way of a warm call: whatever the long way refuses, it must not let pass."""

from __future__ import annotations

import sys

import pytest
import torch
from fake_gpu import poison
from hypothesis import given, settings
from hypothesis import strategies as st
from llbf16_aot import tensors
from llbf16_aot.routes import Route
from llbf16_aot.tensors import guard_of
from runtime_kit import Bench, artifact, error_of, operands


@pytest.fixture(params=["torch's guard", "plain guard"], autouse=True)
def guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test with torch's own guard, and as on a torch that does not have it."""
    if request.param == "plain guard":
        monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)
    name: str = request.param
    return name


def warm(*, out: bool = False) -> tuple[Bench, torch.Tensor, torch.Tensor]:
    """A runtime that has served a call of these operands, so that the next is a warm one."""
    bench = Bench(artifact(3, 8, 64), on_miss="error", pdl="auto")
    x, weight = operands(3, 8, 64)
    for _ in range(2):
        bench.runtime.run(x, weight, out=torch.empty(3, 8) if out else None)
    return bench, x, weight


def long_ways(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls that take the long way from now on."""
    taken: list[int] = []
    checked = bench.runtime._checked

    def counting(*arguments: object) -> torch.Tensor:
        taken.append(1)
        return checked(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.runtime, "_checked", counting)
    return taken


def test_a_warm_call_takes_the_short_way(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition that never holds makes every call slow, and nothing else shows it."""
    for with_out in (False, True):
        bench, x, weight = warm(out=with_out)
        taken = long_ways(bench, monkeypatch)
        for number in range(5):
            out = poison(torch.empty(3, 8)) if with_out else None
            other = x + number
            result = bench.runtime.run(other, weight, out=out)
            assert error_of(result, other, weight) <= 2e-6
            if with_out:
                assert result is out
        for pdl in (True, False):
            bench.runtime.run(x, weight, pdl=pdl)
        before = len(taken)
        for pdl in (True, False):
            bench.runtime.run(x, weight, pdl=pdl)
        assert (taken[:before], len(taken)) == ([1] * before, before)
        assert before <= 3 - (0 if with_out else 1)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, shape and strides, four elements off the alignment."""
    room = torch.empty(tensor.numel() + 4, dtype=tensor.dtype)
    moved = room[4:].view(tensor.shape)
    return moved.copy_(tensor)


WRONG = {
    "x of another type": lambda x, w: (x.half(), w),
    "x that is no tensor": lambda x, w: (x.float().numpy(), w),
    "x of another rank": lambda x, w: (x[None], w),
    "x with another K": lambda x, w: (x[:, :56].contiguous(), w),
    "x that is strided": lambda x, w: (x.t().contiguous().t(), w),
    "x that is misaligned": lambda x, w: (misaligned(x), w),
    "x that is negated": lambda x, w: (torch._neg_view(x), w),
    "x that wants grad": lambda x, w: (x.clone().requires_grad_(), w),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_a_malformed_call_is_refused_after_a_good_one(what: str) -> None:
    """Checked only the first time, a later call reads whatever lies behind a wrong tensor."""
    bench, x, weight = warm()
    with pytest.raises((TypeError, ValueError)):
        bench.runtime.run(*WRONG[what](x, weight))
    assert len(bench.driver.launches) == 2
    assert bench.runtime.stats().rejects == 1


def test_the_same_weight_object_is_checked_for_what_may_have_changed_in_it() -> None:
    """Tensors change in place: transposed, grown, moved, or suddenly wanting grad."""
    for change in (
        lambda w: w.t_(),
        lambda w: w.resize_(9, 63),
        lambda w: setattr(w, "data", misaligned(w)),
        lambda w: setattr(w, "data", w.half()),
        lambda w: w.requires_grad_(),
    ):
        bench, x, weight = warm()
        change(weight)
        with pytest.raises((TypeError, ValueError)):
            bench.runtime.run(x, weight)
        assert len(bench.driver.launches) == 2


def test_a_parameter_is_served_without_grad_and_refused_with_it() -> None:
    """The grad mode is no property of a tensor: it must be asked for in every call."""
    bench = Bench(artifact(3, 8, 64), on_miss="error", pdl="auto")
    x, values = operands(3, 8, 64)
    weight = torch.nn.Parameter(values)
    for _ in range(3):
        with torch.no_grad():
            assert error_of(bench.runtime.run(x, weight), x, values) <= 2e-6
        with torch.inference_mode():
            assert error_of(bench.runtime.run(x, weight), x, values) <= 2e-6
        with pytest.raises(TypeError, match="weight requires grad"):
            bench.runtime.run(x, weight)
    assert len(bench.driver.launches) == 6


BAD_OUT = {
    "another type": lambda x, w: torch.empty((3, 8), dtype=torch.float64),
    "another shape": lambda x, w: torch.empty(8, 3),
    "not contiguous": lambda x, w: torch.empty(8, 3).t(),
    "wants grad": lambda x, w: torch.empty(3, 8).requires_grad_(),
    "no tensor": lambda x, w: [0.0],
    "lies in x": lambda x, w: x.view(torch.float32).flatten()[:24].view(3, 8),
    "lies in weight": lambda x, w: w.view(torch.float32).flatten()[-24:].view(3, 8),
}


@pytest.mark.parametrize("what", list(BAD_OUT))
def test_a_bad_output_is_refused_after_a_good_one(what: str) -> None:
    """The kernel writes where it is told: past the end, or into the weights of the model."""
    bench, x, weight = warm(out=True)
    with pytest.raises((TypeError, ValueError), match="out "):
        bench.runtime.run(x, weight, out=BAD_OUT[what](x, weight))
    assert len(bench.driver.launches) == 2


@pytest.mark.parametrize("pdl", [1, 0, "on", None.__class__])
def test_an_unknown_launch_is_refused_after_a_good_call(pdl: object) -> None:
    """`pdl=1` taken for true, or for nothing, would be another launch than was asked for."""
    bench, x, weight = warm()
    bench.runtime.run(x, weight, pdl=True)
    with pytest.raises(TypeError, match="pdl is"):
        bench.runtime.run(x, weight, pdl=pdl)  # type: ignore[arg-type]


def test_an_unhashable_output_type_is_a_type_error() -> None:
    """An error of our own table there would hide what the caller did wrong."""
    bench, x, weight = warm()
    with pytest.raises(TypeError):
        bench.runtime.run(x, weight, out_dtype=[torch.float32])  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 3]),
            st.integers(0, 2),
            st.integers(0, 2),
            st.booleans(),
            st.sampled_from([torch.float32, torch.float16]),
            st.sampled_from([None, True, False, "auto"]),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_calls_of_all_kinds_in_any_order_give_the_product(
    calls: list[tuple[int, int, int, bool, torch.dtype, object]],
) -> None:
    """A route that is taken for another kind of call launches with its strides, type or shape."""
    bench = CALLS
    for tokens, x_pad, weight_pad, with_out, out_dtype, pdl in calls:
        x_room = torch.randn(tokens, 64 + 8 * x_pad).bfloat16()
        x, weight = x_room[:, :64], WEIGHTS[weight_pad]
        out = poison(torch.empty((tokens, 8), dtype=out_dtype)) if with_out else None
        with torch.inference_mode(mode=weight_pad == 1):
            result = bench.runtime.run(x, weight, out=out, out_dtype=out_dtype, pdl=pdl)  # type: ignore[arg-type]
        assert result.dtype is out_dtype
        assert error_of(result, x, weight) <= 4e-4


CALLS = Bench(
    *(
        artifact(tokens, 8, 64, out_dtype=out_dtype)
        for tokens in (1, 2, 3)
        for out_dtype in (torch.float32, torch.float16)
    ),
    on_miss="error",
    pdl="auto",
)
WEIGHTS = [torch.randn(8, 64 + 8 * pad).bfloat16()[:, :64] for pad in range(3)]


def test_routes_of_one_shape_are_bounded() -> None:
    """Strides that change from call to call would make a list that every call walks."""
    bench, _, weight = warm()
    for pad in range(1, 30):
        x = torch.randn(3, 64 + 8 * pad).bfloat16()[:, :64]
        assert error_of(bench.runtime.run(x, weight), x, weight) <= 2e-6
    routes = bench.runtime._weights[id(weight)].routes
    chain: list[Route] = []
    following: Route | None = routes[torch.Size((3, 64)), torch.float32]
    while following is not None:
        chain.append(following)
        following = following.next
    assert 1 <= len(chain) <= 5


def test_torchs_guard_is_used_where_it_is(guard: str) -> None:
    """A change in torch that makes us fall back for good would be felt as slowness only."""
    x, weight = operands(3, 8, 64)
    mine = guard_of(x, weight)
    plain = tensors._plain_guard(x, weight)
    assert (type(mine) is type(plain)) == (guard == "plain guard")
    assert mine(x + 1, weight.clone()) is plain(x + 1, weight.clone()) is True
