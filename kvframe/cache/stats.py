"""The cache's statistics, and what the lookup of one request found, as values."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.define
class GroupLookups:
    """The hits of lookups in one group.

    Attributes:
        kind: The registered name of its cache spec.
        asked_tokens: Tokens of requests that were looked up; in a group of inputs, tokens of the inputs.
        found_tokens: Of these, the tokens that this group alone could have continued from.
        hit_tokens: Of these, the tokens that every group could continue from: they are not computed.
        times_limiting: Lookups in which another group had a longer hit than this one.
    """

    kind: str
    asked_tokens: int = 0
    found_tokens: int = 0
    hit_tokens: int = 0
    times_limiting: int = 0


@attrs.frozen(kw_only=True)
class FoundPrefix:
    """The hit of a request, and why it is not longer.

    Attributes:
        num_tokens: The number of first tokens that are not computed, because every group had the state after them.
        known_tokens: The number of first tokens, in whole blocks, that an earlier request of equal salt and inputs has.
        of_groups: For each cache group of tokens, by index, the tokens that it alone could have continued from.
        limited_by: The groups with a shorter hit than others.
        why: Why the hit is not longer, in one clause; empty if only the last token and its block are computed, as for
            every request.
        restored_tokens: Of ``num_tokens``, those whose state was brought to the device for this request.
        restored_from: Where it was brought from: ``"host_memory"``, or names of page stores.
    """

    num_tokens: int = 0
    known_tokens: int = 0
    of_groups: Mapping[int, int] = attrs.field(factory=dict)
    limited_by: tuple[int, ...] = ()
    why: str = ""
    restored_tokens: int = 0
    restored_from: tuple[str, ...] = ()


@attrs.define
class KVCacheStats:
    """The counters of a cache.

    Attributes:
        queried_tokens: Tokens of requests for which a prefix was looked up, counted when they begin to run.
        hit_tokens: Of these, the tokens that were found.
        lookups: Per group, the hits in it, and how often its hit was shorter than that of others.
        blocks_held: Per group, the pages held now; a page that several requests share counts once.
        peak_blocks_held: Per group, the most pages held at once.
        peak_bytes_held: The most bytes of held pages of all groups at once.
        blocks_evicted: Per group, the cached pages that were evicted.
        blocks_moved: Per group, the pages that were filled with the tokens that requests kept of their prompts.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    lookups: list[GroupLookups] = attrs.field(factory=list)
    blocks_held: list[int] = attrs.field(factory=list)
    peak_blocks_held: list[int] = attrs.field(factory=list)
    peak_bytes_held: int = 0
    blocks_evicted: list[int] = attrs.field(factory=list)
    blocks_moved: list[int] = attrs.field(factory=list)

    @property
    def num_evictions(self) -> int:
        """Cached pages of all groups that were evicted."""
        return sum(self.blocks_evicted)
