"""Which tier a gate's call takes: every guard, the result, and the reasons that `explain` gives."""

from __future__ import annotations

import msgspec
import pytest
import torch
from fake_gpu import FakeDevices, FakeDriver, MemoryStore, artifact_for
from gate_kit import Ledger, error_of, fp32_weights, gate_of, random, widening
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llbf16_aot import tiers
from llbf16_aot.artifact import Artifact
from llbf16_aot.dispatch import dispatch, load_table
from llbf16_aot.errors import MissError
from llbf16_aot.problem import DType, Epilogue, Problem, Target
from llbf16_aot.runtime import Runtime
from llbf16_aot.tensors import check_operands
from llbf16_aot.tiers import Explanation, Tier, takes
from runtime_kit import DTYPES, TOLERANCE, Bench, artifact

__all__ = ["fp32_weights", "widening"]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def told(explanation: Explanation) -> dict[int, str]:
    return {one.tier.value: one.reason for one in explanation.passed_over}


# ---- tier 1


@pytest.mark.parametrize("out_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_bf16_weights_and_x_take_the_bf16_kernel(tokens: int, out_dtype: torch.dtype) -> None:
    """A gate that never reaches the kernel is right and slow: nothing else would show it."""
    bench = Bench(artifact(tokens, 12, 512, out_dtype=out_dtype), on_miss="error")
    x, weight = random(tokens, 512), random(12, 512, seed=1)
    gate = gate_of(weight, out_dtype=out_dtype, runtime=bench.runtime)
    explained = gate.explain(x)
    assert (explained.tier, told(explained)) == (Tier.BF16, {})
    logits = gate(x)
    assert logits.dtype is out_dtype
    assert error_of(logits, x, weight) <= TOLERANCE[out_dtype]
    (launched, _, _) = bench.driver.launches[-1]
    assert explained.call == str(launched.record.key)
    assert bench.runtime.stats().hits == 1


def test_without_an_output_type_logits_are_of_the_weights_type() -> None:
    """As nn.Linear's: a model that gets fp32 where it had bf16 fails in its next layer."""
    bench = Bench(artifact(3, 8, 64, out_dtype=BF16), on_miss="error")
    gate = gate_of(random(8, 64), runtime=bench.runtime)
    assert gate(random(3, 64)).dtype is BF16
    assert bench.runtime.stats().hits == 1


def biased(tokens: int, epilogue: Epilogue, out_dtype: torch.dtype) -> Artifact:
    """The kernel of a gate of 8 experts and K = 64 that adds a bias."""
    where = Target.parse("sm_90a")
    problem = Problem(tokens, 8, 64, DTYPES[out_dtype], epilogue=epilogue)
    return artifact_for(dispatch(problem, where, load_table("reference", where)))


@pytest.mark.parametrize(
    ("dtype", "epilogue", "by"),
    [
        (BF16, Epilogue.BIAS_BF16, "bias added by the kernel"),
        (FP32, Epilogue.BIAS_FP32, "bias added by the kernel"),
        (FP16, Epilogue.NONE, "bias added by torch"),
    ],
)
def test_a_bias_is_added_before_the_logits_are_rounded(
    dtype: torch.dtype, epilogue: Epilogue, by: str
) -> None:
    """Rounded twice, logits differ from nn.Linear's and near ties choose other experts."""
    kernel_out = FP32 if epilogue is Epilogue.NONE else BF16
    bench = Bench(biased(3, epilogue, kernel_out), on_miss="error")
    x, weight, bias = random(3, 64), random(8, 64, seed=1), random(8, dtype=dtype, seed=2) * 100
    gate = gate_of(weight, bias, out_dtype=BF16, runtime=bench.runtime)
    explained = gate.explain(x)
    assert (explained.tier, explained.bias) == (Tier.BF16, by)
    logits = gate(x)
    exact = (x.double() @ weight.double().t() + bias.double()).float()
    assert torch.equal(logits, exact.to(BF16))
    assert bench.runtime.stats().hits == 1
    assert torch.equal(gate(x), logits)


@pytest.mark.parametrize("bias", [random(16)[::2], random(8, dtype=torch.float64)])
def test_a_bias_that_no_kernel_reads_is_added_by_torch(bias: torch.Tensor) -> None:
    """A strided bias read as contiguous adds the neighbours' values."""
    bench = Bench(artifact(3, 8, 64), on_miss="error")
    x, weight = random(3, 64), random(8, 64, seed=1)
    gate = gate_of(weight, bias, out_dtype=FP32, runtime=bench.runtime)
    assert gate.explain(x).bias == "bias added by torch"
    assert error_of(gate(x), x, weight, bias) <= 2e-6
    assert bench.runtime.stats().hits == 1


def test_a_bias_that_is_replaced_is_decided_on_anew() -> None:
    """An fp16 bias handed to a kernel for bf16 is an error, or another number."""
    bench = Bench(artifact(3, 8, 64), biased(3, Epilogue.BIAS_BF16, FP32), on_miss="error")
    x, weight = random(3, 64), random(8, 64, seed=1)
    gate = gate_of(weight, random(8), out_dtype=FP32, runtime=bench.runtime)
    gate(x)
    for bias in (random(8, dtype=FP16, seed=3), random(8, seed=4)):
        gate.bias = torch.nn.Parameter(bias, requires_grad=False)
        assert error_of(gate(x), x, weight, bias) <= 2e-6
    gate.bias = None
    assert error_of(gate(x), x, weight) <= 2e-6
    assert bench.runtime.stats().hits == 4


def test_x_of_any_number_of_dimensions_is_computed_as_rows() -> None:
    """Models call gates with [batch, sequence, K], and some with a single token [K]."""
    bench = Bench(artifact(6, 8, 64), artifact(1, 8, 64), on_miss="error")
    weight = random(8, 64, seed=1)
    gate = gate_of(weight, out_dtype=FP32, runtime=bench.runtime)
    for shape in ((2, 3, 64), (1, 2, 3, 64), (64,)):
        x = random(*shape)
        assert gate.explain(x).tier is Tier.BF16
        assert error_of(gate(x), x, weight) <= 2e-6
    assert bench.runtime.stats().hits == 3


def test_rows_with_an_aligned_stride_reach_the_kernel() -> None:
    """A slice of a fused projection is what many models hand to their gate."""
    bench = Bench(artifact(4, 8, 64), on_miss="error")
    weight = random(8, 64, seed=1)
    x = random(4, 96)[:, 16:80]
    gate = gate_of(weight, out_dtype=FP32, runtime=bench.runtime)
    assert gate.explain(x).tier is Tier.BF16
    assert error_of(gate(x), x, weight) <= 2e-6
    assert bench.runtime.stats().hits == 1


# ---- tiers 2 and 3


@pytest.mark.usefixtures("fp32_weights")
@pytest.mark.parametrize(
    ("tokens", "x_dtype", "tiers_of"),
    [
        (1, BF16, {Tier.FP32, Tier.BF16X3}),
        (32, BF16, {Tier.FP32, Tier.BF16X3}),
        (33, BF16, {Tier.BF16X3}),
        (300, BF16, {Tier.BF16X3}),
        (1, FP32, {Tier.FP32}),
        (32, FP32, {Tier.FP32}),
        (33, FP32, {Tier.LINEAR}),
        (4, FP16, {Tier.LINEAR}),
    ],
)
def test_fp32_weights_take_the_kernels_for_fp32_weights(
    tokens: int, x_dtype: torch.dtype, tiers_of: set[Tier]
) -> None:
    """An fp32 weight read as bf16 gives numbers that look like logits.

    Where two families serve M up to 32 the tuning table chooses, and the tier is of its choice.
    """
    runtime = Ledger()
    x, weight = random(tokens, 256, dtype=x_dtype), random(16, 256, dtype=FP32, seed=1)
    gate = gate_of(weight, runtime=runtime)
    explained = gate.explain(x)
    assert explained.tier in tiers_of
    assert told(explained)[1] == "weight is float32"
    logits = gate(x)
    assert logits.dtype is FP32
    assert error_of(logits, x, weight) <= 2e-6
    kernel = explained.tier is not Tier.LINEAR
    assert runtime.calls == ([(tokens, x_dtype, FP32, FP32)] if kernel else [])
    if kernel:
        family = explained.call.split()[0]
        assert (explained.tier is Tier.FP32) == (family == "fp32")
        if explained.tier is Tier.BF16X3 and tokens <= 32:
            assert told(explained)[2] == f"the tuning table chooses {family} here"


@pytest.mark.usefixtures("fp32_weights")
def test_the_reasons_against_the_fp32_tiers_name_the_value() -> None:
    """`explain` is read by somebody who wonders why decode is slow: the reason must be the one."""
    gate = gate_of(random(16, 256, dtype=FP32), runtime=Ledger())
    assert told(gate.explain(random(33, 256)))[2] == "M is 33, at most 32"
    assert told(gate.explain(random(33, 256, dtype=FP32))) == {
        1: "weight is float32",
        2: "M is 33, at most 32",
        3: "M is 33, at most 32",
        4: "weight is float32",
    }
    half = told(gate.explain(random(2, 256, dtype=FP16)))
    assert half[2] == "x is float16, weight float32"
    assert set(half) == {1, 2, 3, 4}


def test_fp32_weights_never_reach_a_bf16_kernel() -> None:
    """With every bf16 kernel there, and whatever the runtime takes: none may be launched."""
    bench = Bench(*(artifact(m, 16, 256) for m in (1, 4, 16, 64)), on_miss="torch")
    weight = random(16, 256, dtype=FP32, seed=1)
    gate = gate_of(weight, out_dtype=FP32, runtime=bench.runtime)
    for tokens in (1, 4, 16, 64):
        for x_dtype in (BF16, FP32):
            if takes(x_dtype, FP32):
                continue  # its own kernels serve it: not stored here
            x = random(tokens, 256, dtype=x_dtype)
            explained = gate.explain(x)
            assert explained.tier is Tier.LINEAR
            assert "this runtime does not take them" in told(explained)[
                2 if tokens <= 32 else 3
            ] or (x_dtype is FP32)
            assert error_of(gate(x), x, weight) <= 2e-6
    assert [a for a, _, _ in bench.driver.launches if a.record.key.weight_dtype is DType.BF16] == []


def test_whether_the_runtime_takes_a_pair_is_asked_of_its_own_check() -> None:
    """A list of our own would go on saying no, or yes, when the runtime changes."""
    for x_dtype in (BF16, FP16, FP32):
        for weight_dtype in (BF16, FP16, FP32):
            x, weight = (
                torch.zeros((2, 64), dtype=x_dtype),
                torch.zeros((3, 64), dtype=weight_dtype),
            )
            try:
                check_operands(x, weight, "cpu")
                taken = True
            except TypeError:
                taken = False
            assert takes(x_dtype, weight_dtype) is taken
    assert takes(BF16, BF16)
    assert not takes(FP16, FP16)


# ---- tier 4


@pytest.mark.usefixtures("widening")
def test_where_the_table_prefers_the_library_bf16_is_widened_by_torch() -> None:
    """A prefill whose logits are rounded to bf16 chooses other experts than its decode."""
    bench = Bench(on_miss="error")
    x, weight = random(65, 64), random(8, 64, seed=1)
    gate = gate_of(weight, out_dtype=FP32, runtime=bench.runtime)
    explained = gate.explain(x)
    assert explained.tier is Tier.CUBLAS
    assert explained.call == "torch.mm(x, weight.T, out_dtype=torch.float32)"
    reasons = told(explained)
    assert "the library is faster here, by the tuning table reference" in reasons.pop(1)
    assert reasons == {2: "weight is bfloat16", 3: "weight is bfloat16"}
    assert error_of(gate(x), x, weight) <= 2e-6
    bias = random(8, seed=3)
    biased = gate_of(weight, bias, out_dtype=FP32, runtime=bench.runtime)
    assert biased.explain(x).bias == "bias added by torch"
    assert error_of(biased(x), x, weight, bias) <= 2e-6
    stats = bench.runtime.stats()
    assert (stats.library, stats.hits, stats.misses) == (2, 0, {})


def test_what_no_kernel_can_read_is_widened_by_torch(widening: list[int]) -> None:
    """A column slice must not be copied, refused or read with the wrong stride."""
    bench = Bench(artifact(4, 8, 64), on_miss="error")
    weight = random(8, 64, seed=1)
    gate = gate_of(weight, out_dtype=FP32, runtime=bench.runtime)
    room = random(64, 4)
    cases = {
        "rows must be contiguous": room.t(),
        "does not start at a multiple of 16 bytes": random(4 * 64 + 8)[1:-7].view(4, 64),
        "do not start at multiples of 16 bytes": random(4, 68)[:, :64],
        "less than K = 64": random(1, 64).expand(4, 64),
    }
    for number, (reason, x) in enumerate(cases.items(), start=1):
        explained = gate.explain(x)
        assert explained.tier is Tier.CUBLAS, reason
        assert reason in told(explained)[1]
        assert error_of(gate(x), x, weight) <= 2e-6
        assert len(widening) == number
    assert bench.runtime.stats().hits == 0


@pytest.mark.parametrize("hidden", [60, 65])
def test_a_hidden_size_that_is_no_multiple_of_eight_takes_no_kernel(
    hidden: int, widening: list[int]
) -> None:
    """The last 128-bit load of such a row belongs to the next."""
    bench = Bench(on_miss="error")
    x, weight = random(4, hidden), random(8, hidden, seed=1)
    gate = gate_of(weight, out_dtype=FP32, runtime=bench.runtime)
    assert gate.explain(x).tier is Tier.CUBLAS
    assert error_of(gate(x), x, weight) <= 2e-6
    assert widening == [4]


@pytest.mark.parametrize("fault", ["transposed", "address", "stride"])
def test_weights_that_no_kernel_can_read_take_none(fault: str, widening: list[int]) -> None:
    """A weight that is a view of a larger one is legal for nn.Linear, so for a gate."""
    weight = {
        "transposed": random(64, 8).t(),
        "address": random(8 * 64 + 8)[1:-7].view(8, 64),
        "stride": random(8, 68)[:, :64],
    }[fault]
    bench = Bench(artifact(4, 8, 64), on_miss="error")
    gate = gate_of(weight, out_dtype=FP32, runtime=bench.runtime)
    x = random(4, 64, seed=1)
    explained = gate.explain(x)
    assert explained.tier is Tier.CUBLAS
    assert told(explained)[1].startswith("weight ")
    assert error_of(gate(x), x, weight) <= 2e-6
    assert widening == [4]


def test_a_kernel_that_is_not_stored_is_a_counted_miss(widening: list[int]) -> None:
    """A store built for another model must show in stats and in `explain`, not in latency alone."""
    bench = Bench(on_miss="torch")
    x, weight = random(4, 64), random(8, 64, seed=1)
    gate = gate_of(weight, out_dtype=FP32, runtime=bench.runtime)
    explained = gate.explain(x)
    assert explained.tier is Tier.CUBLAS
    assert "absent" in told(explained)[1]
    assert bench.runtime.stats().misses == {}
    assert error_of(gate(x), x, weight) <= 2e-6
    stats = bench.runtime.stats()
    assert (stats.fallbacks, stats.misses) == (1, {"absent": 1})
    narrow = gate_of(weight, runtime=bench.runtime).explain(x)
    assert (narrow.tier, told(narrow)[4]) == (Tier.LINEAR, "logits are bfloat16")


def test_a_missing_kernel_is_an_error_where_the_runtime_says_so() -> None:
    """`on_miss="error"` promises that no call is slow in silence: a gate must not soften it."""
    bench = Bench(on_miss="error")
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=bench.runtime)
    explained = gate.explain(random(4, 64))
    assert explained.call.startswith("raises MissError: no kernel for M=4 N=8 K=64")
    with pytest.raises(MissError, match="M=4 N=8 K=64"):
        gate(random(4, 64))


