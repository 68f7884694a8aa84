"""The walls inside the package: who may import the compiler, torch and the driver, and whom at all.

Each scan is also run over a planted violation, which it must find.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from imports import COMPUTED, PACKAGE, Import, Module, all_imports, package_modules
from llbf16_aot.backends import BACKENDS
from llbf16_aot.store import Store
from support import make_artifact

TESTS = Path(__file__).parent
MODULES = package_modules()

TORCH_FACING = frozenset(
    {"devices", "fallback", "measure", "ops", "routes", "runtime", "tensors"}
    | {"tiers", "gate", "patch", "vllm_plugin"}
)

LAYERS = (
    {"errors", "text", "toolchain"},
    {"problem", "files", "outfile", "sections"},
    {"launch", "backends", "key", "fp32_tiles", "dispatch", "location"}
    | {"manifest", "manifest_reader", "manifest_schema", "manifests"},
    {"artifact", "compat", "elf", "elfdiff", "protocol"}
    | {"search", "survey", "tablewriter", "timing"},
    {"layout", "locks", "store", "layers", "pins", "scan", "prune", "repair"}
    | {"driver", "kernels", "compiler"},
    {"environment"},
    {"child", "pool", "plan", "candidates", "report", "builder", "check", "explain"}
    | {"launcher", "loader", "wanted", "forks", "devices", "tensors", "routes", "fallback"}
    | {"runtime", "ops", "measure", "tiers", "gate", "patch", "vllm_plugin"}
    | {"mend", "doctor", "tune"},
    {"bench", "plot"},
    {"cli", "__main__"},
)
"""What each module may import: its own layer and those above it in this list, without cycles.

A new module must be given its layer here. The package itself is a facade of lazy imports and
belongs to none.
"""

BUILDER_SIDE = frozenset(
    {"child", "pool", "plan", "candidates", "report", "builder", "check", "explain"}
    | {"compiler", "kernels"}
)
RUNTIME_SIDE = frozenset({"launcher", "loader", "wanted", "forks", "driver"}) | TORCH_FACING

CYCLES = [[f"{PACKAGE}.manifest", f"{PACKAGE}.manifest_reader", f"{PACKAGE}.manifest"]]
"""The one allowed circle: `Manifest.parse` is the public name of what its reader does."""


def planted(name: str, source: str) -> dict[str, Module]:
    """The package with a violation added to one of its modules, or with a new module."""
    full = f"{PACKAGE}.{name}"
    known = MODULES.get(full, Module(full, "", is_package=False))
    return {**MODULES, full: known._replace(source=f"{known.source}\n{source}\n")}


def text(found: Iterable[Import]) -> list[str]:
    return [f"{one.importer}:{one.line} imports {one.target}" for one in found]


# --- The source -------------------------------------------------------------------------------


def foreign(modules: Mapping[str, Module], root: str, allowed: Callable[[str], bool]) -> list[str]:
    """Imports of a top-level package by modules whose unit is not allowed to."""
    return text(
        one
        for one in all_imports(modules)
        if one.root == root and not allowed(modules[one.importer].unit)
    )


WALLS: dict[str, Callable[[str], bool]] = {
    "cutlass": {"compiler", "kernels"}.__contains__,
    "torch": TORCH_FACING.__contains__,
    "cuda": {"kernels"}.__contains__,
}


@pytest.mark.parametrize("root", WALLS)
def test_only_the_modules_behind_a_wall_import_what_is_behind_it(root: str) -> None:
    """Catches an import of compiler, torch or driver where it would break a machine without it."""
    assert foreign(MODULES, root, WALLS[root]) == []


@pytest.mark.parametrize(
    ("root", "name", "source"),
    [
        ("cutlass", "builder", "import cutlass"),
        ("cutlass", "cli.build", "def late():\n    import cutlass.cute as cute"),
        ("cutlass", "backends.dotprod", "from cutlass.cute import compile"),
        ("cutlass", "new", "import importlib\nimportlib.import_module('cutlass.cute')"),
        ("torch", "store", "if TYPE_CHECKING:\n    import torch"),
        ("torch", "loader", "try:\n    from torch import Tensor\nexcept ImportError:\n    pass"),
        ("torch", "launcher", "torch = __import__('torch')"),
        ("cuda", "driver", "from cuda.bindings import driver"),
        ("cuda", "doctor", "class A:\n    def f(self):\n        import cuda.core"),
    ],
)
def test_the_scan_for_walls_finds_a_planted_import(root: str, name: str, source: str) -> None:
    """The control: a scan that overlooks functions, branches or calls proves nothing."""
    before = foreign(MODULES, root, WALLS[root])
    found = [one for one in foreign(planted(name, source), root, WALLS[root]) if one not in before]
    assert len(found) == 1
    assert found[0].startswith(f"{PACKAGE}.{name}:")


def driver_names(modules: Mapping[str, Module]) -> set[str]:
    """What kernels take from the driver's bindings."""
    used: set[str] = set()
    for module in modules.values():
        if module.unit != "kernels":
            continue
        tree = ast.parse(module.source)
        aliases: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    if name.name.partition(".")[0] == "cuda":
                        aliases.add(name.asname or "cuda")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cuda"):
                used |= {name.name for name in node.names}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in aliases
            ):
                used.add(node.attr)
    return used


