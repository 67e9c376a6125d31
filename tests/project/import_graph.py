"""Print the files and lines of each package of the core and of the engine, and which packages import which.

    python -m tests.project.import_graph

docs/a_step.md lists the files in which one decode step runs code.
"""

from __future__ import annotations

import graphlib

from tests.project.test_architecture import core_files, core_imports, engine_files


def unit_of(module: str) -> str:
    """Return the package of a module; a module outside of all packages counts as one."""
    return module.split(".")[0]


def levels_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the packages in levels: each imports packages of lower levels only."""
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()
    levels = []
    while sorter.is_active():
        levels.append(sorted(sorter.get_ready()))
        sorter.done(*levels[-1])
    return levels


def main() -> None:
    """Print the counts."""
    graph: dict[str, set[str]] = {}
    lines: dict[str, list[int]] = {}
    for module, path in core_files().items():
        if module:
            imports = core_imports(path) | core_imports(path, at_type_checking=True)
            unit = unit_of(module)
            graph[unit] = (graph.get(unit, set()) | set(map(unit_of, imports - {""}))) - {unit}
            lines.setdefault(unit, []).append(len(path.read_text(encoding="utf-8").splitlines()))
    engine = [len(path.read_text(encoding="utf-8").splitlines()) for path in engine_files().values()]
    levels = levels_of(graph)
    for unit in (unit for level in levels for unit in level):
        print(f"{unit:12} {len(lines[unit]):3} files {sum(lines[unit]):6,} lines  {' '.join(sorted(graph[unit]))}")
    core = sum(sum(each) for each in lines.values())
    print(f"the core has {core:,} lines, the engine {len(engine)} files and {sum(engine):,} lines")
    num_arrows = sum(map(len, graph.values()))
    print(f"{len(graph)} packages and modules, {len(levels)} levels, {num_arrows} arrows between them")


if __name__ == "__main__":
    main()
