"""Full attention: every past token stays live. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvframe.contract.specs import AttentionMask, AttentionSpec, TokenRange


@attrs.frozen(kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Keys and values of every past token: the live range at ``n`` is ``[0, n)``."""

    kind: ClassVar[str] = "full_attention"

    @classmethod
    def over(cls, spec: AttentionSpec) -> FullAttentionSpec:
        """Return full attention over the keys and values of another type: what its ``retain_all`` returns."""
        return cls(**{field.name: getattr(spec, field.name) for field in attrs.fields(AttentionSpec)})

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return ``[0, n)``, as one range."""
        return ((0, n),) if n else ()

    @property
    def mask(self) -> AttentionMask:
        """A plain causal mask."""
        return AttentionMask()

    def num_resident_blocks(self, n: int, num_new_tokens: int) -> int:
        """Return the blocks of ``n + num_new_tokens`` tokens: no block is released while the request runs."""
        return -(-(n + num_new_tokens) // self.block_size)

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return the blocks of the whole request, which holds the most blocks at its end."""
        return -(-num_tokens // self.block_size)
