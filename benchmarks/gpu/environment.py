"""Make the workspace's packages importable and their plugins findable without installing anything.

    python -m benchmarks.gpu.environment FOLDER

It writes the metadata of each distribution into the folder, and prints the source folders as a value of PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def distributions() -> list[tuple[Path, dict[str, Any]]]:
    """Return, for each distribution, its source folder and the table ``project`` of its pyproject.toml."""
    folders = [ROOT, ROOT / "kernels", *sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))]
    found = []
    for folder in folders:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        found.append((folder if folder == ROOT else folder / "src", project))
    return found


def write_metadata(project: dict[str, Any], folder: Path) -> None:
    """Write a distribution's name, version and entry points as the import system expects them."""
    name = project["name"].replace("-", "_")
    target = folder / f"{name}-{project['version']}.dist-info"
    target.mkdir(parents=True, exist_ok=True)
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in project.get("entry-points", {}).items()
    ]
    (target / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (target / "METADATA").write_text(metadata, encoding="utf-8")


def missing_packages(folder: Path) -> list[str]:
    """Return the packages that the core needs and that are neither installed nor in the folder."""
    sys.path.insert(0, str(folder))
    needed = [re.split(r"[<>=!~\[ ]", each)[0] for each in distributions()[0][1]["dependencies"]]
    return [name for name in needed if importlib.util.find_spec(name) is None]


def main(folder: Path) -> int:
    """Write the metadata of all distributions; return 1 if a package that the core needs is missing."""
    for _, project in distributions():
        write_metadata(project, folder)
    if missing := missing_packages(folder):
        print(f"Python lacks {', '.join(missing)}: bring wheels with --wheels", file=sys.stderr)
        return 1
    print(":".join(str(sources) for sources, _ in distributions()))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
