"""Print the files and lines of each package of the core and of the engine, which packages import which, and a step's.

    python -m tests.project.import_graph

docs/a_step.md lists the files in which one decode step runs code.
"""

from __future__ import annotations

import graphlib
import re
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from kvframe_transformers.testing import save_tiny

from kvframe import Engine, SamplingParams, Stack
from tests.project.test_architecture import ROOT, core_files, core_imports, engine_files

SOURCES = (ROOT / "kvframe", ROOT / "plugins" / "engine" / "src")


def run_in_a_step() -> tuple[dict[str, int], set[str]]:
    """Return what one decode step of four requests of a Llama runs in the core and in the engine.

    Returns:
        The number of lines that run, by file in the order of first use; and the classes of the values that are made.
    """
    stack = Stack.from_mapping({"cache": {"memory": "16MiB"}, "engine": {"self_check": False}})
    lines: dict[str, set[int]] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        file_lines = lines.setdefault(frame.f_code.co_filename, set())
        if event == "line":
            file_lines.add(frame.f_lineno)
        return trace

    with tempfile.TemporaryDirectory() as folder:
        save_tiny(Path(folder), "llama")
        with Engine.from_pretrained(Path(folder), stack=stack) as engine:
            for request in range(4):
                engine.add_request([1 + request, 2, 3, 4, 5], SamplingParams(max_new_tokens=16, ignore_eos=True))
            for _ in range(4):
                engine.step()
            before = sys.gettrace()
            sys.settrace(trace)
            engine.step()
            sys.settrace(before)
    files = {
        Path(name).relative_to(root).as_posix(): len(file_lines)
        for name, file_lines in lines.items()
        for root in SOURCES
        if Path(name).is_relative_to(root)
    }
    # What attrs generates for a class is no file.
    generated = [re.fullmatch(r"<attrs generated methods kvframe(?:_engine)?\..*\.(\w+)>", name) for name in lines]
    return files, {match[1] for match in generated if match is not None}


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
    lines_run, made = run_in_a_step()
    print(f"a decode step runs {sum(lines_run.values())} lines in {len(lines_run)} files and makes {len(made)} values")


if __name__ == "__main__":
    main()
