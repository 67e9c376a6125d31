"""The cache manager: one verb for each event in a request's life, and what an engine asks of the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from time import monotonic

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.arguments import (
    SECRET_BYTES,
    check_block_ids,
    check_count,
    check_inputs,
    check_name,
    check_num_tokens,
    check_salt,
    check_secret,
    check_sequence,
    check_tokens,
)
from kvframe.cache.block_table import BlockTables, GroupKinds, RowNumbers, Rows, RowState
from kvframe.cache.coordinator import FillPages, KVCacheCoordinator, PageCopier, TableRows, TokenMover
from kvframe.cache.events import NO_INPUTS, EventLog, PageWatcher, block_keys, input_keys
from kvframe.cache.hints import NO_HINTS, Hints, KeptLimit
from kvframe.cache.input_index import InputBlocks, InputSequence, Namespace, input_blocks, inputs_root
from kvframe.cache.layout import CacheLayout
from kvframe.cache.prefix_lookup import NO_HIT, Pin, Pins, PrefixCache, PrefixHit, found_prefix
from kvframe.cache.restore import restore_prefix
from kvframe.cache.stats import FoundPrefix, GroupLookups, KVCacheStats
from kvframe.cache.stored_prefix import PrefixBlocks
from kvframe.contract.errors import RequestError
from kvframe.contract.eviction import LRU, EvictionPolicy
from kvframe.contract.foreign import safe_repr
from kvframe.planning.plan import KVCachePlan


@attrs.define(eq=False)
class Entry(RowState):
    """A request.

    Attributes:
        row: Its row in the block tables.
        uncounted: The result of its lookup, which its first commit counts: a waiting request is looked up many times.
        asked_tokens: The tokens of that lookup; 0 if there was none.
        num_resets: Resets of the prefix cache before it started; of a fork, before its first request started.
    """

    row: int = 0
    uncounted: PrefixHit = NO_HIT
    asked_tokens: int = 0
    num_resets: int = 0


class KVCacheManager:
    """The request table of the cache.

    Invariant: requests and pins reference exactly the held pages of the pool.

    A verb that returns False, returns None because the pool has too few pages, or raises an error has changed nothing,
    unless its description says otherwise. These arguments, and their errors (``RequestError``), are the same in all
    verbs:

    - ``request_id``: the name of a request in the table (``unknown_id``), a string (``bad_id``).
    - ``token_ids``: at least one (``empty_prompt``) and at most the plan's longest request (``too_long``), each in
      ``[0, 2**32)`` (``bad_token``). ``array("I", ...)`` is read fastest.
    - ``salt``: Unicode text (``bad_salt``). Requests share blocks only if they have the same salt. It contains
      everything else that the state of tokens depends on, such as a tenant or an adapter of the weights.
    - ``inputs``: the inputs beside the tokens, by the name of the sequence (``bad_input``), each within the plan's
      ``max_input_lens`` (``input_too_long``). Requests share blocks of tokens only if their inputs are equal.
    - ``num_tokens``: a number of first tokens (``bad_count``), at most those of the plan's longest request
      (``too_long``).
    - ``rows``: ``[n], int64, host``, rows of requests, each once, with an array of as many numbers (``bad_rows``).

    Attributes:
        plan: The plan that it manages.
        tables: One block table per group.
        prefix_caching: Whether computed blocks become findable; False if there is nothing to cache.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        *,
        max_num_seqs: int,
        prefix_caching: bool = True,
        copier: PageCopier | None = None,
        mover: TokenMover | None = None,
        eviction: EvictionPolicy | None = None,
        max_kept_share: float = 0.5,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """Start with an empty pool.

        Args:
            plan: The cache plan.
            max_num_seqs: The most requests in the table at a time.
            prefix_caching: Whether computed blocks become findable by later requests.
            copier: Copies pages within the pool; without it none is forked.
            mover: Moves the tokens that layers keep of a prompt; without it no request gives up any.
            eviction: The policy that orders cached pages for eviction; ``LRU`` if None.
            max_kept_share: The share of the pool that requests of one owner may keep by the hint ``keep_seconds``.
            now: Returns the seconds of a clock that never goes back.

        Raises:
            PluginError: The eviction policy gives a wrong answer.
        """
        self.plan = plan
        self.prefix_caching = prefix_caching and bool(plan.groups)
        self.tables = BlockTables(
            max_num_seqs,
            plan.max_model_len,
            [group.block_size for group in plan.groups],
            [group.spec.sequence for group in plan.groups],
            plan.max_input_lens,
        )
        self._numbers = numbers = RowNumbers(len(plan.groups), max_num_seqs)
        kinds = GroupKinds.of(plan, self.tables)
        self._cache = PrefixCache(kinds, numbers, is_caching=self.prefix_caching, eviction=eviction)
        self._pool, self._publisher = self._cache.pool, self._cache.publisher
        self._pins = Pins(kinds, self._pool)
        self._coordinator = KVCacheCoordinator(kinds, numbers, self._pool, self._publisher)
        self._input_groups = kinds.input_groups
        self._kinds = kinds
        self._entries: dict[str, Entry] = {}
        self._fresh: dict[int, Entry] = {}
        self._copier, self._mover = copier, mover
        self.tables.first_tokens = {group: np.zeros(max_num_seqs, dtype=np.int64) for group in kinds.budgets}
        self._rows = TableRows(max_num_seqs)
        self._num_resets = 0
        self._kept_limit = KeptLimit(max_kept_share, now)
        self._events: EventLog | None = None
        self._watchers: tuple[PageWatcher, ...] = ()
        self._watch_secret = bytes(SECRET_BYTES)
        self._lookups = [GroupLookups(group.spec.kind) for group in plan.groups]

    # --- one verb for each event in a request's life ---------------------------------------------------------------

    def start(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        use_prefix: bool = True,
        inputs: Mapping[str, InputSequence] = NO_INPUTS,
        num_prompt_tokens: int | None = None,
    ) -> int:
        """Add a request to the table, referencing its longest cached prefix and its cached inputs.

        The last token is always computed, because the request needs its logits.

        Args:
            request_id: Its name, which no request in the table has (``duplicate_id``).
            token_ids: Its tokens so far. They are read again while the request runs: the caller appends tokens to this
                sequence, and does not change computed ones.
            salt: As in every verb.
            use_prefix: Whether to look for a cached prefix, and for cached inputs.
            inputs: As in every verb.
            num_prompt_tokens: How many of its first tokens are the prompt, if layers keep a part of prompts: its hit is
                shorter than the prompt. None for all tokens.

        Returns:
            The number of first tokens that need not be computed.

        Raises:
            RequestError: An argument is wrong, or no row is free (``no_row``).
            SpecError: A spec answers wrongly at the end of the hit.
        """
        self._check_new(request_id)
        row = self._rows.next_free()
        namespace, blocks_of_inputs = self._check_prompt(token_ids, salt, inputs)
        entry = Entry(namespace, token_ids, blocks_of_inputs, row=row, num_resets=self._num_resets)
        hit = NO_HIT
        if self.prefix_caching and use_prefix:
            max_tokens = self._longest_hit(token_ids, num_prompt_tokens)
            hit = self._cache.find_prefix(namespace, token_ids, max_tokens, blocks_of_inputs)
            entry.uncounted, entry.asked_tokens = hit, len(token_ids)
        self._coordinator.start_row(row, entry, hit)
        self._rows.take()
        self._entries[request_id] = entry
        if self.prefix_caching:
            self._publisher.follow(row, hit.num_tokens, hit.match)
            self._fresh[row] = entry
        return hit.num_tokens

    def fork(self, request_id: str, new_id: str, token_ids: Sequence[int]) -> bool:
        """Add a request to the table that continues from another one, referencing the pages of its full blocks.

        The new one gets copies of pages that are not full, and no block without a computed token.

        Args:
            request_id: A request in the table; its inputs are computed.
            new_id: The new request's name, which no request in the table has (``duplicate_id``).
            token_ids: The tokens of the new request. They begin with the computed tokens of the first one.

        Returns:
            False if the pool has too few pages now.

        Raises:
            RequestError: An argument is wrong, the first one cannot be forked (``no_fork``), or no row is free
                (``no_row``).
            RuntimeError: A page could not be copied.
        """
        check_name(request_id)
        self._check_new(new_id)
        row = self._rows.next_free()
        check_tokens(token_ids, self.plan.max_model_len)
        entry, why = self._entries.get(request_id), None
        if entry is None:
            why = "it is not in the table; start it"
        elif self._copier is None:
            why = "its manager has no copier for shared pages; make the manager with one"
        elif self.missing_inputs(request_id):
            why = "its inputs are not computed; commit its first tokens before"
        if entry is None or self._copier is None or why is not None:
            raise RequestError(f"the request {request_id!r} cannot be forked: {why}", code="no_fork")
        new_entry = attrs.evolve(entry, token_ids=token_ids, row=row, uncounted=NO_HIT, asked_tokens=0)
        if not self._coordinator.fork_row(entry.row, row, new_entry, self._copier):
            return False
        self._rows.take()
        self._entries[new_id] = new_entry
        return True

    def _check_prompt(
        self, token_ids: Sequence[int], salt: str, inputs: Mapping[str, InputSequence], min_tokens: int = 1
    ) -> tuple[Namespace, tuple[InputBlocks, ...]]:
        """Check tokens, salt and inputs; return the namespace, and the blocks of the inputs."""
        check_tokens(token_ids, self.plan.max_model_len, min_tokens)
        check_salt(salt)
        if inputs == NO_INPUTS:
            return (salt, b""), ()
        check_inputs(inputs, self.plan.max_input_lens)
        return (salt, inputs_root(inputs)), input_blocks(self._input_groups, inputs, salt)

    def _longest_hit(self, token_ids: Sequence[int], num_prompt_tokens: int | None) -> int:
        """Return the tokens of the longest hit that a request may have."""
        # What other requests computed after their prompts' ends is no state of a request that gave up tokens.
        num_known = num_prompt_tokens if num_prompt_tokens and self.tables.first_tokens else len(token_ids)
        return min(num_known, len(token_ids)) - 1

    def _check_new(self, request_id: str) -> None:
        """Refuse the name of a new request if another request has it."""
        check_name(request_id)
        if request_id in self._entries:
            raise RequestError(
                f"a request {request_id!r} is in the table already; free it first, or give the new one another name",
                code="duplicate_id",
            )

    def find(self, token_ids: Sequence[int], *, salt: str = "", inputs: Mapping[str, InputSequence] = NO_INPUTS) -> int:
        """Return how many tokens ``start`` would find cached of a prompt."""
        namespace, blocks_of_inputs = self._check_prompt(token_ids, salt, inputs)
        return self._cache.find_prefix(namespace, token_ids, len(token_ids) - 1, blocks_of_inputs).num_tokens

    def found_prefix(self, request_id: str) -> FoundPrefix:
        """Return the hit of a request, and why it is not longer. Call this before its first ``commit``."""
        entry = self._entry(request_id)
        return found_prefix(entry.uncounted, entry.asked_tokens, self.plan)

    def missing_inputs(self, request_id: str) -> frozenset[str]:
        """Return the inputs of a request whose state the next step has to compute; none after its first ``commit``."""
        return self._entry(request_id).missing_inputs

    def has_capacity(self, request_id: str, num_tokens: int) -> bool:
        """Return whether the pool has all pages that a request needs for its first ``num_tokens`` tokens.

        A scheduler that computes a prompt in chunks calls this before the first chunk. Otherwise it could start a
        request that has to be preempted before its prompt is computed.
        """
        row = self._entry(request_id).row
        check_num_tokens(num_tokens, self.plan.max_model_len)
        return self._coordinator.allocator.could_allocate(row, num_tokens)

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Allocate blocks for a request's tokens ``[0, num_tokens)`` and, the first time, for all of its inputs.

        Returns:
            False if the pool has too few pages now.

        Raises:
            SpecError: A spec answers wrongly about these tokens.
        """
        row = self._entry(request_id).row
        if type(num_tokens) is not int or num_tokens < 0:
            num_tokens = check_count("num_tokens", num_tokens)
        return self._coordinator.extend_row(row, num_tokens)

    def extend_rows(self, rows: Rows, num_tokens: npt.NDArray[np.int64]) -> bool:
        """Do what ``extend`` does for many requests at once, or for none: ``num_tokens`` is ``[n], int64, host``."""
        self._rows.check(rows, num_tokens)
        return self._coordinator.extend_rows(rows, num_tokens)

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Record that a request's tokens ``[0, num_computed)``, and its inputs, are computed.

        Full blocks become findable. Blocks that no later token needs are released.

        Args:
            request_id: As in every verb.
            token_ids: Its tokens, at least ``num_computed`` of them, beginning with those that it started with.
            num_computed: How many are computed; fewer than it was extended for if draft tokens were rejected.

        Raises:
            RequestError: The tokens are no sequence (``bad_token``), or it was not extended for so many
                (``not_extended``).
            RequestError: A token is not a token id, or is missing (``bad_token``). Tokens are read by this verb or
                before it. The commit is done, but blocks from this token on do not become findable.
        """
        entry = self._entry(request_id)
        if type(num_computed) is not int or num_computed < 0:
            num_computed = check_count("num_computed", num_computed)
        self._coordinator.check_commit_of(entry.row, num_computed)
        if token_ids is not entry.token_ids:
            check_sequence(token_ids)
            entry.token_ids = token_ids
        if entry.row in self._fresh:
            self._first_commit(self._fresh.pop(entry.row))
        self._coordinator.commit_row(entry.row, num_computed)
        if self._publisher.full_rows or self._publisher.unreadable:
            self._after_commit([entry.row])

    def commit_rows(self, rows: Rows, num_computed: npt.NDArray[np.int64], *, keeps_extended: bool = False) -> None:
        """Do what ``commit`` does for many requests at once.

        Their tokens are read from the sequences that they started with, or that ``commit`` was given last.

        Args:
            rows: Their rows.
            num_computed: ``[n], int64, host``.
            keeps_extended: Whether they keep the blocks of all tokens that they were extended for, because a step is
                being computed that has these tokens.
        """
        self._rows.check(rows, num_computed)
        self._coordinator.check_commit(rows, num_computed)
        for row in self._fresh.keys() & rows.tolist() if self._fresh else ():
            self._first_commit(self._fresh.pop(row))
        self._coordinator.commit_rows(rows, num_computed, keeps_extended=keeps_extended)
        if self._publisher.full_rows or self._publisher.unreadable:
            self._after_commit(rows.tolist())

    def _first_commit(self, entry: Entry) -> None:
        """Count a request's lookup, and publish its inputs, when its first tokens are computed."""
        self._cache.count_hit(entry.uncounted, entry.asked_tokens, self._lookups)
        if self._pool.eviction is not LRU:
            for pages in entry.uncounted.needed_pages(self._kinds):
                self._pool.count_uses(pages)
        entry.uncounted, entry.asked_tokens = NO_HIT, 0
        if self._input_groups and entry.num_resets == self._num_resets:
            for blocks in entry.inputs:
                self._cache.inputs.publish_input(blocks, self.tables[blocks.group].ids[entry.row, : blocks.num_blocks])

    def _after_commit(self, rows: Sequence[int]) -> None:
        """Record the events of full blocks, and raise for tokens that could not be read."""
        self._publisher.update_full_leaves()
        for row in rows if self._publisher.unreadable else ():
            if row in self._publisher.unreadable:
                why = self._publisher.unreadable.pop(row)
                entries = self._entries.items()
                request_id = next(name for name, entry in entries if entry.row == row)
                raise RequestError(
                    f"the request {request_id!r} is committed, but no other request finds its tokens from there on: "
                    f"{why}",
                    code=why.code,
                )

    def shrink(self, request_id: str) -> bool:
        """Let a request give up the tokens of its prompt that its layers do not keep; once, when all is computed.

        All its computed tokens are the prompt. Blocks that it computes from here on do not become findable.

        Returns:
            False if the pool has too few pages now for copies of the tokens that stay.

        Raises:
            SpecError: A type chooses other tokens than it may.
            RequestError: The manager has nothing that moves tokens (``no_mover``).
        """
        row = self._entry(request_id).row
        if self._mover is None:
            raise RequestError(
                f"the request {request_id!r} cannot give up tokens: make its manager with a mover", code="no_mover"
            )
        return self._coordinator.shrink_row(row, self._mover)

    def free(self, request_id: str, *, hints: Hints = NO_HINTS, owner: str = "") -> None:
        """Remove a request from the table, and release its pages; its findable blocks stay cached.

        Args:
            request_id: As in every verb.
            hints: What its sender says of it, for the eviction policy, if the request has ended.
            owner: Whose request it is: all requests of one owner keep ``max_kept_share`` of the pool at most.
        """
        row = self._entry(request_id).row
        if self._pool.takes_hints(hints):
            self._hint_row(row, hints, owner)
        self._fresh.pop(row, None)
        self._coordinator.free_row(row)
        self._rows.release(row)
        del self._entries[request_id]

    def _hint_row(self, row: int, hints: Hints, owner: str) -> None:
        """Record what the sender of a row's request says of its pages."""
        counts = self._numbers.num_blocks[:, row].tolist()
        ids = np.concatenate([self.tables[group].ids[row, :count] for group, count in enumerate(counts)])
        if hints != NO_HINTS:
            # Of dead blocks, such as those before a window, the pages that are still cached.
            ids = np.where(ids == 0, self._publisher.pages_of(row, counts), ids)
        groups = np.repeat(np.arange(len(counts)), counts)
        self._pool.hint_blocks(ids[ids != 0], groups[ids != 0], hints, owner, self._kept_limit)

    def _entry(self, request_id: str) -> Entry:
        if type(request_id) is not str:
            check_name(request_id)
        entry = self._entries.get(request_id)
        if entry is None:
            raise RequestError(
                f"the request {request_id!r} is not in the table: there is none of that name; start it",
                code="unknown_id",
            )
        return entry

    def reset_prefix_cache(self) -> None:
        """Release all pins, evict every cached page, and make held ones unfindable.

        Running requests publish nothing more.
        """
        self._pins.unpin_all()
        if self._events is not None:
            self._events.record_cleared()
        self._cache.clear()
        self._num_resets += 1

    def resize(self, num_slabs: int) -> bool:
        """Change the number of slabs; the caller allocates added bytes before, and frees removed ones after.

        Slabs are added, and removed, at the end of the pool. Cached pages of removed slabs are evicted.

        Args:
            num_slabs: The new number of slabs, in which running requests have to fit.

        Returns:
            False if a page of a removed slab is held, or the plan's longest request would no longer fit beside pinned
            pages.
        """
        check_count("num_slabs", num_slabs, minimum=len(self.plan.groups))
        if num_slabs > self.plan.most_slabs:
            raise RequestError(
                f"a pool of {safe_repr(num_slabs)} slabs is refused: {self.plan.most_slabs} are the most whose pages "
                "have a 32-bit block id",
                code="too_large",
            )
        plan = attrs.evolve(self.plan, num_slabs=num_slabs)
        if not self._pins.fit_into(plan) or not self._cache.resize(plan):
            return False
        self.plan = self._pins.plan = plan
        return True

    # --- prefixes that stay -------------------------------------------------------------------------------------------

    def pin(
        self,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        inputs: Mapping[str, InputSequence] = NO_INPUTS,
        checks_capacity: bool = True,
    ) -> Pin:
        """Keep the longest cached prefix of tokens, all of them at most, and the cached inputs.

        No page of it is evicted until ``unpin``, or until the cache is reset.

        Args:
            token_ids: As in every verb, or none: an input can be pinned without a token.
            salt: As in every verb.
            inputs: As in every verb.
            checks_capacity: Whether to refuse a pin that leaves too few pages for a request. False only for a pin that
                is released before the next ``extend``.

        Raises:
            RequestError: The plan's longest request would no longer fit beside all pins (``no_capacity``).
        """
        namespace, blocks_of_inputs = self._check_prompt(token_ids, salt, inputs, min_tokens=0)
        hit = self._cache.find_prefix(namespace, token_ids, len(token_ids), blocks_of_inputs)
        return self._pins.pin_prefix(hit, checks_capacity=checks_capacity)

    def restore(
        self,
        token_ids: Sequence[int],
        fetch: FillPages,
        *,
        salt: str = "",
        inputs: Mapping[str, InputSequence] = NO_INPUTS,
    ) -> Pin | None:
        """Cache a prefix whose pages are outside of the pool, as if it had been computed here, and pin it.

        The table must have a free row. The pin may leave too few pages for a request: when all prefixes are restored,
        release their pins before a request runs. Without prefix caching nothing is copied, and the pin is empty.

        Args:
            token_ids: Its tokens, whole blocks in every group.
            fetch: Copies pages: it is called with a group, the indices of blocks that ``pin`` would hold and that are
                not cached, and as many block ids to copy them to.
            salt: As in every verb.
            inputs: As in every verb.

        Returns:
            None if the pool has too few pages now.

        Raises:
            RequestError: No row is free (``no_row``).
            Exception: What ``fetch`` raises; nothing changed.
        """
        row = self._rows.next_free()
        namespace, blocks_of_inputs = self._check_prompt(token_ids, salt, inputs, min_tokens=0)
        state = RowState(namespace, token_ids, blocks_of_inputs)
        if self.prefix_caching and not restore_prefix(self._kinds, self._coordinator, self._cache, row, state, fetch):
            return None
        return self.pin(token_ids, salt=salt, inputs=inputs, checks_capacity=False)

    def unpin(self, pin: Pin) -> None:
        """Release a pin, if it is held; its pages stay cached until they are evicted."""
        self._pins.unpin_prefix(pin)

    # --- events -------------------------------------------------------------------------------------------------------

    def record_events(self, secret: bytes) -> EventLog:
        """Return a log of the blocks that become findable and that are removed. It begins with those findable now.

        An earlier log gets no more events.

        Args:
            secret: 32 bytes, for the keys of blocks (``kvframe.cache.events``).
        """
        check_secret(secret)
        log = self._log(secret, keeps_events=True)
        for watcher in self._watchers:
            for group, keys in watcher.copies():
                log.record_copies(group, keys)
        self._publisher.update_leaves_after_commits(True)
        return log

    def stop_events(self) -> None:
        """Stop recording events."""
        if self._watchers:
            self._log(self._watch_secret, keeps_events=False)
        else:
            self._events = None
            self._cache.log_events_to(None)
        self._publisher.update_leaves_after_commits(False)

    def watch_pages(self, secret: bytes, *watchers: PageWatcher) -> None:
        """Let watchers learn of all pages, to copy those that are evicted. Called once, before the first request.

        Args:
            secret: 32 bytes, for the keys of pages, and of later events too.
            watchers: What learns of pages, in this order.
        """
        check_secret(secret)
        self._watch_secret, self._watchers = secret, watchers
        if watchers:
            self._log(secret, keeps_events=False)

    def record_copies(self, group: int, keys: Sequence[bytes], *, are_removed: bool = False) -> None:
        """Let the events say that host memory has copies of evicted pages of a group, or that they are removed."""
        if self._events is not None and self._events.keeps_events:
            self._events.record_copies(group, keys, are_removed=are_removed)

    def _log(self, secret: bytes, *, keeps_events: bool) -> EventLog:
        """Return a log of all pages, which replaces the one before."""
        self._events = EventLog(self.layout, self._cache.tree, secret, self._watchers, keeps_events=keeps_events)
        self._cache.log_events_to(self._events)
        return self._events

    def may_be_needed(self, block_ids: Sequence[int]) -> list[bool]:
        """Return whether each cached page may be needed again: not if requests hint that it is not.

        Args:
            block_ids: The pages.

        Raises:
            RequestError: ``block_ids`` are no ids of this cache's pages (``bad_blocks``).
        """
        ids = check_block_ids(block_ids, self.plan.total_bytes // self.plan.block_id_bytes)
        may_be_needed: list[bool] = self._pool.may_be_needed(ids).tolist()
        return may_be_needed

    @cached_property
    def layout(self) -> CacheLayout:
        """What hits need, in each group."""
        return CacheLayout.of(self.plan, self._kinds.live, is_caching=self.prefix_caching)

    def prefix_blocks(
        self,
        token_ids: Sequence[int],
        *,
        secret: bytes,
        salt: str = "",
        inputs: Mapping[str, InputSequence] = NO_INPUTS,
        num_prompt_tokens: int | None = None,
        known: PrefixBlocks | None = None,
    ) -> PrefixBlocks:
        """Return the keys of the blocks that ``start`` could find of a request, and which of them are in the pool.

        Args:
            token_ids: As for ``start``.
            secret: 32 bytes, for the keys.
            salt: As in every verb.
            inputs: As in every verb.
            num_prompt_tokens: As for ``start``.
            known: An earlier result for the same request, whose keys need not be made again.
        """
        check_secret(secret)
        namespace, blocks_of_inputs = self._check_prompt(token_ids, salt, inputs)
        max_tokens = self._longest_hit(token_ids, num_prompt_tokens)
        hit = self._cache.find_prefix(namespace, token_ids, max_tokens, blocks_of_inputs)
        if known is None:
            sizes = {group.block_size for group in self._kinds.token_groups}
            keys_of = block_keys(secret, namespace, token_ids, max_tokens, sizes)
            keys = [[] if group.is_of_input else keys_of[group.block_size] for group in self.plan.groups]
            for blocks in blocks_of_inputs:
                keys[blocks.group] = input_keys(secret, blocks, self.tables[blocks.group].block_size)
        pages = self._cache.pages_of(hit.match, max_tokens, blocks_of_inputs)
        return PrefixBlocks(
            keys=keys if known is None else known.keys,
            cached=[group_pages != 0 for group_pages in pages],
            num_cached=hit.num_tokens,
            lacks_inputs=any(blocks.sequence not in hit.inputs for blocks in blocks_of_inputs),
            most=max_tokens,
            inputs=blocks_of_inputs,
            kinds=self._kinds,
        )

    check_salt = staticmethod(check_salt)

    # --- the state of the cache ---------------------------------------------------------------------------------------

    def row(self, request_id: str) -> int:
        """Return a request's row in every block table."""
        return self._entry(request_id).row

    def block_ids(self, request_id: str) -> list[list[int]]:
        """Return a request's block ids, one list per group; 0 where a block is not resident."""
        return self._coordinator.blocks(self._entry(request_id).row)

    @property
    def num_free_rows(self) -> int:
        """The number of further requests for which the table has rows."""
        return len(self._rows.free)

    @property
    def usage(self) -> float:
        """The share of the slabs that have a page of a request or a pin."""
        return 1.0 - self._pool.num_idle_slabs / self.plan.num_slabs if self.plan.num_slabs else 0.0

    @property
    def eviction(self) -> EvictionPolicy:
        """The policy that orders cached pages for eviction: ``LRU`` if another one failed."""
        return self._pool.eviction

    @property
    def num_held_pages(self) -> int:
        """Pages that a request in the table or a pin references: 0 when the table is empty and nothing is pinned."""
        return sum(self._pool.blocks_held)

    @property
    def stats(self) -> KVCacheStats:
        """The cache's counters, as a copy."""
        pool = self._pool
        lookups = [attrs.evolve(counts) for counts in self._lookups]
        token_lookups = [
            counts for counts, group in zip(lookups, self.plan.groups, strict=True) if not group.is_of_input
        ]
        return KVCacheStats(
            queried_tokens=token_lookups[0].asked_tokens if token_lookups else 0,
            hit_tokens=token_lookups[0].hit_tokens if token_lookups else 0,
            lookups=lookups,
            blocks_held=[*pool.blocks_held],
            peak_blocks_held=[*pool.peak_blocks_held],
            peak_bytes_held=pool.peak_held_bytes,
            blocks_evicted=[*pool.blocks_evicted],
            blocks_moved=[*self._coordinator.blocks_moved],
        )

    @property
    def on_pages_freed(self) -> Callable[[int, list[int]], None] | None:
        """A function that is called with a group and block ids when the content of pages ends, or None.

        If it raises, this is logged, and it is not called again.
        """
        return self._pool.on_pages_freed

    @on_pages_freed.setter
    def on_pages_freed(self, listener: Callable[[int, list[int]], None] | None) -> None:
        if listener is not None and not callable(listener):
            raise RequestError(f"on_pages_freed must be callable or None, not {safe_repr(listener)}", "bad_listener")
        self._pool.on_pages_freed = listener
