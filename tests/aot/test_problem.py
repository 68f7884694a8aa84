"""Problems and targets: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import pytest
from llbf16_aot.errors import TargetError, UnsupportedProblemError
from llbf16_aot.problem import (
    FEW_TOKENS,
    MAX_EXPERTS,
    MAX_HIDDEN,
    DType,
    Problem,
    Target,
)

GOOD = Problem(tokens=1, experts=256, hidden=7168)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("sm_90", (9, 0, "")),
        ("sm_90a", (9, 0, "a")),
        ("sm_100a", (10, 0, "a")),
        ("sm_100f", (10, 0, "f")),
        ("sm_103a", (10, 3, "a")),
        ("sm_121a", (12, 1, "a")),
    ],
)
def test_a_target_is_read_into_its_parts_and_printed_back(
    text: str, parts: tuple[int, int, str]
) -> None:
    """Catches sm_103 read as 1.03 or 103.0, and a suffix that is lost on the way."""
    target = Target.parse(text)
    assert (target.major, target.minor, target.suffix) == parts
    assert target.number == int(text.removeprefix("sm_").rstrip("af"))
    assert str(target) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "90a",
        "sm90a",
        "sm_",
        "sm_9",
        "sm_090",
        "sm_1000",
        "sm_90b",
        "sm_90aa",
        "SM_90a",
        "sm_90A",
        " sm_90a",
        "sm_90a ",
        "sm_90a\n",
        "sm_\uff190a",
        "compute_90a",
    ],
)
def test_other_writings_of_a_target_are_refused_with_the_right_form(text: str) -> None:
    """Catches a loose pattern: `$` that admits a newline, or digits of another script."""
    with pytest.raises(TargetError) as caught:
        Target.parse(text)
    assert repr(text) in caught.value.message
    assert "sm_90a" in caught.value.hint


def test_targets_sort_by_number_and_then_by_suffix() -> None:
    """Catches an order by text, in which sm_100a stands before sm_90a."""
    texts = ["sm_120a", "sm_90a", "sm_103a", "sm_100f", "sm_100a"]
    assert [str(target) for target in sorted(map(Target.parse, texts))] == [
        "sm_90a",
        "sm_100a",
        "sm_100f",
        "sm_103a",
        "sm_120a",
    ]


@pytest.mark.parametrize(
    "problem",
    [
        GOOD,
        Problem(tokens=FEW_TOKENS, experts=1, hidden=8),
        Problem(tokens=1, experts=MAX_EXPERTS, hidden=MAX_HIDDEN),
        Problem(tokens=1, experts=7, hidden=2880, out_dtype=DType.BF16, pdl=False),
        Problem(tokens=1, experts=7, hidden=2880, out_dtype=DType.FP16),
        Problem(tokens=65_536, experts=7, hidden=8, weight_dtype=DType.FP32),
        Problem(tokens=32, experts=7, hidden=4, x_dtype=DType.FP32, weight_dtype=DType.FP32),
    ],
)
def test_problems_up_to_the_limits_are_accepted(problem: Problem) -> None:
    """Catches a limit that is off by one, and an output type that was forgotten."""
    problem.check()


@pytest.mark.parametrize(
    ("problem", "named"),
    [
        (Problem(0, 256, 7168), "tokens is 0"),
        (Problem(-1, 256, 7168), "tokens is -1"),
        (Problem(65_537, 256, 7168), "tokens is 65537"),
        (Problem(1, 0, 7168), "experts is 0"),
        (Problem(1, MAX_EXPERTS + 1, 7168), "experts is 65537"),
        (Problem(1, 256, 0), "hidden is 0"),
        (Problem(1, 256, 7164), "hidden is 7164"),
        (Problem(1, 256, 7), "hidden is 7"),
        (Problem(1, 256, MAX_HIDDEN + 8), "hidden is 1048584"),
        (Problem(1, 256, 7168, x_dtype=DType.FP16), "x_dtype is fp16"),
        (Problem(1, 256, 7168, x_dtype=DType.FP32), "x_dtype is fp32 and weight_dtype bf16"),
        (Problem(1, 256, 7168, weight_dtype=DType.FP16), "weight_dtype fp16"),
        (Problem(65_537, 256, 7168, weight_dtype=DType.FP32), "tokens is 65537"),
        (
            Problem(33, 256, 7168, x_dtype=DType.FP32, weight_dtype=DType.FP32),
            "tokens is 33, supported are 1 to 32",
        ),
        (
            Problem(1, 256, 7164, weight_dtype=DType.FP32),
            "hidden is 7164, supported are multiples of 8",
        ),
        (
            Problem(1, 256, 7166, x_dtype=DType.FP32, weight_dtype=DType.FP32),
            "hidden is 7166, supported are multiples of 4",
        ),
        (Problem(1, 256, 7168, alignment_bytes=8), "alignment is 8 bytes"),
        (Problem(1, 256, 7168, alignment_bytes=32), "alignment is 32 bytes"),
    ],
)
def test_a_refused_problem_is_named_by_field_and_value(problem: Problem, named: str) -> None:
    """Catches a limit that is not checked, which would read out of bounds on the GPU."""
    with pytest.raises(UnsupportedProblemError) as caught:
        problem.check()
    assert named in caught.value.message
    assert "supported" in caught.value.message


def test_sizes_of_the_element_types() -> None:
    """Catches a type whose size would shift every output row."""
    assert {dtype.value: dtype.size_bytes for dtype in DType} == {"bf16": 2, "fp16": 2, "fp32": 4}


def test_a_problem_prints_every_property_that_a_manifest_can_vary() -> None:
    """Catches messages in which two different problems read the same."""
    assert str(GOOD) == "M=1 N=256 K=7168 bf16 x bf16 -> fp32"
    assert str(Problem(1, 256, 7168, DType.FP16, pdl=False)) == (
        "M=1 N=256 K=7168 bf16 x bf16 -> fp16, no dependent launch"
    )
