"""The batch metadata of a case's step, as the framework makes it from the case's block tables."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.attention.batch_metadata import StepBatch, build_metadata
from kvframe.attention.padding import pad_metadata
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.metadata import NO_EXTENSIONS, SEQ_STARTS, Axis, CommonAttentionMetadata, Extension
from kvframe.testing.case import Case


def make_step_metadata(
    case: Case, manager: KVCacheManager, rows: Sequence[int], device: torch.device
) -> CommonAttentionMetadata:
    """Return the metadata of a case's step, for requests in given rows of the only block table; padded if it is."""
    return make_metadata_of_groups(case, manager, rows, device)[0]


def make_metadata_of_groups(
    case: Case, manager: KVCacheManager, rows: Sequence[int], device: torch.device
) -> tuple[CommonAttentionMetadata, ...]:
    """Return a step's metadata for each cache group, for requests in given rows of the block tables."""
    ends = np.cumsum([request.num_new for request in case.requests])
    generating = [
        np.arange(end - request.num_generating, end) for request, end in zip(case.requests, ends, strict=True)
    ]
    hidden = torch.tensor([request.num_hidden for request in case.requests], dtype=torch.int32)
    extensions = {SEQ_STARTS: Extension(hidden.to(device), Axis.REQUEST, hidden)} if hidden.any() else NO_EXTENSIONS
    batch = StepBatch(
        rows=np.array(rows),
        num_computed=np.array([request.num_computed for request in case.requests]),
        query_lens=np.array([request.num_new for request in case.requests]),
        generating_indices=np.concatenate(generating),
        extensions=extensions,
        range_ends=_range_ends(case),
    )
    built = build_metadata(batch, manager.tables, device)
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
    ends = [np.zeros(request.num_new, np.int64) for request in case.requests]
    for of_request, request in zip(ends, case.requests, strict=True):
        for start, stop in request.ranges:
            of_request[start - request.num_computed : stop - request.num_computed] = stop
    return np.concatenate(ends)


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
