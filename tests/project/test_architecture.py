"""The folder tree is the architecture: allowed imports, modules without torch, and names that the core must not use."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import kvframe
import kvframe.cache
import kvframe.contract
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder
from kvframe.contract.hookspecs import API_VERSION
from kvframe.contract.model import LoadedModel, ModelAdapter
from kvframe.contract.specs import KVCacheSpec
from kvframe.contract.wrapper import MetadataWrapper
from kvframe.loading.claims import BUILTIN_OWNER
from kvframe.loading.plugins import load_plugins

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "kvframe"
ENGINE = ROOT / "plugins" / "engine" / "src" / "kvframe_engine"
MAX_NAMES_OF_A_HOST = 24
"""The most names of the core, beside the contract, that the engine may use."""

# The flow of the design, one stage a line. A name stands for a module, or for a package and all its modules.
FLOW = (
    ("contract",),
    ("loading",),
    ("engine",),
    ("config",),
    ("planning",),
    ("cache",),
    ("routing",),
    ("selection",),
    ("attention",),
    ("hosting",),
    ("cli", "__main__"),
)
# The flow of the engine, which is a plugin.
ENGINE_FLOW = (
    ("contract",),
    ("requests",),
    ("host_storage", "pool_pages", "tiers"),
    ("scheduling",),
    ("graphs",),
    ("running",),
    ("ranks",),
    ("prefixes",),
    ("",),
    ("commands",),
)
# Outside of the flow: built-in types are a plugin like any other.
BESIDE = ("builtin",)

# Modules of the contract that use torch's types, and modules of other packages that load no torch.
NEED_TORCH = {
    "entries",
    "backend",
    "capabilities",
    "merging",
    "operator",
    "order",
    "ranges",
    "relative_bias",
    "slots",
}
ALSO_TORCH_FREE = (
    "kvframe.attention.shapes",
    "kvframe.attention.values",
    "kvframe.cache.stats",
    "kvframe.builtin.full_attention",
    "kvframe.builtin.plugin",
    "kvframe.cli",
    "kvframe_testing.commands.check",
    "kvframe.cli.plan",
    "kvframe.cli.plugins",
    "kvframe.routing",
)

# What plugins and their tests may import of the core: the names of ``kvframe`` and ``kvframe.routing``, the contract,
# and what hosts and commands share; and of another distribution that they require: its contract.
PUBLIC = re.compile(r"kvframe(\.routing)?|kvframe\.contract(\.\w+)?|kvframe\.cli\.(options|pages|render)")
CONTRACT_OF_A_PLUGIN = re.compile(r"(kvframe_\w+)\.contract(\.\w+)?")
# Plugins that are another plugin in a further environment, and hosts, which share how page stores are used.
BUILT_ON = {
    "kvframe_engine": {"kvframe_stores"},
    "kvframe_ray": {"kvframe_serve", "kvframe_stores"},
    "kvframe_vllm": {"kvframe_stores"},
}
# The test kit does to plugins what a host does, so it may use all of the core.
KIT = ROOT / "plugins" / "testing"
PLUGIN_FILES = sorted({*(ROOT / "plugins").glob("*/src/**/*.py")} - {*KIT.rglob("*.py")})


def is_public(module: str) -> bool:
    return PUBLIC.fullmatch(module) is not None


def module_name(path: Path, root: Path = CORE) -> str:
    """Return a file's module without that of its root, such as ``kvframe.``; empty for the package itself."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def core_files() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(CORE.rglob("*.py"))}


@cache
def engine_files() -> dict[str, Path]:
    """Return the engine's modules without its part of the test kit, by name."""
    files = {module_name(path, ENGINE): path for path in sorted(ENGINE.rglob("*.py"))}
    return {module: path for module, path in files.items() if not module.startswith("testing")}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported_modules(path: Path, *, at_type_checking: bool) -> frozenset[str]:
    """Return the modules that a file imports anywhere, functions included, at run time or for type checking only."""
    tree = tree_of(path)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    modules = set()
    for node in ast.walk(tree):
        if (id(node) in for_types) is not at_type_checking:
            continue
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            are_modules = {name for name in submodules if name.removeprefix("kvframe.") in core_files()}
            modules |= are_modules or {str(node.module)}
    return frozenset(modules)


