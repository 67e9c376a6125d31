"""Page stores in the memory of the test process, good and bad ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import ClassVar

import attrs

from kvframe.contract import OpenPageStore, PageStore
from tests.support.plugins import plugin

SHELVES: dict[str, Shelf] = {}
"""The content of stores by the option ``shelf``; engines with the same one share it."""


@attrs.define(eq=False)
class Shelf:
    """What a store has, and how it misbehaves.

    Attributes:
        records: The records by key.
        change: Changes a record that is read; None for a store that tells the truth.
        failing: Whether every call raises.
        gate: Calls wait until it is set.
        origins: The origins that the store was opened with.
    """

    records: dict[bytes, bytes] = attrs.field(factory=dict)
    change: Callable[[bytes, bytes], bytes] | None = None
    failing: bool = False
    gate: threading.Event = attrs.field(factory=threading.Event)
    origins: set[str] = attrs.field(factory=set)

    def __attrs_post_init__(self) -> None:
        self.gate.set()


@attrs.frozen(kw_only=True)
class ShelfStore(PageStore):
    """A store of the test process."""

    name: ClassVar[str] = "shelf"
    shelf: str = "one"

    def open(self, origin: str) -> OpenPageStore:
        shelf = SHELVES.setdefault(self.shelf, Shelf())
        shelf.origins.add(origin)
        return OpenShelf(shelf)

    def local_secret(self) -> bytes:
        return b"s" * 32


class OpenShelf(OpenPageStore):
    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        self._wait()
        return [key in self.shelf.records for key in keys]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        self._wait()
        answers = []
        for key, buffer in zip(keys, buffers, strict=True):
            record = self.shelf.records.get(key)
            if record is not None and self.shelf.change is not None:
                record = self.shelf.change(key, record)
            answers.append(record is not None and len(record) == len(buffer))
            if record is not None and answers[-1]:
                buffer[:] = record
        return answers

    def write(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        self._wait()
        self.shelf.records.update(zip(keys, map(bytes, records), strict=True))
        return len(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.shelf.records.pop(key, None)

    def close(self) -> None:
        pass

    def _wait(self) -> None:
        self.shelf.gate.wait()
        if self.shelf.failing:
            raise OSError("the shelf broke")


def shelf_plugin() -> ModuleType:
    """Return the plugin that registers the store."""
    return plugin("shelves", page_stores={"shelf": ShelfStore})
