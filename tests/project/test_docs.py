"""The documents are right: their code runs, their commands print the shown output, their tables are complete."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import pkgutil
import re
import runpy
import shlex
import signal
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import click
import kvframe_engine.contract
import pytest
from kvframe_serve.metrics import EngineMetrics, RequestTimes
from kvframe_testing import grid
from kvframe_testing import runs as kit_runs
from kvframe_testing.sample import sample
from prometheus_client import CollectorRegistry

import kvframe
from kvframe import Engine, contract
from kvframe.cli import main
from kvframe.config.stack import Stack
from kvframe.contract.hookspecs import HookSpecs
from kvframe.loading.plugins import load_plugins
from tests.programs import IMPORTED, commands_in_forks
from tests.project.import_graph import SOURCES, runs_of_an_engine
from tests.support.commands import run
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
TUTORIALS = [document for document in DOCUMENTS if document.startswith("docs/tutorial_")]
PAGES = sorted({path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md", "index.md"})
HOOKS = [name for name in vars(HookSpecs) if name.startswith("kvframe_")]
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))


@attrs.frozen
class Block:
    """One fenced block: its language, its text, and the name of the file that its first line gives."""

    language: str
    text: str

    @property
    def file(self) -> str:
        match = re.match(r"# file: (\S+)\n", self.text)
        return match[1] if match else ""


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[Block]:
    matches = re.findall(r"^```(\w+)\n(.*?)^```$", read(document), flags=re.MULTILINE | re.DOTALL)
    return [Block(*fence) for fence in matches if fence[0] == language]


def table(document: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table after a heading, without its header; a cell's code is unquoted."""
    text = read(document).split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), text.splitlines())
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows][2:]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# --- code and commands ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the demo's model with a single step of training, which is enough to try the commands."""
    spec = importlib.util.spec_from_file_location("make_model", ROOT / "examples" / "demo" / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path_factory.mktemp("demo") / "demo-model"
    module.make_model(path, module.Recipe(steps=1))
    return path


@pytest.fixture
def workplace(tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that writes a document's files into a folder for its reader, and changes to that folder."""

    def set_up(document: str) -> None:
        # A page may use the files of an earlier one, which it names.
        for page in re.findall(r"goes on from \[[^]]+\]\((\w+\.md)\)", read(document)):
            set_up(f"docs/{page}")
        for block in blocks(document, "python") + blocks(document, "toml"):
            if block.file:
                path = tmp_path / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
        if (tmp_path / "pyproject.toml").exists():
            install(tmp_path)

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "demo-model").symlink_to(demo_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    yield set_up
    for name, module in list(sys.modules.items()):
        if type(module) is ModuleType:  # other objects may invent any attribute
            places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
            if any(place.startswith(f"{tmp_path}/") for place in places):
                del sys.modules[name]


def install(folder: Path) -> None:
    """Write what an editable install writes of a project's metadata."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / "src" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project.get("entry-points", {}).items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")


def code(document: str) -> list[str]:
    """Return the blocks of Python that are not files."""
    return [block.text for block in blocks(document, "python") if not block.file]


def documents_with_code() -> Iterator[Any]:
    """Yield the documents with Python, each with whether few of the cases and runs that it shows are computed."""
    for document in DOCUMENTS:
        has_cases = any("make_cases(" in text for text in code(document))
        if has_cases:
            yield pytest.param(document, False, marks=pytest.mark.whole)
        if code(document):
            yield document, has_cases


@pytest.mark.parametrize(("document", "samples"), [*documents_with_code()])
def test_python_blocks_run_in_order(
    document: str, samples: bool, workplace: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace(document)
    if samples:
        make_cases, sample_runs = grid.make_cases, kit_runs.sample_runs
        monkeypatch.setattr(grid, "make_cases", lambda *arguments, **options: sample(make_cases(*arguments, **options)))
        monkeypatch.setattr(kit_runs, "sample_runs", lambda runs: sample_runs(runs, ["kind"]))
    namespace: dict[str, object] = {"__name__": "__main__"}
    for text in code(document):
        exec(compile(text, document, "exec"), namespace)


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{page}" for page in PAGES if page.startswith("write_"))])
def test_the_readme_and_every_page_for_authors_show_code_that_runs(document: str) -> None:
    assert code(document)


def commands(document: str) -> list[list[tuple[str, str]]]:
    """Return for each console block its commands, each with the output that is shown below it."""
    of_blocks = []
    for block in blocks(document, "console"):
        parts = (part.partition("\n") for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:])
        of_blocks.append([(command, example) for command, _, example in parts])
    return of_blocks


def is_as_shown(output: str, example: str) -> bool:
    """Return whether a command printed what a document shows; "…" stands for anything, such as other plugins."""
    expected = ".*".join(re.escape(part) for part in example.rstrip().split("…"))
    return not example or re.fullmatch(expected, output.rstrip(), re.DOTALL) is not None


@pytest.mark.parametrize(
    ("document", "block"),
    [
        (document, block)
        for document in DOCUMENTS
        if document not in TUTORIALS
        for block in range(len(commands(document)))
    ],
)
def test_commands_of_a_block_run_in_order_and_print_the_shown_output(
    document: str, block: int, workplace: Callable[[str], None]
) -> None:
    workplace(document)
    for command, example in commands(document)[block]:
        program, *arguments = shlex.split(command)
        assert program == "kvframe"
        result = run(*arguments)
        assert result.exit_code == (2 if example.startswith("kvframe: error: ") else 0), result.output
        assert is_as_shown(result.output, example), result.output


FEW = """
def pytest_collection_modifyitems(items):
    items[:] = items[::8]
"""
"""A plugin of pytest that leaves out most tests."""


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Make an environment that has all that is installed here, in which pip may install more.

    What the shell waits for is a fork of a process that has imported torch.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "installed_here.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for name, module in (("pip", "pip"), ("served", "kvframe")):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{folder}/bin/python3" -m {module} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    # The tests of an author take long, and a few of them show that they run.
    (site / "few.py").write_text(FEW)
    # What pip would get from an index is here already.
    pip = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    commands = {"kvframe": ("-m", "kvframe"), "pytest": ("-m", "pytest", *IMPORTED), "python": ()}
    with commands_in_forks(folder / "bin", commands, site):
        options = {"PYTEST_ADDOPTS": "-p few", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        yield {**os.environ, **pip, **options, "PATH": path}


def steps(document: str) -> Iterator[Block | tuple[str, str]]:
    """Yield a tutorial's files, and its commands with what they print, in the order of the page."""
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", read(document), flags=re.MULTILINE | re.DOTALL):
        if language != "console":
            yield Block(language, text)
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:] if language == "console" else ():
            command, _, example = part.partition("\n")
            yield command, example


@pytest.mark.parametrize("document", TUTORIALS)
def test_a_tutorial_runs_from_an_empty_folder_as_written(
    document: str, tmp_path: Path, demo_model: Path, environment: dict[str, str]
) -> None:
    if ".cache/demo-model" in read(document):  # it starts in a clone, after make demo
        (tmp_path / ".cache").mkdir()
        (tmp_path / ".cache" / "demo-model").symlink_to(demo_model)
    port = str(free_port())
    started: list[subprocess.Popen[str]] = []
    try:
        for step in steps(document):
            if isinstance(step, Block):
                assert step.file, f"a block of {document} is neither a file nor a command:\n{step.text}"
                (tmp_path / step.file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / step.file).write_text(step.text, encoding="utf-8")
                continue
            command, example = step
            command = command.replace("8000", port)
            if command == "kill %1":
                started[0].terminate()
                assert started.pop(0).wait(30) in (0, -signal.SIGTERM)
            elif command.endswith(" &"):
                run = f"exec {command.removesuffix(' &').replace('kvframe', 'served', 1)}"
                started.append(subprocess.Popen(["bash", "-c", run], cwd=tmp_path, env=environment, text=True))
            else:
                process = subprocess.run(
                    ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
                )
                assert 0 == process.returncode, f"$ {command}\n{process.stdout}{process.stderr}"
                assert is_as_shown(process.stdout, example), f"$ {command}\n{process.stdout}{process.stderr}"
    finally:
        for server in started:
            server.kill()
            server.wait()


def test_the_packaged_plugin_loads(workplace: Callable[[str], None]) -> None:
    workplace("docs/package_a_plugin.md")
    host = load_plugins()
    assert "loaded" == host.record("kvframe-own-chunk:own_chunk").status
    assert "OwnChunkSpec" == host.registry.specs.load("own_chunk").__name__


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{document}-{index}")
        for document in DOCUMENTS
        for index, block in enumerate(blocks(document, "toml"))
        if not block.file
    ],
)
def test_the_stack_shown_is_valid(block: Block) -> None:
    stack = Stack.from_mapping(tomllib.loads(block.text))
    stack.check_names(load_plugins(stack.plugins).registry)


