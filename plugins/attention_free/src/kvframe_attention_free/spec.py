"""Encoder-only attention: tokens see later ones of their request too, and nothing outlives the step."""

from __future__ import annotations

from typing import ClassVar

import attrs
from attrs.validators import optional

from kvframe.contract import AttentionMask, AttentionSpec, SpecError, TokenRange, whole_number


@attrs.frozen(kw_only=True)
class EncoderOnlySpec(AttentionSpec):
    """Keys and values that are read only in the step that computes them: the live range is empty at every ``n``.

    A layer of this kind is in no cache group. A request is computed in one step, because each token also sees the
    tokens after it (BERT, arXiv 1810.04805), or those of a window around it (ModernBERT, arXiv 2412.13663).

    Attributes:
        window: How many tokens up to its own a query sees, its own included; None for the whole request.
        lookahead: How many later tokens a query sees if it has a window; None for the whole request.
    """

    kind: ClassVar[str] = "encoder_only"
    keeps_past: ClassVar[bool] = False

    window: int | None = attrs.field(default=None, validator=optional(whole_number(1)))
    lookahead: int | None = attrs.field(default=None, validator=optional(whole_number(0)))

    def __attrs_post_init__(self) -> None:
        """Refuse one size without the other."""
        if (self.window is None) != (self.lookahead is None):
            raise SpecError("an encoder_only layer has a window and a lookahead, or neither")

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return no range: no past token is needed."""
        return ()

    @property
    def mask(self) -> AttentionMask:
        """A mask under which a query sees every token of the request, or a window in both directions."""
        return AttentionMask(causal=False, window=self.window, lookahead=self.lookahead)
