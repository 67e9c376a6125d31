"""Where tokens are stored, in the forms that kernels read."""

from __future__ import annotations

import pytest
import torch

from kvframe.attention.nested import host_tensors
from kvframe.contract import PLAIN, Slots


@pytest.mark.parametrize("block_size", [16, 12])
def test_blocks_and_offsets_follow_from_flat_slots(block_size: int) -> None:
    flat = torch.tensor([0, 1, block_size - 1, block_size, 5 * block_size + 3])
    slots = Slots(flat, block_size)
    assert [0, 0, 0, 1, 5] == slots.blocks.tolist()
    assert [0, 1, block_size - 1, 0, 3] == slots.offsets.tolist()


def test_places_are_made_unless_they_are_given() -> None:
    slots = Slots(torch.tensor([3]), 2)
    assert [slots.flat, *slots.indices] == host_tensors(slots)
    indices = torch.tensor([1]), torch.tensor([1])
    assert indices == Slots(torch.tensor([3]), 2, indices).indices


def test_flat_slots_follow_from_blocks_and_offsets() -> None:
    assert [7, 4] == Slots.at(torch.tensor([2, 1]), torch.tensor([1, 1]), 3).flat.tolist()


@pytest.mark.parametrize("block_size", [2, 3])
def test_a_token_with_a_negative_slot_is_written_to_no_page_but_the_null_page(block_size: int) -> None:
    cache = {name: torch.zeros(4, block_size, 1, 8) for name in ("k", "v")}
    key = torch.arange(1.0, 4).view(3, 1, 1).expand(3, 1, 8)
    PLAIN.write(key, key, cache, Slots(torch.tensor([block_size, -1, 3 * block_size + 1]), block_size))
    for pages in cache.values():
        assert 1 == pages[1, 0, 0, 0]
        assert 3 == pages[3, 1, 0, 0]
        assert 2 * 8 == torch.count_nonzero(pages[1:])
