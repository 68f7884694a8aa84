"""Dependent launch left to the runtime: a weight's first call waits, those after it need not."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from llbf16_aot.launcher import Launcher
from runtime_kit import Bench, artifact, error_of, operands


def bench() -> Bench:
    """A runtime with the one kernel that a manifest without `pdl: both` builds."""
    return Bench(artifact(1, 8, 64), on_miss="error", pdl="auto")


def dependent(made: Bench) -> list[bool]:
    """Whether each launch so far was a dependent one."""
    return [config.programmatic for _, config, _ in made.driver.launches]


def test_the_first_call_of_a_weight_waits_and_later_ones_do_not() -> None:
    """Loading weights ahead of the copy that fills them gives logits of what was there before."""
    made = bench()
    x, weight = operands(1, 8, 64)
    other = weight.clone()
    for tensor in (weight, weight, other, weight, other):
        assert error_of(made.runtime.run(x, tensor), x, tensor) <= 2e-6
    assert dependent(made) == [False, True, False, True, True]
    assert (made.driver.loads, len({a.digest for a, _, _ in made.driver.launches})) == (1, 1)
    assert made.runtime.stats().hits == 5


def test_the_waiting_launch_is_the_same_kernel_without_the_attribute() -> None:
    """Anything else that differed would be a kernel that nobody measured or checked."""
    made = bench()
    x, weight = operands(1, 8, 64)
    made.runtime.run(x, weight)
    made.runtime.run(x, weight)
    (first, waits, _), (second, depends, _) = made.driver.launches
    assert first is second
    assert waits == depends._replace(programmatic=False)


@pytest.mark.parametrize("named", [True, False])
def test_a_weight_that_was_said_to_change_waits_once_more(named: bool) -> None:
    """A kernel of the caller's own writes without torch's knowledge: only the caller can tell."""
    made = bench()
    x, weight = operands(1, 8, 64)
    other = weight.clone()
    for tensor in (weight, other):
        made.runtime.run(x, tensor)
    made.runtime.weights_updated(weight if named else None)
    for tensor in (weight, other, weight, other):
        made.runtime.run(x, tensor)
    assert dependent(made)[2:] == [False, named, True, True]


def test_a_change_of_shared_memory_counts_for_every_tensor_in_it() -> None:
    """Engines update one stacked parameter, or `param.data`, and call with a view of it."""
    made = bench()
    x, weight = operands(1, 8, 64)
    stacked = torch.stack([weight, weight])
    layers = [stacked[0], stacked[1]]
    for told in (stacked, layers[0].data, layers[1]):
        for layer in layers * 2:
            made.runtime.run(x, layer)
        made.runtime.weights_updated(told)
    for layer in layers:
        made.runtime.run(x, layer)
    assert dependent(made) == [False, False, True, True] * 3 + [False, False]


def test_an_update_in_place_by_torch_is_noticed() -> None:
    """An optimizer or a loader that writes under no_grad must need no further word."""
    made = bench()
    x, values = operands(1, 8, 64)
    weight = torch.nn.Parameter(values.clone())
    with torch.no_grad():
        for _ in range(2):
            made.runtime.run(x, weight)
            made.runtime.run(x, weight)
            weight.mul_(2)
        weight[0].zero_()
        assert error_of(made.runtime.run(x, weight), x, weight) <= 2e-6
    assert dependent(made) == [False, True, False, True, False]


def test_new_storage_of_the_same_parameter_is_noticed() -> None:
    """`param.data = new` changes no version: the address tells."""
    made = bench()
    x, values = operands(1, 8, 64)
    weight = torch.nn.Parameter(values, requires_grad=False)
    made.runtime.run(x, weight)
    keep = weight.data
    weight.data = values.clone()
    assert weight.data_ptr() != keep.data_ptr()
    made.runtime.run(x, weight)
    made.runtime.run(x, weight)
    assert dependent(made) == [False, False, True]


def test_another_tensor_at_the_address_of_a_dead_one_is_new() -> None:
    """The allocator gives addresses out again, and a version starts at zero each time."""
    made = bench()
    x, weight = operands(1, 8, 64)
    room = weight.clone()
    first = room.view(8, 64)
    made.runtime.run(x, first)
    made.runtime.run(x, first)
    address, version = first.data_ptr(), first._version
    del first
    gc.collect()
    assert not made.runtime._weights
    second = room.view(8, 64)
    assert (second.data_ptr(), second._version) == (address, version)
    made.runtime.run(x, second)
    assert dependent(made) == [False, True, False]


def test_weights_that_die_are_forgotten() -> None:
    """A record a call for views that are made anew each time would grow for ever."""
    made = bench()
    x, weight = operands(1, 8, 64)
    for _ in range(50):
        made.runtime.run(x, weight.view(8, 64))
    assert dependent(made) == [False] * 50
    assert not made.runtime._weights
    assert sum(len(family) for family in made.runtime._memory._families.values()) == 1


def test_inference_tensors_have_no_version_and_are_recognised_all_the_same() -> None:
    """Asked for their version they raise: weights loaded under inference_mode must serve."""
    made = bench()
    with torch.inference_mode():
        x, weight = (tensor.clone() for tensor in operands(1, 8, 64))
        assert weight.is_inference()
        made.runtime.run(x, weight)
        made.runtime.run(x, weight)
        made.runtime.weights_updated(weight)
        made.runtime.run(x, weight)
    assert dependent(made) == [False, True, False]


def test_an_explicit_dependent_call_does_not_vouch_for_the_weight() -> None:
    """It may itself have begun before the weight was written: the next one still waits."""
    made = bench()
    x, weight = operands(1, 8, 64)
    made.runtime.run(x, weight, pdl=True)
    made.runtime.run(x, weight)
    made.runtime.run(x, weight)
    assert dependent(made) == [True, False, True]


def test_an_explicit_ordinary_call_vouches_for_the_weight() -> None:
    """It waited for all that was ahead of it: another wait would cost for nothing."""
    made = bench()
    x, weight = operands(1, 8, 64)
    made.runtime.run(x, weight, pdl=False)
    made.runtime.run(x, weight)
    assert dependent(made) == [False, True]


def test_a_launch_that_failed_does_not_vouch_for_the_weight() -> None:
    """Nothing waited: the call that is tried again must."""
    made = bench()
    x, weight = operands(1, 8, 64)
    made.driver.failing = {"launch"}
    with pytest.raises(Exception, match="launch failed"):
        made.runtime.run(x, weight)
    made.driver.failing = set()
    made.runtime.run(x, weight)
    assert dependent(made) == [False]


def test_a_captured_call_vouches_for_later_captures_only() -> None:
    """What is captured has not run: an eager call after it would not have waited for anything."""
    made = bench()
    made.runtime.preload([artifact(1, 8, 64).record.key])
    x, weight = operands(1, 8, 64)
    made.devices.captured = True
    made.runtime.run(x, weight)
    made.runtime.run(x, weight)
    made.devices.captured = False
    made.runtime.run(x, weight)
    made.runtime.run(x, weight)
    made.devices.captured = True
    made.runtime.run(x, weight)
    made.runtime.weights_updated(weight)
    made.runtime.run(x, weight)
    assert dependent(made) == [False, True, False, True, True, False]


def test_a_change_that_is_told_during_a_call_is_not_lost() -> None:
    """Noted after the change was told, the call would let the next one run ahead of the change."""
    made = bench()
    x, weight = operands(1, 8, 64)
    made.driver.before_launch = lambda: made.runtime.weights_updated(weight)
    made.runtime.run(x, weight)
    made.driver.before_launch = lambda: None
    made.runtime.run(x, weight)
    made.runtime.run(x, weight)
    assert dependent(made) == [False, False, True]


def test_without_a_dependent_kernel_the_plain_one_serves() -> None:
    """A store built with `pdl: false` must serve calls that leave the choice to the runtime."""
    made = Bench(artifact(1, 8, 64, pdl=False), on_miss="error", pdl="auto")
    x, weight = operands(1, 8, 64)
    for _ in range(3):
        assert error_of(made.runtime.run(x, weight), x, weight) <= 2e-6
    assert dependent(made) == [False] * 3
    assert made.runtime.stats().misses == {}


def test_without_a_plain_kernel_the_dependent_one_is_launched_without() -> None:
    """`pdl=False` is a promise about the launch: a store with `pdl: true` can keep it."""
    made = bench()
    x, weight = operands(1, 8, 64)
    for _ in range(2):
        made.runtime.run(x, weight, pdl=False)
    assert dependent(made) == [False, False]
    assert made.runtime.stats().misses == {}


def test_a_plain_kernel_of_its_own_is_preferred_without_dependent_launch() -> None:
    """The wait is compiled out of it: it is the one to launch where both are there."""
    plain = artifact(1, 8, 64, pdl=False)
    made = Bench(artifact(1, 8, 64), plain, on_miss="error", pdl="auto")
    made.runtime.run(*operands(1, 8, 64), pdl=False)
    assert made.driver.launches[0][0].digest == plain.digest


def test_only_a_tensor_can_be_named_as_updated() -> None:
    """A module or a name taken for 'nothing' would leave its weights without the wait."""
    with pytest.raises(TypeError, match=r"weight is str, must be a torch\.Tensor or None"):
        bench().runtime.weights_updated("model.gate")  # type: ignore[arg-type]


def test_threads_that_share_a_weight_each_get_right_answers() -> None:
    """The first calls of all threads race for the record of one weight."""
    made = bench()
    x, weight = operands(1, 8, 64)
    start = threading.Barrier(8)
    errors: list[float] = []

    def work() -> None:
        start.wait(60)
        for number in range(30):
            if number % 10 == 5:
                made.runtime.weights_updated(weight)
            errors.append(error_of(made.runtime.run(x, weight), x, weight))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 240
    assert max(errors) <= 2e-6
    assert made.runtime.stats().hits == 240
    assert dependent(made)[0] is False


def test_a_kernel_without_the_attribute_is_its_own_ordinary_launch() -> None:
    """A second launcher of it would hold its slots twice and count its calls apart."""
    plain = artifact(1, 8, 64, pdl=False)
    made = Bench(plain, on_miss="error", pdl="auto")
    made.runtime.run(*operands(1, 8, 64))
    (entry,) = made.runtime._entries.values()
    assert isinstance(entry, Launcher)
    assert entry.ordinary is entry
