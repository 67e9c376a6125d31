"""Random requests in a cache manager, beside the definition of a cache. Imports no torch.

A page has, for each of its tokens, all that the state of that token depends on. A request may be continued from
position ``n`` if the pages of the live range at ``n`` have the states of its own tokens. ``check_manager`` knows
nothing else of caches: no type, no pool and no tree.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from kvframe import KVCachePlan
from kvframe_testing.laws import ConformanceError, require

Page = tuple[int, int]
"""A group and a block id."""

MAX_RUNNING = 4
"""The most requests in the table at a time."""


class Manager(Protocol):
    """The verbs of ``KVCacheManager`` that every manager has.

    If it has them, ``fork`` and ``reset_prefix_cache`` are called too.
    """

    def start(self, request_id: str, token_ids: Sequence[int], *, salt: str = "") -> int:
        """Add a request; return the number of first tokens that need not be computed."""

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Give a request blocks for its first tokens; return whether the pool has enough pages."""

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Publish computed blocks, and release those that no later token needs."""

    def free(self, request_id: str) -> None:
        """Release a request's pages."""

    def block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        """Return a request's pages per group, by block; 0 for a block without a page."""

    @property
    def num_held_pages(self) -> int:
        """The pages that requests hold."""


@attrs.define
class Request:
    """A request.

    Attributes:
        salt: The salt of the requests that it shares with.
        tokens: Its tokens.
        computed: The number of computed tokens.
        num_resets: Resets of the cache before it started: earlier states are those of other weights.
    """

    salt: str
    tokens: list[int]
    computed: int = 0
    num_resets: int = 0

    def content(self, num_tokens: int, tokens: Sequence[int] | None = None) -> Any:
        """Return all that the state after ``num_tokens`` tokens depends on; of other tokens than its own if given."""
        return self.salt, self.num_resets, tuple((self.tokens if tokens is None else tokens)[:num_tokens])


