"""Which plugins are installed is read once in a test process: reading it takes most of the time of loading plugins."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.metadata import MetadataPathFinder

from kvframe.loading import discovery

_FINDER = vars(MetadataPathFinder)["find_distributions"]


def remember_installed() -> None:
    """Let ``load_plugins`` read the installed distributions again only if a finder, the path or a folder on it changed.

    Tests that replace the finder of distributions read them each time.
    """
    read = discovery._installed
    finders: list[object] = []
    folders: list[tuple[str, int | None]] = []
    known: list[discovery.FoundPlugin] = []

    def installed() -> Iterable[discovery.FoundPlugin]:
        if vars(MetadataPathFinder)["find_distributions"] is not _FINDER:
            return read()
        now = [(os.path.abspath(path), _changed(path)) for path in sys.path]
        if now != folders or len(finders) != len(sys.meta_path) or any(map(_differ, finders, sys.meta_path)):
            known[:] = read()
            finders[:], folders[:] = sys.meta_path, now
        return [*known]

    discovery._installed = installed


def _differ(one: object, other: object) -> bool:
    return one is not other


def _changed(path: str) -> int | None:
    """Return when entries of a folder were last added or removed; None if there is no such folder."""
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return None
