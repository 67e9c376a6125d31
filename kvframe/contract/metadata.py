"""Batch metadata: what every backend needs to know about one step, built once per cache group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import torch


class Axis(StrEnum):
    """What the first dimension of an extension counts."""

    REQUEST = "request"
    """The requests of the batch, padded ones included."""
    TOKEN = "token"
    """The packed tokens, padded ones included."""
    STEP = "step"
    """Nothing: the values hold for the whole step."""


@attrs.frozen(eq=False)
class Extension:
    """Optional data of a step: what not every model or backend has.

    Attributes:
        values: ``[num_reqs, …]``, ``[num_tokens, …]`` or any shape, by ``axis``; device.
        axis: What its first dimension counts.
        values_cpu: The same on the host, where whoever made it had it there; else None.
    """

    values: torch.Tensor
    axis: Axis
    values_cpu: torch.Tensor | None = None


NO_EXTENSIONS: Mapping[str, Extension] = MappingProxyType({})

SEQ_STARTS = "seq_starts"
"""Extension ``[num_reqs], int32``, with a host copy: tokens of a request before this one are not seen by its queries,
whatever the mask. It is at most the position of the request's first new token, or the length of another sequence that
the keys are of. A backend that honours it declares so; one that does not cannot be given it."""

NUM_ACCEPTED_TOKENS = "num_accepted_tokens"
"""Extension ``[num_reqs], int32``: draft tokens of the last step that were accepted."""

ENCODER_SEQ_LENS = "encoder_seq_lens"
"""Extension ``[num_reqs], int32``: tokens of each request's encoder sequence; 0 for none. For backends and wrappers of
layers over a request's own tokens that want to know them; where keys are the encoder's, ``seq_lens`` says the same."""


def change_extensions(
    extensions: Mapping[str, Extension],
    change: Mapping[Axis, Callable[[torch.Tensor], torch.Tensor]],
    change_cpu: Mapping[Axis, Callable[[torch.Tensor], torch.Tensor]] | None = None,
) -> Mapping[str, Extension]:
    """Return extensions for other requests or tokens, as whoever changes those of a step needs them.

    Args:
        extensions: A step's extensions.
        change: By axis, what to do with values on the device; extensions along another axis stay as they are.
        change_cpu: The same for host copies; ``change`` unless given.
    """
    if not extensions:
        return extensions
    change_cpu = change if change_cpu is None else change_cpu
    changed = {}
    for name, extension in extensions.items():
        axis, values_cpu = extension.axis, extension.values_cpu
        if axis in change:
            values_cpu = None if values_cpu is None else change_cpu[axis](values_cpu)
            extension = Extension(change[axis](extension.values), axis, values_cpu)
        changed[name] = extension
    return changed


@attrs.frozen(kw_only=True, eq=False)
class CommonAttentionMetadata:
    """One step's batch, as one cache group sees it. Requests are packed: their new tokens lie one after the other.

    Query ``i`` of request ``r`` stands at position ``seq_lens[r] - query_len[r] + i``. A padded batch has further
    rows with a query length of 0, and further tokens, behind the others, with slot 0, which lies in the null page
    that no request owns. What a backend returns for padded tokens is never used.

    The keys may be of another sequence than the queries (cross attention). Then the batch or the layers' mask is not
    causal, ``seq_lens`` and ``block_table`` are those of the keys, all queries have slot 0, and a request may have
    fewer keys than queries or none at all: queries without a key get zeros.

    Attributes:
        query_start_loc: ``[num_reqs + 1], int32, device``: where each request's new tokens start.
        query_start_loc_cpu: The same on the host.
        seq_lens: ``[num_reqs], int32, device``: tokens of each request after this step, or of its other sequence.
        seq_lens_cpu: The same on the host.
        num_reqs: Requests in the batch, padded rows included.
        num_actual_tokens: New tokens in the batch, without padding.
        max_query_len: The most new tokens of one request; with ``static_shapes``, of any request in such a batch.
        max_seq_len: The longest request after this step; with ``static_shapes``, of any request in such a batch.
        block_table: ``[num_reqs, max_blocks], int32, device``: block ids by block index; 0, the null page, where a
            block is not resident.
        slot_mapping: ``[num_tokens], int64, device``: ``block_id * block_size + offset`` of each new token; its length
            is the number of tokens with padding.
        block_size: Tokens per block of this group.
        num_generating: Tokens that generate, without padding: the last token of each prompt that this step completes,
            decodes and draft tokens, and all tokens of a request that wants its prompt's log-probabilities. Those of
            one request are its last ones.
        generating_indices: ``[num_generating + padding], int64, device``: which of the packed tokens these are, in
            order; padding repeats the last. Where no token generates, one padded row, the last token.
        generating_indices_cpu: The same on the host.
        causal: Whether queries see only their own and earlier positions.
        static_shapes: Whether shapes may follow from this value's shapes and ``max_query_len`` only, as for a step
            that is captured as a graph or replayed from one.
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
    num_generating: int
    generating_indices: torch.Tensor
    generating_indices_cpu: torch.Tensor
    causal: bool = True
    static_shapes: bool = False
    extensions: Mapping[str, Extension] = NO_EXTENSIONS

    @property
    def all_generate(self) -> bool:
        """Whether every token generates, so that dropping the others would change nothing, padding included."""
        if self.num_generating < self.num_actual_tokens:
            return False
        return not self.static_shapes or self.generating_indices.shape[0] == self.slot_mapping.shape[0]
