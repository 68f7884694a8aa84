"""The manifest: what it means, and what it says about every way of getting it wrong."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llbf16_aot import manifest as manifest_module
from llbf16_aot.dispatch import dispatch, load_table
from llbf16_aot.errors import LibraryChosenError, ManifestError
from llbf16_aot.manifest import (
    MAX_FILE_BYTES,
    MAX_ROUTERS,
    PARSED_FILE,
    Manifest,
    packaged_manifests,
    parsed_form,
)
from llbf16_aot.manifest_reader import MAX_ERRORS
from llbf16_aot.manifest_schema import json_schema
from llbf16_aot.problem import DType, Problem, Target

UPDATE = os.environ.get("LLBF16_AOT_UPDATE_GOLDEN") == "1"

GOOD = """\
schema: 1
name: one
targets: [sm_90a]
routers:
  - model: M
    hidden: 4096
    experts: 256
    tokens: 1-3
"""


def parse(text: str) -> Manifest:
    return Manifest.parse(text, origin="m.yaml")


def good(*changes: tuple[str, str]) -> str:
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def test_defaults_are_fp32_with_and_without_dependent_launch() -> None:
    """Without the safe variant a call that follows a weight update would have no kernel."""
    assert list(parse(GOOD).routers[0].problems()) == [
        Problem(tokens, 256, 4096, DType.FP32, pdl) for pdl in (True, False) for tokens in (1, 2, 3)
    ]


def test_a_router_overrides_the_defaults() -> None:
    """A default that wins over the router's own field builds the wrong kernels."""
    text = good(("routers:", "defaults: {tokens: 1-64, pdl: true, out_dtype: bf16}\nrouters:"))
    router = parse(text).routers[0]
    assert router.tokens == (1, 2, 3)
    assert router.out_dtypes == (DType.BF16,)
    assert router.pdl == (True,)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("8", (8,)),
        ("1-16", tuple(range(1, 17))),
        ('"2 - 4"', (2, 3, 4)),
        ("[33, 1-2, 2]", (1, 2, 33)),
        ("64-64", (64,)),
    ],
)
def test_tokens_are_numbers_ranges_and_lists_of_both(text: str, tokens: tuple[int, ...]) -> None:
    """A range that misses its end leaves one batch size to stall in service."""
    assert parse(good(("1-3", text))).routers[0].tokens == tokens


def test_a_tuning_path_starts_beside_the_manifest(tmp_path: Path) -> None:
    """Taken from the working directory, it would name another table in every shell."""
    path = tmp_path / "m.yaml"
    path.write_text(good(("tokens: 1-3", "tokens: 1-3\n    tuning: ./tables")))
    assert Manifest.load(path).routers[0].tuning == str(tmp_path / "tables")


