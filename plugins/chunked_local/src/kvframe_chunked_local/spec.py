"""Chunked local attention: only the tokens of the current chunk are live. Imports no torch."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs

from kvframe import FullAttentionSpec
from kvframe.contract import AttentionMask, AttentionSpec, TokenRange, positive_int


@attrs.frozen(kw_only=True)
class ChunkedLocalSpec(AttentionSpec):
    """Keys and values of the current chunk of tokens; a chunk is no longer needed when the next one begins.

    The live range at ``n`` is ``[n - n % chunk, n)``: the local layers of Llama 4's iRoPE (Meta, 2025).

    Attributes:
        chunk: Tokens of a chunk. The first begins at position 0.
    """

    kind: ClassVar[str] = "chunked_local"
    default_wrappers: ClassVar[tuple[str, ...]] = ("chunked_local",)

    chunk: int = positive_int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the chunk's tokens before ``n``; no range at the start of a chunk."""
        return ((n - n % self.chunk, n),) if n % self.chunk else ()

    @property
    def mask(self) -> AttentionMask:
        """A causal mask with these chunks."""
        return AttentionMask(chunk=self.chunk)

    def retain_all(self) -> FullAttentionSpec:
        """Return full attention over the same keys and values."""
        return FullAttentionSpec.over(self)

    def num_resident_blocks(self, n: int, num_new_tokens: int) -> int:
        """Return the blocks from the chunk's first to the last new one."""
        return -(-(n + num_new_tokens) // self.block_size) - (n - n % self.chunk) // self.block_size

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return the peak, from the few chunks that can reach it.

        Within a chunk, the step that begins at its last token holds the most blocks. Chunks whose largest step is not
        limited by the request's end differ only in their offset in a block, which repeats. Of the other chunks, the
        first holds the most blocks.
        """
        if num_tokens < 1:
            return 0
        chunk = self.chunk
        period = self.block_size // math.gcd(chunk, self.block_size)
        num_full = max(0, (num_tokens - max_new_tokens + 1) // chunk)
        ends = (min((index + 1) * chunk, num_tokens) - 1 for index in range(max(0, num_full - period), num_full + 1))
        return max(self.num_resident_blocks(n, min(max_new_tokens, num_tokens - n)) for n in ends)
