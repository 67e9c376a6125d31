"""Serves batches step by step, and takes the times of it. Of what an engine's environment has, it needs nothing."""

from __future__ import annotations

import dataclasses
import gc
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Self

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
        memory: Of the cache, in bytes.
        max_num_seqs: The most requests at a time.
        max_model_len: Tokens of the longest request, for an engine that has to know it.
        dtype: Of weights, keys and values.
        prefix_caching: Whether requests share blocks.
        temperature: Of sampling; 0 for none.
        max_drafts: The most draft tokens that are proposed, from the text before them.
        is_compiled: Whether the engine compiles the model, if it can.
        is_packed: Whether kvframe keeps packed copies of weights; vLLM always packs them.
    """

    path: str
    memory: int
    max_num_seqs: int
    max_model_len: int = 0
    dtype: str = "float32"
    prefix_caching: bool = False
    temperature: float = 0.0
    max_drafts: int = 0
    is_compiled: bool = False
    is_packed: bool = False


STEP_PARTS = ("step", "host", "attention")
"""A whole decode; of it what is not in the model; and what is in its attention layers."""


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
            of all threads; engines of this environment also say the most ``cache_bytes``, None if it cannot be known.
            If the engine shows its steps, also ``first_attention_seconds``, those in attention until each had a token;
            and for ``steps`` in which every request got its next token the seconds of each, by ``STEP_PARTS``.
        """

    def close(self) -> None:  # noqa: B027
        """Give the model back."""


class SteppedEngine(BatchEngine):
    """An engine that shows its steps."""

    def __init__(self) -> None:
        """Make the clocks: of the model with its attention, and of its attention layers."""
        self.model_clock, self.attention_clock = ModelClock(), ModelClock()

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
        steps: list[tuple[float, float, float]] = []
        first, first_attention = 0.0, 0.0
        start, cpu = time.perf_counter(), cpu_seconds()
        self.add(prompts, num_new_tokens)
        while self.has_unfinished():
            before = self._read()
            new = self.step()
            passed = [end - start for start, end in zip(before, self._read(), strict=True)]
            for index, ids in new:
                tokens[index] += ids
            if first:
                if len(new) == len(prompts):
                    steps.append((passed[0], passed[0] - passed[1], passed[2]))
                continue
            first_attention += passed[2]
            if all(tokens):
                first = time.perf_counter() - start
        return {
            "tokens": tokens,
            "seconds": time.perf_counter() - start,
            "first_seconds": first,
            "cpu_seconds": cpu_seconds() - cpu,
            "first_attention_seconds": first_attention,
            "steps": dict(zip(STEP_PARTS, zip(*steps[WARM_STEPS:], strict=True), strict=False)),
        }

    def _read(self) -> tuple[float, float, float]:
        return time.perf_counter(), self.model_clock.seconds, self.attention_clock.seconds


def cpu_seconds() -> float:
    """Return the processor time of this process, all its threads, and its processes that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Answers:
    """Answers to questions, with at most one model loaded in between."""

    def __init__(self, make: Callable[[Setting], BatchEngine]) -> None:
        """Start with no model.

        Args:
            make: Loads one.
        """
        self._make = make
        self._engine: BatchEngine | None = None

    @classmethod
    def of(cls, make: Callable[[Setting], BatchEngine], package: str) -> tuple[dict[str, str], Self]:
        """Return the versions of an engine's package and of torch, and what answers."""
        return {name: version(name) for name in (package, "torch")}, cls(make)

    def __call__(self, question: dict[str, Any]) -> Any:
        """Load a model instead of the last one, or serve a batch."""
        if "setting" in question:
            if self._engine is not None:
                self._engine.close()
            self._engine = None
            gc.collect()
            self._engine = self._make(Setting(**question["setting"]))
            return None
        assert self._engine is not None
        return self._engine.serve(**question)
