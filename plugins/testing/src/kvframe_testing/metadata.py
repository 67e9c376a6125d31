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
from kvframe.attention.staging import HOST
from kvframe.attention.values import find_contradiction, find_wrong_tensor
from kvframe.cache.block_table import BlockTables
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.metadata import (
    DEVICE_FIELDS,
    NO_EXTENSIONS,
    SEQ_STARTS,
    Axis,
    CommonAttentionMetadata,
    Extension,
)
from kvframe_testing.case import Case, Request

META = torch.device("meta")
"""torch's device without memory."""


def make_metadata(requests: Sequence[Request], block_size: int) -> CommonAttentionMetadata:
    """Return a step's metadata on the host; each request has its own blocks, and may have no new tokens.

    The tensors of the device have memory of their own, apart from that of their host copies.
    """
    longest = max(max(request.seq_len, request.num_new) for request in requests)
    tables = BlockTables(len(requests), longest, [block_size])
    tables[0].ids[:] = 1 + np.arange(tables[0].ids.size).reshape(tables[0].ids.shape)
    (metadata,) = build_metadata(make_batch(requests, range(len(requests)), HOST), tables, HOST)
    if requests[0].num_keys is not None:
        metadata = _over_other_keys(metadata, requests, tables[0].ids)
    copies: dict[str, Any] = {name: getattr(metadata, name).clone() for name in DEVICE_FIELDS}
    return attrs.evolve(metadata, **copies)


def on_device(metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Return the metadata with its device tensors on a device without values; host tensors are unchanged.

    The device is ``META``: torch raises an error if a value of such a tensor is read, for which the host would wait, or
    if it is computed together with a host tensor.
    """
    tensors: dict[str, Any] = {
        name: value.to(META) for name in DEVICE_FIELDS if (value := getattr(metadata, name)) is not None
    }
    extensions = {
        name: attrs.evolve(extension, values=extension.values.to(META))
        for name, extension in metadata.extensions.items()
    }
    return attrs.evolve(metadata, **tensors, extensions=extensions)


def find_problem(metadata: CommonAttentionMetadata) -> str:
    """Return one sentence that says how metadata are inconsistent; empty if they are consistent."""
    return find_misfit(metadata) or find_contradiction(metadata) or find_wrong_tensor(metadata) or ""


def make_batch(requests: Sequence[Request], rows: Sequence[int], device: torch.device) -> StepBatch:
    """Return a step's batch of requests in given rows of the block tables."""
    ends = np.cumsum([request.num_new for request in requests])
    generating = [np.arange(end - request.num_generating, end) for request, end in zip(requests, ends, strict=True)]
    hidden = torch.tensor([request.num_hidden for request in requests], dtype=torch.int32)
    range_ends = None
    if any(request.ranges for request in requests):
        range_ends = np.concatenate([np.array(request.range_ends, np.int64) for request in requests])
    extensions = {SEQ_STARTS: Extension(hidden.to(device), Axis.REQUEST, hidden)} if hidden.any() else NO_EXTENSIONS
    return StepBatch(
        rows=np.array(rows),
        num_computed=np.array([request.num_computed for request in requests]),
        query_lens=np.array([request.num_new for request in requests]),
        generating_indices=np.concatenate(generating),
        extensions=extensions,
        range_ends=range_ends,
    )


def make_metadata_of_groups(
    case: Case, manager: KVCacheManager, rows: Sequence[int], device: torch.device
) -> tuple[CommonAttentionMetadata, ...]:
    """Return a step's metadata for each cache group, for requests in given rows of the block tables."""
    metadata_of_groups = build_metadata(make_batch(case.requests, rows, device), manager.tables, device)
    return tuple(_as_asked(metadata, case, manager, rows) for metadata in metadata_of_groups)


def _as_asked(
    metadata: CommonAttentionMetadata, case: Case, manager: KVCacheManager, rows: Sequence[int]
) -> CommonAttentionMetadata:
    """Return metadata with the case's causality, its other sequence if it has one, and its padding."""
    metadata = attrs.evolve(metadata, causal=case.causal)
    if case.is_cross:
        metadata = _over_other_keys(metadata, case.requests, manager.tables[0].ids[rows])
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


def _over_other_keys(
    metadata: CommonAttentionMetadata, requests: Sequence[Request], tables: npt.NDArray[np.int32]
) -> CommonAttentionMetadata:
    """Return metadata of the same queries over sequences that the step does not compute."""
    seq_lens = torch.tensor([request.seq_len for request in requests], dtype=torch.int32)
    longest = int(seq_lens.max())
    device = metadata.seq_lens.device
    return attrs.evolve(
        metadata,
        seq_lens=seq_lens.to(device),
        seq_lens_cpu=seq_lens,
        max_seq_len=longest,
        block_table=torch.from_numpy(tables[:, : -(-longest // metadata.block_size)]).to(device),
        slot_mapping=torch.zeros_like(metadata.slot_mapping),
        causal=False,
    )
