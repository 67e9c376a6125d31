"""Puts a batch's requests into the order that backends ask for: one order for all of them, or a permutation for one.

Everything is computed from the metadata's host copies. A permutation goes to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.contract.metadata import Axis, CommonAttentionMetadata, change_extensions
from kvframe.contract.order import BatchOrder, IntArray


def find_order(orders: Sequence[BatchOrder], query_lens: IntArray) -> IntArray | None:
    """Return the order of a batch's requests that is in all of the given orders; None if they stay as they are.

    Requests that the orders do not distinguish stay in the order they are in.

    Args:
        orders: The orders that the attention groups ask for, at least one.
        query_lens: ``[num_reqs]``: tokens of each request that this step computes.

    Returns:
        ``[num_reqs]``: the index of the request at each place.
    """
    # A longer request never comes before a shorter one in any order.
    ranks: IntArray = np.sum([order.ranks(query_lens) for order in orders], axis=0)
    return None if _never_decreases(ranks) else np.argsort(ranks, kind="stable")


def is_ordered(order: BatchOrder, metadata: CommonAttentionMetadata) -> bool:
    """Return whether a batch's requests are in ``order``."""
    return _never_decreases(order.ranks(np.diff(metadata.query_start_loc_cpu.numpy())))


@attrs.frozen(kw_only=True, eq=False)
class Permutation:
    """The permutation from the batch's order to the order of one group, and its inverse.

    Attributes:
        requests: ``[num_reqs], int64, device``: the index in the batch of the request at each place of the order.
        tokens: ``[num_tokens], int64, device``: the same for the packed tokens, padded ones included.
            The group's layers are given ``query.index_select(0, tokens)``.
        inverse: ``[num_tokens], int64, device``: the inverse of ``tokens``: ``output.index_select(0, inverse)`` is in
            the batch's order.
    """

    requests: torch.Tensor
    tokens: torch.Tensor
    inverse: torch.Tensor


def permute(metadata: CommonAttentionMetadata, order: BatchOrder) -> tuple[CommonAttentionMetadata, Permutation]:
    """Put a batch into the order that one group asks for.

    Args:
        metadata: The step's metadata after the group's wrapper chain. Never written to.
        order: The order that the group asks for.

    Returns:
        The metadata of the same requests and tokens in that order, padded tokens still last; and the
        permutation from the batch's order to it.
    """
    starts = metadata.query_start_loc_cpu.numpy()
    query_lens = np.diff(starts)
    num_tokens, num_actual = metadata.slot_mapping.shape[0], int(starts[-1])
    requests = np.argsort(order.ranks(query_lens), kind="stable")
    query_lens = query_lens[requests]
    new_starts = np.zeros_like(starts)
    np.cumsum(query_lens, out=new_starts[1:])
    tokens = np.arange(num_tokens)
    tokens[:num_actual] += np.repeat(starts[:-1][requests] - new_starts[:-1], query_lens)
    inverse = np.empty_like(tokens)
    inverse[tokens] = np.arange(num_tokens)
    arrays = [requests, tokens, inverse, new_starts]
    if metadata.generating_indices_cpu is not None:
        arrays.append(_moved(metadata.generating_indices_cpu.numpy(), metadata.num_generating, inverse))
    requests_there, tokens_there, inverse_there, starts_there, *generating_there = _upload(
        arrays, metadata.query_start_loc.device
    )
    requests_here = torch.from_numpy(requests)
    permuted = attrs.evolve(
        metadata,
        query_start_loc=starts_there,
        query_start_loc_cpu=torch.from_numpy(new_starts),
        seq_lens=metadata.seq_lens.index_select(0, requests_there),
        seq_lens_cpu=metadata.seq_lens_cpu.index_select(0, requests_here),
        block_table=metadata.block_table.index_select(0, requests_there),
        slot_mapping=metadata.slot_mapping.index_select(0, tokens_there),
        generating_indices=generating_there[0] if generating_there else None,
        generating_indices_cpu=torch.from_numpy(arrays[-1]) if generating_there else None,
        extensions=change_extensions(
            metadata.extensions,
            _rows_of(requests_there, tokens_there),
            _rows_of(requests_here, torch.from_numpy(tokens)),
        ),
    )
    return permuted, Permutation(requests=requests_there, tokens=tokens_there, inverse=inverse_there)


def _moved(generating: IntArray, count: int, inverse: IntArray) -> IntArray:
    """Return the indices of ``count`` generating tokens, and padding, where ``inverse`` puts these tokens."""
    indices = generating.copy()
    if count:
        indices[:count] = np.sort(inverse[generating[:count]])
        indices[count:] = indices[count - 1]
    return indices


def _never_decreases(ranks: IntArray) -> bool:
    return bool((ranks[1:] >= ranks[:-1]).all())


def _upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to the device in one copy; each result is aligned for any dtype."""
    ends = np.cumsum([-(-array.nbytes // 8) * 8 for array in arrays]).tolist()
    buffer = np.empty(ends[-1], dtype=np.uint8)
    for array, start in zip(arrays, [0, *ends], strict=False):
        buffer[start : start + array.nbytes].view(array.dtype)[:] = array
    device_bytes = torch.from_numpy(buffer).to(device, non_blocking=True)
    return [
        device_bytes[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
        for array, start in zip(arrays, [0, *ends], strict=False)
    ]


def _rows_of(requests: torch.Tensor, tokens: torch.Tensor) -> Mapping[Axis, Callable[[torch.Tensor], torch.Tensor]]:
    return {
        Axis.REQUEST: lambda values: values.index_select(0, requests),
        Axis.TOKEN: lambda values: values.index_select(0, tokens),
    }