def all_imports(path: Path) -> frozenset[str]:
    return imported_modules(path, at_type_checking=False) | imported_modules(path, at_type_checking=True)


def core_imports(path: Path, *, at_type_checking: bool = False) -> set[str]:
    modules = imported_modules(path, at_type_checking=at_type_checking)
    return {name.removeprefix("kvframe").removeprefix(".") for name in modules if name.split(".")[0] == "kvframe"}


def private_imports(path: Path) -> set[str]:
    """Return the modules of the core that a file imports, and that plugins may not."""
    return {name for name in all_imports(path) if name.split(".")[0] == "kvframe" and not is_public(name)}


def stage_of(module: str) -> int:
    """Return a module's stage in the flow: that of the longest name that equals or contains it."""
    places = {name: index for index, stage in enumerate(FLOW) for name in stage}
    names = [name for name in places if module == name or module.startswith(f"{name}.")]
    assert names, f"kvframe.{module} has no place in the flow; add it to FLOW where it belongs"
    return places[max(names, key=len)]


def in_flow(module: str) -> bool:
    return module != "" and module.split(".")[0] not in BESIDE


FLOW_FILES = {name: path for name, path in core_files().items() if in_flow(name)}


def engine_imports(path: Path) -> set[str]:
    """Return the modules of the engine that one of its files imports, at run time or for type checking."""
    imported = all_imports(path)
    modules = {name for name in imported if name.split(".")[0] == "kvframe_engine"}
    return {name.removeprefix("kvframe_engine").removeprefix(".") for name in modules}


def engine_stage_of(module: str) -> int:
    places = {name: index for index, stage in enumerate(ENGINE_FLOW) for name in stage}
    return places.get(module.split(".")[0], places[""])


def test_a_stage_of_the_engine_imports_no_later_one() -> None:
    later = {
        module: {name for name in engine_imports(path) if engine_stage_of(name) > engine_stage_of(module)}
        for module, path in engine_files().items()
    }
    assert {} == {module: names for module, names in later.items() if names}


def test_no_two_modules_of_the_engine_import_each_other() -> None:
    graph = {name: engine_imports(path) - {name, ""} for name, path in engine_files().items()}
    assert {*graph} == {*graphlib.TopologicalSorter(graph).static_order()}


def test_the_engine_uses_few_names_of_the_core() -> None:
    names_of_core = {
        alias.name
        for module, path in engine_files().items()
        if not module.startswith("commands")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module == "kvframe"
        for alias in node.names
    }
    page = (ROOT / "docs" / "write_a_host.md").read_text(encoding="utf-8").partition("## The names")[2]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(names_of_core) == sorted(name for row in rows for name in re.findall(r"`(\w+)`", row))
    assert len(names_of_core) <= MAX_NAMES_OF_A_HOST


def later_imports(*, at_type_checking: bool) -> dict[str, set[str]]:
    """Return the imports of later stages, for each module that has any."""
    later_by_module = {}
    for module, path in FLOW_FILES.items():
        imported = {name for name in core_imports(path, at_type_checking=at_type_checking) if in_flow(name)}
        later_by_module[module] = {name for name in imported if stage_of(name) > stage_of(module)}
    return {module: later for module, later in later_by_module.items() if later}


def test_a_stage_imports_no_later_one() -> None:
    assert later_imports(at_type_checking=False) == {}


def test_types_come_from_earlier_stages_too() -> None:
    assert later_imports(at_type_checking=True) == {}


def test_no_two_modules_import_each_other() -> None:
    graph = {
        name: (core_imports(path) | core_imports(path, at_type_checking=True)) - {name}
        for name, path in core_files().items()
    }
    assert sorted(graph) == sorted(graphlib.TopologicalSorter(graph).static_order())


