"""Sliding-window attention: the last ``window`` tokens are live, and sink tokens at the start."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvframe import FullAttentionSpec
from kvframe.contract import AttentionMask, AttentionSpec, TokenRange, positive_int, whole_number


@attrs.frozen(kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Keys and values of a moving window of tokens, and of sink tokens that stay.

    The live range at ``n`` is ``[max(0, n - window + 1), n)`` and ``[0, num_sink_tokens)``. Sink tokens are those of
    StreamingLLM (arXiv 2309.17453).

    Attributes:
        window: Tokens that a query sees, including its own.
        num_sink_tokens: Tokens at the start that every query sees in addition.
    """

    kind: ClassVar[str] = "sliding_window"

    window: int = positive_int
    num_sink_tokens: int = attrs.field(default=0, validator=whole_number(0))

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the sinks and the window before ``n``; one range if they touch."""
        start = max(0, n - self.window + 1)
        if self.num_sink_tokens >= start:
            return ((0, n),) if n else ()
        ranges = ((0, self.num_sink_tokens), (start, n))
        return tuple(item for item in ranges if item[0] < item[1])

    @property
    def mask(self) -> AttentionMask:
        """A causal mask with this window and these sinks."""
        return AttentionMask(window=self.window, num_sink_tokens=self.num_sink_tokens)

    def retain_all(self) -> FullAttentionSpec:
        """Return full attention over the same keys and values."""
        return FullAttentionSpec.over(self)

    def num_resident_blocks(self, n: int, num_new_tokens: int) -> int:
        """Return the blocks from the window's first to the last new one, and the sinks' before those."""
        first_live = max(0, n - self.window + 1) // self.block_size
        sink_blocks = -(-self.num_sink_tokens // self.block_size)
        last = -(-(n + num_new_tokens) // self.block_size)
        return last - first_live + min(sink_blocks, first_live)

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return the peak, from the two steps that can reach it.

        Once the window has left the sinks, the number of held blocks repeats with a period of one block. It is largest
        when the window starts at a block's last token; before, it only grows. A last step that is shortened by the end
        of the request holds no more than the last full step.
        """
        if num_tokens < 1:
            return 0
        last_full_step = max(0, num_tokens - max_new_tokens)
        widest = last_full_step - (last_full_step - self.window + 2) % self.block_size
        return max(
            self.num_resident_blocks(n, min(max_new_tokens, num_tokens - n)) for n in (max(0, widest), last_full_step)
        )
