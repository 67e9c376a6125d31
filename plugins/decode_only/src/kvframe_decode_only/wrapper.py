"""The wrapper for prefill skipping: a layer gets only the generating tokens of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import attrs
import numpy as np
import torch

from kvframe.contract import (
    DROPS_TOKENS,
    RANGE_ENDS,
    SEQ_STARTS,
    VIRTUAL_REQUESTS,
    CommonAttentionMetadata,
    FieldUse,
    GraphCapture,
    LayerSpec,
    MetadataWrapper,
    WrapperError,
    field_uses,
)


@attrs.frozen(kw_only=True)
class DecodeOnly(MetadataWrapper):
    """Keeps the tokens that generate: the last one of each completed prompt, every decode and draft token.

    The number of requests stays; a request without a generating token gets a query length of 0. Generating tokens are
    the last ones of their request, so their positions follow from the sequence lengths, which also stay. A layer can
    leave other tokens out only if it stores no keys and values for them, because it reads another layer's cache (YOCO,
    arXiv 2405.05254; SwiftKV, arXiv 2410.03960).
    """

    name: ClassVar[str] = "decode_only"
    fields = field_uses(
        reset=(
            *("query_start_loc", "query_start_loc_cpu", "num_actual_tokens", "max_query_len"),
            *("generating_indices", "generating_indices_cpu"),
        ),
        slice=("slot_mapping",),
    )
    extensions: ClassVar[Mapping[str, FieldUse]] = {
        SEQ_STARTS: FieldUse.CARRY,
        RANGE_ENDS: FieldUse.SLICE,
    }
    effects: ClassVar[frozenset[str]] = frozenset({DROPS_TOKENS})
    not_after: ClassVar[frozenset[str]] = frozenset({DROPS_TOKENS, VIRTUAL_REQUESTS})
    capture: ClassVar[GraphCapture] = GraphCapture.ALWAYS

    def for_layer(self, layer: LayerSpec) -> Self:
        """Return the wrapper itself, for a layer that keeps no cache.

        Args:
            layer: The layer.

        Raises:
            WrapperError: The layer keeps a cache of its own (``keeps_cache``).
        """
        if layer.shares_with is None:
            raise WrapperError(
                f"wrapper {self.name!r} cannot serve {layer.name!r}: the layer keeps a cache of its own, which must "
                "hold every token; only a layer that shares another layer's cache can leave tokens out",
                code="keeps_cache",
            )
        return self

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the batch of generating tokens; the unchanged input if all tokens generate.

        Args:
            metadata: The step's metadata.
        """
        if metadata.generating_indices is None or metadata.generating_indices_cpu is None or metadata.all_generate:
            return metadata
        kept, num_kept = metadata.generating_indices, metadata.num_generating
        num_rows, device = kept.shape[0], kept.device
        # The new start of a request is the number of kept tokens before its old start.
        starts = metadata.generating_indices_cpu.numpy()[:num_kept].searchsorted(metadata.query_start_loc_cpu.numpy())
        starts = starts.astype(np.int32)
        starts_cpu = torch.from_numpy(starts)
        generating_cpu = torch.arange(num_rows)
        slot_mapping = metadata.slot_mapping.index_select(0, kept)
        if num_rows > num_kept:
            generating_cpu.clamp_(max=max(0, num_kept - 1))
            slot_mapping[num_kept:].zero_()
        if metadata.static_shapes:
            max_query_len = min(metadata.max_query_len, num_rows)
        else:
            # At least 1: if no token generates, the layer still computes a padded one.
            max_query_len = max(1, int(np.maximum.reduce(starts[1:] - starts[:-1])))
        return self.evolve(
            metadata,
            tokens=kept,
            tokens_cpu=metadata.generating_indices_cpu,
            query_start_loc=starts_cpu.to(device, non_blocking=True),
            query_start_loc_cpu=starts_cpu,
            num_actual_tokens=num_kept,
            max_query_len=max_query_len,
            slot_mapping=slot_mapping,
            generating_indices=generating_cpu.to(device, non_blocking=True),
            generating_indices_cpu=generating_cpu,
        )
