"""Records: read back only from the very bytes that they encode to, whatever is done to them."""

from __future__ import annotations

import hashlib
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llbf16_aot.artifact import RECORD_SCHEMA, Artifact, Blob, Provenance, Record, Resources
from llbf16_aot.backends import BACKENDS, SplitkConfig
from llbf16_aot.errors import DamagedEntryError
from llbf16_aot.key import CompileKey
from llbf16_aot.launch import Attribute, LaunchRecord
from llbf16_aot.problem import DType, Epilogue, Layout

CUBIN = b"machine code"
CONFIG = SplitkConfig(split_k=6, stages=4)
RECORD = Record(
    schema=RECORD_SCHEMA,
    key=CompileKey(
        target="sm_90a",
        config=CONFIG,
        x_dtype=DType.BF16,
        weight_dtype=DType.BF16,
        out_dtype=DType.FP32,
        layout=Layout.K_MAJOR,
        alignment_bytes=16,
        epilogue=Epilogue.NONE,
        pdl=True,
    ),
    launch=LaunchRecord.assemble(
        "kernel",
        BACKENDS["splitk"].geometry(CONFIG),
        attributes=(Attribute.PROGRAMMATIC_STREAM_SERIALIZATION,),
        sources=BACKENDS["splitk"].PARAMS,
    ),
    resources=Resources(registers=64, static_shared_bytes=1024, local_bytes=0),
    provenance=Provenance(
        builder_version="0.1.0",
        toolchain={"nvidia-cutlass-dsl": "4.8.1"},
        options=("--opt-level 3",),
        kernel_source_digest="5" * 64,
    ),
    cubin=Blob.of(CUBIN),
)
ENCODED = RECORD.encode()


def test_a_record_comes_back_as_it_was_written() -> None:
    """Catches a field that is lost or changed on the way through JSON."""
    assert Record.decode(ENCODED) == RECORD
    assert Record.decode(ENCODED).encode() == ENCODED


def test_a_record_is_readable_by_any_json_reader() -> None:
    """Catches a binary or private form: people and other tools read stores too."""
    data = json.loads(ENCODED)
    assert data["schema"] == 1
    assert data["key"]["config"] == {
        "backend": "splitk",
        "split_k": 6,
        "stages": 4,
        "experts_tile": 16,
        "hidden_tile": 256,
    }
    assert data["launch"]["params"][0] == {
        "kind": "pointer",
        "offset_bytes": 0,
        "size_bytes": 8,
        "source": "x",
    }
    assert data["cubin"] == {
        "digest": hashlib.sha256(CUBIN).hexdigest(),
        "size_bytes": len(CUBIN),
    }


def test_the_digest_is_that_of_the_key_with_the_sources_it_was_built_from() -> None:
    """Catches a record that is filed under the digest of the sources of today."""
    wanted = RECORD.key.digest_for("5" * 64)
    assert RECORD.digest == Artifact(RECORD, CUBIN).digest == wanted
    assert RECORD.digest != RECORD.key.digest()


def test_a_blob_names_exactly_its_bytes() -> None:
    """Catches a comparison by size alone or by digest alone."""
    blob = Blob.of(CUBIN)
    assert blob.matches(CUBIN)
    assert not blob.matches(CUBIN[:-1] + b"!")
    assert not blob.matches(CUBIN + b"!")
    assert not msgspec.structs.replace(blob, size_bytes=len(CUBIN) + 1).matches(CUBIN)


def replace_once(old: bytes, new: bytes) -> bytes:
    assert ENCODED.count(old) == 1, old
    return ENCODED.replace(old, new)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "cannot be read"),
        (b"null", "cannot be read"),
        (ENCODED[:-1], "cannot be read"),
        (ENCODED + b"}", "cannot be read"),
        (ENCODED + b"\n", "canonical"),
        (b" " + ENCODED, "canonical"),
        (json.dumps(json.loads(ENCODED)).encode(), "canonical"),
        (replace_once(b'"pdl":true', b'"pdl":1'), "cannot be read"),
        (replace_once(b'"pdl":true', b'"pdl":"true"'), "cannot be read"),
        (replace_once(b'"registers":64', b'"registers":64.0'), "record"),
        (replace_once(b'"registers":64', b'"registers":6.4e1'), "record"),
        (replace_once(b'"registers":64', b'"registers":"64"'), "cannot be read"),
        (replace_once(b'"registers":64', b'"registers":064'), "cannot be read"),
        (replace_once(b'"registers":64', b'"registers":64,"x":1'), "unknown field"),
        (replace_once(b'"registers":64', b'"registers":64,"registers":64'), "canonical"),
        (replace_once(b'"registers":64', b'"registers":1' + b"0" * 5000), "cannot be read"),
        (replace_once(b'"registers":64,', b""), "missing required field"),
        (replace_once(b'"symbol":"kernel"', b'"symbol":"kern\\u0065l"'), "canonical"),
        (replace_once(b'"symbol":"kernel"', b'"symbol":"\xff\xfe"'), "cannot be read"),
        (replace_once(b'"symbol":"kernel"', b'"symbol":"\\ud800"'), "cannot be read"),
        (replace_once(b'"schema":1', b'"schema":2'), "schema 2, this version reads 1"),
        (replace_once(b'"schema":1', b'"schema":0'), "schema 0, this version reads 1"),
        (replace_once(b'"sm_90a"', b"[" * 100_000), "cannot be read"),
    ],
)
def test_a_record_in_any_other_form_is_damaged(data: bytes, complaint: str) -> None:
    """Catches a lenient reader: two forms of one record, or an error outside our base class."""
    with pytest.raises(DamagedEntryError) as caught:
        Record.decode(data)
    assert complaint in caught.value.message


FRAGMENTS = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b".", b"e9", b"true", b"null")


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """The record's bytes after one to four cuts, insertions, repetitions and changed bytes."""
    data = bytearray(ENCODED)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(len(data) - 1, 0)))
        end = start + draw(st.integers(0, 24))
        kind = draw(st.sampled_from(("change", "cut", "insert", "repeat", "digit")))
        if kind == "change" and data:
            data[start] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[start:end]
        elif kind == "insert":
            fragment = st.one_of(st.binary(max_size=4), st.sampled_from(FRAGMENTS))
            data[start:start] = draw(fragment)
        elif kind == "repeat":
            data[start:start] = data[start:end]
        else:
            digits = [i for i, byte in enumerate(data) if 0x30 <= byte <= 0x39]
            if digits:
                data[draw(st.sampled_from(digits))] = draw(st.integers(0x30, 0x39))
    return bytes(data)


@settings(max_examples=2000, deadline=None)
@given(mutations())
def test_bytes_are_accepted_only_if_they_encode_back_to_themselves(data: bytes) -> None:
    """Catches bytes that read as a record but are not one, and any exception of another kind."""
    try:
        record = Record.decode(data)
    except DamagedEntryError:
        return
    assert record.encode() == data
    assert (record == RECORD) == (data == ENCODED)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_damaged(data: bytes) -> None:
    """Catches an exception outside our base class for what a disk may return."""
    with pytest.raises(DamagedEntryError):
        Record.decode(data)