def make_targets(document: str) -> set[str]:
    """Return the targets of make that a document names."""
    targets = set(re.findall(r"^make (\w+)", "".join(block.text for block in blocks(document, "sh")), re.MULTILINE))
    return targets | set(re.findall(r"`make (\w+)`", read(document)))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    assert make_targets(document) <= set(re.findall(r"^([a-z]+):", read("Makefile"), flags=re.MULTILINE))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_the_first_documents_name_commands_of_make(document: str) -> None:
    assert make_targets(document)


NOT_IMPORTED = re.compile(r"kvframe\.(v1(\.api)?|(prefix|inputs|content)\.?1)")
"""Entry-point groups, and keys of hashes."""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_modules_and_names_that_are_named_exist(document: str) -> None:
    for name in set(re.findall(r"`(kvframe(?:\.\w+)+)`", read(document))):
        if not NOT_IMPORTED.fullmatch(name):
            assert pkgutil.resolve_name(name) is not None, name


# --- tables and links -------------------------------------------------------------------------------------------------


def is_made(name: str) -> bool:
    """Return whether a top-level name is excluded by .gitignore, or is git's own folder."""
    patterns = [line.strip().rstrip("/") for line in read(".gitignore").splitlines() if line.strip()]
    return name == ".git" or any(fnmatch(name, pattern) for pattern in patterns)


