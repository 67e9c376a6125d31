"""The metadata of latent attention in Triton: few queries attend to latents, many to expanded keys and values."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from kvframe_kernels.triton.attention import PagedAttention
from kvframe_kernels.triton.attention_plan import Batch
from kvframe_kernels.triton.mla import LatentAttention

from kvframe.contract import (
    RANGE_ENDS,
    AttentionMetadataBuilder,
    BatchOrder,
    CommonAttentionMetadata,
    GraphCapture,
)
from kvframe_triton.builder import TritonMetadata, batch_of

MAX_EXPANDED = 1 << 27
"""The most elements of expanded keys and values at once, unless a single head has more."""


@attrs.frozen(kw_only=True)
class Forms:
    """The two forms of a layer's attention (DeepSeek-V2, arXiv 2405.04434, 2.1).

    Attributes:
        latents: The absorbed form.
        nope_size: Elements of a query and of a key that are not rotated.
        head_size_v: Elements of a value.
    """

    latents: LatentAttention
    nope_size: int
    head_size_v: int

    @property
    def most_absorbed(self) -> int | None:
        """The most queries on a long context for which absorbed attention is cheaper; None if it always is.

        Absorbed, a query and a token that it sees take ``2 * latent_size + rope_size`` products per head; expanded they
        take ``nope_size + rope_size + head_size_v``, and each token ``latent_size * (nope_size + head_size_v)`` once.
        """
        made = self.nope_size + self.head_size_v
        more = 2 * self.latents.latent_size - made
        return self.latents.latent_size * made // more if more > 0 else None

    def heads_at_once(self, num_tokens: int) -> int:
        """Return the number of heads that are expanded at once; it is equal in each round."""
        per_head = num_tokens * (2 * self.nope_size + self.latents.rope_size + self.head_size_v)
        most = min(max(1, MAX_EXPANDED // max(1, per_head)), self.latents.num_heads)
        return next(heads for heads in range(most, 0, -1) if self.latents.num_heads % heads == 0)

    def expanded(self, num_heads: int) -> PagedAttention:
        """Return attention over the expanded keys and values of ``num_heads`` heads."""
        return PagedAttention(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_size=self.nope_size + self.latents.rope_size,
            head_size_v=self.head_size_v,
            block_size=self.latents.block_size,
            scale=self.latents.scale,
            num_cores=self.latents.num_cores,
        )


@attrs.frozen(eq=False)
class ExpandedMetadata:
    """The part of a step whose latents are expanded to keys and values.

    Attributes:
        pages: ``[num_pages], int32, device``: the pages of its requests, one request after the other.
        attention: Attention over the heads that are computed at once.
        metadata: Its work; its block table has each block's index in ``pages``.
    """

    pages: torch.Tensor
    attention: PagedAttention
    metadata: TritonMetadata


@attrs.frozen(eq=False)
class LatentMetadata:
    """A step's metadata for the layers of an attention group.

    Attributes:
        num_absorbed: The number of packed tokens, the first ones, that attend to latents.
        absorbed: The work of these.
        expanded: The work of the others; None if there are none.
        range_ends: ``[num_tokens], int32, device``: the ends of all tokens' ranges; None if there are no ranges.
    """

    num_absorbed: int
    absorbed: TritonMetadata
    expanded: ExpandedMetadata | None
    range_ends: torch.Tensor | None


class LatentMetadataBuilder(AttentionMetadataBuilder):
    """Divides a step into work items, in the form that costs less."""

    capture = GraphCapture.ALWAYS
    on_host = frozenset({"block_table"})

    def __init__(self, forms: Forms, dtype: torch.dtype) -> None:
        """Keep the properties of the group's layers.

        Args:
            forms: Their attention.
            dtype: The dtype that it is computed in.
        """
        self._forms = forms
        self._dtype = dtype
        self._most = forms.most_absorbed
        if self._most is not None:
            self.batch_order = BatchOrder(decode_threshold=self._most)

    def build(self, metadata: CommonAttentionMetadata) -> LatentMetadata:
        """Return the step's work items; at the sizes of a captured graph, all of them absorbed."""
        batch = batch_of(metadata, causal=True)
        range_ends = None if batch.range_ends is None else metadata.extensions[RANGE_ENDS].values
        num_reqs, most = len(batch.seq_lens), self._most
        if most is not None and not batch.static and batch.max_query_len > most:
            is_long = np.diff(batch.query_start_loc) > most
            # Long requests come after the others, and padding rows after these.
            num_reqs = int(is_long.argmax()) if is_long.any() else num_reqs
        if num_reqs == len(batch.seq_lens):
            return LatentMetadata(batch.num_tokens, self._absorbed(batch, metadata.block_table), None, range_ends)
        first, others = _split(batch, num_reqs)
        return LatentMetadata(
            num_absorbed=first.num_tokens,
            absorbed=self._absorbed(first, metadata.block_table[:num_reqs]),
            expanded=self._expanded(others, metadata.block_table[num_reqs:]),
            range_ends=range_ends,
        )

    def _absorbed(self, batch: Batch, block_table: torch.Tensor) -> TritonMetadata:
        return TritonMetadata.of(batch, self._forms.latents.plan(batch, self._dtype), block_table)

    def _expanded(self, batch: Batch, block_table: torch.Tensor) -> ExpandedMetadata:
        block_size = self._forms.latents.block_size
        starts = np.zeros_like(batch.seq_lens) if batch.seq_starts is None else batch.seq_starts
        first_pages = starts // block_size
        num_pages = np.where(np.diff(batch.query_start_loc) > 0, -(-batch.seq_lens // block_size) - first_pages, 0)
        ends = num_pages.cumsum()
        rows = np.arange(len(num_pages)).repeat(num_pages)
        columns = np.arange(len(rows)) + (first_pages - ends + num_pages)[rows]
        table = np.zeros((len(num_pages), int(columns.max(initial=0)) + 1), dtype=np.int32)
        table[rows, columns] = np.arange(len(rows))
        attention = self._forms.expanded(self._forms.heads_at_once(len(rows) * block_size))
        return ExpandedMetadata(
            pages=block_table[torch.from_numpy(rows), torch.from_numpy(columns)],
            attention=attention,
            metadata=TritonMetadata.of(batch, attention.plan(batch, self._dtype), torch.from_numpy(table)),
        )


def _split(batch: Batch, num_reqs: int) -> tuple[Batch, Batch]:
    """Return the first requests of a batch, and the others with the padding."""
    starts = batch.query_start_loc
    num_tokens = int(starts[num_reqs])

    def part(begin: int, end: int, tokens: slice) -> Batch:
        return Batch(
            query_start_loc=starts[begin : end + 1] - starts[begin],
            seq_lens=batch.seq_lens[begin:end],
            seq_starts=None if batch.seq_starts is None else batch.seq_starts[begin:end],
            num_tokens=tokens.stop - tokens.start,
            causal=batch.causal,
            max_query_len=int(np.diff(starts[begin : end + 1]).max(initial=0)),
            range_ends=None if batch.range_ends is None else batch.range_ends[tokens],
        )

    last = len(batch.seq_lens)
    return part(0, num_reqs, slice(0, num_tokens)), part(num_reqs, last, slice(num_tokens, batch.num_tokens))
