"""Files for people: refused before the work, written whole, never something else's end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from llbf16_aot.errors import UsageError
from llbf16_aot.outfile import check_writable, write_whole


def test_the_check_makes_the_folder_and_keeps_what_is_there(tmp_path: Path) -> None:
    """Bug: the check itself empties the report that --resume is to read, or leaves a file."""
    path = tmp_path / "deep" / "report.json"
    check_writable(path)
    assert list(path.parent.iterdir()) == []
    write_whole(path, "first")
    check_writable(path)
    assert path.read_text() == "first"
    assert os.listdir(path.parent) == ["report.json"]


@pytest.mark.parametrize("name", ["file/x", "folder", "y" * 300])
def test_what_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    """Bug: a traceback, or `internal error`, for a wrong path."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for call in (check_writable, lambda path: write_whole(path, "text")):
        with pytest.raises(UsageError, match="cannot write the file") as caught:
            call(tmp_path / name)
        assert caught.value.message.startswith(str(tmp_path / name))
        assert caught.value.hint
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    """Bug: `--out /dev/null` run as root puts a file in the device's place."""
    (tmp_path / "link").symlink_to("target")
    check_writable(tmp_path / "link")
    write_whole(tmp_path / "link", "text")
    assert os.readlink(tmp_path / "link") == "target"
    assert (tmp_path / "target").read_text() == "text"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(fifo)
        write_whole(fifo, "text")
        assert os.read(reader, 9) == b"text"
    finally:
        os.close(reader)
    assert fifo.is_fifo()
