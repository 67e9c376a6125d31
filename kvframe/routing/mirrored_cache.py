"""What one engine's cache holds, by its events, and the longest prefix of a prompt that it finds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from kvframe.cache.events import DEVICE, BlocksStored, CacheCleared, CacheEvent, Medium
from kvframe.cache.input_index import InputSequence
from kvframe.cache.layout import CacheLayout, GroupLayout
from kvframe.cache.live_range import LiveRange, Pages, longest_common_prefix
from kvframe.contract.specs import TOKENS

Keys = Mapping[tuple[int, str], Sequence[bytes]]
"""The keys of a prompt's blocks, and of its inputs' blocks, by block size and sequence."""


class MirroredCache:
    """What one engine holds: ``keys`` of blocks, by group and medium."""

    def __init__(self, layout: CacheLayout, live: Sequence[tuple[GroupLayout, LiveRange]]) -> None:
        self.layout, self._live = layout, live
        self.keys: dict[tuple[int, Medium], set[bytes]] = {}

    def hit(
        self,
        keys: Keys,
        most: int,
        inputs: Mapping[str, InputSequence],
        media: Collection[Medium],
    ) -> int:
        """Return the longest prefix whose needed blocks are there, of ``most`` tokens or fewer."""
        num_tokens = self._longest(keys, most, {DEVICE}) if DEVICE in media else 0
        used = {medium for (_, medium), stored_keys in self.keys.items() if stored_keys and medium in media}
        # A prefix is brought to the device only if all of its inputs are somewhere.
        if used <= {DEVICE} or not all(
            self._present(group.group, keys[group.block_size, group.sequence], used).all()
            for group in self.layout.groups
            if group.need is None and group.sequence in inputs
        ):
            return num_tokens
        return max(num_tokens, self._longest(keys, most, used))

    def _longest(self, keys: Keys, most: int, media: Collection[Medium]) -> int:
        if most <= 0:
            return 0
        group_pages = [
            (live, self._present(group.group, keys[live.block_size, TOKENS][: most // live.block_size], media))
            for group, live in self._live
        ]
        return longest_common_prefix(group_pages, self.layout.alignment, most)

    def _present(self, group: int, keys: Sequence[bytes], media: Collection[Medium]) -> Pages:
        """Return which blocks of a group are in one of several media: 1 for one that is, otherwise 0."""
        is_present = np.zeros(len(keys), dtype=np.int32)
        for medium in media:
            stored_keys = self.keys.get((group, medium))
            if stored_keys:
                is_present |= np.fromiter(map(stored_keys.__contains__, keys), np.int32, len(keys))
        return is_present

    def snapshot(self) -> list[CacheEvent]:
        """Return events that give what the cache holds."""
        groups = {group.group: group for group in self.layout.groups}
        return [
            CacheCleared(layout=self.layout),
            *(
                BlocksStored(
                    group=group,
                    keys=tuple(stored_keys),
                    block_size=groups[group].block_size,
                    sequence=groups[group].sequence,
                    medium=medium,
                )
                for (group, medium), stored_keys in self.keys.items()
                if stored_keys and group in groups
            ),
        ]
