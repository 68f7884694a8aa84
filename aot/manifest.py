"""The manifest: which routers a deployment has, for which targets. Parsed once, into frozen values.

A manifest is YAML 1.2, schema 1. What is wrong with one is said with file, line, field, value and
what is allowed, all of it at once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import msgspec

from .errors import ManifestError
from .files import read_regular
from .problem import ALIGNMENT_BYTES, DType, Epilogue, Problem, Target

__all__ = [
    "MANIFEST_SCHEMA",
    "MAX_FILE_BYTES",
    "MAX_ROUTERS",
    "PARSED_FILE",
    "Manifest",
    "Router",
    "packaged_manifests",
    "parsed_form",
]

MANIFEST_SCHEMA = 1

MAX_FILE_BYTES = 64 * 1024
"""Largest manifest: the YAML parser is slow, and a larger one is no manifest but an attack."""

MAX_ROUTERS = 500

PARSED_FILE = "parsed.json"
"""The packaged manifests once more, parsed; tests/aot/test_manifest.py, run with the variable
LLBF16_AOT_UPDATE_GOLDEN=1, writes it."""


class Router(msgspec.Struct, frozen=True):
    """One router of a model: `hidden` is K, `experts` N, `tokens` the values of M, ascending."""

    model: str
    hidden: int
    experts: int
    tokens: tuple[int, ...]
    x_dtype: DType
    weight_dtype: DType
    out_dtypes: tuple[DType, ...]
    pdl: tuple[bool, ...]
    tuning: str
    epilogues: tuple[Epilogue, ...] = (Epilogue.NONE,)

    def problems(self) -> Iterator[Problem]:
        """Every problem that the router can ask for, once.

        By output type, then epilogue, then pdl, then M.
        """
        ways = product(self.out_dtypes, self.epilogues, self.pdl, self.tokens)
        for out_dtype, epilogue, pdl, tokens in ways:
            yield Problem(
                tokens=tokens,
                experts=self.experts,
                hidden=self.hidden,
                out_dtype=out_dtype,
                pdl=pdl,
                x_dtype=self.x_dtype,
                weight_dtype=self.weight_dtype,
                alignment_bytes=ALIGNMENT_BYTES,
                epilogue=epilogue,
            )


class Manifest(msgspec.Struct, frozen=True):
    """The routers of a deployment and the targets to build them for. `origin` names its file."""

    schema: int
    name: str
    targets: tuple[Target, ...]
    routers: tuple[Router, ...]
    origin: str

    @classmethod
    def load(cls, where: str | Path) -> Manifest:
        """Read a manifest file, or one that comes with the package, by its name.

        A name without a folder that is no file here is looked up among `packaged_manifests`. Raises
        ManifestError.
        """
        path = Path(where)
        # os.path.exists, unlike Path.exists, does not raise for names that are too long.
        if not os.path.exists(path) and path.parent == Path() and not path.is_absolute():
            name = path.name.removesuffix(".yaml")
            if name not in packaged_manifests():
                from .manifest_reader import did_you_mean

                raise ManifestError(
                    f"{where}:1: no such file, and no manifest of this name comes with the package"
                    f"{did_you_mean(name, packaged_manifests())}",
                    hint=f"name a file, or one of {', '.join(packaged_manifests())}",
                )
            path = _folder() / f"{name}.yaml"
            text = _read(path)
            return _parsed_before(text, str(path)) or cls.parse(text, origin=str(path))
        return cls.parse(_read(path), origin=str(path))

    @classmethod
    def parse(cls, text: str, *, origin: str) -> Manifest:
        """Read a manifest's text; `origin` stands in messages, and relative paths start beside it.

        Raises ManifestError that lists all that is wrong, each with its line.
        """
        from .manifest_reader import read_manifest

        return read_manifest(text, origin)


def packaged_manifests() -> tuple[str, ...]:
    """Names of the manifests that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def parsed_form(names: Iterable[str]) -> bytes:
    """What `PARSED_FILE` holds: packaged manifests by the digest of their text, as JSON.

    A process that preloads a packaged manifest reads this: importing the YAML parser and parsing
    takes longer than loading the kernels.
    """
    found = {}
    for name in sorted(names):
        text = _read(_folder() / f"{name}.yaml")
        found[_digest(text)] = Manifest.parse(text, origin="")
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"


def _parsed_before(text: str, origin: str) -> Manifest | None:
    """The manifest of a text that was parsed when the package was made; None for any other."""
    try:
        data = (_folder() / PARSED_FILE).read_bytes()
        raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get(_digest(text))
        parsed = None if raw is None else msgspec.json.decode(raw, type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return None if parsed is None else msgspec.structs.replace(parsed, origin=origin)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _folder() -> Path:
    from importlib import import_module

    locations = import_module(f"{__package__}.manifests").__path__
    return Path(next(iter(locations)))


def _read(path: Path) -> str:
    """The text of a regular file of bounded size."""
    try:
        data = read_regular(path, limit_bytes=MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ManifestError(
            f"{path}:1: cannot read the manifest: {reason}",
            hint=f"name a file, or one of {', '.join(packaged_manifests())}",
        ) from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ManifestError(
            f"{path}:{line}: not UTF-8: byte 0x{data[error.start]:02x}",
            hint="save the file as UTF-8",
        ) from error
