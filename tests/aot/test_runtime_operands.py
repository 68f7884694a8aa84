"""Calls with fp32 operands, a bias or a scale: the right kernel and parameters, all checks."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from fake_gpu import artifact_for
from llbf16_aot.artifact import Artifact
from llbf16_aot.dispatch import dispatch, load_table
from llbf16_aot.problem import DType, Epilogue, Problem, Target
from runtime_kit import DTYPES, TOLERANCE, Bench, operands

SM_90A = Target.parse("sm_90a")
BF16, FP32 = torch.bfloat16, torch.float32


def built(problem: Problem) -> Artifact:
    return artifact_for(dispatch(problem, SM_90A, load_table("reference", SM_90A)))


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("out_dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("tokens", "x_dtype"), [(1, BF16), (3, FP32), (17, BF16), (33, BF16), (300, BF16)]
)
def test_fp32_weights_are_multiplied_as_fp32(
    tokens: int, x_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """Catches fp32 weights that are read as bf16, and a cap on M that is not theirs."""
    types = DTYPES[x_dtype], DType.FP32
    problem = Problem(tokens, 8, 64, DTYPES[out_dtype], True, *types)
    bench = Bench(built(problem), on_miss="error")
    x, weight = operands(tokens, 8, 64)
    x, weight = x.to(x_dtype), torch.randn((8, 64))
    for _ in range(3):
        result = bench.runtime.run(x, weight, out_dtype=out_dtype)
        assert error(result, x.double() @ weight.double().t()) <= TOLERANCE[out_dtype]
    assert bench.runtime.stats().hits == 3


def test_a_weight_that_changes_its_type_gets_the_other_kernel() -> None:
    """Catches a remembered call that launches a bf16 kernel on an fp32 weight of the same shape."""
    wide = Problem(3, 8, 64, DType.FP32, True, DType.BF16, DType.FP32)
    bench = Bench(built(wide), built(Problem(3, 8, 64)), on_miss="error")
    x, weight = operands(3, 8, 64)
    for values in (weight, torch.randn((8, 64)), weight, torch.randn((8, 64))):
        result = bench.runtime.run(x, values)
        assert error(result, x.double() @ values.double().t()) <= 2e-6


@pytest.mark.parametrize("bias_dtype", [FP32, BF16])
@pytest.mark.parametrize("out_dtype", list(TOLERANCE))
def test_a_bias_is_added_to_the_sums_before_they_are_rounded(
    out_dtype: torch.dtype, bias_dtype: torch.dtype
) -> None:
    """Catches a bias that is left out, read in the wrong type, or added to a rounded result."""
    epilogue = Epilogue.BIAS_FP32 if bias_dtype is FP32 else Epilogue.BIAS_BF16
    problem = Problem(3, 8, 64, DTYPES[out_dtype], epilogue=epilogue)
    plain = Problem(3, 8, 64, DTYPES[out_dtype])
    bench = Bench(built(problem), built(plain), on_miss="error")
    x, weight = operands(3, 8, 64)
    bias = torch.randn(8).to(bias_dtype) * 10
    exact = x.double() @ weight.double().t()
    for _ in range(2):
        with_bias = bench.runtime.run(x, weight, bias=bias, out_dtype=out_dtype)
        assert error(with_bias, exact + bias.double()) <= TOLERANCE[out_dtype]
        without = bench.runtime.run(x, weight, out_dtype=out_dtype)
        assert error(without, exact) <= TOLERANCE[out_dtype]


def test_a_scale_is_a_parameter_of_the_call() -> None:
    """Catches a scale that is compiled in, or kept from the call before."""
    bench = Bench(built(Problem(3, 8, 64, epilogue=Epilogue.SCALE)), on_miss="error")
    x, weight = operands(3, 8, 64)
    exact = x.double() @ weight.double().t()
    for scale in (0.5, -3, 1.0):
        result = bench.runtime.run(x, weight, scale=scale)
        assert error(result, exact * scale) <= 2e-6


def test_without_a_kernel_torch_adds_and_multiplies_alike() -> None:
    """Catches a fallback that forgets the epilogue, or sums fp32 weights in bf16."""
    bench = Bench()
    x, weight = operands(3, 8, 64)
    wide, bias = torch.randn((8, 64)), torch.randn(8)
    run = bench.runtime.run
    exact = x.double() @ weight.double().t()
    assert error(run(x, weight, bias=bias), exact + bias.double()) <= 2e-6
    assert error(run(x, weight, scale=0.25), exact * 0.25) <= 2e-6
    out = torch.empty((3, 8), dtype=BF16)
    assert run(x, weight, bias=bias, out=out, out_dtype=BF16) is out
    assert error(out, exact + bias.double()) <= 3e-3
    assert error(run(x, wide), x.double() @ wide.double().t()) <= 2e-6
    assert error(run(x, wide, out_dtype=BF16), x.double() @ wide.double().t()) <= 3e-3
    assert bench.runtime.stats().fallbacks == 5


def test_empty_products_with_a_bias_are_the_bias() -> None:
    """Catches zeros where K is 0 and a bias is to be added."""
    bench = Bench()
    bias = torch.tensor([1.0, 2.0])
    x, weight = torch.empty((3, 0), dtype=BF16), torch.empty((2, 0), dtype=BF16)
    assert bench.runtime.run(x, weight, bias=bias).tolist() == [[1.0, 2.0]] * 3
    assert bench.runtime.run(x, weight).tolist() == [[0.0, 0.0]] * 3


BAD: dict[str, tuple[Callable[[], dict[str, object]], type[Exception], str]] = {
    "list": (lambda: {"bias": [1.0]}, TypeError, "bias is list"),
    "type": (lambda: {"bias": torch.ones(8).half()}, TypeError, "bias has dtype torch.float16"),
    "shape": (lambda: {"bias": torch.ones(7)}, ValueError, r"bias has shape \(7,\), must be"),
    "matrix": (lambda: {"bias": torch.ones(1, 8)}, ValueError, r"bias has shape \(1, 8\)"),
    "stride": (lambda: {"bias": torch.ones(16)[::2]}, ValueError, r"bias has stride \(2,\)"),
    "device": (lambda: {"bias": torch.ones(8, device="meta")}, ValueError, "bias is on meta"),
    "sparse": (lambda: {"bias": torch.ones(8).to_sparse()}, TypeError, "bias has layout"),
    "grad": (lambda: {"bias": torch.ones(8, requires_grad=True)}, TypeError, "bias requires grad"),
    "scale": (lambda: {"scale": "2"}, TypeError, "scale is '2', must be a number"),
    "bool": (lambda: {"scale": True}, TypeError, "scale is True, must be a number"),
    "both": (lambda: {"scale": 1.0, "bias": torch.ones(8)}, ValueError, "a call takes one"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_bias_or_scale_is_refused_by_name_and_value(name: str) -> None:
    """Catches a pointer to the wrong memory, which a kernel would read all the same."""
    make, kind, message = BAD[name]
    bench = Bench(built(Problem(3, 8, 64, epilogue=Epilogue.BIAS_FP32)))
    x, weight = operands(3, 8, 64)
    with pytest.raises(kind, match=message):
        bench.runtime.run(x, weight, **make())  # type: ignore[arg-type]
    assert not bench.driver.launches
    assert bench.runtime.stats().rejects == 1


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype", "message"),
    [
        (FP32, BF16, "no kernel takes them together"),
        (torch.float16, FP32, "x has dtype torch.float16"),
        (BF16, torch.float64, "weight has dtype torch.float64"),
    ],
)
def test_types_that_no_kernel_takes_together_are_refused(
    x_dtype: torch.dtype, weight_dtype: torch.dtype, message: str
) -> None:
    """Catches operands whose bytes would be read as another type's."""
    bench = Bench()
    x, weight = operands(3, 8, 64)
    with pytest.raises(TypeError, match=message):
        bench.runtime.run(x.to(x_dtype), weight.to(weight_dtype))


