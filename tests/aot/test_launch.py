"""The launch record: parameters lie where the CUDA ABI expects them, grids cover their problem."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llbf16_aot.launch import (
    Attribute,
    Extent,
    GridDim,
    LaunchGeometry,
    LaunchRecord,
    ParamKind,
    ParamSource,
)
from llbf16_aot.problem import Problem

C_TYPES = {
    ParamKind.POINTER: ctypes.c_void_p,
    ParamKind.INT32: ctypes.c_int32,
    ParamKind.FLOAT32: ctypes.c_float,
}
ONE = GridDim(Extent.ONE, 1, 1)
GEOMETRY = LaunchGeometry((ONE, ONE, ONE), (128, 1, 1), (1, 1, 1), 64)


def record_of(*sources: ParamSource) -> LaunchRecord:
    return LaunchRecord.assemble("kernel", GEOMETRY, attributes=(), sources=sources)


@given(st.lists(st.sampled_from(ParamSource), max_size=12))
def test_parameters_lie_where_a_c_struct_puts_them(sources: list[ParamSource]) -> None:
    """Catches a pointer after an odd number of integers that is not aligned to 8 bytes."""
    fields = [(f"p{i}", C_TYPES[source.kind]) for i, source in enumerate(sources)]
    struct = type("struct", (ctypes.Structure,), {"_fields_": fields})
    record = record_of(*sources)
    assert [(p.source, p.kind) for p in record.params] == [(s, s.kind) for s in sources]
    assert [(p.offset_bytes, p.size_bytes) for p in record.params] == [
        (getattr(struct, name).offset, getattr(struct, name).size) for name, _ in fields
    ]
    end = max((getattr(struct, n).offset + getattr(struct, n).size for n, _ in fields), default=0)
    assert record.params_size_bytes == end


def test_a_gap_is_left_before_a_pointer_that_follows_one_integer() -> None:
    """The same by hand, so that the comparison above cannot be wrong in both places."""
    record = record_of(ParamSource.TOKENS, ParamSource.X, ParamSource.HIDDEN)
    assert [p.offset_bytes for p in record.params] == [0, 8, 16]
    assert record.params_size_bytes == 20


def test_tensors_are_pointers_and_all_else_has_32_bits() -> None:
    """Catches a new source that gets the wrong kind by default."""
    pointers = {source for source in ParamSource if source.kind is ParamKind.POINTER}
    assert pointers == {ParamSource.X, ParamSource.WEIGHT, ParamSource.OUT, ParamSource.BIAS}
    floats = {source for source in ParamSource if source.kind is ParamKind.FLOAT32}
    assert floats == {ParamSource.SCALE}
    assert {kind: kind.size_bytes for kind in ParamKind} == {
        ParamKind.POINTER: 8,
        ParamKind.INT32: 4,
        ParamKind.FLOAT32: 4,
    }


def test_a_record_keeps_the_geometry_and_the_attributes_that_it_was_given() -> None:
    """Catches block and cluster, both triples of integers, in each other's place."""
    geometry = LaunchGeometry(
        (GridDim(Extent.EXPERTS, 2, 1), GridDim(Extent.TOKENS, 16, 1), GridDim(Extent.ONE, 1, 6)),
        (256, 1, 1),
        (1, 1, 6),
        4096,
    )
    attributes = (Attribute.PROGRAMMATIC_STREAM_SERIALIZATION,)
    record = LaunchRecord.assemble("kernel", geometry, attributes=attributes, sources=())
    assert record == LaunchRecord(
        symbol="kernel",
        grid=geometry.grid,
        block=(256, 1, 1),
        cluster=(1, 1, 6),
        dynamic_shared_bytes=4096,
        attributes=attributes,
        params=(),
    )


@pytest.mark.parametrize(
    ("dim", "blocks"),
    [
        (GridDim(Extent.ONE, 1, 6), 6),
        (GridDim(Extent.TOKENS, 16, 1), 1),
        (GridDim(Extent.TOKENS, 15, 1), 2),
        (GridDim(Extent.EXPERTS, 32, 2), 8),
        (GridDim(Extent.EXPERTS, 33, 2), 8),
        (GridDim(Extent.EXPERTS, 42, 1), 4),
        (GridDim(Extent.EXPERTS, 43, 1), 3),
    ],
)
def test_a_grid_extent_is_rounded_up_to_whole_tiles(dim: GridDim, blocks: int) -> None:
    """Catches tokens and experts in each other's place, and a last tile that is dropped."""
    assert dim.resolve(Problem(tokens=16, experts=128, hidden=2048)) == blocks
