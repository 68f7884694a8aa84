"""Launches captured into CUDA graphs and read back from the driver: ours, and CuTe DSL's own.

As a program, in a process that can import the compiler: captures both launches of every case on the
same tensors and writes them as JSON to the file that the first argument names. Exit status 77 where
the compiler or what it needs is not installed.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from llbf16_aot.artifact import Artifact
from llbf16_aot.backends import BACKENDS, Tile
from llbf16_aot.key import CompileKey
from llbf16_aot.launch import Attribute, LaunchRecord, ParamSource
from llbf16_aot.problem import DType, Epilogue, Problem, Target
from llbf16_aot.runtime import Runtime
from llbf16_aot.store import Store
from llbf16_aot.toolchain import COMPILE_OPTIONS

NO_COMPILER = 77
FAMILIES = ("dotprod", "splitk", "oneshot")
EXPERTS = 264
"""N of every case: no tile divides it evenly."""

TORCH_TYPES = {
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}


class Node(msgspec.Struct, frozen=True):
    """A kernel node as the driver tells it; `cooperative` and `cluster` are its attributes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    cooperative: int
    params: tuple[bytes, ...]


class Captured(msgspec.Struct, frozen=True):
    """Two equal launches, one behind the other, and whether the second is a dependent launch."""

    nodes: tuple[Node, Node]
    programmatic: bool


