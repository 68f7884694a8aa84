"""The plan of the GPU check: which cases run, by which tuning tables, from which manifests.

Needs no GPU. The machine that builds the store and the one that checks it share this plan, so the
check asks for nothing that was not built.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

TARGET = "sm_90a"

MODELS = {
    "dsv4-pro": (7168, 384),
    "dsv4-flash": (4096, 256),
    "dsv3": (7168, 256),
    "gpt-oss-20b": (2880, 32),
    "gpt-oss-120b": (2880, 128),
}
"""Routers of real models: hidden size and experts."""

EDGES = {
    **{f"edge-{k}-{n}": (k, n) for k in (2304, 2880) for n in (7, 32, 160, 264)},
    **{f"edge-{k}-{n}": (k, n) for k, n in ((8, 7), (520, 32))},
}
"""Sizes that divide by no tile; K so small that blocks of a cluster have none of it."""

SHAPES = tuple(dict.fromkeys((MODELS | EDGES).values()))

TOKENS = (*range(1, 18), 33, 64)

OUT_DTYPES = ("fp32", "bf16", "fp16")

TOLERANCE = {"fp32": 2e-6, "bf16": 3e-3, "fp16": 4e-4}
"""Largest relative Frobenius error against float64 for each output type."""

FORCED = {
    "dotprod": {"backend": "dotprod", "block": 128, "experts_per_block": 1},
    "splitk": {"backend": "splitk", "split_k": 6, "stages": 4},
    "splitk-32": {"backend": "splitk", "split_k": 6, "stages": 3, "experts_tile": 32},
    "splitk-64": {
        "backend": "splitk",
        "split_k": 8,
        "stages": 4,
        "experts_tile": 64,
        "hidden_tile": 128,
    },
    "oneshot": {
        "backend": "oneshot",
        "experts_tile": 16,
        "split_k": 8,
        "warps": 8,
        "vectors": 4,
    },
}
"""Backends, each with a tile that a table of ours forces on every problem."""

LARGE = (65, 100, 256)
"""M beyond those that are measured one by one."""

TABLES = (*FORCED, "reference", "default")


class Case(NamedTuple):
    """One product, computed by what a tuning table chooses."""

    table: str
    hidden: int
    experts: int
    tokens: int
    out_dtype: str
    pdl: bool

    def __str__(self) -> str:
        return (
            f"{self.table} K={self.hidden} N={self.experts} M={self.tokens} {self.out_dtype} "
            f"pdl={'on' if self.pdl else 'off'}"
        )


def cases() -> Iterator[Case]:
    """Every case of the grid, table by table."""
    for table in TABLES:
        for hidden, experts in SHAPES:
            for out_dtype in OUT_DTYPES:
                for pdl in (True, False):
                    for tokens in TOKENS:
                        yield Case(table, hidden, experts, tokens, out_dtype, pdl)


class WideCase(NamedTuple):
    """One product with fp32 weights, a bias or a scale, by the table `default` or a forced one."""

    table: str
    hidden: int
    experts: int
    tokens: int
    out_dtype: str
    pdl: bool
    x_dtype: str
    weight_dtype: str
    epilogue: str

    def __str__(self) -> str:
        return (
            f"{self.table} K={self.hidden} N={self.experts} M={self.tokens} {self.x_dtype} x "
            f"{self.weight_dtype} -> {self.out_dtype} {self.epilogue} "
            f"pdl={'on' if self.pdl else 'off'}"
        )


class WideRouter(NamedTuple):
    """Routers of one shape whose every combination is checked, and built by one manifest."""

    table: str
    hidden: int
    experts: int
    tokens: tuple[int, ...]
    x_dtype: str
    weight_dtype: str
    out_dtypes: tuple[str, ...]
    epilogues: tuple[str, ...]

    def cases(self) -> Iterator[WideCase]:
        """Every case of the router."""
        for out_dtype in self.out_dtypes:
            for epilogue in self.epilogues:
                for pdl in (True, False):
                    for tokens in self.tokens:
                        yield WideCase(
                            self.table,
                            self.hidden,
                            self.experts,
                            tokens,
                            out_dtype,
                            pdl,
                            self.x_dtype,
                            self.weight_dtype,
                            epilogue,
                        )


EPILOGUES = ("bias_fp32", "bias_bf16", "scale")

WIDE = (
    *(
        WideRouter("default", *shape, tokens, x_dtype, "fp32", OUT_DTYPES, ("none",))
        for shape in ((6144, 256), (2880, 7), (3072, 256))
        for x_dtype, tokens in (
            ("bf16", (1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 100, 512)),
            ("fp32", (1, 3, 8, 16, 17, 32)),
        )
    ),
    WideRouter("default", 6148, 64, (1, 5, 32), "fp32", "fp32", ("fp32",), ("none",)),
    WideRouter("default", 2880, 7, (2, 16, 33, 100), "bf16", "fp32", ("fp32", "bf16"), EPILOGUES),
    *(
        WideRouter(table, *shape, (1, 4, 16, 33), "bf16", "bf16", ("fp32", "bf16"), EPILOGUES)
        for table in FORCED
        for shape in ((2880, 32), (7168, 256), (2304, 7))
    ),
    *(
        WideRouter(table, *shape, LARGE, "bf16", "bf16", ("fp32", "bf16"), ("none",))
        for table in FORCED
        for shape in ((2880, 32), (7168, 384))
    ),
)
"""What is checked beside the grid: fp32 weights with all that serves them, epilogues, large M."""

WIDE_SINGLES = {
    "fp32": WideCase("default", 2880, 7, 2, "fp32", True, "bf16", "fp32", "none"),
    "oneshot-fp32": WideCase("default", 2880, 7, 16, "fp32", True, "bf16", "fp32", "none"),
    "bf16x3": WideCase("default", 2880, 7, 100, "fp32", True, "bf16", "fp32", "none"),
}
"""Cases for compute-sanitizer, one for each kernel that takes fp32 weights."""


def wide_cases() -> Iterator[WideCase]:
    """Every case of `WIDE`."""
    for router in WIDE:
        yield from router.cases()


def write_tables(folder: Path) -> dict[str, str]:
    """Write the tables that force a backend; the name or path by which each table is loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {table: table for table in TABLES}
    for backend, tile in FORCED.items():
        path = folder.resolve() / f"{backend}.json"
        table = {
            "schema": 1,
            "name": f"gpu-check-{backend}",
            "source": "the GPU check: one backend for every problem",
            "rules": [{"use": tile, "tokens": [65, 65_536]}, {"use": tile}],
        }
        path.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=2) + b"\n")
        names[backend] = str(path)
    return names


