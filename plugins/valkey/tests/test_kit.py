"""The laws of page stores, checked against a real server."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from kvframe_testing.checks import Checks
from kvframe_testing.suites import PageStoreTests

from tests.support.store_server import MISSING, PROGRAM, StoreServer

# The kit makes its checks before any fixture, so the server's socket has a path that is known then.
FOLDER = Path(tempfile.gettempdir(), f"kvframe-{os.getpid()}")


@pytest.fixture(scope="module", autouse=True)
def server_of_the_kit() -> Iterator[None]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    FOLDER.mkdir()
    try:
        with StoreServer(FOLDER):
            yield
    finally:
        shutil.rmtree(FOLDER)


class TestValkey(PageStoreTests):
    store = "valkey"
    options: ClassVar[Mapping[str, Any]] = {"url": f"unix://{FOLDER / 's'}", "timeout": 60}

    def make_checks(self, *, whole: bool) -> Checks:
        """Leave out killed writers: what they sent may reach the server between a find and a read (test_faults)."""
        checks = super().make_checks(whole=whole)
        return attrs.evolve(checks, checks=[check for check in checks.checks if not check.name.startswith("killed")])
