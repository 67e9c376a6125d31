"""Copies of pages write the bytes of the pages, and no others."""

from __future__ import annotations

import pytest
import torch
from kvframe_kernels.triton.pages import copy_pages, copy_pages_reference
from triton import knobs

from tests.covering import cover_pairs

DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
pytestmark = [] if knobs.runtime.interpret else [pytest.mark.gpu]


@pytest.mark.parametrize(
    ("page_bytes", "id_bytes", "with_ids"),
    cover_pairs([8, 4096, 40_000], [8, 24], [((True, True),), ((True, False),), ((False, True),), ((False, False),)]),
)
def test_pages_are_copied_and_nothing_else(page_bytes: int, id_bytes: int, with_ids: tuple[bool, bool]) -> None:
    generator = torch.Generator().manual_seed(page_bytes)
    ids_per_page = -(-page_bytes // id_bytes)
    num_bytes = (6 * ids_per_page + 1) * id_bytes + 5
    source, target = (
        torch.randint(0, 256, (num_bytes,), generator=generator).to(DEVICE, torch.uint8) for _ in range(2)
    )
    expected = target.clone()
    ids = [
        torch.randperm(6, generator=generator)[:4].to(DEVICE) * ids_per_page + 1 if has_ids else None
        for has_ids in with_ids
    ]
    sizes = {"num_pages": 4, "page_bytes": page_bytes, "id_bytes": id_bytes}
    copy_pages_reference(source, expected, *ids, **sizes)
    copy_pages(source, target, *ids, **sizes)
    assert torch.equal(expected, target)
    assert not torch.equal(source, target)


def test_no_pages_are_no_work() -> None:
    room = torch.zeros(8, dtype=torch.uint8)
    copy_pages(room, room, None, None, num_pages=0, page_bytes=8, id_bytes=8)
    assert not room.any()
