"""The prefix index: says how many tokens of a prompt each of many engines would find cached, from their events.

It uses the keys and the layout in the events, and the same search as the cache itself. So its answer for a mirrored
cache is exactly what the engine then reports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from threading import Lock
from typing import get_args

from kvframe.cache.arguments import check_salt, check_secret
from kvframe.cache.events import (
    NO_INPUTS,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    Medium,
    block_keys,
    input_keys,
)
from kvframe.cache.input_index import InputBlocks, InputSequence, inputs_root
from kvframe.cache.layout import CacheLayout, GroupLayout
from kvframe.cache.live_range import LiveRange
from kvframe.contract.specs import TOKENS
from kvframe.routing.event_batch import EventBatch
from kvframe.routing.mirrored_cache import Keys, MirroredCache

ALL_MEDIA: frozenset[Medium] = frozenset(get_args(Medium))
"""Every medium: what an engine finds, and brings back from host memory."""


class PrefixIndex:
    """What each engine's cache holds, by the events of the engine.

    Any thread may call any method. An engine is known from its first ``CacheCleared`` on, which begins what every
    listener is given; what comes before is ignored. If events are missing, answers are those of an earlier time.
    """

    def __init__(self, secret: bytes) -> None:
        """Begin without an engine; the secret is 32 bytes, the ``[cache] key`` that the engines share."""
        check_secret(secret)
        self._secret, self._lock = secret, Lock()
        self._caches: dict[str, MirroredCache] = {}
        # By engine, its epoch and the number of its next batch.
        self._next: dict[str, tuple[bytes, int]] = {}
        self._live: dict[CacheLayout, list[tuple[GroupLayout, LiveRange]]] = {}

    @property
    def engines(self) -> tuple[str, ...]:
        """The known engines."""
        with self._lock:
            return tuple(self._caches)

    # --- events -------------------------------------------------------------------------------------------------------

    def apply(self, engine: str, events: Iterable[CacheEvent]) -> None:
        """Apply an engine's next events, in order."""
        with self._lock:
            self._apply(engine, events)

    def apply_batch(self, engine: str, batch: EventBatch) -> bool:
        """Apply a numbered batch, if it follows the last one or begins with a ``CacheCleared``.

        Returns:
            False if batches before it are missing; it is not applied then. The caller gets them again from the number
            of ``next_batch``, or gets a snapshot.
        """
        with self._lock:
            epoch, number = self._next.get(engine, (b"", 0))
            if epoch == batch.epoch and batch.number < number:
                return True
            is_whole = bool(batch.events) and isinstance(batch.events[0], CacheCleared)
            if not is_whole and (epoch, number) != (batch.epoch, batch.number):
                return False
            self._apply(engine, batch.events)
            self._next[engine] = batch.epoch, batch.number + 1
            return True

    def next_batch(self, engine: str) -> tuple[bytes, int] | None:
        """Return the epoch and the number of the batch that an engine's next one must have; None for no batch yet."""
        with self._lock:
            return self._next.get(engine)

    def remove(self, engine: str) -> None:
        """Forget an engine; do nothing if it is not known."""
        with self._lock:
            self._caches.pop(engine, None)
            self._next.pop(engine, None)

    def snapshot(self, engine: str) -> list[CacheEvent]:
        """Return events that give what an engine's cache holds: one ``CacheCleared``, and blocks by keys alone."""
        with self._lock:
            cache = self._caches.get(engine)
            return [] if cache is None else cache.snapshot()

    def _apply(self, engine: str, events: Iterable[CacheEvent]) -> None:
        cache = self._caches.get(engine)
        for event in events:
            if isinstance(event, CacheCleared):
                cache = self._caches[engine] = MirroredCache(event.layout, self._live_of(event.layout))
            elif cache is None:
                continue
            elif isinstance(event, BlocksStored):
                cache.keys.setdefault((event.group, event.medium), set()).update(event.keys)
            else:
                cache.keys.get((event.group, event.medium), set()).difference_update(event.keys)

    def _live_of(self, layout: CacheLayout) -> list[tuple[GroupLayout, LiveRange]]:
        """Return when blocks die in each group of tokens; engines of one layout share it."""
        if layout not in self._live:
            self._live[layout] = [
                (group, group.need.live(group.block_size, layout.max_tokens))
                for group in layout.groups
                if group.need is not None
            ]
        return self._live[layout]

    # --- answers ------------------------------------------------------------------------------------------------------

    def hits(
        self,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        inputs: Mapping[str, InputSequence] = NO_INPUTS,
        media: Collection[Medium] = ALL_MEDIA,
    ) -> dict[str, int]:
        """Return how many first tokens of a prompt each engine would find, and so not compute.

        Args:
            token_ids: The prompt; the last token is always computed.
            salt: The request's ``cache_salt``.
            inputs: Its inputs beside the tokens, by the name of the sequence.
            media: Where blocks are counted; with ``["device"]``, what ``KVCacheManager.find`` returns.

        Raises:
            RequestError: A token is not a token id (``bad_token``), or the salt is no text (``bad_salt``).
        """
        check_salt(salt)
        with self._lock:
            caches = dict(self._caches)
            max_hits = {name: min(len(token_ids) - 1, cache.layout.max_tokens) for name, cache in caches.items()}
            keys = self._keys(caches.values(), token_ids, max(max_hits.values(), default=0), salt, inputs)
            return {name: cache.hit(keys, max_hits[name], inputs, media) for name, cache in caches.items()}

    def _keys(
        self,
        caches: Collection[MirroredCache],
        token_ids: Sequence[int],
        max_tokens: int,
        salt: str,
        inputs: Mapping[str, InputSequence],
    ) -> Keys:
        """Return the keys of the blocks in a prompt's first ``max_tokens`` tokens, for all block sizes."""
        groups = {group for layout in {cache.layout for cache in caches} for group in layout.groups}
        sizes = {group.block_size for group in groups if group.need is not None}
        keys_of = block_keys(self._secret, (salt, inputs_root(inputs)), token_ids, max_tokens, sizes)
        keys = {(size, TOKENS): size_keys for size, size_keys in keys_of.items()}
        for group in groups:
            sequence = inputs.get(group.sequence)
            if group.need is None and sequence is not None:
                size, total = group.block_size, sequence.num_tokens
                blocks = InputBlocks(group.group, salt, group.sequence, sequence.key, total, -(-total // size))
                keys[size, group.sequence] = input_keys(self._secret, blocks, size)
        return keys
