"""``kvframe new-plugin``: what it writes is formatted and typed, passes its own tests once installed, runs a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from kvframe_testing.commands.new_plugin import TEMPLATES, render
from kvframe_transformers.testing import save_tiny

from tests.programs import IMPORTED, run_program
from tests.support.commands import run

ROOT = Path(__file__).resolve().parents[2]
KINDS = (
    *("backend", "spec", "wrapper", "format", "eviction", "page_store", "event_publisher", "scheduling", "proposer"),
    "adapter",
)
LONG = "a_name_as_long_as_may_b0"
SHORT = "x"
WHOLE = pytest.mark.whole


def bake(*arguments: object) -> Result:
    return run("new-plugin", *map(str, arguments))


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plugins of each kind, one with a name of two letters and one with the longest name."""
    folder = tmp_path_factory.mktemp("baked")
    for index, kind in enumerate(KINDS):
        names = {True: f"{LONG[:-1]}{index}", False: f"{SHORT}{index}"}
        for is_long, name in names.items():
            where = folder / f"{kind}-{'long' if is_long else 'short'}"
            result = bake(name, "--kind", kind, "--directory", where)
            assert 0 == result.exit_code, result.output
    return folder


def lint(folder: Path, *command: str, **environment: str) -> str:
    """Return what a tool reports."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_what_is_written_is_formatted_and_has_nothing_to_complain_about(baked: Path) -> None:
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    options = ["--select", ",".join(rules["select"]), "--ignore", ",".join(rules["ignore"])]
    options += ["--config", f"lint.pydocstyle.convention = '{rules['pydocstyle']['convention']}'"]
    assert "" == lint(baked, "ruff", "check", "--no-cache", *options, ".")
    assert "" == lint(baked, "ruff", "format", "--no-cache", "--check", ".")


def test_what_is_written_is_typed(baked: Path) -> None:
    sources = [str(path) for path in sorted(baked.glob("*/src"))]
    assert 2 * len(KINDS) == len(sources)
    assert "" == lint(ROOT, "mypy", "--strict", *sources, MYPYPATH=os.pathsep.join(sources), PYTHONPATH="")


def test_no_word_of_the_templates_is_left(baked: Path) -> None:
    texts = [path.read_text() for path in baked.rglob("*") if path.is_file()]
    assert 16 * 7 <= len(texts)
    words = ("own_part", "own-part", "OwnPart", "{description}", "{api}", "{keyword}", "{dependencies}", "{test}")
    for text in texts:
        assert not any(word in text for word in words)


@pytest.mark.parametrize("kind", KINDS)
def test_every_template_is_in_the_package(kind: str) -> None:
    kit = ROOT / "plugins" / "testing"
    data = tomllib.loads((kit / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {path for pattern in data["kvframe_testing"] for path in (kit / "src" / "kvframe_testing").glob(pattern)}
    for path in (*(TEMPLATES / "common").rglob("*"), *(TEMPLATES / kind).rglob("*")):
        assert path.is_dir() or path in packaged


@pytest.mark.parametrize("kind", KINDS)
def test_the_implementation_fits_on_a_page(kind: str) -> None:
    limits = {"backend": 60, "spec": 40, "wrapper": 40, "adapter": 120}
    (source,) = (
        text
        for path, text in render("mine", kind).items()
        if path.startswith("src/") and path.split("/")[-1] not in ("plugin.py", "__init__.py", "py.typed", "model.py")
    )
    lines = [line for line in source.splitlines() if line.strip() and not line.strip().startswith(('"""', "#"))]
    assert len(lines) <= limits.get(kind, 40)


# --- each kind, installed ---------------------------------------------------------------------------------------------

STACKS: dict[str, dict[str, Any]] = {
    "backend": {"rules": [{"layers": "*", "backend": "mine_backend"}]},
    "wrapper": {"rules": [{"layers": "*", "wrappers": ["mine_wrapper"], "backend": "torch_reference"}]},
    "format": {"cache": {"format": "mine_format"}},
    "eviction": {"cache": {"eviction": "mine_eviction"}},
    "page_store": {"cache": {"stores": ["mine_page_store"], "key": "5" * 64}},
    "event_publisher": {"cache": {"events": "mine_event_publisher"}},
    "scheduling": {"engine": {"scheduling": "mine_scheduling"}},
    "proposer": {"model": {"drafts": "mine_proposer"}},
}
"""How a stack uses the plugin. Its tokens are those of a stack without it. The adapter's own tests run a model."""

