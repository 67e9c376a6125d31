"""Compiles a model around its attention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as fx_config

from kvframe_transformers.operators import OpaqueAttention
from kvframe_transformers.packed import share_products
from kvframe_transformers.routing import OPAQUE, attend_now
from kvframe_transformers.skipping import RowCutter

_log = logging.getLogger("kvframe")


def for_any_size() -> AbstractContextManager[None]:
    """Let what torch compiles inside the block serve a size of 1 too, for which it compiles once more otherwise."""
    config: Any = fx_config  # torch gives it its methods when it is imported
    patch: AbstractContextManager[None] = config.patch(backed_size_oblivious=True)
    return patch


class CompiledBody:
    """A compiled model with the call of the original, for any number of tokens.

    If layers can leave rows out, steps that do so have a graph of their own.

    Invariant: until ``remove``, each attention module has an attribute that the compiled code calls instead of it.

    Attributes:
        num_graphs: Graphs that were compiled so far, for all numbers of tokens.
        num_graph_breaks: Times that the model returns to Python in a run; 0 if it is one graph. Of runs that leave rows
            out and of others, those of both.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        head_sizes: Mapping[nn.Module, int],
        backend: Any,
        cutter: RowCutter | None = None,
    ) -> None:
        """Prepare the model; it is compiled when it first runs.

        Args:
            body: The model, or a part of it; called with tensors by name.
            head_sizes: Its attention modules, and the size of the heads of their outputs.
            backend: The compiler: a name that torch knows, or a callable.
            cutter: Leaves rows out; None if no layer does.
        """
        self._modules = list(head_sizes)
        for module, size in head_sizes.items():
            setattr(module, OPAQUE, OpaqueAttention(partial(attend_now, module), size))
        self.num_graphs = 0
        self.num_graph_breaks = 0
        compiler: Callable[..., Any] = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend

        def counted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            share_products(graph)
            run = compiler(graph, inputs)
            # Only now: a compiler may ask for another trace of the model instead.
            self.num_graphs += 1
            return run

        def run(**inputs: Any) -> Any:
            return body(**inputs)

        def run_kept(cutter: RowCutter, kept_rows: torch.Tensor, **inputs: Any) -> Any:
            with cutter.traced(kept_rows, inputs["input_ids"].shape[1]):
                return body(**inputs)

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            # torch keeps compiled code with the code object, which would be shared by all functions made here.
            function.__code__ = function.__code__.replace()
            return torch.compile(function, backend=counted, dynamic=True)

        self._run = compiled(run)
        self._run_kept = None if cutter is None else partial(compiled(run_kept), cutter)
        self._num_probes = 0

    def __call__(self, **inputs: Any) -> Any:
        """Run the model."""
        return self._run(**inputs)

    def keeping(self, kept_rows: torch.Tensor) -> Callable[..., Any]:
        """Return the call of a step whose last layers compute some rows only.

        Args:
            kept_rows: ``[num_kept], int64, device``: these rows.
        """
        assert self._run_kept is not None
        return partial(self._run_kept, kept_rows)

    def note_probe(self) -> None:
        """Record the number of graphs of one more run, of another kind than those before."""
        self._num_probes += 1
        num_graph_breaks = self.num_graphs - self._num_probes
        if num_graph_breaks > self.num_graph_breaks:
            _log.warning(
                "the compiled model goes back to Python in %d places", num_graph_breaks - self.num_graph_breaks
            )
        self.num_graph_breaks = num_graph_breaks

    def remove(self) -> None:
        """Remove the attributes from the attention modules."""
        for module in self._modules:
            vars(module).pop(OPAQUE, None)
