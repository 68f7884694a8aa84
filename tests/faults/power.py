"""Power losses: a file system in a file, and what of it had reached the disk at some moment."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from faults.harness import run_tool

__all__ = ["Disk"]

IMAGE_BYTES = 24 << 20
SETTLE_S = 10.0


class Disk:
    """An ext4 file system on a loop device; what reached the device is what its file holds."""

    def __init__(self, folder: Path) -> None:
        self.image = folder / "disk.img"
        self.place = folder / "disk"
        self.place.mkdir(exist_ok=True)
        with self.image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        run_tool(
            *(
                "mkfs.ext4",
                "-q",
                "-F",
                "-b",
                "4096",
                "-E",
                "lazy_itable_init=0,lazy_journal_init=0",
            ),
            str(self.image),
        )
        self._device = attach(self.image)
        try:
            mount(self._device, self.place)
        except BaseException:
            run_tool("losetup", "-d", self._device)
            raise

    def close(self) -> None:
        run_tool("umount", str(self.place))
        run_tool("losetup", "-d", self._device)

    def copy(self, to: Path) -> None:
        """A copy of what has reached the device, taken while nothing was under way.

        The journal thread may be writing, so the copy counts only if the device's counters stood
        still and nothing was under way.
        """
        end = time.monotonic() + SETTLE_S
        while True:
            before = self._counters()
            shutil.copyfile(self.image, to)
            if before == self._counters():
                return
            assert time.monotonic() < end, "the disk does not come to rest"

    def _counters(self) -> tuple[str, ...]:
        """Writes, sectors written, requests under way; unlike anything while some are."""
        name = os.path.basename(self._device)
        fields = Path(f"/sys/block/{name}/stat").read_text().split()
        if fields[8] != "0":
            return (str(time.monotonic_ns()),)
        return fields[4], fields[6]


def attach(image: Path) -> str:
    """The loop device of an image; skips where there are no loop devices."""
    return run_tool("losetup", "--find", "--show", str(image), or_skip=True).strip()


def mount(device: str, place: Path) -> None:
    """Mount, with a recovery of the journal where one is due; skips where that is refused."""
    run_tool("mount", "-t", "ext4", "-o", "data=ordered", device, str(place), or_skip=True)
