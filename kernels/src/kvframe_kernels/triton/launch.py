"""A kernel call with all its arguments, which can be run, or compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of a kernel.

    Attributes:
        kernel: The function, decorated with ``triton.jit``.
        grid: Programs along each of up to three axes.
        arguments: All its arguments by name, including those that are constant at compile time.
        num_warps: Warps of a program.
        num_stages: The number of iterations of a loop whose loads are in flight.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def run(self) -> None:
        """Enqueue the call on the current stream."""
        self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)
