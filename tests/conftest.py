from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from typing import Any

import pytest

from tests.fake_distributions import FakeSite


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """A folder on the path whose distributions are the only ones that importlib.metadata finds."""
    find = MetadataPathFinder.find_distributions

    def find_here(context: Any = None) -> Iterable[Distribution]:
        name = None if context is None else context.name
        return find(DistributionFinder.Context(name=name, path=[str(tmp_path)]))

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(MetadataPathFinder, "find_distributions", staticmethod(find_here))
    fake = FakeSite(tmp_path)
    yield fake
    fake.forget_modules()
