"""Sub-batches: a step's metadata, cut so that its requests run in several parts (micro-batching)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from kvframe.contract.errors import BatchError
from kvframe.contract.metadata import Axis, CommonAttentionMetadata, change_extensions


def split_requests(
    metadata: CommonAttentionMetadata, ranges: Sequence[tuple[int, int]]
) -> tuple[CommonAttentionMetadata, ...]:
    """Cut a step's metadata into sub-batches of consecutive requests.

    Each is what the step would have without the other requests, but for its block table, which may be wider. Tensors
    are views where they can be; what is made anew follows from the host copies.

    A step with static shapes stays whole: where it is cut depends on its values. Its sub-batches are padded one by
    one, after the cut.

    Args:
        metadata: One cache group's metadata, before any wrapper. Padded tokens go to the last sub-batch, padded rows
            to the one that their index lies in. Never written to.
        ranges: First and last request, the last one excluded, of each sub-batch; together all requests, in order.

    Returns:
        One value per range; for a single range ``metadata`` itself.

    Raises:
        BatchError: The ranges are not that, a sub-batch would have no token, or the step has static shapes.
    """
    _check_ranges(metadata, ranges)
    if len(ranges) == 1:
        return (metadata,)
    if metadata.static_shapes:
        raise BatchError(
            f"a step with static shapes cannot be cut into {len(ranges)} sub-batches; cut the step before it is "
            "padded, and pad each sub-batch"
        )
    return tuple(_sub_batch(metadata, start, stop) for start, stop in ranges)


def _check_ranges(metadata: CommonAttentionMetadata, ranges: Sequence[tuple[int, int]]) -> None:
    expected = 0
    starts = metadata.query_start_loc_cpu.numpy()
    for start, stop in ranges:
        if start != expected or not start < stop <= metadata.num_reqs:
            break
        if starts[start] == starts[stop]:
            raise BatchError(f"the sub-batch of the requests [{start}, {stop}) has no token; join it with another")
        expected = stop
    else:
        if expected == metadata.num_reqs:
            return
    raise BatchError(
        f"sub-batches must hold all {metadata.num_reqs} requests of the step, in order, at least one each; got the "
        f"ranges {', '.join(f'[{start}, {stop})' for start, stop in ranges) or '(none)'}"
    )


def _sub_batch(metadata: CommonAttentionMetadata, start: int, stop: int) -> CommonAttentionMetadata:
    requests = slice(start, stop)
    starts = metadata.query_start_loc_cpu[start : stop + 1]
    first_token, end = int(starts[0]), int(starts[-1])
    tokens = slice(first_token, None if stop == metadata.num_reqs else end)
    query_start_loc_cpu = starts - first_token
    seq_lens_cpu = metadata.seq_lens_cpu[requests]

    generating = metadata.generating_indices_cpu[: metadata.num_generating].numpy()
    low, high = np.searchsorted(generating, (first_token, end)).tolist()
    if low < high:
        generating_indices = metadata.generating_indices[low:high] - first_token
        generating_indices_cpu = metadata.generating_indices_cpu[low:high] - first_token
    else:
        last_token = end - first_token - 1
        generating_indices_cpu = torch.full((1,), last_token, dtype=metadata.generating_indices_cpu.dtype)
        generating_indices = torch.full_like(generating_indices_cpu, last_token, device=metadata.slot_mapping.device)
    return attrs.evolve(
        metadata,
        query_start_loc=metadata.query_start_loc[start : stop + 1] - first_token,
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens=metadata.seq_lens[requests],
        seq_lens_cpu=seq_lens_cpu,
        num_reqs=stop - start,
        num_actual_tokens=end - first_token,
        max_query_len=int(np.diff(query_start_loc_cpu.numpy()).max()),
        max_seq_len=int(seq_lens_cpu.numpy().max()),
        block_table=metadata.block_table[requests],
        slot_mapping=metadata.slot_mapping[tokens],
        num_generating=high - low,
        generating_indices=generating_indices,
        generating_indices_cpu=generating_indices_cpu,
        extensions=change_extensions(
            metadata.extensions,
            {Axis.REQUEST: lambda values: values[requests], Axis.TOKEN: lambda values: values[tokens]},
        ),
    )
