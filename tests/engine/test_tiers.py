"""Pages that left the device come back from host memory and page stores, and requests get the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_engine.tiers import tiers
from kvframe_engine.tiers.read_rate import ReadRate
from kvframe_stores import page_writer, sealed_store
from kvframe_testing.audit import audit

from kvframe import BlocksStored, CacheCleared, CacheEvent, Engine, Hints, Stack, load_plugins
from kvframe.contract.errors import StackError
from tests.covering import cover_values
from tests.models.serving import GREEDY, TinyModel, ids
from tests.support.engines import audit_host_tier, fetcher_of, held_pages, manager_of, scheduler_of, tiers_of
from tests.support.stores import SHELVES, OpenShelf, Shelf, shelf_plugin
from tests.support.waiting import waited_for

SYSTEM = ids(3, 37)
ASKED = [[*SYSTEM, *ids(6, 3)], [*SYSTEM, *ids(7, 19)]]
OTHERS = [ids(50 + index, 60) for index in range(8)]
FAMILIES = ["llama", "gemma3_text", "mamba2", "qwen3_next", "deepseek_v3"]
"""Full attention; windows and full attention; states; gated delta rules and full attention; latents."""

TIERS: dict[str, dict[str, Any]] = {
    "host": {"host_memory": "4MiB"},
    "store": {"stores": ["shelf"]},
    "both": {"host_memory": "64KiB", "stores": ["shelf"]},
}


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return made(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return made(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(autouse=True)
def shelf() -> Iterator[Shelf]:
    """The content of the store, empty at first."""
    SHELVES.clear()
    yield SHELVES.setdefault("one", Shelf())
    SHELVES["one"].gate.set()


@pytest.fixture(autouse=True)
def _without_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no measured time decide what is fetched."""
    monkeypatch.setattr(tiers, "LEAST_TOKENS", 1 << 60)


def made(folder: Path, family: str) -> TinyModel:
    registry = load_plugins(plugins=[shelf_plugin()]).registry
    return attrs.evolve(TinyModel.save(folder, family), registry=registry)


def small_engine(model: TinyModel, **options: Any) -> Engine:
    """Return an engine whose pool is about as large as one request."""
    limits: dict[str, Any] = {"block_size": 4, "max_model_len": 80}
    return model.engine(memory=model.tight_memory(72, **limits), audit=True, **limits, **options)


def tokens(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(prompts, GREEDY)]


