"""Swapping: requests that wait with their pages in host memory, how they get there and how they come back."""

from __future__ import annotations

import attrs

from kvframe.cache.coordinator import KVCacheCoordinator
from kvframe.cache.entries import Entry
from kvframe.cache.host_store import HostStore
from kvframe.cache.resuming import Resumer, SwappedBlocks


@attrs.frozen
class SwappedRequest:
    """A request that is swapped out.

    Attributes:
        entry: What the table said of it.
        blocks: Where its blocks lie in the host store.
    """

    entry: Entry
    blocks: SwappedBlocks


class SwappedRequests:
    """The requests that are swapped out.

    Invariant: the pages that they name are exactly the held pages of the host store.

    Attributes:
        by_name: The requests, by name.
    """

    def __init__(self, host: HostStore | None, coordinator: KVCacheCoordinator, resumer: Resumer) -> None:
        """Start with none.

        Args:
            host: Where they wait; None if they cannot.
            coordinator: Whose rows they leave.
            resumer: Who gives them pages again.
        """
        self.by_name: dict[str, SwappedRequest] = {}
        self._host = host
        self._coordinator = coordinator
        self._resumer = resumer

    def take(self, request_id: str, entry: Entry) -> bool:
        """Copy a request's resident pages to the host store and keep what it needs to come back; its row stays.

        Returns:
            False, and nothing changed, if there is no room for all of them.

        Raises:
            RuntimeError: A copy failed; nothing changed.
        """
        row = entry.row
        copies = None if self._host is None else self._host.put(self._coordinator.blocks(row))
        if copies is None:
            return False
        blocks = SwappedBlocks(copies, int(self._coordinator.num_computed[row]), self._coordinator.state(row))
        self.by_name[request_id] = SwappedRequest(entry, blocks)
        return True

    def bring_back(self, request_id: str, row: int, num_tokens: int, *, uses_prefix: bool) -> Entry | None:
        """Let a request go on in a row, with room for its tokens ``[0, num_tokens)``; its copies are given up.

        Args:
            request_id: A request that is swapped out.
            row: A free row.
            num_tokens: The tokens.
            uses_prefix: Whether it references pages of the cache that hold the same.

        Returns:
            What the table said of it; None, and nothing changed, if the pool has too few pages.

        Raises:
            RequestError: The plan is for fewer tokens; nothing changed.
            RuntimeError: A copy failed; it is still swapped out, and the row is free.
        """
        assert self._host is not None
        entry, blocks = self.by_name[request_id].entry, self.by_name[request_id].blocks
        found = self._resumer.find(entry.namespace, entry.token_ids, blocks) if uses_prefix else None
        to_fill = self._resumer.resume(row, blocks, num_tokens, found)
        if to_fill is None:
            return None
        try:
            self._host.fetch(blocks.copies, to_fill)
        except BaseException:
            self._coordinator.free_row(row)
            raise
        self.give_up(request_id)
        return entry

    def give_up(self, request_id: str) -> None:
        """Forget a request, and give up its copies."""
        assert self._host is not None
        self._host.free(self.by_name.pop(request_id).blocks.copies)

    def audit(self) -> None:
        """Check that the host store has these copies and no others.

        Raises:
            AssertionError: It has not; the text says what.
        """
        if self._host is not None:
            self._host.audit([swapped.blocks.copies for swapped in self.by_name.values()])
