"""What a process does that measures one system's attention: write the pool, attend, and leave the output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.attention.cpu_shapes import Buffers
from benchmarks.attention.shapes import Shape
from benchmarks.harness.process import timed

CALLS = 3
SLOW_SECONDS = 0.1
"""A step that takes longer is timed once in a turn."""

Step = tuple[Callable[[], object], Callable[[], torch.Tensor]]
"""A shape that a system has set up: what makes the step's metadata from what the system knows of the batch, and what
computes attention with the metadata that was made last."""


class System(ABC):
    """One way to compute attention on a CPU."""

    def why_not(self, shape: Shape) -> str:
        """Return why it does not compute a shape; nothing if it does."""
        return ""

    @abstractmethod
    def prepare(self, shape: Shape, buffers: Buffers) -> Step:
        """Write keys and values into the pool, in its own layout, and return the step."""


def answer_turns(system: System, threads: str, file: str) -> Callable[[dict[str, Any]], Any]:
    """Return what does a system's turn of a shape, over shared memory of a file descriptor."""
    torch.set_num_threads(int(threads))

    @torch.inference_mode()
    def do_turn(question: dict[str, Any]) -> dict[str, Any]:
        shape = Shape.of(question["shape"])
        if refused := system.why_not(shape):
            return {"refused": refused}
        buffers = Buffers(int(file), shape)
        # The ends of last pages are hidden by all systems, and by vLLM only as long as they hold numbers.
        buffers.pool.zero_()
        build, attend = system.prepare(shape, buffers)
        build()
        warm_up, output = timed(attend)
        buffers.output.copy_(output)
        calls = CALLS if warm_up <= SLOW_SECONDS else 1
        builds = [timed(build)[0] for _ in range(calls)]
        return {"seconds": [timed(attend)[0] for _ in range(calls)], "metadata_seconds": builds}

    return do_turn
