"""The wrapper for chunked attention: each chunk of a request becomes a virtual request with full attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Self, cast

import attrs
import numpy as np
import torch
from torch.nn.functional import pad

from kvframe.contract import (
    RANGE_ENDS,
    SEQ_STARTS,
    VIRTUAL_REQUESTS,
    AttentionMask,
    Axis,
    CommonAttentionMetadata,
    Extension,
    FieldUse,
    GraphCapture,
    LayerSpec,
    MetadataWrapper,
    WrapperError,
    field_uses,
)
from kvframe_chunked_local.block_runs import BlockRuns
from kvframe_chunked_local.virtual_requests import (
    IntArray,
    make_virtual_requests,
    most_virtual_requests,
    split_at_ranges,
)


@attrs.frozen(kw_only=True)
class ChunkedLocal(MetadataWrapper):
    """Turns each chunk that has new tokens into a virtual request with the tokens of that chunk.

    A virtual request's block table starts with the block of the chunk's first token, and its positions count from that
    block's first token. If chunks begin inside of a block, ``SEQ_STARTS`` hides the tokens before them. A request
    without a new token gets no virtual request; a batch without any new token gets one, without tokens. With
    ``static_shapes`` the batch is padded to the most virtual requests that a batch of its sizes can have.

    A range of a prompt (``RANGE_ENDS``) may go on in the next chunks. Its tokens of each earlier chunk become a further
    virtual request, which ends with the range.

    If every request is still in its first chunk, the batch is returned unchanged.

    Attributes:
        chunk: Tokens of a chunk; taken from the layer's mask.
    """

    name: ClassVar[str] = "chunked_local"
    fields = field_uses(
        reset=(
            *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu"),
            *("num_reqs", "max_query_len", "max_seq_len"),
        ),
        slice=("block_table",),
        reject=("causal", "exact_lens"),
    )
    extensions: ClassVar[Mapping[str, FieldUse]] = {
        RANGE_ENDS: FieldUse.SLICE,
        SEQ_STARTS: FieldUse.REJECT,
    }
    effects: ClassVar[frozenset[str]] = frozenset({VIRTUAL_REQUESTS})
    # After a wrapper that makes virtual requests, positions are not those of the chunks.
    not_after: ClassVar[frozenset[str]] = frozenset({VIRTUAL_REQUESTS})
    capture: ClassVar[GraphCapture] = GraphCapture.ALWAYS

    chunk: int | None = None

    def for_layer(self, layer: LayerSpec) -> Self:
        """Return the wrapper with the chunk of the layer's mask."""
        mask = None if layer.spec is None else layer.spec.mask
        if layer.spec is None or mask is None or mask.chunk is None:
            raise WrapperError(
                f"wrapper {self.name!r} cannot serve layer {layer.name!r}: its mask has no chunks", code="no_chunk"
            )
        if self.chunk not in (None, mask.chunk):
            raise WrapperError(
                f"wrapper {self.name!r} has chunk = {self.chunk!r}, but layer {layer.name!r} has chunks of "
                f"{mask.chunk} tokens; set the chunk of the layer's spec",
                code="other_chunk",
            )
        if layer.spec.retain_all().mask != AttentionMask():
            raise WrapperError(
                f"wrapper {self.name!r} cannot serve layer {layer.name!r}: retain_all() of its cache spec is not full "
                "attention",
                code="no_full_form",
            )
        query = layer.query
        has_bias = query is not None and (query.relative_bias is not None or query.alibi_slopes is not None)
        made = _ForBias(chunk=mask.chunk) if has_bias else attrs.evolve(self, chunk=mask.chunk)
        return cast(Self, made)

    def wrapped_layer(self, layer: LayerSpec) -> LayerSpec:
        """Return the layer as full attention over the same keys and values."""
        assert layer.spec is not None
        return attrs.evolve(layer, spec=layer.spec.retain_all())

    def added_extensions(self, layer: LayerSpec) -> frozenset[str]:
        """Return ``SEQ_STARTS`` if chunks begin inside of a block."""
        assert layer.spec is not None
        assert self.chunk is not None
        return frozenset({SEQ_STARTS}) if self.chunk % layer.spec.block_size else frozenset()

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the batch of virtual requests: one copy to the device, one gather of block ids."""
        assert self.chunk is not None
        chunk, block_size, is_static = self.chunk, metadata.block_size, metadata.static_shapes
        max_blocks = metadata.block_table.shape[1]
        # Static shapes depend on the largest possible length of requests, not on their lengths in this step.
        if (max_blocks * block_size if is_static else metadata.max_seq_len) <= chunk:
            return metadata
        virtual = make_virtual_requests(metadata.query_start_loc_cpu.numpy(), metadata.seq_lens_cpu.numpy(), chunk)
        range_ends = _range_ends(metadata)
        if range_ends is not None:
            virtual = split_at_ranges(virtual, range_ends, chunk)
        num_reqs = len(virtual.requests)
        if is_static:
            num_reqs = most_virtual_requests(
                metadata.num_reqs, len(metadata.slot_mapping), metadata.max_query_len, chunk
            )
            # Each of them may be split once, and each has a token.
            num_reqs = num_reqs if range_ends is None else min(2 * num_reqs, max(1, len(metadata.slot_mapping)))
        first_blocks, num_hidden = np.divmod(virtual.chunk_starts, block_size)
        seq_lens = virtual.seq_ends - first_blocks * block_size
        if not is_static:
            longest = int(seq_lens.max())
        elif range_ends is None:
            longest = chunk + block_size - math.gcd(chunk, block_size)
        else:
            longest = max_blocks * block_size
        num_blocks = min(max_blocks, max(1, -(-longest // block_size)))

        runs = BlockRuns(metadata.block_table)
        starts = runs.starts(virtual.requests, first_blocks)
        # The set of tensors must not depend on these lengths either.
        is_split = is_static or not virtual.one_each
        arrays = {"starts": starts, "seq_lens": seq_lens}
        if is_split:
            arrays["query_start_loc"] = virtual.query_start_loc
        if chunk % block_size:
            arrays[SEQ_STARTS] = num_hidden
        if range_ends is not None:
            arrays[RANGE_ENDS] = _from_first_blocks(range_ends, virtual.query_start_loc, first_blocks * block_size)
        host, device = _upload(arrays, metadata.block_table.device, num_reqs - len(starts))

        axes = {SEQ_STARTS: Axis.REQUEST, RANGE_ENDS: Axis.TOKEN}
        extensions = {name: Extension(device[name], axes[name], host[name]) for name in axes if name in host}
        return self.evolve(
            metadata,
            query_start_loc=device.get("query_start_loc", metadata.query_start_loc),
            query_start_loc_cpu=host.get("query_start_loc", metadata.query_start_loc_cpu),
            seq_lens=device["seq_lens"],
            seq_lens_cpu=host["seq_lens"],
            num_reqs=num_reqs,
            max_query_len=min(metadata.max_query_len, chunk) if is_static else virtual.max_query_len,
            max_seq_len=min(metadata.max_seq_len, longest),
            block_table=runs.select(device["starts"], starts, num_blocks),
            extensions=MappingProxyType(extensions),
        )


@attrs.frozen(kw_only=True)
class _ForBias(ChunkedLocal):
    """``ChunkedLocal`` for layers with a bias by distance, without ranges of prompts.

    In the virtual request of a range that goes on in the next chunk, distances of query and key are not the true ones.
    """

    extensions: ClassVar[Mapping[str, FieldUse]] = {**ChunkedLocal.extensions, RANGE_ENDS: FieldUse.REJECT}


def _range_ends(metadata: CommonAttentionMetadata) -> IntArray | None:
    """Return where the range of each token ends, 0 for none; None if the step has no ranges."""
    if RANGE_ENDS not in metadata.extensions:
        return None
    values_cpu = metadata.extensions[RANGE_ENDS].values_cpu
    assert values_cpu is not None
    return values_cpu.numpy()


def _from_first_blocks(range_ends: IntArray, query_start_loc: IntArray, origins: IntArray) -> IntArray:
    """Return the ends of ranges counted from the first token of each virtual request's first block; 0 stays 0."""
    ends = range_ends.copy()
    of_tokens = ends[: query_start_loc[-1]]
    of_tokens -= origins.repeat(query_start_loc[1:] - query_start_loc[:-1]) * (of_tokens > 0)
    return ends


def _upload(
    arrays: Mapping[str, IntArray], device: torch.device, num_padding: int
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Return arrays as tensors on the host and on the device, with one copy for all.

    Padding is added after the copy: zeros, but in ``query_start_loc`` its last element. ``RANGE_ENDS``, which has a
    value for each token, is not padded.
    """
    packed = torch.from_numpy(np.concatenate([*arrays.values()]))
    lengths = [len(array) for array in arrays.values()]

    def unpack(packed: torch.Tensor) -> Mapping[str, torch.Tensor]:
        parts = dict(zip(arrays, packed.split_with_sizes(lengths), strict=True))
        if num_padding == 0:
            return parts
        ends = {name: int(array[-1]) if name == "query_start_loc" else 0 for name, array in arrays.items()}
        return {
            name: part if name == RANGE_ENDS else pad(part, (0, num_padding), value=ends[name])
            for name, part in parts.items()
        }

    host = unpack(packed)
    return host, host if device.type == "cpu" else unpack(packed.to(device, non_blocking=True))
