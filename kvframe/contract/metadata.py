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
    """What the first dimension of an extension stands for."""

    REQUEST = "request"
    """The requests of the batch, padded ones included."""
    TOKEN = "token"
    """The packed tokens, padded ones included."""
    STEP = "step"
    """None of them. The values apply to the whole step."""


@attrs.frozen(eq=False)
class Extension:
    """Optional data of a step, which not every model or backend uses.

    Attributes:
        values: ``[num_reqs, …]``, ``[num_tokens, …]`` or any shape, by ``axis``; device.
        axis: What its first dimension stands for.
        values_cpu: The same on the host, if it is known there; otherwise None.
        optional: Whether a step is computed rightly without it. It is left out for a wrapper that does not know it,
            which otherwise refuses the step. An extension that a later version of the contract adds to steps is.
    """

    values: torch.Tensor
    axis: Axis
    values_cpu: torch.Tensor | None = None
    optional: bool = False


DEVICE_FIELDS = frozenset({"query_start_loc", "seq_lens", "block_table", "slot_mapping", "generating_indices"})
"""The fields of ``CommonAttentionMetadata`` whose tensors lie on the device when layers run."""

NO_EXTENSIONS: Mapping[str, Extension] = MappingProxyType({})

SEQ_STARTS = "seq_starts"
"""Extension ``[num_reqs], int32``, with a copy on the host: the request's queries do not see tokens before this one,
with any mask. It is at most the position of the request's first new token; if the keys are of another sequence, at
most the length of that sequence. Only backends that declare this extension are given it."""

RANGE_ENDS = "range_ends"
"""Extension ``[num_tokens], int32``, with a copy on the host: for each new token, the token after the last one of the
range of its prompt that it lies in, or 0. It sees the later tokens of its range, beside those that the mask shows. A
step computes such a range as a whole. Steps have this if a model's prompts are such ranges, and only if every backend
that attends to requests' own tokens declares the mask ``ranges``."""


def change_extensions(
    extensions: Mapping[str, Extension],
    change: Mapping[Axis, Callable[[torch.Tensor], torch.Tensor]],
    change_cpu: Mapping[Axis, Callable[[torch.Tensor], torch.Tensor]] | None = None,
) -> Mapping[str, Extension]:
    """Return extensions for a changed choice of requests or tokens.

    Args:
        extensions: A step's extensions.
        change: By axis, a function of the values on the device; extensions of another axis stay unchanged.
        change_cpu: The same for copies on the host; ``change`` by default.
    """
    if not extensions:
        return extensions
    change_cpu = change if change_cpu is None else change_cpu
    changed = {}
    for name, extension in extensions.items():
        axis, values_cpu = extension.axis, extension.values_cpu
        if axis in change:
            values_cpu = None if values_cpu is None else change_cpu[axis](values_cpu)
            extension = attrs.evolve(extension, values=change[axis](extension.values), values_cpu=values_cpu)
        changed[name] = extension
    return changed


@attrs.frozen(kw_only=True, eq=False)
class CommonAttentionMetadata:
    """The batch of one step for one cache group. Requests are packed: their new tokens follow one another.

    Query ``i`` of request ``r`` has the position ``seq_lens[r] - query_len[r] + i``. A padded batch ends with rows of
    query length 0 and with tokens of slot 0, which is in the null page that no request owns, or of a negative slot. The
    output of a backend for padded tokens is never used.

    The keys may belong to another sequence than the queries (cross attention). Then the batch or the layers' mask is
    not causal, ``seq_lens`` and ``block_table`` describe the keys, and all queries have slot 0 or a negative one. A
    request may have fewer keys than queries, or none; a query without keys gets zeros.

    Attributes:
        query_start_loc: ``[num_reqs + 1], int32, device``: where each request's new tokens start.
        query_start_loc_cpu: The same on the host.
        seq_lens: ``[num_reqs], int32, device``: tokens of each request after this step, or of the keys' sequence.
        seq_lens_cpu: The same on the host; upper bounds of it without ``exact_lens``.
        num_reqs: Requests in the batch, padded rows included.
        num_actual_tokens: New tokens in the batch, without padding.
        max_query_len: The most new tokens of one request; with ``static_shapes``, of any request in such a batch.
        max_seq_len: The longest request after this step, or an upper bound of it without ``exact_lens``; with
            ``static_shapes``, of any request in such a batch.
        block_table: ``[num_reqs, max_blocks], int32, device``: block ids by block index; 0, the null page, for a block
            that is not resident. Entries after the block of a request's last token mean nothing, and may name any page.
        slot_mapping: ``[num_tokens], int64, device``: ``block_id * block_size + offset`` of each new token, or a
            negative number if it is not stored; its length is the number of tokens with padding.
        block_size: Tokens per block of this group.
        num_generating: Tokens whose logits are needed, without padding: the last token of each prompt that this step
            completes, decodes and draft tokens, and all tokens of a request with prompt log-probabilities. In each
            request they are its last tokens.
        generating_indices: ``[num_generating + padding], int64, device``: the indices of these tokens among the packed
            tokens, in order; padding repeats the last. If no token generates, one padded row with the last token. None
            if the host does not know them: then every token counts as one whose logits are needed.
        generating_indices_cpu: The same on the host; None likewise.
        causal: Whether queries see only their own and earlier positions, for the whole batch. A tensor with one value
            for each request is reserved for a later version, and refused (``causal_per_request``).
        static_shapes: Whether the step is captured as a graph or replayed from one. Then the shapes of everything that
            is made from this value follow from its shapes and from ``max_query_len`` only.
        exact_lens: Whether ``seq_lens_cpu`` and ``max_seq_len`` are exact. A host that schedules a step before the one
            before it is computed knows only upper bounds of them.
        extensions: Optional data by name; each wrapper declares what it does with each name.
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
    generating_indices: torch.Tensor | None = None
    generating_indices_cpu: torch.Tensor | None = None
    causal: bool = True
    static_shapes: bool = False
    exact_lens: bool = True
    extensions: Mapping[str, Extension] = NO_EXTENSIONS

    @property
    def num_generating_rows(self) -> int:
        """Rows of a batch of the generating tokens alone, padding included."""
        return (self.slot_mapping if self.generating_indices is None else self.generating_indices).shape[0]

    @property
    def all_generate(self) -> bool:
        """Whether every token generates, padding included: then dropping the others changes nothing."""
        if self.generating_indices is None:
            return True
        if self.num_generating < self.num_actual_tokens:
            return False
        return not self.static_shapes or self.num_generating_rows == self.slot_mapping.shape[0]
