"""Attention as one torch operator, which a compiled model calls without tracing into it.

A compiler cannot follow a layer to the step that runs: which metadata it reads, which pages, which kernel. So a
compiled model calls ``kvframe::attend`` instead of the layer. The compiler knows only the shape of its output.
"""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import torch

from kvframe.contract.model import Attend


class OpaqueAttention:
    """Calls a layer's attention as an operator, while a model is compiled and when it runs.

    The operator writes to pages that the compiler does not know. The compiler still neither removes it, because its
    output is used, nor runs it too early: if a layer reads pages that another layer writes, its query depends on the
    output of that layer.
    """

    def __init__(self, attend: Attend, head_size_v: int) -> None:
        """Take the call.

        Args:
            attend: What is called when the model runs.
            head_size_v: The size of its output's heads.
        """
        self._attend = attend
        self._head_size_v = head_size_v
        self._name = str(next(_NUMBERS))
        _CALLS[self._name] = self

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; arguments and result are those of ``Attend``."""
        output: torch.Tensor = torch.ops.kvframe.attend(query, key, value, sinks, self._name, self._head_size_v)
        return output

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Call the layer's attention."""
        return self._attend(query, key, value, sinks)


_NUMBERS = itertools.count()
_CALLS: WeakValueDictionary[str, OpaqueAttention] = WeakValueDictionary()
_LIBRARY = torch.library.Library("kvframe", "DEF")
_LIBRARY.define(
    "attend(Tensor query, Tensor? key, Tensor? value, Tensor? sinks, str layer, SymInt head_size_v) -> Tensor"
)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    sinks: torch.Tensor | None,
    layer: str,
    head_size_v: int,
) -> torch.Tensor:
    # The compiler expects contiguous memory that no argument shares.
    output = _CALLS[layer].run(query, key, value, sinks).contiguous()
    memory = output.untyped_storage().data_ptr()
    taken = (each for each in (query, key, value, sinks) if each is not None)
    return output.clone() if any(each.untyped_storage().data_ptr() == memory for each in taken) else output


def _fake(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    sinks: torch.Tensor | None,
    layer: str,
    head_size_v: int,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], head_size_v)


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("kvframe::attend", _fake, lib=_LIBRARY)
