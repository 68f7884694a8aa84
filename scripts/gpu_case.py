"""One case of the GPU check: inputs, a guarded output, and the judgement against float64."""

from __future__ import annotations

from collections.abc import Callable

import gpu_plan
import torch
from gpu_plan import Case, WideCase
from gpu_report import Report

GUARD_BYTES = 256

TORCH_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Run = Callable[..., torch.Tensor]
"""`Runtime.run`."""


class Output:
    """A poisoned [M, N] output inside guard bands, at an address aligned to its element only."""

    def __init__(self, case: Case | WideCase, device: str = "cuda") -> None:
        dtype = TORCH_TYPES[case.out_dtype]
        self._start = GUARD_BYTES + dtype.itemsize
        self._end = self._start + case.tokens * case.experts * dtype.itemsize
        self._room = torch.empty(self._end + GUARD_BYTES, dtype=torch.uint8, device=device)
        self.poison()
        flat = self._room[self._start : self._end].view(dtype)
        self.tensor = flat.view(case.tokens, case.experts)

    def poison(self) -> None:
        """Every byte 0xff: not a number in each output type."""
        self._room.fill_(0xFF)

    def faults(self, exact: torch.Tensor) -> tuple[float, bool, bool]:
        """Relative Frobenius error, whether every element is finite, whether the guards stand."""
        got = self.tensor.double()
        error = (got - exact).norm() / exact.norm()
        finite = torch.isfinite(got).all()
        guards = torch.cat((self._room[: self._start], self._room[self._end :])).eq(0xFF).all()
        found = torch.stack((error, finite.double(), guards.double())).tolist()
        return found[0], found[1] == 1.0, found[2] == 1.0


def operands(
    case: Case, *, x_pad: int = 0, weight_pad: int = 0, device: str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fresh random x and weight, each inside memory that is not a number, rows padded likewise."""
    return (
        _random(case.tokens, case.hidden, x_pad, device),
        _random(case.experts, case.hidden, weight_pad, device),
    )


class Wide:
    """Fresh operands of a wide case, with its bias or scale, and the exact result."""

    def __init__(self, case: WideCase, device: str = "cuda") -> None:
        x_type, weight_type = TORCH_TYPES[case.x_dtype], TORCH_TYPES[case.weight_dtype]
        self.x = _random(case.tokens, case.hidden, 0, device, x_type)
        self.weight = _random(case.experts, case.hidden, 0, device, weight_type)
        self.extra: dict[str, object] = {}
        self.exact = exact_product(self.x, self.weight)
        if case.epilogue.startswith("bias"):
            dtype = TORCH_TYPES[case.epilogue.removeprefix("bias_")]
            bias = (torch.randn(case.experts, device=device) * case.hidden**0.5).to(dtype)
            self.extra["bias"] = bias
            self.exact = self.exact + bias.double()
        elif case.epilogue == "scale":
            self.extra["scale"] = 0.375
            self.exact = self.exact * 0.375

    def call(self, run: Run, case: WideCase, out: torch.Tensor, x: torch.Tensor) -> None:
        dtype = TORCH_TYPES[case.out_dtype]
        run(x, self.weight, out=out, out_dtype=dtype, pdl=case.pdl, **self.extra)


def _random(
    rows: int, hidden: int, pad: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    stride = hidden + pad
    room = torch.full((rows * stride + 128,), float("nan"), dtype=dtype, device=device)
    view = room[64 : 64 + rows * stride].view(rows, stride)[:, :hidden]
    view.copy_(torch.randn((rows, hidden), device=device))
    return view


def exact_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()


def judge(
    report: Report, case: Case | WideCase, out: Output, exact: torch.Tensor, what: object
) -> None:
    """Raise where an output is wrong, not finite or wrote beside its memory."""
    error, finite, guards = out.faults(exact)
    if finite:
        report.error(case.out_dtype, error, what)
    limit = gpu_plan.TOLERANCE[case.out_dtype]
    if not finite:
        bad = (~torch.isfinite(out.tensor)).nonzero()
        raise ValueError(f"{len(bad)} elements not finite, first at {bad[0].tolist()}")
    if not error <= limit:
        worst = (out.tensor.double() - exact).abs()
        row, column = divmod(int(worst.argmax()), case.experts)
        raise ValueError(
            f"relative error {error:.3e} above {limit}; largest {float(worst.max()):.3e} at "
            f"({row}, {column}): {float(out.tensor[row, column])!r} for "
            f"{float(exact[row, column])!r}"
        )
    if not guards:
        raise ValueError("bytes beside the output were written")


def call(run: Run, case: Case, x: torch.Tensor, weight: torch.Tensor, out: Output) -> None:
    dtype = TORCH_TYPES[case.out_dtype]
    result = run(x, weight, out=out.tensor, out_dtype=dtype, pdl=case.pdl)
    if result is not out.tensor:
        raise ValueError("run() did not return the tensor passed as out")
