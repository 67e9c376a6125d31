"""Plain pages with the values that a format would read back, to compare with a cache in that format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kvframe_testing.case import round_trip
from kvframe_torch.backend import TorchBackend

from kvframe.contract.backend import AttentionBackend, KVCache
from kvframe.contract.formats import KVFormat


@contextmanager
def rounding(kv_format: KVFormat) -> Iterator[None]:
    """Make the torch backend store, in plain pages, the values that a format would read back."""

    def write_kv(self: TorchBackend, key: Any, value: Any, kv_cache: KVCache, slots: Any) -> None:
        AttentionBackend.write_kv(self, *round_trip(kv_format, key, value), kv_cache, slots)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, "write_kv", write_kv)
        yield
