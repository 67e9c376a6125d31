"""Swapping: a request's pages are copied to host memory and back into other pages, and no byte is lost."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.assembly import find_page_copier
from kvframe_engine.requests.output import RequestOutput
from kvframe_engine.requests.request import SamplingParams
from kvframe_engine.scheduling.stats import EngineStats
from kvframe_kernels.triton.pages import copy_pages
from kvframe_torch.backend import TorchBackend
from kvframe_transformers.testing import FAMILIES
from kvframe_triton.backend import TritonBackend
from kvframe_triton.latents import TritonMLABackend
from triton import knobs

from kvframe import Engine
from kvframe.attention.storage import HostStorage
from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.backend import AttentionBackend, PageCopier
from kvframe.contract.errors import PlanError
from kvframe.contract.specs import ENCODER, KVCacheSpec
from tests.cache.plans import encoder, evict_all, full, make_plan, ranged
from tests.cache.test_manager import SPECS
from tests.covering import cover_values, few
from tests.engine.test_scheduler_under_pressure import MAX_LEN, serve
from tests.models.serving import GREEDY, PROMPTS, TinyModel, Tokens, held_pages, ids
from tests.support.engines import manager_of, scheduler_of

interpreted = pytest.mark.skipif(
    not knobs.runtime.interpret, reason="a CUDA device is there, and the pool is not on it"
)

# --- failures ---------------------------------------------------------------------------------------------------------


class FailingPages:
    """Host pages without bytes, whose ``n``-th copies fail for ``n`` in ``failing``."""

    def __init__(self, num_slabs: int, failing: set[int]) -> None:
        self.num_slabs = num_slabs
        self.failing = failing
        self.num_copies = 0

    def copy_out(self, group: int, block_ids: Sequence[int], host_ids: Sequence[int]) -> None:
        self.num_copies += 1
        if self.num_copies in self.failing:
            raise RuntimeError("the copy failed")

    def copy_in(self, group: int, host_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        self.copy_out(group, block_ids, host_ids)


@given(
    specs=st.lists(SPECS, min_size=1, max_size=4),
    lengths=st.lists(st.tuples(st.integers(1, MAX_LEN - 1), st.integers(1, MAX_LEN)), min_size=1, max_size=6),
    spare_slabs=st.integers(0, 2),
    prefix_caching=st.booleans(),
    host_slabs=st.integers(0, 12),
    failing=st.sets(st.integers(1, 30)),
)
def test_every_request_ends_however_small_the_pool_and_the_host_and_whatever_fails(
    specs: list[KVCacheSpec],
    lengths: list[tuple[int, int]],
    spare_slabs: int,
    prefix_caching: bool,
    host_slabs: int,
    failing: set[int],
) -> None:
    pages = FailingPages(host_slabs, failing)
    stats = serve(specs, lengths, spare_slabs, prefix_caching, pages)
    assert stats.swaps <= stats.preemptions
    assert len({copy for copy in failing if copy <= pages.num_copies}) == stats.failed_swaps


# --- bytes ------------------------------------------------------------------------------------------------------------

MIXES: dict[str, list[KVCacheSpec]] = {
    "full": [full()],
    "window": [ranged(window=6)],
    "sinks": [ranged(window=6, num_sink_tokens=5)],
    "chunked": [ranged(chunk=7)],
    "every kind, pages of several sizes": [
        full(block_size=8, num_kv_heads=2),
        ranged(window=6),
        ranged(block_size=2, num_kv_heads=3, window=9, num_sink_tokens=5),
        ranged(chunk=7),
    ],
}


@pytest.mark.parametrize("mix", MIXES)
def test_bytes_are_equal_after_a_round_trip_into_other_pages(mix: str) -> None:
    plan = make_plan(*MIXES[mix], num_slabs=40)
    pool = torch.randint(0, 256, (plan.total_bytes,), dtype=torch.uint8)
    manager = KVCacheManager(plan, max_num_seqs=2, host_pages=HostStorage(plan, pool, 20))
    tokens = list(range(60))

    def pages(name: str) -> list[list[torch.Tensor | None]]:
        return [
            [pool[block_id * plan.block_id_bytes :][: group.page_bytes] if block_id else None for block_id in block_ids]
            for group, block_ids in zip(plan.groups, manager.block_ids(name), strict=True)
        ]

    manager.start("a", tokens)
    for num_computed in range(10, 31, 10):
        assert manager.extend("a", num_computed)
        manager.commit("a", tokens, num_computed)
    before = [[None if page is None else page.clone() for page in group] for group in pages("a")]
    places = manager.block_ids("a")
    num_bytes = sum(page.numel() for group in before for page in group if page is not None)
    assert manager.swap_out("a")
    assert (0, num_bytes) == (manager.num_held_pages, manager.stats.host_bytes_held)
    # Another request takes all pages, and overwrites them.
    manager.reset_prefix_cache()
    manager.start("b", [99])
    assert manager.extend("b", 64)
    pool.fill_(255)
    assert manager.swap_in("a", 31)
    assert 0 == manager.stats.host_bytes_held
    for was_at, is_at in zip(places, manager.block_ids("a"), strict=True):
        assert all(one != other or not one for one, other in zip(was_at, is_at, strict=False))
    for was, now in zip(before, pages("a"), strict=True):
        assert [page is None for page in was] == [page is None for page in now[: len(was)]]
        for one, other in zip(was, now, strict=False):
            assert one is None or (other is not None and torch.equal(one, other))
    # And no other bytes were written.
    copied = {
        group_pages[index].data_ptr()  # type: ignore[union-attr]
        for group_pages, was in zip(pages("a"), before, strict=True)
        for index, page in enumerate(was)
        if page is not None
    }
    others = pool.clone()
    for group, group_pages in zip(plan.groups, pages("a"), strict=True):
        for page in group_pages:
            if page is not None and page.data_ptr() in copied:
                others[page.storage_offset() : page.storage_offset() + group.page_bytes] = 255
    assert bool((others == 255).all())


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


def test_what_requests_share_is_shared_again() -> None:
    plan = make_plan(full(), num_slabs=16)
    pool = torch.randint(0, 256, (plan.total_bytes,), dtype=torch.uint8)
    manager = KVCacheManager(plan, max_num_seqs=2, host_pages=HostStorage(plan, pool, 8))
    for name, prompt in (("a", list(range(10))), ("b", [*range(8), 50, 51])):
        manager.start(name, prompt)
        assert manager.extend(name, 10)
        manager.commit(name, prompt, 10)
    assert 4 == manager.num_held_pages
    assert manager.swap_out("b")
    assert 3 == manager.num_held_pages
    assert manager.swap_in("b", 11)
    assert 4 == manager.num_held_pages
    assert manager.block_ids("a")[0][:2] == manager.block_ids("b")[0][:2]


def test_a_block_that_is_not_full_is_never_shared() -> None:
    plan = make_plan(full(), num_slabs=16)
    pool = torch.randint(0, 256, (plan.total_bytes,), dtype=torch.uint8)
    manager = KVCacheManager(plan, max_num_seqs=2, host_pages=HostStorage(plan, pool, 8))
    for name, num_computed in (("a", 6), ("b", 9)):
        manager.start(name, list(range(10)))
        assert manager.extend(name, num_computed)
        manager.commit(name, list(range(10)), num_computed)
    assert manager.swap_out("a")
    assert manager.swap_in("a", 7)
    (mine,), (others,) = manager.block_ids("a"), manager.block_ids("b")
    assert mine[0] == others[0]
    assert mine[1] != others[1]


def test_a_request_of_before_a_reset_shares_no_page_of_after() -> None:
    # The cache is reset when weights change: equal tokens then have other states.
    pages, tokens = FailingPages(10, set()), [*range(8), 9]
    manager = KVCacheManager(make_plan(full()), max_num_seqs=2, host_pages=pages)
    for name in ("old", "new"):
        manager.start(name, tokens)
        assert manager.extend(name, 9)
        manager.commit(name, tokens, 9)
        if name == "old":
            assert manager.swap_out("old")
            manager.reset_prefix_cache()
    assert manager.swap_in("old", 9)
    assert not {*manager.block_ids("old")[0]} & {*manager.block_ids("new")[0]}


def test_an_input_that_is_not_computed_gets_no_page_of_an_equal_one() -> None:
    plan, inputs = make_plan(full(), encoder(), num_slabs=40), {ENCODER: InputSequence(9, b"x")}
    manager = KVCacheManager(plan, max_num_seqs=2, host_pages=FailingPages(8, set()))
    for name in "ab":
        manager.start(name, [1, 2, 3], inputs=inputs)
        assert manager.extend(name, 3)
    assert manager.swap_out("a")
    manager.commit("b", [1, 2, 3], 3)
    assert manager.swap_in("a", 3)
    # The next step writes them.
    assert {ENCODER} == manager.missing_inputs("a")
    assert set(manager.block_ids("a")[1]).isdisjoint(manager.block_ids("b")[1])


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_prefix_that_comes_back_is_found_again_unless_the_cache_was_reset(is_reset: bool) -> None:
    plan = make_plan(full(), num_slabs=16)
    pool = torch.randint(0, 256, (plan.total_bytes,), dtype=torch.uint8)
    manager = KVCacheManager(plan, max_num_seqs=2, host_pages=HostStorage(plan, pool, 8))
    tokens = list(range(12))
    manager.start("a", tokens)
    assert manager.extend("a", 10)
    manager.commit("a", tokens, 10)
    assert manager.swap_out("a")
    # In both cases its pages are evicted; if others did it, the swapped state is still valid.
    if is_reset:
        manager.reset_prefix_cache()
    else:
        evict_all(manager)
    assert manager.swap_in("a", 11)
    manager.commit("a", tokens, 11)
    assert (0 if is_reset else 8) == manager.start("b", tokens)


def test_without_room_for_all_of_its_pages_a_request_stays_as_it_was() -> None:
    plan = make_plan(full(), num_slabs=16)
    pool = torch.zeros(plan.total_bytes, dtype=torch.uint8)
    manager = KVCacheManager(plan, max_num_seqs=1, host_pages=HostStorage(plan, pool, 1))
    num_tokens = 4 * plan.groups[0].pages_per_slab
    manager.start("a", list(range(60)))
    assert manager.extend("a", num_tokens + 1)
    before = manager.block_ids("a")
    assert not manager.swap_out("a")
    assert (before, 0) == (manager.block_ids("a"), manager.stats.host_bytes_held)
    manager.free("a")
    manager.start("b", list(range(60)))
    assert manager.extend("b", num_tokens)
    assert manager.swap_out("b")


def test_without_a_host_store_nothing_is_swapped() -> None:
    manager = KVCacheManager(make_plan(full()), max_num_seqs=1)
    manager.start("a", [1, 2])
    assert manager.extend("a", 2)
    assert not manager.swap_out("a")


# --- the engine -------------------------------------------------------------------------------------------------------

TIGHT = {"max_model_len": 96, "max_num_batched_tokens": 12, "block_size": 5, "max_num_seqs": 8}
SWAP = {"preemption": "swap", "host_memory": "1MiB"}


def tight_engine(model: TinyModel, **options: Any) -> Engine:
    options = {**TIGHT, "memory": model.tight_memory(75, **TIGHT), **options}
    return model.engine(**options)


def served(engine: Engine, expected: Tokens) -> EngineStats:
    """Serve the prompts to their ends, check the tokens, and that no block is held at the end."""
    with engine:
        assert expected == [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
        assert (0, 0) == (held_pages(engine), manager_of(engine).stats.host_bytes_held)
        return engine.stats()


@pytest.mark.parametrize(("family", "prefix_caching"), few(2, cover_values(FAMILIES, (True, False))))
def test_swapped_requests_give_the_same_tokens_and_are_not_computed_again(
    models: Any, references: Any, family: str, prefix_caching: bool
) -> None:
    model, expected = models(family), references(family)
    swapped = served(tight_engine(model, prefix_caching=prefix_caching, **SWAP), expected)
    assert swapped.preemptions == swapped.swaps > 0
    assert swapped.peak_host_bytes > 0
    recomputed = served(tight_engine(model, prefix_caching=prefix_caching), expected)
    assert (0, 0) == (recomputed.swaps, recomputed.peak_host_bytes)
    # Each token is computed once, except the last generated one, whose state is not needed.
    once = sum(map(len, PROMPTS)) + sum(len(tokens) - 1 for tokens in expected)
    assert once == swapped.computed_tokens + swapped.cached_prompt_tokens
    # A preempted request does not compute again what it hits; without hits, it computes everything again.
    assert recomputed.preemptions > 0
    assert once + (not prefix_caching) <= recomputed.computed_tokens + recomputed.cached_prompt_tokens


def test_swapping_where_every_layer_keeps_every_token(models: Any, references: Any) -> None:
    expected = references("gemma3_text")
    stats = served(tight_engine(models("gemma3_text"), hybrid=False, memory="128KiB", **SWAP), expected)
    assert stats.swaps > 0


def test_what_the_host_has_no_room_for_is_computed_again(models: Any, references: Any) -> None:
    expected, model = references("gemma3_text"), models("gemma3_text")
    with tight_engine(model) as engine:
        slabs = len(engine.plan.groups)
        memory = slabs * engine.plan.slab_bytes
    options = {"preemption": "swap", "prefix_caching": False}
    stats = served(tight_engine(model, host_memory=memory, **options), expected)
    assert 0 < stats.swaps < stats.preemptions
    assert stats.peak_host_bytes <= memory
    with pytest.raises(PlanError, match=f"each of the {slabs} groups needs one; give at least {memory} bytes"):
        tight_engine(model, host_memory=memory - 1, **options)


@pytest.mark.parametrize("direction", ["copy_out", "copy_in"])
def test_a_request_whose_copy_fails_is_computed_again(
    models: Any, references: Any, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = references("gemma3_text")
    copy, count = getattr(HostStorage, direction), iter(range(10**6))

    def fail_often(self: HostStorage, *arguments: Any) -> None:
        copy(self, *arguments)
        if next(count) % 3 == 1:
            raise RuntimeError("the device does not answer")

    monkeypatch.setattr(HostStorage, direction, fail_often)
    stats = served(tight_engine(models("gemma3_text"), **SWAP), expected)
    assert stats.failed_swaps > 0


def test_aborting_a_swapped_request_gives_its_host_memory_back(models: Any) -> None:
    with tight_engine(models("gemma3_text"), **SWAP) as engine:
        for start in range(3):
            engine.add_request(ids(start, 30), SamplingParams(max_new_tokens=40))
        while not any(request.is_swapped for request in scheduler_of(engine).waiting):
            engine.step()
        assert manager_of(engine).stats.host_bytes_held > 0
        for request in [request for request in scheduler_of(engine).waiting if request.is_swapped]:
            engine.abort(request.request_id)
        assert 0 == manager_of(engine).stats.host_bytes_held
        outputs: dict[str, RequestOutput] = {}
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in engine.step()}
        assert {"aborted", "length"} == {output.finish_reason for output in outputs.values()}
        assert 0 == held_pages(engine)
