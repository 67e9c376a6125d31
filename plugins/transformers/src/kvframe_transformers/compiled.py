"""A model compiled around its attention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from kvframe.contract import OpaqueAttention
from kvframe_transformers.routing import OPAQUE, attend_now

_log = logging.getLogger("kvframe")


class CompiledBody:
    """Stands for a model: the same call, compiled for any number of tokens.

    Invariant: until ``give_back``, each attention module holds what the compiled code calls in its place.

    Attributes:
        num_graphs: Graphs that were compiled so far, for all numbers of tokens.
        num_graph_breaks: Places where the model has to go back to Python; 0 where it is one graph.
    """

    def __init__(self, body: nn.Module, head_sizes: Mapping[nn.Module, int], backend: Any) -> None:
        """Prepare the model; it is compiled when it first runs.

        Args:
            body: The model.
            head_sizes: Its attention modules, and the size of the heads of their outputs.
            backend: What compiles: a name that torch knows, or a callable.
        """
        self._modules = list(head_sizes)
        for module, size in head_sizes.items():
            setattr(module, OPAQUE, OpaqueAttention(partial(attend_now, module), size))
        self.num_graphs = 0
        self.num_graph_breaks = 0
        compiler: Callable[..., Any] = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend

        def counted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            self.num_graphs += 1
            return compiler(graph, inputs)

        def run(**inputs: Any) -> Any:
            return body(**inputs)

        # What was compiled is kept with the code, of which there is one for all functions that are made here.
        run.__code__ = run.__code__.replace()
        self._run = torch.compile(run, backend=counted, dynamic=True)

    def __call__(self, **inputs: Any) -> Any:
        """Run the model."""
        return self._run(**inputs)

    def note_probe(self) -> None:
        """Take note of how many graphs one run took."""
        self.num_graph_breaks = self.num_graphs - 1
        if self.num_graph_breaks:
            _log.warning("the compiled model goes back to Python in %d places", self.num_graph_breaks)

    def give_back(self) -> None:
        """Take what was put into the modules away."""
        for module in self._modules:
            vars(module).pop(OPAQUE, None)
