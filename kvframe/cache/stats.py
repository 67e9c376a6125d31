"""The cache's statistics, as values."""

from __future__ import annotations

import attrs


@attrs.define
class GroupLookups:
    """What lookups found in one group.

    Attributes:
        kind: The registered name of its cache spec.
        asked_tokens: Tokens of requests that were looked up; in a group of inputs, tokens of the inputs.
        found_tokens: Of these, the tokens that this group alone could have continued from.
        hit_tokens: Of these, the tokens that every group could continue from: they are not computed.
        times_limiting: Lookups in which another group could have continued after more tokens than this one.
    """

    kind: str
    asked_tokens: int = 0
    found_tokens: int = 0
    hit_tokens: int = 0
    times_limiting: int = 0

    def add(self, other: GroupLookups) -> None:
        """Add the counts of other lookups."""
        self.asked_tokens += other.asked_tokens
        self.found_tokens += other.found_tokens
        self.hit_tokens += other.hit_tokens
        self.times_limiting += other.times_limiting


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
        host_bytes_held: Bytes of pages of requests that are swapped out now.
        peak_host_bytes_held: The most of them at once.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    lookups: list[GroupLookups] = attrs.field(factory=list)
    blocks_held: list[int] = attrs.field(factory=list)
    peak_blocks_held: list[int] = attrs.field(factory=list)
    peak_bytes_held: int = 0
    blocks_evicted: list[int] = attrs.field(factory=list)
    host_bytes_held: int = 0
    peak_host_bytes_held: int = 0

    @property
    def num_evictions(self) -> int:
        """Cached pages of all groups that were evicted."""
        return sum(self.blocks_evicted)
