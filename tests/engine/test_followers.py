"""A rank after rank 0 executes rank 0's commands: pages are copied, filled and moved, and steps are computed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from kvframe_engine.host_storage import HostStorage
from kvframe_engine.ranks.follower import Follower
from kvframe_engine.ranks.leader import Leader, LeadingHostStorage, LeadingStorage
from kvframe_engine.ranks.leading_pages import LeadingPages
from kvframe_engine.ranks.messages import StepMessage, TableEntries
from kvframe_engine.tiers.stored_pages import StoredPages

from kvframe.attention.batch_metadata import StepBatch
from kvframe.attention.storage import KVCacheStorage
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.cache.block_table import BlockTables
from kvframe.contract.errors import PlanError
from kvframe.contract.specs import LayerSpec
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import plan_cache
from tests.support.stores import SHELVES, Shelf, ShelfStore

GROUPING = group_layers([LayerSpec(name="0", spec=FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4))])
PLAN = plan_cache(GROUPING, memory_bytes=2**14, max_model_len=64, max_num_batched_tokens=16)
CPU = torch.device("cpu")


@attrs.define(eq=False)
class Runner:
    """Records what a rank computes.

    Attributes:
        seen: Of each step, its rows, the indices of the wanted logits, and the new inputs.
        num_drops: How often its graphs were dropped.
    """

    tokens: Any = attrs.field(factory=lambda: np.zeros((2, 8), dtype=np.int64))
    input_lens: dict[str, Any] = attrs.field(factory=lambda: {"encoder": np.zeros(2, dtype=np.int64)})
    seen: list[Any] = attrs.field(factory=list)
    num_drops: int = 0

    def drop_graphs(self) -> None:
        self.num_drops += 1

    def compute(self, batch: StepBatch, wanted: Any, new_inputs: Any) -> None:
        self.seen.append((batch.rows.tolist(), wanted.tolist(), new_inputs))


@attrs.define(eq=False)
class Two:
    """Rank 0's side of two ranks, and what rank 1 has."""

    leader: Leader
    thread: threading.Thread
    mine: tuple[LeadingStorage, LeadingHostStorage]
    own_pages: LeadingPages
    storage: KVCacheStorage
    host: HostStorage
    pages: StoredPages
    runner: Runner
    tables: BlockTables

    def end(self) -> None:
        """Close the engine on rank 0, and wait until rank 1 has executed every command."""
        self.leader.close()
        for pages in (self.own_pages, self.pages):
            pages.close(10.0)
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def two() -> Iterator[Two]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        leader = Leader({1: server.accept()[0]}, 2, lambda sentence: None)
    follower = Follower(1, 2, 2, other, lambda sentence: None)
    storage, own = KVCacheStorage(PLAN, GROUPING, CPU), LeadingStorage(leader, PLAN, GROUPING, CPU)
    host, own_host = HostStorage(PLAN, storage.pool, 2), LeadingHostStorage(leader, PLAN, own.pool, 2)
    runner: Any = Runner()
    tables = BlockTables(2, 16, [4])
    SHELVES.update(zero=Shelf(), one=Shelf())
    own_pages = LeadingPages(leader, own, [ShelfStore(shelf="zero")], bytes(32), lambda: ["rank 0"])
    pages = StoredPages(storage, [ShelfStore(shelf="one")], bytes(32), lambda: ["rank 1"])
    thread = threading.Thread(
        target=follower.follow, args=(runner, tables, storage, host, pages), kwargs={"max_step_seconds": 60.0}
    )
    thread.start()
    found = Two(leader, thread, (own, own_host), own_pages, storage, host, pages, runner, tables)
    yield found
    found.end()


def test_pages_are_filled_and_copied_on_every_rank_to_the_host_too(two: Two) -> None:
    own, own_host = two.mine
    own.fill(0, [1], 1.0)
    own.fill(0, [3], 3.0)
    own.copy_pages(0, [1], [2])
    own_host.copy_out(0, [3], [0])
    own.fill(0, [3], 5.0)
    own_host.copy_in(0, [0], [4])
    two.end()
    key = two.storage.views["0"]["k"]
    assert [0, 1, 1, 5, 3] == [int(key[page].unique()) for page in range(5)]
    assert torch.equal(own.pool, two.storage.pool)


KEYS = [bytes([number]) * 32 for number in range(3)]


def give(two: Two) -> None:
    """Give three pages to the stores of both ranks; each rank's pages have another content."""
    for block in range(3):
        two.mine[0].fill(0, [block + 1], float(block))
    two.own_pages.give(0, KEYS, [1, 2, 3])
    assert two.own_pages.flush(10.0)
    assert [3, 3] == [len(SHELVES[name].records) for name in ("zero", "one")]
    # The keys of the ranks differ, so that they may share a store.
    assert SHELVES["zero"].records.keys().isdisjoint(SHELVES["one"].records)


