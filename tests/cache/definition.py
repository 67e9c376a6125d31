"""A model of the cache by its definition, without any of the cache's code: the content of pages, and possible hits.

The pool chooses the blocks to evict, and reports them to the model. The model predicts everything else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import attrs
from kvframe_testing.requests import Page, PageContents

from kvframe.contract.specs import ENCODER, TOKENS
from kvframe.planning.plan import KVCachePlan, PlannedGroup
from kvframe.planning.rollback import RollbackSpec
from tests.cache.plans import StateSpec


@attrs.define(kw_only=True)
class Life:
    """One request.

    Attributes:
        salt: The salt of the requests that it shares with.
        encoder: The length and content of its encoder's input; None for no input.
        tokens: Its tokens.
        computed: The number of computed tokens.
        offered: Per group, its blocks that were published.
        num_resets: Resets of the cache before it started.
        is_encoded: Whether the state of its input is computed.
        branch: The position at which its tokens differ from an earlier request's.
        lookups: Per group, the result of its lookup when it started, until it runs.
    """

    salt: str
    encoder: tuple[int, bytes] | None
    tokens: list[int]
    computed: int = 0
    offered: list[int]
    num_resets: int
    is_encoded: bool
    branch: int = 0
    lookups: list[list[int]] = attrs.field(factory=list)

    def content(self, num_tokens: int, tokens: Sequence[int] | None = None) -> Any:
        """Return all that the state after ``num_tokens`` tokens depends on."""
        return self.salt, self.encoder, tuple((self.tokens if tokens is None else tokens)[:num_tokens])

    def num_input_blocks(self, group: PlannedGroup) -> int:
        return 0 if self.encoder is None else -(-self.encoder[0] // group.block_size)


def is_sparse(group: PlannedGroup) -> bool:
    """Return whether the group keeps a state that is overwritten from token to token."""
    return isinstance(group.spec, StateSpec | RollbackSpec)


def needs_last_token(group: PlannedGroup, max_tokens: int) -> bool:
    """Return whether no request could be continued from any block's end without that block."""
    ends = range(group.block_size, max_tokens + 1, group.block_size)
    return all(end // group.block_size - 1 in live_blocks(group, end) for end in ends)


def num_slots(group: PlannedGroup) -> int:
    """Return the number of states in a page of the group: one per token, or the last ones."""
    # The real cache uses two pages for states and rollback states; here, one page holds both.
    if isinstance(group.spec, RollbackSpec):
        return 1 + group.spec.num_states
    return 1 + group.spec.most_refused if isinstance(group.spec, StateSpec) else group.block_size


class CacheModel:
    """The bytes of pages, the findable blocks, and the right results of lookups."""

    def __init__(self, plan: KVCachePlan, *, is_caching: bool) -> None:
        self.plan = plan
        self.of_tokens = [group for group in plan.groups if group.spec.sequence == TOKENS]
        self.of_inputs = [group for group in plan.groups if group.spec.sequence == ENCODER]
        self.is_caching = is_caching and bool(plan.groups)
        self.alignment = math.lcm(*(group.block_size for group in self.of_tokens))
        self.is_sparse = any(map(is_sparse, plan.groups))
        self.bytes: dict[Page, dict[int, Any]] = {}
        self.findable: dict[tuple[int, Any], int] = {}
        self.seen: set[Any] = set()
        self.freed: set[Page] = set()
        self.num_resets = 0
        self.lookups = [[0, 0, 0, 0] for _ in plan.groups]

    def findable_pages(self) -> set[Page]:
        return {(group, page) for (group, _), page in self.findable.items()}

    def pages_freed(self, group: int, block_ids: list[int]) -> None:
        """Clear the content of pages; a later read finds nothing."""
        self.freed |= {(group, block_id) for block_id in block_ids}
        for block_id in block_ids:
            self.bytes.pop((group, block_id), None)
        ended = [key for key, page in self.findable.items() if key[0] == group and page in block_ids]
        for key in ended:
            del self.findable[key]

    def let_go(self, published: set[Page], shared: set[Page]) -> None:
        """Drop unpublished blocks that a fork shared: if one request passes them while pages are short, they end."""
        gone = [key for key, page in self.findable.items() if (key[0], page) in shared - published]
        for key in gone:
            del self.findable[key]

    def reset(self) -> None:
        self.findable.clear()
        self.seen.clear()
        self.num_resets += 1

    # --- lookups ------------------------------------------------------------------------------------------------------

    def start(self, life: Life, use_prefix: bool) -> list[list[int]]:
        """Begin a request; return the blocks that it must then have."""
        blocks: list[list[int]] = [[] for _ in self.plan.groups]
        if not (self.is_caching and use_prefix):
            return blocks
        # The last token of the prompt is always computed.
        most = len(life.tokens) - 1
        hit = max((n for n in range(0, most + 1, self.alignment) if self.all_hold(life, n)), default=0)
        life.computed = hit if self.of_tokens else 0
        known = self.known(life, most)
        alone = {g.index: max(n for n in range(known + 1) if self.holds(life, g, n)) for g in self.of_tokens}
        life.lookups = [[0, 0, 0, 0] for _ in self.plan.groups]
        for group in self.of_tokens:
            # No hit can end here for groups whose blocks end elsewhere.
            limits = any(
                n % group.block_size > 0 if n % self.alignment else not self.holds(life, group, n)
                for n in alone.values()
                if n > hit
            )
            life.lookups[group.index] = [len(life.tokens), alone[group.index], hit, int(limits)]
            blocks[group.index] = self.live_pages(life, group, hit)
            life.offered[group.index] = hit // group.block_size
        if life.encoder is not None:
            found = {g.index: self.input_pages(life, g) for g in self.of_inputs}
            life.is_encoded = all(None not in pages for pages in found.values())
            for index, pages in found.items():
                is_whole = None not in pages
                limits = not is_whole and any(None not in others for others in found.values())
                size = life.encoder[0]
                life.lookups[index] = [size, size * is_whole, size * life.is_encoded, int(limits)]
                if life.is_encoded:
                    blocks[index] = [page for page in pages if page is not None]
                    life.offered[index] = len(pages)
        return blocks

    def branches(self, life: Life) -> tuple[int, set[int]]:
        """Return the smallest branch that a starting request can have, and all possible ones.

        Tokens are known as long as a page of a later block can be found, or longer.
        """
        longer = range(life.computed + self.alignment, len(life.tokens), self.alignment) if self.is_sparse else ()
        kept = [
            what
            for index, (salt, encoder, what) in self.findable
            if not self.plan.groups[index].is_of_input and (salt, encoder) == (life.salt, life.encoder)
        ]
        known = (n for n in longer if any(what[:n] == tuple(life.tokens[:n]) for what in kept))
        return max(known, default=0), {0} | {n for n in longer if life.content(n) in self.seen}

    def pinned(self, salt: str, encoder: tuple[int, bytes] | None, tokens: list[int]) -> list[list[int]]:
        """Return the blocks that a pin of tokens must hold."""
        life = Life(salt=salt, encoder=encoder, tokens=tokens, offered=[], num_resets=0, is_encoded=encoder is None)
        blocks: list[list[int]] = [[] for _ in self.plan.groups]
        if not self.is_caching:
            return blocks
        ends = range(0, len(tokens) + 1, self.alignment) if self.of_tokens else (0,)
        hit = max(n for n in ends if self.all_hold(life, n))
        for group in self.of_tokens:
            blocks[group.index] = self.live_pages(life, group, hit)
        found = {group.index: self.input_pages(life, group) for group in self.of_inputs}
        if all(None not in pages for pages in found.values()):
            blocks = [[page for page in found.get(g, ids) if page is not None] for g, ids in enumerate(blocks)]
        return blocks

    def live_pages(self, life: Life, group: PlannedGroup, n: int) -> list[int]:
        """Return the pages of the live blocks of a findable prefix, by block; 0 for other blocks."""
        blocks = [0] * (n // group.block_size)
        for token in live_tokens(group, n):
            block = token // group.block_size
            blocks[block] = self.findable[group.index, life.content((block + 1) * group.block_size)]
        return blocks

    def known(self, life: Life, most: int) -> int:
        """Return the last token at which a hit may end: any, or the last of a findable block if a type requires one."""
        if not any(needs_last_token(group, self.plan.max_model_len) for group in self.of_tokens):
            return most
        sizes = {g.index: g.block_size for g in self.of_tokens}
        ends = (n for n in range(most + 1) for g, size in sizes.items() if n % size == 0)
        return max((n for n in ends if any((g, life.content(n)) in self.findable for g in sizes)), default=0)

    def holds(self, life: Life, group: PlannedGroup, n: int) -> bool:
        """Return whether one group allows a request to be continued from ``n``."""
        size = group.block_size
        return n % size == 0 and all(
            (group.index, life.content((token // size + 1) * size)) in self.findable for token in live_tokens(group, n)
        )

    def is_ever_needed(self, group: PlannedGroup, block: int) -> bool:
        """Return whether a hit that ends anywhere could need a block, or the group keeps every block of any request."""
        end, most = (block + 1) * group.block_size, self.plan.max_model_len
        keeps_all = live_tokens(group, most) == {*range(most)}
        hits = (n for n in range(0, most + 1, self.alignment) if end <= n < end + self.alignment)
        return keeps_all or any(block in live_blocks(group, n) for n in hits)

    def all_hold(self, life: Life, n: int) -> bool:
        return all(self.holds(life, group, n) for group in self.of_tokens)

    def input_pages(self, life: Life, group: PlannedGroup) -> list[int | None]:
        keys = [(life.salt, life.encoder, index) for index in range(life.num_input_blocks(group))]
        return [self.findable.get((group.index, key)) for key in keys]

    def fork(self, life: Life, tokens: list[int]) -> Life:
        """Return a request that continues from another one's tokens: it publishes the blocks that it adds."""
        offered = [life.computed // group.block_size for group in self.plan.groups]
        for group in self.of_inputs:
            offered[group.index] = life.num_input_blocks(group)
        return attrs.evolve(life, tokens=tokens, offered=offered, lookups=[])

    # --- steps --------------------------------------------------------------------------------------------------------

    def compute(self, life: Life, step: Sequence[int], block_ids: Sequence[Sequence[int]]) -> set[Page]:
        """Read all that a step needs, and write its results; return the written pages."""
        n, tokens = life.computed, [*life.tokens[: life.computed], *step]
        written = set()
        for group in self.of_tokens:
            ids, size, slots = block_ids[group.index], group.block_size, num_slots(group)
            for token in live_tokens(group, n):
                read = self.bytes[group.index, ids[token // size]][token % slots]
                assert life.content(token + 1) == read, "a stale byte"
            for block in range(n // size, -(-len(tokens) // size)):
                page, end = (group.index, ids[block]), min((block + 1) * size, len(tokens))
                if not is_sparse(group):
                    assert ids[block], "no page for a token that is computed"
                if ids[block]:
                    written.add(page)
                    for token in range(max(n, end - slots, block * size), end):
                        self.bytes.setdefault(page, {})[token % slots] = life.content(token + 1, tokens)
        for group in self.of_inputs:
            ids = block_ids[group.index]
            assert len(ids) == life.num_input_blocks(group)
            for block, block_id in enumerate(ids):
                page = (group.index, block_id)
                content = (life.salt if self.is_caching else None, life.encoder, block)
                if not life.is_encoded:
                    written.add(page)
                    self.bytes[page] = {0: content}
                assert content == self.bytes[page][0], "a stale byte of an input"
        return written

    def commit(
        self, life: Life, num_computed: int, block_ids: Sequence[Sequence[int]], found: Set[Page] = frozenset()
    ) -> None:
        """Publish the computed blocks; ``block_ids`` are those before any block is freed.

        Of equal blocks, the one with a page in ``found`` is published. A page that was freed at once, because pages
        were short, is not.
        """
        # A request that ran when the cache was reset publishes nothing: its state may come from the old weights.
        if self.is_caching and life.num_resets == self.num_resets:
            for group in self.of_tokens:
                size = group.block_size
                num_full = num_computed // size
                for block in range(life.offered[group.index], num_full):
                    page = block_ids[group.index][block]
                    if page and self.is_ever_needed(group, block) and (group.index, page) not in self.freed:
                        content = life.content((block + 1) * size)
                        if (group.index, page) in found:
                            self.findable[group.index, content] = page
                        self.findable.setdefault((group.index, content), page)
                life.offered[group.index] = max(life.offered[group.index], num_full)
            for group in self.of_inputs:
                if not life.offered[group.index]:
                    for block, block_id in enumerate(block_ids[group.index]):
                        content = (life.salt, life.encoder, block)
                        if (group.index, block_id) in found:
                            self.findable[group.index, content] = block_id
                        self.findable.setdefault((group.index, content), block_id)
                    life.offered[group.index] = len(block_ids[group.index])
            if self.is_sparse:
                ends = range(0, num_computed + 1, self.alignment)
                self.seen |= {life.content(n) for n in ends if n > life.computed}
        if self.is_caching:
            for total, lookups in zip(self.lookups, life.lookups, strict=False):
                total[:] = [one + other for one, other in zip(total, lookups, strict=True)]
        life.lookups = []
        life.is_encoded = True
        life.computed = num_computed

    def offered_again(self, life: Life, block_ids: Sequence[Sequence[int]]) -> dict[tuple[int, Any], int]:
        """Return the pages of a request that may be published again, because the equal pages were evicted.

        They are offered even if the path to them is lost; the manager decides about that.
        """
        again = {}
        for group in self.of_tokens if self.is_caching and life.num_resets == self.num_resets else ():
            for block in range(life.offered[group.index]):
                key, page = (group.index, life.content((block + 1) * group.block_size)), block_ids[group.index][block]
                if key not in self.findable and key[1] in self.bytes.get((group.index, page), {}).values():
                    again[key] = page
        return again


def live_tokens(group: PlannedGroup, n: int) -> set[int]:
    return {token for start, stop in group.spec.live_ranges(n) for token in range(start, stop)}


def live_blocks(group: PlannedGroup, n: int) -> set[int]:
    return {token // group.block_size for token in live_tokens(group, n)}


class PageCopies(PageContents):
    """Contents of the model's pages; a copy of group ``broken`` raises after half of its pages.

    Attributes:
        copied: The pages that got copies of other pages in the pool.
    """

    def __init__(self, plan: KVCachePlan, pages: dict[Page, dict[int, Any]]) -> None:
        super().__init__(plan)
        self.pages = pages
        self.broken = -1
        self.copied: set[Page] = set()

    def copy_within(self, group: int, block_ids: Sequence[int], others: Sequence[int]) -> None:
        assert not any((group, other) in self.pages for other in others), "a page that was not free"
        self.copied |= {(group, other) for other in others}
        if group == self.broken:
            num_copied = len(block_ids) // 2
            super().copy_within(group, block_ids[:num_copied], others[:num_copied])
            raise RuntimeError("the copy failed")
        super().copy_within(group, block_ids, others)
