"""The input index: finds cached inputs, which requests have in addition to tokens, such as an encoder's audio.

An input is complete before the first token is computed, and does not change. Its blocks live as long as the request,
and are found by content: requests with equal inputs share the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_order import Groups
from kvframe.cache.block_pool import NO_OWNER, BlockPool, Indices
from kvframe.cache.live_range import Pages
from kvframe.contract.errors import RequestError
from kvframe.contract.foreign import safe_repr
from kvframe.planning.plan import PlannedGroup

Namespace = tuple[str, bytes]
"""A salt and ``inputs_root`` of a request's inputs: requests of different namespaces share nothing."""


@attrs.frozen
class InputSequence:
    """One input of a request.

    Attributes:
        num_tokens: Its tokens, at least one.
        key: A hash of its content, and of all else that its state depends on: inputs with equal keys and lengths are
            the same. An engine's keys are keyed hashes (``kvframe.content_key``), which may leave the process.
    """

    num_tokens: int
    key: bytes

    def __attrs_post_init__(self) -> None:
        """Refuse a wrong number of tokens and a wrong key with a ``RequestError`` (``bad_input``)."""
        if type(self.num_tokens) is not int or self.num_tokens < 1 or not isinstance(self.key, bytes):
            raise RequestError(
                "an input has a whole number of tokens of at least 1 and a key of bytes, not "
                f"{safe_repr(self.num_tokens)} and {safe_repr(self.key)}",
                code="bad_input",
            )


@attrs.frozen
class InputBlocks:
    """The blocks of one input of a request in one group: ``sequence`` is the input's name, ``key`` that of its content.

    Only requests with the same salt share them.
    """

    group: int
    salt: str
    sequence: str
    key: bytes
    num_tokens: int
    num_blocks: int


def input_blocks(
    groups: Iterable[PlannedGroup], inputs: Mapping[str, InputSequence], salt: str
) -> tuple[InputBlocks, ...]:
    """Return the blocks of a request's inputs, by name, in the groups that store inputs."""
    group_inputs = ((group, group.spec.sequence, inputs.get(group.spec.sequence)) for group in groups)
    return tuple(
        InputBlocks(
            group.index, salt, name, sequence.key, sequence.num_tokens, -(-sequence.num_tokens // group.block_size)
        )
        for group, name, sequence in group_inputs
        if sequence is not None
    )


class InputIndex:
    """The pages of cached inputs, by content.

    An input is found if all of its blocks are cached, in all groups that store it. When one of its blocks is evicted,
    its other blocks are evicted too, except those that a request holds.

    Invariant: a page in the index is held or cached, and its owner in the pool is the number of its input here.

    Attributes:
        entries: By owner number, each input and its pages, 0 for one that is not cached.
        pool: The pages.
        on_stored: Called with an input, the indices of its blocks that became findable, and all its pages; or None.
    """

    def __init__(self, groups: Sequence[PlannedGroup], pool: BlockPool) -> None:
        self._groups, self.pool = groups, pool
        self._owners: dict[InputBlocks, int] = {}
        self.entries: dict[int, tuple[InputBlocks, Pages]] = {}
        self._free_owners: list[int] = []
        self.on_stored: Callable[[InputBlocks, npt.NDArray[np.intp], Pages], None] | None = None

    def find_input(self, blocks: InputBlocks) -> Pages | None:
        """Return the pages of an input in a group, 0 for one that is not cached; None if none is."""
        owner = self._owners.get(blocks)
        return None if owner is None else self.entries[owner][1]

    def publish_input(self, blocks: InputBlocks, pages: Pages) -> None:
        """Publish the pages of an input, except for blocks that are published."""
        owner = self._owners.get(blocks)
        if owner is None:
            # The owners of blocks of tokens have positive numbers.
            owner = self._free_owners.pop() if self._free_owners else NO_OWNER - 1 - len(self.entries)
            self._owners[blocks] = owner
            self.entries[owner] = (blocks, np.zeros(blocks.num_blocks, dtype=np.int32))
        published_pages = self.entries[owner][1]
        new_blocks = np.flatnonzero(published_pages == 0)
        published_pages[new_blocks] = pages[new_blocks]
        self.pool.publish_blocks(owner, pages[new_blocks], new_blocks)
        if self.on_stored is not None:
            self.on_stored(blocks, new_blocks, pages)

    def remove_evicted(self, owner: int, groups: int | Groups, indices: Indices) -> None:
        """Remove evicted pages from an input, and evict the others that no request holds, in all groups."""
        lost_blocks, pages = self.entries[owner]
        pages[indices] = 0
        inputs = {lost_blocks.sequence: InputSequence(lost_blocks.num_tokens, lost_blocks.key)}
        for blocks in input_blocks(self._groups, inputs, lost_blocks.salt):
            group_owner = self._owners.get(blocks)
            if group_owner is not None:
                _, pages = self.entries[group_owner]
                pages[self.pool.discard_cached(pages)] = 0
                if not pages.any():
                    del self.entries[group_owner], self._owners[blocks]
                    self._free_owners.append(group_owner)

    def remove_all(self) -> None:
        """Remove every input; the pool frees the pages."""
        self.entries.clear()
        self._owners.clear()
        self._free_owners.clear()


def inputs_root(inputs: Mapping[str, InputSequence]) -> bytes:
    """Return one value for all inputs of a request, by name and content; no bytes if there are no inputs."""
    return b"".join(
        joined(name.encode(), inputs[name].key, _number(inputs[name].num_tokens)) for name in sorted(inputs)
    )


def joined(*parts: bytes) -> bytes:
    """Join parts, each after its length, so that different parts give different values."""
    return b"".join(_number(len(part)) + part for part in parts)


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
