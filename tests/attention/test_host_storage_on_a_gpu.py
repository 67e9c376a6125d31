"""Pages of a GPU's memory go to the host and back unchanged, by the kernel and by torch."""

from __future__ import annotations

import pytest
import torch
from kvframe_engine.host_storage import HostStorage
from kvframe_triton.backend import TritonBackend

from tests.cache.plans import full, make_plan, ranged

ORDERS = {"from": (4, 0, 7, 2, 1), "host": (2, 3, 4, 5, 0), "to": (3, 6, 0, 5, 2)}
"""Five pages: their places in the pool, on the host (four of them consecutive), and after the way back."""


@pytest.mark.gpu
@pytest.mark.parametrize("copier", [None, TritonBackend.page_copier()], ids=["torch", "triton"])
@pytest.mark.parametrize("group", [0, 1])
def test_pages_come_back_from_pinned_memory_into_other_pages(group: int, copier: object) -> None:
    plan = make_plan(full(num_kv_heads=2), ranged(window=6), num_slabs=12)
    pool = torch.randint(0, 256, (plan.total_bytes,), dtype=torch.uint8, device="cuda")
    before = pool.clone()
    host = HostStorage(plan, pool, 12, copy_pages=copier)  # type: ignore[arg-type]
    page, unit = plan.groups[group].page_bytes, plan.block_id_bytes
    first = plan.null_bytes // unit
    ids = {name: [first + page // unit * index for index in order] for name, order in ORDERS.items()}
    host.copy_out(group, ids["from"], ids["host"])
    pool.fill_(255)
    host.copy_in(group, ids["host"], ids["to"])
    for source, target in zip(ids["from"], ids["to"], strict=True):
        assert torch.equal(before[source * unit :][:page], pool[target * unit :][:page])
