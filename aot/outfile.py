"""Files that a command writes for people: whole or not at all, refused before the work if at all.

Nothing of the store goes through here.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .errors import UsageError

__all__ = ["check_writable", "write_whole"]


def check_writable(path: Path) -> None:
    """Make the file's folder and prove that the file can be written there; raises UsageError.

    Changes nothing else: what the file holds stays.
    """
    try:
        place = _place(path)
        if place is None:
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        temporary = _temporary(place)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise _refusal(path, error) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file, and make its folder where there is none; raises UsageError naming the file."""
    try:
        place = _place(path)
        if place is None:
            path.write_text(text, encoding="utf-8")
            return
        temporary = _temporary(place)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _refusal(path, error) from error


def _place(path: Path) -> Path | None:
    """The regular file that a path leads to or will be, in a folder that exists.

    None for what must be written in place, as /dev/stdout: another file there would destroy it.
    """
    if path.exists() and not path.is_file():
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return None
    place = Path(os.path.realpath(path))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        # `File exists` would say of the wrong file what is no fault.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
    return place


def _temporary(place: Path) -> Path:
    return place.with_name(f".{place.name}.new")


def _refusal(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{path}: cannot write the file: {error.strerror}",
        hint="name a file in a folder that can be written and has room",
    )