def test_the_cache_names_its_files_in_the_order_of_the_flow() -> None:
    graph = {name: core_imports(path) for name, path in core_files().items() if name.startswith("cache.")}
    documented = [f"cache.{name}" for name in re.findall(r"``(\w+)``", kvframe.cache.__doc__ or "")]
    assert sorted(graph) == sorted(documented)
    later = {
        name: [other for other in graph[name] if other in documented[place:]] for place, name in enumerate(documented)
    }
    assert {} == {name: others for name, others in later.items() if others}


def test_the_flow_imports_no_built_in_type() -> None:
    imported = {module: all_imports(path) for module, path in FLOW_FILES.items()}
    beside = tuple(f"kvframe.{name}" for name in BESIDE)
    assert {module for module, names in imported.items() if any(name.startswith(beside) for name in names)} == set()


def test_built_ins_import_public_modules_only() -> None:
    for module, path in core_files().items():
        if module.startswith("builtin"):
            assert {name for name in private_imports(path) if not name.startswith("kvframe.builtin")} == set(), module


# --- the core and its plugins -----------------------------------------------------------------------------------------


def test_the_core_imports_no_plugin() -> None:
    imported = {module: all_imports(path) for module, path in core_files().items()}
    plugins = ("kvframe_", "transformers", "plugins")
    assert {module for module, names in imported.items() if any(name.startswith(plugins) for name in names)} == set()


def test_a_plugin_imports_only_public_modules_of_the_core() -> None:
    imported = {path.relative_to(ROOT).as_posix(): private_imports(path) for path in PLUGIN_FILES}
    assert {} == {name: private for name, private in imported.items() if private}


def test_the_tests_of_plugins_import_public_modules_only() -> None:
    paths = sorted((ROOT / "plugins").glob("*/tests/*.py"))
    imported = {path.relative_to(ROOT).as_posix(): private_imports(path) for path in paths}
    assert len(paths) > 30
    assert {} == {name: private for name, private in imported.items() if private}


def test_a_plugin_imports_no_other_plugin() -> None:
    others = {}
    for path in PLUGIN_FILES:
        folder, _, package = path.relative_to(ROOT / "plugins").parts[:3]
        imported = {name for name in all_imports(path) if name.startswith("kvframe_")}
        allowed = {package, "kvframe_kernels", *BUILT_ON.get(package, ())}
        if "testing" in path.with_suffix("").parts:
            allowed.add("kvframe_testing")
        others[path.relative_to(ROOT).as_posix()] = {
            name for name in imported if name.split(".")[0] not in allowed and not is_promised_to(folder, name)
        }
    assert {} == {name: imported for name, imported in others.items() if imported}


def is_promised_to(folder: str, module: str) -> bool:
    """Return whether a module belongs to the contract of a distribution that a plugin here requires."""
    promised = CONTRACT_OF_A_PLUGIN.fullmatch(module)
    text = (ROOT / "plugins" / folder / "pyproject.toml").read_text(encoding="utf-8")
    required = tomllib.loads(text)["project"].get("dependencies", [])
    return promised is not None and any(
        requirement.startswith(f"{promised[1].replace('_', '-')}>") for requirement in required
    )


def test_the_contract_of_a_distribution_is_for_plugins_that_require_it() -> None:
    assert is_promised_to("ngram", "kvframe_engine.contract")
    assert is_promised_to("ngram", "kvframe_engine.contract.proposer")
    assert not is_promised_to("ngram", "kvframe_engine.scheduling.drafting")
    assert not is_promised_to("disk", "kvframe_engine.contract")


def test_every_plugin_here_states_a_version_of_the_contract_that_there_is() -> None:
    major, minor = API_VERSION.split(".")
    for path in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        entry_points = tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("entry-points", {})
        stated = entry_points.get("kvframe.v1.api", {})
        assert stated.keys() == entry_points.get("kvframe.v1", {}).keys(), path
        assert set(stated.values()) <= {f"v{major}_{minor_version}" for minor_version in range(int(minor) + 1)}, path


