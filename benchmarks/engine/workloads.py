"""Describe the batches that engines are measured on: a model, and prompts that are drawn at random."""

from __future__ import annotations

import random
from typing import Any

import attrs

from kvframe import Stack

SEED = 11


@attrs.frozen(kw_only=True)
class Workload:
    """A batch, and the model that serves it.

    Attributes:
        model: The model's name in ``harness/models.py``.
        shortest: Tokens of the shortest prompt, without the prefix.
        longest: Tokens of the longest prompt, without the prefix; the default is ``shortest``.
        prefix: Tokens at the beginning that all prompts of a batch have in common.
        num_new_tokens: Tokens generated for each prompt; end tokens are ignored.
    """

    name: str
    model: str
    memory: str
    num_prompts: int = 1
    shortest: int
    longest: int = attrs.field(default=attrs.Factory(lambda self: self.shortest, takes_self=True))
    prefix: int = 0
    num_new_tokens: int = 1

    def prompts(self, repeat: int, vocab_size: int) -> list[list[int]]:
        """Return the prompts of one round. Rounds have different prompts, so no cache holds them from the last one."""
        source = random.Random(f"{SEED}-{self.name}-{repeat}")
        prefix = [source.randrange(3, vocab_size) for _ in range(self.prefix)]
        lengths = [source.randint(self.shortest, self.longest) for _ in range(self.num_prompts)]
        return [prefix + [source.randrange(3, vocab_size) for _ in range(length)] for length in lengths]

    def stack(self, backend: str = "auto", **tables: Any) -> Stack:
        """Return the stack of an engine without prefix caching; ``tables`` are further tables of the stack."""
        cache = {"memory": self.memory, "prefix_caching": False}
        return Stack.from_mapping({"cache": cache, "rules": [{"layers": "*", "backend": backend}], **tables})
