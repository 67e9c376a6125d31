"""Encoder-only attention: every token sees its whole request, and nothing outlives the step."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvframe.contract import AttentionMask, AttentionSpec, TokenRange


@attrs.frozen(kw_only=True)
class EncoderOnlySpec(AttentionSpec):
    """Keys and values that are read only in the step that computes them: the live range is empty at every ``n``.

    A layer of this kind is in no cache group. A request is computed in one step, because each token also sees the
    tokens after it (BERT, arXiv 1810.04805).
    """

    kind: ClassVar[str] = "encoder_only"
    keeps_past: ClassVar[bool] = False

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return no range: no past token is needed."""
        return ()

    @property
    def mask(self) -> AttentionMask:
        """A mask under which a query sees every token of the request."""
        return AttentionMask(causal=False)
