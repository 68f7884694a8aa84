"""The toolchain is told without importing it, and what is told is true."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import pytest
from llbf16_aot import toolchain as module
from llbf16_aot.backends import ProbeConfig
from llbf16_aot.elf import read_cubin
from llbf16_aot.errors import CompileError
from llbf16_aot.key import check_target
from llbf16_aot.pool import CompilerPool
from llbf16_aot.problem import Target
from llbf16_aot.toolchain import COMPILER, KNOWN_TARGETS, toolchain
from support import key_for


@pytest.fixture
def nothing_remembered() -> Iterator[None]:
    module._versions.cache_clear()
    yield
    module._versions.cache_clear()


def test_a_missing_compiler_is_none(
    monkeypatch: pytest.MonkeyPatch, nothing_remembered: None
) -> None:
    """Catches PackageNotFoundError on machines that only run kernels."""

    def nothing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", nothing)
    assert toolchain() is None


@pytest.mark.compiler
def test_every_library_of_the_compiler_is_named() -> None:
    """Catches stale artifacts after an upgrade of a library that holds the code generator."""
    installed = {
        name: distribution.version
        for distribution in metadata.distributions()
        if (name := distribution.metadata["Name"]) == COMPILER
        or name.startswith(f"{COMPILER}-libs-")
    }
    assert len(installed) > 1
    assert toolchain() == installed


@pytest.mark.compiler
def test_asking_for_the_toolchain_imports_no_compiler() -> None:
    """Catches half a second of import in every `build` that has nothing to do."""
    code = (
        "import sys; from llbf16_aot.toolchain import toolchain; toolchain(); "
        "sys.exit('cutlass' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.compiler
def test_the_known_targets_are_those_that_the_installed_compiler_compiles() -> None:
    """Catches a list that an upgrade made wrong, and a target that only the DSL has heard of."""
    code = "from cutlass.base_dsl.enums import Arch; print(*(a.name for a in Arch))"
    names = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    versions = toolchain()
    assert versions is not None
    usable = []
    with CompilerPool(jobs=1, version=versions[COMPILER], limit_s=120.0) as pool:
        for name in names:
            target = Target.parse(name)
            if target.major < 9 or not target.suffix:
                continue
            check_target(target)
            try:
                compiled = pool.compile(key_for(ProbeConfig("empty"), target=name))
            except CompileError:
                continue
            assert read_cubin(compiled.cubin).target == target
            usable.append(name)
    assert set(KNOWN_TARGETS) == set(usable)
