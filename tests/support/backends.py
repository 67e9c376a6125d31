"""Backends that ask for something of a batch."""

from __future__ import annotations

from kvframe_torch.backend import TorchBackend
from kvframe_torch.builder import TorchMetadataBuilder

from kvframe.contract.order import BatchOrder


class DecodesFirst(TorchBackend):
    """Asks for requests of one token before all others."""

    def make_builder(self) -> TorchMetadataBuilder:
        builder = super().make_builder()
        builder.batch_order = BatchOrder()
        return builder