def test_the_folder_map_names_every_top_level_entry() -> None:
    mapped = {name.rstrip("/") for row in table("CONTRIBUTING.md", "Folders") for name in quoted(row[0])}
    assert {path.name for path in ROOT.iterdir() if not is_made(path.name)} == mapped


def test_the_map_of_the_core_names_every_package() -> None:
    text = read("CONTRIBUTING.md").partition("Inside `kvframe/`")[2].partition("\n## ")[0]
    mapped = re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)
    assert sorted(mapped) == sorted(path.parent.name for path in (ROOT / "kvframe").glob("*/__init__.py"))


def test_the_list_of_examples_is_complete() -> None:
    entries_of_table = set(re.findall(r"^\| `([^`]+)`", read("examples/README.md"), re.MULTILINE))
    entries = {path.name + "/" * path.is_dir() for path in (ROOT / "examples").iterdir() if path.name != "README.md"}
    assert {name for name in entries if name != "__pycache__/"} == entries_of_table


def test_the_plugin_table_lists_every_plugin_with_its_distribution() -> None:
    distributions = {quoted(row[0])[0]: quoted(row[1])[0] for row in table("docs/plugins.md", "The plugins here")}
    projects = {path: tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8")) for path in PLUGINS}
    assert {f"plugins/{path.name}": project["project"]["name"] for path, project in projects.items()} == distributions


def test_the_plugin_table_names_everything_that_is_registered() -> None:
    names_of_plugins = {quoted(row[1])[0]: set(quoted(row[2])) for row in table("docs/plugins.md", "The plugins here")}
    registered: dict[str, set[str]] = {}
    for catalogue in load_plugins().registry.catalogues.values():
        for entry in catalogue.claims():
            registered.setdefault(entry.owner, set()).add(entry.name)
    built_in = registered.pop("kvframe")
    assert {owner: registered.get(owner, set()) for owner in names_of_plugins} == names_of_plugins
    assert built_in == set(quoted(re.findall(r"^Built in, .*$", read("docs/plugins.md"), re.MULTILINE)[0]))


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_every_plugin_is_installed_and_type_checked_in_the_workspace(plugin: Path) -> None:
    assert f"-e plugins/{plugin.name}" in read("requirements.txt").splitlines()
    assert "-r requirements.txt" in read("requirements-dev.txt").splitlines()
    mypy = tomllib.loads(read("pyproject.toml"))["tool"]["mypy"]
    assert f"$MYPY_CONFIG_FILE_DIR/plugins/{plugin.name}/src" in mypy["mypy_path"]


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_an_extra_of_the_core_installs_each_plugin(plugin: Path) -> None:
    project = tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    (requirement,) = extras[project["name"].removeprefix("kvframe-")]
    assert project["name"] == re.split(r"\[|>=", requirement)[0]


def test_every_package_takes_the_same_versions_of_torch() -> None:
    """``plugins/COMPATIBILITY.md`` has the oldest of them, and the pinned one."""
    packages = [ROOT, ROOT / "kernels", *PLUGINS]
    texts = [(folder / "pyproject.toml").read_text(encoding="utf-8") for folder in packages]
    assert {"torch>=2.11,<3"} == {
        requirement for text in texts for requirement in re.findall(r'"(torch[<>=][^"]*)"', text)
    }


def test_one_extra_serves_ordinary_models() -> None:
    """Every attention type and what it needs, the model adapter, backends with and without a compiler, the server and
    what it answers ``response_format`` with."""
    registry = load_plugins().registry
    owners = {registry.specs.get(name).owner for name in registry.specs.names()}
    for name in registry.specs.names():
        wrappers = registry.specs.get(name).load().default_wrappers
        owners |= {registry.wrappers.get(wrapper).owner for wrapper in wrappers}
    distributions = {
        *owners,
        "kvframe-engine",
        "kvframe-transformers",
        "kvframe-cpu",
        "kvframe-torch",
        "kvframe-triton",
        "kvframe-serve",
        "kvframe-guided",
    }
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    assert sorted(distributions - {"kvframe"}) == [
        re.split(r"\[|>=", requirement)[0] for requirement in extras["models"]
    ]


def test_the_hook_table_lists_every_hook_in_order() -> None:
    assert HOOKS == [quoted(row[0])[0] for row in table("docs/package_a_plugin.md", "Hooks")]


def of_docs(name: str) -> dict[str, Any]:
    """Return the names of a program of docs."""
    return runpy.run_path(str(ROOT / "docs" / f"{name}.py"))


def test_the_tables_of_keys_are_those_of_the_options() -> None:
    page = read("docs/stack_file.md")
    assert of_docs("stack_tables")["with_tables"](page) == page, "run python docs/stack_tables.py"
    assert "| `max_num_seqs` | `64` | The most requests that run at once. |" in page


def test_the_tables_of_fields_are_those_of_the_bodies() -> None:
    page = read("docs/http_server.md")
    assert of_docs("server_fields")["with_tables"](page) == page, "run python docs/server_fields.py"
    assert "| `best_of` | refused, unless it is `1` or null | More samples than are answered. |" in page


def test_the_commands_shown_are_those_of_the_program() -> None:
    page = read("docs/command_line.md")
    assert of_docs("commands")["with_commands"](page) == page, "run python docs/commands.py"
    assert [*main.list_commands(click.Context(main))] == re.findall(r"^## `kvframe ([\w-]+)`", page, re.MULTILINE)
    port = "The port to listen on; 0 for any free one. `default: 8000` `0<=x<=65535`"
    assert f"\n- `--port INTEGER RANGE`: {port}\n" in page


def test_the_page_of_metrics_has_every_metric_and_its_labels(demo_model: Path) -> None:
    registry = CollectorRegistry()
    RequestTimes(registry).refused("a_code")
    with Engine.from_pretrained(demo_model, stack=Stack.from_mapping({"cache": {"host_memory": "1MiB"}})) as engine:
        registry.register(EngineMetrics(engine, num_used=lambda: 0))
        reported = {
            family.name + "_total" * (family.type == "counter"): {
                label for sample in family.samples for label in sample.labels if label != "le"
            }
            or {*getattr(family, "_labelnames", ())}
            for family in registry.collect()
        }
    rows = re.findall(r"^\| `(kvframe_\w+)(?:{(.+)})?` \|", read("docs/metrics.md"), re.MULTILINE)
    assert {name: {*labels.split(",")} - {""} for name, labels in rows} == reported


def test_the_drawings_are_those_of_todays_specs_and_slabs() -> None:
    pictures = runpy.run_path(str(ROOT / "docs" / "drawings.py"))["draw_all"]()
    assert {path.name for path in (ROOT / "docs").glob("*.svg")} == {*pictures}
    pages = read("docs/design.md") + read("docs/attention_that_chooses.md")
    for name, picture in pictures.items():
        assert read(f"docs/{name}") == picture, "run python docs/drawings.py"
        assert f"]({name})" in pages


def test_the_picture_of_a_plan_has_the_numbers_of_todays_page(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "docs" / "plan_picture.py"))
    made_of, todays = script["hash_of_picture"](), script["make_page"](tmp_path / "plan.html")
    assert made_of == todays, "run python docs/plan_picture.py"
    assert f".venv/bin/kvframe {' '.join(script['COMMAND'])}\n" in read("README.md")
    assert "](docs/plan.png)" in read("README.md")
    assert "](docs/flow.svg)" in read("README.md")