def manifests() -> dict[str, str]:
    """Return each plugin folder's manifest module, as its pyproject.toml states it; the engine has none."""
    modules = {}
    for path in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        entry_points = tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("entry-points", {})
        for module in entry_points.get("kvframe.v1", {}).values():
            modules[path.parent.name] = module
    return modules


@pytest.mark.parametrize("plugin", manifests())
def test_a_manifest_imports_nothing_but_kvframe_and_the_standard_library(plugin: str) -> None:
    module = manifests()[plugin]
    path = ROOT / "plugins" / plugin / "src" / Path(*module.split(".")).with_suffix(".py")
    imported = imported_modules(path, at_type_checking=False)
    assert {name.split(".")[0] for name in imported} <= {"kvframe", *sys.stdlib_module_names}


def test_the_contract_imports_nothing_else_of_the_core() -> None:
    imported = {module: core_imports(path) for module, path in core_files().items() if module.startswith("contract")}
    assert {} == {
        module: others
        for module, names in imported.items()
        if (others := {name for name in names if not name.startswith("contract")})
    }


def test_the_test_kit_imports_the_core_alone() -> None:
    imported = {path.name: {name.split(".")[0] for name in all_imports(path)} for path in KIT.glob("src/**/*.py")}
    ours = {name: {package for package in names if package.startswith("kvframe")} for name, names in imported.items()}
    assert {"kvframe", "kvframe_testing"} == set().union(*ours.values())


def test_the_public_modules_are_documented() -> None:
    names = [f"kvframe.{module}".removesuffix(".") for module in core_files()]
    public = [name for name in names if is_public(name)]
    assert len(public) > 30
    assert [] == [name for name in public if not importlib.import_module(name).__doc__]


def shown_modules(document: Path) -> set[str]:
    """Return the modules of the core that a document's code imports from."""
    modules = re.findall(
        r"^(?:from|import) (kvframe(?:\.\w+)*)", document.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    return set(modules)


DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if shown_modules(path)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_documents_show_public_modules_only(document: Path) -> None:
    assert {name for name in shown_modules(document) if not is_public(name)} == set()


def test_the_documents_show_imports() -> None:
    assert {"README.md", "serving.md", "embedding_the_manager.md", "write_a_spec.md"} <= {
        document.name for document in DOCUMENTS
    }


# --- what tests must not do -------------------------------------------------------------------------------------------


TEST_FILES = sorted(
    path
    for path in (*ROOT.glob("[!.]*/**/*.py"), ROOT / "conftest.py")
    if {"tests", "conftest.py"} & {*path.relative_to(ROOT).parts}
)
CLOCK_MODULES = {"time", "timeit", "datetime"}
CLOCKS = re.compile(
    r"(perf_counter|monotonic|process_time|thread_time|clock_gettime|time)(_ns)?|default_timer|getrusage|elapsed_time"
)


def clocks_read(source: str) -> list[str]:
    """Return the calls of a test that read a clock or depend on one."""
    calls = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            calls += [alias.name for alias in node.names if alias.name.split(".")[0] in CLOCK_MODULES]
        elif isinstance(node, ast.ImportFrom):
            calls += [f"{node.module}.{alias.name}" for alias in node.names if node.module in CLOCK_MODULES]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and CLOCKS.fullmatch(node.func.attr):
            calls.append(ast.unparse(node.func))
        elif isinstance(node, ast.keyword) and node.arg == "deadline" and ast.unparse(node.value) != "None":
            calls.append(f"deadline={ast.unparse(node.value)}")
    return calls


def test_a_clock_is_seen_however_it_is_read() -> None:
    assert ["time"] == clocks_read("import time")
    assert ["time.perf_counter"] == clocks_read("from time import perf_counter")
    assert ["torch.Event.elapsed_time"] == clocks_read("torch.Event.elapsed_time(start, end)")
    assert ["deadline=200"] == clocks_read("settings(deadline=200)")
    assert [] == clocks_read("settings(deadline=None); times.time_key(device); subprocess.run([], timeout=60)")


def test_no_test_reads_a_clock() -> None:
    # A test that reads a clock fails on a busy machine; it can count the work instead.
    assert len(TEST_FILES) > 100
    assert {} == {
        str(path.relative_to(ROOT)): clocks
        for path in TEST_FILES
        if (clocks := clocks_read(path.read_text(encoding="utf-8")))
    }


# --- what the core must not use ---------------------------------------------------------------------------------------


CONTRACT = (KVCacheSpec, AttentionBackend, AttentionMetadataBuilder, MetadataWrapper, ModelAdapter, LoadedModel)
REGISTERED = {
    entry.name: str(entry.target).rpartition(":")[2]
    for catalogue in load_plugins().registry.catalogues.values()
    for entry in catalogue.claims()
}


CHECKED = FLOW_FILES | {f"kvframe_engine.{name}": path for name, path in engine_files().items()}


def nodes(module: str) -> Iterator[ast.AST]:
    return ast.walk(tree_of(CHECKED[module]))


@cache
def constants(module: str) -> set[object]:
    return {node.value for node in nodes(module) if isinstance(node, ast.Constant)}


@cache
def names(module: str) -> set[str]:
    return {node.id for node in nodes(module) if isinstance(node, ast.Name)}


def types_asked_for(module: str) -> Iterator[str]:
    """Yield the name of every class in the code's type checks of values."""
    for node in nodes(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            yield from (name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name))
        elif isinstance(node, ast.MatchClass):
            yield ast.unparse(node.cls)
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node.left):
            yield from (ast.unparse(right) for right in node.comparators)


