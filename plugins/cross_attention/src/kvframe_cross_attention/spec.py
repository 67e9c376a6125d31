"""Cross attention: every query sees all of the encoder's tokens, at any position."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvframe.contract import ENCODER, AttentionMask, AttentionSpec, TokenRange


@attrs.frozen(kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of an encoder's tokens, computed once and then only read.

    Positions are those of the encoder's sequence, which is complete before the first token of the request is computed.
    All of it stays live for as long as the request runs.
    """

    kind: ClassVar[str] = "cross_attention"
    sequence: ClassVar[str] = ENCODER

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return every token of the encoder's sequence before ``n``."""
        return ((0, n),) if n else ()

    @property
    def mask(self) -> AttentionMask:
        """A mask under which a query sees every token that is stored for its request."""
        return AttentionMask(causal=False)
