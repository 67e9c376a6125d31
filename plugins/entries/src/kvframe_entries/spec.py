"""The specs of entries: a few vectors for each token, or for each group of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from kvframe.contract import KVCacheSpec, SpecError, StateTensor, TokenRange, known_dtype, positive_int, whole_number

Tensors = tuple[tuple[str, tuple[int, ...]], ...]


def _as_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[1], list | tuple) for pair in value
    ):
        return value
    return tuple((name, tuple(shape)) for name, shape in value)


def _is_tensors(instance: Any, attribute: attrs.Attribute[Tensors], value: Any) -> None:
    if not isinstance(value, tuple) or not value or not all(_is_tensor(pair) for pair in value):
        raise SpecError(
            f"{type(instance).__name__}.{attribute.name} must give the shape of each tensor by its name, such as "
            f'{{"key": [128]}}, not {value!r}'
        )


def _is_tensor(pair: Any) -> bool:
    if not isinstance(pair, tuple) or not isinstance(pair[0], str) or not isinstance(pair[1], tuple):
        return False
    return all(type(size) is int and size > 0 for size in pair[1])


@attrs.frozen(kw_only=True)
class TokenEntriesSpec(KVCacheSpec):
    """Vectors of every past token, or of every ``tokens_per_entry`` past tokens: the live range at ``n`` is ``[0, n)``.

    Attributes:
        tensors: The shape of each vector, by its name (``{"key": (128,)}``).
        tokens_per_entry: Tokens for which there is one entry. The block size becomes a multiple of it.
        model_dtype: The dtype of the vectors, by torch's name: the model's.
    """

    kind: ClassVar[str] = "token_entries"
    layout_fields: ClassVar[frozenset[str]] = frozenset({"tensors", "tokens_per_entry", "model_dtype"})

    tensors: Tensors = attrs.field(converter=_as_tensors, validator=_is_tensors)
    tokens_per_entry: int = attrs.field(default=1, validator=whole_number(1))
    model_dtype: str = attrs.field(default="float32", validator=known_dtype)

    def __attrs_post_init__(self) -> None:
        """Make a block hold whole entries."""
        object.__setattr__(self, "block_size", math.lcm(self.block_size, self.tokens_per_entry))

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return ``[0, n)``, as one range."""
        return ((0, n),) if n else ()

    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Return each tensor as ``[block_size // tokens_per_entry, *shape]``."""
        num_entries = self.block_size // self.tokens_per_entry
        return {name: StateTensor((num_entries, *shape), self.model_dtype) for name, shape in self.tensors}

    def num_resident_blocks(self, n: int, num_new_tokens: int) -> int:
        """Return the blocks of ``n + num_new_tokens`` tokens, because none is freed before the end."""
        return -(-(n + num_new_tokens) // self.block_size)

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return the blocks of the whole request, which holds the most blocks at its end."""
        return -(-num_tokens // self.block_size)


@attrs.frozen(kw_only=True)
class UnfinishedGroupSpec(KVCacheSpec):
    """Vectors of the tokens of the last, unfinished group of ``group`` tokens, and of some tokens before it.

    From these an entry is made when the group is complete. Its tokens are then no longer needed.

    Attributes:
        group: Tokens of a group.
        overlap: Tokens before the group that its entry also depends on.
        tensors: As in ``TokenEntriesSpec``.
        model_dtype: As in ``TokenEntriesSpec``.
    """

    kind: ClassVar[str] = "unfinished_group"
    layout_fields: ClassVar[frozenset[str]] = frozenset({"tensors", "model_dtype"})

    group: int = positive_int
    overlap: int = attrs.field(default=0, validator=whole_number(0))
    tensors: Tensors = attrs.field(converter=_as_tensors, validator=_is_tensors)
    model_dtype: str = attrs.field(default="float32", validator=known_dtype)

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the tokens of the unfinished group, and the ``overlap`` tokens before it."""
        start = max(0, n - n % self.group - self.overlap)
        return ((start, n),) if start < n else ()

    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Return each tensor as ``[block_size, *shape]``."""
        return {name: StateTensor((self.block_size, *shape), self.model_dtype) for name, shape in self.tensors}
