"""A request goes to the replica that answers it first, by exact hits; what is not known costs hits and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvframe_ray.directory import Directory
from kvframe_ray.feeds import Feeds
from kvframe_ray.placement import TOKENS_PER_REQUEST, Load, order_replicas
from kvframe_serve.engine_thread import EngineThread
from kvframe_serve.runner import EngineRequest

from kvframe import CacheCleared, CacheEvent, Engine, SamplingParams, Stack
from plugins.ray.tests.conftest import STACK

SECRET = bytes(range(32))
ONE = SamplingParams(max_new_tokens=1)


def request(token_ids: Sequence[int], salt: str = "") -> EngineRequest:
    return EngineRequest(prompt=token_ids, params=ONE, options={"cache_salt": salt, "owner": ""})


def test_the_replica_with_the_fewest_tokens_before_the_answer_is_chosen() -> None:
    loads = {"cold": Load(), "warm": Load()}
    assert ["warm", "cold"] == order_replicas(1000, {"warm": 800}, loads)
    loads["warm"] = Load(tokens=999)
    assert ["warm", "cold"] == order_replicas(1000, {"warm": 800}, loads)
    loads["warm"] = Load(tokens=1001)
    assert ["cold", "warm"] == order_replicas(1000, {"warm": 800}, loads)
    loads["warm"] = Load(requests=1000 // TOKENS_PER_REQUEST + 1)
    assert ["cold", "warm"] == order_replicas(1000, {"warm": 800}, loads)


def test_equal_replicas_take_turns_by_chance() -> None:
    loads = {"a": Load(), "b": Load()}
    assert {"a", "b"} == {order_replicas(10, {}, loads)[0] for _ in range(64)}


def test_requests_count_until_they_are_answered() -> None:
    directory = Directory()
    directory.send("r1", request([]), "a", 100)
    directory.send("r2", request([]), "a", 50)
    assert {"a": Load(150, 2), "b": Load(0, 3)} == directory.loads({"a": 1, "b": 3})
    directory.begin("r1")
    assert {"a": Load(50, 2)} == directory.loads({"a": 2})
    directory.send("r2", request([]), "b", 60)  # it was lost, and runs in another replica
    directory.end("r2", "a")
    directory.end("r1", "a")
    assert {"a": Load(), "b": Load(60, 1)} == directory.loads({"a": 0, "b": 1})


def num_expected(directory: Directory) -> int:
    return len(directory._expected._counts)


def test_the_prefixes_of_a_prompt_are_expected_until_events_have_come() -> None:
    directory, first, second = Directory(), [*range(70)], [*range(40), *range(100, 140)]
    directory.apply("a", SECRET, ())
    directory.send("r1", request(first), "a", 70)
    assert {"a": 64} == directory.hits(request(first))
    assert {"a": 32} == directory.hits(request(second))
    assert {} == directory.hits(request(second, salt="anna")) == directory.known_hits(request(second))
    directory.apply("a", SECRET, ())
    directory.begin("r1")
    directory.end("r1", "a")
    directory.apply("a", SECRET, ())  # it was on its way when the prompt was computed
    assert {"a": 32} == directory.hits(request(second))
    directory.apply("a", SECRET, ())
    assert {} == directory.hits(request(second))
    assert 0 == num_expected(directory)


def test_a_lost_or_refused_prompt_is_expected_no_longer() -> None:
    directory, tokens = Directory(), [*range(70)]
    directory.apply("a", SECRET, ())
    directory.apply("b", SECRET, ())
    directory.send("r1", request(tokens), "a", 70)
    directory.send("r2", request(tokens), "b", 70)
    directory.send("r1", request(tokens), "b", 70)  # "a" was lost, and "b" computes it
    assert {"b": 64} == directory.hits(request(tokens))
    directory.begin("r1")
    directory.remove("b")
    assert {} == directory.hits(request(tokens))
    directory.begin("r2")  # while "b" drains
    directory.send("r3", request(tokens), "a", 70)
    directory.end("r3", "a")
    assert {} == directory.hits(request(tokens))
    assert 0 == num_expected(directory)


class Replica:
    """An engine, its thread and its feeds, as in a replica of the deployment."""

    def __init__(self, checkpoint: Path) -> None:
        import tomllib

        tables = tomllib.loads(STACK)
        tables["cache"]["key"] = SECRET.hex()
        self.engine = Engine.from_pretrained(checkpoint, stack=Stack.from_mapping(tables))
        self.loop = asyncio.new_event_loop()
        self.thread = EngineThread(self.engine, self.loop)
        self.feeds = Feeds(self.thread, self.loop)

    def take(self, feed: AsyncIterator[list[CacheEvent]]) -> list[CacheEvent]:
        return self.loop.run_until_complete(anext(feed))

    def run(self, token_ids: Sequence[int]) -> int:
        """Run a request to its end; return the tokens that it found."""

        async def answered() -> int:
            outputs: asyncio.Queue[Any] = asyncio.Queue()
            await self.thread.add(request(token_ids), outputs.put_nowait)
            return int((await outputs.get()).cached.num_tokens)

        return self.loop.run_until_complete(answered())

    def close(self) -> None:
        self.thread.close()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


@pytest.fixture
def replica(checkpoint: Path) -> Iterator[Replica]:
    new_replica = Replica(checkpoint)
    yield new_replica
    new_replica.close()


def test_the_directory_says_what_the_engine_then_reports(replica: Replica) -> None:
    directory, first, second = Directory(), [*range(70)], [*range(40), *range(100, 140)]
    feed = replica.feeds.follow()
    directory.apply("a", SECRET, replica.take(feed))
    assert {"a": 0} == directory.hits(request(first))
    assert 0 == replica.run(first)
    directory.apply("a", SECRET, replica.take(feed))
    assert {"a": 64} == directory.hits(request(first))
    assert {"a": 32} == directory.hits(request(second))
    assert 32 == replica.run(second)
    assert 64 == replica.run(first)
    directory.remove("a")
    assert {} == directory.hits(request(first))


def test_a_follower_that_lags_begins_again(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframe_ray.feeds.MOST_EVENTS", 3)
    directory, prompts = Directory(), [[index] * 40 for index in range(6)]
    feed = replica.feeds.follow()
    directory.apply("a", SECRET, replica.take(feed))
    for prompt in prompts:
        replica.run(prompt)
    assert {"a": 0} == directory.hits(request(prompts[0]))
    with pytest.raises(StopAsyncIteration):
        replica.take(feed)
    events = replica.take(replica.feeds.follow())
    assert isinstance(events[0], CacheCleared)
    directory.apply("a", SECRET, events)
    assert [{"a": 32}] * 6 == [directory.hits(request(prompt)) for prompt in prompts]


def test_all_followers_get_all_events(replica: Replica) -> None:
    prompt, feeds, directories = [*range(50)], [], []
    for _ in range(2):
        feeds.append(replica.feeds.follow())
        directories.append(Directory())
        directories[-1].apply("a", SECRET, replica.take(feeds[-1]))
    replica.run(prompt)
    for feed, directory in zip(feeds, directories, strict=True):
        directory.apply("a", SECRET, replica.take(feed))
        assert {"a": 48} == directory.hits(request(prompt))


def test_a_prompt_without_events_ends_what_is_expected_of_it(replica: Replica) -> None:
    feed = replica.feeds.follow()
    replica.take(feed)
    replica.feeds.note_prompt()
    assert [] == replica.take(feed)


def test_without_followers_the_engine_records_nothing(replica: Replica) -> None:
    feed = replica.feeds.follow()
    replica.take(feed)
    assert replica.engine.on_cache_events is not None
    replica.loop.run_until_complete(feed.aclose())
    replica.run([1] * 40)
    assert replica.engine.on_cache_events is None