EXAMPLES = {
    "empty": ("", "m.yaml:1: the manifest is empty"),
    "list": ("- 1\n", "m.yaml:1: the manifest is a list, must be a mapping of fields"),
    "missing": (
        "schema: 1\n",
        "m.yaml:1: field 'name' is missing\n"
        "m.yaml:1: field 'routers' is missing\n"
        "m.yaml:1: field 'targets' is missing",
    ),
    "schema": (
        good(("schema: 1", "schema: 2")),
        "m.yaml:1: schema is 2, this version reads schema 1 only",
    ),
    "boolean for a number": (
        good(("schema: 1", "schema: true")),
        "m.yaml:1: schema is true, must be 1",
    ),
    "float for a number": (
        good(("4096", "4096.0")),
        "m.yaml:6: hidden is 4096.0, must be a multiple of 8 from 8 to 1048576",
    ),
    "text for a number": (
        good(("4096", '"4096"')),
        "m.yaml:6: hidden is '4096', must be a multiple of 8 from 8 to 1048576",
    ),
    "hidden": (
        good(("4096", "4097")),
        "m.yaml:6: hidden is 4097, must be a multiple of 8 from 8 to 1048576",
    ),
    "experts": (
        good(("256", "0")),
        "m.yaml:7: experts is 0, must be a number from 1 to 65536",
    ),
    "tokens above the largest": (
        good(("1-3", "1-65")),
        "m.yaml:8: tokens is 1-65, must be a number from 1 to 65536, a range up to 64 such "
        "as 1-16, or a list of both",
    ),
    "tokens backwards": (
        good(("1-3", "3-1")),
        "m.yaml:8: tokens is 3-1, must be a number from 1 to 65536, a range up to 64 such "
        "as 1-16, or a list of both",
    ),
    "tokens above the largest, fp32 weights": (
        good(("1-3", "[1-3, 65537]\n    weight_dtype: fp32")),
        "m.yaml:8: tokens is 65537, must be a number from 1 to 65536, a range up to 64 such as "
        "1-16, or a list of both",
    ),
    "a long range, fp32 weights": (
        good(("1-3", "1-65\n    weight_dtype: fp32")),
        "m.yaml:8: tokens is 1-65, must be a number from 1 to 65536, a range up to 64 such as "
        "1-16, or a list of both",
    ),
    "tokens above the largest, fp32 x": (
        good(("1-3", "33\n    x_dtype: fp32\n    weight_dtype: fp32")),
        "m.yaml:8: tokens is 33, must be a number from 1 to 32, a range such as 1-16, or a list "
        "of both",
    ),
    "hidden, fp32 weights": (
        good(("4096", "4100"), ("1-3", "1-3\n    weight_dtype: fp32")),
        "m.yaml:6: hidden is 4100, must be a multiple of 8 from 8 to 1048576",
    ),
    "hidden, fp32 x": (
        good(("4096", "4098"), ("1-3", "1-3\n    weight_dtype: fp32\n    x_dtype: fp32")),
        "m.yaml:6: hidden is 4098, must be a multiple of 4 from 4 to 1048576",
    ),
    "fp32 x, bf16 weights": (
        good(("1-3", "1-3\n    x_dtype: fp32")),
        "m.yaml:9: x_dtype is 'fp32' with bf16 weights, must be bf16",
    ),
    "no tokens": (
        good(("    tokens: 1-3\n", "")),
        "m.yaml:5: a router lacks the field 'tokens', and so do the defaults",
    ),
    "target without suffix": (
        good(("sm_90a", "sm_90")),
        "m.yaml:3: targets: target sm_90 lacks its suffix: kernels use architecture-specific "
        "instructions (write sm_90a)",
    ),
    "no target": (
        good(("[sm_90a]", "[]")),
        "m.yaml:3: targets is empty, must list at least one, for example sm_90a",
    ),
    "target twice": (
        good(("[sm_90a]", "[sm_90a, sm_90a]")),
        "m.yaml:3: targets lists sm_90a twice",
    ),
    "misspelt field": (
        good(("experts", "expert")),
        "m.yaml:5: a router lacks the field 'experts'\n"
        "m.yaml:7: a router has the unknown field 'expert'; did you mean 'experts'? (allowed: "
        "model, hidden, experts, tokens, x_dtype, weight_dtype, out_dtype, epilogue, pdl, tuning)",
    ),
    "misspelt value": (
        good(("tokens: 1-3", "tokens: 1-3\n    out_dtype: bf61")),
        "m.yaml:9: out_dtype is 'bf61', must be bf16 or fp16 or fp32; did you mean 'bf16'?",
    ),
    "yaml 1.1 boolean": (
        good(("tokens: 1-3", "tokens: 1-3\n    pdl: yes")),
        "m.yaml:9: pdl is 'yes', must be true, false or both",
    ),
    "misspelt table": (
        good(("tokens: 1-3", "tokens: 1-3\n    tuning: refrence")),
        "m.yaml:9: tuning is 'refrence', must be default, reference or a path such as ./tuning; "
        "did you mean 'reference'?",
    ),
    "field twice": (
        good(("name: one", "name: one\nname: two")),
        "m.yaml:3: field 'name' stands twice",
    ),
    "router twice": (
        GOOD + "  - {model: M, hidden: 4096, experts: 256, tokens: 1-3}\n",
        "m.yaml:9: router 'M' stands twice with the same fields",
    ),
    "no router": (
        GOOD.partition("routers")[0] + "routers: []\n",
        "m.yaml:4: routers is empty, must list at least one router",
    ),
    "a wrong default is told once": (
        good(("routers:", "defaults: {pdl: 1}\nrouters:"))
        + "  - {model: N, hidden: 4096, experts: 256, tokens: 1-3}\n",
        "m.yaml:4: pdl is 1, must be true, false or both",
    ),
    "syntax": (
        "schema: [1\nname: x\n",
        "m.yaml:2: not valid YAML: expected ',' or ']', but got ':'",
    ),
    "tab": (
        "schema: 1\n\tname: x\n",
        "m.yaml:2: not valid YAML: found character '\\t' that cannot start any token",
    ),
    "nested": ("[" * 4000, "m.yaml:1: nested too deeply, at most 8 levels are read"),
    "many values": ("\n[" + "1," * 7000 + "]", "m.yaml:2: more than 6000 values"),
    "anchor": (
        good(("one", "&a one")),
        "m.yaml:2: anchors and aliases are not used in manifests",
    ),
    "tag": (
        good(("tokens: 1-3", "tokens: 1-3\n    pdl: !!bool yes")),
        "m.yaml:9: tags are not used in manifests: tag:yaml.org,2002:bool",
    ),
    "yaml 1.1": (
        "%YAML 1.1\n---\n" + good(("tokens: 1-3", "tokens: 1-3\n    pdl: yes")),
        "m.yaml:2: manifests are YAML 1.2, not 1.1",
    ),
    "pdl in capitals": (
        good(("tokens: 1-3", "tokens: 1-3\n    pdl: BOTH")),
        "m.yaml:9: pdl is 'BOTH', must be true, false or both",
    ),
    "home of nobody": (
        good(("tokens: 1-3", "tokens: 1-3\n    tuning: ~no-such-user/tables")),
        "m.yaml:9: tuning is '~no-such-user/tables', and the home folder that it names is unknown",
    ),
    "a wrong default that no router takes": (
        good(("routers:", "defaults: {tokens: 0}\nrouters:")),
        "m.yaml:4: tokens is 0, must be a number from 1 to 65536, a range up to 64 such as 1-16, "
        "or a list of both",
    ),
    "tokens without end": (
        good(("routers:", "defaults: {tokens: [" + "1," * 65 + "]}\nrouters:"))
        + "  - {model: N, hidden: 8, experts: 1}\n",
        "m.yaml:4: tokens lists 65 entries, at most 64 are read",
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_says_what_is_wrong_where_and_what_is_allowed(name: str) -> None:
    """A message without line or value sends the reader hunting."""
    text, message = EXAMPLES[name]
    with pytest.raises(ManifestError) as caught:
        parse(text)
    assert caught.value.message == message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nschema: *c\n",
        GOOD + "---\n" + GOOD,
        "schema: !!python/object:os.system 1\n",
        "%YAML 9.9\n---\n" + GOOD,
        "%FOO\n" + GOOD,
        "? [1, 2]\n: 3\n",
        "<<: {schema: 1}\nname: x\n",
        "schema: 1\0",
        '"\\xZZ": 1\n',
        "- &a\n- *b\n",
        "- &a x\n- &a y\n",
        "!!binary x",
        'a: "\\UFFFFFFFF"\n',
        "2001-01-01: x\n",
    ],
)
def test_hostile_yaml_is_a_manifest_error(text: str) -> None:
    """Aliases, tags, directives and broken escapes must not reach the caller as other errors."""
    with pytest.raises(ManifestError):
        parse(text)


