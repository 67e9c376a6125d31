"""The tiers of an engine's cache: brings prefixes back to the device before their requests start, and keeps new pages.

A request's prefix may be in parts on the device, in host memory and in page stores. The longest prefix is taken whose
live blocks are somewhere, in every group; exactly these blocks are moved. Pages come from host memory when the request
is admitted, and from page stores while it waits. What a tier lacks, loses or delays is computed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from time import monotonic, perf_counter
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe import KVCacheManager, PrefixBlocks
from kvframe.contract.foreign import safe_text
from kvframe_engine.host_storage import HostStorage
from kvframe_engine.requests.fetch import Fetch
from kvframe_engine.requests.progress import RequestProgress
from kvframe_engine.tiers.fetcher import LEAST_WAIT, PrefixFetcher
from kvframe_engine.tiers.host_tier import HostTier
from kvframe_engine.tiers.move import HOST, Move
from kvframe_engine.tiers.read_rate import ReadRate
from kvframe_engine.tiers.stored_pages import StoredPages

_log = logging.getLogger("kvframe")
MAX_KNOWN = 1 << 20
"""Keys of pages that are remembered as stored."""

DEFAULT_SECONDS_PER_TOKEN = 1e-3
"""How long a token of a prompt takes to compute, until it is measured."""

BYTES_A_STEP = 16 << 20
"""The bytes of pages that are copied for the stores after a step."""

MAX_FETCHES = 3
"""How often a request waits for its pages once more, because some were evicted before it started."""

BYTES_WHEN_IDLE = 4 << 30
"""The bytes of pages that wait for the stores, at most, when an engine has nothing to compute."""

LEAST_TOKENS = 64
"""Steps of fewer tokens tell little about prompts."""


@attrs.define
class TierCounts:
    """What the tiers did.

    Attributes:
        restored_tokens: Tokens of requests that were brought back to the device, so that they were not computed.
        pages_from: Pages that were brought back, by the name of the tier.
        given_up: Requests that waited for their pages in vain.
    """

    restored_tokens: int = 0
    pages_from: Counter[str] = attrs.field(factory=Counter)
    given_up: int = 0


@attrs.frozen
class Restored:
    """What was brought back to the device for a request.

    Attributes:
        num_tokens: Its tokens.
        sources: The tiers that they came from.
    """

    num_tokens: int = 0
    sources: tuple[str, ...] = ()


NOTHING = Restored()
"""Nothing had to be brought, or nothing arrived."""


class Tiers:
    """Moves pages between the device, host memory and page stores.

    The engine calls every method, between two steps. It is a watcher of the cache's pages (``PageWatcher``).

    Attributes:
        counts: What the tiers did.
        host_tier: Evicted pages in host memory; None without host memory.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        host: HostStorage | None,
        pages: StoredPages | None,
        secret: bytes,
    ) -> None:
        """Begin to keep pages.

        Args:
            manager: The cache.
            host: The host memory; None for none.
            pages: Moves pages from and to page stores; None for no stores.
            secret: 32 bytes, for the keys of pages.
        """
        self._manager, self._pages, self._secret = manager, pages, secret
        self.host_tier = None if host is None else HostTier(manager, host)
        self.counts = TierCounts()
        self._fetcher = None if pages is None else PrefixFetcher(pages)
        self._fresh: dict[int, tuple[int, bytes]] = {}
        # Pages that no store gets, because requests hint that they are not needed: unless a later request needs them.
        self._unneeded: dict[int, tuple[int, bytes]] = {}
        self._known: dict[tuple[int, bytes], None] = {}
        self._store_counts = {} if pages is None else pages.counts
        self._seconds_per_token: float | None = None
        self._host_rate = ReadRate()
        self._page_bytes = [group.page_bytes for group in manager.plan.groups]
        tier = [] if self.host_tier is None else [self.host_tier]
        manager.watch_pages(secret, *tier, *([] if pages is None else [self]))

    # --- waiting requests ---------------------------------------------------------------------------------------------

    def begin(self, request: RequestProgress) -> None:
        """Begin to fetch what a waiting request can continue from and the device does not have."""
        request.num_fetches = 0
        self._begin(request)

    def begins_again(self, request: RequestProgress) -> bool:
        """Begin again to fetch a request's prefix, because less of it was found than the request waited for.

        Other requests may have evicted pages in between, on the device and in host memory. A prefix without its first
        pages is none, however many of the others were fetched.

        Returns:
            Whether the request should wait once more.
        """
        if request.num_fetches == MAX_FETCHES:
            return False
        request.num_fetches += 1
        self._begin(request)
        return request.fetch is not None

    def _begin(self, request: RequestProgress) -> None:
        self.drop(request)
        request.promised_tokens = 0
        if not request.uses_prefix or request.forks_from is not None:
            return
        blocks = self._blocks_of(request, None)
        request.promised_tokens = blocks.num_cached
        if blocks.is_whole(blocks.num_cached) and not blocks.lacks_inputs:
            return
        in_host = self._in_host(blocks)
        local = [cached | (host > 0) for cached, host in zip(blocks.cached, in_host, strict=True)]
        num_local = blocks.longest(local)
        request.promised_tokens = max(blocks.num_cached, num_local or 0)
        records = None if self._pages is None else self._pages.records
        if self._fetcher is None or self._fetcher.is_stuck:
            is_more = num_local is not None and (num_local > blocks.num_cached or blocks.lacks_inputs)
            request.fetch = Fetch(records, blocks, local, 0.0, is_done=True) if is_more else None
            return
        per_token = self._seconds_per_token or DEFAULT_SECONDS_PER_TOKEN
        num_missing = blocks.most - (num_local or 0)
        fetch = request.fetch = Fetch(records, blocks, local, max(LEAST_WAIT, num_missing * per_token))
        if num_local is not None and blocks.is_whole(num_local):
            fetch.is_done = True
        else:
            self._fetcher.put(fetch)

    @staticmethod
    def is_ready(request: RequestProgress) -> bool:
        """Return whether a waiting request need not wait for its pages."""
        return request.fetch is None or request.fetch.is_over

    def wait(self) -> None:
        """Wait a moment for pages, when nothing can be computed."""
        if self._fetcher is not None:
            self._fetcher.wait(0.002)

    def drop(self, request: RequestProgress) -> None:
        """Forget what was fetched for a request, and release what was brought to the device for it."""
        fetch, request.fetch = request.fetch, None
        if fetch is None:
            return
        if fetch.pin is not None:
            self._manager.unpin(fetch.pin)
        if self._fetcher is not None:
            for page in fetch.absent:
                # If it is computed again, the stores get it again.
                self._known.pop(page, None)
            self._fetcher.release(fetch)

    def restore(self, request: RequestProgress) -> Restored | None:
        """Bring a request's prefix to the device, and keep it there until ``drop``.

        Returns:
            What was brought; None if the pool has too few free pages now.
        """
        fetch = request.fetch
        assert fetch is not None
        # What stores have not brought in time is not waited for; what host memory has is still taken.
        is_late = not fetch.is_done
        if is_late:
            self.counts.given_up += 1
            request.num_fetches = MAX_FETCHES
        request.promised_tokens = max(request.promised_tokens, fetch.num_tokens)
        blocks = self._blocks_of(request, fetch.blocks)
        # After a reset of the cache, pages may be of other weights. The fetcher counts them until they are dropped.
        is_old = self._pages is not None and fetch.records is not self._pages.records
        fetched = {} if is_late or is_old else fetch.pages
        in_host = self._in_host(blocks)
        present = [cached | (host > 0) for cached, host in zip(blocks.cached, in_host, strict=True)]
        for group, block in fetched:
            present[group][block] = True
        num_tokens = blocks.longest(present)
        if num_tokens is None or (num_tokens <= blocks.num_cached and not blocks.lacks_inputs):
            return NOTHING
        if len(self._store_counts) == 1:
            self._known.update(dict.fromkeys((group, blocks.keys[group][block]) for group, block in fetched))
        move = Move(self._manager, self.host_tier, self._pages, blocks, in_host, fetch.number, fetched, num_tokens)
        num_saved = num_tokens - blocks.num_cached
        if not fetched and self._is_slower(move.num_host_bytes, num_saved) and not blocks.lacks_inputs:
            request.promised_tokens = 0
            return NOTHING
        began = perf_counter()
        try:
            fetch.pin = move.run(request)
        except (LookupError, RuntimeError, MemoryError) as error:
            _log.warning("a prefix could not be brought to the device, and is computed: %s", safe_text(error))
            request.promised_tokens = 0
            return NOTHING
        if fetch.pin is None:
            return None
        if not fetched:
            self._host_rate.note(perf_counter() - began, move.num_host_bytes)
        self.counts.restored_tokens += num_saved
        self.counts.pages_from += move.sources
        return Restored(num_saved, tuple(sorted(move.sources)))

    def _is_slower(self, num_bytes: int, num_tokens: int) -> bool:
        """Return whether copying bytes from host memory takes longer than computing tokens, as far as both are known.

        On a GPU, the time of the copies is that of their launches.
        """
        if self._seconds_per_token is None or self._host_rate.seconds(num_bytes) < num_tokens * self._seconds_per_token:
            return False
        self._host_rate.note_skip()
        return True

    def _blocks_of(self, request: RequestProgress, known: PrefixBlocks | None) -> PrefixBlocks:
        return self._manager.prefix_blocks(
            request.token_ids,
            secret=self._secret,
            salt=request.cache_salt,
            inputs=request.input_sequences,
            num_prompt_tokens=request.num_prompt_tokens if request.keeps_part else None,
            known=known,
        )

    def _in_host(self, blocks: PrefixBlocks) -> list[npt.NDArray[np.int32]]:
        """Return per group the host page of each block; 0 for none."""
        tier = self.host_tier
        if tier is None:
            return [np.zeros(len(keys), dtype=np.int32) for keys in blocks.keys]
        return [tier.find_pages(group, keys) for group, keys in enumerate(blocks.keys)]

    # --- new pages ----------------------------------------------------------------------------------------------------

    def note_stored(self, group: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Remember pages that became findable, to give them to the stores after the step."""
        for key, block_id in zip(keys, block_ids, strict=True):
            if (group, key) not in self._known:
                self._fresh[block_id] = group, key

    def note_evicted(self, group: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Copy pages now that are evicted before the stores got them."""
        assert self._pages is not None
        self._fresh |= {block_id: self._unneeded.pop(block_id) for block_id in block_ids if block_id in self._unneeded}
        lost = self._needed([block_id for block_id in block_ids if block_id in self._fresh])
        for block_id in block_ids:
            self._unneeded.pop(block_id, None)
        if not lost:
            return
        num_kept = -(-self._pages.free_bytes // self._page_bytes[group])
        self._give(lost[:num_kept])
        self._pages.count_dropped(len(lost[num_kept:]))
        for block_id in lost[num_kept:]:
            del self._fresh[block_id]

    def note_cleared(self) -> None:
        """Forget all pages: the model changed."""
        self._fresh.clear()
        self._unneeded.clear()
        self._known.clear()
        if self._pages is not None:
            self._pages.renew()

    def copies(self) -> tuple[tuple[int, Sequence[bytes]], ...]:
        """Return no copies: events do not say what page stores have."""
        return ()

    def after_step(self, num_tokens: int, seconds: float, *, is_last: bool) -> None:
        """Give pages to the stores that became findable, and learn how long tokens take.

        Args:
            num_tokens: The tokens that the step computed.
            seconds: How long it took.
            is_last: Whether no request is left. Then pages are given whatever waits already; otherwise as many as
                hardly delay the next step, and the others after later steps.
        """
        if num_tokens >= LEAST_TOKENS:
            per_token, old_per_token = seconds / num_tokens, self._seconds_per_token
            self._seconds_per_token = per_token if old_per_token is None else 0.9 * old_per_token + 0.1 * per_token
            if self._fetcher is not None:
                self._fetcher.seconds_per_token = self._seconds_per_token
        if self._fresh and self._pages is not None:
            if is_last:
                self._give_all()
            else:
                self._give_some(min(BYTES_A_STEP, self._pages.free_bytes))

    def _give_all(self) -> None:
        """Give the stores as many pages as may wait when nothing is computed."""
        assert self._pages is not None
        self._give_some(BYTES_WHEN_IDLE - self._pages.queued_bytes, BYTES_WHEN_IDLE)

    def _give_some(self, num_bytes: int, max_queued_bytes: int | None = None) -> None:
        """Give pages to the stores, the oldest first: so many bytes at most, or one larger page."""
        chosen_ids: list[int] = []
        for block_id, (group, _) in self._fresh.items():
            if num_bytes <= 0 or (chosen_ids and num_bytes < self._page_bytes[group]):
                break
            num_bytes -= self._page_bytes[group]
            chosen_ids.append(block_id)
        self._give(self._needed(chosen_ids), max_queued_bytes)

    def _needed(self, block_ids: Sequence[int]) -> list[int]:
        """Return which pages the stores should get; set aside those that requests hint are not needed."""
        needed = []
        for block_id, may_be_needed in zip(block_ids, self._manager.may_be_needed(block_ids), strict=True):
            if may_be_needed:
                needed.append(block_id)
            else:
                self._unneeded[block_id] = self._fresh.pop(block_id)
        return needed

    def _give(self, block_ids: Sequence[int], max_queued_bytes: int | None = None) -> None:
        """Copy pages from the device, and queue them for the stores."""
        assert self._pages is not None
        blocks_of_groups: dict[int, list[int]] = {}
        for block_id in block_ids:
            blocks_of_groups.setdefault(self._fresh[block_id][0], []).append(block_id)
        for group, group_blocks in blocks_of_groups.items():
            at_once = max(1, BYTES_A_STEP // self._page_bytes[group])
            for start in range(0, len(group_blocks), at_once):
                block_part = group_blocks[start : start + at_once]
                keys = [self._fresh.pop(block_id)[1] for block_id in block_part]
                self._pages.give(group, keys, block_part, max_queued_bytes)
                self._known.update(dict.fromkeys((group, key) for key in keys))
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    @property
    def names(self) -> tuple[str, ...]:
        """The tiers in the order in which they are asked."""
        return (*([] if self.host_tier is None else [HOST]), *self._store_counts)

    def stats(self) -> dict[str, Any]:
        """Return the numbers of ``EngineStats`` that are about tiers. Any thread may call it."""
        counts, tier = self.counts, self.host_tier
        return {
            "restored_tokens": counts.restored_tokens,
            "restored_blocks": {name: counts.pages_from[name] for name in self.names},
            "waits_in_vain": counts.given_up,
            "host_blocks": 0 if tier is None else tier.num_cached,
            "host_blocks_stored": 0 if tier is None else tier.pages_stored,
            "host_blocks_dropped": 0 if tier is None else tier.pages_dropped,
            "stores": {name: attrs.evolve(of_store) for name, of_store in self._store_counts.items()},
        }

    def flush(self, seconds: float) -> bool:
        """Wait until the stores have what was computed, for some seconds at most; return whether they have."""
        deadline = monotonic() + seconds
        self._fresh |= self._unneeded
        self._unneeded.clear()
        while self._pages is not None:
            self._give_all()
            if not self._pages.flush(max(0.0, deadline - monotonic())):
                return False
            if not self._fresh:
                break
        return True

    def close(self) -> None:
        """Give the stores what was computed, for some seconds at most, and close them."""
        self.flush(CLOSE_SECONDS)
        if self._fetcher is not None:
            self._fetcher.close(CLOSE_SECONDS)
        if self._pages is not None:
            self._pages.close(CLOSE_SECONDS)


CLOSE_SECONDS = 5.0
"""How long an engine that is closed waits for its stores."""
