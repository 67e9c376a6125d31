"""Checks that the class of a registered name exists, without importing its module or any package around it.

The module's file is found and parsed. This shows that the class exists, not that its module can be imported.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def find_problem(target: str) -> str:
    """Return why ``"package.module:Class"`` names nothing; empty if it does, or if only an import can show it."""
    module, _, path = target.partition(":")
    spec = _find_spec(module)
    if spec is None:
        return f"there is no module {module!r}"
    if spec.origin is None or not spec.has_location or not spec.origin.endswith(".py"):
        return ""
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (SyntaxError, ValueError) as error:
        return f"module {module!r} is not valid Python: {type(error).__name__}: {error.args[0]}"
    names = set(_bound_names(tree))
    first_name = path.partition(".")[0]
    if first_name in names or not names.isdisjoint({"*", "__getattr__"}):
        return ""
    return f"module {module!r} defines no {first_name!r}"


def _find_spec(module: str) -> ModuleSpec | None:
    """Return the spec of a module; None if there is none. ``importlib.util`` would import the packages around it."""
    outer_name, *inner_names = module.split(".")
    name, spec = outer_name, importlib.util.find_spec(outer_name)
    for part in inner_names:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module binds in any branch; ``*`` if it imports all names of another module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        else:
            yield from _bound_names(node)