class PageContents:
    """The contents of pages in the pool, and the copier of a manager.

    Attributes:
        pages: Of each page of the pool, the contents by slot.
    """

    def __init__(self, plan: KVCachePlan) -> None:
        self.plan = plan
        self.pages: dict[Page, dict[int, Any]] = {}

    def copy_within(self, group: int, block_ids: Sequence[int], others: Sequence[int]) -> None:
        """Copy pages within the pool; a page that is not written yet has nothing to copy."""
        for block_id, other in zip(block_ids, others, strict=True):
            self.pages.pop((group, other), None)
            if (group, block_id) in self.pages:
                self.pages[group, other] = dict(self.pages[group, block_id])

    def num_slots(self, group: int) -> int:
        """Return how many states a page has: one for each token, or the last ones."""
        spec = self.plan.groups[group].spec
        return spec.states_per_block if spec.is_per_block else spec.block_size

    def compute(self, request: Request, step: Sequence[int], block_ids: Sequence[Sequence[int]]) -> set[Page]:
        """Read all that a step needs, and write its results.

        Returns:
            The written pages.

        Raises:
            ConformanceError: A state is not there, or is one of other tokens.
        """
        n, tokens = request.computed, [*request.tokens[: request.computed], *step]
        written_pages = set()
        for group, ids in zip(self.plan.groups, block_ids, strict=True):
            index, size, slots = group.index, group.block_size, self.num_slots(group.index)
            for token in live_tokens(self.plan, index, n):
                state = self.pages.get((index, ids[token // size]), {}).get(token % slots)
                if request.content(token + 1) != state:
                    raise ConformanceError(f"at {n}, the state after token {token} of group {index} is {state}")
            stored = {block for part in group.spec.stored_blocks(n, len(step)) for block in range(*part)}
            for block in range(n // size, -(-len(tokens) // size)):
                page, end = (index, ids[block] if block < len(ids) else 0), min((block + 1) * size, len(tokens))
                if not page[1] and block in stored:
                    raise ConformanceError(f"at {n}, block {block} of group {index} has no page, and is stored")
                if page[1]:
                    written_pages.add(page)
                    for token in range(max(n, end - slots, block * size), end):
                        self.pages.setdefault(page, {})[token % slots] = request.content(token + 1, tokens)
        return written_pages


def live_tokens(plan: KVCachePlan, group: int, n: int) -> set[int]:
    """Return the tokens of a group that are live at position ``n``."""
    return {token for start, stop in plan.groups[group].spec.live_ranges(n) for token in range(start, stop)}


def check_manager(
    make: Callable[[KVCachePlan, PageContents], Manager], plan: KVCachePlan, *, seed: int = 0, num_events: int = 400
) -> Mapping[str, int]:
    """Run random requests in a manager, and check after each verb that it is a cache.

    * *reading*: every live token's state is there, for prefix hits and forks too, and was computed with the same salt
      and since the same reset of the cache;
    * *writing*: a step writes to no page of another request, and every block that is stored has a page;
    * *forgetting*: a request keeps the live blocks of what is computed, and no others;
    * *finding*: a prompt that was computed in an empty pool is found again up to the longest prefix whose live range
      is in pages;
    * *refusing*: a step without pages changes nothing;
    * *ending*: no page is held after all requests ended.

    Args:
        make: Makes a manager with an empty pool for at least ``MAX_RUNNING`` requests. ``copy_within``
            of the contents is its ``copier``.
        plan: The plan of the manager, of groups of tokens only.
        seed: Of all that is drawn.
        num_events: How many verbs, or steps of one request, are called.

    Returns:
        How often each verb was called.

    Raises:
        ConformanceError: A law does not hold, or a verb raises; the error names the seed and the event.
    """
    requests = _Requests(make, plan, random.Random(seed))
    event = 0
    try:
        requests.find_again()
        while event < num_events:
            event += 1
            requests.happen()
        requests.end()
    except ConformanceError as error:
        raise ConformanceError(f"seed {seed}, event {event}: {error}") from None
    except Exception as error:
        raise ConformanceError(f"seed {seed}, event {event}: {type(error).__name__}: {error}") from error
    return requests.verbs


class _Requests:
    def __init__(
        self, make: Callable[[KVCachePlan, PageContents], Manager], plan: KVCachePlan, draw: random.Random
    ) -> None:
        self.plan, self.draw = plan, draw
        self.contents = PageContents(plan)
        self.manager: Any = make(plan, self.contents)
        self.running: dict[str, Request] = {}
        self.verbs: Counter[str] = Counter()
        # A state is overwritten by drafts, so only states that are kept for each token may be computed twice.
        self.has_drafts = not any(group.spec.is_per_block for group in plan.groups)
        self.max_step = min(8, plan.max_num_batched_tokens)

    def happen(self) -> None:
        """Call one verb, or compute one step."""
        events: dict[Callable[[], None], int] = {}
        if len(self.running) < MAX_RUNNING:
            events[self.start] = 6
        if self.running:
            events |= {self.step: 12, self.free: 3}
            if hasattr(self.manager, "fork") and len(self.running) < MAX_RUNNING:
                events[self.fork] = 3
        if hasattr(self.manager, "reset_prefix_cache"):
            events[self.reset] = 1
        (event,) = self.draw.choices(list(events), weights=list(events.values()))
        event()

    def find_again(self) -> None:
        longest = min(self.plan.max_model_len, 64)
        tokens = [self.draw.randint(0, 1) for _ in range(self.draw.randint(longest // 2, longest))]
        num_blocks = [-(-len(tokens) // group.block_size) for group in self.plan.groups]
        request = self.running["again"] = Request("", tokens, self.manager.start("again", tokens))
        require(request.computed == 0, f"finding: {request.computed} tokens are found in an empty pool")
        while request.computed < len(tokens) and self.compute("again", request, self.max_step, 0):
            pass
        self.manager.free(self.running.popitem()[0])
        # In a pool that is nearly full, a manager may reuse pages at once instead of caching them.
        is_cached = request.computed == len(tokens) and 2 * self.plan.num_slabs_for(num_blocks) <= self.plan.num_slabs
        if is_cached and getattr(self.manager, "prefix_caching", True):
            num_found = self.manager.start("again", tokens)
            expected = self.longest_prefix(request)
            require(expected == num_found, f"finding: {num_found} tokens of {tokens} are found again, not {expected}")
            self.manager.free("again")

    def longest_prefix(self, request: Request) -> int:
        states = {(page[0], state) for page, states in self.contents.pages.items() for state in states.values()}

        def is_kept(index: int, n: int) -> bool:
            size = self.plan.groups[index].block_size
            ends = {(token // size + 1) * size for token in live_tokens(self.plan, index, n)}
            return n % size == 0 and all((index, request.content(end)) in states for end in ends)

        lengths = range(0, len(request.tokens), math.lcm(*(group.block_size for group in self.plan.groups)))
        return max(n for n in lengths if all(is_kept(group.index, n) for group in self.plan.groups))

    def start(self) -> None:
        shared, tail = self.draw.choice([5, 12, 13, 24]), self.draw.choices([0, 1], k=self.draw.randint(1, 6))
        tokens = ([7] * shared + tail)[: self.plan.max_model_len]
        name, salt = f"r{self.verbs.total()}", self.draw.choice(["", "", "", "other"])
        hit = self.manager.start(name, tokens, salt=salt)
        require(0 <= hit < len(tokens), f"start: {hit} of {len(tokens)} tokens are found")
        self.running[name] = Request(salt, tokens, hit, self.verbs["reset"])
        self.verbs["start"] += 1

    def step(self) -> None:
        name = self.draw.choice(sorted(self.running))
        num_drafts = self.draw.randint(0, 3) if self.has_drafts else 0
        self.compute(name, self.running[name], self.draw.randint(1, self.max_step), num_drafts)

    def compute(self, name: str, request: Request, num_tokens: int, num_drafts: int) -> bool:
        """Compute tokens of a request, and drafts after them that are rejected; return whether there were pages."""
        if request.computed == len(request.tokens):
            if request.computed == self.plan.max_model_len:
                return False
            request.tokens.append(self.draw.randint(0, 1))
        target = min(request.computed + num_tokens, len(request.tokens))
        end = min(target + num_drafts, self.plan.max_model_len, request.computed + self.max_step)
        old_ids = self.block_ids(name)
        self.verbs["extend"] += 1
        if not self.manager.extend(name, end):
            require(old_ids == self.block_ids(name), "refusing: a step without pages changed the blocks of its request")
            return False
        blocks = self.block_ids(name)
        step = [*request.tokens[request.computed : target], *[self.draw.randint(0, 1) for _ in range(end - target)]]
        written_pages = self.contents.compute(request, step, blocks)
        foreign_pages = {page for owner in self.running if owner != name for page in self.pages(owner)}
        require(
            not written_pages & foreign_pages,
            f"writing: a step writes to pages of another request, {written_pages & foreign_pages}",
        )
        self.manager.commit(name, request.tokens, target)
        self.verbs["commit"] += 1
        request.computed = target
        for group, ids in zip(self.plan.groups, self.block_ids(name), strict=True):
            held_blocks = {block for block, page in enumerate(ids[: target // group.block_size]) if page}
            live = {token // group.block_size for token in live_tokens(self.plan, group.index, target)}
            live = {block for block in live if block < target // group.block_size}
            require(
                live == held_blocks,
                f"forgetting: at {target}, group {group.index} keeps blocks {held_blocks}, and {live} live",
            )
        return True

    def fork(self) -> None:
        name = self.draw.choice(sorted(self.running))
        request, fork = self.running[name], f"r{self.verbs.total()}"
        tokens = list(request.tokens[: request.computed]) or request.tokens[:1]
        if self.manager.fork(name, fork, tokens):
            self.running[fork] = attrs.evolve(request, tokens=tokens)
        self.verbs["fork"] += 1

    def free(self) -> None:
        name = self.draw.choice(sorted(self.running))
        del self.running[name]
        self.manager.free(name)
        self.verbs["free"] += 1

    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        self.verbs["reset"] += 1

    def end(self) -> None:
        for name in self.running:
            self.manager.free(name)
        num_held = self.manager.num_held_pages
        require(num_held == 0, f"ending: {num_held} pages are held after all requests ended")

    def block_ids(self, name: str) -> list[list[int]]:
        return [list(ids) for ids in self.manager.block_ids(name)]

    def pages(self, name: str) -> set[Page]:
        return {(group, page) for group, ids in enumerate(self.block_ids(name)) for page in ids if page}
