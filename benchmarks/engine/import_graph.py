"""Count the core: files and lines of each package, and how its packages import each other.

    python -m benchmarks.engine.import_graph

docs/a_step.md lists the files in which one decode step runs code.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.harness.machine import ROOT

CORE = ROOT / "kvframe"


def module_files() -> dict[str, Path]:
    """Return the files of the core by module, without ``kvframe.``."""
    names = {path: path.relative_to(CORE).with_suffix("").as_posix().replace("/", ".") for path in CORE.rglob("*.py")}
    return {name.removesuffix("__init__").removesuffix("."): path for path, name in sorted(names.items())}


def unit_of(module: str) -> str:
    """Return the package that a module lies in; a module beside the packages is a unit of its own."""
    return module.split(".")[0]


def imports_of(path: Path, modules: Iterable[str]) -> set[str]:
    """Return the modules of the core that a file imports anywhere, for type checking too."""
    known, found = set(modules), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kvframe":
            whole = node.module.removeprefix("kvframe").removeprefix(".")
            parts = {f"{whole}.{alias.name}".removeprefix(".") for alias in node.names}
            found |= parts & known or {whole}
    return found - {""}


def unit_graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return which packages each package imports."""
    graph: dict[str, set[str]] = {unit_of(module): set() for module in files if module}
    for module, path in files.items():
        if module:
            graph[unit_of(module)] |= {unit_of(name) for name in imports_of(path, files)} - {unit_of(module)}
    return graph


def levels_of(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the packages in levels: each imports packages of lower levels only.

    Raises:
        graphlib.CycleError: Packages import each other in a circle.
    """
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()
    levels = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        levels.append(ready)
        sorter.done(*ready)
    return levels


def closure_of(start: str, files: Mapping[str, Path]) -> set[str]:
    """Return all modules of the core that importing a package's modules can load."""
    waiting, found = [module for module in files if unit_of(module) == start], set()
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imports_of(files[module], files) if module in files else []
    return found


@click.command(help=__doc__)
def main() -> None:
    """Print the counts."""
    files, console = module_files(), Console()
    graph = unit_graph(files)
    table = Table("package", "files", "lines", "imports")
    levels = levels_of(graph)
    for unit in (unit for level in levels for unit in level):
        lines = [
            len(path.read_text().splitlines()) for module, path in files.items() if module and unit_of(module) == unit
        ]
        table.add_row(unit, str(len(lines)), f"{sum(lines):,}", " ".join(sorted(graph[unit])))
    console.print(table)
    arrows = sum(map(len, graph.values()))
    console.print(f"{len(graph)} packages and modules, {len(levels)} levels, {arrows} arrows between them")
    others = sorted({unit_of(module) for module in closure_of("contract", files)} - {"contract"})
    console.print(f"kvframe.contract imports, directly and through others: {', '.join(others) or 'nothing else'}")


if __name__ == "__main__":
    main()