def test_kernels_take_nothing_from_the_driver_but_the_type_of_a_stream() -> None:
    """Catches a kernel module that talks to a GPU: it must compile where there is none."""
    assert driver_names(MODULES) <= {"CUstream"}
    assert "cuInit" in driver_names(planted("kernels.common", "import cuda as c\nc.cuInit(0)"))
    assert "cuInit" in driver_names(planted("kernels.common", "from cuda.x import cuInit"))


def names_libcuda(modules: Mapping[str, Module]) -> set[str]:
    """Modules that name the driver's library in a string that is code, not documentation."""
    found = set()
    for module in modules.values():
        tree = ast.parse(module.source)
        documentation = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and "libcuda" in node.value
                and id(node) not in documentation
            ):
                found.add(module.unit)
    return found


def test_only_the_driver_module_names_the_drivers_library() -> None:
    """Catches a second way to the driver, through ctypes."""
    assert names_libcuda(MODULES) <= {"driver"}
    plant = planted("loader", "import ctypes\nctypes.CDLL('libcuda.so.1')")
    assert "loader" in names_libcuda(plant)


# --- The order of the layers ------------------------------------------------------------------


def inner_imports(modules: Mapping[str, Module]) -> list[Import]:
    """Imports of one module of the package by another, the facade's lazy ones left out."""
    return [one for one in all_imports(modules) if one.root == PACKAGE and one.importer != PACKAGE]


def upward(modules: Mapping[str, Module]) -> list[str]:
    """Imports of a module that is in a later layer, in none, or on the other side."""
    rank = {unit: number for number, layer in enumerate(LAYERS) for unit in layer}

    def wrong(one: Import) -> bool:
        source, target = modules[one.importer].unit, one.target.split(".")[1:2]
        if not target or source not in rank or target[0] not in rank:
            return True
        sides = (BUILDER_SIDE, RUNTIME_SIDE)
        crosses = any(source in a and target[0] in b for a, b in (sides, sides[::-1]))
        return rank[target[0]] > rank[source] or crosses

    return text(one for one in inner_imports(modules) if wrong(one))


def unranked(modules: Mapping[str, Module]) -> set[str]:
    return {module.unit for module in modules.values() if module.unit} - set().union(*LAYERS)


