"""The errors' codes and exit codes, which callers and scripts rely on."""

from __future__ import annotations

import re

import pytest
from llbf16_aot import errors
from llbf16_aot.errors import AotError

CLASSES = tuple(getattr(errors, name) for name in errors.__all__)

EXIT_CODES = {
    "UsageError": 2,
    "ManifestError": 2,
    "TargetError": 2,
    "TuningTableError": 2,
    "NotFoundError": 3,
    "MissError": 3,
    "InvalidArtifactError": 4,
    "DamagedEntryError": 4,
    "UntrustedStoreError": 4,
    "StoreError": 5,
    "StoreFullError": 5,
    "StoreUnwritableError": 5,
    "LockTimeoutError": 6,
}
"""The documented ones; every other error ends with 1, the operation failed."""


def test_every_error_of_the_module_is_public_and_of_the_one_base_class() -> None:
    """Catches an error that `except AotError` does not catch, or that nobody can import."""
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert defined == set(errors.__all__)
    assert all(issubclass(error, AotError) for error in CLASSES)


def test_codes_are_distinct_and_stable_in_form() -> None:
    """Catches a subclass that inherits its parent's code: in JSON the two read the same."""
    codes = [error.code for error in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in codes)


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_exit_codes_are_the_documented_ones(error: type[AotError]) -> None:
    """Catches an integrity error that a script takes for an ordinary failure."""
    assert error.exit_code == EXIT_CODES.get(error.__name__, 1)


def test_message_and_hint_are_kept_apart() -> None:
    """Catches a hint that ends up in the message, or one that must be given."""
    error = AotError("what is wrong", hint="what to do")
    assert (str(error), error.message, error.hint) == ("what is wrong",) * 2 + ("what to do",)
    assert AotError("what is wrong").hint == ""
