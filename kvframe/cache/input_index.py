"""Input sequences: what a request brings beside its own tokens, such as what its encoder reads.

An input is whole before the first token is computed and stays as it is. Its blocks live for as long as the request
runs, and are found by content: requests with the same input hold them once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_pool import NO_OWNER, BlockPool, Indices
from kvframe.errors import RequestError
from kvframe.foreign import safe_repr
from kvframe.plan import PlannedGroup

Pages = npt.NDArray[np.int32]
_MAX_OWNER = int(np.iinfo(np.int32).max)


@attrs.frozen
class InputSequence:
    """One input of a request.

    Attributes:
        num_tokens: Its tokens, at least one.
        key: A hash of its content, and of whatever else decides its state: inputs of equal key and length are the same.
            An engine's are keyed (``kvframe.content_key``), so that they may leave the process.
    """

    num_tokens: int
    key: bytes

    def __attrs_post_init__(self) -> None:
        """Refuse what is no number of tokens or no key, with a ``RequestError`` (``bad_input``)."""
        if type(self.num_tokens) is not int or self.num_tokens < 1 or not isinstance(self.key, bytes):
            raise RequestError(
                "an input has a whole number of tokens of at least 1 and a key of bytes, not "
                f"{safe_repr(self.num_tokens)} and {safe_repr(self.key)}",
                code="bad_input",
            )


@attrs.frozen
class InputBlocks:
    """The blocks of one input of a request in one group.

    Attributes:
        group: The group's index.
        salt: Whom the request shares with.
        sequence: Which input it is (``"encoder"``).
        key: What its content is known by.
        num_tokens: Its tokens.
        num_blocks: Blocks that hold all of it.
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
    """Return a request's blocks in the groups that keep state of its inputs.

    Args:
        groups: The groups of input sequences.
        inputs: The request's inputs, by name.
        salt: Requests share blocks only with requests of the same salt.
    """
    found = []
    for group in groups:
        name = group.spec.sequence
        if name in inputs:
            given = inputs[name]
            num_blocks = -(-given.num_tokens // group.block_size)
            found.append(InputBlocks(group.index, salt, name, given.key, given.num_tokens, num_blocks))
    return tuple(found)


class InputIndex:
    """The cached inputs: which pages hold them.

    Invariant: a page in it is held or cached, and its owner in the pool is the entry that names it.

    An input is found if all of its blocks are there, in all groups that keep state of it. When one of its blocks is
    evicted, the others are evicted too, except for those that a request holds.
    """

    def __init__(self, groups: Sequence[PlannedGroup]) -> None:
        """Start empty.

        Args:
            groups: All groups of the plan.
        """
        self._groups = tuple(group for group in groups if group.is_of_input)
        self._owners: list[dict[InputBlocks, int]] = [{} for _ in groups]
        self._entries: dict[int, tuple[InputBlocks, Pages]] = {}
        self._next_owner = NO_OWNER + 1
        self.pool: BlockPool  # set by whoever makes both: each needs the other
        # Called with an input, indices of its blocks that became findable, and all its pages; None for nobody.
        self.on_stored: Callable[[InputBlocks, npt.NDArray[np.intp], Pages], None] | None = None

    def find(self, blocks: InputBlocks) -> Pages | None:
        """Return the pages of an input in a group; None if not all of it is cached."""
        pages = self.known(blocks)
        return pages if pages is not None and pages.all() else None

    def known(self, blocks: InputBlocks) -> Pages | None:
        """Return the pages of an input in a group, 0 for one that is not cached; None if none is."""
        owner = self._owners[blocks.group].get(blocks)
        return None if owner is None else self._entries[owner][1]

    def publish(self, blocks: InputBlocks, pages: Pages) -> None:
        """Let the pages of an input be found, but for those in whose place others are found."""
        owner = self._owners[blocks.group].get(blocks)
        if owner is None:
            owner = self._owners[blocks.group][blocks] = self._fresh_owner()
            self._entries[owner] = (blocks, np.zeros(blocks.num_blocks, dtype=np.int32))
        known = self._entries[owner][1]
        new = np.flatnonzero(known == 0)
        known[new] = pages[new]
        self.pool.publish_blocks(owner, pages[new], new)
        if self.on_stored is not None:
            self.on_stored(blocks, new, pages)

    def _fresh_owner(self) -> int:
        """Return a number that no entry has, and that the pool's 32 bits hold."""
        owner = self._next_owner
        while owner in self._entries or owner > _MAX_OWNER:
            owner = NO_OWNER + 1 if owner > _MAX_OWNER else owner + 1
        self._next_owner = owner + 1
        return owner

    def remove_evicted(self, owner: int, group: int, indices: Indices) -> None:
        """Remove evicted pages from an input, and evict the others that no request holds, in all groups."""
        lost, pages = self._entries[owner]
        pages[indices] = 0
        inputs = {lost.sequence: InputSequence(lost.num_tokens, lost.key)}
        for blocks in input_blocks(self._groups, inputs, lost.salt):
            of_group = self._owners[blocks.group].get(blocks)
            if of_group is not None:
                _, pages = self._entries[of_group]
                pages[self.pool.discard_cached(blocks.group, pages)] = 0
                self._remove_if_empty(of_group)

    def _remove_if_empty(self, owner: int) -> None:
        blocks, pages = self._entries[owner]
        if not pages.any():
            del self._entries[owner], self._owners[blocks.group][blocks]

    def entries(self) -> Iterator[tuple[InputBlocks, Pages]]:
        """Go through the inputs, each with its pages, 0 for one that is not cached."""
        yield from self._entries.values()

    def published(self) -> Iterator[tuple[int, int]]:
        """Go through the pages that can be found: the group and block id of each."""
        for blocks, pages in self._entries.values():
            yield from ((blocks.group, page) for page in pages[pages != 0].tolist())

    def forget(self) -> None:
        """Forget every input; whoever has the pool gives up their pages."""
        self._entries.clear()
        for owners in self._owners:
            owners.clear()


def inputs_root(inputs: Mapping[str, InputSequence]) -> bytes:
    """Return what stands for all inputs of a request, by name and content; nothing for no inputs."""
    return b"".join(
        joined(name.encode(), inputs[name].key, _number(inputs[name].num_tokens)) for name in sorted(inputs)
    )


def joined(*parts: bytes) -> bytes:
    """Return parts as one, so that no other parts give the same."""
    return b"".join(_number(len(part)) + part for part in parts)


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
