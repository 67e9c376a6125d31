"""Layers as torch operators, which a compiled model calls without tracing into them.

A compiler cannot follow a layer to the step that runs: which metadata it reads, which pages, which kernel. So a
compiled model calls ``kvframe::attend`` instead of an attention layer, and ``kvframe::compute`` instead of anything
else that depends on the step. The compiler knows only the shapes of their outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch

from kvframe.contract import Attend


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


class OpaqueFunction:
    """Calls a function of tensors as an operator, while a model is compiled and when it runs.

    The function may write to memory that the compiler does not know, such as the pages of a state. The compiler removes
    an operator whose results are unused, so use them.
    """

    def __init__(
        self,
        run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
        shapes: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> None:
        """Take the function.

        Args:
            run: What is called when the model runs.
            shapes: Returns tensors of the shapes, dtypes and devices of the results. Their values are not read.
        """
        self._run, self._shapes = run, shapes
        self._name = str(next(_NUMBERS))
        _FUNCTIONS[self._name] = self

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Call the function."""
        results: list[torch.Tensor] = torch.ops.kvframe.compute(inputs, self._name)
        return results

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Call the function, and return its results in memory that no argument shares."""
        return _in_own_memory(self._run(inputs), inputs)

    def shapes(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of the shapes of the results, which share no memory."""
        return [tensor.new_empty(tensor.shape) for tensor in self._shapes(inputs)]


_NUMBERS = itertools.count()
_CALLS: WeakValueDictionary[str, OpaqueAttention] = WeakValueDictionary()
_FUNCTIONS: WeakValueDictionary[str, OpaqueFunction] = WeakValueDictionary()
_LIBRARY = torch.library.Library("kvframe", "DEF")
_LIBRARY.define(
    "attend(Tensor query, Tensor? key, Tensor? value, Tensor? sinks, str layer, SymInt head_size_v) -> Tensor"
)
_LIBRARY.define("compute(Tensor[] inputs, str function) -> Tensor[]")


def _attend(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    sinks: torch.Tensor | None,
    layer: str,
    head_size_v: int,
) -> torch.Tensor:
    output = _CALLS[layer].run(query, key, value, sinks)
    return _in_own_memory([output], [tensor for tensor in (query, key, value, sinks) if tensor is not None])[0]


def _in_own_memory(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results as the compiler expects them: contiguous, in memory that nothing else shares."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    separate = []
    for result in results:
        result = result.contiguous()
        memory = result.untyped_storage().data_ptr()
        separate.append(result.clone() if memory in addresses else result)
        addresses.add(memory)
    return separate


def _fake(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    sinks: torch.Tensor | None,
    layer: str,
    head_size_v: int,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], head_size_v)


def _compute(inputs: list[torch.Tensor], function: str) -> list[torch.Tensor]:
    return _FUNCTIONS[function].run(inputs)


def _fake_compute(inputs: list[torch.Tensor], function: str) -> list[torch.Tensor]:
    return _FUNCTIONS[function].shapes(inputs)


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
_LIBRARY.impl("compute", _compute, "CompositeExplicitAutograd")
torch.library.register_fake("kvframe::attend", _fake, lib=_LIBRARY)
torch.library.register_fake("kvframe::compute", _fake_compute, lib=_LIBRARY)
