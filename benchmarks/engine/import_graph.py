"""Count the files and lines of the core's packages, and list how they import each other.

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
    """Return the files of the core by module, without ``kvframe.`` and the package itself."""
    names = {path: path.relative_to(CORE).with_suffix("").as_posix().replace("/", ".") for path in CORE.rglob("*.py")}
    found = {name.removesuffix("__init__").removesuffix("."): path for path, name in sorted(names.items())}
    return {name: path for name, path in found.items() if name}


def unit_of(module: str) -> str:
    """Return the package of a module; a module outside of all packages counts as one."""
    return module.split(".")[0]


def imports_of(path: Path, modules: Iterable[str]) -> set[str]:
    """Return the modules of the core that a file imports, those for type checking included."""
    known, found = set(modules), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and unit_of(node.module) == "kvframe":
            whole = node.module.removeprefix("kvframe").removeprefix(".")
            parts = {f"{whole}.{alias.name}".removeprefix(".") for alias in node.names}
            found |= parts & known or {whole}
    return found - {""}


def levels_of(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the packages in levels: each imports packages of lower levels only.

    Raises:
        graphlib.CycleError: Packages import each other in a circle.
    """
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()
    levels = []
    while sorter.is_active():
        levels.append(sorted(sorter.get_ready()))
        sorter.done(*levels[-1])
    return levels


def closure_of(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Return all modules of the core that a package imports, directly or through others."""
    waiting, found = [module for module in imports if unit_of(module) == start], set()
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imports.get(module, ())
    return found


@click.command(help=__doc__)
def main() -> None:
    """Print the counts."""
    files, console = module_files(), Console()
    imports = {module: imports_of(path, files) for module, path in files.items()}
    graph: dict[str, set[str]] = {}
    lines: dict[str, list[int]] = {}
    for module, path in files.items():
        unit = unit_of(module)
        graph[unit] = (graph.get(unit, set()) | set(map(unit_of, imports[module]))) - {unit}
        lines.setdefault(unit, []).append(len(path.read_text(encoding="utf-8").splitlines()))
    levels, table = levels_of(graph), Table("package", "files", "lines", "imports")
    for unit in (unit for level in levels for unit in level):
        table.add_row(unit, str(len(lines[unit])), f"{sum(lines[unit]):,}", " ".join(sorted(graph[unit])))
    console.print(table)
    arrows = sum(map(len, graph.values()))
    console.print(f"{len(graph)} packages and modules, {len(levels)} levels, {arrows} arrows between them")
    others = sorted(set(map(unit_of, closure_of("contract", imports))) - {"contract"})
    console.print(f"kvframe.contract imports, directly and through others: {', '.join(others) or 'nothing else'}")


if __name__ == "__main__":
    main()