def cycles(modules: Mapping[str, Module]) -> list[list[str]]:
    """Modules that import each other in a circle, counting imports inside functions too."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for one in inner_imports(modules):
        if one.target in modules:
            graph[one.importer].add(one.target)
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return found


def test_every_module_has_its_layer() -> None:
    """Catches a new module whose place nobody decided: give it one in LAYERS above."""
    assert unranked(MODULES) == set()
    assert unranked(planted("new", "")) - unranked(MODULES) == {"new"}


def test_the_documentation_lists_the_layers_as_they_are() -> None:
    """Catches a page on the architecture that tells of modules as they once were."""
    page = (TESTS.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    items = re.findall(r"^\d+\. (.*(?:\n   .*)*)", page, flags=re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", item)) for item in items] == [set(x) for x in LAYERS]
    (torch,) = re.findall(r"^- only (.*) import torch", page, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", torch)) == TORCH_FACING


def test_imports_run_one_way() -> None:
    """Catches a lower layer that imports a higher one, and builder and runtime that mix."""
    assert upward(MODULES) == []


def test_no_modules_import_each_other() -> None:
    """Catches a cycle, also one that an import inside a function hides."""
    assert cycles(MODULES) == CYCLES


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("store", "from .builder import build"),
        ("errors", "def late():\n    from .problem import Problem"),
        ("backends.dotprod", "from ..cli.app import main"),
        ("artifact", "from . import store"),
        ("runtime", "from .pool import CompilerPool"),
        ("plan", "from .driver import CudaDriver"),
        ("loader", "import llbf16_aot"),
        ("elf", "from .unheard_of import thing"),
    ],
)
def test_the_scan_for_layers_finds_a_planted_import(name: str, source: str) -> None:
    """The control for the order of the layers."""
    assert len(set(upward(planted(name, source))) - set(upward(MODULES))) == 1


def test_the_scan_for_cycles_finds_a_planted_one() -> None:
    """The control for cycles: within a layer, and hidden in a function."""
    found = cycles(planted("key", "def late():\n    from .dispatch import dispatch"))
    assert [f"{PACKAGE}.key", f"{PACKAGE}.dispatch"] in [sorted(c[:-1])[::-1] for c in found]


def test_names_of_imports_are_computed_only_where_the_layers_allow_for_it() -> None:
    """Catches an import that the scans cannot read, beside the four known ones."""
    computed = {one.importer for one in all_imports(MODULES) if one.target == COMPUTED}
    assert computed == {
        PACKAGE,
        f"{PACKAGE}.cli.app",
        f"{PACKAGE}.compiler",
        f"{PACKAGE}.manifest",
    }


# --- Fresh interpreters -----------------------------------------------------------------------

ABSENT = """
import sys

class Absent:
    '''A finder that does not find some packages, as if they were not installed; notes who asked.'''

    names = frozenset(filter(None, sys.argv[1].split(",")))
    asked = set()

    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in Absent.names:
            Absent.asked.add(name)
            return None
        return self._finder.find_spec(name, path, target)

for name in Absent.names:
    assert name not in sys.modules, name