def expected(model: TinyModel, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    with model.engine(block_size=4, prefix_caching=False) as engine:
        return tokens(engine, prompts)


@pytest.mark.parametrize(("tiny", "name"), cover_values(FAMILIES, TIERS), indirect=["tiny"])
def test_evicted_prefixes_come_back(tiny: TinyModel, name: str) -> None:
    asked, others = expected(tiny, ASKED), expected(tiny, OTHERS)
    with small_engine(tiny, **TIERS[name]) as engine:
        assert asked == tokens(engine, ASKED)
        assert others == tokens(engine, OTHERS)
        assert engine.flush_page_stores()
        for prompt, generated in zip(ASKED, asked, strict=True):
            (output,) = engine.generate([prompt], GREEDY)
            assert generated == output.token_ids
            assert output.cached is not None
            assert 0 < output.cached.restored_tokens <= output.cached.num_tokens
            assert set(output.cached.restored_from) <= {"host_memory", "shelf"}
        assert 0 == held_pages(engine)
        audit(manager_of(engine))
        if tiers_of(engine).host_tier is not None:
            audit_host_tier(tiers_of(engine).host_tier)


def test_one_engine_computes_prompts_and_another_generates(tiny: TinyModel) -> None:
    asked = expected(tiny, ASKED)
    with tiny.engine(block_size=4, stores=["shelf"]) as first:
        first.generate(ASKED, attrs.evolve(GREEDY, max_new_tokens=1))
        assert first.flush_page_stores()
    with tiny.engine(block_size=4, stores=["shelf"]) as second:
        outputs = second.generate(ASKED, GREEDY)
        assert asked == [output.token_ids for output in outputs]
        for prompt, output in zip(ASKED, outputs, strict=True):
            assert output.cached is not None
            # All whole blocks but the last token's, as if this engine had computed the prompt itself.
            alignment = second.plan.alignment
            assert (len(prompt) - 1) // alignment * alignment == output.cached.num_tokens


def test_an_engine_with_another_secret_finds_nothing(llama: TinyModel, shelf: Shelf) -> None:
    for digit in "12":
        with llama.engine(block_size=4, stores=["shelf"], key=digit * 64) as engine:
            (output,) = engine.generate(ASKED[:1], GREEDY)
            assert output.cached is not None
            assert 0 == output.cached.num_tokens
            assert engine.flush_page_stores()
    assert 2 == len(shelf.origins)


@pytest.mark.parametrize("lie", ["another byte", "another record", "nothing"])
def test_a_store_that_lies_is_found_out(llama: TinyModel, shelf: Shelf, lie: str) -> None:
    asked = expected(llama, ASKED)
    with llama.engine(block_size=4, stores=["shelf"]) as engine:
        assert asked == tokens(engine, ASKED)
        assert engine.flush_page_stores()
    any_record = next(iter(shelf.records.values()))
    shelf.change = {
        "another byte": lambda _, record: record[:-1] + bytes([record[-1] ^ 1]),
        "another record": lambda _, record: any_record if record != any_record else bytes(len(record)),
        "nothing": lambda _, record: b"",
    }[lie]
    with llama.engine(block_size=4, stores=["shelf"]) as engine:
        outputs = engine.generate(ASKED, GREEDY)
        assert asked == [output.token_ids for output in outputs]
        assert [0, 0] == [output.cached.restored_tokens for output in outputs if output.cached is not None]
        refused = engine.stats().stores["shelf"].pages_refused
        assert (refused > 0) == (lie != "nothing")


def test_a_store_that_fails_costs_hits_only(llama: TinyModel, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_store, "FIRST_REST", 0.0)
    asked = expected(llama, ASKED)
    with llama.engine(block_size=4, stores=["shelf"]) as engine:
        shelf.failing = True
        assert asked == tokens(engine, ASKED)
        assert engine.flush_page_stores()
        assert {} == shelf.records
        assert engine.stats().stores["shelf"].failures > 0
        shelf.failing = False
        engine.reset_prefix_cache()
        assert asked == tokens(engine, ASKED)
        assert engine.flush_page_stores()
        assert len(shelf.records) > 0


def test_a_store_that_never_answers_delays_a_request_only_shortly(
    llama: TinyModel, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "LEAST_WAIT", 0.25)
    asked = expected(llama, ASKED)
    with llama.engine(block_size=4, stores=["shelf"]) as engine:
        shelf.gate.clear()
        # Without a limit, this would wait for ever.
        assert asked == tokens(engine, ASKED)
        assert 2 == engine.stats().waits_in_vain
        # The call still lasts, so that further requests do not wait for it.
        tokens(engine, OTHERS[:2])
        assert 2 == engine.stats().waits_in_vain
        assert 0 == held_pages(engine)
        shelf.gate.set()


def test_host_memory_is_used_if_a_store_is_late(
    llama: TinyModel, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "LEAST_WAIT", 0.25)
    asked = expected(llama, ASKED[:1])
    with small_engine(llama, stores=["shelf"], host_memory="4MiB") as engine:
        assert asked == tokens(engine, ASKED[:1])
        tokens(engine, OTHERS[:2])
        assert engine.flush_page_stores()
        shelf.gate.clear()
        # The store is asked for the block that follows, which host memory has not.
        (output,) = engine.generate([[*ASKED[0], *ids(9, 9)]], GREEDY)
        assert output.cached is not None
        assert ("host_memory",) == output.cached.restored_from
        assert 1 == engine.stats().waits_in_vain
        shelf.gate.set()


def test_a_full_store_is_not_taken_for_one_that_works(
    llama: TinyModel, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(store: OpenShelf, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        raise OSError("the shelf is full")

    monkeypatch.setattr(sealed_store, "FIRST_REST", 1e-9)
    monkeypatch.setattr(OpenShelf, "write", refuse)
    with llama.engine(block_size=4, stores=["shelf"]) as engine:
        for prompt in (*ASKED, *OTHERS):
            tokens(engine, [prompt])
            assert engine.flush_page_stores()
        counts = engine.stats().stores["shelf"]
        assert counts.failures > 5
        assert 0 == counts.pages_stored < counts.pages_dropped
    # It is said once, and not that it works again whenever a record was looked up.
    assert 1 == sum("the shelf is full" in record.getMessage() for record in caplog.records)
    assert not [record for record in caplog.records if record.getMessage().endswith("'shelf' works again")]


def test_too_little_memory_ends_no_thread(llama: TinyModel, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = expected(llama, ASKED)
    with llama.engine(block_size=4, stores=["shelf"]) as engine:
        with monkeypatch.context() as short:
            for method in ("find", "write"):
                short.setattr(sealed_store.SealedStore, method, raising(MemoryError()))
            assert asked == tokens(engine, ASKED)
            assert engine.flush_page_stores()
            assert ({}, 0) == (shelf.records, engine.stats().waits_in_vain)
        tokens(engine, OTHERS)
        assert engine.flush_page_stores()
        assert len(shelf.records) > 0


def raising(error: BaseException) -> Any:
    def method(*arguments: Any) -> None:
        raise error

    return method


def test_pages_larger_than_a_step_takes_are_given_too(
    llama: TinyModel, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "BYTES_A_STEP", 1)
    with llama.engine(block_size=4, stores=["shelf"]) as engine:
        engine.add_request(OTHERS[1], attrs.evolve(GREEDY, max_new_tokens=40))
        engine.add_request(ASKED[0], attrs.evolve(GREEDY, max_new_tokens=1))
        while scheduler_of(engine).has_work:
            engine.step()
            if len(scheduler_of(engine).running) == 1 and waited_for(lambda: len(shelf.records) > 0, 0.1):
                break
        assert len(scheduler_of(engine).running) == 1
        assert len(shelf.records) > 0


def test_pages_of_changed_weights_are_not_found(llama: TinyModel, shelf: Shelf) -> None:
    with llama.engine(block_size=4, stores=["shelf"], host_memory="1MiB") as engine:
        tokens(engine, ASKED)
        assert engine.flush_page_stores()
        model: Any = llama.loaded
        with torch.no_grad():
            model.model.model.embed_tokens.weight.mul_(1.5)
        try:
            engine.weights_changed()
            (output,) = engine.generate(ASKED[:1], GREEDY)
            assert output.cached is not None
            assert 0 == output.cached.num_tokens
        finally:
            with torch.no_grad():
                model.model.model.embed_tokens.weight.div_(1.5)
    assert 2 == len(shelf.origins)


def test_host_memory_forgets_pages_of_other_weights(llama: TinyModel) -> None:
    with small_engine(llama, host_memory="1MiB") as engine:
        tokens(engine, [*ASKED, *OTHERS])
        assert engine.stats().host_blocks > 0
        engine.reset_prefix_cache()
        audit_host_tier(tiers_of(engine).host_tier)
        assert 0 == engine.stats().host_blocks
        (output,) = engine.generate(ASKED[:1], GREEDY)
        assert output.cached is not None
        assert 0 == output.cached.num_tokens


def test_what_a_store_lost_is_given_to_it_again(llama: TinyModel, shelf: Shelf) -> None:
    with small_engine(llama, stores=["shelf"]) as engine:
        tokens(engine, ASKED[:1])
        assert engine.flush_page_stores()
        kept = set(shelf.records)
        shelf.records.clear()
        tokens(engine, OTHERS)
        tokens(engine, ASKED[:1])
        assert engine.flush_page_stores()
        # Pages that were still on the device are not given again.
        assert len(kept & set(shelf.records)) > 0


def test_pages_that_no_store_takes_in_time_stay_on_the_device(
    llama: TinyModel, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_writer, "MAX_QUEUED_BYTES", 0)
    asked = expected(llama, ASKED)
    with llama.engine(block_size=4, stores=["shelf"], max_num_seqs=1) as engine:
        assert asked == tokens(engine, ASKED)
        assert engine.flush_page_stores()
        # While the second request ran, nothing was queued; at its end, all pages were.
        assert 0 == engine.stats().stores["shelf"].pages_dropped
        assert len(shelf.records) == engine.stats().stores["shelf"].pages_stored > 10


def test_fetched_pages_that_a_reset_made_useless_are_dropped(llama: TinyModel, shelf: Shelf) -> None:
    with llama.engine(block_size=4, stores=["shelf"]) as engine:
        asked = tokens(engine, ASKED[:1])
        assert engine.flush_page_stores()
        engine.reset_prefix_cache()
        fetcher = fetcher_of(engine)
        engine.add_request(ASKED[0], GREEDY)
        assert waited_for(lambda: fetcher.num_waiting_bytes > 0)
        engine.reset_prefix_cache()
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        assert asked == [output.token_ids for output in outputs if output.finish_reason is not None]
        # Otherwise the fetcher would stop in the end, because too many bytes wait.
        assert 0 == fetcher.num_waiting_bytes


@pytest.mark.parametrize("is_on_device", [True, False])
def test_what_is_evicted_while_a_request_waits_is_fetched_again(llama: TinyModel, is_on_device: bool) -> None:
    """Other requests evict its first pages after the others were fetched, or all after none had to be."""
    asked = expected(llama, ASKED[1:])
    with small_engine(llama, stores=["shelf"]) as engine:
        assert asked == tokens(engine, ASKED[1:])
        assert engine.flush_page_stores()
        if not is_on_device:
            tokens(engine, [ids(90, 40)])
        engine.add_request(OTHERS[0], GREEDY)
        name = engine.add_request(ASKED[1], GREEDY)
        # Otherwise the second request could start before the first one.
        assert waited_for(lambda: all(map(tiers.Tiers.is_ready, scheduler_of(engine).waiting)))
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        (output,) = [output for output in outputs if output.request_id == name and output.finish_reason is not None]
        assert asked == [output.token_ids]
        assert output.cached is not None
        assert (52, True) == (output.cached.num_tokens, output.cached.restored_tokens > 0)
        assert 0 == held_pages(engine)


def test_a_store_without_a_secret_needs_a_key(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.stores.ShelfStore.local_secret", lambda self: None)
    with pytest.raises(StackError, match=r"page store 'shelf' keeps no secret, .*; set key in \[cache\]"):
        llama.engine(stores=["shelf"])
    llama.engine(stores=["shelf"], key="7" * 64).close()


def test_nothing_is_kept_without_prefix_caching(llama: TinyModel, shelf: Shelf) -> None:
    with llama.engine(stores=["shelf"], prefix_caching=False) as engine:
        tokens(engine, ASKED)
        assert engine.flush_page_stores()
    assert ({}, set()) == (shelf.records, shelf.origins)
    assert Stack().page_stores == ()


@pytest.mark.parametrize("tiers", TIERS)
def test_events_tell_what_is_on_the_device(llama: TinyModel, tiers: str) -> None:
    held: set[tuple[int, bytes]] = set()

    def listen(events: Sequence[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, CacheCleared):
                held.clear()
            elif event.medium != "device":
                assert event.medium == "host_memory"
                assert tiers != "store"
            elif isinstance(event, BlocksStored):
                assert held.isdisjoint((event.group, key) for key in event.keys)
                held.update((event.group, key) for key in event.keys)
            else:
                held.difference_update((event.group, key) for key in event.keys)

    with small_engine(llama, **TIERS[tiers]) as engine:
        engine.on_cache_events = listen
        tokens(engine, ASKED[1:])
        of_prompt = set(held)
        tokens(engine, OTHERS)
        assert engine.flush_page_stores()
        assert not of_prompt <= held
        (output,) = engine.generate(ASKED[1:], GREEDY)
        assert output.cached is not None
        assert output.cached.restored_tokens > 0
        assert of_prompt <= held
        replayed = set(held)
        engine.on_cache_events = listen  # a new listener gets all that is cached
        assert replayed == held


# --- what is worth it -------------------------------------------------------------------------------------------------


def test_a_rate_follows_faster_reads_at_once_and_slower_ones_slowly() -> None:
    rate = ReadRate()
    assert 0.0 == rate.seconds(100)
    rate.note(1.0, 0)
    rate.note(10.0, 10)
    assert 5.0 == rate.seconds(5)
    rate.note(1.0, 10)
    assert 0.5 == rate.seconds(5)
    rate.note(6.0, 10)
    assert pytest.approx(1.0) == rate.seconds(5)
    rate.note_skip()
    assert pytest.approx(0.9) == rate.seconds(5)


@pytest.mark.parametrize("tiers", ["host", "store"])
def test_what_takes_longer_to_bring_than_to_compute_is_computed(
    llama: TinyModel, tiers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = expected(llama, ASKED)
    with small_engine(llama, **TIERS[tiers]) as engine:
        of_engine = tiers_of(engine)
        rounds = []
        for _ in range(3):
            assert asked == tokens(engine, ASKED)
            tokens(engine, OTHERS)
            assert engine.flush_page_stores()
            rounds.append(engine.stats().restored_tokens)
            # From the second round on, bytes have been read. Tokens that take no time are always computed.
            if len(rounds) == 2:
                monkeypatch.setattr("kvframe_engine.tiers.tiers.LEAST_TOKENS", 1)
                of_engine.after_step(1 << 60, 0.0, is_last=True)
                monkeypatch.setattr("kvframe_engine.tiers.tiers.LEAST_TOKENS", 1 << 60)
        assert 0 < rounds[1] - rounds[0]
        assert 0 == rounds[2] - rounds[1]


ONE_OFF = Hints(keep_seconds=0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_is_not_needed_again_goes_to_no_tier(tmp_path: Path, shelf: Shelf, family: str) -> None:
    tiny = made(tmp_path, family)
    params = attrs.evolve(GREEDY, max_new_tokens=1)
    with small_engine(tiny, host_memory="4MiB", stores=["shelf"], eviction="scan_resistant") as engine:
        engine.generate(OTHERS[:4], params, hints=ONE_OFF)
        assert engine.flush_page_stores()
        assert (0, 0) == (len(shelf.records), engine.stats().host_blocks)
        assert engine.stats().evictions > 0


def test_stores_get_pages_that_a_later_request_needs_when_they_are_evicted(llama: TinyModel, shelf: Shelf) -> None:
    params = attrs.evolve(GREEDY, max_new_tokens=1)
    with small_engine(llama, stores=["shelf"], eviction="scan_resistant") as engine:
        engine.generate(ASKED[:1], params, hints=ONE_OFF)
        engine.generate(ASKED[:1], params)
        assert 0 == len(shelf.records)
        engine.generate(OTHERS[:2], params, hints=ONE_OFF)
        assert engine.stats().evictions > 0
        pages = tiers_of(engine)._pages
        assert pages is not None
        assert pages.flush(10.0)
        assert len(shelf.records) > 0
        assert engine.flush_page_stores()
        assert (len(ASKED[0]) - 1) // 4 == len(shelf.records)
