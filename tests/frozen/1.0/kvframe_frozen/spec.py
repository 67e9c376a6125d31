"""An attention type: a query sees its own chunk of tokens. Replace ``live_ranges`` by your own."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvframe.contract import AttentionSpec, MaskFunction, TokenRange, positive_int


@attrs.frozen(kw_only=True)
class FrozenSpec(AttentionSpec):
    """Keys and values of the chunk that the next token lies in.

    Attributes:
        chunk: Tokens of a chunk.
    """

    kind: ClassVar[str] = "frozen_spec"

    chunk: int = positive_int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the past tokens that token ``n`` still needs; a token that left must not come back."""
        start = n - n % self.chunk
        return ((start, n),) if start < n else ()

    @property
    def mask_function(self) -> MaskFunction:
        """Return the same as a function of positions, for backends that compile it. May be left out."""
        chunk = self.chunk
        return lambda query, key: (key <= query) & (key // chunk == query // chunk)

    def num_resident_blocks(self, n: int, num_new_tokens: int) -> int:
        """Return the blocks from the chunk's first to the last new one, faster than it is derived. May be left out."""
        first = (n - n % self.chunk) // self.block_size
        return -(-(n + num_new_tokens) // self.block_size) - first
