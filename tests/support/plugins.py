"""Plugins that are modules made by a test, as a script makes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from kvframe.contract import hookimpl


def plugin(name: str, **registered: Mapping[str, type | str]) -> ModuleType:
    """Return a plugin module that registers classes: ``plugin("mine", backends={"fast": Fast})``."""
    module = ModuleType(name)
    for kind, classes in registered.items():

        def register_all(register: Any, classes: Mapping[str, type | str] = classes) -> None:
            for key, target in classes.items():
                register(key, target)

        register_all.__name__ = f"kvframe_register_{kind}"
        setattr(module, register_all.__name__, hookimpl(register_all))
    return module
