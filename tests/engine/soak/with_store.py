"""Serve simulated traffic while a page store is faulty too, and look for threads, files and fetches that stay."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvframe_engine.tiers import tiers
from kvframe_stores import sealed_store

from tests.engine.soak.faulty_store import SHELVES, FaultyShelf
from tests.engine.soak.run import Soak
from tests.engine.soak.scenarios import Served
from tests.engine.soak.traffic import Arrival
from tests.support.engines import fetcher_of
from tests.support.waiting import waited_for

LIMITS: Mapping[Any, Mapping[str, float]] = {
    sealed_store: {"FIRST_REST": 0.002, "LONGEST_REST": 0.02},
    tiers: {"LEAST_WAIT": 0.03},
}
"""Shorter times than those of engines that serve, so that a store is asked often, and requests wait in vain too."""

MOST_IDLE_STEPS = 30_000
"""If so many steps compute nothing, the engine is stuck; a step without work waits for 2 ms at most."""


class StoreSoak(Soak):
    """One engine with a faulty store under traffic.

    Attributes:
        shelf: What the store has.
    """

    def __init__(self, served: Served, seed: int) -> None:
        """Make the store, the engine and its faults."""
        self.shelf = SHELVES["soak"] = FaultyShelf(random.Random(f"{served.scenario.name}-store-{seed}"))
        self._files, self._threads = _num_open_files(), _page_threads()
        self._progress = (0, 0)
        self._num_idle = 0
        super().__init__(served, seed)

    def run(self, arrivals: Sequence[Arrival], advance: Callable[[int], None]) -> None:
        """Serve requests to their ends, close the engine, and check that nothing of it stays."""
        with _shorter_limits():
            super().run(arrivals, advance)
            self._look_for_fetches()
            self.engine.close()
        self._look_for_remains()

    def _step(self) -> None:
        super()._step()
        progress = self.engine.stats().computed_tokens, sum(self.ends.values())
        if progress != self._progress:
            self._progress, self._num_idle = progress, 0
            return
        self._num_idle += 1
        if self._num_idle == MOST_IDLE_STEPS:
            self.wrong["leaks"].append(f"step {self.counts['steps']}: stuck with {len(self._running)} requests")
            for name in {name for name, _ in self._running}:
                self.engine.abort(name)

    def _look_for_fetches(self) -> None:
        """Check that no fetched page waits for a request."""
        self.counts["waits_in_vain"] = self.engine.stats().waits_in_vain
        fetcher = fetcher_of(self.engine)
        if not waited_for(lambda: fetcher.num_waiting_bytes == 0):
            self.wrong["leaks"].append(f"bytes of fetched pages: {fetcher.num_waiting_bytes} and not 0")

    def _look_for_remains(self) -> None:
        """Check what stays of an engine that was closed."""
        for what, found, expected in (
            ("threads for pages", _page_threads(), self._threads),
            ("open stores", self.shelf.num_open, 0),
            ("open files", _num_open_files(), self._files),
        ):
            if found > expected:  # others may close files meanwhile
                self.wrong["leaks"].append(f"{what}: {found} and not {expected}")


@contextmanager
def _shorter_limits() -> Iterator[None]:
    before = {module: {name: getattr(module, name) for name in limits} for module, limits in LIMITS.items()}
    try:
        _set_all(LIMITS)
        yield
    finally:
        _set_all(before)


def _set_all(limits: Mapping[Any, Mapping[str, float]]) -> None:
    for module, values in limits.items():
        for name, value in values.items():
            setattr(module, name, value)


def _page_threads() -> int:
    return sum(thread.name.startswith("kvframe-page-") for thread in threading.enumerate())


def _num_open_files() -> int:
    folder = Path("/proc/self/fd")
    return sum(1 for _ in folder.iterdir()) if folder.exists() else 0
