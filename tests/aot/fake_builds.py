"""Builds with a fake compiler: everything real but the compiler and what it would have made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_compiler import Deed
from llbf16_aot import check, elf, plan, pool, store, toolchain
from llbf16_aot.elf import KernelInfo
from llbf16_aot.launch import LaunchRecord
from llbf16_aot.problem import Target

VERSION = "1.2.3"
COMPILER = {"nvidia-cutlass-dsl": VERSION, "nvidia-cutlass-dsl-libs-base": VERSION}
FAKE = Path(__file__).with_name("fake_compiler.py")
COMMAND = (sys.executable, "-I", "-S", str(FAKE), VERSION)

SPILLS = b"spills"
"""A cubin that begins so has a kernel that spills."""


def check_fake_cubin(launch: LaunchRecord, target: Target, data: bytes) -> KernelInfo:
    """In place of the check of a real ELF: what the fake compiler answers is none."""
    del target
    return KernelInfo(
        symbol=launch.symbol,
        params=tuple((p.offset_bytes, p.size_bytes) for p in launch.params),
        registers=40,
        static_shared_bytes=0,
        local_bytes=16 if data.startswith(SPILLS) else 0,
        required_block=launch.block,
        largest_block=None,
        required_cluster=None,
    )


def use_fake_compiler(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Let every build of this process compile with the fake compiler."""
    for module in (check, plan, toolchain):
        monkeypatch.setattr(module, "toolchain", lambda: dict(COMPILER))
    monkeypatch.setattr(pool, "child_command", lambda: (*COMMAND, *arguments))
    monkeypatch.setattr(elf, "check_cubin", check_fake_cubin)
    monkeypatch.setattr(store, "check_cubin", check_fake_cubin)


def forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every compiler process fail as soon as it is started."""
    command = (sys.executable, "-I", "-S", "-c", "raise SystemExit('must not be started')")
    monkeypatch.setattr(pool, "child_command", lambda: command)


def manifest_text(
    *hidden: int | Deed,
    targets: str = "sm_90a",
    tokens: str = "1-3",
    out_dtype: str = "fp32",
    pdl: str = "true",
) -> str:
    """A manifest with a router for each hidden size, which is what the fake compiler acts on."""
    lines = [
        "schema: 1",
        "name: tiny",
        f"targets: [{targets}]",
        "defaults:",
        f"  tokens: {tokens}",
        "  x_dtype: bf16",
        "  weight_dtype: bf16",
        f"  out_dtype: {out_dtype}",
        f"  pdl: {pdl}",
        "  tuning: reference",
        "routers:",
    ]
    for size in hidden:
        lines += [f"  - model: router-{int(size)}", f"    hidden: {int(size)}", "    experts: 32"]
    return "\n".join(lines) + "\n"
