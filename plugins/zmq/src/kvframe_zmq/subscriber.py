"""The subscriber: keeps a router's index up to date with what many engines publish."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

import zmq

from kvframe.routing import EventBatch, PrefixIndex
from kvframe_zmq.address import replay_address
from kvframe_zmq.wire import END, SNAPSHOT, decode_batch, encode_number

_log = logging.getLogger("kvframe")
_POLL_MS = 50
MAX_MISSED = 1000
"""Batches that are asked for one by one; if more are missing, everything is asked for."""

_MOST_PATIENCE = 8
"""Times the interval that an answer is waited for, if earlier ones did not come in time."""

MAX_EARLY = 10_000
"""Batches that are kept until those before them arrive."""


class Subscriber:
    """Follows engines in a thread of its own, and applies their events to an index.

    Each engine is asked for everything when it is added, for the batches after the last known one when one is missing,
    and every ``interval`` seconds whether there are any. So an engine that starts late, starts again or is silent for a
    while is followed again by itself. Until then the index answers by what it knows.

    Any thread may call any method.
    """

    def __init__(
        self,
        index: PrefixIndex,
        engines: Mapping[str, str | tuple[str, str]],
        *,
        topic: str = "",
        interval: float = 1.0,
    ) -> None:
        """Begin without connecting.

        Args:
            index: What is kept up to date.
            engines: By engine, the address of its publisher; with a second one, that of its replay socket too.
            topic: The first characters of the publishers' topics.
            interval: Seconds between two questions to an engine, and until a question is asked again.
        """
        self.index = index
        self._topic, self._interval = topic.encode(), interval
        self._links: dict[str, _Link] = {}
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._heard_at: dict[str, float] = {}
        self._context = zmq.Context()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvframe-zmq-subscriber", daemon=True)
        for engine, address in engines.items():
            self.add(engine, address)

    def start(self) -> None:
        """Connect to the engines, and follow them from now on."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close the connections. The index stays as it is."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._context.destroy(linger=0)

    def add(self, engine: str, address: str | tuple[str, str]) -> None:
        """Follow one more engine, or an engine at another address."""
        self._todo.put(lambda: self._connect(engine, address))

    def remove(self, engine: str) -> None:
        """Stop following an engine, and remove it from the index."""
        self._todo.put(lambda: self._disconnect(engine))

    def seconds_silent(self, engine: str) -> float | None:
        """Return how long an engine has answered nothing and sent nothing; None if it never did."""
        heard_at = self._heard_at.get(engine)
        return None if heard_at is None else time.monotonic() - heard_at

    # --- in the thread --------------------------------------------------------------------------------------------

    def _connect(self, engine: str, address: str | tuple[str, str]) -> None:
        self._close_link(engine)
        events, replay = (address, replay_address(address)) if isinstance(address, str) else address
        try:
            self._links[engine] = _Link(self._context, engine, events, replay, self._topic, self.index, self._interval)
        except zmq.ZMQError as error:
            _log.warning("engine %r is not followed: %s cannot be connected to: %s", engine, address, error)

    def _disconnect(self, engine: str) -> None:
        self._close_link(engine)
        self.index.remove(engine)
        self._heard_at.pop(engine, None)

    def _close_link(self, engine: str) -> None:
        link = self._links.pop(engine, None)
        if link is not None:
            link.close()

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._do_all()
            poller = zmq.Poller()
            for link in self._links.values():
                poller.register(link.events, zmq.POLLIN)
                poller.register(link.answers, zmq.POLLIN)
            if self._links:
                poller.poll(_POLL_MS)
            else:
                self._is_closing.wait(_POLL_MS / 1000)
            for engine, link in self._links.items():
                try:
                    if link.read():
                        self._heard_at[engine] = time.monotonic()
                    link.ask_if_due(time.monotonic())
                except Exception:  # whatever an engine sends, the others are followed
                    _log.exception("what engine %r sent cannot be used", engine)
        for engine in [*self._links]:
            self._close_link(engine)

    def _do_all(self) -> None:
        while True:
            try:
                self._todo.get_nowait()()
            except Empty:
                return


class _Link:
    """The connection to one engine."""

    def __init__(
        self,
        context: zmq.Context[Any],
        engine: str,
        events_address: str,
        replay_address: str,
        topic: bytes,
        index: PrefixIndex,
        interval: float,
    ) -> None:
        self._context, self._engine, self._index, self._interval = context, engine, index, interval
        self._replay_address = replay_address
        self.events = context.socket(zmq.SUB)
        self.events.set_hwm(0)  # what waits here is not lost
        self.events.subscribe(topic)
        self.events.connect(events_address)
        self.answers = self._new_answers()
        self._early: deque[EventBatch] = deque(maxlen=MAX_EARLY)
        self._asks_at, self._patience = 0.0, interval
        self._is_asking, self._wants_all, self._is_understood = False, True, True

    def _new_answers(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.linger = 0
        socket.connect(self._replay_address)
        return socket

    def close(self) -> None:
        """Close both sockets."""
        self.events.close(linger=0)
        self.answers.close(linger=0)

    def ask_if_due(self, now: float) -> None:
        """Ask for what is missing, if no answer is waited for, or it has not come for too long."""
        if now < self._asks_at:
            return
        if self._is_asking:  # the question may wait for an engine that has gone, or the answer takes long
            self.answers.close(linger=0)
            self.answers = self._new_answers()
            self._patience = min(2 * self._patience, _MOST_PATIENCE * self._interval)
        following = self._index.next_batch(self._engine)
        request = SNAPSHOT if self._wants_all or following is None else encode_number(following[1])
        self.answers.send_multipart([b"", request], zmq.NOBLOCK)
        self._is_asking, self._asks_at = True, now + self._patience

    def read(self) -> bool:
        """Apply what has come; return whether anything has."""
        has_come = False
        for socket, take in ((self.events, self._take_published), (self.answers, self._take_answer)):
            while True:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                has_come = True
                try:
                    take(frames)
                    self._is_understood = True
                except ValueError as error:
                    if self._is_understood:
                        _log.warning("messages of engine %r are ignored: %s", self._engine, error)
                    self._is_understood = False
        return has_come

    def _take_published(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            raise ValueError(f"it has {len(frames)} frames, not a topic, a number and events")
        batch = decode_batch(frames[2])
        if not self._index.apply_batch(self._engine, batch):
            self._early.append(batch)
            following = self._index.next_batch(self._engine)
            if following is None or following[0] != batch.epoch or batch.number - following[1] > MAX_MISSED:
                self._wants_all = True
            if not self._is_asking:
                self._asks_at = 0.0

    def _take_answer(self, frames: list[bytes]) -> None:
        if len(frames) != 4:
            raise ValueError(f"an answer has {len(frames)} frames, not an empty one, a topic, a number and events")
        batch = decode_batch(frames[3])
        if frames[2] != END:
            self._index.apply_batch(self._engine, batch)
            return
        early, self._early = self._early, deque(maxlen=MAX_EARLY)
        for each in early:
            self._index.apply_batch(self._engine, each)
        self._is_asking, self._patience = False, self._interval
        epoch, number = self._index.next_batch(self._engine) or (b"", 0)
        is_behind = batch.number >= 0 and (epoch != batch.epoch or number <= batch.number)
        if is_behind:
            self._asks_at = 0.0
        self._wants_all = is_behind