sys.meta_path[:] = [Absent(finder) for finder in sys.meta_path]
"""


def fresh(
    code: str, *arguments: str, absent: Iterable[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter in which some packages are not installed."""
    return subprocess.run(
        [sys.executable, "-B", "-c", ABSENT + code, ",".join(absent), *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


RUN_COMMAND = """
from llbf16_aot.cli import main
code = main(sys.argv[2:])
sys.stdout.flush()
print("asked for:", *sorted(Absent.asked), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("walls") / "store")
    store.publish(make_artifact())
    return store


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "--version",
        "build --help",
        "plan --help",
        "list --help",
        "show --help",
        "verify --help",
        "path --help",
        "doctor --help",
        "schema --help",
        "build dsv4 --dry-run",
        "plan dsv4",
        "list",
        "verify",
        "show DIGEST",
        "path DIGEST",
        "schema",
    ],
)
def test_commands_work_without_torch_compiler_and_driver(command: str, filled: Store) -> None:
    """Catches a command that imports, or only tries to import, what a small image does not have."""
    (digest,) = filled.digests()
    done = fresh(
        RUN_COMMAND,
        *command.replace("DIGEST", digest).split(),
        absent=("torch", "cutlass", "cuda"),
        LLBF16_AOT_STORE=str(filled.root),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "asked for:\n" in done.stderr


def test_doctor_reports_what_is_absent_and_goes_on(filled: Store) -> None:
    """Catches a diagnosis that dies of what it should diagnose."""
    done = fresh(
        RUN_COMMAND,
        "doctor",
        "--json",
        absent=("torch", "cutlass", "cuda"),
        LLBF16_AOT_STORE=str(filled.root),
    )
    assert done.returncode in (0, 1), done.stderr
    assert "internal error" not in done.stdout + done.stderr
    assert json.loads(done.stdout)["schema"] == 1
    assert "torch" not in done.stderr
    assert "cutlass" not in done.stderr


def test_the_interpreter_without_packages_notices_an_import_of_them() -> None:
    """The control: the package is really absent there, and asking for it is noted."""
    code = """
try:
    import cutlass.cute
except ModuleNotFoundError as error:
    print(error.name, *Absent.asked)
"""
    assert fresh(code, absent=("cutlass",)).stdout == "cutlass cutlass\n"


LOAD_AND_RUN = """
sys.path[:0] = sys.argv[2:4]
import torch
from fake_gpu import FakeDevices, FakeDriver
from llbf16_aot import load_and_run, runtime
from llbf16_aot.dispatch import dispatch, load_table
from llbf16_aot.problem import Problem, Target
from llbf16_aot.store import Store
from pathlib import Path
from support import artifact_for

target = Target.parse("sm_90a")
key = dispatch(Problem(2, 16, 1024), target, load_table("reference", target))
store = Store(Path(sys.argv[4]))
store.publish(artifact_for(key))
service = runtime.Runtime(
    store, tuning="reference", driver=FakeDriver([store.get(key.digest())]), devices=FakeDevices()
)
runtime._Process.runtime = service
x, weight = (torch.randn(rows, 1024).to(torch.bfloat16) for rows in (2, 16))
torch.testing.assert_close(load_and_run(x, weight), (x.double() @ weight.double().T).float())
stats = service.stats()
assert (stats.hits, stats.loads, stats.misses, stats.fallbacks) == (1, 1, {}, 0), stats
mine = {name for name in Absent.asked if name.partition(".")[0] == "cutlass"}
assert not mine, mine
print("served")
"""


def test_load_and_run_serves_without_the_compiler(tmp_path: Path) -> None:
    """Catches a serving process that needs the compiler: from a real store to a launch."""
    done = fresh(
        LOAD_AND_RUN,
        str(TESTS),
        str(TESTS / "aot"),
        str(tmp_path / "store"),
        absent=("cutlass",),
    )
    assert (done.stdout, done.returncode) == ("served\n", 0), done.stderr


IMPORT_ALL = """
import importlib
for name in sys.argv[2:]:
    importlib.import_module(name)
print(*sorted({"cutlass", "cuda", "torch"} & set(sys.modules)))
"""

PLAIN = sorted(
    name
    for name, module in MODULES.items()
    if module.unit not in TORCH_FACING | {"kernels", "compiler"}
)


def test_importing_the_package_loads_neither_torch_nor_compiler_nor_driver() -> None:
    """Catches an import at the top of a module: `import llbf16_aot` would cost seconds."""
    assert fresh(IMPORT_ALL, *PLAIN).stdout == "\n"


IMPORT_ON_TOP_OF_TORCH = """
import importlib, torch
before = set(sys.modules)
for name in sys.argv[2:]:
    importlib.import_module(name)
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new & {"cutlass", "cuda", "llbf16_aot"}))
"""


def test_importing_the_runtime_loads_nothing_but_torch() -> None:
    """Catches a driver or a compiler that is loaded by an import; torch loads bindings itself."""
    names = (f"{PACKAGE}.{unit}" for unit in sorted(TORCH_FACING))
    assert fresh(IMPORT_ON_TOP_OF_TORCH, *names).stdout == f"{PACKAGE}\n"


IMPORT_QUIETLY = """
import json, os

read, done = set(), []

class Recorder(type(os.environ)):
    def __getitem__(self, name):
        read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name):
        read.add(name)
        return super().__contains__(name)

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = (
    "os.mkdir os.rename os.remove os.rmdir os.link os.symlink os.chmod os.chown os.truncate "
    "os.utime os.exec os.fork os.forkpty os.posix_spawn os.spawn os.system os.putenv "
    "subprocess.Popen socket.connect socket.bind"
).split()

def watch(event, arguments):
    if event == "open":
        if (arguments[2] or 0) & WRITES:
            done.append(f"open {arguments[0]}")
    elif event in CHANGES:
        done.append(f"{event} {arguments[:1]}")

import importlib
os.environ.__class__ = Recorder
sys.addaudithook(watch)
for name in sys.argv[2:]:
    importlib.import_module(name)
