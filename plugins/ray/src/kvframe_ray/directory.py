"""What one process knows of all replicas: the prefixes that each has cached, and what each has still to do."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import attrs
from kvframe_serve.runner import EngineRequest

from kvframe import CacheEvent
from kvframe.routing import PrefixIndex
from kvframe_ray.placement import Load


@attrs.define
class _Sent:
    """A request that was sent to a replica."""

    replica: str
    num_tokens: int


class Directory:
    """The caches and loads of the replicas of a deployment.

    Invariant: ``_sent`` has each request that this process sent and that was not answered.

    All methods may be called in any thread.
    """

    def __init__(self) -> None:
        """Know of no replica."""
        self._lock = threading.Lock()
        # Replicas of a deployment have one secret, except while a new stack replaces them one by one.
        self._indexes: dict[bytes, PrefixIndex] = {}
        self._secrets: dict[str, bytes] = {}
        self._sent: dict[str, _Sent] = {}

    def apply(self, replica: str, secret: bytes, events: Sequence[CacheEvent]) -> None:
        """Take events of a replica's cache, in order.

        Args:
            replica: The replica.
            secret: The secret of the keys in its events.
            events: The events since the last call; the first ones begin with a ``CacheCleared``.
        """
        with self._lock:
            self._secrets[replica] = secret
            self._indexes.setdefault(secret, PrefixIndex(secret)).apply(replica, events)

    def remove(self, replica: str) -> None:
        """Forget what a replica has cached."""
        with self._lock:
            secret = self._secrets.pop(replica, None)
            if secret is None:
                return
            self._indexes[secret].remove(replica)
            if secret not in self._secrets.values():
                del self._indexes[secret]

    def hits(self, request: EngineRequest) -> dict[str, int]:
        """Return how many tokens of a prompt each replica would find."""
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

    def send(self, request_id: str, replica: str, num_tokens: int) -> None:
        """Record that a request is sent to a replica, which has to compute so many tokens for it."""
        with self._lock:
            self._sent[request_id] = _Sent(replica, num_tokens)

    def begin(self, request_id: str) -> None:
        """Record that the prompt of a request was computed."""
        with self._lock:
            if (sent := self._sent.get(request_id)) is not None:
                sent.num_tokens = 0

    def end(self, request_id: str, replica: str) -> None:
        """Record that a request was answered or given up by a replica; it may have been sent to another one since."""
        with self._lock:
            sent = self._sent.get(request_id)
            if sent is not None and sent.replica == replica:
                del self._sent[request_id]
