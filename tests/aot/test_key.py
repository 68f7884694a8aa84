"""The compile key: every field counts, the digest is injective, stable and covers the sources."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llbf16_aot import key as key_module
from llbf16_aot.backends import (
    BACKENDS,
    OPERANDS,
    Bf16x3Config,
    Config,
    DotprodConfig,
    Fp32Config,
    OneshotConfig,
    ProbeConfig,
    SplitkConfig,
    backend_name,
)
from llbf16_aot.errors import ConfigError, TargetError
from llbf16_aot.key import (
    DIGEST_PATTERN,
    CompileKey,
    canonical_json,
    check_target,
    kernel_source_digest,
    source_files,
)
from llbf16_aot.problem import DType, Epilogue, Layout, Target

PACKAGE = Path(key_module.__file__).parent
NO_SOURCES = "0" * 64

CONFIGS: dict[str, Config] = {
    "dotprod": DotprodConfig(hidden=7168, tokens=1, block=128, experts_per_block=1),
    "splitk": SplitkConfig(split_k=6, stages=4),
    "oneshot": OneshotConfig(hidden=7168, tokens=8, experts_tile=8, split_k=4, warps=8, vectors=2),
    "fp32": Fp32Config(
        hidden=6144, tokens=8, experts_tile=16, experts_per_thread=4, split_k=8, warps=8, vectors=3
    ),
    "bf16x3": Bf16x3Config(tokens_tile=64, experts_tile=64, k_warps=2, split_k=8, stages=3),
    "probe": ProbeConfig("producer"),
}


def make(backend: str, **changes: object) -> CompileKey:
    base = CompileKey(
        target="sm_90a",
        config=CONFIGS[backend],
        x_dtype=DType.BF16,
        weight_dtype=OPERANDS[backend][0][1],
        out_dtype=DType.FP32,
        layout=Layout.K_MAJOR,
        alignment_bytes=16,
        epilogue=Epilogue.NONE,
        pdl=True,
    )
    return msgspec.structs.replace(base, **changes)


def other_values(value: object) -> tuple[object, ...]:
    """What a field may hold beside its value: the enum's other members, a number's neighbours."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value - 1, value + 1, value * 10)
    if isinstance(value, DType | Layout | Epilogue):
        return tuple(member for member in type(value) if member is not value)
    if isinstance(value, str):
        return ("sm_100a", "sm_103a", "sm_120a", "sm_90", "sm_90f")
    raise TypeError(f"say here how to perturb {value!r}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_field_alone_changes_the_digest(backend: str) -> None:
    """Catches a field that is left out of the identity: two specialisations under one name."""
    base = make(backend)
    keys = [base, *(make(other) for other in CONFIGS if other != backend)]
    for field in CompileKey.__struct_fields__:
        if field != "config":
            keys += [make(backend, **{field: v}) for v in other_values(getattr(base, field))]
    for field in base.config.__struct_fields__:
        for value in other_values(getattr(base.config, field)):
            config = msgspec.structs.replace(base.config, **{field: value})
            keys.append(make(backend, config=config))
    digests = [key.digest_for(NO_SOURCES) for key in keys]
    assert len(set(digests)) == len(keys)
    assert len(keys) > len(CompileKey.__struct_fields__) + 2 * len(base.config.__struct_fields__)
    assert all(DIGEST_PATTERN.fullmatch(digest) for digest in digests)


def test_families_are_told_apart_even_where_their_fields_are_equal() -> None:
    """Catches a key whose configuration lost the name of its family."""
    tags = {backend_name(config): json.loads(canonical_json(config)) for config in CONFIGS.values()}
    assert {name: data["backend"] for name, data in tags.items()} == {
        name: name for name in BACKENDS
    }


def test_the_key_schema_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a new meaning of the fields under which older artifacts would still be found."""
    before = make("splitk").digest_for(NO_SOURCES)
    monkeypatch.setattr(key_module, "KEY_SCHEMA", key_module.KEY_SCHEMA + 1)
    assert make("splitk").digest_for(NO_SOURCES) != before


GOLDEN_JSON = (
    b'{"alignment_bytes":16,"config":{"backend":"splitk","experts_tile":16,"hidden_tile":256,'
    b'"split_k":6,"stages":4},'
    b'"epilogue":"none","layout":"k_major","out_dtype":"fp32","pdl":true,"target":"sm_90a",'
    b'"weight_dtype":"bf16","x_dtype":"bf16"}'
)


def test_canonical_json_is_sorted_compact_and_stable() -> None:
    """Catches an order that follows the declaration: moving a field would lose every artifact."""
    assert canonical_json(make("splitk")) == GOLDEN_JSON
    assert msgspec.json.decode(GOLDEN_JSON, type=CompileKey) == make("splitk")


@pytest.mark.parametrize(
    ("backend", "digest"),
    [
        ("dotprod", "f4e98731b1f5038780ce8cdce791a09e1494f2ce564baf788e6fec6a31782b04"),
        ("splitk", "7cc492af2a7a2a1e8ff2f1632272d4f4a8d8c66845a87cf5c55c66126c9ff29b"),
    ],
)
def test_golden_digests(backend: str, digest: str) -> None:
    """Catches a changed identity. Where it is wanted, raise KEY_SCHEMA and say so in CHANGELOG."""
    assert make(backend).digest_for(NO_SOURCES) == digest


def test_the_digest_is_sha256_over_length_prefixed_parts() -> None:
    """Catches another form of the identity; written down independently of the code."""
    whole = b"1:1" + b"%d:" % len(GOLDEN_JSON) + GOLDEN_JSON + b"64:" + NO_SOURCES.encode()
    assert make("splitk").digest_for(NO_SOURCES) == hashlib.sha256(whole).hexdigest()


@given(st.text("ab:1", max_size=6), st.text("ab:1", max_size=6), st.integers(1, 6))
def test_a_byte_that_moves_from_one_part_to_the_next_changes_the_digest(
    first: str, second: str, shift: int
) -> None:
    """Catches plain concatenation: ("ab", "c") and ("a", "bc") would be one identity."""
    with pytest.MonkeyPatch.context() as patch:

        def digest(encoded: str, source: str) -> str:
            patch.setattr(key_module, "canonical_json", lambda _: encoded.encode())
            return make("splitk").digest_for(source)

        moved = (first[:-shift], first[-shift:] + second)
        assert (digest(first, second) == digest(*moved)) == ((first, second) == moved)


def test_digest_uses_the_digest_of_the_installed_sources() -> None:
    """Catches an identity without the source: old machine code would serve a new kernel."""
    for backend in BACKENDS:
        key = make(backend)
        assert key.digest() == key.digest_for(kernel_source_digest(backend))
        assert key.digest() != key.digest_for(NO_SOURCES)


def test_a_key_prints_every_part_of_its_configuration() -> None:
    """Catches messages in which two different kernels read the same."""
    assert str(make("splitk")) == (
        "splitk split_k=6 stages=4 experts_tile=16 hidden_tile=256 "
        "bf16 x bf16 -> fp32 pdl=on sm_90a"
    )
    texts = {str(make("splitk", **change)) for change in ({}, {"pdl": False}, {"target": "sm_80"})}
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"target": "sm_90"}, TargetError, "sm_90"),
        ({"target": "sm_80"}, TargetError, "sm_80"),
        ({"target": "gfx942"}, TargetError, "gfx942"),
        ({"x_dtype": DType.FP16}, ConfigError, "fp16 x bf16, must be bf16 x bf16"),
        ({"x_dtype": DType.FP32}, ConfigError, "fp32 x bf16, must be bf16 x bf16"),
        ({"weight_dtype": DType.FP32}, ConfigError, "bf16 x fp32, must be bf16 x bf16"),
        ({"config": SplitkConfig(split_k=9, stages=4)}, ConfigError, "split_k is 9"),
    ],
)
def test_a_key_that_cannot_become_a_kernel_is_refused(
    changes: dict[str, object], error: type[Exception], named: str
) -> None:
    """Catches a key from a stored or crafted record that reaches the compiler unchecked."""
    with pytest.raises(error, match=named):
        make("splitk", **changes).check()


def test_good_keys_pass_their_check() -> None:
    """Catches a check that refuses everything."""
    for backend in BACKENDS:
        for target in ("sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_120a"):
            for x_dtype, weight_dtype in OPERANDS[backend]:
                make(backend, target=target, x_dtype=x_dtype, weight_dtype=weight_dtype).check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_operands_of_another_family_are_refused(backend: str) -> None:
    """Catches fp32 bytes that a bf16 kernel would read as twice as many numbers."""
    for x_dtype in DType:
        for weight_dtype in DType:
            key = make(backend, x_dtype=x_dtype, weight_dtype=weight_dtype)
            if (x_dtype, weight_dtype) in OPERANDS[backend]:
                key.check()
            else:
                with pytest.raises(ConfigError, match=f"{x_dtype.value} x {weight_dtype.value}"):
                    key.check()


def test_a_refused_target_comes_with_a_target_to_use() -> None:
    """Catches an error about the missing suffix that does not say how to write it."""
    with pytest.raises(TargetError) as plain:
        check_target(Target.parse("sm_100"))
    assert "sm_100a" in plain.value.hint
    with pytest.raises(TargetError) as old:
        check_target(Target.parse("sm_89"))
    assert "sm_90a" in old.value.hint


# --- The kernel source digest ----------------------------------------------------------------

DIGESTS = """
import json, sys
from pathlib import Path
import llbf16_aot
from llbf16_aot.backends import BACKENDS
from llbf16_aot.key import kernel_source_digest

root = Path(llbf16_aot.__file__).parent
assert root == Path(sys.argv[1]), root

def digests():
    kernel_source_digest.cache_clear()
    return {backend: kernel_source_digest(backend) for backend in BACKENDS}

changed = {}
for relative in json.loads(sys.argv[2]):
    path = root / relative
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    now = digests()
    path.write_bytes(data)
    before = digests()
    changed[relative] = sorted(backend for backend in BACKENDS if now[backend] != before[backend])
print(json.dumps({"digests": digests(), "changed": changed}))
"""


def copy_package(folder: Path) -> Path:
    """The package laid out as the wheel lays it out, below a folder for PYTHONPATH."""
    root = folder / "llbf16_aot"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, root, ignore=ignore)
    if not (root / "kernels").exists():
        kernels = Path(source_files("splitk")["kernels/splitk.py"]).parent
        shutil.copytree(kernels, root / "kernels", ignore=ignore)
    return root


def digests_in(root: Path, files: list[str]) -> dict[str, dict[str, object]]:
    """Digests by the package at `root`, and which of them a changed byte of each file changes."""
    done = subprocess.run(
        (sys.executable, "-B", "-c", DIGESTS, str(root), json.dumps(files)),
        env={"PATH": os.defpath, "PYTHONPATH": str(root.parent)},
        check=True,
        capture_output=True,
        text=True,
    )
    data: dict[str, dict[str, object]] = json.loads(done.stdout)
    return data


def test_one_byte_of_a_source_changes_the_digests_of_its_families_alone(tmp_path: Path) -> None:
    """Catches a stale kernel that is served after its source, or what it inlines, has changed."""
    sources = {backend: set(BACKENDS[backend].SOURCES) for backend in BACKENDS}
    files = sorted(
        {*set().union(*sources.values()), "cli/app.py", "store.py", "kernels/__init__.py"}
    )
    found = digests_in(copy_package(tmp_path), files)["changed"]
    assert found == {
        file: sorted(backend for backend in BACKENDS if file in sources[backend]) for file in files
    }


def test_the_digest_does_not_depend_on_where_the_package_lies(tmp_path: Path) -> None:
    """Catches absolute paths in the digest: an image would miss what the build machine compiled."""
    here = {backend: kernel_source_digest(backend) for backend in BACKENDS}
    assert digests_in(copy_package(tmp_path / "some" / "where"), [])["digests"] == here


def test_sources_that_trade_places_change_the_digest(tmp_path: Path) -> None:
    """Catches a digest over contents alone: code that moved elsewhere compiles differently."""
    root = copy_package(tmp_path)
    before = digests_in(root, [])["digests"]
    # Sources of splitk that the program above does not run.
    first, second = root / "kernels" / "common.py", root / "kernels" / "splitk.py"
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert digests_in(root, [])["digests"]["splitk"] != before["splitk"]


def test_text_that_moves_from_one_source_to_the_next_changes_the_digest(tmp_path: Path) -> None:
    """Catches files that are hashed without their lengths.

    Both pairs of contents give the same bytes once each file's name is put before it and all is
    joined: first + name + second.
    """
    root = copy_package(tmp_path)
    first, second = root / "kernels" / "common.py", root / "kernels" / "splitk.py"
    digests = []
    for contents in (("# a", "# bkernels/splitk.py# c"), ("# akernels/splitk.py# b", "# c")):
        first.write_text(contents[0])
        second.write_text(contents[1])
        digests.append(digests_in(root, [])["digests"]["splitk"])
    assert digests[0] != digests[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_source_files_are_the_files_of_the_installed_package(backend: str) -> None:
    """Catches a path that resolves to a module of another package or to a folder."""
    files = source_files(backend)
    assert tuple(files) == BACKENDS[backend].SOURCES
    for relative, path in files.items():
        assert path.is_file()
        assert path.name == Path(relative).name
        if "/" in relative:
            assert path.parent.name == Path(relative).parent.name


def test_a_source_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a digest that quietly skips a file."""
    monkeypatch.setattr(BACKENDS["splitk"], "SOURCES", ("kernels/nothing.py",))
    with pytest.raises(ConfigError, match=r"kernels/nothing\.py.*splitk") as caught:
        source_files("splitk")
    assert "reinstall" in caught.value.hint