class Case(msgspec.Struct, frozen=True):
    """A stored kernel, and a problem that it computes."""

    key: CompileKey
    record: LaunchRecord
    tokens: int
    experts: int
    hidden: int

    def values(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> dict[str, int]:
        """Every value that a parameter can have, by the name of its source."""
        return {
            ParamSource.X.value: x.data_ptr(),
            ParamSource.WEIGHT.value: weight.data_ptr(),
            ParamSource.OUT.value: out.data_ptr(),
            ParamSource.TOKENS.value: self.tokens,
            ParamSource.EXPERTS.value: self.experts,
            ParamSource.HIDDEN.value: self.hidden,
            # A single row has no next one: the runtime passes K for it, whatever its stride.
            ParamSource.X_ROW_STRIDE.value: x.stride(0) if self.tokens > 1 else self.hidden,
            ParamSource.WEIGHT_ROW_STRIDE.value: weight.stride(0),
        }

    def promised(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Captured:
        """What the launch record says of the launch."""
        problem = Problem(self.tokens, self.experts, self.hidden)
        gx, gy, gz = (dim.resolve(problem) for dim in self.record.grid)
        values = self.values(x, weight, out)
        params = tuple(
            values[param.source.value].to_bytes(param.size_bytes, "little")
            for param in self.record.params
        )
        node = Node(
            (gx, gy, gz),
            self.record.block,
            self.record.cluster,
            self.record.dynamic_shared_bytes,
            0,
            params,
        )
        attribute = Attribute.PROGRAMMATIC_STREAM_SERIALIZATION
        return Captured((node, node), attribute in self.record.attributes)


def cases(store: Store) -> list[Case]:
    """One stored kernel of each family with and without dependent launch, for this GPU."""
    target = str(Target(*torch.cuda.get_device_capability(0), "a"))
    found: dict[tuple[str, bool], Case] = {}
    for digest in store.digests():
        artifact = store.get(digest)
        if not isinstance(artifact, Artifact):
            continue
        key = artifact.record.key
        place = (key.backend, key.pdl)
        plain = key.weight_dtype is DType.BF16 and key.epilogue is Epilogue.NONE
        if plain and key.target == target and key.backend in FAMILIES and place not in found:
            tokens = getattr(key.config, "tokens", 5)
            hidden = getattr(key.config, "hidden", 7168)
            found[place] = Case(key, artifact.record.launch, tokens, EXPERTS, hidden)
    return [found[place] for place in sorted(found)]


def operands(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and out of a case; rows of x lie further apart than K."""
    x = torch.randn((case.tokens, case.hidden + 64), device="cuda").bfloat16()[:, : case.hidden]
    weight = torch.randn((case.experts, case.hidden), device="cuda").bfloat16()
    out = torch.empty(
        (case.tokens, case.experts), dtype=TORCH_TYPES[case.key.out_dtype], device="cuda"
    )
    return x, weight, out


def our_call(
    case: Case, store: Store, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> Callable[[], object]:
    """A call of the runtime that takes this very kernel, by a tuning table that names its tile."""
    tile = _tile(case.key)
    table = {
        "schema": 1,
        "name": "launch-proof",
        "source": "one tile for every problem",
        "rules": [{"use": msgspec.to_builtins(tile)}],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.json"
        path.write_bytes(msgspec.json.encode(table))
        runtime = Runtime(store, tuning=str(path), pdl=case.key.pdl, on_miss="error")
        runtime.run(x, weight, out=out, out_dtype=out.dtype)
    return lambda: runtime.run(x, weight, out=out, out_dtype=out.dtype)


def _tile(key: CompileKey) -> Tile:
    """The tile that a configuration was made from: its fields without the static sizes."""
    family = BACKENDS[key.backend]
    kind = next(t for t in vars(family).values() if getattr(t, "__name__", "").endswith("Tile"))
    fields = {name: getattr(key.config, name) for name in kind.__struct_fields__}
    tile: Tile = kind(**fields)
    return tile


def dsl_call(
    case: Case, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> Callable[[int], object]:
    """The DSL's own compile and call of the same kernel, on a stream; needs the compiler."""
    import cutlass.cute as cute
    from cuda.bindings import driver as api
    from cutlass import Int32
    from cutlass.cute.runtime import make_ptr
    from llbf16_aot.kernels.common import ELEMENT_TYPES

    key = case.key
    family = importlib.import_module(f"llbf16_aot.kernels.{key.backend}")
    function, placeholders = family.entry(key.config, out_dtype=key.out_dtype, pdl=key.pdl)
    options = " ".join((f"--gpu-arch {key.target}", *COMPILE_OPTIONS))
    compiled = cute.compile(function, *placeholders, options=options)
    space = cute.AddressSpace.gmem
    types = {ParamSource.OUT: ELEMENT_TYPES[key.out_dtype]}
    values = case.values(x, weight, out)
    arguments: list[Any] = []
    for source in BACKENDS[key.backend].PARAMS:
        value = values[source.value]
        if source in (ParamSource.X, ParamSource.WEIGHT, ParamSource.OUT):
            element = types.get(source, ELEMENT_TYPES[DType.BF16])
            align = 16 if source is not ParamSource.OUT else element.width // 8
            arguments.append(make_ptr(element, value, space, assumed_align=align))
        else:
            arguments.append(Int32(value))
    # No epilogue: the kernel takes nothing for it, and the compiled call still asks for that.
    return lambda stream: compiled(*arguments, None, api.CUstream(stream))


def capture(call: Callable[[int], object], record: LaunchRecord) -> Captured:
    """Capture a call twice on a stream of its own, and read the graph that came of it."""
    from cuda.bindings import driver as api

    def value(result: tuple[Any, ...]) -> Any:
        if result[0]:
            raise RuntimeError(f"the driver answers {result[0]}")
        return result[1:] if len(result) > 2 else result[-1]

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(stream.cuda_stream)  # whatever a first call loads is loaded before the capture
        torch.cuda.synchronize()
        mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        value(api.cuStreamBeginCapture(stream.cuda_stream, mode))
        try:
            call(stream.cuda_stream)
            call(stream.cuda_stream)
        finally:
            graph = value(api.cuStreamEndCapture(stream.cuda_stream))
    try:
        nodes, count = value(api.cuGraphGetNodes(graph, 8))
        if count != 2:
            raise RuntimeError(f"two calls made {count} nodes")
        sources, destinations, data, edges = value(api.cuGraphGetEdges(graph, 8))
        if edges != 1:
            raise RuntimeError(f"two calls made {edges} edges")
        first, second = int(sources[0]), int(destinations[0])
        by_handle = {int(node): node for node in nodes[:2]}
        programmatic = api.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
        return Captured(
            (
                _node(api, value, by_handle[first], record),
                _node(api, value, by_handle[second], record),
            ),
            int(data[0].type) == int(programmatic),
        )
    finally:
        value(api.cuGraphDestroy(graph))


def _node(api: Any, value: Callable[[Any], Any], node: Any, record: LaunchRecord) -> Node:
    kind = value(api.cuGraphNodeGetType(node))
    if kind != api.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        raise RuntimeError(f"a call made a node of type {kind}")
    params = value(api.cuGraphKernelNodeGetParams(node))
    names = api.CUlaunchAttributeID
    attribute = api.cuGraphKernelNodeGetAttribute
    # The bindings' objects of a union's members point into it: it has to stay alive.
    cluster = value(attribute(node, names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION))
    dim = cluster.clusterDim
    cooperative = value(attribute(node, names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)).cooperative
    addresses = (ctypes.c_void_p * len(record.params)).from_address(int(params.kernelParams))
    return Node(
        (params.gridDimX, params.gridDimY, params.gridDimZ),
        (params.blockDimX, params.blockDimY, params.blockDimZ),
        # Where a launch names no cluster the driver tells zeros.
        (dim.x or 1, dim.y or 1, dim.z or 1),
        params.sharedMemBytes,
        int(cooperative),
        tuple(
            ctypes.string_at(address or 0, param.size_bytes)
            for address, param in zip(addresses, record.params, strict=True)
        ),
    )


class Pair(msgspec.Struct, frozen=True):
    """Both launches of a case."""

    case: str
    ours: Captured
    theirs: Captured


def main(out: str) -> int:
    """Capture both launches of every case."""
    try:
        import cutlass.cute  # noqa: F401
    except ImportError as error:
        print(f"the compiler cannot be imported: {error}", file=sys.stderr)
        return NO_COMPILER
    store = Store(Path(os.environ["LLBF16_AOT_STORE"]))
    pairs = []
    for case in cases(store):
        x, weight, result = operands(case)
        ours = our_call(case, store, x, weight, result)
        theirs = dsl_call(case, x, weight, result)
        pairs.append(
            Pair(
                str(case.key),
                capture(lambda _, ours=ours: ours(), case.record),  # type: ignore[misc]
                capture(theirs, case.record),
            )
        )
    Path(out).write_bytes(msgspec.json.encode(pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