def test_files_that_are_no_text_are_refused_without_hanging(tmp_path: Path) -> None:
    """Opening a FIFO waits for a writer, and /dev/zero never ends."""
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"schema: 1\nname: caf\xe9\n")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    for path, part in (
        (fifo, "not a regular file"),
        (tmp_path, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (latin, "latin.yaml:2: not UTF-8: byte 0xe9"),
        (large, "larger than"),
        (tmp_path / "absent.yaml", "No such file"),
        (Path("nul\0.yaml"), ""),
        (Path("n" * 5000), "no such file"),
        (Path("folder") / ("n" * 5000), "File name too long"),
    ):
        with pytest.raises(ManifestError) as caught:
            Manifest.load(path)
        assert part in caught.value.message
        assert re.match(rf"{re.escape(str(path))}:[1-9][0-9]*: ", caught.value.message)


def test_a_message_ends_after_twenty_errors() -> None:
    """64 KiB of unknown fields made a message of a megabyte, and took over a second."""
    with pytest.raises(ManifestError) as caught:
        parse(GOOD + "".join(f"field_{i}: 1\n" for i in range(2000)))
    lines = caught.value.message.splitlines()
    assert len(lines) == MAX_ERRORS + 1
    assert lines[-1] == f"m.yaml:{8 + MAX_ERRORS}: stopped after {MAX_ERRORS} errors"


def test_too_many_routers_are_refused() -> None:
    """A plan grows with every router: a file of 64 KiB must not ask for an endless build."""
    rows = "".join(
        f"  - {{model: M{i}, hidden: 8, experts: 1, tokens: 1}}\n" for i in range(MAX_ROUTERS + 1)
    )
    with pytest.raises(ManifestError, match=f"at most {MAX_ROUTERS}"):
        parse(GOOD.partition("  - model")[0] + rows)


def test_an_unknown_name_names_the_nearest() -> None:
    """Users type names from memory."""
    with pytest.raises(ManifestError, match="did you mean 'dsv4'") as caught:
        Manifest.load("dsv44")
    assert "gpt-oss" in caught.value.hint


@st.composite
def routers(draw: st.DrawFn) -> tuple[str, list[Problem]]:
    """A manifest's text and the problems that it stands for."""
    hidden = draw(st.integers(1, 4096)) * 8
    experts = draw(st.integers(1, 65_536))
    tokens = draw(st.sets(st.integers(1, 64), min_size=1, max_size=5))
    dtypes = draw(st.lists(st.sampled_from(list(DType)), min_size=1, unique=True))
    pdl = draw(st.sampled_from([("true", (True,)), ("false", (False,)), ("both", (True, False))]))
    text = good(
        ("hidden: 4096", f"hidden: {hidden}"),
        ("experts: 256", f"experts: {experts}"),
        ("tokens: 1-3", f"tokens: {sorted(tokens, reverse=draw(st.booleans()))}"),
    )
    text += f"    pdl: {pdl[0]}\n    out_dtype: [{', '.join(d.value for d in dtypes)}]\n"
    return text, [
        Problem(m, experts, hidden, dtype, p)
        for dtype in dtypes
        for p in pdl[1]
        for m in sorted(tokens)
    ]


@settings(deadline=None)
@given(routers())
def test_a_manifest_is_exactly_its_problems(generated: tuple[str, list[Problem]]) -> None:
    """A lost or doubled problem is a miss in service, or work for nothing."""
    text, problems = generated
    assert list(parse(text).routers[0].problems()) == problems
    jsonschema.validate(_plain(text), json_schema())


def test_mutated_manifests_are_manifests_or_manifest_errors() -> None:
    """S4: whatever a typo makes of a manifest, the answer is one of these two."""
    draw = random.Random(20261129)
    folder = Path(__file__).parents[2] / "manifests"
    sources = [path.read_text() for path in sorted(folder.glob("*.yaml"))] + [GOOD]
    alphabet = "-:[]{}&*!|>'\"%@`#,? \t\n\0\x7f\u00e9\ufeff0189aes_~<="
    refused = []
    for _ in range(1500):
        text = draw.choice(sources)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(text) + 1)
            cut = draw.choice((0, 0, 1, 7))
            piece = "".join(draw.choices(alphabet, k=draw.randint(0, 3)))
            text = text[:place] + piece + text[place + cut :]
        try:
            parse(text)
        except ManifestError as error:
            refused.append(error.message)
    assert 300 < len(refused) < 1500
    assert [message for message in refused if not message.startswith("m.yaml:")] == []