def test_the_readmes_first_commands_install_what_is_here_and_plan(workplace: Callable[[str], None]) -> None:
    """``.ci/dist`` runs the whole block, which installs from an index."""
    clone, environment, install, program = blocks("README.md", "sh")[0].text.splitlines()
    assert clone.startswith(f"git clone {SOURCE} && cd kvframe")
    assert "python3 -m venv .venv" == environment
    here, _, released = install.partition("  # after the first release: ")
    folders = here.removeprefix(".venv/bin/pip install ").split()
    names = [tomllib.loads(read(f"{folder}/pyproject.toml"))["project"]["name"] for folder in folders]
    assert ["kvframe", "kvframe-sliding-window"] == names
    assert "pip install 'kvframe[sliding-window]'" == released
    workplace("README.md")
    result = run(*program.removeprefix(".venv/bin/kvframe ").split())
    assert 0 == result.exit_code, result.output
    assert "starts           yes" in result.output


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_extras_that_are_named_exist(document: str) -> None:
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    mentions = {extra for names in re.findall(r"\bkvframe\[([\w,-]+)\]", read(document)) for extra in names.split(",")}
    assert mentions <= {*extras}


def test_the_list_of_pages_is_complete_and_numbered() -> None:
    lines = re.findall(r"^(\d+)\. (.*?\)): ", read("docs/README.md"), re.MULTILINE)
    pages = [page for _, links in lines for page in re.findall(r"\]\(([\w-]+\.md)\)", links)]
    assert sorted(pages) == PAGES
    assert list(range(1, len(lines) + 1)) == [int(number) for number, _ in lines]


