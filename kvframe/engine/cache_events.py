"""Delivers the cache's events to a listener after each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from kvframe.cache.events import CacheEvent, EventLog
from kvframe.cache.manager import KVCacheManager

_log = logging.getLogger("kvframe")

CacheListener = Callable[[Sequence[CacheEvent]], None]
"""Takes the events since it was called last, in order."""


class CacheEventDelivery:
    """Hands a cache's events to a listener. A listener that raises gets no further events, and harms nothing else."""

    def __init__(
        self, manager: KVCacheManager, secret: bytes, let_through: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Begin without a listener.

        Args:
            manager: The cache.
            secret: 32 bytes, for the keys of blocks.
            let_through: Returns what lets interrupts through while the listener is called.
        """
        self._let_through = let_through
        self._manager = manager
        self._secret = secret
        self._events: EventLog | None = None
        self._listener: CacheListener | None = None
        self._is_in_doubt = False

    @property
    def listener(self) -> CacheListener | None:
        """The listener; None if there is none."""
        return self._listener

    @listener.setter
    def listener(self, listener: CacheListener | None) -> None:
        self._listener = listener
        if listener is None:
            self._events = None
            self._manager.stop_events()
        else:
            self._is_in_doubt = True
            self.deliver()

    def deliver(self) -> None:
        """Deliver the events that the listener did not get yet; if that is unknown, everything that is cached.

        That is so when it was interrupted, by Ctrl-C for one: it may have taken some of the events.
        """
        if self._listener is None:
            return
        if self._is_in_doubt or self._events is None:
            self._events = self._manager.record_events(self._secret)
        self._is_in_doubt = True
        if events := self._events.take():
            try:
                with self._let_through():
                    self._listener(events)
            except Exception:
                _log.exception("the listener to cache events raised; it is told nothing any more")
                self.listener = None
        self._is_in_doubt = False
