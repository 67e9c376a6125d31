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


def write_metadata(project: dict[str, Any], folder: Path) -> None:
    """Write a distribution's name, version and entry points as the import system expects them."""
    target = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    target.mkdir(parents=True, exist_ok=True)
    groups = project.get("entry-points", {}).items()
    lines = [f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in table.items()) for group, table in groups]
    (target / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (target / "METADATA").write_text(metadata, encoding="utf-8")


def main(folder: Path) -> int:
    """Write the metadata of all distributions; return 1 if a package that the core needs is missing."""
    folders = [ROOT, ROOT / "kernels", *sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))]
    projects = [tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8"))["project"] for path in folders]
    for project in projects:
        write_metadata(project, folder)
    sys.path.insert(0, str(folder))
    needed = [re.split(r"[<>=!~\[ ]", requirement)[0] for requirement in projects[0]["dependencies"]]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        print(f"Python lacks {', '.join(missing)}: bring wheels with --wheels", file=sys.stderr)
        return 1
    print(":".join(str(path if path == ROOT else path / "src") for path in folders))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
