"""The adapter passes the kit, on a model with windows and on one with recurrent states."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

from kvframe_engine.testing.suites import AdapterTests
from kvframe_transformers.testing import save_tiny


class OfAFamily(AdapterTests):
    """Tests on a small model of a family, of random weights."""

    adapter = "transformers"
    family: ClassVar[str]

    def make_model(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=f"{self.family}-"))
        save_tiny(folder, self.family)
        return folder


class TestWindows(OfAFamily):
    family = "gemma3_text"


class TestStates(OfAFamily):
    family = "falcon_h1"
