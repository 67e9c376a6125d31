"""Print the files and lines of each package of the core and of the engine, which packages import which, and a step's.

    python -m tests.project.import_graph

docs/a_step.md lists the files in which one decode step runs code.
"""

from __future__ import annotations

import graphlib
import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Self

from kvframe_transformers.testing import save_tiny

from kvframe import Engine, SamplingParams, Stack
from tests.project.test_architecture import ROOT, core_files, core_imports, engine_files

SOURCES = (ROOT / "kvframe", ROOT / "plugins" / "engine" / "src")


class Run:
    """The lines of the core and of the engine that run within a ``with`` statement; what imports run is left out.

    Attributes:
        lines: The number of lines that ran, by file in the order of first use.
        values: The classes of the values that were made.
    """

    def __enter__(self) -> Self:
        self._lines: dict[str, set[int]] = {}
        self._caller = sys._getframe(1)
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "call" and self._is_imported(frame):
            return None
        file_lines = self._lines.setdefault(frame.f_code.co_filename, set())
        if event == "line":
            file_lines.add(frame.f_lineno)
        return self._trace

    def _is_imported(self, frame: FrameType | None) -> bool:
        """Return whether an import runs a frame: that of a module, of a class, or of a function that these call."""
        while frame is not None and frame is not self._caller:
            if frame.f_code.co_name == "<module>":
                return True
            frame = frame.f_back
        return False

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        self.lines = {
            Path(name).relative_to(root).as_posix(): len(file_lines)
            for name, file_lines in self._lines.items()
            for root in SOURCES
            if Path(name).is_relative_to(root)
        }
        # What attrs generates for a class is no file.
        generated = [
            re.fullmatch(r"<attrs generated methods kvframe(?:_engine)?\..*\.(\w+)>", name) for name in self._lines
        ]
        self.values = {match[1] for match in generated if match is not None}

    def __str__(self) -> str:
        return f"{sum(self.lines.values()):,} lines in {len(self.lines)} files"


@cache
def runs_of_an_engine() -> tuple[Run, Run, Run]:
    """Return what an engine runs with a tiny Llama: to be made, in a request's whole life, in a decode step of four."""
    stack = Stack.from_mapping({"cache": {"memory": "16MiB"}, "engine": {"self_check": False}})
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(Path(folder), "llama")
        with Run() as start:
            engine = Engine.from_pretrained(Path(folder), stack=stack)
        with engine:
            engine.generate([[9] * 5], params)
            with Run() as life:
                engine.add_request([1] * 40, params)
                while engine.has_unfinished:
                    engine.step()
            for request in range(4):
                engine.add_request([1 + request, 2, 3, 4, 5], params)
            for _ in range(4):
                engine.step()
            with Run() as step:
                engine.step()
    return start, life, step


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
    core = sum(sum(unit_lines) for unit_lines in lines.values())
    print(f"the core has {core:,} lines, the engine {len(engine)} files and {sum(engine):,} lines")
    num_arrows = sum(map(len, graph.values()))
    print(f"{len(graph)} packages and modules, {len(levels)} levels, {num_arrows} arrows between them")
    start, life, step = runs_of_an_engine()
    print(f"from_pretrained runs {start}, a request's whole life {life}")
    print(f"a decode step runs {step} and makes {len(step.values)} values")


if __name__ == "__main__":
    main()
