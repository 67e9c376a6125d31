"""A format of keys and values: 16 bits an element. It is planned with, so this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from kvframe.contract import KVFormat, Slots, StateTensor

if TYPE_CHECKING:
    import torch

    from kvframe.contract import KVCache


@attrs.frozen(kw_only=True)
class FrozenFormat(KVFormat):
    """Keys and values in bfloat16, for any dtype of attention."""

    name: ClassVar[str] = "frozen_format"
    rounding: ClassVar[float] = 2**-8

    def state_tensors(
        self, block_size: int, num_kv_heads: int, head_size: int, head_size_v: int, dtype: str
    ) -> Mapping[str, StateTensor]:
        """Return what a block of one layer stores; a page takes exactly these bytes."""
        sizes = {"k": head_size, "v": head_size_v}
        return {name: StateTensor((block_size, num_kv_heads, size), "bfloat16") for name, size in sizes.items()}

    def write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        """Round new tokens, and store them at their slots."""
        for name, tokens in (("k", key), ("v", value)):
            kv_cache[name].index_put_(slots.indices, tokens.to(kv_cache[name].dtype))

    def read(self, kv_cache: KVCache, block_ids: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """Copy whole pages, in the dtype of ``out``."""
        for name in ("k", "v"):
            out[name].copy_(kv_cache[name].index_select(0, block_ids))
