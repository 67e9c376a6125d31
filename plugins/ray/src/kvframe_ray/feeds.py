"""Keeps a cache's events for all processes that follow it, until they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import attrs
from kvframe_serve.engine_thread import EngineThread

from kvframe import CacheEvent

MOST_EVENTS = 10_000
"""Events that are kept for a follower; one that lags further begins again."""

_GATHER_SECONDS = 0.2
"""How long events are gathered. A message costs Ray a millisecond; meanwhile routers expect what they have sent."""


@attrs.define(eq=False)
class _Feed:
    """The events that one follower has not got; the first ones are all that was cached when it began."""

    events: list[CacheEvent] = attrs.field(factory=list)
    has_begun: bool = False
    is_whole: bool = False
    has_ended: bool = False
    changed: asyncio.Event = attrs.field(factory=asyncio.Event)


class Feeds:
    """The feeds of all followers. It is used on the event loop; the engine's listener runs in the engine's thread.

    Invariant: the engine has a listener if there are feeds.
    """

    def __init__(self, thread: EngineThread, loop: asyncio.AbstractEventLoop) -> None:
        """Begin without followers, so that the engine records no events."""
        self._thread = thread
        self._loop = loop
        self._feeds: set[_Feed] = set()

    async def follow(self) -> AsyncGenerator[list[CacheEvent], None]:
        """Yield all that is cached, after a ``CacheCleared``, and then events as they come.

        It ends with the caller, or if the caller lags.
        """
        feed = _Feed()
        self._feeds.add(feed)
        self._thread.call(self._listen)  # The other feeds get all that is cached too, which changes nothing.
        try:
            while True:
                await feed.changed.wait()
                if not feed.is_whole:  # All that is cached may be too long to be kept with more.
                    await asyncio.sleep(_GATHER_SECONDS)
                if feed.has_ended:
                    return
                feed.changed.clear()
                feed.is_whole = False
                events, feed.events = feed.events, []
                yield events
        finally:
            self._remove(feed)

    def note_prompt(self) -> None:
        """Let followers have a message soon, because a prompt was computed: it may be without events."""
        for feed in self._feeds:
            feed.changed.set()

    def _listen(self, engine: Any) -> None:
        """Let the engine deliver all that is cached, and events from then on; in its thread."""
        is_whole = True

        def listen(events: Sequence[CacheEvent]) -> None:
            nonlocal is_whole
            self._loop.call_soon_threadsafe(self._put, events, is_whole)
            is_whole = False

        engine.on_cache_events = listen

    def _put(self, events: Sequence[CacheEvent], is_whole: bool) -> None:
        """Add events to all feeds, and end those that keep too many; no feed is too long with all that is cached."""
        for feed in [*self._feeds]:
            if is_whole:
                feed.events, feed.has_begun, feed.is_whole = [*events], True, True
            elif len(feed.events) + len(events) > MOST_EVENTS:
                feed.has_ended = True
                self._remove(feed)
            elif feed.has_begun:
                feed.events += events
            feed.changed.set()

    def _remove(self, feed: _Feed) -> None:
        self._feeds.discard(feed)
        if not self._feeds:
            self._thread.call(_stop_listening)


def _stop_listening(engine: Any) -> None:
    engine.on_cache_events = None