def test_k_and_rows_must_fit_the_types_own_vectors() -> None:
    """Catches 16-byte loads from rows of fp32 that start between two of them, and the reverse."""
    bench = Bench()
    x, _ = operands(3, 8, 64)
    run = bench.runtime.run
    with pytest.raises(ValueError, match="K = 60, must be a multiple of 8"):
        run(x[:, :60], torch.randn(8, 60))
    assert run(x.float()[:, :60], torch.randn(8, 60)).shape == (3, 8)
    with pytest.raises(ValueError, match="row stride 66, must be a multiple of 4 elements"):
        run(x.float(), torch.randn(8, 66)[:, :64])


def test_a_bias_that_changed_is_waited_for_as_a_weight_is() -> None:
    """Catches an early load of a bias that the kernel ahead still writes."""
    problem = Problem(3, 8, 64, epilogue=Epilogue.BIAS_FP32)
    bench = Bench(built(problem), on_miss="error", pdl="auto")
    x, weight = operands(3, 8, 64)
    bias = torch.randn(8)
    run = bench.runtime.run
    dependent = []
    for change in (False, False, True, False):
        if change:
            bias.add_(1)
        run(x, weight, bias=bias)
        dependent.append(bench.driver.launches[-1][1].programmatic)
    assert dependent == [False, True, False, True]


def test_keys_of_epilogues_differ() -> None:
    """Catches two machine codes under one key."""
    digests = {
        dispatch(
            msgspec.structs.replace(Problem(3, 8, 64), epilogue=epilogue),
            SM_90A,
            load_table("reference", SM_90A),
        ).digest()
        for epilogue in Epilogue
    }
    assert len(digests) == len(Epilogue)
