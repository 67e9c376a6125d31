"""What engines are measured on: a model, and prompts drawn at random."""

from __future__ import annotations

import random

import attrs

SEED = 11


@attrs.frozen(kw_only=True)
class Workload:
    """A batch, and the model that serves it.

    Attributes:
        name: For the command line and the results.
        model: The model's name, in ``harness/models.py``.
        memory: Of kvframe's cache.
        num_prompts: Requests in the batch.
        shortest: Tokens of the shortest prompt, without the prefix.
        longest: Tokens of the longest prompt, without the prefix; those of the shortest unless given.
        prefix: Tokens that all prompts of a batch begin with.
        num_new_tokens: Generated for each prompt, end tokens ignored.
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
        """Return the batch of one repeat. No two repeats share a token sequence, so no cache is warm from the last."""
        source = random.Random(f"{SEED}-{self.name}-{repeat}")
        prefix = [source.randrange(3, vocab_size) for _ in range(self.prefix)]
        lengths = [source.randint(self.shortest, self.longest) for _ in range(self.num_prompts)]
        return [prefix + [source.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
