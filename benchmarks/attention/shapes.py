"""Describe one layer's attention in one step, and count what it reads and computes. Torch is the only import."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

SEED = 11
BFLOAT16_BYTES, FLOAT32_BYTES = 2, 4
Requests = tuple[tuple[int, int], ...]
"""For each request, the number of tokens computed before and the number of new ones."""


def decodes(batch: int, context: int) -> Requests:
    """Return requests of one new token each."""
    return ((context - 1, 1),) * batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer's step.

    Attributes:
        name: The name on the command line and in the record.
        kind: ``decode``, ``prefill`` or another kind; results of one kind are shown together.
        window: The number of tokens that a query sees, its own included; None for all earlier ones.
        chunk: The tokens of a chunk, for the wrapper ``chunked_local``; None for no chunks.
        skips: Whether only generating tokens are computed, by the wrapper ``decode_only`` over a shared cache.
        format: The registered name of the format of keys and values.
    """

    name: str
    kind: str
    requests: Requests
    dtype: str = "bfloat16"
    block_size: int = 16
    window: int | None = None
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    chunk: int | None = None
    skips: bool = False
    format: str = "plain"

    @classmethod
    def of(cls, values: dict[str, Any]) -> Shape:
        """Return a shape from its ``dataclasses.asdict``, which may have gone through JSON."""
        return cls(**{**values, "requests": tuple((computed, new) for computed, new in values["requests"])})

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each request after the step."""
        return [computed + new for computed, new in self.requests]

    def positions(self, computed: int, new: int) -> torch.Tensor:
        """Return the positions of a request's computed queries."""
        return torch.arange(computed, computed + new)[-1 if self.skips else 0 :]

    def num_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """Return how many keys the queries at these positions see."""
        if self.chunk is not None:
            return positions % self.chunk + 1
        return positions + 1 if self.window is None else (positions + 1).clamp(max=self.window)

    def first_seen(self, computed: int, new: int) -> int:
        """Return the first token of a request that some query sees."""
        first = self.positions(computed, new)[:1]
        return int(first + 1 - self.num_seen(first))

    @property
    def num_queries(self) -> int:
        """The number of computed queries."""
        return sum(len(self.positions(*request)) for request in self.requests)

    @property
    def num_keys(self) -> int:
        """The number of keys that at least one query sees, over all requests."""
        return sum(computed + new - self.first_seen(computed, new) for computed, new in self.requests)

    @property
    def num_pairs(self) -> int:
        """The number of pairs of a query and a key that it sees."""
        return sum(int(self.num_seen(self.positions(*request)).sum()) for request in self.requests)

    def kv_bytes(self) -> int:
        """Return the least bytes to be read: the keys and values that at least one query sees; a code has one byte."""
        element = self.torch_dtype.itemsize if self.format == "plain" else 1
        return 2 * self.num_keys * self.num_kv_heads * self.head_size * element

    def num_bytes(self) -> int:
        """Return the least bytes that are moved, those of queries and outputs included."""
        return self.kv_bytes() + 2 * self.num_queries * self.num_heads * self.head_size * BFLOAT16_BYTES

    @property
    def num_flops(self) -> int:
        """Floating-point operations of both matrix products over the pairs of ``num_pairs``."""
        return 4 * self.num_pairs * self.num_heads * self.head_size
