"""Keeps a cache's events for all processes that follow it, until they ask for them."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from typing import Any

import attrs
from kvframe_serve.engine_thread import EngineThread

from kvframe import CacheEvent

MOST_EVENTS = 10_000
"""Events that are kept for a follower; one that lags further, or has ended, begins again."""

_GATHER_SECONDS = 0.2
"""How long events are gathered. A call costs Ray some milliseconds; meanwhile routers expect what they have sent."""

_WAIT_SECONDS = 1.0
"""How long a follower waits for events; a replica that is to end waits for its followers so long."""


@attrs.define
class _Feed:
    """The events that one follower has not got; the first ones are all that was cached when it began."""

    events: list[CacheEvent] = attrs.field(factory=list)
    has_begun: bool = False
    changed: asyncio.Event = attrs.field(factory=asyncio.Event)


class Feeds:
    """The feeds of all followers. It is used on the event loop; the engine's listener runs in the engine's thread.

    Invariant: the engine has a listener if there are feeds.
    """

    def __init__(self, thread: EngineThread, loop: asyncio.AbstractEventLoop) -> None:
        """Begin without followers, so that the engine records no events."""
        self._thread = thread
        self._loop = loop
        self._feeds: dict[str, _Feed] = {}

    async def take(self, name: str | None) -> tuple[str, list[CacheEvent]]:
        """Wait for events, for a second at most.

        Args:
            name: The name that the last call returned; None for a follower that begins, or missed an answer.

        Returns:
            The feed's name, and the events since the last call. A feed that begins has all that is cached, after a
            ``CacheCleared``; a feed that was dropped begins again.
        """
        feed = self._feeds.get(name or "")
        if feed is None:
            name, feed = uuid.uuid4().hex, _Feed()
            self._feeds[name] = feed
            self._thread.call(self._listen)  # The other feeds get all that is cached too, which changes nothing.
        assert name is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(feed.changed.wait(), _WAIT_SECONDS)
            await asyncio.sleep(_GATHER_SECONDS)
        feed.changed.clear()
        events, feed.events = feed.events, []
        return name, events

    def _listen(self, engine: Any) -> None:
        """Let the engine deliver all that is cached, and events from then on; in its thread."""
        is_whole = True

        def listen(events: Sequence[CacheEvent]) -> None:
            nonlocal is_whole
            self._loop.call_soon_threadsafe(self._put, events, is_whole)
            is_whole = False

        engine.on_cache_events = listen

    def _put(self, events: Sequence[CacheEvent], is_whole: bool) -> None:
        """Add events to all feeds, and drop those that keep too many; no feed is too long with all that is cached."""
        for name, feed in [*self._feeds.items()]:
            if is_whole:
                feed.events, feed.has_begun = [*events], True
            elif len(feed.events) + len(events) > MOST_EVENTS:
                del self._feeds[name]
            elif feed.has_begun:
                feed.events += events
            feed.changed.set()
        if not self._feeds:
            self._thread.call(_stop_listening)


def _stop_listening(engine: Any) -> None:
    engine.on_cache_events = None
