"""Tiny models on disk, the tokens that transformers generates with them, and engines that serve them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from kvframe_engine.requests.request import SamplingParams
from kvframe_engine.running.model_runner import SkipPolicy
from kvframe_transformers.testing import save_tiny

from kvframe import Engine, Registry, Setup, Stack, load_plugins
from kvframe.contract.errors import PlanError
from kvframe.contract.model import LoadedModel
from kvframe.planning.plan import plan_cache
from kvframe.planning.recognise import find_adapter
from tests.stacks import tables_of
from tests.support.engines import held_pages as held_pages

NUM_NEW_TOKENS = 10
GREEDY = SamplingParams(max_new_tokens=NUM_NEW_TOKENS)


def ids(start: int, count: int) -> list[int]:
    """Return ``count`` pseudo-random token ids; another ``start`` gives others."""
    return [(start * 31 + index * index * 7 + index * 13) % 128 for index in range(count)]


# Shorter and longer than every window of the tiny models (8) and than every block size of the tests (17); the last
# four begin with the same 36 tokens, two of them with 55.
SHARED = ids(3, 36)
PROMPTS = (
    ids(1, 1),
    ids(2, 9),
    ids(4, 17),
    ids(5, 64),
    [*SHARED, *ids(6, 3)],
    [*SHARED, *ids(7, 19)],
    [*SHARED, *ids(7, 19), *ids(8, 5)],
    SHARED,
)


@attrs.frozen
class TinyModel:
    """A loaded checkpoint that engines can be made for, one after the other."""

    path: Path
    loaded: LoadedModel
    registry: Registry
    dtype: str = "float32"
    device: str = "cpu"

    @classmethod
    def save(cls, path: Path, family: str, **overrides: Any) -> TinyModel:
        """Save and load a tiny random model."""
        save_tiny(path, family, **overrides)
        registry = load_plugins().registry
        return cls(path, find_adapter(path, registry).load(path, device="cpu", dtype="float32"), registry)

    def in_dtype(self, dtype: str) -> TinyModel:
        """Return the model in another dtype, as is its cache."""
        loaded = find_adapter(self.path, self.registry).load(self.path, device=self.device, dtype=dtype)
        return attrs.evolve(self, loaded=loaded, dtype=dtype)

    def on(self, device: str) -> TinyModel:
        """Return the model on a device, as are its engines."""
        return attrs.evolve(self, device=device).in_dtype(self.dtype)

    def engine(self, *, poison_freed: bool = True, skip_policy: SkipPolicy | None = None, **options: Any) -> Engine:
        """Return an engine; each of ``options`` is put into the stack's table that has its key."""
        stack = make_stack(**options)
        stack = attrs.evolve(stack, model=attrs.evolve(stack.model, dtype=self.dtype, device=self.device))
        return Engine(
            self.loaded,
            Setup.of(self.loaded.description, stack, self.registry),
            poison_freed=poison_freed,
            skip_policy=skip_policy,
        )

    def tight_memory(self, num_tokens: int, input_lens: Mapping[str, int] | None = None, **options: Any) -> int:
        """Return the bytes for one request of ``num_tokens`` tokens and inputs of that length, and hardly more."""
        stack = make_stack(**options)
        grouping = Setup.of(self.loaded.description, stack, self.registry, dtype=self.dtype).grouping

        def is_enough(num_pages: int) -> bool:
            try:
                plan = plan_cache(
                    grouping,
                    memory_bytes=4096 * num_pages,
                    max_model_len=stack.limits.max_model_len or self.loaded.description.max_model_len,
                    max_num_batched_tokens=stack.limits.max_num_batched_tokens,
                    max_input_lens=self.loaded.description.max_input_lens,
                )
            except PlanError:
                return False
            return plan.fits(num_tokens, input_lens)

        assert is_enough(1024)
        return 4096 * bisect_left(range(1024), True, key=is_enough)

    def reference(self, prompt: Sequence[int], num_new_tokens: int = NUM_NEW_TOKENS) -> tuple[int, ...]:
        """Return the tokens that transformers generates after a prompt; the model must not be attached."""
        model: Any = self.loaded
        with torch.inference_mode():
            generated = model.model.generate(torch.tensor([prompt]), max_new_tokens=num_new_tokens, do_sample=False)
        return tuple(generated[0, len(prompt) :].tolist())


def make_stack(**options: Any) -> Stack:
    """Return a stack; each option is put into the table that has its key.

    ``backend`` and ``wrappers`` are for every layer, ``backends`` gives the backend of each kind of layer, ``rules`` a
    whole rule, and ``states`` are options of the layers that keep a state.
    """
    # With little memory, prompts begin with blocks for their first chunk, so that more requests are preempted.
    defaults = {"memory": "4MiB", "self_check": False, "reserve_prompts": False}
    rules: list[dict[str, Any]] = [{"layers": "*", "backend": options.pop("backend", "auto")}]
    if "wrappers" in options:
        rules[0]["wrappers"] = options.pop("wrappers")
    for kind, backend in options.pop("backends", {}).items():
        rules.append({"kind": kind, "backend": backend})
    for kind, rule in options.pop("rules", {}).items():
        rules.append({"kind": kind, **rule})
    if "states" in options:
        rules.append({"kind": "mamba", "spec": options.pop("states"), "optional": True})
    return Stack.from_mapping({**tables_of(**{**defaults, **options}), "rules": rules})


Tokens = list[tuple[int, ...]]
"""The generated tokens of each of ``PROMPTS``."""


def served(engine: Engine) -> Tokens:
    """Serve the prompts to their ends, and check that no block is held at the end."""
    outputs = engine.generate(PROMPTS, GREEDY)
    assert {"length"} == {output.finish_reason for output in outputs}
    assert 0 == held_pages(engine)
    return [output.token_ids for output in outputs]
