"""The arithmetic of a measurement: from durations of graphs to microseconds a call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llbf16_aot.timing import PROTOCOL, REPLAYS, ROUNDS, Sample, Way, middle, per_call

durations = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=40)


def test_a_call_costs_the_median_graph_over_its_calls_less_its_surroundings() -> None:
    """Catches a mean that one slow replay shifts, and a producer that is not taken off."""
    replays = [640.0, 648.0, 656.0, 10_000.0, 632.0]
    assert per_call(replays, 64) == Sample(648.0 / 64, (656.0 - 640.0) / 64)
    assert per_call(replays, 64, base_us=1.5).us == pytest.approx(10.125 - 1.5)


def test_one_replay_has_no_spread() -> None:
    """Catches a crash of the quantiles for a single value."""
    assert per_call([64.0], 64) == Sample(1.0, 0.0)


@given(durations, st.integers(1, 64), st.floats(0.0, 10.0))
def test_the_order_of_replays_changes_nothing(
    replays: list[float], calls: int, base: float
) -> None:
    """Catches a statistic that depends on when something was slow."""
    assert per_call(replays, calls, base_us=base) == per_call(
        sorted(replays, reverse=True), calls, base_us=base
    )


@given(durations, st.integers(1, 64))
def test_the_cost_lies_between_the_extremes(replays: list[float], calls: int) -> None:
    """Catches a division by the wrong number."""
    sample = per_call(replays, calls)
    assert min(replays) / calls <= sample.us * (1 + 1e-12)
    assert sample.us <= max(replays) / calls * (1 + 1e-12)
    assert 0 <= sample.spread_us <= (max(replays) - min(replays)) / calls * (1 + 1e-12)


def test_of_rounds_the_middle_one_counts_with_the_largest_spread() -> None:
    """Catches the best of three, which flatters whoever is measured most often."""
    rounds = [Sample(2.0, 0.1), Sample(9.0, 0.4), Sample(1.9, 0.2)]
    assert middle(rounds) == Sample(2.0, 0.4)


def test_the_protocol_says_what_is_done() -> None:
    """Catches a text in reports that names other numbers than the code uses."""
    for word in (*(way.value for way in Way), f"of {REPLAYS} replays", f"of {ROUNDS} such"):
        assert word in PROTOCOL
