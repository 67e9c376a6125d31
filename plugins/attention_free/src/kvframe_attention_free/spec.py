"""Encoder-only attention: every token sees its whole request, and nothing outlives the step."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvframe.contract import AttentionMask, AttentionSpec, TokenRange


@attrs.frozen(kw_only=True)
class EncoderOnlySpec(AttentionSpec):
    """Keys and values that only the step that computes them reads: the live range is empty at every ``n``.

    A layer of this kind is in no cache group. Its requests are computed whole, in one step, since a token sees those
    that come later too (BERT, arXiv 1810.04805).
    """

    kind: ClassVar[str] = "encoder_only"
    keeps_past: ClassVar[bool] = False

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return no range: nothing of the past is needed."""
        return ()

    @property
    def mask(self) -> AttentionMask:
        """Every token of the request."""
        return AttentionMask(causal=False)
