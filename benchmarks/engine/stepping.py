"""Serves a batch step by step, and takes the times of it. Of what an engine's environment has, it needs nothing."""

from __future__ import annotations

import dataclasses
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

Prompts = Sequence[Sequence[int]]
Served = dict[str, Any]
MAX_NUM_BATCHED_TOKENS = 2048
WARM_STEPS = 2
"""Decodes of all requests that are not counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What an engine loads.

    Attributes:
        path: The checkpoint's folder.
        dtype: Of weights, keys and values.
        memory: Of the cache, in bytes.
        max_num_seqs: The most requests at a time.
        is_compiled: Whether the engine compiles the model, if it can.
    """

    path: str
    dtype: str
    memory: int
    max_num_seqs: int
    is_compiled: bool = False


class ModelClock:
    """Adds up the seconds that a model's functions take.

    Attributes:
        seconds: So far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, model: Any, *names: str) -> None:
        """Count the time of these functions of a model, which do not call each other."""
        for name in names:
            setattr(model, name, self._timed(getattr(model, name)))

    def _timed(self, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **options)
            self.seconds += time.perf_counter() - start
            return result

        return call


class BatchEngine(ABC):
    """A model in an engine that runs in the process of its caller."""

    @abstractmethod
    def serve(self, prompts: Prompts, num_new_tokens: int) -> Served:
        """Generate greedily for a batch, every request to the end.

        Returns:
            ``tokens``; ``seconds`` of the whole and ``first_seconds`` until each request had a token; ``cpu_seconds``
            of all threads; and for each step in which every request got its next token ``step_seconds``, and
            ``host_seconds`` without the model's functions, both empty if the engine does not show its steps.
        """

    def close(self) -> None:  # noqa: B027
        """Give the model back."""


class SteppedEngine(BatchEngine):
    """An engine that shows its steps."""

    clock: ModelClock

    @abstractmethod
    def add(self, prompts: Prompts, num_new_tokens: int) -> None:
        """Add a request for each prompt, which generates greedily and never ends early."""

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Return whether requests are left."""

    @abstractmethod
    def step(self) -> list[tuple[int, list[int]]]:
        """Do a step; return the number of each prompt that got tokens, and these tokens."""

    def serve(self, prompts: Prompts, num_new_tokens: int) -> Served:
        """Serve a batch."""
        tokens: list[list[int]] = [[] for _ in prompts]
        steps: list[tuple[float, float]] = []
        first = 0.0
        start, cpu = time.perf_counter(), cpu_seconds()
        self.add(prompts, num_new_tokens)
        while self.has_unfinished():
            began, in_model = time.perf_counter(), self.clock.seconds
            new = self.step()
            ended = time.perf_counter()
            for index, ids in new:
                tokens[index] += ids
            if first:
                if len(new) == len(prompts):
                    steps.append((ended - began, ended - began - self.clock.seconds + in_model))
            elif all(tokens):
                first = ended - start
        return {
            "tokens": tokens,
            "seconds": time.perf_counter() - start,
            "first_seconds": first,
            "cpu_seconds": cpu_seconds() - cpu,
            "step_seconds": [whole for whole, _ in steps[WARM_STEPS:]],
            "host_seconds": [host for _, host in steps[WARM_STEPS:]],
        }


def cpu_seconds() -> float:
    """Return the processor time of this process, all its threads, and its processes that have ended."""
    return sum(os.times()[:4])