print(json.dumps({"read": sorted(read), "done": done}))
"""


def imported_quietly(*names: str, folder: Path, path: Path | None = None) -> dict[str, list[str]]:
    """What importing modules reads of an empty environment, and what it changes in the world."""
    run = subprocess.run(
        [sys.executable, "-B", "-c", ABSENT + IMPORT_QUIETLY, "", *names],
        env={} if path is None else {"PYTHONPATH": str(path)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    data: dict[str, list[str]] = json.loads(run.stdout)
    return data


def private(name: str) -> bool:
    return name == "HOME" or name.startswith(("XDG_", "LLBF16_", "CUTE_", "CUDA_", "TMP"))


def test_importing_the_package_writes_nothing_and_reads_no_settings(tmp_path: Path) -> None:
    """Catches an import that fails on a read-only or missing HOME, or freezes a setting early."""
    found = imported_quietly(*PLAIN, folder=tmp_path)
    assert found["done"] == []
    assert list(filter(private, found["read"])) == []
    assert list(tmp_path.iterdir()) == []


def test_importing_the_runtime_writes_nothing(tmp_path: Path) -> None:
    """Catches the same in the modules that serve; what torch reads is its own affair."""
    found = imported_quietly("torch", f"{PACKAGE}.runtime", folder=tmp_path)
    own = imported_quietly("torch", folder=tmp_path)
    assert set(found["done"]) <= set(own["done"])
    assert set(filter(private, found["read"])) <= set(filter(private, own["read"]))
    assert list(tmp_path.iterdir()) == []


def test_the_watch_over_imports_finds_what_is_planted(tmp_path: Path) -> None:
    """The control: a file, a folder and a process that an import makes, and a look at HOME."""
    (tmp_path / "planted.py").write_text(
        "import os, subprocess\n"
        "open('written', 'w').close()\n"
        "os.mkdir('made')\n"
        "os.path.expanduser('~')\n"
        "subprocess.run(['/bin/true'])\n"
    )
    found = imported_quietly("planted", folder=tmp_path, path=tmp_path)
    assert [line.split()[0] for line in found["done"]][:2] == ["open", "os.mkdir"]
    assert "subprocess.Popen" in {line.split()[0] for line in found["done"]}
    assert list(filter(private, found["read"])) == ["HOME"]


# --- What decides a kernel's machine code -----------------------------------------------------

LOADED_BY_KERNEL = """
import importlib, json
importlib.import_module(sys.argv[2])
print(json.dumps(sorted(name for name in sys.modules if name.partition(".")[0] == "llbf16_aot")))
"""

NO_CODE = frozenset({PACKAGE, f"{PACKAGE}.errors", f"{PACKAGE}.kernels", f"{PACKAGE}.backends"})
"""Loaded with a kernel, without influence on it: facade, error classes, empty package, list."""


def module_of(source: str) -> str:
    """The module that a file of a family's SOURCES is."""
    return f"{PACKAGE}.{source.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"


def uncovered(backend: str, loaded: Iterable[str], sources: Iterable[str]) -> set[str]:
    """Modules that a family's kernel loads and that its digest does not cover.

    `backends/__init__.py` lists the families and loads the constraints of each; those of another
    family decide nothing here, which the next test holds.
    """
    others = {f"{PACKAGE}.backends.{other}" for other in BACKENDS if other != backend}
    return set(loaded) - set(map(module_of, sources)) - others - NO_CODE


@pytest.mark.compiler
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_source_that_a_kernel_loads_is_covered_by_its_digest(backend: str) -> None:
    """Catches a helper that changes machine code while old artifacts go on being served."""
    done = fresh(LOADED_BY_KERNEL, f"{PACKAGE}.kernels.{backend}")
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    sources = BACKENDS[backend].SOURCES
    assert f"{PACKAGE}.kernels.{backend}" in loaded
    assert uncovered(backend, loaded, sources) == set()
    for source in sources:
        rest = [other for other in sources if other != source]
        assert uncovered(backend, loaded, rest) == {module_of(source)}


def test_no_family_uses_the_code_of_another() -> None:
    """Catches code shared between two families that only one of their digests covers."""
    families = [*BACKENDS]

    def borrowed(modules: Mapping[str, Module]) -> list[str]:
        return text(
            one
            for one in inner_imports(modules)
            for mine in families
            if one.importer in (f"{PACKAGE}.kernels.{mine}", f"{PACKAGE}.backends.{mine}")
            and one.target.rpartition(".")[2] in families
            and not one.target.endswith(f".{mine}")
        )

    assert borrowed(MODULES) == []
    assert len(borrowed(planted("kernels.splitk", "from .dotprod import _dot8"))) == 1
    assert len(borrowed(planted("backends.splitk", "from .dotprod import check"))) == 1
