"""Where the store is: as the command line or the environment says, else in the user's cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .errors import StoreError, UntrustedStoreError, UsageError
from .files import command, shown

__all__ = ["default_root"]


def default_root(explicit: Path | None, environ: Mapping[str, str]) -> Path:
    """Where the store is: what was asked for, else LLBF16_AOT_STORE, else the user's cache.

    The user's cache is `$XDG_CACHE_HOME/llbf16-aot`, else `~/.cache/llbf16-aot`: the directory that
    platformdirs names, found in `environ` instead of the process's own environment. Raises
    UsageError where a path that was asked for is not absolute, and StoreError where no home folder
    is known: the store is never in the working directory or in /tmp unless somebody says so.
    """
    if explicit is not None:
        return _absolute(os.fspath(explicit), "the store path", environ)
    variable = environ.get("LLBF16_AOT_STORE")
    if variable:
        return _absolute(variable, "LLBF16_AOT_STORE", environ)
    cache = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification tells to ignore relative paths.
    if not cache.startswith("/"):
        home = _home(environ)
        try:
            owner = os.stat(home).st_uid
        except OSError:
            owner = os.geteuid()
        if owner not in (0, os.geteuid()):
            # sudo that keeps HOME: files of root in somebody's home, or the other way round.
            raise UntrustedStoreError(
                f"HOME is {shown(home)}, which belongs to user {owner}, not to {os.geteuid()}",
                hint="set LLBF16_AOT_STORE to a directory of your own, or use sudo -H",
            )
        cache = os.path.join(home, ".cache")
    return Path(os.path.normpath(os.path.join(cache, "llbf16-aot")))


def _absolute(text: str, origin: str, environ: Mapping[str, str]) -> Path:
    path = text
    if text == "~" or text.startswith("~/"):
        path = _home(environ) + text[1:]
    elif text.startswith("~"):
        path = os.path.expanduser(text)
    if not path.startswith("/"):
        raise UsageError(
            f"{origin} is {shown(text)!r}, must be an absolute path",
            hint=f"write {command(os.path.normpath(os.path.join(os.getcwd(), text)))}",
        )
    return Path(os.path.normpath(path))


def _home(environ: Mapping[str, str]) -> str:
    home = environ.get("HOME", "")
    if not home.startswith("/"):
        state = f"is {shown(home)!r}, not an absolute path" if home else "is not set"
        raise StoreError(
            f"cannot tell where the store is: HOME {state}",
            hint="set LLBF16_AOT_STORE to the absolute path of a directory",
        )
    return home
