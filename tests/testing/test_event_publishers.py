"""The kit's checks of event publishers: right ones pass, and wrong ones are named with the law that they break."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pytest
from kvframe_testing import event_publishers
from kvframe_testing.event_publishers import check_publisher, publisher_checks
from kvframe_testing.laws import ConformanceError

from kvframe.contract.event_publisher import EventPublisher, OpenEventPublisher

SENT: list[Any] = []
OPEN: list[Any] = []


class Open(OpenEventPublisher):
    def __init__(self, fault: str) -> None:
        self._fault, self._closed = fault, threading.Event()
        if OPEN:
            raise OSError("the address is in use")
        if fault == "cannot be opened again":
            OPEN.append(self)
        if fault in ("runs on", "blocks"):
            threading.Thread(target=self._closed.wait, args=(3,), daemon=True).start()

    def publish(self, events: Sequence[Mapping[str, Any]]) -> None:
        if self._fault == "changes events":
            events[0].pop("tokens", None)  # type: ignore[attr-defined]
        if self._fault == "knows its types only":
            assert {event["type"] for event in events} <= {"stored", "removed", "cleared"}
        if self._fault == "blocks":
            self._closed.wait(3)
        if self._fault == "loses removals":
            events = [event for event in events if event["type"] != "removed"]
        if self._fault == "cuts keys":
            events = [{**event, "keys": [key[:8] for key in event.get("keys", ())]} for event in events]
        SENT.extend(reversed(events) if self._fault == "reorders" else events)

    def close(self) -> None:
        if self._fault == "cannot be closed":
            raise OSError("it is closed already")
        if self._fault not in ("runs on", "blocks"):
            self._closed.set()


@attrs.frozen(kw_only=True)
class ListPublisher(EventPublisher):
    name: ClassVar[str] = "list"
    fault: str = ""

    def open(self) -> Any:
        return None if self.fault == "opens nothing" else Open(self.fault)


@pytest.fixture(autouse=True)
def nothing_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    SENT.clear()
    OPEN.clear()
    monkeypatch.setattr(event_publishers, "_READ_SECONDS", 0.1)


def test_the_kit_accepts_a_right_publisher() -> None:
    check_publisher(ListPublisher())
    check_publisher(ListPublisher(), lambda _: SENT)
    assert 2 * (8 + 4 + 2_001) == len(SENT)


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        ("opens nothing", r"open: open\(\) has to return an OpenEventPublisher, not None"),
        ("cannot be opened again", r"open: open\(\) failed: OSError: the address is in use"),
        ("changes events", r"publish: publish\(\) changes its argument"),
        ("knows its types only", r"publish: publish\(\) failed: AssertionError"),
        ("cannot be closed", r"close: close\(\) failed: OSError: it is closed already"),
        ("runs on", r"close: threads run on after close\(\): "),
        ("loses removals", r"order: event 4 of 8 is \{'type': 'removed'"),
        ("reorders", "order: event 0 of 8 is {'type': 'cleared'"),
        ("cuts keys", "order: event 1 of 8 is"),
    ],
)
def test_the_kit_names_the_law_that_a_publisher_breaks(fault: str, law: str) -> None:
    with pytest.raises(ConformanceError, match=rf"ListPublisher\(fault='{fault}'\): {law}"):
        check_publisher(ListPublisher(fault=fault), lambda _: SENT)


def test_a_publisher_that_blocks_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publishers, "MAX_SECONDS", 0.2)
    with pytest.raises(ConformanceError, match=r"time: each-type: it has not ended in 0\.2 seconds"):
        check_publisher(ListPublisher(fault="blocks"))


def test_options_that_it_does_not_take_are_said() -> None:
    assert ["each-type", "later-versions", "many"] == [check.name for check in publisher_checks(ListPublisher).checks]
    with pytest.raises(ConformanceError, match=r"event publisher 'list' cannot be made with \{'path': 3\}"):
        publisher_checks(ListPublisher, {"path": 3})