def _plain(text: str) -> object:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(text)


@pytest.mark.parametrize("name", packaged_manifests())
class TestPackagedManifests:
    """Holds for every manifest that comes with the package."""

    def test_is_what_its_file_says(self, name: str) -> None:
        """`build NAME` must build the file of that name, for Hopper and Blackwell."""
        manifest = Manifest.load(name)
        assert manifest.name == name
        measured = name in (
            "all-routers",
            "anchors",
            "general",
            "unmeasured",
            "fp32-routers",
        )  # for tuning and benchmarks, on an H200
        wanted = {"sm_90a"} if measured else {"sm_90a", "sm_100a", "sm_103a"}
        assert set(map(str, manifest.targets)) == wanted

    def test_fits_the_schema(self, name: str) -> None:
        """An editor that underlines our own examples teaches to ignore it."""
        path = Path(__file__).parents[2] / "manifests" / f"{name}.yaml"
        jsonschema.validate(_plain(path.read_text()), json_schema())
        assert path.read_text().startswith("# yaml-language-server: $schema=")

    def test_every_problem_has_a_kernel_or_the_library(self, name: str) -> None:
        """A manifest that we ship and cannot build is a promise broken."""
        manifest = Manifest.load(name)
        for target in manifest.targets:
            for router in manifest.routers:
                problems = list(router.problems())
                assert len(problems) == len(set(problems))
                for problem in problems:
                    try:
                        dispatch(problem, target, load_table(router.tuning, target))
                    except LibraryChosenError:
                        continue


