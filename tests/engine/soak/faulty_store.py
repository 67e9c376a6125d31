"""A page store of the test process that lies, fails, loses, tears, fills up and waits at random."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import ClassVar

import attrs

from kvframe.contract import OpenPageStore, PageStore
from tests.support.plugins import plugin

STORE_FAULTS: Mapping[str, str] = {
    "store raises": "a call raises",
    "store has no memory": "a call raises `MemoryError`",
    "store exits": "a call raises `SystemExit`",
    "store cannot be opened": "it cannot be opened",
    "store is slow": "a call takes some milliseconds, or longer than a request waits",
    "store finds too much": "it says that it has what it does not have",
    "store finds nothing": "it says that it has nothing",
    "store answers too little": "it gives fewer answers than it has keys",
    "store loses": "it loses a third of its records",
    "store returns another byte": "a record that is read has another byte",
    "store returns another record": "it returns the record of another key",
    "store returns half": "it fills half of the buffer, and says that this is all",
    "store is full": "it keeps nothing of a write",
    "store tears": "it keeps half of each record, and zeros after it",
    "store stops": "it raises in the middle of a write",
    "store forgets nothing": "it raises when it is to forget",
}
"""What can happen."""

OFTEN, SHARE = 1 / 4, 1 / 20
"""The share of calls with a fault, in a bad moment and otherwise."""
CALLS_A_MOMENT = 30
SHORT, LONG = 0.004, 0.08
"""Seconds that a slow call takes, at most."""


class StoreError(RuntimeError):
    """What a call raises."""


@attrs.define(eq=False)
class FaultyShelf:
    """The records of a store, and what went wrong with it. Several threads use it.

    Attributes:
        source: The source of random numbers.
        records: The records by key.
        struck: How often each of ``STORE_FAULTS`` happened.
        num_open: The number of open stores.
    """

    source: random.Random
    records: dict[bytes, bytes] = attrs.field(factory=dict)
    struck: Counter[str] = attrs.field(factory=Counter)
    num_open: int = 0
    _lock: threading.RLock = attrs.field(factory=threading.RLock)
    _num_calls: int = 0

    def fault(self, *kinds: str) -> str | None:
        """Return what happens in a call: one of some kinds, or nothing."""
        with self._lock:
            self._num_calls += 1
            is_bad = self._num_calls // CALLS_A_MOMENT % 4 == 3
            if self.source.random() >= (OFTEN if is_bad else SHARE):
                return None
            kind = self.source.choice(kinds)
            self.struck[kind] += 1
            return kind

    def seconds(self) -> float:
        """Return how long a slow call takes."""
        with self._lock:
            return self.source.uniform(0, SHORT if self.source.random() < 0.8 else LONG)

    def lose(self) -> None:
        """Lose a third of the records."""
        with self._lock:
            for key in self.source.sample(sorted(self.records), len(self.records) // 3):
                del self.records[key]

    def another(self, key: bytes) -> bytes:
        """Return the record of another key if there is one."""
        with self._lock:
            return self.records[self.source.choice(sorted(self.records))] if self.records else key


SHELVES: dict[str, FaultyShelf] = {}
"""The content of the stores by their option ``shelf``."""

_ANY_CALL = ("store raises", "store has no memory", "store exits", "store is slow", "store loses")


@attrs.frozen(kw_only=True)
class FaultyStore(PageStore):
    """The store."""

    name: ClassVar[str] = "faulty"
    shelf: str = "soak"

    def open(self, origin: str) -> OpenPageStore:
        shelf = SHELVES[self.shelf]
        if shelf.fault("store cannot be opened"):
            raise StoreError("cannot be opened")
        shelf.num_open += 1
        return OpenFaultyStore(shelf)

    def local_secret(self) -> bytes:
        return b"s" * 32


class OpenFaultyStore(OpenPageStore):
    """The open store."""

    def __init__(self, shelf: FaultyShelf) -> None:
        self._shelf = shelf

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        fault = self._begin("store finds too much", "store finds nothing", "store answers too little")
        answers = [key in self._shelf.records for key in keys]
        if fault in ("store finds too much", "store finds nothing"):
            return [fault == "store finds too much"] * len(keys)
        return answers[1:] if fault == "store answers too little" else answers

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        lies = ("store returns another byte", "store returns another record", "store returns half")
        fault = self._begin(*lies, "store answers too little")
        answers = []
        for key, buffer in zip(keys, buffers, strict=True):
            record = self._shelf.records.get(key)
            if record is not None and fault == "store returns another byte":
                record = bytes([record[0] ^ 1]) + record[1:]
            elif fault == "store returns another record":
                record = self._shelf.another(key)
            elif record is not None and fault == "store returns half":
                buffer[: len(buffer) // 2] = record[: len(buffer) // 2]
                answers.append(True)
                continue
            answers.append(record is not None and len(record) == len(buffer))
            if record is not None and answers[-1]:
                buffer[:] = record
        return answers[1:] if fault == "store answers too little" else answers

    def write(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        fault = self._begin("store is full", "store tears", "store stops")
        if fault == "store is full":
            return 0
        for number, (key, record) in enumerate(zip(keys, records, strict=True)):
            if fault == "store stops" and number >= len(keys) // 2:
                raise StoreError(fault)
            half = len(record) // 2 if fault == "store tears" else len(record)
            self._shelf.records[key] = bytes(record[:half]) + bytes(len(record) - half)
        return len(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        if self._shelf.fault("store forgets nothing"):
            raise StoreError("store forgets nothing")
        for key in keys:
            self._shelf.records.pop(key, None)

    def close(self) -> None:
        self._shelf.num_open -= 1

    def _begin(self, *kinds: str) -> str | None:
        """Draw the fault of a call: lose records, wait or raise; otherwise return it."""
        fault = self._shelf.fault(*_ANY_CALL, *kinds)
        if fault is not None and fault in _EXCEPTIONS:
            raise _EXCEPTIONS[fault](fault)
        if fault == "store is slow":
            threading.Event().wait(self._shelf.seconds())
        elif fault == "store loses":
            self._shelf.lose()
        return fault


_EXCEPTIONS: Mapping[str, Callable[[str], BaseException]] = {
    "store raises": StoreError,
    "store has no memory": MemoryError,
    "store exits": SystemExit,
}


def faulty_store_plugin() -> ModuleType:
    """Return the plugin that registers the store."""
    return plugin("faulty_stores", page_stores={FaultyStore.name: FaultyStore})
