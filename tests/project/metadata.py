"""What all distributions of the workspace say of themselves, from the root's pyproject.toml.

Run as ``python -m tests.project.metadata`` to write it into each pyproject.toml.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [
    ROOT / "kernels",
    *sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml")),
]
"""The folders of all distributions but the core."""

SYSTEM = "Operating System :: "
SAME = ("version", "requires-python", "license", "license-files", "authors", "classifiers")
"""The keys of ``[project]`` that the root's file decides, in the order in which they are written."""


def project_of(folder: Path) -> dict[str, Any]:
    """Return the table ``[project]`` of a distribution."""
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def system_of(folder: Path) -> str:
    """Return the classifier of the systems that a distribution runs on: POSIX if a module imports ``fcntl``."""
    texts = (path.read_text(encoding="utf-8") for path in folder.glob("src/**/*.py"))
    return f"{SYSTEM}POSIX" if any("\nimport fcntl\n" in text for text in texts) else f"{SYSTEM}OS Independent"


def sibling_range(version: str) -> str:
    """Return which versions of the others a distribution of this version takes: those of the same minor."""
    major, minor = map(int, version.split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}"


def completed(folder: Path) -> str:
    """Return the pyproject.toml of a distribution as it should be."""
    core = project_of(ROOT)
    values = {key: core[key] for key in SAME}
    values["classifiers"] = [
        system_of(folder) if classifier.startswith(SYSTEM) else classifier for classifier in core["classifiers"]
    ]
    text = with_sibling_ranges((folder / "pyproject.toml").read_text(encoding="utf-8"), core["version"])
    head, _, rest = text.partition("\n[project]\n")
    table, _, others = rest.partition("\n[")
    for key in SAME:
        table = re.sub(rf"^{key} = (\[\n(?:    .*\n)+\]|.*)\n", "", table, flags=re.MULTILINE)
    same = "".join(f"{key} = {as_toml(value)}\n" for key, value in values.items())
    table = re.sub(r"^readme = .*\n", lambda match: match[0] + same, table, flags=re.MULTILINE)
    others = re.sub(r"^project\.urls\]\n(.+\n)+\n\[", "", others)
    urls = "".join(f'{name} = "{url}"\n' for name, url in core["urls"].items())
    return f"{head}\n[project]\n{table}\n[project.urls]\n{urls}\n[{others}"


def with_sibling_ranges(text: str, version: str) -> str:
    """Return a pyproject.toml with the version ranges of the distributions here that it names; one may pin the core."""
    text = re.sub(r'(?<="kvframe)==[\d.]+(?=")', f"=={version}", text)
    return re.sub(r'(?<=")(kvframe[\w-]*(?:\[[\w,-]+\])?)>=[\d.]+,<[\d.]+(?=")', rf"\1{sibling_range(version)}", text)


def as_toml(value: Any) -> str:
    """Return a string, a table of strings or a list of these as TOML; several strings have a line each."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {as_toml(member)}" for key, member in value.items()) + " }"
    if isinstance(value, list):
        items = [as_toml(member) for member in value]
        return f"[{items[0]}]" if len(items) == 1 else "[\n" + "".join(f"    {item},\n" for item in items) + "]"
    return f'"{value}"'


def main() -> None:
    """Write each pyproject.toml, and the link to the licence beside it."""
    path = ROOT / "pyproject.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(with_sibling_ranges(text, project_of(ROOT)["version"]), encoding="utf-8")
    for folder in FOLDERS:
        (folder / "pyproject.toml").write_text(completed(folder), encoding="utf-8")
        licence = folder / "LICENSE"
        if not licence.is_symlink():
            licence.unlink(missing_ok=True)
            licence.symlink_to(Path(*[".."] * len(folder.relative_to(ROOT).parts)) / "LICENSE")


if __name__ == "__main__":
    main()
