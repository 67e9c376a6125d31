"""The connector's decisions against the definition: exactly what is live at the hit is moved, in each group."""

from __future__ import annotations

import importlib.util
import random
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from kvframe_stores import PageRecords

from kvframe import FullAttentionSpec, load_plugins
from kvframe.contract import AttentionSpec, KVCacheSpec, OpenPageStore, PageStore, TokenRange

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make vllm"),
    pytest.mark.filterwarnings("ignore"),
]

SECRET = bytes(32)
MOST = 96


@attrs.frozen(kw_only=True)
class FadingSpec(AttentionSpec):
    """Every eighth token until a token number, and the last five: ranges die in the middle, and before others."""

    kind = "fading"

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        old = [(start, start + 1) for start in range(0, max(0, n - 5), 8) if n < 40 or start % 16]
        return (*old, *([(max(0, n - 5), n)] if n else []))


@attrs.frozen(kw_only=True, eq=False)
class SetStore(PageStore):
    """A store that has a set of keys; it answers when ``gate`` is set."""

    name = "set"
    keys: set[bytes] = attrs.field(factory=set)
    gate: threading.Event = attrs.field(factory=threading.Event)

    def open(self, origin: str) -> OpenPageStore:
        return OpenSetStore(self)


class OpenSetStore(OpenPageStore):
    def __init__(self, store: SetStore) -> None:
        self.store = store

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        self.store.gate.wait()
        return [key in self.store.keys for key in keys]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return [False] * len(keys)

    def write(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        return 0

    def forget(self, keys: Sequence[bytes]) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait for a busy machine."""
    from kvframe_vllm.transfer import scheduling

    monkeypatch.setattr(scheduling, "LEAST_WAIT", 60.0)


def specs() -> list[KVCacheSpec]:
    """Return four types, in blocks of two sizes."""
    kinds = load_plugins().registry.specs
    window: Any = kinds.load("sliding_window")
    chunks: Any = kinds.load("chunked_local")
    return [
        FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8),
        window(block_size=4, window=10, num_sink_tokens=6, num_kv_heads=1, head_size=8),
        FadingSpec(block_size=8, num_kv_heads=1, head_size=8),
        chunks(block_size=4, chunk=12, num_kv_heads=1, head_size=8),
    ]


def hosted(spec: KVCacheSpec) -> Any:
    import torch
    from kvframe_vllm.adapter.cache import HostedSpec

    reported = SimpleNamespace(
        block_size=spec.block_size,
        num_kv_heads=1,
        head_size=8,
        head_size_v=8,
        dtype=torch.float32,
        page_size_padded=None,
    )
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=MOST), max_in_flight_tokens=7)
    return HostedSpec.over(reported, spec, config)


class Case:
    """A scheduler's part over a store, and one request."""

    def __init__(self, store: SetStore, num_tokens: int, *, loads: bool = True, saves: bool = True) -> None:
        from kvframe_vllm.transfer.scheduling import PrefixScheduler
        from kvframe_vllm.transfer.setup import Transfer

        self.specs = specs()
        groups = [hosted(spec) for spec in self.specs]
        transfer = Transfer([store], SECRET, groups, [[f"layers.{index}"] for index in range(len(groups))])
        self.scheduler = PrefixScheduler(transfer, loads=loads, saves=saves)
        self.scheduler.bind(SimpleNamespace(hash_block_size=4, null_block=SimpleNamespace(block_id=0)))
        self.scheduler.connect([("rank 0",), ("rank 1",)])
        self.ranks = [PageRecords(SECRET, (f"rank {rank}",)) for rank in range(2)]
        self.store = store
        self.request = SimpleNamespace(
            request_id="r",
            num_tokens=num_tokens,
            num_computed_tokens=0,
            block_hashes=[bytes([index]) * 32 for index in range(num_tokens // 4)],
            lora_request=None,
            mm_features=[],
            prompt_embeds=None,
        )
        self.scheduler.add(self.request)

    def key(self, group: int, block: int) -> bytes:
        """Return vLLM's key of a block: the hash of all tokens up to its end."""
        key: bytes = self.request.block_hashes[(block + 1) * self.specs[group].block_size // 4 - 1]
        return key

    def put(self, group: int, block: int, ranks: Sequence[int] = (0, 1)) -> None:
        self.store.keys.update(self.ranks[rank].key_of(group, self.key(group, block)) for rank in ranks)

    def count_found(self, num_local: int) -> int:
        while (num_found := self.scheduler.count_found(self.request, num_local)) is None:
            threading.Event().wait(0.001)
        return num_found

    def step(self, num_scheduled: int, block_ids: Sequence[Sequence[int]] = ()) -> Any:
        state = SimpleNamespace(get_block_ids=lambda request_id: block_ids)
        return self.scheduler.plan(
            SimpleNamespace(num_scheduled_tokens={"r": num_scheduled}, kv_connector_block_state=state)
        )


@pytest.fixture
def store() -> Iterator[SetStore]:
    store = SetStore()
    store.gate.set()
    yield store
    store.gate.set()


def test_the_longest_prefix_is_found_and_exactly_its_live_blocks_are_loaded(store: SetStore) -> None:
    num_hits = 0
    for seed in range(60):
        draw = random.Random(seed)
        store.keys.clear()
        case = Case(store, draw.randint(40, MOST))
        present = [
            {block for block in range(case.request.num_tokens // spec.block_size) if draw.random() < 0.97}
            for spec in case.specs
        ]
        for group, blocks in enumerate(present):
            for block in blocks:
                case.put(group, block)
        num_local = draw.choice([0, 0, 8, 24])

        def needed(group: int, num_tokens: int, first: int = num_local, case: Case = case) -> set[int]:
            spec = case.specs[group]
            live = {index for span in spec.live_blocks(num_tokens) for index in range(*span)}
            return {block for block in live if first // spec.block_size <= block < num_tokens // spec.block_size}

        # By the definition: tokens before the last, whole blocks of every group, each live block after vLLM's own hit.
        expected = max(
            num_tokens
            for num_tokens in range(num_local, case.request.num_tokens, 8)
            if num_tokens == num_local or all(needed(group, num_tokens) <= present[group] for group in range(4))
        )
        num_found = case.count_found(num_local)
        assert expected == num_local + num_found
        if not num_found:
            continue
        num_hits += 1
        block_ids = [[100 * group + block for block in range(MOST // 4)] for group in range(4)]
        case.scheduler.take_blocks(case.request, block_ids, num_found)
        (load,) = case.step(0).loads
        for group, pages in enumerate(load.groups):
            loaded = sorted(needed(group, expected))
            assert [case.key(group, block) for block in loaded] == pages.keys
            assert [block_ids[group][block] for block in loaded] == pages.block_ids
        case.scheduler.close()
    assert num_hits > 20


def test_a_block_that_one_rank_lacks_is_missing(store: SetStore) -> None:
    case = Case(store, 33)
    for group, spec in enumerate(case.specs):
        for block in range(32 // spec.block_size):
            case.put(group, block, (0,) if (group, block) == (0, 5) else (0, 1))
    assert 16 == case.count_found(0)  # block 5 begins at token 20, and a hit is a multiple of 8


def test_a_request_waits_for_a_store_for_a_moment_only(store: SetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvframe_vllm.transfer import scheduling

    monkeypatch.setattr(scheduling, "LEAST_WAIT", 0.2)
    store.gate.clear()
    case = Case(store, 33)
    assert case.scheduler.count_found(case.request, 0) is None
    assert 0 == case.count_found(0)


def test_a_request_whose_pages_did_not_arrive_is_computed_and_saved_again(store: SetStore) -> None:
    case = Case(store, 33)
    for group, spec in enumerate(case.specs):
        for block in range(32 // spec.block_size):
            case.put(group, block)
    assert 32 == case.count_found(0)
    ids = [[*range(1, 9)], [*range(1, 9)], [*range(1, 5)], [*range(1, 9)]]
    case.scheduler.take_blocks(case.request, ids, 32)
    case.scheduler.note_failed({"r"})
    assert 0 == case.scheduler.count_found(case.request, 0)
    assert 8 == len(case.step(33, ids).saves[0].keys)  # all blocks of full attention were to be loaded


def test_full_blocks_of_known_tokens_are_saved_once(store: SetStore) -> None:
    case = Case(store, 21)
    ids = [[1, 2, 3, 4, 5, 6], [0, 8, 9, 10, 11, 12], [20, 21, 22], [31, 32, 33, 34, 35, 36]]
    saves = case.step(17, ids).saves
    assert [1, 2, 3, 4] == saves[0].block_ids
    assert [case.key(0, block) for block in range(4)] == saves[0].keys
    assert [8, 9, 10] == saves[1].block_ids  # the null block has nothing
    assert [20, 21] == saves[2].block_ids
    case.request.num_computed_tokens = 17
    # Of the tokens 17 to 23, the last three are guesses.
    assert [[5], [11], [], [35]] == [pages.block_ids for pages in case.step(7, ids).saves]
    again = Case(store, 21)
    again.scheduler = case.scheduler
    case.scheduler.remove("r")
    case.scheduler.add(again.request)
    assert [[]] * 4 == [pages.block_ids for pages in again.step(21, ids).saves]


def test_an_engine_that_only_produces_asks_for_nothing_and_one_that_only_consumes_saves_nothing(
    store: SetStore,
) -> None:
    ids = [[*range(1, 9)]] * 4
    producer, consumer = Case(store, 33, loads=False), Case(store, 33, saves=False)
    for group, spec in enumerate(producer.specs):
        for block in range(32 // spec.block_size):
            producer.put(group, block)
    assert (0, 32) == (producer.count_found(0), consumer.count_found(0))
    assert [8, 0] == [len(case.step(33, ids).saves[0].keys) for case in (producer, consumer)]


@pytest.mark.parametrize("own", ["lora_request", "mm_features", "prompt_embeds"])
def test_a_request_whose_tokens_are_not_all_neither_finds_nor_saves(own: str, store: SetStore) -> None:
    case = Case(store, 33)
    for group, spec in enumerate(case.specs):
        for block in range(32 // spec.block_size):
            case.put(group, block)
    case.scheduler.remove("r")
    setattr(case.request, own, ["something"])
    case.scheduler.add(case.request)
    assert 0 == case.count_found(0)
    assert [[]] * 4 == [pages.keys for pages in case.step(33, [[*range(1, 9)]] * 4).saves]


def test_after_vllm_cleared_its_caches_the_stores_are_not_used(store: SetStore) -> None:
    case = Case(store, 33)
    for group, spec in enumerate(case.specs):
        for block in range(32 // spec.block_size):
            case.put(group, block)
    case.scheduler.switch_off()
    assert 0 == case.count_found(0)
    assert [[]] * 4 == [pages.keys for pages in case.step(33, [[*range(1, 9)]] * 4).saves]


def test_pages_are_all_layers_of_a_block_one_after_the_other() -> None:
    import torch
    from kvframe_vllm.transfer.pages import GroupPages

    # The second cache is not contiguous, as vLLM's are with padded pages; and its elements are smaller.
    first = torch.arange(4 * 6, dtype=torch.float32).reshape(4, 2, 3)
    second = torch.arange(4 * 8, dtype=torch.float16).reshape(4, 8)[:, :5]
    pages = GroupPages([first, second])
    assert 6 * 4 + 5 * 2 == pages.page_bytes
    read = pages.read([2, 0])
    assert first[2].flatten().numpy().tobytes() + second[2].numpy().tobytes() == read[0].numpy().tobytes()
    others = [first.clone(), second.clone()]
    pages.write([1, 3], read)
    assert torch.equal(first, others[0][[0, 2, 2, 0]])
    assert torch.equal(second, others[1][[0, 2, 2, 0]])


def test_pages_that_a_slow_store_does_not_take_are_dropped(store: SetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from kvframe_stores import PageWriter
    from kvframe_vllm.transfer import working
    from kvframe_vllm.transfer.messages import Pages
    from kvframe_vllm.transfer.setup import Transfer

    page_bytes = 4 * 6
    monkeypatch.setattr(working, "BYTES_AT_ONCE", 2 * page_bytes)
    free_bytes = iter([3 * page_bytes, page_bytes, 0, 0])
    monkeypatch.setattr(PageWriter, "free_bytes", property(lambda writer: next(free_bytes)))
    transfer = Transfer([store], SECRET, [hosted(specs()[0])], [["layers.0"]])
    mover = working.PageMover(transfer, {"layers.0": torch.ones(20, 2, 3)}, 20, ["rank 0"])
    mover.save([Pages([bytes([index]) * 32 for index in range(8)], [*range(8)])])
    assert 4 == mover.counts["set"].pages_dropped
    mover.close()


CACHE = {"enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256"}


@pytest.mark.parametrize(
    ("stack", "extra_config", "cache", "message"),
    [
        (None, {}, {}, "set KVFRAME_STACK to a stack file whose .cache. names page stores"),
        ({}, {}, {}, "needs a page store; set disk or stores in .cache."),
        ({"disk": {}}, {"stores": []}, {}, "takes no kv_connector_extra_config, and has stores"),
        ({"disk": {}}, {}, {"enable_prefix_caching": False}, "prefix caching is off in vLLM for this model"),
        ({"disk": {}}, {}, {"prefix_caching_hash_algo": "xxhash"}, "and 'xxhash' can: start vLLM with"),
        ({"disk": {}}, {}, {"pipeline": 2}, "pages of layers that pipeline parallelism divides"),
    ],
)
def test_what_cannot_be_used_is_refused(
    stack: dict[str, Any] | None,
    extra_config: dict[str, Any],
    cache: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    from kvframe_vllm import attach
    from kvframe_vllm.transfer.setup import make_transfer

    from kvframe import KVFrameError, Stack

    monkeypatch.setattr(attach, "_attached", {})
    if stack is not None:
        disk = {"disk": {"path": str(tmp_path), "size": "1MiB"}} if stack else {}
        attached_stack = Stack.from_mapping({"cache": disk})
        monkeypatch.setitem(
            attach._attached, "stack.toml", (attached_stack, load_plugins(attached_stack.plugins).registry)
        )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(**{**CACHE, **cache}),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra_config),
        parallel_config=SimpleNamespace(pipeline_parallel_size=cache.get("pipeline", 1)),
    )
    with pytest.raises(KVFrameError, match=message):
        make_transfer(config, SimpleNamespace(kv_cache_groups=[]))


def test_a_group_of_vllms_own_and_divided_blocks_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import torch
    from kvframe_vllm import attach
    from kvframe_vllm.transfer.pages import group_pages
    from kvframe_vllm.transfer.setup import Transfer, make_transfer

    from kvframe import KVFrameError, Stack

    attached_stack = Stack.from_mapping({"cache": {"disk": {"path": str(tmp_path), "size": "1MiB"}}})
    monkeypatch.setattr(
        attach, "_attached", {"stack.toml": (attached_stack, load_plugins(attached_stack.plugins).registry)}
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(**CACHE),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(), layer_names=["layers.0"])
    with pytest.raises(KVFrameError, match="pages of kvframe's layers only, and a group has SimpleNamespace"):
        make_transfer(config, SimpleNamespace(kv_cache_groups=[group]))
    transfer = Transfer([], SECRET, [], [["layers.0"]])
    with pytest.raises(KVFrameError, match=r"layer 'layers\.0' has 6 entries for 3 blocks"):
        group_pages(transfer, {"layers.0": torch.zeros(6, 2)}, 3)
