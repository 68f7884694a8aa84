"""What bench_host times in one cell: each row a statement, its answer checked beforehand."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from bench_launch import WAYS, Launch, Statement, load
from host_report import FLOOR, JIT, LINEAR, OURS
from llbf16_aot import load_and_run
from llbf16_aot.artifact import Artifact
from llbf16_aot.dispatch import dispatch, load_table
from llbf16_aot.errors import NotFoundError
from llbf16_aot.key import CompileKey
from llbf16_aot.launch import Attribute, ParamSource
from llbf16_aot.problem import Problem, Target
from llbf16_aot.runtime import Runtime
from llbf16_aot.runtime import stats as process_stats
from llbf16_aot.store import Store
from torch.nn import functional

__all__ = ["Bench", "Row", "WrongAnswerError", "check", "prepared"]

OUR_LIMIT, MM_LIMIT, LINEAR_LIMIT = 2e-6, 1e-5, 3e-3
"""Largest relative Frobenius error against float64: ours, torch's fp32 output, its bf16 output."""


OP = "torch.ops.llbf16.router_gemm"

EMPTY = "empty(shape, dtype=dtype, device=device)"
"""The output's allocation, as user code writes it."""


class WrongAnswerError(Exception):
    """A row computed something else than the product."""


class Row(NamedTuple):
    """A statement to be timed; `made` tells what it makes.

    "product": it gives the product, as its value or under the name `made`. "out": it writes the
    product to the bench's out. "nothing": it computes no product.
    """

    text: str
    names: dict[str, Any]
    made: Literal["product", "out", "nothing"] = "product"
    limit: float = OUR_LIMIT


class Maker(NamedTuple):
    """How to make a row. Where that fails, an optional row is left out with the reason."""

    name: str
    make: Callable[[], Row]
    optional: bool = True


class Bench:
    """The rows of a store on device 0, which must be a CUDA device with a context."""

    def __init__(self, store: Store, *, compiler: bool) -> None:
        self.store = store
        self.compiler = compiler
        self.target = Target(*torch.cuda.get_device_capability(0), "a")
        self.unavailable: dict[str, str] = {}
        self.runtimes = {
            "Runtime.run": Runtime(store, on_miss="error"),
            "Runtime.run, pdl=True": Runtime(store, on_miss="error", pdl=True),
            "Runtime.run, pdl=False": Runtime(store, on_miss="error", pdl=False),
        }

    def rows(self, hidden: int, experts: int, tokens: int) -> dict[str, Statement]:
        """Every row that this machine offers, each run once and its answer checked.

        What is not offered is in `unavailable`, with the reason. Raises WrongAnswerError, and
        MissError or NotFoundError where the store lacks a kernel.
        """
        x = torch.randn((tokens, hidden), device="cuda").bfloat16()
        weight = torch.randn((experts, hidden), device="cuda").bfloat16()
        out = torch.empty((tokens, experts), device="cuda")
        exact = x.double() @ weight.double().t()
        names = {"x": x, "w": weight, "out": out, "dtype": torch.float32, "empty": torch.empty}
        names |= {"shape": tuple(out.shape), "device": out.device}
        found: dict[str, Statement] = {}
        for maker in self._makers(self._artifact(x, weight), x, weight, out):
            try:
                row = maker.make()
                statement = Statement(row.text, {**names, **row.names})
                check(maker.name, statement, row, out, exact)
            except WrongAnswerError:
                raise
            except Exception as error:
                if not maker.optional:
                    raise
                reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
                self.unavailable[maker.name] = reason
            else:
                found[maker.name] = statement
        return found

    def check_stored(self) -> None:
        """Raise WrongAnswerError where torch computed a call: its cost is not ours."""
        found = {name: runtime.stats() for name, runtime in self.runtimes.items()}
        for name, stats in {**found, OURS: process_stats()}.items():
            by_torch = stats.fallbacks + stats.library
            if by_torch:
                raise WrongAnswerError(f"{name}: torch computed {by_torch} of the calls")

    def _makers(
        self, artifact: Artifact, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
    ) -> Iterator[Maker]:
        yield Maker(
            LINEAR,
            lambda: Row("linear(x, w)", {"linear": functional.linear}, limit=LINEAR_LIMIT),
            optional=False,
        )
        yield Maker(
            "torch.mm, fp32",
            lambda: Row("mm(x, w.t(), out_dtype=dtype)", {"mm": torch.mm}, limit=MM_LIMIT),
        )
        yield Maker("torch.empty", lambda: Row(EMPTY, {}, made="nothing"), optional=False)
        yield Maker(
            "x.new_empty", lambda: Row("x.new_empty(shape, dtype=dtype)", {}, made="nothing")
        )
        yield Maker("empty_strided_cuda", _strided)
        yield Maker("raw stream", _raw_stream)
        launch = prepared(artifact, x, weight, out, torch.cuda.current_stream().cuda_stream)
        for way, make in WAYS.items():
            # One way at least must be there: without a floor there is nothing to compare with.
            optional = way != "cuda.bindings"
            yield Maker(f"launch, {way}", partial(_bare, make, launch), optional)
            yield Maker(f"{FLOOR}{way}", partial(_after_empty, make, launch), optional)
        yield Maker(OURS, lambda: Row("run(x, w)", {"run": load_and_run}), optional=False)
        yield Maker(
            f"{OURS}, out=",
            lambda: Row("run(x, w, out=out)", {"run": load_and_run}, made="out"),
            optional=False,
        )
        for name, runtime in self.runtimes.items():
            yield Maker(name, partial(Row, "run(x, w)", {"run": runtime.run}), optional=False)
        run = self.runtimes["Runtime.run"].run
        yield Maker(
            "Runtime.run, out=",
            lambda: Row("run(x, w, out=out)", {"run": run}, made="out"),
            optional=False,
        )
        yield Maker(OP, partial(_op, "router_gemm"), optional=False)
        yield Maker(f"{OP}.default", partial(_op, "router_gemm.default"), optional=False)
        yield Maker(f"{OP}_out", _op_out, optional=False)
        if self.compiler:
            key = artifact.record.key
            yield Maker(JIT, partial(_dsl, key, own_stream=False))
            yield Maker(f"{JIT}, stream from torch by TVM-FFI", partial(_dsl, key, own_stream=True))

    def _artifact(self, x: torch.Tensor, weight: torch.Tensor) -> Artifact:
        """The artifact that serves a problem, with dependent launch where it is stored."""
        table = load_table("default", self.target)
        problems = (
            Problem(x.shape[0], weight.shape[0], x.shape[1], pdl=pdl) for pdl in (True, False)
        )
        keys = [dispatch(problem, self.target, table) for problem in problems]
        for key in keys:
            artifact = self.store.get(key.digest())
            if isinstance(artifact, Artifact):
                return artifact
        raise NotFoundError(
            f"{self.store.root} lacks {keys[0]}",
            hint="build the manifest that `scripts/bench_host.py manifest` writes",
        )