def test_the_core_never_asks_for_the_type_of_a_plugins_object() -> None:
    types = {base.__name__ for base in CONTRACT} | set(REGISTERED.values())
    assert {module for module in CHECKED if types & set(types_asked_for(module))} == set()


# A backend for CPUs has torch's name of the device. The stack's key cache.disk means the page store of this name.
# `kvframe doctor` asks if the library torch is installed, whose name a backend has.
def test_the_core_holds_no_registered_name() -> None:
    names_by_module = {module: constants(module) & ({*REGISTERED} - {"cpu", "disk", "zmq"}) for module in CHECKED}
    assert {"cli.doctor": {"torch"}} == {
        module: names_of_module for module, names_of_module in names_by_module.items() if names_of_module
    }


def test_the_core_names_no_registered_type() -> None:
    names_by_module = {module: names(module) & {*REGISTERED.values()} for module in CHECKED}
    assert {} == {module: names_of_module for module, names_of_module in names_by_module.items() if names_of_module}


def test_built_in_names_have_the_core_as_their_owner() -> None:
    claims = load_plugins().registry.specs.claims("full_attention")
    assert [BUILTIN_OWNER] == [entry.owner for entry in claims]


# --- import is free ---------------------------------------------------------------------------------------------------

_IMPORT_EACH = """
import importlib, json, sys
first = {}
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    for heavy in ("torch", "transformers", "numpy"):
        if heavy in sys.modules:
            first.setdefault(heavy, module)
print(json.dumps(first))
"""


