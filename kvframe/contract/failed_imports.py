"""Explains why ``import torch`` failed, and what to do: the cause is often another installed distribution."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distributions
from traceback import walk_tb

from kvframe.contract.errors import shorten, shown


def explain_failed_import(error: BaseException, text: str) -> str | None:
    """Return why torch cannot be imported and what to do; None if ``error`` comes from elsewhere.

    At its import, torch reads the entry points of every installed distribution, so that one broken
    ``entry_points.txt`` prevents it.

    Args:
        error: What was raised, by kvframe's own code or a plugin's.
        text: The error in one line.
    """
    if isinstance(error, ModuleNotFoundError) and _is_torch(error.name):
        return "torch is not installed; try: pip install torch"
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    is_of_torch = any(map(_is_torch, modules)) and not any(map(_is_torch, sys.modules))
    if not is_of_torch and not any(module.startswith("importlib.metadata") for module in modules):
        return None
    for dist in distributions():
        try:
            tuple(dist.entry_points)
        except Exception as reason:
            name, place = _identify(dist)
            return (
                f"the distribution {name}{place} has an entry_points.txt that cannot be read "
                f"({shorten(f'{type(reason).__name__}: {reason}')}), and torch reads it when it is imported; "
                "reinstall or uninstall that distribution, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
            )
    return f"torch cannot be imported: {text}" if is_of_torch else None


def _is_torch(module: str | None) -> bool:
    return f"{module}." == "torch."  # without the dot, the name is that of a backend


def _identify(dist: Distribution) -> tuple[str, str]:
    """Return a distribution's name, and where it lies, as far as they can be read."""
    try:
        return shown(dist.metadata["Name"]), f" in {dist.locate_file('')}"
    except Exception:
        return "of an unknown name", ""
