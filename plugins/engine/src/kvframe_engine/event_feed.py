"""Gives the cache's events to an event publisher, in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from kvframe import CacheEvent
from kvframe.contract import EventPublisher, OpenEventPublisher
from kvframe.contract.foreign import safe_text
from kvframe.routing import to_plain

_log = logging.getLogger("kvframe")
MAX_QUEUED = 1 << 20
"""Keys and tokens of events that wait for a publisher."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds until a publisher that failed is opened again; twice as many after each further failure."""


class EventFeed:
    """Queues events for a publisher without ever waiting for it.

    Invariant: the publisher gets either all events in order, or after a loss everything that is cached again.
    """

    def __init__(self, publisher: EventPublisher) -> None:
        """Start the thread."""
        self._publisher = publisher
        self._changed = threading.Condition()
        self._queue: deque[Sequence[CacheEvent]] = deque()
        self._num_queued = 0
        self._has_lost, self._is_failing, self._is_closing = True, False, False
        self._thread = threading.Thread(target=self._run, name="kvframe-event-feed", daemon=True)
        self._thread.start()

    @property
    def needs_all(self) -> bool:
        """Whether the next events must be everything that is cached, and the publisher can take it now."""
        return self._has_lost and not self._is_failing and not self._num_queued

    def put(self, events: Sequence[CacheEvent], *, is_all: bool = False) -> None:
        """Queue events.

        Args:
            events: The events since the last call.
            is_all: Whether they are everything that is cached, after a ``CacheCleared``.
        """
        size = sum(_size_of(event) for event in events)
        with self._changed:
            if is_all:
                self._has_lost = False
            elif self._has_lost:
                return
            elif self._num_queued + size > MAX_QUEUED:
                _log.warning(
                    "%s does not take cache events as fast as they come; it gets all that is cached when it is ready",
                    self._name,
                )
                self._has_lost = True
                self._queue.clear()
                self._num_queued = 0
                return
            self._queue.append(events)
            self._num_queued += size
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Publish what is queued, for some seconds at most, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(seconds)

    @property
    def _name(self) -> str:
        return f"event publisher {self._publisher.name!r}"

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._is_closing:
            try:
                opened = self._publisher.open()
            except Exception as error:  # a publisher raises anything
                _log.warning("%s cannot be opened now: %s", self._name, safe_text(error))
            else:
                self._is_failing = False
                if self._publish_all(opened):
                    return
                pause = FIRST_PAUSE
            self._is_failing = True
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _publish_all(self, opened: OpenEventPublisher) -> bool:
        """Publish until the feed is closed; return False if the publisher fails, so that an event may be lost."""
        try:
            while (events := self._next()) is not None:
                opened.publish(to_plain(events))
            return True
        except Exception as error:
            _log.warning("%s failed, and is opened again: %s", self._name, safe_text(error))
            with self._changed:
                self._has_lost, self._is_failing = True, True
                self._queue.clear()
                self._num_queued = 0
            return False
        finally:
            try:
                opened.close()
            except Exception as error:
                _log.warning("%s could not be closed: %s", self._name, safe_text(error))

    def _next(self) -> Sequence[CacheEvent] | None:
        """Wait for events; return None when the feed is closed and all were taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            if not self._queue:
                return None
            events = self._queue.popleft()
            self._num_queued -= sum(_size_of(event) for event in events)
            return events


def _size_of(event: CacheEvent) -> int:
    return len(getattr(event, "keys", ())) + len(getattr(event, "tokens", ())) + 1
