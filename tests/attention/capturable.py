"""Reference backends with a kernel's restriction: ``attend`` reads tensors on the device only."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from kvframe_mla.backend import KV_UP, MLABackend

from kvframe.builtin.torch_reference import TorchReferenceBackend, attend
from kvframe.contract.backend import AttentionMetadataBuilder
from kvframe.contract.capture import GraphCapture
from kvframe.contract.metadata import CommonAttentionMetadata


class PassingBuilder(AttentionMetadataBuilder):
    """Passes the batch metadata on."""

    def __init__(self, capture: GraphCapture) -> None:
        self.capture = capture  # type: ignore[misc]

    def build(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return metadata


class CapturableReference(TorchReferenceBackend):
    """Can be captured in a graph: all that it reads in a replay is in tensors at fixed addresses."""

    level = GraphCapture.ALWAYS

    def make_builder(self) -> AttentionMetadataBuilder:
        return PassingBuilder(self.level)

    def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, **named: Any) -> torch.Tensor:
        extensions = {
            name: attrs.evolve(extension, values_cpu=extension.values)
            for name, extension in metadata.extensions.items()
        }
        read = attrs.evolve(
            metadata,
            query_start_loc_cpu=metadata.query_start_loc,
            seq_lens_cpu=metadata.seq_lens,
            extensions=extensions,
        )
        return super().attend(layer, query, kv_cache, read, **named)


class DecodesOnly(CapturableReference):
    level = GraphCapture.DECODE


class UniformOnly(CapturableReference):
    level = GraphCapture.UNIFORM


class CapturableLatents(MLABackend):
    """Attends to latents by definition: it expands the keys and values of one request at a time."""

    def make_builder(self) -> Any:
        return PassingBuilder(GraphCapture.ALWAYS)

    def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, **_: Any) -> torch.Tensor:
        kv_up, sizes = self.parameters[layer.name][KV_UP], (self._latent_size, self._rope_size)
        output = query.new_zeros(len(query), self._num_heads, self._head_size_v)
        starts = metadata.query_start_loc.tolist()
        for request, seq_len in enumerate(metadata.seq_lens.tolist()):
            positions = torch.arange(seq_len)
            pages = metadata.block_table[request, positions // metadata.block_size].long()
            latents, rotated = kv_cache["latent"][pages, positions % metadata.block_size].split(sizes, dim=-1)
            expanded = torch.einsum("tl,hdl->thd", latents, kv_up.to(latents))
            nope, value = expanded.split((self._nope_size, self._head_size_v), dim=-1)
            key = torch.cat([nope, rotated[:, None].expand(-1, self._num_heads, -1)], dim=-1)
            first, stop = starts[request], starts[request + 1]
            for row in range(first, stop):
                seen = seq_len - (stop - 1 - row)
                output[row] = attend(query[row], key[:seen], value[:seen], layer, None)[0]
        return output
