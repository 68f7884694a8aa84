"""The doctor: what this installation, this machine and this store are, and what is wrong with them.

Changes nothing, imports neither torch nor the compiler, and treats a missing GPU, driver, compiler
or store as the ordinary things that they are.
"""

from __future__ import annotations

import enum
import os
import platform
import pwd
import stat
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .environment import Environment
from .errors import AotError, UntrustedStoreError
from .text import size, table
from .toolchain import COMPILER, KNOWN_TARGETS, builder_version, toolchain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Diagnosis", "Finding", "Mount", "Status", "diagnose", "find_mount"]

_NETWORK_FILE_SYSTEMS = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "gpfs", "lustre", "nfs", "nfs4", "smb3")
)
_MEMORY_FILE_SYSTEMS = frozenset(("ramfs", "tmpfs"))
_LOW_SPACE_BYTES = 64 << 20
"""Less than this is too little for the artifacts of a few models."""


class Status(str, enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. `value` is exact, `text` says it to people."""

    section: str
    name: str
    value: str | int | bool | tuple[str, ...] | None
    text: str
    status: Status = Status.OK
    advice: str = ""


class Diagnosis(msgspec.Struct, frozen=True):
    """All findings, in the order in which they are told."""

    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        """The worst status of all findings."""
        for status in (Status.BROKEN, Status.WARNING):
            if any(finding.status is status for finding in self.findings):
                return status
        return Status.OK

    def to_data(self) -> dict[str, object]:
        """The diagnosis as plain values, ready for JSON."""
        return {"status": self.status.value, "findings": msgspec.to_builtins(self.findings)}

    def __str__(self) -> str:
        rows = []
        section = ""
        for finding in self.findings:
            first = finding.section if finding.section != section else ""
            section = finding.section
            mark = "" if finding.status is Status.OK else finding.status.value
            rows.append((first, finding.name, mark, finding.text))
            if finding.advice:
                rows.append(("", "", "", f"  {finding.advice}"))
        return table(("about", "what", "status", "found"), rows)


class Mount(msgspec.Struct, frozen=True):
    """The file system that holds a path: where it is mounted and its type."""

    point: str
    kind: str


def find_mount(path: Path, mountinfo: str) -> Mount | None:
    """The mount that holds an absolute path, from the text of /proc/self/mountinfo."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = _unescape(fields[4])
        inside = path == Path(point) or Path(point) in path.parents
        # Of two mounts on one point the later one hides the earlier.
        if inside and (best is None or len(point) >= len(best.point)):
            best = Mount(point, right.split(" ")[0])
    return best


def diagnose(
    store_path: Path | None = None,
    environment: Environment | None = None,
    *,
    layer_paths: Sequence[Path] | None = None,
) -> Diagnosis:
    """Look at everything; never raises for what it finds.

    `layer_paths` take the place of LLBF16_AOT_LAYERS.
    """
    environment = Environment() if environment is None else environment
    return Diagnosis(
        (
            *_versions(),
            *_compiler(),
            *_driver(),
            *_settings(environment),
            *_store(store_path, environment),
            *_layers(layer_paths, environment),
        )
    )


def _versions() -> Iterator[Finding]:
    section = "versions"
    version = platform.python_version()
    yield Finding(section, "python", version, version)
    yield Finding(section, "llbf16-aot", builder_version(), builder_version())
    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Finding(section, "torch", None, "not installed; load_and_run needs it")
    else:
        yield Finding(section, "torch", found, found)


def _compiler() -> Iterator[Finding]:
    section = "compiler"
    versions = toolchain()
    if versions is None:
        yield Finding(section, COMPILER, None, "not installed; only build needs it")
        return
    for name, version in versions.items():
        yield Finding(section, name, version, version)
    yield Finding(section, "targets", KNOWN_TARGETS, " ".join(KNOWN_TARGETS))


def _driver() -> Iterator[Finding]:
    from .driver import inventory
    from .errors import DriverError

    section = "driver"
    try:
        found = inventory()
    except DriverError as error:
        yield Finding(section, "driver", None, f"none found: {error.message}")
        return
    yield Finding(section, "driver", found.cuda_version, f"CUDA {found.cuda_version}")
    if not found.devices:
        yield Finding(section, "GPUs", (), "none")
    for index, device in enumerate(found.devices):
        text = f"{device.name}, compute capability {device.major}.{device.minor}"
        yield Finding(section, f"GPU {index}", f"sm_{device.major}{device.minor}", text)


def _settings(environment: Environment) -> Iterator[Finding]:
    section = "settings"
    for name, value in environment.given().items():
        yield Finding(section, name, value, value or "not set")
    for read in (lambda: environment.jobs, lambda: environment.compile_timeout_s):
        try:
            read()
        except AotError as error:
            yield Finding(section, "bad value", None, error.message, Status.BROKEN, error.hint)
    yield _tuning(environment.tuning or "default")


def _tuning(name: str) -> Finding:
    from .dispatch import load_table
    from .problem import Target

    try:
        tables = {load_table(name, Target.parse(target)).name for target in KNOWN_TARGETS}
    except AotError as error:
        return Finding("settings", "tuning table", name, error.message, Status.BROKEN, error.hint)
    except OSError as error:
        text = f"cannot be looked at: {error.strerror}"
        return Finding("settings", "tuning table", name, text, Status.BROKEN)
    return Finding("settings", "tuning table", name, ", ".join(sorted(tables)))


def _store(store_path: Path | None, environment: Environment) -> Iterator[Finding]:
    section = "store"
    try:
        location = environment.store_location(store_path)
    except AotError as error:
        yield Finding(section, "path", None, error.message, Status.BROKEN, error.hint)
        return
    root = location.root
    yield Finding(section, "path", str(root), f"{root} (from {location.origin})")
    missing = "not yet; the first build makes it"
    yield from _folder(root, section, missing, Status.OK)
    yield from _file_system(root, section)
    yield from _free_space(root, section)
    yield from _entries(root, section)


def _layers(layer_paths: Sequence[Path] | None, environment: Environment) -> Iterator[Finding]:
    """The read-only stores, in the order in which they are asked after the store."""
    try:
        layers = environment.layers if layer_paths is None else tuple(layer_paths)
    except AotError as error:
        yield Finding("layers", "bad value", None, error.message, Status.BROKEN, error.hint)
        return
    origin = "LLBF16_AOT_LAYERS" if layer_paths is None else "--layer"
    order = ("store", *map(str, layers))
    text = "the store, then " + ", then ".join(order[1:]) if layers else "the store only"
    yield Finding("layers", "order", order, text)
    for number, root in enumerate(layers, 1):
        section = f"layer {number}"
        yield Finding(section, "path", str(root), f"{root} (from {origin})")
        missing = "no; it is passed over"
        yield from _folder(root, section, missing, Status.WARNING)
        yield from _file_system(root, section)
        yield from _entries(root, section)


def _folder(root: Path, section: str, missing: str, status: Status) -> Iterator[Finding]:
    try:
        found = root.stat()
    except FileNotFoundError:
        yield Finding(section, "exists", False, missing, status)
        return
    except OSError as error:
        text = f"cannot be looked at: {error.strerror}"
        yield Finding(section, "exists", None, text, Status.BROKEN)
        return
    yield Finding(section, "exists", True, "yes")
    if not stat.S_ISDIR(found.st_mode):
        advice = "name a directory with --store or LLBF16_AOT_STORE"
        if section != "store":
            advice = "name a directory with --layer or LLBF16_AOT_LAYERS"
        yield Finding(section, "kind", "file", "no directory", Status.BROKEN, advice)
        return
    if root.is_symlink():
        target = os.path.realpath(root)
        yield Finding(section, "leads to", target, target)
    owner = _user_name(found.st_uid)
    yield Finding(section, "owner", owner, owner)
    mode = f"{stat.S_IMODE(found.st_mode):04o}"
    yield Finding(section, "mode", mode, mode)
    if section == "store":
        writable = os.access(root, os.W_OK | os.X_OK)
        text = "yes" if writable else "no; enough to load from"
        yield Finding(section, "writable", writable, text)


def _file_system(root: Path, section: str) -> Iterator[Finding]:
    try:
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        mount = find_mount(_nearest(root), text)
    except OSError:
        mount = None
    if mount is None:
        return
    advice = ""
    if mount.kind in _NETWORK_FILE_SYSTEMS:
        advice = "shared over a network: new entries may be seen late, and locks may not work"
    elif mount.kind in _MEMORY_FILE_SYSTEMS:
        advice = "held in memory: gone after the next start"
    status = Status.WARNING if advice else Status.OK
    text = f"{mount.kind}, mounted at {mount.point}"
    yield Finding(section, "file system", mount.kind, text, status, advice)


def _free_space(root: Path, section: str) -> Iterator[Finding]:
    try:
        room = os.statvfs(_nearest(root))
    except OSError as error:
        yield Finding(section, "free space", None, f"unknown: {error.strerror}")
        return
    free_bytes = room.f_bavail * room.f_frsize
    low = free_bytes < _LOW_SPACE_BYTES
    yield Finding(
        section,
        "free space",
        free_bytes,
        size(free_bytes),
        Status.WARNING if low else Status.OK,
        "a build may not have room for its artifacts" if low else "",
    )


def _nearest(root: Path) -> Path:
    """The root or, where it does not exist, the nearest of its parents that does."""
    base = Path(os.path.realpath(root))
    # Unlike Path.exists, os.path.exists says False of a path that is too long.
    while not os.path.exists(base) and base != base.parent:
        base = base.parent
    return base


def _entries(root: Path, section: str) -> Iterator[Finding]:
    from .pins import pins
    from .store import Store

    if not os.path.isdir(root):  # unlike Path.is_dir, False where the path is too long
        return
    store = Store(root)
    # The store itself decides whether owner and mode of everything on the way can be trusted.
    try:
        digests = store.digests()
        pinned = pins(store)
        used_bytes = store.usage()
    except UntrustedStoreError as error:
        yield Finding(section, "trusted", False, error.message, Status.BROKEN, error.hint)
        return
    except AotError as error:
        yield Finding(section, "entries", None, error.message, Status.BROKEN, error.hint)
        return
    yield Finding(section, "trusted", True, "yes: only its owner and root can change it")
    text = f"{len(digests)}, {size(used_bytes)}; 'llbf16-aot verify' reads them all"
    yield Finding(section, "entries", len(digests), text)
    if pinned:
        absent = len(pinned.difference(digests))
        text = f"{len(pinned)}{f', {absent} of them without an entry' if absent else ''}"
        yield Finding(section, "pins", len(pinned), text)
    yield Finding(section, "used", used_bytes, size(used_bytes))


def _user_name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)


def _unescape(text: str) -> str:
    """Undo the octal escapes with which the kernel writes white space in paths."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
