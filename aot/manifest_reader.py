"""The reader of manifests: YAML nodes become frozen values, or a list of all that is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from .dispatch import PACKAGED_TABLES
from .errors import AotError, ManifestError, TargetError
from .key import check_target
from .manifest import MANIFEST_SCHEMA, MAX_ROUTERS, Manifest, Router
from .problem import (
    FEW_TOKENS,
    MAX_EXPERTS,
    MAX_HIDDEN,
    OPERAND_TOKENS,
    VECTOR_ELEMENTS,
    DType,
    Epilogue,
    Target,
    hidden_multiple,
)
from .text import nearest
from .toolchain import KNOWN_TARGETS

if TYPE_CHECKING:
    from ruamel.yaml.nodes import Node

__all__ = ["MAX_DEPTH", "MAX_ERRORS", "MAX_NODES", "did_you_mean", "read_manifest"]

MAX_DEPTH = 8
"""Nested lists and mappings; the schema has four: manifest, routers, router, tokens."""

MAX_NODES = 6_000
"""Values of a manifest: composing one takes up to 0.1 ms, and any text ends within a second."""

MAX_ERRORS = 20
"""What is told of one manifest: beyond that the reader mends and runs again."""


def read_manifest(text: str, origin: str) -> Manifest:
    """The manifest of a YAML text; raises ManifestError that lists all that is wrong with it."""
    return _Reader(origin).manifest(_compose(text, origin))


def did_you_mean(value: str, allowed: Iterable[str]) -> str:
    """The end of a message about a value that is not allowed: the nearest that is, if any is."""
    close = nearest(value, allowed)
    return "" if close is None else f"; did you mean {close!r}?"


def _compose(text: str, origin: str) -> Node | None:
    """The YAML nodes of the one document; nothing is constructed, and nodes are bounded."""
    from ruamel.yaml import YAML
    from ruamel.yaml.composer import Composer
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.events import AliasEvent, CollectionStartEvent, ScalarEvent

    class _RefusedError(MarkedYAMLError):
        """YAML that a manifest does not use, with its place."""

    class _Bounded(Composer):
        """Refuses before it composes: a node too many, nested too deeply, or with a second name."""

        _nodes = 0
        _level = 0

        def compose_document(self) -> Any:
            start = self.parser.peek_event()
            if start.version is not None and tuple(start.version) != (1, 2):
                # 1.1 reads `yes` as true and 010 as 8: the same file would mean something else.
                version = ".".join(map(str, start.version))
                _refuse(f"manifests are YAML 1.2, not {version}", start)
            return super().compose_document()

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.parser.peek_event()
            if isinstance(event, AliasEvent) or event.anchor is not None:
                _refuse("anchors and aliases are not used in manifests", event)
            if isinstance(event, ScalarEvent | CollectionStartEvent) and event.ctag is not None:
                _refuse(f"tags are not used in manifests: {str(event.ctag)[:80]}", event)
            self._nodes += 1
            self._level += 1
            if self._nodes > MAX_NODES:
                _refuse(f"more than {MAX_NODES} values", event)
            if self._level > MAX_DEPTH:
                _refuse(f"nested too deeply, at most {MAX_DEPTH} levels are read", event)
            node = super().compose_node(parent, index)
            self._level -= 1
            return node

    def _refuse(problem: str, event: Any) -> NoReturn:
        raise _RefusedError(problem=problem, problem_mark=event.start_mark)

    crowd = _CROWD.search(text)
    if crowd is not None:
        line = text.count("\n", 0, crowd.start()) + 1
        raise ManifestError(
            f"{origin}:{line}: nested too deeply, at most {MAX_DEPTH} levels are read", hint=_HINT
        )
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Bounded
    try:
        node: Node | None = yaml.compose(text)
    except _RefusedError as error:
        line = error.problem_mark.line + 1
        raise ManifestError(f"{origin}:{line}: {error.problem}", hint=_HINT) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        problem = error.problem or error.context or "not YAML"
        raise ManifestError(f"{origin}:{line}: not valid YAML: {problem}") from error
    except YAMLError as error:
        raise ManifestError(f"{origin}:1: not valid YAML: {error}") from error
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        # ruamel.yaml lets some of these through for malformed directives and escapes.
        raise ManifestError(f"{origin}:1: not valid YAML: {error}") from error
    return node


_T = TypeVar("_T")

_HINT = "llbf16-aot schema prints what is allowed"

# The YAML parser looks at all open brackets with each new one, before its nodes can be counted.
_CROWD = re.compile(r"(?:[\[{][^\[\]{}\n]{0,16}){64}")

_RANGE = re.compile(r"([0-9]{1,6})\s*-\s*([0-9]{1,6})")
_NUMBER = re.compile(r"[0-9]{1,9}")
_TAG = "tag:yaml.org,2002:"

_OPTIONAL = ("tokens", "x_dtype", "weight_dtype", "out_dtype", "epilogue", "pdl", "tuning")
_ROUTER = ("model", "hidden", "experts", *_OPTIONAL)
_TOP = ("schema", "name", "targets", "defaults", "routers")


class _Wrong(Exception):  # noqa: N818 - a message on its way to the list, never seen outside
    """One thing that is wrong, with its line."""

    def __init__(self, node: Node, message: str) -> None:
        super().__init__(message)
        self.line: int = node.start_mark.line + 1


class _Reader:
    """Turns YAML nodes into a manifest, and collects what is wrong with them."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._wrong: dict[tuple[int, str], None] = {}
        self._count = 0
        self._optional: dict[str, Callable[[Node, str], object]] = {
            "out_dtype": self._out_dtypes,
            "epilogue": self._epilogues,
            "pdl": self._pdl,
            "tuning": self._tuning,
        }

    def manifest(self, root: Node | None) -> Manifest:
        if root is None:
            self._fail_now(1, "the manifest is empty")
        try:
            top = self._mapping(root, "the manifest", _TOP)
        except _Wrong as wrong:
            self._fail_now(wrong.line, str(wrong))
        for field in ("schema", "name", "targets", "routers"):
            if field not in top:
                self._note(root, f"field {field!r} is missing")
        schema = self._field(top, "schema", self._schema, MANIFEST_SCHEMA)
        name = self._field(top, "name", self._text, "")
        no_targets: tuple[Target, ...] = ()
        targets = self._field(top, "targets", self._targets, no_targets)
        defaults: dict[str, Node] = {}
        defaults = self._field(top, "defaults", self._defaults, defaults)
        for field, read in self._optional.items():
            # Here too, and not by routers alone: each of them may have a field of its own instead.
            self._field(defaults, field, read, None)
        _, _, largest = self._operands(defaults)
        self._field(defaults, "tokens", partial(self._tokens, largest=largest), None)
        nodes: list[Node] = []
        nodes = self._field(top, "routers", self._router_nodes, nodes)
        routers: dict[Router, None] = {}
        for node in nodes:
            router = self._router(node, defaults)
            if router is not None:
                if router in routers:
                    self._note(node, f"router {router.model!r} stands twice with the same fields")
                routers[router] = None
        if self._wrong:
            self._fail()
        return Manifest(schema, name, targets, tuple(routers), self._origin)

    def _defaults(self, node: Node, field: str) -> dict[str, Node]:
        return self._mapping(node, field, _OPTIONAL, inside="defaults")

    def _router_nodes(self, node: Node, field: str) -> list[Node]:
        members = self._list(node, field)
        if not members:
            raise _Wrong(node, "routers is empty, must list at least one router")
        if len(members) > MAX_ROUTERS:
            raise _Wrong(node, f"routers lists {len(members)}, at most {MAX_ROUTERS} are read")
        return members

    def _router(self, node: Node, defaults: dict[str, Node]) -> Router | None:
        before = self._count
        try:
            own = self._mapping(node, "a router", _ROUTER, inside="a router")
        except _Wrong as wrong:
            self._add(wrong.line, str(wrong))
            return None
        for field in ("model", "hidden", "experts"):
            if field not in own:
                self._note(node, f"a router lacks the field {field!r}")
        fields = {**defaults, **own}
        if "tokens" not in fields:
            self._note(node, "a router lacks the field 'tokens', and so do the defaults")
        x_dtype, weight_dtype, largest = self._operands(fields)
        hidden = partial(self._hidden, multiple=hidden_multiple(x_dtype, weight_dtype))
        router = Router(
            model=self._field(fields, "model", self._text, ""),
            hidden=self._field(fields, "hidden", hidden, VECTOR_ELEMENTS),
            experts=self._field(fields, "experts", self._experts, 1),
            tokens=self._field(fields, "tokens", partial(self._tokens, largest=largest), (1,)),
            x_dtype=x_dtype,
            weight_dtype=weight_dtype,
            out_dtypes=self._field(fields, "out_dtype", self._out_dtypes, (DType.FP32,)),
            pdl=self._field(fields, "pdl", self._pdl, (True, False)),
            tuning=self._field(fields, "tuning", self._tuning, "default"),
            epilogues=self._field(fields, "epilogue", self._epilogues, (Epilogue.NONE,)),
        )
        return router if self._count == before else None

    # One method a kind of value: each returns it, or raises _Wrong with what is allowed.

    def _schema(self, node: Node, field: str) -> int:
        value = self._integer(node, field, f"{MANIFEST_SCHEMA}")
        if value != MANIFEST_SCHEMA:
            raise _Wrong(
                node, f"{field} is {value}, this version reads schema {MANIFEST_SCHEMA} only"
            )
        return value

    def _text(self, node: Node, field: str) -> str:
        value = self._string(node, field, "text")
        if not value.strip() or not value.isprintable():
            raise _Wrong(node, f"{field} is {value!r}, must be printable text, not empty")
        return value

    def _targets(self, node: Node, field: str) -> tuple[Target, ...]:
        targets: dict[Target, None] = {}
        members = self._list(node, field)
        if not members:
            raise _Wrong(node, "targets is empty, must list at least one, for example sm_90a")
        for member in members:
            text = self._string(member, field, "a target such as sm_90a")
            try:
                target = Target.parse(text)
                check_target(target)
                if text not in KNOWN_TARGETS:
                    raise TargetError(
                        f"target {text} is unknown to the compiler; supported are "
                        f"{', '.join(KNOWN_TARGETS)}"
                    )
            except AotError as error:
                raise _Wrong(
                    member, f"{field}: {error.message}" + (f" ({error.hint})" if error.hint else "")
                ) from error
            if target in targets:
                raise _Wrong(member, f"{field} lists {text} twice")
            targets[target] = None
        return tuple(targets)

    def _operands(self, fields: dict[str, Node]) -> tuple[DType, DType, int]:
        """The types of x and weight, and the largest M of kernels that take them together."""
        x_dtype = self._field(fields, "x_dtype", self._operand, DType.BF16)
        weight_dtype = self._field(fields, "weight_dtype", self._operand, DType.BF16)
        largest = OPERAND_TOKENS.get((x_dtype, weight_dtype))
        if largest is not None:
            return x_dtype, weight_dtype, largest
        # Two allowed values that no kernel takes together: x is at fault, and is not the default.
        allowed = [x.value for x, w in OPERAND_TOKENS if w is weight_dtype]
        self._note(
            fields["x_dtype"],
            f"x_dtype is {x_dtype.value!r} with {weight_dtype.value} weights, "
            f"must be {' or '.join(allowed)}",
        )
        return DType.BF16, weight_dtype, OPERAND_TOKENS[DType.BF16, weight_dtype]

    def _hidden(self, node: Node, field: str, *, multiple: int) -> int:
        allowed = f"a multiple of {multiple} from {multiple} to {MAX_HIDDEN}"
        value = self._integer(node, field, allowed)
        if not 1 <= value <= MAX_HIDDEN or value % multiple:
            raise _Wrong(node, f"{field} is {value}, must be {allowed}")
        return value

    def _experts(self, node: Node, field: str) -> int:
        allowed = f"a number from 1 to {MAX_EXPERTS}"
        value = self._integer(node, field, allowed)
        if not 1 <= value <= MAX_EXPERTS:
            raise _Wrong(node, f"{field} is {value}, must be {allowed}")
        return value

    def _tokens(self, node: Node, field: str, *, largest: int) -> tuple[int, ...]:
        """Values of M up to `largest`; ranges end at 64, so that short text is a short list."""
        ranges = f"a range up to {FEW_TOKENS}" if largest > FEW_TOKENS else "a range"
        allowed = f"a number from 1 to {largest}, {ranges} such as 1-16, or a list of both"
        values: set[int] = set()
        members = self._one_or_list(node, field)
        if not members:
            raise _Wrong(node, f"{field} is empty, must be {allowed}")
        if len(members) > FEW_TOKENS:
            # Every router reads the defaults' list again: its length must not multiply.
            raise _Wrong(
                node, f"{field} lists {len(members)} entries, at most {FEW_TOKENS} are read"
            )
        for member in members:
            value = _scalar(member)
            match = _RANGE.fullmatch(value or "") if _kind(member) == "text" else None
            if match is not None:
                first, last = int(match[1]), int(match[2])
            else:
                first = last = self._integer(member, field, allowed)
            end = largest if match is None else min(largest, FEW_TOKENS)
            if not 1 <= first <= last <= end:
                raise _Wrong(member, f"{field} is {value}, must be {allowed}")
            values.update(range(first, last + 1))
        return tuple(sorted(values))

    def _operand(self, node: Node, field: str) -> DType:
        return DType(self._choice(node, field, (DType.BF16.value, DType.FP32.value)))

    def _out_dtypes(self, node: Node, field: str) -> tuple[DType, ...]:
        return tuple(map(DType, self._choices(node, field, tuple(d.value for d in DType))))

    def _epilogues(self, node: Node, field: str) -> tuple[Epilogue, ...]:
        return tuple(map(Epilogue, self._choices(node, field, tuple(e.value for e in Epilogue))))

    def _choices(self, node: Node, field: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
        """One or several of some values, each once."""
        members = self._one_or_list(node, field)
        if not members:
            raise _Wrong(node, f"{field} is empty, must be one or a list of {', '.join(allowed)}")
        found: dict[str, None] = {}
        for member in members:
            value = self._choice(member, field, allowed)
            if value in found:
                raise _Wrong(member, f"{field} lists {value} twice")
            found[value] = None
        return tuple(found)

    def _pdl(self, node: Node, field: str) -> tuple[bool, ...]:
        value = _scalar(node) or ""
        if _kind(node) == "bool":
            return (value.lower() == "true",)
        if _kind(node) == "text" and value == "both":
            return (True, False)
        raise _Wrong(node, f"{field} is {_shown(node)}, must be true, false or both")

    def _tuning(self, node: Node, field: str) -> str:
        value = self._string(node, field, "default, reference or a path")
        if value in PACKAGED_TABLES:
            return value
        if "/" in value and "\0" not in value:
            try:
                return str((Path(self._origin).parent / Path(value).expanduser()).absolute())
            except RuntimeError as error:
                raise _Wrong(
                    node, f"{field} is {value!r}, and the home folder that it names is unknown"
                ) from error
        raise _Wrong(
            node,
            f"{field} is {value!r}, must be default, reference or a path such as ./tuning"
            f"{did_you_mean(value, PACKAGED_TABLES)}",
        )

    # Shapes of nodes.

    def _mapping(
        self, node: Node, what: str, allowed: tuple[str, ...], *, inside: str = "the manifest"
    ) -> dict[str, Node]:
        """The fields of a mapping; unknown and repeated ones are noted and left out."""
        if _kind(node) != "mapping":
            raise _Wrong(node, f"{what} is {_shown(node)}, must be a mapping of fields")
        fields: dict[str, Node] = {}
        for key, value in node.value:
            name = _scalar(key) if _kind(key) == "text" else None
            if name is None or name not in allowed:
                shown = _shown(key)
                self._note(
                    key,
                    f"{inside} has the unknown field {shown}{did_you_mean(name or '', allowed)} "
                    f"(allowed: {', '.join(allowed)})",
                )
            elif name in fields:
                self._note(key, f"field {name!r} stands twice")
            else:
                fields[name] = value
        return fields

    def _list(self, node: Node, field: str) -> list[Node]:
        if _kind(node) != "list":
            raise _Wrong(node, f"{field} is {_shown(node)}, must be a list")
        return list(node.value)

    def _one_or_list(self, node: Node, field: str) -> list[Node]:
        return self._list(node, field) if _kind(node) == "list" else [node]

    def _string(self, node: Node, field: str, allowed: str) -> str:
        value = _scalar(node)
        if _kind(node) != "text" or value is None:
            raise _Wrong(node, f"{field} is {_shown(node)}, must be {allowed}")
        return value

    def _integer(self, node: Node, field: str, allowed: str) -> int:
        value = _scalar(node) or ""
        if _kind(node) != "number" or not _NUMBER.fullmatch(value):
            raise _Wrong(node, f"{field} is {_shown(node)}, must be {allowed}")
        return int(value)

    def _choice(self, node: Node, field: str, allowed: tuple[str, ...]) -> str:
        value = self._string(node, field, " or ".join(allowed))
        if value not in allowed:
            raise _Wrong(
                node,
                f"{field} is {value!r}, must be {' or '.join(allowed)}"
                f"{did_you_mean(value, allowed)}",
            )
        return value

    # Errors.

    def _field(
        self, fields: dict[str, Node], name: str, read: Callable[[Node, str], _T], instead: _T
    ) -> _T:
        """A field's value; where it is absent, or wrong and noted as such, `instead`."""
        if name not in fields:
            return instead
        try:
            return read(fields[name], name)
        except _Wrong as wrong:
            self._add(wrong.line, str(wrong))
            return instead

    def _note(self, node: Node, message: str) -> None:
        self._add(node.start_mark.line + 1, message)

    def _add(self, line: int, message: str) -> None:
        # A wrong default is met again by every router that takes it: counted, but told once.
        self._count += 1
        self._wrong[line, message] = None
        if len(self._wrong) == MAX_ERRORS:
            self._fail(more=True)

    def _fail_now(self, line: int, message: str) -> NoReturn:
        self._wrong = {(line, message): None}
        self._fail()

    def _fail(self, *, more: bool = False) -> NoReturn:
        wrong = sorted(self._wrong)
        lines = [f"{self._origin}:{line}: {message}" for line, message in wrong]
        if more:
            lines.append(f"{self._origin}:{wrong[-1][0]}: stopped after {MAX_ERRORS} errors")
        raise ManifestError("\n".join(lines), hint=_HINT)


def _kind(node: Node) -> str:
    """What a node is: mapping, list, text, number, bool, or its tag where it is none of these."""
    known = {"map": "mapping", "seq": "list", "str": "text", "int": "number", "bool": "bool"}
    tag = str(node.tag)
    return known.get(tag.removeprefix(_TAG), tag) if tag.startswith(_TAG) else tag


def _scalar(node: Node) -> str | None:
    return node.value if isinstance(node.value, str) else None


def _shown(node: Node) -> str:
    """A node as messages name it: a short scalar as it stands, else what it is."""
    value = _scalar(node)
    if value is None:
        return f"a {_kind(node)}" if _kind(node) in ("mapping", "list") else _kind(node)
    short = value if len(value) <= 40 else f"{value[:37]}..."
    return repr(short) if _kind(node) == "text" else short or "empty"