def test_pages_go_to_the_stores_of_every_rank_and_come_back(two: Two) -> None:
    give(two)
    assert [True, False] == two.own_pages.find(0, [(0, KEYS[0]), (0, b"x" * 32)])
    assert [True] * 3 == two.own_pages.read(0, 7, 0, [0, 1, 2], KEYS)
    two.own_pages.write(7, 0, [2, 0], [4, 5])
    assert two.own_pages.flush(10.0)
    assert {7} == two.pages._read_pages.keys()
    two.own_pages.release(7)
    two.end()
    key = two.storage.views["0"]["k"]
    assert [2, 0] == [int(key[page].unique()) for page in (4, 5)]
    assert torch.equal(two.mine[0].pool, two.storage.pool)
    assert {} == two.pages._read_pages == two.own_pages._read_pages


@pytest.mark.parametrize("name", ["zero", "one"])
def test_a_page_is_found_and_read_if_every_rank_has_its_share(two: Two, name: str) -> None:
    give(two)
    records = SHELVES[name].records
    del records[[*records][1]]
    assert [True, False, True] == two.own_pages.find(0, [(0, key) for key in KEYS])
    assert [True, False, True] == two.own_pages.read(0, 7, 0, [0, 1, 2], KEYS)
    SHELVES[name].failing = True
    assert [False] * 3 == two.own_pages.read(0, 7, 0, [0, 1, 2], KEYS)


def test_no_answer_is_taken_for_that_of_another_call(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    give(two)
    for pages, error in ((two.pages, RuntimeError), (two.own_pages, MemoryError)):
        with monkeypatch.context() as short:
            short.setattr(pages._readers[0], "find", raising(MemoryError("too little")))
            with pytest.raises(error, match="too little"):
                two.own_pages.find(0, [(0, KEYS[0])])
        assert [True, False] == two.own_pages.find(0, [(0, KEYS[0]), (0, b"x" * 32)])


def test_a_store_of_another_rank_that_takes_nothing_delays_no_command(two: Two) -> None:
    SHELVES["one"].gate.clear()
    two.mine[0].fill(0, [1], 1.0)
    two.own_pages.give(0, KEYS[:1], [1])
    assert not two.own_pages.flush(0.1)
    # Pages are dropped if too many wait, on each rank for itself.
    two.own_pages.give(0, KEYS[1:2], [2], 1)
    assert not two.own_pages.flush(0.1)
    SHELVES["one"].gate.set()
    assert two.own_pages.flush(10.0)
    assert [2, 1] == [len(SHELVES[name].records) for name in ("zero", "one")]
    assert 1 == two.pages.counts["shelf"].pages_dropped


def test_a_fetch_fails_when_the_ranks_have_ended(two: Two) -> None:
    two.end()
    for _ in range(2):
        with pytest.raises(OSError, match="ended"):
            two.own_pages.find(0, [(0, KEYS[0])])
    two.own_pages.release(7)
    assert two.own_pages.flush(0.1)


def raising(error: Exception) -> Any:
    def method(*arguments: Any) -> None:
        raise error

    return method


def test_a_pool_grows_and_shrinks_on_every_rank_keeps_its_bytes_and_drops_the_graphs(two: Two) -> None:
    own, _ = two.mine
    own.fill(0, [1], 1.0)
    for num_slabs in (PLAN.num_slabs + 3, PLAN.num_slabs - 1):
        plan = attrs.evolve(PLAN, num_slabs=num_slabs, memory_bytes=PLAN.memory_bytes + num_slabs)
        own.move(plan, own.reserve(plan))
    two.end()
    assert (plan, PLAN.num_slabs - 1) == (two.storage.plan, two.storage.num_slabs)
    assert 2 == two.runner.num_drops  # graphs hold the addresses of the pool before
    assert torch.equal(own.pool, two.storage.pool)


def test_a_rank_without_memory_for_a_larger_pool_says_so_and_keeps_its_own(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(plan: Any) -> Any:
        raise PlanError("there is no memory")

    monkeypatch.setattr(two.storage, "reserve", refuse)
    own, _ = two.mine
    with pytest.raises(PlanError, match="rank 1: there is no memory"):
        own.reserve(attrs.evolve(PLAN, num_slabs=PLAN.num_slabs + 1))
    two.end()
    assert PLAN == two.storage.plan


@pytest.mark.parametrize("wanted", [None, [0, 2]], ids=["generating", "others"])
def test_a_rank_computes_the_steps_of_rank_0(two: Two, wanted: list[int] | None) -> None:
    tables = BlockTables(2, 16, [4])
    tables.stacks[0].ids[0, 1, :2] = (7, 9)
    tokens = np.arange(16).reshape(2, 8)
    batch = StepBatch(
        rows=np.array([1]),
        num_computed=np.array([3]),
        query_lens=np.array([3]),
        generating_indices=np.array([2]),
        input_lens={"encoder": np.array([5])},
        stores_input={"encoder": np.array([True])},
    )
    indices: Any = batch.generating_indices if wanted is None else np.array(wanted)
    new_inputs: Any = {"encoder": {1: "an input"}}
    message = StepMessage.of(batch, indices, new_inputs, tokens, TableEntries(tables))
    two.leader.send_command("step", message)
    two.end()
    assert [([1], wanted or [2], new_inputs)] == two.runner.seen
    assert [[0] * 8, [0, 0, 0, 11, 12, 13, 0, 0]] == two.runner.tokens.tolist()
    assert [0, 5] == two.runner.input_lens["encoder"].tolist()
    assert [7, 9, 0, 0] == two.tables.stacks[0].ids[0, 1].tolist()
