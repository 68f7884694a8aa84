"""Timing: how replays of a graph become microseconds a call, and the words that say so.

Pure arithmetic. The clock is in `measure`, the only module here that needs a GPU.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from .key import CompileKey
from .problem import DType, Target

__all__ = [
    "CALLS",
    "MAX_ERROR",
    "PROTOCOL",
    "QUICK_REPLAYS",
    "REPLAYS",
    "ROUNDS",
    "RUNS",
    "WARMUPS",
    "Bench",
    "Call",
    "Lab",
    "Machine",
    "Sample",
    "Way",
    "middle",
    "per_call",
]

CALLS = 64
"""Calls in a graph, each on its own weight: a replay is then long against the clock's step."""

WARMUPS = 3
REPLAYS = 20
QUICK_REPLAYS = 7
"""Replays of the first look at a candidate, which only decides whether it gets a second."""

ROUNDS = 3
"""How often a figure is measured anew; the middle one counts, so that one disturbance does not."""

RUNS = 20
"""Runs of the same inputs that must give the same bits."""

MAX_ERROR = 2e-6
"""Largest relative Frobenius error of an fp32 output against float64."""


class Way(str, enum.Enum):
    """What surrounds a measured call."""

    AFTER_PRODUCER = "after_producer"
    """Right behind a kernel that writes x, on a weight that is not in the cache: a real layer."""
    COLD = "cold"
    """Behind another such call, on its own weight."""
    HOT = "hot"
    """Behind another such call, on the same weight."""


PROTOCOL = (
    f"{Way.AFTER_PRODUCER.value}: one CUDA graph of {CALLS} pairs (a kernel with dependent launch "
    f"that writes x, then the call on its own weight), minus a graph of {CALLS} producers alone, "
    f"over {CALLS}; {Way.COLD.value}: one graph of {CALLS} calls, each on its own weight, over "
    f"{CALLS}; {Way.HOT.value}: the same with one weight. Median of {REPLAYS} replays timed with "
    f"CUDA events after {WARMUPS} warm-ups; the middle one of {ROUNDS} such medians, taken in turn "
    "with those of what it is compared with. Spread: interquartile range of the replays over the "
    "calls, the largest of the rounds. cuBLAS: the faster of F.linear (bf16 output) and torch.mm "
    "with out_dtype float32. Floor: an empty dependent kernel by the same protocol, plus the bytes "
    "of the weight over the bandwidth (read plus written) of a device-to-device copy."
)


class Sample(NamedTuple):
    """Microseconds a call, and how far the replays lie apart (interquartile range over calls)."""

    us: float
    spread_us: float


def per_call(replays_us: Sequence[float], calls: int, *, base_us: float = 0.0) -> Sample:
    """The cost of one call, from the durations of whole graphs of so many calls.

    `base_us` is what a call's surroundings cost alone.
    """
    if len(replays_us) < 2:
        spread = 0.0
    else:
        low, _, high = statistics.quantiles(replays_us, n=4, method="inclusive")
        spread = (high - low) / calls
    return Sample(statistics.median(replays_us) / calls - base_us, spread)


def middle(samples: Sequence[Sample]) -> Sample:
    """The median of some rounds, with the largest of their spreads."""
    return Sample(
        statistics.median(sample.us for sample in samples),
        max(sample.spread_us for sample in samples),
    )


Call: TypeAlias = Callable[[int], None]
"""Enqueues one call on the weight of this number, on the current stream."""


class Machine(NamedTuple):
    """Where figures come from: GPU, driver, and the versions of all software that matters."""

    device: str
    driver: str
    versions: dict[str, str]


class Bench(Protocol):
    """One M, N and K on a GPU, with operands in place."""

    def kernel(self, key: CompileKey) -> Call | str:
        """The stored kernel of a key, or why there is none."""

    def library(self) -> dict[str, Call]:
        """The library's products, by name."""

    def compiled(self) -> Call | str:
        """What torch.compile makes of the product, or why it makes nothing."""

    def empty(self) -> Call:
        """A kernel that does nothing; raises NotFoundError where the store lacks it."""

    def fault(self, call: Call) -> str:
        """What is wrong with the results of a kernel, empty where nothing is."""

    def time(self, call: Call, way: Way, replays: int) -> Sample:
        """What a call costs."""

    def settle(self, replays: int) -> None:
        """Measure anew what the producer costs alone: the base of what is timed from now on."""


class Lab(Protocol):
    """A GPU with a store, ready to measure."""

    @property
    def target(self) -> Target:
        """The GPU's architecture."""

    def machine(self) -> Machine:
        """What it is."""

    def copy_bytes_per_s(self) -> float:
        """Bytes read plus bytes written in a second by a large device-to-device copy."""

    def bench(
        self, hidden: int, experts: int, tokens: int, weight_dtype: DType = DType.BF16
    ) -> Bench:
        """Operands for a problem, x in bf16; those of the problem before are given up."""
