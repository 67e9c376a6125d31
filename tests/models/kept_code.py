"""Compiled code of a model that serves its later engines too, so that a test compiles a model once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvframe_transformers.routing import OPAQUE
from torch.utils.hooks import RemovableHandle

_HOOKING = ("_cutter", "_hooks")
"""The attributes of a model for objects whose hooks are on its modules while it is attached."""


class KeptCode:
    """What compiled code needs of the model that it was made for.

    The code calls the model's layers through objects at its modules, and holds only with the very hooks that were
    traced. A model that leaves an engine loses both.
    """

    def __init__(self, model: Any) -> None:
        """Take a model that is attached and compiled."""
        self._compiled, self._opaque = model.compiled, model._mode.opaque
        self._attributes = [(vars(module), vars(module)[OPAQUE]) for module in model.compiled._modules]
        self._owners = {
            name: (owner, [*owner._handles]) for name in _HOOKING if (owner := getattr(model, name, None)) is not None
        }
        handles = [handle for _, of_owner in self._owners.values() for handle in of_owner]
        self._hooks = [(hooks, handle.id, hooks[handle.id]) for handle in handles for hooks in _tables_of(handle)]

    def put_on(self, model: Any) -> None:
        """Compile the model, attached again alike, to the same code."""
        model.compiled, model._mode.opaque = self._compiled, self._opaque
        for attributes, opaque in self._attributes:
            attributes[OPAQUE] = opaque
        for name, (owner, handles) in self._owners.items():
            getattr(model, name).remove()
            setattr(model, name, owner)
            owner._handles = [*handles]
        for hooks, number, hook in self._hooks:
            hooks[number] = hook


def _tables_of(handle: RemovableHandle) -> Iterator[dict[int, Any]]:
    """Yield the tables of a module that have an entry for a hook."""
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        table: Any = reference()
        if handle.id in table:
            yield table
