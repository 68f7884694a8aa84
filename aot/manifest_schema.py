"""The JSON Schema of a manifest, for editors; the reader says the same with better messages."""

from __future__ import annotations

from itertools import product

from .dispatch import PACKAGED_TABLES
from .manifest import MANIFEST_SCHEMA, MAX_ROUTERS
from .problem import (
    FEW_TOKENS,
    MAX_EXPERTS,
    MAX_HIDDEN,
    OPERAND_TOKENS,
    DType,
    Epilogue,
    hidden_multiple,
)
from .toolchain import KNOWN_TARGETS

__all__ = ["json_schema"]


def json_schema() -> dict[str, object]:
    """The JSON Schema (draft-07, which the YAML language server knows) of a manifest."""
    operands = list(dict.fromkeys(dtype.value for pair in OPERAND_TOKENS for dtype in pair))
    tokens = {
        "description": "Values of M, tokens in a call: a number, a range up to 64, or a list.",
        **_tokens(max(OPERAND_TOKENS.values())),
        "examples": ["1-16", 8, ["1-16", 32]],
    }
    out_dtype = {"enum": [dtype.value for dtype in DType]}
    epilogue = {"enum": [epilogue.value for epilogue in Epilogue]}
    optional: dict[str, object] = {
        "tokens": tokens,
        "x_dtype": {
            "description": "Element type of x; fp32 goes with fp32 weights, and up to 32 tokens.",
            "enum": operands,
            "default": "bf16",
        },
        "weight_dtype": {
            "description": "Element type of the weight; more than 64 tokens need fp32.",
            "enum": operands,
            "default": "bf16",
        },
        "out_dtype": {
            "description": "Element type of the logits, one or several.",
            "anyOf": [
                out_dtype,
                {"type": "array", "minItems": 1, "uniqueItems": True, "items": out_dtype},
            ],
            "default": "fp32",
        },
        "pdl": {
            "description": "Programmatic dependent launch: with it, without it, or both kernels.",
            "enum": [True, False, "both"],
            "default": "both",
        },
        "epilogue": {
            "description": "What is done to the sums: a bias added, or a factor, one or several.",
            "anyOf": [
                epilogue,
                {"type": "array", "minItems": 1, "uniqueItems": True, "items": epilogue},
            ],
            "default": "none",
        },
        "tuning": {
            "description": "Tuning table: default, reference, or a path beside this file.",
            "anyOf": [{"enum": list(PACKAGED_TABLES)}, {"type": "string", "pattern": "/"}],
            "default": "default",
        },
    }
    router: dict[str, object] = {
        "model": {
            "description": "Name of the model, for messages.",
            "type": "string",
            "pattern": r"\S",
        },
        "hidden": {
            "description": "Hidden size K: a multiple of 8, or of 4 where x is fp32.",
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_HIDDEN,
        },
        "experts": {
            "description": "Number of experts N.",
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_EXPERTS,
        },
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "llbf16-aot manifest",
        "description": "The routers of a deployment, for ahead-of-time compilation.",
        "type": "object",
        "additionalProperties": False,
        "required": ["schema", "name", "targets", "routers"],
        # Each router has tokens of its own, or the defaults have them.
        "anyOf": [
            {"properties": {"defaults": {"required": ["tokens"]}}, "required": ["defaults"]},
            {"properties": {"routers": {"items": {"required": ["tokens"]}}}},
        ],
        "allOf": [_with_defaults(x, weight) for x, weight in product(operands, repeat=2)],
        "definitions": {
            _pair(x.value, weight.value): {
                "properties": {
                    "tokens": _tokens(largest),
                    "hidden": {"multipleOf": hidden_multiple(x, weight)},
                }
            }
            for (x, weight), largest in OPERAND_TOKENS.items()
        },
        "properties": {
            "schema": {"description": "Version of this format.", "const": MANIFEST_SCHEMA},
            "name": {"description": "Name of the manifest.", "type": "string", "pattern": r"\S"},
            "targets": {
                "description": "SM architectures to build for; none is assumed.",
                "type": "array",
                "minItems": 1,
                "uniqueItems": True,
                "items": {"enum": list(KNOWN_TARGETS)},
                "examples": [["sm_90a", "sm_100a"]],
            },
            "defaults": {
                "description": "Fields that every router has unless it says otherwise.",
                "type": "object",
                "additionalProperties": False,
                "properties": optional,
            },
            "routers": {
                "description": "The routers, one for each shape that the deployment serves.",
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_ROUTERS,
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["model", "hidden", "experts"],
                    "properties": {**router, **optional},
                },
            },
        },
    }


def _tokens(largest: int) -> dict[str, object]:
    """Values of M up to `largest`: a number, a range that ends at 64 at most, a list of both."""
    number = {"type": "integer", "minimum": 1, "maximum": largest}
    # That a range rises is beyond a schema; where its ends lie is not.
    end = f"0{{0,4}}({'|'.join(map(str, range(min(largest, FEW_TOKENS), 0, -1)))})"
    span = {"type": "string", "pattern": rf"^{end}\s*-\s*{end}$"}
    item = {"anyOf": [number, span]}
    listed = {"type": "array", "minItems": 1, "maxItems": FEW_TOKENS, "items": item}
    return {"anyOf": [number, span, listed]}


def _pair(x: str, weight: str) -> str:
    return f"{x}_x_{weight}"


def _allowed(x: str, weight: str) -> object:
    """What tokens and hidden may be with these element types of x and weight."""
    if (DType(x), DType(weight)) in OPERAND_TOKENS:
        return {"$ref": f"#/definitions/{_pair(x, weight)}"}
    return False


def _has(x: str, weight: str, *, else_x: str, else_weight: str) -> dict[str, object]:
    """Holds where fields, or what goes for absent ones, name these element types."""
    required = [
        field
        for field, value, absent in (("x_dtype", x, else_x), ("weight_dtype", weight, else_weight))
        if value != absent
    ]
    properties = {"x_dtype": {"const": x}, "weight_dtype": {"const": weight}}
    return {"properties": properties, "required": required}


def _with_defaults(x: str, weight: str) -> dict[str, object]:
    """What goes for defaults, and for routers, where the defaults name these element types."""
    defaults = _has(x, weight, else_x="bf16", else_weight="bf16")
    routers = [
        {"if": _has(x_, weight_, else_x=x, else_weight=weight), "then": _allowed(x_, weight_)}
        for x_, weight_ in product(("bf16", "fp32"), repeat=2)
    ]
    return {
        "if": {
            "properties": {"defaults": defaults},
            "required": ["defaults"] if defaults["required"] else [],
        },
        "then": {
            "properties": {
                "defaults": _allowed(x, weight),
                "routers": {"items": {"allOf": routers}},
            }
        },
    }
