"""Host storage: pages are copied to host memory and back, as few copies as their places allow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvframe_engine.assembly import find_page_copier
from kvframe_engine.host_storage import HostStorage
from kvframe_kernels.triton.pages import copy_pages
from kvframe_torch.backend import TorchBackend
from kvframe_triton.backend import TritonBackend
from kvframe_triton.latents import TritonMLABackend
from triton import knobs

from kvframe.contract.backend import AttentionBackend, PageCopier
from tests.cache.plans import full, make_plan, ranged

interpreted = pytest.mark.skipif(
    not knobs.runtime.interpret, reason="a CUDA device is there, and the pool is not on it"
)


def test_pages_side_by_side_are_one_copy() -> None:
    plan = make_plan(full(), num_slabs=8)
    host = HostStorage(plan, torch.zeros(plan.total_bytes, dtype=torch.uint8), 8)
    size = plan.groups[0].page_bytes // plan.block_id_bytes
    first = plan.null_bytes // plan.block_id_bytes
    block_ids = [first + size * index for index in (0, 1, 2, 5, 6)]
    host_ids = [first + size * index for index in (3, 4, 5, 6, 0)]
    page = plan.groups[0].page_bytes
    assert [3 * page, page, page] == [num_bytes for _, _, num_bytes in host._runs(0, block_ids, host_ids)]
    assert [] == list(host._runs(0, [], []))


@pytest.mark.parametrize("copier", [None, pytest.param(copy_pages, marks=interpreted)], ids=["torch", "triton"])
@pytest.mark.parametrize("num_staged", [0, 1, 2, 3, 100])
def test_pages_that_are_side_by_side_in_the_host_store_alone_go_through_a_buffer(
    num_staged: int, copier: PageCopier | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(full(num_kv_heads=2), ranged(window=6), num_slabs=12)
    page, size = plan.groups[0].page_bytes, plan.groups[0].page_bytes // plan.block_id_bytes
    pool = torch.randint(0, 256, (plan.total_bytes,), dtype=torch.uint8)
    before = pool.clone()
    calls = []

    def kernel(*tensors: torch.Tensor | None, **sizes: int) -> None:
        calls.append(sizes["num_pages"])
        with monkeypatch.context() as within:
            within.setattr(torch.Tensor, "copy_", copy)
            copy_pages(*tensors, **sizes)

    host = HostStorage(plan, pool, 12, num_staged * page, copy_pages=None if copier is None else kernel)
    host.bytes.zero_()
    first = plan.null_bytes // plan.block_id_bytes
    block_ids = [first + size * index for index in (4, 0, 7, 2, 1)]
    host_ids = [first + size * index for index in (2, 3, 4, 5, 0)]
    moved, copy = [], torch.Tensor.copy_

    def counted(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        moved.append(self)
        return copy(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    host.copy_out(0, block_ids, host_ids)
    # Four consecutive pages, as many at once as the buffer holds, and a single one.
    assert {0: 5, 1: 5, 2: 3, 3: 3, 100: 2}[num_staged] == len(moved)
    pages = host.bytes[: len(host.bytes) // page * page].view(-1, page)
    assert [0, 2, 3, 4, 5] == pages.any(1).nonzero().flatten().tolist()
    pool.zero_()
    host.copy_in(0, host_ids, block_ids)
    places = [slice(block_id * plan.block_id_bytes, block_id * plan.block_id_bytes + page) for block_id in block_ids]
    for place in places:
        assert torch.equal(before[place], pool[place])
        pool[place] = 0
    assert not pool.any()
    assert (copier is not None and num_staged > 1) is bool(calls)


@pytest.mark.parametrize(
    ("expected", "backends"),
    [(None, [TorchBackend]), (copy_pages, [TorchBackend, TritonBackend]), (copy_pages, [TritonMLABackend])],
    ids=["none", "the first that has one", "latents"],
)
def test_a_kernel_of_a_chosen_backend_copies_the_pages(expected: Any, backends: list[type[AttentionBackend]]) -> None:
    choices: list[Any] = [SimpleNamespace(backend_class=each, backend="x", layer="y") for each in backends]
    assert expected is find_page_copier(choices)
