"""The test class for model adapters, as ``kvframe.testing.suites`` has one for each other part of a plugin."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from kvframe.contract.model import ModelAdapter
from kvframe.testing.checks import Checks
from kvframe.testing.laws import ConformanceError
from kvframe.testing.suites import KitTests, find_part
from kvframe_engine.testing.adapter_checks import adapter_checks


class AdapterTests(KitTests):
    """Tests of a model adapter.

    Attributes:
        adapter: The registered name, or the class; it has to be installed.
    """

    adapter: ClassVar[str | type[ModelAdapter]]

    def make_model(self) -> Path:
        """Return where a small model is that the adapter reads; made when tests are collected."""
        raise ConformanceError(f"{type(self).__name__} has no model to test with: override make_model()")

    def make_checks(self, *, whole: bool) -> Checks:
        """Return how it reads the model, and how the engine serves it."""
        name, adapter_class = find_part(self.adapter, "model_adapter")
        return adapter_checks(adapter_class, self.make_model(), name=name)