@pytest.mark.parametrize("name", ["KVCacheSpec", "KVCacheCoordinator", "AttentionMetadataBuilder"])
def test_each_of_the_three_names_has_a_page_that_the_readme_leads_to(name: str) -> None:
    (page,) = re.findall(rf"\[`{name}`\]\(([^)]+)\)", read("README.md"))
    assert read(page).startswith(f"# `{name}`: ")


def test_every_public_name_has_a_page_of_its_own(tmp_path: Path) -> None:
    program, page = of_docs("reference"), read("docs/reference.md")
    assert program["with_tables"](page) == page, "run python docs/reference.py"
    names = {*kvframe.__all__, *contract.__all__, *kvframe_engine.contract.__all__, "HookSpecs"}
    assert names == {*re.findall(r"^\| \[`(\w+)`\]", page, re.MULTILINE)}
    folder = tmp_path / "api"
    folder.mkdir()
    (folder / "Gone.md").write_text("# A name that was removed\n")
    program["write_pages"](folder)
    assert {f"{name}.md" for name in names} == {path.name for path in folder.iterdir()}
    assert (
        "autoclass:: kvframe.cache.manager.KVCacheManager\n   :members:" in (folder / "KVCacheManager.md").read_text()
    )
    assert "from kvframe.contract import AttentionSpec\n" in (folder / "AttentionSpec.md").read_text()
    linked = re.findall(r"\]\((api/\w+\.md)\)", program["link_to_pages"](page))
    assert sorted(f"api/{name}.md" for name in names) == sorted(linked)


