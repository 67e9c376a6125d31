"""Names of the layers of a module that attends several times in a forward: each of its calls is a layer."""

from __future__ import annotations

_MARK = "#"


def name_of_call(path: str, number: int) -> str:
    """Return the name of the layer that is the ``number``-th call of the module at ``path``, counted from 1."""
    return path if number == 1 else f"{path}{_MARK}{number}"


def path_of(layer: str) -> str:
    """Return the path of a layer's module."""
    return layer.partition(_MARK)[0]
