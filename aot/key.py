"""The compile key: everything that selects one machine-code artifact, and its digest."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from functools import cache
from pathlib import Path

import msgspec

from .backends import BACKENDS, OPERANDS, Config, backend_name
from .errors import ConfigError, TargetError
from .problem import DType, Epilogue, Layout, Problem, Target

__all__ = [
    "DIGEST_PATTERN",
    "KEY_SCHEMA",
    "CompileKey",
    "canonical_json",
    "check_target",
    "kernel_source_digest",
    "source_files",
]

KEY_SCHEMA = 1
"""Changes when the meaning of a key's fields changes, so that older digests are never found."""

DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
"""The text of a sha256 digest, the form of every name in the store."""


class CompileKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one cubin was compiled for. Two keys that differ in any field are two artifacts."""

    target: str
    config: Config
    x_dtype: DType
    weight_dtype: DType
    out_dtype: DType
    layout: Layout
    alignment_bytes: int
    epilogue: Epilogue
    pdl: bool

    @property
    def backend(self) -> str:
        """Name of the kernel family."""
        return backend_name(self.config)

    @classmethod
    def of(cls, config: Config, problem: Problem, target: Target) -> CompileKey:
        """The key of a configuration for a problem on a target; checks nothing."""
        return cls(
            target=str(target),
            config=config,
            x_dtype=problem.x_dtype,
            weight_dtype=problem.weight_dtype,
            out_dtype=problem.out_dtype,
            layout=problem.layout,
            alignment_bytes=problem.alignment_bytes,
            epilogue=problem.epilogue,
            pdl=problem.pdl,
        )

    def check(self) -> None:
        """Raise ConfigError or TargetError where this key cannot become a working kernel."""
        check_target(Target.parse(self.target))
        operands = (self.x_dtype, self.weight_dtype)
        if operands not in OPERANDS[self.backend]:
            allowed = " or ".join(f"{x.value} x {w.value}" for x, w in OPERANDS[self.backend])
            raise ConfigError(
                f"{self.backend}: x and weight are {self.x_dtype.value} x "
                f"{self.weight_dtype.value}, must be {allowed}"
            )
        BACKENDS[self.backend].check(self.config)

    def digest(self) -> str:
        """The identity of the artifact: a sha256 in hexadecimal.

        Covers the key, the digest of the family's kernel sources and the key schema, each prefixed
        by its length, so that no two different triples give the same bytes. The compiler's version
        is provenance and not part of it: a runtime without a compiler must be able to compute it.
        """
        return self.digest_for(kernel_source_digest(self.backend))

    def digest_for(self, source_digest: str) -> str:
        """The identity that this key has with another digest of the kernel sources."""
        parts = (b"%d" % KEY_SCHEMA, canonical_json(self), source_digest.encode())
        identity = b"".join([b"%d:%b" % (len(part), part) for part in parts])
        return hashlib.sha256(identity).hexdigest()

    def __str__(self) -> str:
        tile = " ".join(
            f"{name}={getattr(self.config, name)}" for name in self.config.__struct_fields__
        )
        epilogue = "" if self.epilogue is Epilogue.NONE else f"{self.epilogue.value} "
        return (
            f"{self.backend} {tile} {self.x_dtype.value} x {self.weight_dtype.value} -> "
            f"{self.out_dtype.value} {epilogue}pdl={'on' if self.pdl else 'off'} {self.target}"
        )


def check_target(target: Target) -> None:
    """Raise TargetError for an SM architecture that no backend can be built for.

    Thread-block clusters and programmatic dependent launch start at compute capability 9.0, and
    `st.async` needs an architecture-specific or family target.
    """
    if target.major < 9:
        raise TargetError(
            f"target {target} is older than sm_90: its GPUs have no thread-block clusters",
            hint="supported are sm_90a, sm_100a, sm_103a, sm_120a and their kin",
        )
    if not target.suffix:
        raise TargetError(
            f"target {target} lacks its suffix: kernels use architecture-specific instructions",
            hint=f"write {target}a",
        )


def canonical_json(value: object) -> bytes:
    """The one encoding that is hashed and stored: sorted keys, no white space, UTF-8."""
    return msgspec.json.encode(value, order="sorted")


def source_files(backend: str) -> dict[str, Path]:
    """The files that decide a family's machine code: path inside the package -> where it lies."""
    found: dict[str, Path] = {}
    package = __name__.rpartition(".")[0]
    for relative in BACKENDS[backend].SOURCES:
        module = (
            f"{package}.{relative.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"
        )
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"kernel source {relative} of the family {backend} is not installed",
                hint="reinstall llbf16-aot: keys cannot be computed without the kernel sources",
            )
        found[relative] = Path(spec.origin)
    return found


@cache
def kernel_source_digest(backend: str) -> str:
    """A sha256 over the family's source files, by their path inside the package and their bytes."""
    digest = hashlib.sha256()
    for relative, path in sorted(source_files(backend).items()):
        data = path.read_bytes()
        name = relative.encode()
        digest.update(b"%d:" % len(name) + name + b"%d:" % len(data) + data)
    return digest.hexdigest()