def test_the_files_and_the_values_of_a_step_are_those_that_run() -> None:
    _, always, at_times = read("docs/a_step.md").split("\n## ")[0].split("| file |")
    values = {quoted(row[0])[0] for row in table("docs/a_step.md", "The values of a step")}
    start, life, step = runs_of_an_engine()
    assert ([*re.findall(r"^\| `([^`]+)`", always, re.MULTILINE)], values) == ([*step.lines], step.values)
    assert (60, 25, 14) >= (len(start.lines), len(life.lines), len(step.lines))
    assert 874 >= sum(life.lines.values())
    assert 414 >= sum(step.lines.values())
    others = [name for row in at_times.splitlines() for name in quoted(row.split("|")[1] if "|" in row else "")]
    assert [] == [name for name in others if name in always or not any((root / name).exists() for root in SOURCES)]


def test_the_files_that_build_metadata_use_only_later_ones() -> None:
    files = [quoted(row[0])[0] for row in table("docs/a_step.md", "How a layer's metadata is built")]
    for index, file in enumerate(files):
        modules = re.findall(
            r"^from kvframe\.attention\.(\w+) import", read(f"kvframe/attention/{file}"), flags=re.MULTILINE
        )
        assert not {f"{module}.py" for module in modules} & set(files[: index + 1]), file


@pytest.mark.parametrize(("document", "limit"), [("README.md", 200), ("CONTRIBUTING.md", 105), ("CHANGELOG.md", 50)])
def test_the_first_documents_are_short(document: str, limit: int) -> None:
    assert len(read(document).splitlines()) <= limit


def test_the_readme_says_how_fast_kernels_are_on_a_gpu_as_recorded() -> None:
    cases = json.loads(read("benchmarks/results/gpu.json"))["cases"]

    def shown(kinds: tuple[str, ...], others: tuple[str, ...]) -> str:
        """Return the lowest and the highest rate of the Triton kernels over that of the fastest other system."""
        rates = []
        for key, case in cases.items():
            times = {name: record["seconds"] for name, record in case["measured"].items() if record["seconds"]}
            rivals = [seconds for name, seconds in times.items() if name in others]
            if key.split(":")[0] in kinds and rivals and "triton" in times:
                rates.append(min(rivals) / times["triton"])
        return f"{min(rates):.1f} to {max(rates):.1f} times"

    text = " ".join(read("README.md").split())
    libraries = ("flash_attn_3", "flashinfer", "SDPA, dense")
    assert f"decodes at {shown(('decode', 'decode, all', 'decode-only'), libraries)} the rate" in text
    assert f"prompts at {shown(('prefill',), libraries[:1])} that of FlashAttention-3" in text


def test_the_readme_says_what_prefill_skipping_saves_as_recorded() -> None:
    shares = re.findall(
        r"^\| whole prefill, time .* (\d\.\d+) \|$", read("benchmarks/results/skipping.md"), re.MULTILINE
    )
    least, greatest = sorted(map(float, shares))
    assert f"[{least:.2f} to {greatest:.2f} of the time](benchmarks/results/skipping.md)" in read("README.md")


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented(hook: str) -> None:
    assert getattr(HookSpecs, hook).__doc__


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_implemented_in_a_test(hook: str) -> None:
    others = [path for path in ROOT.glob("tests/**/*.py") if path != Path(__file__)]
    pattern = rf"def {hook}\(|\bplugin\([^\n]*\b{hook.removeprefix('kvframe_register_')}="
    assert [path.name for path in others if re.search(pattern, path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    "document",
    [
        path.relative_to(ROOT).as_posix()
        for place in ("", "benchmarks/", "benchmarks/*/", "docs/", "examples/", "plugins/*/")
        for path in ROOT.glob(f"{place}*.md")
    ],
)
def test_links_lead_somewhere(document: str) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", read(document))
    missing = [target for target in targets if "://" not in target and not leads_somewhere(document, target)]
    assert missing == []


def leads_somewhere(document: str, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = (ROOT / document).parent / path if path else ROOT / document
    if not anchor:
        return file.exists()
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return anchor in {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_changelog_starts_with_the_unreleased_version() -> None:
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert f"[Unreleased]: {version}" == re.findall(r"^## (.+)$", read("CHANGELOG.md"), flags=re.MULTILINE)[0]
