"""Over real sockets, an index follows the caches of engines, whatever is lost, late or gone in between."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
from kvframe_zmq import Subscriber, ZmqPublisher, decode_batch, encode_batch
from kvframe_zmq.publisher import OpenZmqPublisher
from kvframe_zmq.wire import END

from kvframe import CacheCleared, CacheLayout, FullAttentionSpec, KVCacheManager, group_layers, plan_cache
from kvframe.contract import LayerSpec
from kvframe.routing import EventBatch, PrefixIndex, from_plain, to_plain
from tests.support.ports import free_port
from tests.support.waiting import eventually

SECRET = bytes(range(32))
TOKENS = [*range(21)]


def addresses() -> tuple[str, str]:
    return f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"


class Cache:
    """A cache whose events are published."""

    def __init__(self, address: tuple[str, str], **options: Any) -> None:
        layers = [LayerSpec(name="layer", spec=FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4))]
        plan = plan_cache(group_layers(layers), memory_bytes=1 << 14, max_model_len=64, max_num_batched_tokens=64)
        self.manager = KVCacheManager(plan, max_num_seqs=2)
        self.log = self.manager.record_events(SECRET)
        publisher = ZmqPublisher(endpoint=address[0], replay=address[1], **options)
        opened = publisher.open()
        assert isinstance(opened, OpenZmqPublisher)
        self.opened = opened
        self.publish()

    def publish(self) -> None:
        if events := to_plain(self.log.take()):
            self.opened.publish(events)

    def serve(self, tokens: Sequence[int]) -> None:
        self.manager.start("a", tokens)
        assert self.manager.extend("a", len(tokens))
        self.manager.commit("a", tokens, len(tokens))
        self.manager.free("a")
        self.publish()


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def cache_at(closing: ExitStack, address: tuple[str, str], **options: Any) -> Cache:
    cache = Cache(address, **options)
    closing.callback(lambda: cache.opened.close() if not cache.opened._is_closing.is_set() else None)
    return cache


def follow(closing: ExitStack, engines: Mapping[str, tuple[str, str]], interval: float = 0.1) -> Subscriber:
    subscriber = Subscriber(PrefixIndex(SECRET), engines, interval=interval)
    closing.callback(subscriber.close)
    subscriber.start()
    return subscriber


def raw_socket(closing: ExitStack, kind: int) -> Any:
    socket = zmq.Context.instance().socket(kind)
    closing.callback(socket.close, linger=0)
    return socket


def hits_are(subscriber: Subscriber, tokens: Sequence[int], **expected: int) -> None:
    eventually(lambda: expected == subscriber.index.hits(tokens))


# --- following --------------------------------------------------------------------------------------------------------


def test_engines_are_followed_whenever_they_start(closing: ExitStack) -> None:
    ends = {"one": addresses(), "two": addresses()}
    first_cache = cache_at(closing, ends["one"])
    first_cache.serve(TOKENS)
    subscriber = follow(closing, ends)
    hits_are(subscriber, TOKENS, one=20)
    two = cache_at(closing, ends["two"])
    two.serve(TOKENS[:9])
    hits_are(subscriber, TOKENS, one=20, two=8)
    for branch in range(1, 5):
        prompt = [*TOKENS[:8], *[branch] * 13]
        first_cache.serve(prompt)
        two.serve(prompt)
        hits_are(subscriber, prompt, one=first_cache.manager.find(prompt), two=two.manager.find(prompt))
    first_cache.manager.reset_prefix_cache()
    first_cache.publish()
    hits_are(subscriber, TOKENS, one=0, two=two.manager.find(TOKENS))
    subscriber.remove("two")
    hits_are(subscriber, TOKENS, one=0)
    subscriber.add("three", ends["two"])
    hits_are(subscriber, TOKENS, one=0, three=two.manager.find(TOKENS))
    assert None is subscriber.seconds_silent("two")
    assert subscriber.seconds_silent("one") is not None


def test_the_replay_socket_is_found_beside_the_other(closing: ExitStack, tmp_path: Any) -> None:
    address = f"ipc://{tmp_path}/events"
    publisher = ZmqPublisher(endpoint=address)
    assert (f"{address}.replay", "tcp://10.0.0.1:5558") == (
        publisher.replay_endpoint,
        ZmqPublisher(endpoint="tcp://10.0.0.1:5557").replay_endpoint,
    )
    cache = cache_at(closing, (address, publisher.replay_endpoint))
    cache.serve(TOKENS)
    subscriber = Subscriber(PrefixIndex(SECRET), {"one": address}, interval=0.1)
    closing.callback(subscriber.close)
    subscriber.start()
    hits_are(subscriber, TOKENS, one=20)


def test_a_publisher_may_connect_to_a_consumer(closing: ExitStack) -> None:
    address = addresses()
    consumer = raw_socket(closing, zmq.SUB)
    consumer.subscribe(b"kv")
    consumer.bind(address[0])
    cache = cache_at(closing, address, connect=True, topic="kv@one")

    def has_come() -> bool:
        cache.opened.publish([{"type": "removed", "group": 0, "keys": (b"k",), "medium": "device"}])
        return bool(consumer.poll(20))

    eventually(has_come)
    topic, number, payload = consumer.recv_multipart()
    batch = decode_batch(payload)
    assert (b"kv@one", batch.number) == (topic, int.from_bytes(number, "big"))


def test_tokens_are_sent_only_if_they_are_asked_for() -> None:
    cleared = CacheCleared(layout=CacheLayout(alignment=4, max_tokens=64, groups=()))
    stored_events = from_plain(
        [{"type": "stored", "group": 0, "keys": [b"k"], "block_size": 4, "tokens": [70, 71, 72, 73], "salt": "s"}]
    )
    batch = EventBatch(b"epoch", 3, [cleared, *stored_events])
    assert batch == decode_batch(encode_batch(batch, with_tokens=True))
    without = decode_batch(encode_batch(batch))
    assert ((), b"epoch", 3) == (without.events[-1].tokens, without.epoch, without.number)  # type: ignore[union-attr]


# --- faults -----------------------------------------------------------------------------------------------------------


class Lossy:
    """A socket that loses every second message."""

    def __init__(self, sender: Any) -> None:
        self.sender, self.num_messages = sender, 0

    def send_multipart(self, frames: Any, flags: int) -> None:
        self.num_messages += 1
        if self.num_messages % 2:
            self.sender.send_multipart(frames, flags)

    def close(self) -> None:
        self.sender.close()


def test_lost_messages_are_got_again(closing: ExitStack) -> None:
    ends = {"one": addresses()}
    cache = cache_at(closing, ends["one"])
    subscriber = follow(closing, ends)
    hits_are(subscriber, TOKENS, one=0)
    cache.opened._sender = lossy = Lossy(cache.opened._sender)  # type: ignore[assignment]
    for branch in range(8):
        prompt = [branch, *TOKENS]
        cache.serve(prompt)
        hits_are(subscriber, prompt, one=cache.manager.find(prompt))
    assert lossy.num_messages >= 8


def keys_of(index: PrefixIndex) -> set[bytes]:
    return {key for event in index.snapshot("one")[1:] for key in event.keys}  # type: ignore[union-attr]


@pytest.mark.parametrize("buffer", [20, 20_000])
def test_a_subscriber_that_lags_by_10_000_batches_catches_up(buffer: int, closing: ExitStack) -> None:
    ends = {"one": addresses()}
    cache = cache_at(closing, ends["one"], buffer=buffer, queue=50)
    subscriber = follow(closing, ends)
    hits_are(subscriber, TOKENS, one=0)
    with subscriber.index._lock:  # the subscriber's thread waits
        for number in range(10_000):
            key = number.to_bytes(32, "big")
            event: dict[str, Any] = {"group": 0, "keys": (key,), "medium": "device"}
            cache.opened.publish([{"type": "stored", "block_size": 4, **event}])
            if number % 3:
                cache.opened.publish([{"type": "removed", **event}])
    expected = {number.to_bytes(32, "big") for number in range(0, 10_000, 3)}
    eventually(lambda: keys_of(subscriber.index) == expected)


def test_an_engine_that_starts_again_is_followed_again(closing: ExitStack) -> None:
    ends = {"one": addresses()}
    cache = cache_at(closing, ends["one"])
    cache.serve(TOKENS)
    subscriber = follow(closing, ends)
    hits_are(subscriber, TOKENS, one=20)
    cache.opened.close()
    # While the engine is gone, the index says what it knows.
    assert {"one": 20} == subscriber.index.hits(TOKENS)
    cache = cache_at(closing, ends["one"])
    hits_are(subscriber, TOKENS, one=0)
    cache.serve(TOKENS[:13])
    hits_are(subscriber, TOKENS, one=12)


def test_a_subscriber_that_reads_nothing_holds_nobody(closing: ExitStack) -> None:
    address = addresses()
    cache = cache_at(closing, address, queue=10, buffer=10)
    stuck = raw_socket(closing, zmq.SUB)
    stuck.set_hwm(1)
    stuck.subscribe(b"")
    stuck.connect(address[0])
    gone = raw_socket(closing, zmq.DEALER)
    gone.connect(address[1])
    gone.send_multipart([b"", b"snapshot"])
    gone.close(linger=100)
    subscriber = follow(closing, {"one": address})
    for number in range(3000):
        cache.opened.publish(
            [{"type": "stored", "group": 0, "keys": (number.to_bytes(32, "big"),) * 20, "block_size": 4}]
        )
    cache.serve(TOKENS)
    hits_are(subscriber, TOKENS, one=20)


def test_what_is_no_event_is_ignored_and_said_once(closing: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    ends = {"good": addresses(), "bad": addresses()}
    bad, router = (raw_socket(closing, kind) for kind in (zmq.PUB, zmq.ROUTER))
    bad.bind(ends["bad"][0])
    router.bind(ends["bad"][1])
    cache = cache_at(closing, ends["good"])
    cache.serve(TOKENS)
    with caplog.at_level(logging.WARNING, "kvframe"):
        subscriber = follow(closing, ends)
        peer = router.recv_multipart()[0]
        for payload in (b"", b"\xc1", encode_batch(EventBatch(b"e", 0, []))[:-3], b"\x80"):
            for frames in ([b"", payload], [b"", bytes(8), payload]):
                bad.send_multipart(frames)
            router.send_multipart([peer, b"", b"", END, payload])
        router.send_multipart([peer, b"short"])
        eventually(lambda: "are ignored" in caplog.text)
        hits_are(subscriber, TOKENS, good=20)
    assert 1 == caplog.text.count("messages of engine 'bad' are ignored")


@pytest.mark.parametrize("frames", [[b"x"], [b"", b"1", b"2"], []])
def test_a_wrong_request_is_not_answered_and_harms_nobody(
    frames: list[bytes], closing: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    address = addresses()
    cache = cache_at(closing, address)
    wrong = raw_socket(closing, zmq.DEALER)
    wrong.connect(address[1])
    if frames:
        wrong.send_multipart(frames)
    cache.serve(TOKENS)
    hits_are(follow(closing, {"one": address}), TOKENS, one=20)