def write_manifests(folder: Path) -> list[Path]:
    """Write a manifest for each table, together every case, and the tables that they name."""
    names = write_tables(folder / "tables")
    written = []
    for table in TABLES:
        path = folder / f"gpu-check-{table}.yaml"
        path.write_text(_manifest(table, names[table]), encoding="utf-8")
        written.append(path)
    path = folder / "gpu-check-wide.yaml"
    path.write_text(_wide_manifest(names), encoding="utf-8")
    return [*written, path]


def _wide_manifest(names: dict[str, str]) -> str:
    lines = [
        "# What the GPU check asks of fp32 weights and of epilogues.",
        "schema: 1",
        "name: gpu-check-wide",
        f"targets: [{TARGET}]",
        "routers:",
    ]
    for number, router in enumerate(WIDE):
        fields = {
            "model": f"wide-{number}",
            "hidden": router.hidden,
            "experts": router.experts,
            "tokens": list(router.tokens),
            "x_dtype": router.x_dtype,
            "weight_dtype": router.weight_dtype,
            "out_dtype": list(router.out_dtypes),
            "epilogue": list(router.epilogues),
            "tuning": names[router.table],
        }
        lines.append(f"  - {msgspec.json.encode(fields).decode()}")
    return "\n".join(lines) + "\n"


def _manifest(table: str, tuning: str) -> str:
    lines = [
        f"# What the GPU check asks of the tuning table {table}.",
        "schema: 1",
        f"name: gpu-check-{table}",
        f"targets: [{TARGET}]",
        "defaults:",
        "  tokens: [1-17, 33, 64]",
        f"  out_dtype: [{', '.join(OUT_DTYPES)}]",
        "  pdl: both",
        f"  tuning: {msgspec.json.encode(tuning).decode()}",
        "routers:",
    ]
    listed: set[tuple[int, int]] = set()
    for model, (hidden, experts) in (MODELS | EDGES).items():
        if (hidden, experts) in listed:
            continue
        listed.add((hidden, experts))
        lines.append(f"  - {{model: {model}, hidden: {hidden}, experts: {experts}}}")
    return "\n".join(lines) + "\n"
