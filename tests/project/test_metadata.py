"""Each distribution can be published: what its package says of itself is complete, and the same for all of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from kvframe_testing.commands.new_plugin import _DESCRIPTIONS, render

from kvframe.loading.plugins import load_plugins
from tests.project.metadata import FOLDERS, ROOT, completed, project_of, sibling_range, system_of, with_sibling_ranges

WRITE = "run python -m tests.project.metadata"
SOURCE = project_of(ROOT)["urls"]["Source"]
NOT_IN_ALL = {"kvframe-flash-attn": "flash-attn", "kvframe-flashinfer": "flashinfer", "kvframe-vllm": "vllm"}
"""The extras that ``kvframe[all]`` leaves out: they need a GPU, or decide which torch is installed."""

IMPORTS_TORCH = r"^(import torch|from torch[. ])"

BUILD = """
import sys
from setuptools import build_meta
_, folder = sys.argv  # building changes it
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_what_all_distributions_say_is_what_the_core_says(folder: Path) -> None:
    assert (folder / "pyproject.toml").read_text(encoding="utf-8") == completed(folder), WRITE
    assert (folder / "LICENSE").is_symlink(), WRITE
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("folder", [ROOT, *FOLDERS], ids=lambda path: project_of(path)["name"])
def test_a_distribution_says_what_it_is_for(folder: Path) -> None:
    project = project_of(folder)
    assert 20 <= len(project["description"]) <= 200
    assert "kvframe" == project["keywords"][0]
    assert 4 <= len(project["keywords"]) == len(set(project["keywords"]))
    for key in ("keywords", "dependencies"):
        assert all(word == word.strip().lower() for word in project[key]), key


def test_the_core_names_the_versions_of_its_distributions() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert text == with_sibling_ranges(text, project_of(ROOT)["version"]), WRITE
    assert [">=0.9,<0.10", ">=1.2,<1.3"] == [sibling_range(version) for version in ("0.9.3", "1.2.0")]


def test_the_kit_is_for_one_version_of_the_core_whose_private_modules_it_uses() -> None:
    core = project_of(ROOT)["version"]
    assert f"kvframe=={core}" in project_of(ROOT / "plugins" / "testing")["dependencies"]
    assert '"kvframe==1.2.3"' == with_sibling_ranges('"kvframe==0.9.0"', "1.2.3")


def test_a_distribution_that_locks_files_by_fcntl_needs_posix() -> None:
    assert "Operating System :: POSIX" == system_of(ROOT / "plugins" / "disk")
    assert "Operating System :: OS Independent" == system_of(ROOT / "plugins" / "mamba")


def test_the_extra_all_has_every_plugin_with_every_extra() -> None:
    expected = set()
    for folder in FOLDERS:
        project = project_of(folder)
        if folder.parent.name == "plugins":
            extras = set(project.get("optional-dependencies", {})) - {NOT_IN_ALL.get(project["name"])}
            extras_text = f"[{','.join(sorted(extras))}]" if extras else ""
            expected.add(f"{project['name']}{extras_text}{sibling_range(project['version'])}")
    everything = project_of(ROOT)["optional-dependencies"]["all"]
    assert sorted(expected) == sorted(everything)


def test_a_distribution_that_computes_requires_torch() -> None:
    """One with a spec or a format does not, because layers are planned without torch; nor does the core."""
    registry = load_plugins().registry
    planned = {names.get(name).owner for names in (registry.specs, registry.formats) for name in names.names()}
    for folder in [ROOT, *FOLDERS]:
        project = project_of(folder)
        texts = (path.read_text(encoding="utf-8") for path in folder.glob("src/**/*.py"))
        computes = any(re.search(IMPORTS_TORCH, text, re.MULTILINE) for text in texts)
        assert ("torch>=2.11,<3" in project["dependencies"]) == (computes and project["name"] not in planned), folder


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_links_of_a_readme_lead_somewhere_outside_of_a_clone_too(folder: Path) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert [] == [target for target in targets if not target.startswith(("https://", "#"))]
    files = [target.removeprefix(f"{SOURCE}/blob/main/").partition("#") for target in targets if SOURCE in target]
    for path, _, anchor in files:
        text = (ROOT / path).read_text(encoding="utf-8")
        titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
        anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, f"{path}#{anchor}"


# --- what is built ----------------------------------------------------------------------------------------------------


def built(folder: Path, target: Path) -> tuple[Message, list[str]]:
    """Build a distribution from a copy; return its wheel's metadata, and the files of its wheel and its sdist."""
    source = target / "source" / folder.relative_to(ROOT)
    if folder == ROOT:
        source.mkdir(parents=True)
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        shutil.copytree(ROOT / "kvframe" / "cli", source / "kvframe" / "cli", symlinks=True)
    else:
        ignored = shutil.ignore_patterns("*.egg-info", "build", "tests", "__pycache__")
        shutil.copytree(folder, source, symlinks=True, ignore=ignored)
        shutil.copy(ROOT / "LICENSE", target / "source")
    command = [sys.executable, "-c", BUILD, str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    shutil.unpack_archive(sdist, target / "sdist", filter="data")
    files = [path.relative_to(target / "sdist").as_posix() for path in (target / "sdist").rglob("*") if path.is_file()]
    with zipfile.ZipFile(wheel) as archive:
        files += archive.namelist()
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(metadata).decode()), files


@pytest.mark.parametrize("folder", [ROOT, ROOT / "plugins" / "testing"], ids=["core", "testing"])
def test_a_wheel_has_the_licence_and_a_readme_whose_links_work(folder: Path, tmp_path: Path) -> None:
    metadata, files = built(folder, tmp_path)
    version = project_of(ROOT)["version"]
    name = project_of(folder)["name"].replace("-", "_")
    assert version == metadata["Version"]
    assert "LICENSE" == metadata["License-File"]
    assert {f"{name}-{version}.dist-info/licenses/LICENSE", f"{name}-{version}/LICENSE"} <= {*files}
    assert f"Source, {SOURCE}" in metadata.get_all("Project-URL", [])
    assert "text/markdown" == metadata["Description-Content-Type"]
    text = str(metadata.get_payload())
    assert text.startswith(f"# {project_of(folder)['name']}\n")
    assert [] == re.findall(r"\]\((?!https?://|#)[^)]*\)", text)
    if folder == ROOT:
        assert f"]({SOURCE}/blob/main/docs/plugins.md)" in text
        assert f"]({SOURCE}/raw/main/docs/plan.png)" in text
    else:
        assert "kvframe_testing/commands/templates/common/LICENSE.template" in files


def test_a_plugin_that_an_author_starts_with_can_be_published_too() -> None:
    files = render("mine", "page_store")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert {*project_of(ROOT / "plugins" / "disk")} - {"entry-points"} <= {*project}
    assert ["kvframe", "page-store"] == project["keywords"]
    assert (ROOT / "LICENSE").read_text() == files["LICENSE"]
    assert ["attrs>=23.2", "kvframe>=0.9"] == project["dependencies"]


@pytest.mark.parametrize("kind", _DESCRIPTIONS)
def test_a_plugin_that_an_author_starts_with_requires_torch_if_it_imports_it(kind: str) -> None:
    files = render("mine", kind)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    sources = [text for path, text in files.items() if path.startswith("src")]
    imports = any(re.search(IMPORTS_TORCH, text, re.MULTILINE) for text in sources)
    assert imports == ("torch>=2.11" in project["dependencies"])
