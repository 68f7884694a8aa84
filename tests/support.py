"""Artifacts for tests, made without a compiler from the cubins in `tests/data/cubins`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from llbf16_aot.artifact import RECORD_SCHEMA, Artifact, Blob, Provenance, Record, Resources
from llbf16_aot.backends import (
    BACKENDS,
    OPERANDS,
    Config,
    DotprodConfig,
    SplitkConfig,
    backend_name,
)
from llbf16_aot.elf import read_cubin
from llbf16_aot.key import CompileKey, kernel_source_digest
from llbf16_aot.launch import Attribute, LaunchRecord, ParamSource
from llbf16_aot.problem import ALIGNMENT_BYTES, DType, Epilogue, Layout

CUBINS = Path(__file__).parent / "data" / "cubins"
FIXTURE_TARGETS = ("sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_120a")


def fixture_cubin(name: str) -> bytes:
    """The bytes of `tests/data/cubins/<name>.cubin`."""
    return (CUBINS / f"{name}.cubin").read_bytes()


def make_key(
    *,
    backend: str = "dotprod",
    target: str = "sm_90a",
    tokens: int = 1,
    hidden: int = 2048,
    split_k: int = 6,
    stages: int = 4,
    out_dtype: DType = DType.FP32,
    pdl: bool = True,
) -> CompileKey:
    """A key: `tokens` and `hidden` belong to dotprod, `split_k` and `stages` to splitk."""
    config: Config
    if backend == "dotprod":
        config = DotprodConfig(hidden=hidden, tokens=tokens, block=128, experts_per_block=1)
    else:
        config = SplitkConfig(split_k=split_k, stages=stages)
    return key_for(config, target=target, out_dtype=out_dtype, pdl=pdl)


def key_for(
    config: Config,
    *,
    target: str = "sm_90a",
    out_dtype: DType = DType.FP32,
    pdl: bool = True,
    x_dtype: DType = DType.BF16,
) -> CompileKey:
    """The key of a configuration, for the weights that its family takes."""
    return CompileKey(
        target=target,
        config=config,
        x_dtype=x_dtype,
        weight_dtype=OPERANDS[backend_name(config)][0][1],
        out_dtype=out_dtype,
        layout=Layout.K_MAJOR,
        alignment_bytes=ALIGNMENT_BYTES,
        epilogue=Epilogue.NONE,
        pdl=pdl,
    )


def artifact_for(
    key: CompileKey,
    *,
    cubin: bytes | None = None,
    toolchain: dict[str, str] | None = None,
    options: tuple[str, ...] = ("opt-level=3",),
    kernel_source_digest_text: str | None = None,
) -> Artifact:
    """A valid artifact for a key (target in FIXTURE_TARGETS, dotprod with block 128).

    Its cubin is a stand-in with the family's parameters: it loads, but computes nothing of use.
    """
    data = fixture_cubin(f"ptxas_{key.target}") if cubin is None else cubin
    symbol = f"fixture_{key.backend}"
    module = BACKENDS[key.backend]
    info = next(kernel for kernel in read_cubin(data).kernels if kernel.symbol == symbol)
    launch = LaunchRecord.assemble(
        symbol,
        module.geometry(key.config),
        attributes=(Attribute.PROGRAMMATIC_STREAM_SERIALIZATION,) if key.pdl else (),
        sources=module.PARAMS,
    )
    record = Record(
        schema=RECORD_SCHEMA,
        key=key,
        launch=launch,
        resources=Resources(
            registers=info.registers,
            static_shared_bytes=info.static_shared_bytes,
            local_bytes=info.local_bytes,
        ),
        provenance=Provenance(
            builder_version="0.1.0",
            toolchain={"nvidia-cutlass-dsl": "4.8.1"} if toolchain is None else toolchain,
            options=options,
            kernel_source_digest=kernel_source_digest_text or kernel_source_digest(key.backend),
        ),
        cubin=Blob.of(data),
    )
    return Artifact(record, data)


def compiled_artifact(number: int, *, size_bytes: int) -> Artifact:
    """An artifact with one kernel, as the compiler makes them, its cubin padded with zeros.

    Distinct for distinct numbers, with one cubin. It cannot be launched.
    """
    record = make_artifact().record
    cubin = fixture_cubin("dsl_sm_90a")
    cubin += bytes(size_bytes - len(cubin))
    (kernel,) = read_cubin(cubin).kernels
    config = DotprodConfig(hidden=2048, tokens=number, block=64, experts_per_block=1)
    launch = LaunchRecord.assemble(
        kernel.symbol,
        BACKENDS["dotprod"].geometry(config),
        attributes=record.launch.attributes,
        sources=(ParamSource.X, ParamSource.TOKENS),
    )
    key = msgspec.structs.replace(record.key, config=config)
    record = msgspec.structs.replace(record, key=key, launch=launch, cubin=Blob.of(cubin))
    return Artifact(record, cubin)


def make_artifact(**fields: object) -> Artifact:
    """`artifact_for(make_key(**fields))`: a valid artifact, distinct for distinct fields."""
    return artifact_for(make_key(**fields))  # type: ignore[arg-type]


def files_below(root: Path) -> dict[str, bytes]:
    """Every regular file below a folder, by its path inside the folder, with its bytes."""
    found: dict[str, bytes] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                found[str(path.relative_to(root))] = path.read_bytes()
    return found


def flipped(data: bytes, offsets: Iterable[int], mask: int = 0xFF) -> Iterable[tuple[int, bytes]]:
    """The bytes with one byte changed, for each offset in turn."""
    for offset in offsets:
        changed = bytearray(data)
        changed[offset] ^= mask
        yield offset, bytes(changed)
