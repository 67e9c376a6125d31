"""What one process knows of all replicas: the prefixes that each has or will have cached, and what it has to do."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import chain

import attrs
from kvframe_serve.runner import EngineRequest

from kvframe import CacheEvent
from kvframe.routing import PrefixIndex
from kvframe_ray.expected import ExpectedPrefixes, Prefixes, prefixes_of
from kvframe_ray.placement import Load


@attrs.define
class _Sent:
    """A request that was sent to a replica; its prefixes are expected there until its prompt was computed."""

    replica: str
    num_tokens: int
    prefixes: Prefixes = ()


class Directory:
    """The caches and loads of the replicas of a deployment.

    Invariant: ``_sent`` has each request that this process sent and that was not answered. The prefixes of a prompt are
    expected in its replica until the replica's events have come, so no longer than the request and two messages.

    All methods may be called in any thread.
    """

    def __init__(self) -> None:
        """Know of no replica."""
        self._lock = threading.Lock()
        # Replicas of a deployment have one secret, except while a new stack replaces them one by one.
        self._indexes: dict[bytes, PrefixIndex] = {}
        self._secrets: dict[str, bytes] = {}
        self._sent: dict[str, _Sent] = {}
        self._expected = ExpectedPrefixes()
        # By replica, the prefixes of prompts that were computed before its last message with events, and since then.
        self._computed: dict[str, tuple[list[Prefixes], list[Prefixes]]] = {}

    def apply(self, replica: str, secret: bytes, events: Sequence[CacheEvent]) -> None:
        """Take the events of a replica's next message, in order.

        Args:
            replica: The replica.
            secret: The secret of the keys in its events.
            events: The events since the last message; the first ones begin with a ``CacheCleared``.
        """
        with self._lock:
            self._secrets[replica] = secret
            self._indexes.setdefault(secret, PrefixIndex(secret)).apply(replica, events)
            # A message may have been on its way when a prompt was computed, but not the one after it.
            told, computed = self._computed.get(replica, ((), []))
            for prefixes in told:
                self._expected.remove(replica, prefixes)
            self._computed[replica] = computed, []

    def remove(self, replica: str) -> None:
        """Forget what a replica has cached."""
        with self._lock:
            for sent in self._sent.values():
                if sent.replica == replica:
                    self._expect_no_longer(sent)
            for prefixes in chain(*self._computed.pop(replica, ())):
                self._expected.remove(replica, prefixes)
            secret = self._secrets.pop(replica, None)
            if secret is None:
                return
            self._indexes[secret].remove(replica)
            if secret not in self._secrets.values():
                del self._indexes[secret]

    def hits(self, request: EngineRequest) -> dict[str, int]:
        """Return how many tokens of a prompt each replica would find after the requests that were sent to it."""
        hits, prefixes = self.known_hits(request), prefixes_of(request)
        with self._lock:
            for replica, num_tokens in self._expected.hits(prefixes):
                hits[replica] = max(hits.get(replica, 0), num_tokens)
        return hits

    def known_hits(self, request: EngineRequest) -> dict[str, int]:
        """Return how many tokens of a prompt each replica would find now, by its events."""
        salt = str(request.options.get("cache_salt", ""))
        with self._lock:
            return {
                replica: num_tokens
                for index in self._indexes.values()
                for replica, num_tokens in index.hits(request.prompt, salt=salt).items()
            }

    def loads(self, queue_lengths: Mapping[str, int]) -> dict[str, Load]:
        """Return what replicas have to do.

        Args:
            queue_lengths: For each replica, the requests that it has not answered, also those of other processes.
        """
        loads = {replica: Load() for replica in queue_lengths}
        with self._lock:
            for sent in self._sent.values():
                if (load := loads.get(sent.replica)) is not None:
                    load.tokens += sent.num_tokens
                    load.requests += 1
        for replica, length in queue_lengths.items():
            loads[replica].requests = max(loads[replica].requests, length)
        return loads

    def send(self, request_id: str, request: EngineRequest, replica: str, num_tokens: int) -> None:
        """Record that a request is sent to a replica, which has to compute so many tokens for it."""
        prefixes = prefixes_of(request)
        with self._lock:
            if (before := self._sent.get(request_id)) is not None:
                self._expect_no_longer(before)
            self._sent[request_id] = _Sent(replica, num_tokens, prefixes)
            self._expected.add(replica, prefixes)

    def begin(self, request_id: str) -> None:
        """Record that the prompt of a request was computed."""
        with self._lock:
            if (sent := self._sent.get(request_id)) is None:
                return
            sent.num_tokens = 0
            if sent.replica in self._computed:
                self._computed[sent.replica][1].append(sent.prefixes)
                sent.prefixes = ()
            else:
                self._expect_no_longer(sent)

    def end(self, request_id: str, replica: str) -> None:
        """Record that a request was answered or given up by a replica; it may have been sent to another one since."""
        with self._lock:
            sent = self._sent.get(request_id)
            if sent is not None and sent.replica == replica:
                self._expect_no_longer(sent)
                del self._sent[request_id]

    def _expect_no_longer(self, sent: _Sent) -> None:
        self._expected.remove(sent.replica, sent.prefixes)
        sent.prefixes = ()
