"""Asks page stores which blocks of waiting requests they have, in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from time import monotonic

import attrs
from kvframe_stores import PageRecords, SealedStore, StoreCounts

from kvframe.contract import PageStore


@attrs.define(eq=False)
class Lookup:
    """The question which blocks of a request are in stores.

    Attributes:
        keys: Per group, the key of each block that is asked for, by its index.
        ends: When the request stops waiting for the answer, by ``monotonic``.
        present: Per group, the blocks that some store has for every rank; complete if ``is_done``.
        is_done: Whether the stores answered.
    """

    keys: Sequence[Mapping[int, bytes]]
    ends: float
    present: list[set[int]] = attrs.field(factory=list)
    is_done: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the request waits no longer."""
        return self.is_done or monotonic() >= self.ends


class StoreLookups:
    """Answers lookups, one after the other.

    A block is present if its pages of all ranks are: each rank keeps its own share of the heads, or its own layers.
    """

    def __init__(self, stores: Sequence[PageStore], ranks: Sequence[PageRecords]) -> None:
        """Start the thread.

        Args:
            stores: The stores, in the order in which they are asked.
            ranks: Makes the keys of each rank's records.
        """
        self._ranks = ranks
        # A store that is open is open for the records of one rank.
        self._stores = [[SealedStore(store, StoreCounts()) for store in stores] for _ in ranks]
        self._lookups: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvframe-lookups", daemon=True)
        self._thread.start()

    def put(self, lookup: Lookup) -> None:
        """Queue a lookup."""
        self._lookups.put(lookup)

    def close(self, seconds: float) -> None:
        """End the thread, after some seconds at most."""
        self._lookups.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (lookup := self._lookups.get()) is not None:
            if not lookup.is_over:
                lookup.present = self._present(lookup.keys)
                lookup.is_done = True
        for stores in self._stores:
            for store in stores:
                store.close()

    def _present(self, keys: Sequence[Mapping[int, bytes]]) -> list[set[int]]:
        wanted = [(group, block) for group, of_group in enumerate(keys) for block in of_group]
        for records, stores in zip(self._ranks, self._stores, strict=True):
            missing = wanted
            here: set[tuple[int, int]] = set()
            for store in stores:
                found = store.find(records, [records.key_of(group, keys[group][block]) for group, block in missing])
                here.update(block for block, is_found in zip(missing, found, strict=True) if is_found)
                missing = [block for block in missing if block not in here]
            wanted = [block for block in wanted if block in here]
        present: list[set[int]] = [set() for _ in keys]
        for group, block in wanted:
            present[group].add(block)
        return present
