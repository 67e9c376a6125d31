"""Batch metadata: what every backend needs to know of one step, once per cache group."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch

NO_EXTENSIONS: Mapping[str, Any] = MappingProxyType({})


@attrs.frozen(kw_only=True, eq=False)
class CommonAttentionMetadata:
    """One step's batch, as one cache group sees it. Requests are packed: their new tokens lie one after the other.

    Query ``i`` of request ``r`` stands at position ``seq_lens[r] - query_len[r] + i``. Padded rows have a query
    length of 0; padded tokens have slot 0, which lies in the null page that no request owns.

    Attributes:
        query_start_loc: ``[num_reqs + 1], int32, device``: where each request's new tokens start.
        query_start_loc_cpu: The same on the host.
        seq_lens: ``[num_reqs], int32, device``: tokens of each request after this step.
        seq_lens_cpu: The same on the host.
        num_reqs: Requests in the batch.
        num_actual_tokens: New tokens in the batch, without padding.
        max_query_len: The most new tokens of one request.
        max_seq_len: The longest request after this step.
        block_table: ``[num_reqs, max_blocks], int32, device``: block ids by block index; 0, the null page, where a
            block is not resident.
        slot_mapping: ``[num_actual_tokens], int64, device``: ``block_id * block_size + offset`` of each new token.
        block_size: Tokens per block of this group.
        logits_indices: ``[num_generating], int64, device``: the new tokens whose logits the step needs.
        causal: Whether queries see only their own and earlier positions.
        extensions: Optional data by name; a wrapper says for each name what it does with it.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    logits_indices: torch.Tensor
    causal: bool = True
    extensions: Mapping[str, Any] = NO_EXTENSIONS
