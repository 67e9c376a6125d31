"""Serve batches step by step and time the parts of each step. Imports only Python's library, for vLLM's environment."""

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
"""The first decodes of all requests, which are not counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The checkpoint that an engine loads, and its options.

    Attributes:
        memory: The cache's bytes.
        max_model_len: Tokens of the longest request, for an engine that needs this number.
        temperature: The temperature of sampling; 0 for greedy tokens.
        max_drafts: The most draft tokens of a proposal, from the text before them unless there is a draft model; 0 for
            no drafts.
        draft_model: The draft model's folder; empty for none.
        is_compiled: Whether the engine compiles the model, if it can.
        is_packed: Whether kvframe keeps packed copies of weights; vLLM always packs them.
        is_skipping: Whether kvframe skips prompts in layers that only read other layers' caches.
        device: Where the model runs.
        max_num_batched_tokens: The most tokens of a step.
        graphs: Whether kvframe replays graphs of its steps; transformers decides for itself.
    """

    path: str
    memory: int
    max_num_seqs: int
    max_model_len: int = 0
    dtype: str = "float32"
    prefix_caching: bool = False
    temperature: float = 0.0
    max_drafts: int = 0
    draft_model: str = ""
    is_compiled: bool = False
    is_packed: bool = False
    is_skipping: bool = False
    device: str = "cpu"
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    graphs: bool = False


STEP_PARTS = ("step", "host", "attention")
"""A whole decode, its part outside of the model, and its part in the attention layers."""


class ModelClock:
    """Adds up the time of a model's functions in ``seconds``."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, model: Any, *names: str) -> None:
        """Count the time of these functions of a model. None of them may call another one."""
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
        """Generate greedily until every request of a batch has its tokens.

        Returns:
            ``tokens`` of each prompt; ``seconds`` of the batch; ``first_seconds`` until each request had a token, and
            ``waits`` for the first token of each prompt; ``cpu_seconds`` of all threads; ``cache_bytes``, the most
            bytes of the cache, where they are reported. An engine that shows its steps adds
            ``first_attention_seconds``, a part of ``first_seconds``, and ``steps``: by ``STEP_PARTS``, the seconds of
            each step in which every request got a token.
        """

    def close(self) -> None:  # noqa: B027
        """Release the model."""


class SteppedEngine(BatchEngine):
    """An engine that shows its steps."""

    def __init__(self) -> None:
        """Make two clocks: one for the whole model, and one for its attention layers alone."""
        self.model_clock, self.attention_clock = ModelClock(), ModelClock()

    @abstractmethod
    def add(self, prompts: Prompts, num_new_tokens: int) -> None:
        """Add a request for each prompt; it generates greedily and ignores end tokens."""

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Return whether a request has not ended."""

    @abstractmethod
    def step(self) -> list[tuple[int, list[int]]]:
        """Run a step; return the index of each prompt that got tokens, and these tokens."""

    def serve(self, prompts: Prompts, num_new_tokens: int) -> Served:
        """Serve a batch and time its steps."""
        tokens: list[list[int]] = [[] for _ in prompts]
        waits: dict[int, float] = {}
        steps: list[tuple[float, float, float]] = []
        first, first_attention = 0.0, 0.0
        start, cpu = time.perf_counter(), cpu_seconds()
        self.add(prompts, num_new_tokens)
        while self.has_unfinished():
            before = self._read()
            new = self.step()
            durations = [end - start for start, end in zip(before, self._read(), strict=True)]
            for index, ids in new:
                tokens[index] += ids
                waits.setdefault(index, time.perf_counter() - start)
            if first:
                if len(new) == len(prompts):
                    steps.append((durations[0], durations[0] - durations[1], durations[2]))
                continue
            first_attention += durations[2]
            if all(tokens):
                first = time.perf_counter() - start
        return {
            "tokens": tokens,
            "seconds": time.perf_counter() - start,
            "first_seconds": first,
            "waits": [waits[index] for index in sorted(waits)],
            "cpu_seconds": cpu_seconds() - cpu,
            "first_attention_seconds": first_attention,
            "steps": dict(zip(STEP_PARTS, zip(*steps[WARM_STEPS:], strict=True), strict=False)),
        }

    def _read(self) -> tuple[float, float, float]:
        return time.perf_counter(), self.model_clock.seconds, self.attention_clock.seconds


def cpu_seconds() -> float:
    """Return the processor time of this process with all threads, and of its child processes that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Answers:
    """Answers the questions of ``engine/serving.py`` about the systems of one process."""

    def __init__(self, make: Callable[[Sequence[Setting]], Sequence[BatchEngine]]) -> None:
        """Start without a model; ``make`` loads one and returns an engine for each setting."""
        self._make = make
        self._engines: dict[str, BatchEngine] = {}

    @classmethod
    def of(
        cls, make: Callable[[Sequence[Setting]], Sequence[BatchEngine]], package: str
    ) -> tuple[dict[str, str], Self]:
        """Return the versions of an engine's package and of torch, and the answering object."""
        return {name: version(name) for name in (package, "torch")}, cls(make)

    def __call__(self, question: dict[str, Any]) -> Any:
        """Make an engine for each named system and release the last ones, or let one of them serve a batch."""
        if "settings" in question:
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()
            gc.collect()
            settings: dict[str, dict[str, Any]] = question["settings"]
            engines = self._make([Setting(**options) for options in settings.values()])
            self._engines = dict(zip(settings, engines, strict=True))
            return None
        return self._engines[question.pop("system")].serve(**question)