# ---- tier 5


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype", "reason"),
    [
        (FP32, BF16, "x is float32, weight bfloat16"),
        (FP16, BF16, "x is float16, weight bfloat16"),
        (BF16, FP16, "weight is float16"),
        (FP16, FP16, "weight is float16"),
        (FP32, torch.float64, "weight is float64"),
    ],
)
@pytest.mark.usefixtures("widening")
def test_other_types_are_cast_to_the_weights(
    x_dtype: torch.dtype, weight_dtype: torch.dtype, reason: str
) -> None:
    """fp16 bits read as bf16 are finite numbers: only the dtype of both tells."""
    bench = Bench(artifact(4, 8, 64), on_miss="error")
    x, weight = random(4, 64, dtype=x_dtype), random(8, 64, dtype=weight_dtype, seed=1)
    gate = gate_of(weight, out_dtype=FP32, runtime=bench.runtime)
    explained = gate.explain(x)
    assert explained.tier is Tier.LINEAR
    assert told(explained)[1] == reason
    expected = torch.nn.functional.linear(x.to(weight_dtype), weight).to(FP32)
    assert torch.equal(gate(x), expected)
    assert bench.driver.launches == []


def test_fp32_compute_casts_both_up_and_beats_autocast() -> None:
    """Cast down first, or left to autocast, the logits of a gate that asks for fp32 are bf16's."""
    x, weight, bias = random(4, 64, dtype=FP32), random(8, 64, seed=1), random(8, seed=2)
    gate = gate_of(weight, bias, out_dtype=FP32, force_fp32_compute=True)
    assert gate.explain(x).call == "F.linear in float32"
    with torch.autocast("cpu", dtype=BF16):
        assert error_of(gate(x), x, weight, bias) <= 2e-6
    rough = gate_of(weight, bias, out_dtype=FP32)
    assert error_of(rough(x), x, weight, bias) > 1e-4
    assert (
        rough.explain(x).call == "F.linear in bfloat16, x cast from float32, logits cast to float32"
    )


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9)])
def test_gpus_before_hopper_take_the_last_tier(capability: tuple[int, int]) -> None:
    """A cubin for sm_90a does not load there, and the driver's error names no gate."""
    runtime = Ledger(capability=capability)
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=runtime)
    x = random(4, 64)
    explained = gate.explain(x)
    assert explained.tier is Tier.LINEAR
    needs = f"compute capability {capability[0]}.{capability[1]}, kernels need 9.0"
    assert needs in told(explained)[1]
    assert needs in told(explained)[4]
    assert error_of(gate(x), x, gate.weight) <= 3e-3
    assert runtime.calls == []


