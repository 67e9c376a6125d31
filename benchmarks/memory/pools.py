"""A pool whose blocks all have one size: who holds which, what is found by its key, what is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Key = tuple[int, int]
"""A group and the hash of a prefix."""


class EqualBlocks:
    """Blocks of one size that any group can take: vLLM's ``BlockPool``.

    Blocks without content that can be found again are taken first, the last one freed before the others; then those
    that can, the one unused for longest first.
    """

    def __init__(self, num_blocks: int) -> None:
        """Start with every block free; the first one is never given away, as in vLLM."""
        self.num_blocks = num_blocks - 1
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._holders: dict[int, int] = {}
        self._key_of: dict[int, Key] = {}
        self._index: dict[Key, int] = {}

    @property
    def use(self) -> float:
        """Share of the blocks that somebody holds."""
        return len(self._holders) / self.num_blocks

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders)

    def find(self, key: Key) -> int:
        """Return the block with this key; 0 if there is none."""
        return self._index.get(key, 0)

    def allocate(self, num_blocks: Sequence[int]) -> list[list[int]] | None:
        """Take blocks for each group, evicting where needed; None, and nothing changed, if there are not enough."""
        if sum(num_blocks) > len(self._free):
            return None
        return [[self._take() for _ in range(count)] for count in num_blocks]

    def has_room(self, num_blocks: Sequence[int]) -> bool:
        """Return whether ``allocate`` would find as many blocks for each group."""
        return sum(num_blocks) <= len(self._free)

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._index[key]
        self._holders[block] = 1
        return block

    def reference(self, group: int, block: int) -> None:
        """Hold a block once more."""
        count = self._holders.get(block, 0)
        if not count:
            del self._free[block]
        self._holders[block] = count + 1

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """Hold each block once less, in the order in which they shall be evicted."""
        for block in blocks:
            count = self._holders[block] - 1
            if count:
                self._holders[block] = count
                continue
            del self._holders[block]
            self._free[block] = None
            if block not in self._key_of:
                self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: Key) -> None:
        """Make a held block findable, unless another one is already found by that key."""
        if self._index.setdefault(key, block) == block:
            self._key_of[block] = key