BEYOND_SCHEMA = (
    "empty", "syntax", "tab", "nested", "many values", "anchor", "tag", "yaml 1.1", "field twice",
    "router twice", "home of nobody",
)  # fmt: skip

FIELDS: dict[str, tuple[object, ...]] = {
    "model": ("M", "", " ", 7, None),
    "hidden": (4096, 8, 1 << 20, (1 << 20) + 8, 0, -8, 12, 6, "4096", True, None, [8], 8.5),
    "experts": (1, 65_536, 65_537, 0, -1, "8", False, None, {}, 1.5),
    "tokens": (1, 64, "1-16", "2 - 64", [1, "3-4"], [], 0, 65, "1-65", "0-3", 33, "1-33", 65_536,
               65_537, [1, 65_536], "8", "1-", True,
               None, [[1]], {"a": 1}, [1, True], [1] * 64, [1] * 65),
    "x_dtype": ("bf16", "fp16", "fp32", ["bf16"], None),
    "weight_dtype": ("bf16", "fp32", "fp16", True),
    "out_dtype": ("fp32", ["bf16", "fp16"], [], ["fp32", "fp32"], "fp8", None, [None]),
    "pdl": (True, False, "both", "BOTH", "true", 1, None, [True]),
    "tuning": ("default", "reference", "./tables", "/a/b.json", "refrence", "", 1, None),
    "hiden": (1,),
}  # fmt: skip


TOP_FIELDS: dict[str, tuple[object, ...]] = {
    "schema": (1, 2, 0, "1", True, None, [1]),
    "name": ("a", "", " ", 1, None, ["a"]),
    "targets": (["sm_100a", "sm_103f"], ["sm_900a"], [], "sm_90a", ["sm_90"], ["sm_80a"], None,
                ["sm_90a", "sm_90a"], [90], ["sm_090a"], {"sm_90a": 1}),
    "defaults": ({}, None, [], {"hidden": 8}, "tokens"),
    "routers": ([], None, {}, [[]], [None]),
    "router": ([],),
}  # fmt: skip


