"""Slots: the block id and the offset at which each token of a step is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch

from kvframe.contract.metadata import CommonAttentionMetadata

Slots = tuple[torch.Tensor, torch.Tensor]
"""Block id and offset of each token that is stored: ``[num_tokens], int64, device`` both."""


@attrs.frozen(eq=False)
class PackedSlots:
    """The slots of several cache groups, which store as many tokens each, in two tensors.

    Attributes:
        groups: The groups.
        blocks: ``[num_groups, num_tokens], int64, device``: block ids.
        offsets: Offsets, likewise.
    """

    groups: tuple[int, ...]
    blocks: torch.Tensor
    offsets: torch.Tensor


def pack_slots(
    metadata: Sequence[CommonAttentionMetadata], mappings: Mapping[int, torch.Tensor]
) -> tuple[PackedSlots, ...]:
    """Return block id and offset of what cache groups store, those of one block size together.

    Args:
        metadata: The step, one value per cache group.
        mappings: For each group that stores something, ``[num_stored], int64, device``: the slot of each row that its
            layers are given.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for index, mapping in mappings.items():
        alike.setdefault((metadata[index].block_size, mapping.shape[0]), []).append(index)
    packed = []
    for (block_size, _), indices in alike.items():
        together = torch.stack([mappings[index] for index in indices])
        packed.append(PackedSlots(tuple(indices), *_divmod(together, block_size)))
    return tuple(packed)


def _divmod(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    if block_size & (block_size - 1) == 0:
        # A processor's division takes ten times as long.
        return slots >> (block_size.bit_length() - 1), slots & (block_size - 1)
    return torch.div(slots, block_size, rounding_mode="floor"), slots % block_size


def unpack_slots(packed: Iterable[PackedSlots]) -> dict[int, Slots]:
    """Return the slots of each cache group that stores something."""
    return {
        group: slots
        for each in packed
        for group, slots in zip(each.groups, zip(each.blocks.unbind(), each.offsets.unbind(), strict=True), strict=True)
    }
