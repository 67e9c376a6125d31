"""One captured graph: recorded once, and replayed on the same tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from kvframe.contract.errors import KVFrameError

Output = tuple[torch.Tensor, ...]
Run = Callable[[], Output]


class CaptureError(KVFrameError):
    """The device could not capture a step."""


class StepGraph(ABC):
    """One step's work on the device. Its inputs are the tensors of the capture, and it writes to the same outputs."""

    @abstractmethod
    def capture(self, run: Run) -> Output:
        """Record the step.

        Args:
            run: Computes the step. It is called several times, so it may write to the cache several times.

        Returns:
            The output tensors, to which every replay writes; their values are those of a step only after a replay.

        Raises:
            CaptureError: The step contains an operation that cannot be recorded.
        """

    @abstractmethod
    def replay(self) -> None:
        """Run the step again."""


class CalledGraph(StepGraph):
    """Stands in for a graph on devices without graphs: a replay calls the recorded function, on the same tensors."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._output: Output = ()

    def capture(self, run: Run) -> Output:
        """Run the step, and keep the function."""
        self._run = run
        self._output = tuple(tensor.clone() for tensor in run())
        return self._output

    def replay(self) -> None:
        """Call the function again."""
        assert self._run is not None
        for output, new_output in zip(self._output, self._run(), strict=True):
            output.copy_(new_output)


class CudaGraph(StepGraph):
    """A CUDA graph."""

    def __init__(self, pool: Any) -> None:
        """Take the memory pool that the graphs of an engine share: they never run at the same time."""
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Run) -> Output:
        """Run the step on a stream of its own, so that libraries set themselves up, and capture it there."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        try:
            with torch.cuda.graph(self._graph, pool=self._pool, stream=stream):
                output = run()
        except RuntimeError as error:
            raise CaptureError(f"the step cannot be captured: {str(error).strip().splitlines()[0]}") from error
        return output

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


def graph_factory(device: torch.device) -> Callable[[], StepGraph]:
    """Return a function that creates a device's graphs."""
    if device.type != "cuda":
        return CalledGraph
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)
