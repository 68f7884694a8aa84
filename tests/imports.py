"""The package's imports, read from its source: wherever they stand, whether or not they run."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGE = "llbf16_aot"
COMPUTED = "<computed>"
"""The target of an import whose name is not written out in the source."""


class Module(NamedTuple):
    """One module of the package: its full name, its source, and whether it is a package's own."""

    name: str
    source: str
    is_package: bool

    @property
    def unit(self) -> str:
        """The first part of the name inside the package: `cli` for `llbf16_aot.cli.app`."""
        return self.name.removeprefix(PACKAGE).strip(".").partition(".")[0]


class Import(NamedTuple):
    """An import statement or a call that imports: who, whom, and in which line."""

    importer: str
    target: str
    line: int

    @property
    def root(self) -> str:
        """The top-level package of the target."""
        return self.target.partition(".")[0]


def package_modules() -> dict[str, Module]:
    """Every module of the installed package by name, wherever its folders lie."""
    found: dict[str, Module] = {}
    for package in (PACKAGE, f"{PACKAGE}.kernels", f"{PACKAGE}.manifests"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join((package, *(parts[:-1] if is_package else parts)))
            found[name] = Module(name, path.read_text(encoding="utf-8"), is_package)
    return found


def imports(module: Module, known: Iterable[str]) -> Iterator[Import]:
    """Everything that a module may import; a name that is itself a module counts as that module."""
    names = frozenset(known)
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    for node in ast.walk(ast.parse(module.source)):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _resolve("." * node.level + (node.module or ""), package)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                targets.append(inner if inner in names else base)
        elif isinstance(node, ast.Call) and _is_import_call(node.func):
            written = node.args[0] if node.args else None
            if isinstance(written, ast.Constant) and isinstance(written.value, str):
                targets = [_resolve(written.value, package)]
            else:
                targets = [COMPUTED]
        for target in dict.fromkeys(targets):
            yield Import(module.name, target, getattr(node, "lineno", 0))


def all_imports(modules: Mapping[str, Module]) -> list[Import]:
    """The imports of all modules, in the order of the modules."""
    return [found for module in modules.values() for found in imports(module, modules)]


def _resolve(name: str, package: str) -> str:
    bare = name.lstrip(".")
    level = len(name) - len(bare)
    if not level:
        return bare
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, bare] if bare else base)


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")
