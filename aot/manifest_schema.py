"""The JSON Schema of a manifest, for editors; the reader says the same with better messages."""

from __future__ import annotations

from .dispatch import PACKAGED_TABLES
from .manifest import MANIFEST_SCHEMA, MAX_ROUTERS
from .problem import MAX_EXPERTS, MAX_HIDDEN, MAX_TOKENS, VECTOR_ELEMENTS, DType
from .toolchain import KNOWN_TARGETS

__all__ = ["json_schema"]


def json_schema() -> dict[str, object]:
    """The JSON Schema (draft-07, which the YAML language server knows) of a manifest."""
    tokens_number = {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS}
    # That a range rises is beyond a schema; that its ends are 1 to 64 is not.
    end = f"0{{0,4}}({'|'.join(map(str, range(MAX_TOKENS, 0, -1)))})"
    tokens_range = {"type": "string", "pattern": rf"^{end}\s*-\s*{end}$"}
    tokens_item = {"anyOf": [tokens_number, tokens_range]}
    out_dtype = {"enum": [dtype.value for dtype in DType]}
    optional: dict[str, object] = {
        "tokens": {
            "description": "Values of M, tokens in a call: a number, a range, or a list of both.",
            "anyOf": [
                tokens_number,
                tokens_range,
                {"type": "array", "minItems": 1, "maxItems": MAX_TOKENS, "items": tokens_item},
            ],
            "examples": ["1-16", 8, ["1-16", 32]],
        },
        "x_dtype": {"description": "Element type of x.", "enum": ["bf16"], "default": "bf16"},
        "weight_dtype": {
            "description": "Element type of the weight.",
            "enum": ["bf16"],
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
            "description": "Hidden size K.",
            "type": "integer",
            "minimum": VECTOR_ELEMENTS,
            "maximum": MAX_HIDDEN,
            "multipleOf": VECTOR_ELEMENTS,
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
