"""The event feed: a publisher gets all events in order, or everything again, and a step never waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pytest
from kvframe_engine import event_feed
from kvframe_engine.event_feed import EventFeed

from kvframe.cache.events import BlocksRemoved, CacheCleared, CacheEvent
from kvframe.cache.layout import CacheLayout
from kvframe.contract.event_publisher import EventPublisher, OpenEventPublisher
from tests.support.waiting import eventually

CLEARED = CacheCleared(layout=CacheLayout(alignment=1, max_tokens=8, groups=()))


@attrs.define(eq=False)
class Radio:
    """What a publisher did, and how it fails."""

    sent: list[str] = attrs.field(factory=list)
    opened: int = 0
    closed: int = 0
    fails_to_open: int = 0
    fails_at: str = ""
    may_send: threading.Event = attrs.field(factory=threading.Event)


@attrs.frozen(kw_only=True)
class RadioPublisher(EventPublisher):
    name: ClassVar[str] = "radio"
    radio: Radio

    def open(self) -> OpenEventPublisher:
        self.radio.opened += 1
        if self.radio.opened <= self.radio.fails_to_open:
            raise OSError("no antenna")
        return OpenRadio(self.radio)


class OpenRadio(OpenEventPublisher):
    def __init__(self, radio: Radio) -> None:
        self.radio = radio

    def publish(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.radio.may_send.wait()
        for event in events:
            word = event["keys"][0].decode() if event["type"] == "removed" else event["type"]
            if word == self.radio.fails_at:
                self.radio.fails_at = ""
                raise OSError("out of range")
            self.radio.sent.append(word)

    def close(self) -> None:
        self.radio.closed += 1


@pytest.fixture
def radio(monkeypatch: pytest.MonkeyPatch) -> Iterator[Radio]:
    monkeypatch.setattr(event_feed, "FIRST_PAUSE", 0.01)
    radio = Radio()
    radio.may_send.set()
    yield radio
    radio.may_send.set()


def events(*words: str) -> list[CacheEvent]:
    return [BlocksRemoved(group=0, keys=(word.encode(),)) for word in words]


def test_events_are_published_in_order_and_the_last_ones_before_the_end(radio: Radio) -> None:
    feed = EventFeed(RadioPublisher(radio=radio))
    eventually(lambda: feed.needs_all)
    feed.put(events("before"))
    feed.put([CLEARED, *events("a", "b")], is_all=True)
    assert not feed.needs_all
    for word in "cdefg":
        feed.put(events(word))
    feed.close(10.0)
    assert (["cleared", *"abcdefg"], 1, 1) == (radio.sent, radio.opened, radio.closed)


def test_a_publisher_that_cannot_be_opened_is_opened_later(radio: Radio, caplog: pytest.LogCaptureFixture) -> None:
    radio.fails_to_open = 2
    with caplog.at_level(logging.WARNING, "kvframe"):
        feed = EventFeed(RadioPublisher(radio=radio))
        feed.put([CLEARED], is_all=True)
        feed.put(events("a"))
        eventually(lambda: radio.sent == ["cleared", "a"])
    feed.close(10.0)
    assert 2 == caplog.text.count("event publisher 'radio' cannot be opened now: ")
    assert "no antenna" in caplog.text


def test_a_publisher_that_fails_gets_everything_again(radio: Radio, caplog: pytest.LogCaptureFixture) -> None:
    radio.fails_at = "b"
    with caplog.at_level(logging.WARNING, "kvframe"):
        feed = EventFeed(RadioPublisher(radio=radio))
        feed.put([CLEARED, *events("a")], is_all=True)
        feed.put(events("b"))
        eventually(lambda: feed.needs_all)
        feed.put(events("lost"))
        feed.put([CLEARED, *events("a", "b")], is_all=True)
        feed.put(events("c"))
    feed.close(10.0)
    assert (["cleared", "a", "cleared", "a", "b", "c"], 2, 2) == (radio.sent, radio.opened, radio.closed)
    assert "event publisher 'radio' failed, and is opened again: " in caplog.text


def test_a_publisher_that_is_too_slow_gets_everything_when_it_is_ready(
    radio: Radio, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_feed, "MAX_QUEUED", 10)
    radio.may_send.clear()
    feed = EventFeed(RadioPublisher(radio=radio))
    feed.put([CLEARED], is_all=True)
    with caplog.at_level(logging.WARNING, "kvframe"):
        for number in range(100):
            feed.put(events(str(number)))
    assert 1 == caplog.text.count("does not take cache events as fast as they come")
    radio.may_send.set()
    eventually(lambda: feed.needs_all)
    feed.put([CLEARED, *events("all")], is_all=True)
    feed.close(10.0)
    assert ["cleared", "all"] == radio.sent[-2:]
    assert len(radio.sent) < 20
