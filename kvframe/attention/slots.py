"""Slots: where the layers of each cache group store what a step gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvframe.attention.metadata import CommonAttentionMetadata

Slots = tuple[torch.Tensor, torch.Tensor]
"""Block id and offset of each token that is stored: ``[num_tokens], int64, device`` both."""


def split_slots(
    metadata: Sequence[CommonAttentionMetadata], mappings: Mapping[int, torch.Tensor]
) -> list[Slots | None]:
    """Return block id and offset of what each cache group stores; None for a group that stores nothing.

    Args:
        metadata: The step, one value per cache group.
        mappings: For each group that stores something, ``[num_stored], int64, device``: the slot of each row that its
            layers are given.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for index, mapping in mappings.items():
        alike.setdefault((metadata[index].block_size, mapping.shape[0]), []).append(index)
    slots: list[Slots | None] = [None] * len(metadata)
    for (block_size, _), indices in alike.items():
        # All groups of a block size together: the operations are small, and there may be many groups.
        together = torch.stack([mappings[index] for index in indices])
        blocks, offsets = torch.div(together, block_size, rounding_mode="floor"), together % block_size
        for index, block, offset in zip(indices, blocks.unbind(), offsets.unbind(), strict=True):
            slots[index] = block, offset
    return slots
