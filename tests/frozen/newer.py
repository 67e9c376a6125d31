"""Source of the contract and of a host as a later minor could have it, put in the place of this version's.

The later version adds to the base classes of the contract what a minor may add: an argument with a default, which hosts
pass, a method that need not be implemented, and a field of specs with a default.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

CHANGES: Mapping[str, Mapping[str, str]] = {
    "kvframe.contract.backend": {
        "        more: MoreInputs | None = None,\n": "        more: MoreInputs | None = None,\n"
        "        later: int = 0,\n",
        "    def make_builder(self)": "    def kvframe_later(self) -> str:\n"
        '        return "not implemented"\n\n'
        "    def make_builder(self)",
    },
    "kvframe.contract.specs": {
        "    block_size: int = positive_int\n": "    block_size: int = positive_int\n    kvframe_later: int = 7\n",
    },
    "kvframe.attention.layer": {
        "lse=lse, more=more\n            )": "lse=lse, more=more, later=1\n            )\n"
        "            SEEN.add((self._backend.kvframe_later(), self.spec.spec.kvframe_later))",
        "class AttentionLayer:": "SEEN = set()\n\n\nclass AttentionLayer:",
    },
}
"""By module, text that occurs once in its source, and what stands there in the later version."""


class _LaterSource(importlib.machinery.SourceFileLoader):
    """Loads a changed module, and neither reads nor writes a cached one."""

    def path_stats(self, path: str) -> Any:
        raise OSError("the source is not that of the file")

    def get_data(self, path: str) -> bytes:
        text = super().get_data(path).decode()
        for old, new in CHANGES[self.name].items():
            if text.count(old) != 1:
                raise AssertionError(f"{self.name} has {old!r} {text.count(old)} times, and not once")
            text = text.replace(old, new)
        return text.encode()


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in CHANGES:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert found is not None
        assert found.origin is not None
        found.loader = _LaterSource(name, found.origin)
        return found


def change_source() -> None:
    """Let this process import the later source."""
    loaded = [name for name in CHANGES if name in sys.modules]
    assert not loaded, f"{loaded} were imported before"
    sys.meta_path.insert(0, _Finder())
