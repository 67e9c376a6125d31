"""What GitHub and git read is well-formed, and names commands, files and versions that there are."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project.metadata import ROOT, project_of

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(set((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) - {ROOT / ".github/ISSUE_TEMPLATE/config.yml"})
TARGETS = re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def commands(workflow: dict[str, Any]) -> list[str]:
    """Return every line of shell that a workflow runs."""
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [line for step in steps for line in step.get("run", "").splitlines()]


def test_there_is_a_workflow_for_each_occasion() -> None:
    workflows = {path.stem: " ".join(commands(read(path))) for path in WORKFLOWS}
    expected = {
        "ci": "make test",
        "docs": "make docs",
        "newest_releases": "make compat",
        "nightly": "make whole make dist",
        "release": "make dist make wheels",
    }
    assert expected.keys() == workflows.keys()
    for name, text in expected.items():
        assert all(f"make {target}" in workflows[name] for target in text.replace("make ", "").split()), name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_commands_that_there_are(path: Path) -> None:
    workflow = read(path)
    lines = commands(workflow)
    assert lines
    for line in lines:
        words = line.removeprefix("sudo ").split()
        assert words[1] in TARGETS if words[0] == "make" else os.access(ROOT / words[0], os.X_OK), line
    for job in workflow["jobs"].values():
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
        needs = job.get("needs", [])
        assert {*([needs] if isinstance(needs, str) else needs)} <= {*workflow["jobs"]}


def test_only_a_tag_publishes_and_no_job_has_a_password() -> None:
    publish = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["publish"]
    assert "github.event_name == 'push' && startsWith(github.ref, 'refs/tags/v')" == publish["if"]
    assert {"id-token": "write"} == publish["permissions"]
    assert [] == [path.name for path in WORKFLOWS if "secrets." in path.read_text(encoding="utf-8")]


def test_there_is_an_issue_form_for_each_kind_of_people() -> None:
    assert ["backend_author", "operator", "researcher"] == [path.stem for path in FORMS]
    for path in FORMS:
        form = read(path)
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(ids) == len(set(ids)) >= 4
        assert all(part["attributes"].get("label") for part in form["body"] if part["type"] != "markdown")
        commands_of_form = re.findall(r"`kvframe ([a-z]+)", path.read_text(encoding="utf-8"))
        assert {*commands_of_form} <= {"check", "plugins", "explain", "plan", "doctor"}


def test_the_packages_that_are_updated_are_in_folders_that_there_are() -> None:
    for update in read(ROOT / ".github" / "dependabot.yml")["updates"]:
        assert (ROOT / update["directory"].lstrip("/")).is_dir()


def test_a_commit_is_checked_by_the_tested_version_of_ruff() -> None:
    pinned = re.findall(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert [f"v{pinned[0]}"] == [repo["rev"] for repo in read(ROOT / ".pre-commit-config.yaml")["repos"]]


def test_the_version_to_cite_is_that_of_the_packages() -> None:
    cited = read(ROOT / "CITATION.cff")
    project = project_of(ROOT)
    assert (project["version"], project["license"]) == (cited["version"], cited["license"])
    assert project["urls"]["Source"] == cited["repository-code"]


def test_the_repository_has_one_address() -> None:
    """Its placeholder is replaced everywhere at once."""
    source = project_of(ROOT)["urls"]["Source"]
    files = (".github/ISSUE_TEMPLATE/config.yml", "SECURITY.md", "CITATION.cff", "CONTRIBUTING.md")
    assert [] == [name for name in files if source not in (ROOT / name).read_text(encoding="utf-8")]
