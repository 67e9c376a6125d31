"""Delivers the cache's events after each step: to a listener, and to the feed of the stack's event publisher."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from kvframe import CacheEvent, KVCacheManager
from kvframe_engine.event_feed import EventFeed

_log = logging.getLogger("kvframe")

CacheListener = Callable[[Sequence[CacheEvent]], None]
"""Takes the events since its last call, in order."""


class CacheEventDelivery:
    """Delivers a cache's events to a listener and to a feed. A listener that raises is removed; the engine continues.

    Invariant: what was delivered to either is all that happened before the last ``_take_events``, unless it must be
    given everything again.

    Attributes:
        listener: The listener; None if there is none.
        is_needed: Whether there is a listener or a feed.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        secret: bytes,
        let_through: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Begin without a listener.

        Args:
            manager: The cache.
            secret: 32 bytes, for the keys of blocks.
            let_through: Returns a context manager that lets interrupts through while the listener is called.
        """
        self._let_through = let_through
        self._manager = manager
        self._secret = secret
        self._feed: EventFeed | None = None
        self._take_events: Callable[[], Sequence[CacheEvent]] | None = None
        self.listener: CacheListener | None = None
        self._must_resend = self.is_needed = False

    def listen(self, listener: CacheListener | None) -> None:
        """Let a listener replace the one before, and deliver all that is cached to it; None for no listener."""
        self.listener = listener
        self._must_resend = listener is not None
        self.is_needed = self._must_resend or self._feed is not None
        if self.is_needed:
            self.deliver()
        else:
            self._take_events = None
            self._manager.stop_events()

    def publish_to(self, feed: EventFeed) -> None:
        """Give the events from now on to a feed too, after all that is cached."""
        self._feed, self.is_needed = feed, True
        self.deliver()

    def deliver(self) -> None:
        """Deliver the events since the last delivery, or all that is cached if the last delivery was interrupted.

        A listener that was interrupted, for example by Ctrl-C, may have taken some of the events.
        """
        if not self.is_needed:
            return
        events = () if self._take_events is None else self._take_events()
        if events:
            if self._feed is not None:
                self._feed.put(events)
            if not self._must_resend:
                self._call_listener(events)
        for_feed = self._feed is not None and self._feed.needs_all
        if for_feed or self._must_resend:
            self._take_events = self._manager.record_events(self._secret).take
            cached = self._take_events()
            if self._feed is not None and for_feed:
                self._feed.put(cached, is_all=True)
            if self._must_resend:
                self._call_listener(cached)

    def _call_listener(self, events: Sequence[CacheEvent]) -> None:
        if self.listener is None:
            return
        self._must_resend = True
        try:
            with self._let_through():
                self.listener(events)
        except KeyboardInterrupt:
            raise
        except BaseException:
            _log.exception("the listener to cache events raised; it was removed")
            self.listen(None)
        self._must_resend = False

    def close(self, seconds: float) -> None:
        """Let the publisher send what it was given, for some seconds at most."""
        if self._feed is not None:
            self._feed.close(seconds)