def test_a_driver_that_fails_leaves_the_gate_to_torch() -> None:
    """A machine without a working driver must serve, and say why it is slow."""
    driver = FakeDriver()
    driver.failing = {"compute_capability"}
    runtime = Runtime(MemoryStore(), driver=driver, devices=FakeDevices())
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=runtime)
    explained = gate.explain(random(4, 64))
    assert (explained.tier, told(explained)[1]) == (Tier.LINEAR, "compute_capability failed")
    assert gate(random(4, 64)).shape == (4, 8)


def test_on_the_cpu_the_last_tier_serves_and_no_runtime_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gate in a CPU test must not need a store, a driver, or settings that make sense."""

    def refuse() -> Runtime:
        raise AssertionError("the process's runtime was made")

    monkeypatch.setattr(tiers, "process_runtime", refuse)
    gate = gate_of(random(8, 64), out_dtype=FP32)
    x = random(4, 64)
    explained = gate.explain(x)
    assert explained.tier is Tier.LINEAR
    assert told(explained)[1] == "weight is on cpu, kernels run on cuda"
    assert torch.equal(gate(x), torch.nn.functional.linear(x, gate.weight).float())
    assert gate.preload([1, 2]) is None


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)])
def test_x_without_rows_gives_logits_without_rows(shape: tuple[int, ...]) -> None:
    """CUDA refuses an empty grid; engines call with no token in idle steps."""
    bench = Bench(artifact(4, 8, 64), on_miss="error")
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=bench.runtime)
    x = random(*shape)
    assert told(gate.explain(x))[1] == "x has no rows"
    logits = gate(x)
    assert (logits.shape, logits.dtype) == ((*shape[:-1], 8), FP32)


@pytest.mark.parametrize("x", [torch.zeros(4, 63), torch.zeros(()), torch.zeros(2, 3, 65)])
def test_a_wrong_x_raises_what_linear_raises(x: torch.Tensor) -> None:
    """A reshape to rows of K would take [2, 96] for [3, 64] and compute nonsense."""
    bench = Bench(artifact(4, 8, 64), on_miss="error")
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=bench.runtime)
    with pytest.raises(RuntimeError):
        torch.nn.functional.linear(x.bfloat16(), gate.weight)
    with pytest.raises(RuntimeError):
        gate(x.bfloat16())
    with pytest.raises(RuntimeError):
        gate(random(2, 96))
    assert "must end in K = 64" in told(gate.explain(random(2, 96)))[1]


@pytest.mark.usefixtures("widening")
def test_where_gradients_are_wanted_the_last_tier_gives_them() -> None:
    """Kernels have no backward: logits cut off from the graph train nothing, without an error."""
    bench = Bench(artifact(4, 8, 64), on_miss="error")
    gate = gate_of(random(8, 64), out_dtype=FP32, runtime=bench.runtime)
    gate.weight.requires_grad_(True)
    x = random(4, 64)
    assert "autograd is on" in told(gate.explain(x))[1]
    gate(x).sum().backward()
    assert gate.weight.grad is not None
    assert gate.weight.grad.abs().sum() > 0
    assert bench.driver.launches == []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert gate.explain(x).tier is Tier.BF16
            gate(x)
    assert bench.runtime.stats().hits == 2
    frozen = gate_of(random(8, 64), out_dtype=FP32, runtime=bench.runtime)
    leaf = x.clone().requires_grad_(True)
    frozen(leaf).sum().backward()
    assert leaf.grad is not None


@pytest.mark.usefixtures("widening")
def test_subclasses_and_transforms_go_to_torch() -> None:
    """A wrapper has no memory of its own: its address is zero, or of something else."""

    class Wrapped(torch.Tensor):
        pass

    bench = Bench(artifact(4, 8, 64), on_miss="error")
    weight = random(8, 64)
    gate = gate_of(weight, out_dtype=FP32, runtime=bench.runtime)
    x = random(4, 64)
    assert told(gate.explain(x.as_subclass(Wrapped)))[1] == "x is a Wrapped"
    assert gate(x.as_subclass(Wrapped)).shape == (4, 8)
    batched = torch.func.vmap(gate)(random(3, 4, 64))
    assert batched.shape == (3, 4, 8)
    assert bench.driver.launches == []


# ---- explain


def test_an_explanation_is_frozen_and_prints_as_lines() -> None:
    """It is pasted into issues: each tier and its reason on a line of its own."""
    gate = gate_of(random(8, 64), random(8))
    explained = gate.explain(random(4, 64))
    assert str(explained).splitlines() == [
        "tier 5, F.linear with casts: F.linear in bfloat16",
        "  bias added by F.linear",
        "  not tier 1, bf16 kernel: weight is on cpu, kernels run on cuda",
        "  not tier 2, fp32 kernel: weight is bfloat16",
        "  not tier 3, bf16x3 kernel: weight is bfloat16",
        "  not tier 4, torch.mm, bf16 to fp32: logits are bfloat16",
    ]
    assert explained.reason(4) == "logits are bfloat16"
    assert explained.reason(5) == ""
    with pytest.raises(AttributeError):
        explained.call = "another"  # type: ignore[misc]
    assert msgspec.json.decode(msgspec.json.encode(explained), type=Explanation) == explained


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    tokens=st.sampled_from([0, 1, 31, 32, 33, 64, 65]),
    hidden=st.sampled_from([56, 60, 64]),
    x_dtype=st.sampled_from([BF16, FP16, FP32]),
    weight_dtype=st.sampled_from([BF16, FP16, FP32]),
    out_dtype=st.sampled_from([None, BF16, FP32, torch.float64]),
    bias=st.booleans(),
    pad=st.sampled_from([0, 4, 8]),
    offset=st.sampled_from([0, 1, 8]),
)
def test_what_is_explained_is_what_happens(
    fp32_weights: None,
    widening: list[int],
    tokens: int,
    hidden: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    bias: bool,
    pad: int,
    offset: int,
) -> None:
    """Two ways to decide drift apart: the explanation then tells of another call."""
    runtime = Ledger()
    room = random(tokens * (hidden + pad) + offset, dtype=x_dtype)
    x = room[offset:].view(tokens, hidden + pad)[:, :hidden]
    weight = random(8, hidden, dtype=weight_dtype, seed=1)
    addend = random(8, dtype=weight_dtype, seed=2) if bias else None
    gate = gate_of(weight, addend, out_dtype=out_dtype, runtime=runtime)
    widening.clear()
    explained = gate.explain(x)
    logits = gate(x)
    assert logits.dtype is (out_dtype or weight_dtype)
    if tokens:
        assert error_of(logits, x, weight, addend) <= (2e-6 if explained.tier < 4 else 1e-2) or (
            torch.finfo(logits.dtype).bits == 16 or x_dtype is not weight_dtype
        )
    assert bool(runtime.calls) == (explained.tier <= Tier.BF16X3)
    if runtime.library:
        assert explained.tier in (Tier.CUBLAS, Tier.LINEAR)
    else:
        assert bool(widening) == (explained.tier is Tier.CUBLAS)
    assert [one.tier for one in explained.passed_over] == list(range(1, explained.tier))
    assert all(one.reason for one in explained.passed_over)
    if runtime.calls:
        assert runtime.calls[0][2] is weight_dtype
        assert (explained.tier is Tier.BF16) == (weight_dtype is BF16)


@given(
    rows=st.integers(1, 3),
    hidden=st.sampled_from([8, 16, 64]),
    row_stride=st.sampled_from([0, 4, 8, 16, 64, 65, 72]),
    stride=st.sampled_from([1, 1, 1, 2]),
    offset=st.integers(0, 9),
    negated=st.booleans(),
)
def test_a_layout_is_passed_over_exactly_where_the_runtime_would_refuse_it(
    rows: int, hidden: int, row_stride: int, stride: int, offset: int, negated: bool
) -> None:
    """Asked less than the runtime checks, a gate raises; asked more, it is slow for nothing."""
    x = torch.zeros(1024, dtype=BF16).as_strided((rows, hidden), (row_stride, stride), offset)
    if negated:
        x = torch._neg_view(x)
    try:
        check_operands(x, torch.zeros((2, hidden), dtype=BF16), "cpu")
        refused = False
    except ValueError:
        refused = True
    assert bool(tiers._layout_fault("x", x)) is refused
