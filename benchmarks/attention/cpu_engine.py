"""What the benchmark asks of an engine's attention, in its own process and environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks.attention.cpu_shapes import Buffers, Shape


@dataclasses.dataclass(frozen=True)
class Step:
    """A shape that an engine has set up.

    Attributes:
        build: Makes the step's metadata from what the engine knows of the batch.
        attend: Computes attention with the metadata that ``build`` returned last, into the output buffer or not.
    """

    build: Callable[[], Any]
    attend: Callable[[], torch.Tensor]


class Engine(Protocol):
    """An engine's attention."""

    def describe(self) -> dict[str, str]:
        """Return the versions that its figures depend on."""
        ...

    def why_not(self, shape: Shape) -> str:
        """Return in one sentence why it cannot compute a step; empty if it can."""
        ...

    def prepare(self, shape: Shape, buffers: Buffers) -> Step:
        """Write keys and values to the pool, in the engine's layout and by its own code, and set up the step."""
        ...