def first_to_import(modules: list[str]) -> dict[str, str]:
    """Import ``modules`` in order in a fresh interpreter; return the importer of each heavy package."""
    command = [sys.executable, "-W", "error", "-c", _IMPORT_EACH, json.dumps(modules)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    loaded: dict[str, str] = json.loads(process.stdout)
    return loaded


def modules_of(*packages: str) -> list[str]:
    return [f"kvframe.{module}" for module in core_files() if module.split(".")[0] in packages]


_WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None  # an import of it fails
from kvframe.__main__ import run
runpy.run_path("examples/manage_a_cache.py", run_name="__main__")
for path in sys.argv[1:]:
    sys.argv = ["kvframe", "plan", path, "--cache-memory", "64GiB"]
    try:
        run()
    except SystemExit as ended:
        assert not ended.code, path
"""


def test_layer_files_are_planned_and_a_cache_is_managed_without_torch_installed() -> None:
    files = [str(path) for path in sorted((ROOT / "examples" / "layers").iterdir())]
    command = [sys.executable, "-c", _WITHOUT_TORCH, *files]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert 0 == process.returncode, process.stderr
    assert len(files) == process.stdout.count("Requests that fit at once") >= 10
    assert "tokens are pinned" in process.stdout


def test_planning_and_the_command_line_load_no_torch() -> None:
    free = [name for name in modules_of("contract") if name.rpartition(".")[2] not in NEED_TORCH]
    free += ["kvframe", *modules_of("loading", "config", "planning"), *ALSO_TORCH_FREE]
    assert len(free) > 40
    assert first_to_import(free) == {}


def test_the_cache_logic_loads_numpy_and_no_torch() -> None:
    files = ("file_format", "file_reader", "file_writer")
    logic = [*modules_of("cache"), *(f"kvframe_engine.prefixes.{name}" for name in files)]
    assert first_to_import(logic).keys() == {"numpy"}


def test_manifests_load_nothing_heavy() -> None:
    assert first_to_import(list(manifests().values())) == {}


def test_the_installed_plugins_with_their_specs_formats_and_policies_load_no_torch() -> None:
    code = """
import sys
from kvframe import load_plugins
registry = load_plugins().registry
for names in (registry.specs, registry.formats, registry.eviction_policies):
    assert all(map(names.load, names.names()))
print({"torch", "transformers", "cattrs", "rich"} & {*sys.modules})
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert process.stdout == "set()\n"


@pytest.mark.parametrize("plugin", manifests())
def test_a_plugin_is_found_by_its_entry_points_and_loads(plugin: str) -> None:
    (entry,) = entry_points(group="kvframe.v1", name=plugin)
    (written_for,) = entry_points(group="kvframe.v1.api", name=plugin)
    assert (manifests()[plugin], "v1_0") == (entry.value, written_for.value)
    record = load_plugins().record(plugin)
    assert record.status == "loaded", record.reason


# --- public names -----------------------------------------------------------------------------------------------------


def public_names() -> list[tuple[str, str, str]]:
    """Return each name that the stubs list: the package, the module that defines it, and the name."""
    stub_names = []
    for package in ("kvframe", "kvframe.contract"):
        stub = ROOT.joinpath(*package.split("."), "__init__.pyi").read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(stub)):
            if isinstance(node, ast.ImportFrom):
                stub_names += [(package, f"{package}.{node.module}", alias.name) for alias in node.names]
    return stub_names


def test_the_stubs_list_each_public_name_once() -> None:
    for package in (kvframe, kvframe.contract):
        names = [name for home, _, name in public_names() if home == package.__name__]
        assert sorted(package.__all__) == sorted(names) == sorted(set(names))


def test_every_public_name_can_be_imported() -> None:
    assert [] == [
        (package, name)
        for package, module, name in public_names()
        if getattr(importlib.import_module(package), name, None) is not getattr(importlib.import_module(module), name)
    ]


def is_documented(module: str, name: str) -> bool:
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return bool(value.__doc__)
    # A constant or an alias: a string literal follows its assignment.
    body = tree_of(ROOT.joinpath(*module.split(".")).with_suffix(".py")).body
    for statement, following in itertools.pairwise(body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
    return False


def test_every_public_name_is_documented() -> None:
    assert [] == [(module, name) for _, module, name in public_names() if not is_documented(module, name)]


def test_every_core_package_is_importable_by_name() -> None:
    packages = {module.name for module in pkgutil.iter_modules([str(CORE)]) if module.ispkg}
    assert packages == {path.parent.name for path in CORE.glob("*/__init__.py")}
