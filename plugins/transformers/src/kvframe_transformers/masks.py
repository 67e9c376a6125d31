"""Finds which tokens a transformers mask function shows to a query, by calling it, not by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""transformers' ``mask_function(batch, head, query position, key position)``: True if the query sees the key."""

_MAX_POSITIONS = 1 << 18
"""The most key positions that are evaluated: a window longer than these 262,144 tokens counts as full attention."""


@attrs.frozen
class MaskKind:
    """A mask in the terms of cache specs.

    Attributes:
        kind: The registered name of the cache spec with this live range; None if there is none, or if tokens see later
            ones.
        options: The spec's options that the mask fixes (``{"window": 512}``).
        why: For an unknown mask, its description, as the end of a sentence.
        is_bidirectional: Whether tokens see later ones, as in a model that does not generate: all tokens, or those of
            the window of ``options``.
    """

    kind: str | None
    options: Mapping[str, int] = attrs.field(factory=dict)
    why: str = ""
    is_bidirectional: bool = False


def classify_mask(
    mask_function: MaskFunction, length: int, local_size: int | None = None, chunk_size: int | None = None
) -> MaskKind:
    """Return the cache spec whose live range is that of ``mask_function``.

    Args:
        mask_function: The function that the model passed to transformers' mask interface.
        length: The most tokens of a request; the mask is known up to here.
        local_size: The window or chunk that the model passed with the mask, if any: the positions around it are
            examined.
        chunk_size: The chunk size of the model's config, if any. A chunk mask counts padding in a tensor of the model,
            so it cannot be called without the model's data; it is recognised by this size in ``local_size``.
    """
    around = local_size or 0
    total = min(max(length, 4 * around + 4), _MAX_POSITIONS)
    starts: dict[int, int] = {}
    runs: dict[int, tuple[int, int]] = {}
    for query in _query_positions(total, around):
        visible = _visible(mask_function, query, total)
        if visible is None and local_size is not None and local_size == chunk_size:
            return MaskKind("chunked_local", {"chunk": local_size})
        if visible is None:
            return MaskKind(None, why="has a mask that depends on the model's inputs")
        first, stop, count = visible
        if count == stop - first and first <= query < stop:
            runs[query] = first, stop
        elif stop > query + 1:
            return MaskKind(None, why=f"{_LATER}, with gaps between them")
        if stop > query + 1:
            continue
        if query not in runs or stop != query + 1:
            return MaskKind(None, why=f"has a mask with gaps: position {query} sees {count} tokens of [0, {query}]")
        starts[query] = first
    if any(stop > query + 1 for query, (_, stop) in runs.items()):
        return _bidirectional(runs, total)
    if not any(starts.values()):
        return MaskKind("full_attention")
    last = max(starts)
    window = last + 1 - starts[last]
    if all(first == max(0, query + 1 - window) for query, first in starts.items()):
        return MaskKind("sliding_window", {"window": window})
    chunk = math.gcd(*starts.values())
    if all(first == query - query % chunk for query, first in starts.items()):
        return MaskKind("chunked_local", {"chunk": chunk})
    return MaskKind(None, why="has a mask that is neither full, nor a window, nor chunks")


def _bidirectional(runs: Mapping[int, tuple[int, int]], total: int) -> MaskKind:
    """Return the kind of a mask with later tokens, from the first token that queries see and the one after the last."""
    if all(run == (0, total) for run in runs.values()):
        return MaskKind(None, why=_LATER, is_bidirectional=True)
    window = max(query + 1 - first for query, (first, _) in runs.items())
    lookahead = max(stop - 1 - query for query, (_, stop) in runs.items())
    if all(run == (max(0, n + 1 - window), min(total, n + 1 + lookahead)) for n, run in runs.items()):
        why = f"{_LATER}, but not at all of them (a window in both directions)"
        return MaskKind(None, {"window": window, "lookahead": lookahead}, why, is_bidirectional=True)
    return MaskKind(None, why=f"{_LATER}, but not at all of them, and not in a window")


_LATER = "looks at tokens that come later (bidirectional attention)"


def sees_all(mask_function: MaskFunction, num_keys: int) -> bool:
    """Return whether every query sees every one of ``num_keys`` keys."""
    return all(_visible(mask_function, query, num_keys) == (0, num_keys, num_keys) for query in range(num_keys + 1))


def _query_positions(total: int, around: int) -> Iterable[int]:
    fixed_positions = (0, 1, 2, 3, 7, 16, 17, 63, 64, total // 2, total // 2 + 1, total - 1)
    local = (around - 1, around, around + 1, 2 * around - 1, 2 * around, 3 * around + 1)
    return sorted({query for query in fixed_positions + local if 0 <= query < total})


def _visible(mask_function: MaskFunction, query: int, total: int) -> tuple[int, int, int] | None:
    """Return the first visible key, the one after the last, and the number of visible keys; None if unknown."""
    zero = torch.tensor(0)
    try:
        visible = mask_function(zero, zero, torch.tensor(query), torch.arange(total))
        keys = torch.as_tensor(visible).broadcast_to(total).nonzero()
    except (RuntimeError, NotImplementedError, IndexError):  # it indexes tensors of the model, which have no data
        return None
    if not len(keys):
        return 0, 0, 0
    return int(keys[0]), int(keys[-1]) + 1, len(keys)
