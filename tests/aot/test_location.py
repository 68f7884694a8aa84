"""Where the store is: said or found in the environment, never by accident."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs
import pytest
from llbf16_aot.errors import AotError, StoreError, UntrustedStoreError, UsageError
from llbf16_aot.store import default_root

HOME = {"HOME": "/home/ada"}


@pytest.mark.parametrize(
    ("explicit", "environ", "expected"),
    [
        ("/said", {"LLBF16_AOT_STORE": "/variable", **HOME}, "/said"),
        ("~/said", HOME, "/home/ada/said"),
        (None, {"LLBF16_AOT_STORE": "/variable"}, "/variable"),
        (None, {"LLBF16_AOT_STORE": "/a/../b/./c/"}, "/b/c"),
        (None, {"LLBF16_AOT_STORE": "~/store", **HOME}, "/home/ada/store"),
        (None, {"LLBF16_AOT_STORE": "~", **HOME}, "/home/ada"),
        (None, {"LLBF16_AOT_STORE": "", **HOME}, "/home/ada/.cache/llbf16-aot"),
        (None, HOME, "/home/ada/.cache/llbf16-aot"),
        (None, {"XDG_CACHE_HOME": "/cache", **HOME}, "/cache/llbf16-aot"),
        (None, {"XDG_CACHE_HOME": "/cache"}, "/cache/llbf16-aot"),
        (None, {"XDG_CACHE_HOME": "", **HOME}, "/home/ada/.cache/llbf16-aot"),
        (None, {"XDG_CACHE_HOME": "relative", **HOME}, "/home/ada/.cache/llbf16-aot"),
        (None, {"LLBF16_AOT_STORE": "/\udcff"}, "/\udcff"),
    ],
)
def test_the_first_that_says_something_decides(
    explicit: str | None, environ: dict[str, str], expected: str
) -> None:
    """Bug: another order than flag, variable, user cache; or a `~` taken for a folder's name."""
    assert default_root(Path(explicit) if explicit else None, environ) == Path(expected)


@pytest.mark.parametrize(
    ("explicit", "environ"),
    [
        (None, {}),
        (None, {"HOME": ""}),
        (None, {"HOME": "relative/home"}),
        (None, {"HOME": "."}),
        (None, {"XDG_CACHE_HOME": "relative"}),
        (None, {"LLBF16_AOT_STORE": "~/store"}),
    ],
)
def test_an_environment_without_a_home_is_refused_with_a_hint(
    explicit: str | None, environ: dict[str, str]
) -> None:
    """Bug: the store lands in the working directory or in /tmp."""
    with pytest.raises(StoreError) as caught:
        default_root(None if explicit is None else Path(explicit), environ)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("explicit", "environ"),
    [
        (None, {"LLBF16_AOT_STORE": "relative/store", **HOME}),
        (None, {"LLBF16_AOT_STORE": "./store", **HOME}),
        (None, {"LLBF16_AOT_STORE": "~no-such-user-here/store"}),
        ("relative", HOME),
        ("", HOME),
    ],
)
def test_a_path_that_is_not_absolute_is_a_usage_error_with_a_hint(
    explicit: str | None, environ: dict[str, str]
) -> None:
    """Bug: a wrong setting ends with the exit code of a full disk, so scripts try again."""
    with pytest.raises(UsageError) as caught:
        default_root(None if explicit is None else Path(explicit), environ)
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_the_hint_for_a_relative_path_can_be_pasted() -> None:
    """Bug: the user is told that the path is wrong, and not what to write."""
    with pytest.raises(AotError) as caught:
        default_root(Path("my store"), HOME)
    assert caught.value.hint == f"write '{os.getcwd()}/my store'"


def test_the_user_cache_is_the_one_that_platformdirs_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: this package looks in another place than every other tool on the machine."""
    monkeypatch.delenv("LLBF16_AOT_STORE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for cache in (None, str(tmp_path / "elsewhere")):
        if cache is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", cache)
        named = platformdirs.user_cache_path("llbf16-aot", appauthor=False)
        assert default_root(None, os.environ) == named


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's home")
def test_the_home_of_another_user_is_refused(tmp_path: Path) -> None:
    """Bug: under sudo, files of root appear in somebody's home and lock him out of his cache."""
    os.chown(tmp_path, 1234, 1234)
    with pytest.raises(UntrustedStoreError, match="belongs to user 1234"):
        default_root(None, {"HOME": str(tmp_path)})
    said = {"HOME": str(tmp_path), "LLBF16_AOT_STORE": "/said"}
    assert default_root(None, said) == Path("/said")


def test_finding_the_store_makes_nothing(tmp_path: Path) -> None:
    """Bug: `--help` or a dry run on a read-only home fails, or leaves a folder."""
    default_root(None, {"HOME": str(tmp_path / "home")})
    assert os.listdir(tmp_path) == []
