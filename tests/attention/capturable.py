"""The reference backend with a kernel's restriction: its forward reads tensors on the device only."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract.backend import AttentionMetadataBuilder
from kvframe.contract.capture import GraphCapture
from kvframe.contract.metadata import CommonAttentionMetadata


class CapturableReference(TorchReferenceBackend):
    """Can be captured in a graph: all that it reads in a replay is in tensors at fixed addresses."""

    level = GraphCapture.ALWAYS

    def make_builder(self) -> AttentionMetadataBuilder:
        level = self.level

        class Builder(AttentionMetadataBuilder):
            capture = level

            def build(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
                return metadata

        return Builder()

    def forward(
        self, layer: Any, query: Any, kv_cache: Any, metadata: Any, sinks: Any, out: Any = None
    ) -> torch.Tensor:
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
        return super().forward(layer, query, kv_cache, read, sinks)


class DecodesOnly(CapturableReference):
    level = GraphCapture.DECODE


class UniformOnly(CapturableReference):
    level = GraphCapture.UNIFORM
