"""A wrapper that divides the keys of each request in two halves, as context parallelism does over two devices."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Self

import attrs
import torch

from kvframe.contract import (
    SEQ_STARTS,
    Axis,
    CommonAttentionMetadata,
    Extension,
    FieldUse,
    LayerSpec,
    MetadataWrapper,
    WrapperError,
)

FIELDS = {field.name for field in attrs.fields(CommonAttentionMetadata)} - {"extensions"}


@attrs.frozen(kw_only=True)
class KeyHalves(MetadataWrapper):
    """Divides keys at the middle of each request: in each half, every query is a request of its own.

    So the tokens that a query sees in a half need only be consecutive. A half begins at a page's start; ``SEQ_STARTS``
    hides the tokens of that page before it.

    Attributes:
        window: The layer's window; 0 for none.
        chunk: The layer's chunks; 0 for none.
        causal: Whether the layer's mask is causal.
    """

    name = "key_halves"
    num_parts = 2
    fields: ClassVar[Mapping[str, FieldUse]] = MappingProxyType(
        {
            **dict.fromkeys(sorted(FIELDS), FieldUse.CARRY),
            "static_shapes": FieldUse.REJECT,
            "exact_lens": FieldUse.REJECT,
        }
    )

    window: int = 0
    chunk: int = 0
    causal: bool = True

    def for_layer(self, layer: LayerSpec) -> Self:
        assert layer.spec is not None
        assert layer.query is not None
        mask = layer.spec.mask
        if mask is None or (mask.window is not None and mask.num_sink_tokens):
            raise WrapperError("a query must see consecutive tokens", code="mask")
        if mask.lookahead is not None:
            raise WrapperError("a query's row has no later tokens that a window could end among", code="mask")
        if layer.query.relative_bias is not None or layer.query.alibi_slopes is not None:
            raise WrapperError("a bias depends on positions, which the halves do not keep", code="relative_bias")
        return attrs.evolve(self, window=mask.window or 0, chunk=mask.chunk or 0, causal=mask.causal)

    def added_extensions(self, layer: LayerSpec) -> frozenset[str]:
        return frozenset({SEQ_STARTS}) if self.window or self.chunk else frozenset()

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return metadata

    def parts(self, metadata: CommonAttentionMetadata) -> tuple[CommonAttentionMetadata, ...]:
        starts, lens = metadata.query_start_loc.long(), metadata.seq_lens.long()
        counts = starts.diff()
        num_tokens = metadata.num_actual_tokens
        requests = torch.arange(len(counts), device=counts.device)
        request = requests.repeat_interleave(counts, output_size=num_tokens)
        position = torch.arange(num_tokens, device=lens.device) + (lens - starts[1:])[request]
        first, stop = torch.zeros_like(position), lens[request]
        if self.causal and metadata.causal:
            stop = position + 1
            if self.window:
                first = (stop - self.window).clamp(min=0)
            if self.chunk:
                first = position - position % self.chunk
        # At a page's end, so that the second half begins with a page.
        size = metadata.block_size
        middle = torch.maximum(lens[request] // 2 // size * size, first).minimum(stop)
        return self._rows(metadata, request, first, middle), self._rows(metadata, request, middle, stop)

    def _rows(
        self, metadata: CommonAttentionMetadata, request: torch.Tensor, first: torch.Tensor, stop: torch.Tensor
    ) -> CommonAttentionMetadata:
        """Return a row for each token, which sees ``[first, stop)`` of its request."""
        size, table, num_tokens = metadata.block_size, metadata.block_table, len(request)
        page = first // size
        columns = (page[:, None] + torch.arange(table.shape[1], device=table.device)).clamp(max=table.shape[1] - 1)
        is_empty = first >= stop
        lens = (stop - page * size).masked_fill(is_empty, 0).int()
        hidden = (first - page * size).masked_fill(is_empty, 0).int()
        rows = torch.arange(num_tokens + 1, dtype=torch.int32, device=table.device)
        extensions: Mapping[str, Extension] = MappingProxyType({})
        if self.window or self.chunk:
            extensions = {SEQ_STARTS: Extension(hidden, Axis.REQUEST, hidden.cpu())}
        return attrs.evolve(
            metadata,
            query_start_loc=rows,
            query_start_loc_cpu=rows.cpu(),
            seq_lens=lens,
            seq_lens_cpu=lens.cpu(),
            num_reqs=num_tokens,
            max_query_len=1,
            block_table=table[request].gather(1, columns),
            causal=False,
            extensions=extensions,
        )
