"""Environment variables become typed values, or an error that names the variable."""

from __future__ import annotations

import pytest
from llbf16_aot.environment import DEFAULT_COMPILE_TIMEOUT_S, Environment
from llbf16_aot.errors import UsageError


def test_nothing_set_gives_the_defaults() -> None:
    """Catches a default that depends on the caller's environment."""
    environment = Environment({})
    assert environment.jobs is None
    assert environment.tuning is None
    assert environment.compile_timeout_s == DEFAULT_COMPILE_TIMEOUT_S


def test_an_empty_variable_counts_as_not_set() -> None:
    """Catches `LLBF16_AOT_JOBS= llbf16-aot build` that fails: people unset variables like that."""
    environment = Environment(
        {"LLBF16_AOT_JOBS": "", "LLBF16_AOT_TUNING": "", "LLBF16_AOT_COMPILE_TIMEOUT_S": ""}
    )
    assert environment.jobs is None
    assert environment.tuning is None
    assert environment.compile_timeout_s == DEFAULT_COMPILE_TIMEOUT_S


def test_values_are_read_with_their_types() -> None:
    """Catches a variable that is documented and not read."""
    environment = Environment(
        {
            "LLBF16_AOT_JOBS": "12",
            "LLBF16_AOT_TUNING": "reference",
            "LLBF16_AOT_COMPILE_TIMEOUT_S": "0.5",
        }
    )
    assert environment.jobs == 12
    assert environment.tuning == "reference"
    assert environment.compile_timeout_s == 0.5


@pytest.mark.parametrize(
    "text", ["0", "-1", "1.5", "two", "1025", "9" * 5000, "\N{ARABIC-INDIC DIGIT TWO}", " 2", "1e3"]
)
def test_a_bad_number_of_jobs_names_the_variable(text: str) -> None:
    """Catches 0 jobs that build nothing, a ValueError, and digits that are none of ours."""
    with pytest.raises(UsageError, match="LLBF16_AOT_JOBS"):
        _ = Environment({"LLBF16_AOT_JOBS": text}).jobs


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "86401", "1e999"])
def test_a_bad_time_limit_names_the_variable(text: str) -> None:
    """Catches nan and inf, which float() reads and which switch the limit off."""
    with pytest.raises(UsageError, match="LLBF16_AOT_COMPILE_TIMEOUT_S"):
        _ = Environment({"LLBF16_AOT_COMPILE_TIMEOUT_S": text}).compile_timeout_s


def test_a_bad_value_hurts_only_who_asks_for_it() -> None:
    """Catches `llbf16-aot list` that fails because of a setting of `build`."""
    environment = Environment({"LLBF16_AOT_JOBS": "many", "LLBF16_AOT_TUNING": "default"})
    assert environment.tuning == "default"


def test_the_switch_of_the_vllm_plugin_is_0_or_1() -> None:
    """Catches `LLBF16_AOT_VLLM=false` that is read as on: whoever sets it wants it off."""
    assert Environment({}).vllm
    assert Environment({"LLBF16_AOT_VLLM": ""}).vllm
    assert Environment({"LLBF16_AOT_VLLM": "1"}).vllm
    assert not Environment({"LLBF16_AOT_VLLM": "0"}).vllm
    for text in ("false", "no", "2", " 0"):
        with pytest.raises(UsageError, match="LLBF16_AOT_VLLM"):
            _ = Environment({"LLBF16_AOT_VLLM": text}).vllm
