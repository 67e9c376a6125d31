"""The names and signatures of the contract as plain values, and what of them a later minor took away.

``python -m tests.frozen.snapshot tests/frozen/1.0/contract.json`` writes them. The file of a version is written before
its release, and never after it.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import attrs
import kvframe_engine.contract

import kvframe.contract
from kvframe.contract.hookspecs import HookSpecs

Snapshot = dict[str, Any]


def take() -> Snapshot:
    """Return each name of both contracts: a constant's type, or the parameters of what can be called, with members."""
    contracts = (kvframe.contract, kvframe_engine.contract)
    found = {name: _of(getattr(contract, name)) for contract in contracts for name in contract.__all__}
    return {**dict(sorted(found.items())), "HookSpecs": _of(HookSpecs)}


def _of(value: Any) -> Any:
    if isinstance(value, type) and issubclass(value, Enum):
        return {"members": {member.name: str(member.value) for member in value}}
    if isinstance(value, type):
        return {"parameters": _parameters(value), "members": dict(_members(value))}
    if inspect.isroutine(value):
        return {"parameters": _parameters(value)}
    return type(value).__name__


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    fields = {field.name for field in attrs.fields(kind)} if attrs.has(kind) else set()
    for name in sorted({name for base in kind.__mro__ if base.__module__.startswith("kvframe") for name in vars(base)}):
        if name.startswith("_"):
            continue
        value = inspect.getattr_static(kind, name)
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if name in fields or not inspect.isfunction(function):
            yield name, "attribute"
        else:
            yield (
                name,
                {"parameters": _parameters(function), "abstract": name in getattr(kind, "__abstractmethods__", ())},
            )


def _parameters(function: Any) -> dict[str, str]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return {}
    return {
        each.name: each.kind.name + ("" if each.default is inspect.Parameter.empty else ", optional")
        for each in signature.parameters.values()
    }


def taken_away(before: Snapshot, after: Snapshot, path: str = "") -> list[str]:
    """Return a sentence for each promise of ``before`` that ``after`` breaks.

    Args:
        before: The snapshot of a version.
        after: That of a later minor.
        path: The name that both belong to.
    """
    broken = []
    for name, old in before.items():
        where = f"{path}{name}"
        if name not in after:
            broken.append(f"{where} was removed")
            continue
        new = after[name]
        if not isinstance(old, dict) or not isinstance(new, dict):
            if old != new:
                broken.append(f"{where} was {old} and is {new}")
            continue
        broken += _taken_from(where, old.get("parameters", {}), new.get("parameters", {}))
        broken += taken_away(old.get("members", {}), new.get("members", {}), f"{where}.")
        if new.get("abstract") and not old.get("abstract"):
            broken.append(f"{where} must be implemented now")
    for name, new in after.items():
        if path and name not in before and isinstance(new, dict) and new.get("abstract"):
            broken.append(f"{path}{name} must be implemented now")
    return broken


def _taken_from(where: str, old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    for name, kind in old.items():
        if name not in new:
            yield f"{where} no longer takes {name}"
        elif new[name] not in (kind, f"{kind}, optional"):
            yield f"{where} takes {name} as {new[name]}, and not as {kind}"
    kept = [name for name in new if name in old]
    if kept != [name for name in old if name in new]:
        yield f"{where} takes its arguments in another order"
    # A hook is called by name, and implementations take the arguments that they want.
    if not where.startswith("HookSpecs."):
        yield from (
            f"{where} requires {name} now" for name, kind in new.items() if name not in old and _is_required(kind)
        )


def _is_required(kind: str) -> bool:
    return not kind.endswith(", optional") and not kind.startswith("VAR_")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(take(), indent=1) + "\n", encoding="utf-8")