OPERANDS: tuple[dict[str, str], ...] = (
    {},
    {"weight_dtype": "fp32"},
    {"x_dtype": "fp32", "weight_dtype": "fp32"},
    {"x_dtype": "fp32"},
)


def _one_change_each(
    in_defaults: dict[str, str], in_router: dict[str, str]
) -> Iterator[dict[str, object]]:
    """Manifests that are right but for one value, in a router, in the defaults, or at the top.

    Defaults and router have these operand types besides.
    """

    def base() -> dict[str, object]:
        router = {"model": "M", "hidden": 8, "experts": 1, "tokens": "1-16", **in_router}
        return {
            "schema": 1,
            "name": "one",
            "targets": ["sm_90a"],
            "defaults": {"pdl": True, **in_defaults},
            "routers": [router],
        }

    for field, values in FIELDS.items():
        for value in values:
            yield {**base(), "routers": [{**base()["routers"][0], field: value}]}  # type: ignore[index]
            yield {**base(), "defaults": {**in_defaults, field: value}}
    for field in ("model", "hidden", "experts", "tokens"):
        router = {k: v for k, v in base()["routers"][0].items() if k != field}  # type: ignore[index]
        yield {**base(), "routers": [router]}
        yield {**base(), "routers": [router], "defaults": {**in_defaults, "tokens": 8}}
    for field, values in TOP_FIELDS.items():
        for value in values:
            yield {**base(), field: value}
        yield {k: v for k, v in base().items() if k != field}


@pytest.mark.parametrize("in_router", OPERANDS, ids=str)
@pytest.mark.parametrize("in_defaults", OPERANDS, ids=str)
def test_reader_and_schema_accept_the_same_manifests(
    in_defaults: dict[str, str], in_router: dict[str, str]
) -> None:
    """An editor that is content with what `build` refuses, or the reverse, misleads its user."""
    schema = jsonschema.Draft7Validator(json_schema())
    seen = []
    for manifest in _one_change_each(in_defaults, in_router):
        text = json.dumps(manifest)
        try:
            parse(text)
        except ManifestError as error:
            accepted, why = False, error.message
        else:
            accepted, why = True, ""
        assert schema.is_valid(manifest) == accepted, (text, why)
        seen.append(accepted)
    assert seen.count(False) > 90
    if not in_defaults and "x_dtype" not in in_router:
        assert seen.count(True) > 30


def test_the_schema_file_beside_the_manifests_is_what_the_command_prints() -> None:
    """The first line of every manifest names this file: absent or old, editors mark good fields."""
    path = Path(__file__).parents[2] / "manifests" / "llbf16-aot.schema.json"
    assert json.loads(path.read_text()) == json_schema()


def test_the_schema_refuses_what_the_reader_refuses() -> None:
    """Negative control: a schema that accepts everything would pass the tests above."""
    schema = json_schema()
    refused = 0
    for name, (text, _) in EXAMPLES.items():
        if name in BEYOND_SCHEMA:
            continue  # no YAML, or nothing that a schema can say
        refused += 1
        # An editor reads 4096.0 as the whole number that JSON Schema says it is.
        if name in ("float for a number", "tokens backwards"):
            continue
        accepted = jsonschema.Draft7Validator(schema).is_valid(_plain(text))
        assert not accepted, name
    assert refused > 10


def test_a_router_with_fp32_weights_asks_for_them_alone() -> None:
    """Catches operand types that a router has not from itself, its defaults or the rule."""
    text = good(("1-3", "[1-2, 64, 4096]\n    weight_dtype: fp32"))
    (router,) = parse(text).routers
    assert (router.x_dtype, router.weight_dtype) == (DType.BF16, DType.FP32)
    assert router.tokens == (1, 2, 64, 4096)
    problems = list(router.problems())
    assert {problem.weight_dtype for problem in problems} == {DType.FP32}
    for problem in problems:
        problem.check()
    text = good(
        ("routers:", "defaults: {weight_dtype: fp32, x_dtype: fp32}\nrouters:"), ("4096", "6148")
    )
    (router,) = parse(text).routers
    assert (router.x_dtype, router.weight_dtype, router.hidden) == (DType.FP32, DType.FP32, 6148)
    text = good(
        ("routers:", "defaults: {weight_dtype: fp32}\nrouters:"),
        ("1-3", "1-3\n    weight_dtype: bf16"),
    )
    assert parse(text).routers[0].weight_dtype is DType.BF16


