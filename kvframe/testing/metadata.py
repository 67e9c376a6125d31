"""Makes a step's metadata: on the host without a cache, or as the framework makes it from a case's block tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.attention.batch_metadata import StepBatch, build_metadata
from kvframe.attention.padding import pad_metadata
from kvframe.attention.shapes import find_misfit
from kvframe.attention.values import find_contradiction, find_wrong_tensor
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.metadata import NO_EXTENSIONS, SEQ_STARTS, Axis, CommonAttentionMetadata, Extension
from kvframe.testing.case import Case, Request


def make_metadata(requests: Sequence[Request], block_size: int) -> CommonAttentionMetadata:
    """Return a step's metadata on the host; each request has its own blocks, and may have no new tokens."""
    lens = np.array([(request.seq_len, request.num_new, request.num_generating) for request in requests])
    seq_lens, query_lens, num_generating = lens.T
    ends, is_cross = np.cumsum(query_lens), requests[0].num_keys is not None
    num_tokens = int(ends[-1])
    max_blocks = -(-int(seq_lens.max()) // block_size)
    block_table = 1 + np.arange(len(requests) * max_blocks, dtype=np.int32).reshape(len(requests), max_blocks)
    rows = np.repeat(np.arange(len(requests)), query_lens)
    slots = np.zeros(num_tokens, dtype=np.int64)
    if not is_cross:
        positions = np.arange(num_tokens) + (seq_lens - ends)[rows]
        slots = block_table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    generating = np.flatnonzero(np.arange(num_tokens) >= (ends - num_generating)[rows])

    def both(values: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.tensor(values, dtype=dtype)
        return host.clone(), host

    starts, starts_cpu = both([0, *ends], torch.int32)
    lens_device, lens_cpu = both(seq_lens, torch.int32)
    indices, indices_cpu = both(generating if len(generating) else [num_tokens - 1], torch.int64)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts_cpu,
        seq_lens=lens_device,
        seq_lens_cpu=lens_cpu,
        num_reqs=len(requests),
        num_actual_tokens=num_tokens,
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        block_table=torch.from_numpy(block_table),
        slot_mapping=torch.from_numpy(slots),
        block_size=block_size,
        num_generating=len(generating),
        generating_indices=indices,
        generating_indices_cpu=indices_cpu,
        causal=not is_cross,
    )


def find_problem(metadata: CommonAttentionMetadata) -> str:
    """Return one sentence that says how metadata are inconsistent; empty if they are consistent."""
    return find_misfit(metadata) or find_contradiction(metadata) or find_wrong_tensor(metadata) or ""


def make_batch(case: Case, rows: Sequence[int], device: torch.device) -> StepBatch:
    """Return a step's batch of requests in given rows of the block tables."""
    ends = np.cumsum([request.num_new for request in case.requests])
    generating = [
        np.arange(end - request.num_generating, end) for request, end in zip(case.requests, ends, strict=True)
    ]
    hidden = torch.tensor([request.num_hidden for request in case.requests], dtype=torch.int32)
    extensions = {SEQ_STARTS: Extension(hidden.to(device), Axis.REQUEST, hidden)} if hidden.any() else NO_EXTENSIONS
    return StepBatch(
        rows=np.array(rows),
        num_computed=np.array([request.num_computed for request in case.requests]),
        query_lens=np.array([request.num_new for request in case.requests]),
        generating_indices=np.concatenate(generating),
        extensions=extensions,
        range_ends=_range_ends(case),
    )


def make_metadata_of_groups(
    case: Case, manager: KVCacheManager, rows: Sequence[int], device: torch.device
) -> tuple[CommonAttentionMetadata, ...]:
    """Return a step's metadata for each cache group, for requests in given rows of the block tables."""
    built = build_metadata(make_batch(case, rows, device), manager.tables, device)
    return tuple(_as_asked(metadata, case, manager, rows) for metadata in built)


def _as_asked(
    metadata: CommonAttentionMetadata, case: Case, manager: KVCacheManager, rows: Sequence[int]
) -> CommonAttentionMetadata:
    """Return metadata with the case's causality, its other sequence if it has one, and its padding."""
    metadata = attrs.evolve(metadata, causal=case.causal and not case.is_cross)
    if case.is_cross:
        metadata = _over_other_keys(metadata, case, manager.tables[0].ids[rows])
    if not case.num_padding:
        return metadata
    return pad_metadata(
        metadata,
        num_reqs=metadata.num_reqs + case.num_padding,
        num_tokens=metadata.num_actual_tokens + case.num_padding,
        num_generating=metadata.num_generating_rows + case.num_padding,
        # A graph of other steps than decodes is captured for longer requests than any in the batch.
        max_query_len=metadata.max_query_len + (metadata.max_query_len > 1),
        max_seq_len=metadata.max_seq_len + metadata.block_size,
    )


def _range_ends(case: Case) -> npt.NDArray[np.int64] | None:
    """Return where the range of each new token ends, 0 for none; None if no request has ranges."""
    if not any(request.ranges for request in case.requests):
        return None
    return np.concatenate([np.array(request.range_ends, np.int64) for request in case.requests])


def _over_other_keys(
    metadata: CommonAttentionMetadata, case: Case, tables: npt.NDArray[np.int32]
) -> CommonAttentionMetadata:
    """Return metadata of the same queries over sequences that the step does not compute."""
    seq_lens = torch.tensor([request.seq_len for request in case.requests], dtype=torch.int32)
    longest = int(seq_lens.max())
    device = metadata.seq_lens.device
    return attrs.evolve(
        metadata,
        seq_lens=seq_lens.to(device),
        seq_lens_cpu=seq_lens,
        max_seq_len=longest,
        block_table=torch.from_numpy(tables[:, : -(-longest // metadata.block_size)]).to(device),
        slot_mapping=torch.zeros_like(metadata.slot_mapping),
    )