RUN_A_MODEL = """
import json, sys
import torch
torch.set_num_threads(1)
from kvframe import Engine, SamplingParams, Stack

def generate(path, tables):
    cache = {"memory": "4MiB", "block_size": 4, **tables.pop("cache", {})}
    with Engine.from_pretrained(path, stack=Stack.from_mapping({"cache": cache, **tables})) as engine:
        prompts = [[*range(3, 40)], [5, 6, 7], [*range(3, 30), 9]]
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
        stats = engine.stats()
        used = [each.backend for each in engine.choices], [group.spec.kv_format.name for group in engine.plan.groups]
    return [list(output.token_ids) for output in outputs], [*used, stats.draft_tokens]

path, stacks = sys.argv[1], json.loads(sys.argv[2])
expected, _ = generate(path, {})
found = {kind: generate(path, tables) for kind, tables in stacks.items()}
print(json.dumps({kind: {"equal": tokens == expected, "used": used} for kind, (tokens, used) in found.items()}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny-gemma-3"
    save_tiny(path, "gemma3_text")
    return path


def install(folders: list[Path], site: Path) -> None:
    """Install distributions by pip into a folder of their own."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--target", str(site), *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(
    scope="module",
    params=[pytest.param(KINDS, id="together"), *(pytest.param((kind,), id=kind, marks=WHOLE) for kind in KINDS)],
)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """The distributions' folders, the last part of whose names are the kinds, and where they are installed."""
    folder = tmp_path_factory.mktemp("installed")
    folders = [folder / kind for kind in request.param]
    for kind in request.param:
        result = bake(f"mine_{kind}", "--kind", kind, "--directory", folder / kind)
        assert 0 == result.exit_code, result.output
    install(folders, folder / "site")
    return folders, folder / "site"


FEW = """
def pytest_collection_modifyitems(items):
    first = {item.path: item for item in reversed(items)}
    items[:] = [item for index, item in enumerate(items) if index % 64 == 0 or item is first[item.path]]
"""
"""A plugin of pytest that leaves out most of the kit's checks, which the templates' parts pass as other parts do."""


def test_each_kind_passes_its_own_tests_once_installed(installed: tuple[list[Path], Path]) -> None:
    folders, site = installed
    (site / "few.py").write_text(FEW)
    command = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "-W", "error", *IMPORTED]
    command += [] if len(folders) == 1 else ["-p", "few"]
    done = run_program(*command, *map(str, folders), cwd=folders[0], packages=site)
    assert 0 == done.returncode, done.stdout + done.stderr
    passed = [line for line in done.stdout.splitlines() if " PASSED " in line]
    for folder in folders:
        assert any(f"test_mine_{folder.name}.py::" in line for line in passed), done.stdout


def test_each_kind_runs_a_model_once_installed(installed: tuple[list[Path], Path], model: Path) -> None:
    folders, site = installed
    stacks = {folder.name: STACKS[folder.name] for folder in folders if folder.name in STACKS}
    done = run_program("-c", RUN_A_MODEL, str(model), json.dumps(stacks), cwd=folders[0], packages=site)
    assert 0 == done.returncode, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert stacks.keys() == found.keys()
    for kind, result in found.items():
        backends, formats, num_drafts = result["used"]
        assert result["equal"]
        assert (kind == "backend") is all("kvframe-mine-backend:mine_backend" == backend for backend in backends)
        assert (kind == "format") is ({"mine_format"} == {*formats})
        assert (kind == "proposer") is (num_drafts > 0)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_next_three_commands_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = bake("own_window", "--kind", "spec")
    assert (0, "") == (result.exit_code, result.stderr)
    assert [
        "kvframe-own-window holds the spec 'own_window', in 9 files. Next:",
        "",
        "  pip install -e 'kvframe-own-window[test]'",
        "  kvframe check own_window",
        "  pytest kvframe-own-window",
    ] == result.stdout.splitlines()
    assert (tmp_path / "kvframe-own-window" / "src" / "kvframe_own_window" / "spec.py").is_file()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = bake("own_window", "--kind", "spec", "--directory", tmp_path)
    assert (2, "") == (result.exit_code, result.stdout)
    assert "exists, and nothing is overwritten; give another --directory" in result.stderr
    assert ["notes.txt"] == [path.name for path in tmp_path.iterdir()]
    result = bake("own_window", "--kind", "spec", "--directory", tmp_path / "notes.txt")
    assert (2, "mine") == (result.exit_code, (tmp_path / "notes.txt").read_text())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OwnWindow", "not 'OwnWindow'; try own_window"),
        ("own-window", "not 'own-window'; try own_window"),
        ("2window", "is snake_case, like own_window, of at most 24 characters, not '2window'; try window"),
        ("", "not ''"),
        ("a" * 25, "of at most 24 characters"),
        ("../evil", "try evil"),
        ("class", "the name 'class' is reserved"),
        ("kvframe", "the name 'kvframe' is reserved"),
        ("sliding_window", "is registered by kvframe-sliding-window; choose another"),
        ("full_attention", "is registered by kvframe; choose another"),
        ("transformers", "is registered by kvframe-transformers; choose another"),
    ],
)
def test_names_that_cannot_be_used_are_refused_with_a_reason(name: str, message: str, tmp_path: Path) -> None:
    result = bake(name, "--kind", "spec", "--directory", tmp_path / "new")
    assert (2, "", False) == (result.exit_code, result.stdout, (tmp_path / "new").exists())
    assert message in result.stderr


def test_an_unknown_kind_names_those_that_exist(tmp_path: Path) -> None:
    result = bake("mine", "--kind", "kernel", "--directory", tmp_path / "new")
    assert 2 == result.exit_code
    assert all(kind in result.stderr for kind in KINDS)


def test_a_reserved_name_of_the_kind_is_refused(tmp_path: Path) -> None:
    result = bake("auto", "--kind", "backend", "--directory", tmp_path / "new")
    assert "the name 'auto' is reserved" in result.stderr
