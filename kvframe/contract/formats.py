"""KV formats: which tensors a block consists of, and how keys and values are stored in them.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from kvframe.contract.errors import UnknownNameError
from kvframe.contract.growth import Growing

if TYPE_CHECKING:
    import torch

    from kvframe.contract.slots import Slots

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element of every dtype a state tensor may have, by torch's name."""

STATE_ALIGNMENT_BYTES = 16
"""The part of a page that belongs to a layer starts at a multiple of this, the width of a vector load."""


def align_up(num: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``num``."""
    return -(-num // multiple) * multiple


def known_dtype(instance: Any, attribute: attrs.Attribute[str], value: str) -> None:
    """Check, as an attrs validator, that there is such a dtype."""
    if value not in ITEM_BYTES:
        raise UnknownNameError("dtype", str(value), ITEM_BYTES)


@attrs.frozen
class StateTensor:
    """One tensor of one block of one layer.

    Attributes:
        shape: Its shape, without the leading block dimension.
        dtype: Its dtype, by torch's name (``"bfloat16"``).
    """

    shape: tuple[int, ...]
    dtype: str = attrs.field(validator=known_dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, without alignment."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@attrs.frozen(kw_only=True)
class KVFormat(Growing, ABC):
    """How a page stores keys and values: the base of every format.

    A format is a frozen value; its fields are parameters, such as scales. What it stores is read back in the dtype that
    the layer's spec gives, in which attention computes.
    """

    name: ClassVar[str]
    """The registered name (``"int8_token_head"``). A backend that reads the format itself declares this name."""
    rounding: ClassVar[float] = 0.0
    """The distance of neighbouring stored values, relative to the largest value of their scale, like
    ``torch.finfo(…).eps`` of a dtype; 0 if values are rounded to the spec's dtype only."""

    @abstractmethod
    def state_tensors(
        self, block_size: int, num_kv_heads: int, head_size: int, head_size_v: int, dtype: str
    ) -> Mapping[str, StateTensor]:
        """Return the tensors of one block of one layer, by name, in the order they lie in a page.

        Raises ``SpecError`` if keys or values of such a size cannot be stored, or not of ``dtype``, in which attention
        computes.
        """

    @abstractmethod
    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Mapping[str, torch.Tensor],
        slots: Slots,
    ) -> None:
        """Store tokens. Called in a step, once for each layer that keeps a cache; waits for nothing on the device.

        Args:
            key: ``[num_tokens, num_kv_heads, head_size], device``.
            value: ``[num_tokens, num_kv_heads, head_size_v], device``.
            kv_cache: The layer's state tensors; written to.
            slots: Where each token is stored, ``[num_tokens]``; one with a negative slot is not stored.
        """

    @abstractmethod
    def read(
        self, kv_cache: Mapping[str, torch.Tensor], block_ids: torch.Tensor, out: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy whole pages, as keys and values that any backend reads.

        Args:
            kv_cache: The layer's state tensors; not written to.
            block_ids: ``[num_pages], int32 or int64, device``: the pages.
            out: ``k: [num_pages, block_size, num_kv_heads, head_size]`` and ``v``; written to, in their dtype.
        """


@attrs.frozen(kw_only=True)
class PlainFormat(KVFormat):
    """Keys and values as they are, in the spec's dtype."""

    name: ClassVar[str] = "plain"

    def state_tensors(
        self, block_size: int, num_kv_heads: int, head_size: int, head_size_v: int, dtype: str
    ) -> Mapping[str, StateTensor]:
        """Return ``k: [block_size, num_kv_heads, head_size]`` and ``v: [block_size, num_kv_heads, head_size_v]``."""
        return {
            "k": StateTensor((block_size, num_kv_heads, head_size), dtype),
            "v": StateTensor((block_size, num_kv_heads, head_size_v), dtype),
        }

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Mapping[str, torch.Tensor],
        slots: Slots,
    ) -> None:
        """Store tokens, rounded to the cache's dtype."""
        kv_cache["k"].index_put_(slots.indices, key.to(kv_cache["k"].dtype))
        kv_cache["v"].index_put_(slots.indices, value.to(kv_cache["v"].dtype))

    def read(
        self, kv_cache: Mapping[str, torch.Tensor], block_ids: torch.Tensor, out: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy whole pages."""
        for name in ("k", "v"):
            out[name].copy_(kv_cache[name].index_select(0, block_ids))


PLAIN: KVFormat = PlainFormat()
"""The format of layers that name no other."""
