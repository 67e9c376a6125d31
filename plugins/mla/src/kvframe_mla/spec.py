"""Multi-head latent attention: one latent vector and one rotated key part per token, for all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from kvframe.contract import (
    AttentionMask,
    KVCacheSpec,
    QuerySpec,
    SpecError,
    StateTensor,
    TokenRange,
    known_dtype,
    positive_int,
    whole_number,
)

KV_UP = "kv_up"
"""The name of the up-projection ``[num_heads, nope_size + head_size_v, latent_size]``. It turns a latent into a head's
key, and its value. ``nope_size`` is the query's head size without the rotated part, which comes last in queries and
keys."""


@attrs.frozen(kw_only=True)
class MLASpec(KVCacheSpec):
    """The latents of every past token: the live range at ``n`` is ``[0, n)`` (DeepSeek-V2, arXiv 2405.04434, 2.1).

    The layer's up-projection turns the latent into each head's key and value; a key then gets the rotated part, which
    all heads share. Latent and rotated part are stored side by side in one tensor. So absorbed attention has one key of
    ``latent_size + rope_size`` elements per token, whose first part is also its value, and reads a token once. FlashMLA
    reads this layout; kernels that take two tensors (FlashInfer's) take two views of it.

    Attributes:
        latent_size: Elements of the latent (``kv_lora_rank``).
        rope_size: Elements of the rotated part of a key (``qk_rope_head_dim``); 0 for keys without one.
        head_size_v: Elements of a head's value, after the up-projection (``v_head_dim``).
        dtype: Element type of the stored tensors, by torch's name.
    """

    kind: ClassVar[str] = "mla"
    layout_fields: ClassVar[frozenset[str]] = frozenset({"latent_size", "rope_size", "head_size_v", "dtype"})

    latent_size: int = positive_int
    rope_size: int = attrs.field(validator=whole_number(0))
    head_size_v: int = positive_int
    dtype: str = attrs.field(default="float32", validator=known_dtype)

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return ``[0, n)``, as one range."""
        return ((0, n),) if n else ()

    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Return ``latent: [block_size, latent_size + rope_size]``: each token's latent, then its rotated part."""
        return {"latent": StateTensor((self.block_size, self.latent_size + self.rope_size), self.dtype)}

    def check_query(self, query: QuerySpec) -> None:
        """Refuse queries without a part beside the rotated one: the up-projection makes keys for it."""
        if query.head_size <= self.rope_size:
            raise SpecError(
                f"a query has {query.head_size} elements, and must have more than the rotated part of a key, "
                f"{self.rope_size}"
            )
        if query.choice is not None and query.choice.num_choosers > 1:
            raise SpecError("latents are those of all heads, so there is one choice for each query")

    def parameters(self, query: QuerySpec) -> Mapping[str, tuple[int, ...]]:
        """Add the up-projection ``kv_up`` to the learned tensors."""
        nope_size = query.head_size - self.rope_size
        shape = query.num_heads, nope_size + self.head_size_v, self.latent_size
        return {**super().parameters(query), KV_UP: shape}

    @property
    def mask(self) -> AttentionMask:
        """A plain causal mask."""
        return AttentionMask()

    def num_resident_blocks(self, n: int, num_new_tokens: int) -> int:
        """Return the blocks of ``n + num_new_tokens`` tokens, because none is freed before the end."""
        return -(-(n + num_new_tokens) // self.block_size)

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return the blocks of the whole request: it holds most at its end."""
        return -(-num_tokens // self.block_size)