def prepared(
    artifact: Artifact, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, stream: int
) -> Launch:
    """A launch of a stored kernel, as its launch record has it, with everything filled in."""
    record = artifact.record.launch
    problem = Problem(x.shape[0], weight.shape[0], x.shape[1])
    gx, gy, gz = (dim.resolve(problem) for dim in record.grid)
    values = {
        ParamSource.X: x.data_ptr(),
        ParamSource.WEIGHT: weight.data_ptr(),
        ParamSource.OUT: out.data_ptr(),
        ParamSource.TOKENS: x.shape[0],
        ParamSource.EXPERTS: weight.shape[0],
        ParamSource.HIDDEN: x.shape[1],
        ParamSource.X_ROW_STRIDE: x.stride(0),
        ParamSource.WEIGHT_ROW_STRIDE: weight.stride(0),
    }
    shared_bytes = record.dynamic_shared_bytes
    return Launch(
        kernel=load(artifact.cubin, record.symbol, dynamic_shared_bytes=shared_bytes),
        symbol=record.symbol,
        cubin=artifact.cubin,
        grid=(gx, gy, gz),
        block=record.block,
        cluster=record.cluster,
        dynamic_shared_bytes=shared_bytes,
        programmatic=Attribute.PROGRAMMATIC_STREAM_SERIALIZATION in record.attributes,
        params=tuple((values[param.source], param.size_bytes) for param in record.params),
        stream=stream,
    )


def _strided() -> Row:
    strided = vars(torch._C._dynamo.guards)["_empty_strided_cuda"]
    return Row("strided(shape, (shape[1], 1), dtype)", {"strided": strided}, made="nothing")


def _raw_stream() -> Row:
    stream = torch._C._cuda_getCurrentRawStream
    return Row("made = stream(0)\nNone", {"stream": stream}, made="nothing")


def _bare(make: Callable[[Launch], Statement], launch: Launch) -> Row:
    statement = make(launch)
    return Row(statement.text, statement.names, made="out")


def _after_empty(make: Callable[[Launch], Statement], launch: Launch) -> Row:
    """An allocation, then a launch that writes to a place of its own."""
    statement = make(launch)
    return Row(f"{EMPTY}\n{statement.text}", statement.names, made="out")


def _op(name: str) -> Row:
    # Importing the module registers the operators.
    importlib.import_module("llbf16_aot.ops")
    return Row("op(x, w, dtype)", {"op": attrgetter(name)(torch.ops.llbf16)})


def _op_out() -> Row:
    importlib.import_module("llbf16_aot.ops")
    return Row("op(x, w, out)", {"op": torch.ops.llbf16.router_gemm_out}, made="out")


def _dsl(key: CompileKey, *, own_stream: bool) -> Row:
    """The DSL's call of a kernel that it compiled itself, into an output allocated for the call."""
    import bench_jit

    names = {"call": bench_jit.compile_call(key, own_stream=own_stream)}
    if own_stream:
        return Row(f"made = {EMPTY}\ncall(x, w, made)", names)
    names |= {"stream_of": bench_jit.stream_of, "current_stream": torch.cuda.current_stream}
    stream = "stream_of(current_stream().cuda_stream)"
    return Row(f"made = {EMPTY}\ncall(x, w, made, {stream})", names)


def check(
    name: str, statement: Statement, row: Row, out: torch.Tensor, exact: torch.Tensor
) -> None:
    """Run a row once; raises WrongAnswerError where it does not give the product.

    out [M, N] is poisoned first, exact [M, N] is float64.
    """
    out.fill_(float("nan"))
    made = statement.run()
    if row.made == "nothing":
        return
    result = out if row.made == "out" else made
    if not isinstance(result, torch.Tensor) or result.shape != exact.shape:
        raise WrongAnswerError(f"{name}: gave {type(result).__name__}, wanted {exact.shape}")
    error = float((result.double() - exact).norm() / exact.norm())
    if not error <= row.limit:
        raise WrongAnswerError(f"{name}: relative error {error:.2e}, allowed {row.limit:.0e}")