def test_every_fp32_router_of_the_design_is_in_some_manifest() -> None:
    """A router whose weights are fp32 in its checkpoint must not be built for bf16 ones alone."""
    found = {
        (router.hidden, router.experts): router.tokens
        for name in packaged_manifests()
        if name != "fp32-routers"  # for benchmarks
        for router in Manifest.load(name).routers
        if router.weight_dtype is DType.FP32
    }
    assert set(found) >= {(6144, 256), (3072, 256), (6144, 128), (4096, 192), (8192, 64)}
    assert all(set(tokens) >= set(range(1, 33)) for tokens in found.values())


def test_every_bf16_router_of_the_design_is_in_some_manifest() -> None:
    """A family that is left out is a model that nobody can build by name."""
    shapes = {
        (router.hidden, router.experts)
        for name in packaged_manifests()
        for router in Manifest.load(name).routers
        if router.weight_dtype is DType.BF16
    }
    assert shapes >= {
        (7168, 256), (7168, 384), (4096, 256), (7168, 896), (2304, 256), (6144, 256), (5120, 160),
        (4096, 128), (2048, 128), (6144, 160), (2048, 512), (4096, 512), (2880, 32), (2880, 128),
        (5120, 16), (5120, 128), (4096, 8), (6144, 8), (7168, 48), (2688, 128), (7168, 128),
        (2048, 64), (6144, 264),
    }  # fmt: skip


def test_targets_keep_their_order() -> None:
    """The first target's artifacts are built first."""
    text = good(("[sm_90a]", "[sm_103a, sm_90a]"))
    assert parse(text).targets == (Target.parse("sm_103a"), Target.parse("sm_90a"))


def test_packaged_manifests_are_kept_parsed_as_they_are_written() -> None:
    """A parsed form that was left behind would preload other kernels than `build` built."""
    path = Path(manifest_module._folder()) / PARSED_FILE
    wanted = parsed_form(packaged_manifests())
    if UPDATE:
        path.write_bytes(wanted)
    assert path.read_bytes() == wanted


@pytest.mark.parametrize("name", packaged_manifests())
def test_a_packaged_manifest_is_the_same_parsed_before_and_now(name: str) -> None:
    """Catches a field that JSON loses, and an origin that names no file."""
    path = manifest_module._folder() / f"{name}.yaml"
    assert Manifest.load(name) == Manifest.load(path)


def test_loading_a_packaged_manifest_imports_no_yaml_parser(tmp_path: Path) -> None:
    """Its import takes longer than loading the kernels that the manifest asks for."""
    program = (
        "import sys; from llbf16_aot import Manifest; Manifest.load('dsv4'); "
        "print([name for name in sys.modules if name.startswith('ruamel')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("change", ["# edited\n", None, "broken"])
def test_a_manifest_that_was_edited_or_has_no_parsed_form_is_parsed(
    change: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parsed form is found by the text's digest: it can be missing, never wrong."""
    folder = manifest_module._folder()
    text = (folder / "dsv4.yaml").read_text()
    parsed = (folder / PARSED_FILE).read_bytes()
    if change == "# edited\n":
        text = text.replace("experts: 384", "experts: 385")
    (tmp_path / "dsv4.yaml").write_text(text)
    if change is not None:
        (tmp_path / PARSED_FILE).write_bytes(parsed if change != "broken" else parsed[:-40])
    monkeypatch.setattr(manifest_module, "_folder", lambda: tmp_path)
    monkeypatch.chdir("/")
    loaded = Manifest.load("dsv4")
    assert loaded == Manifest.parse(text, origin=str(tmp_path / "dsv4.yaml"))
