"""Delivers the cache's events to a listener after each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from kvframe import CacheEvent, KVCacheManager

_log = logging.getLogger("kvframe")

CacheListener = Callable[[Sequence[CacheEvent]], None]
"""Takes the events since its last call, in order."""


class CacheEventDelivery:
    """Delivers a cache's events to a listener. A listener that raises is removed; the engine continues.

    Attributes:
        listener: The listener; None if there is none.
    """

    def __init__(
        self, manager: KVCacheManager, secret: bytes, let_through: Callable[[], AbstractContextManager[None]]
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
        self._take_events: Callable[[], Sequence[CacheEvent]] | None = None
        self.listener: CacheListener | None = None
        self._must_resend = False

    def listen(self, listener: CacheListener | None) -> None:
        """Let a listener replace the one before, and deliver all that is cached to it; None for no listener."""
        self.listener = listener
        if listener is None:
            self._take_events = None
            self._manager.stop_events()
        else:
            self._must_resend = True
            self.deliver()

    def deliver(self) -> None:
        """Deliver the events since the last delivery, or all that is cached if the last delivery was interrupted.

        A listener that was interrupted, for example by Ctrl-C, may have taken some of the events.
        """
        if self.listener is None:
            return
        if self._must_resend or self._take_events is None:
            self._take_events = self._manager.record_events(self._secret).take
        self._must_resend = True
        if events := self._take_events():
            try:
                with self._let_through():
                    self.listener(events)
            except KeyboardInterrupt:
                raise
            except BaseException:
                _log.exception("the listener to cache events raised; it was removed")
                self.listen(None)
        self._must_resend = False
