"""Test classes for the parts of plugins that an engine serves by, as ``kvframe.testing.suites`` has for others."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from kvframe.contract.logits import LogitsProcessor
from kvframe.contract.model import ModelAdapter
from kvframe.contract.proposer import Proposer
from kvframe.testing.checks import Checks
from kvframe.testing.laws import ConformanceError
from kvframe.testing.suites import KitTests, OptionTests, find_part
from kvframe_engine.testing.adapter_checks import adapter_checks
from kvframe_engine.testing.logits_processors import logits_processor_checks
from kvframe_engine.testing.proposers import proposer_checks


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


class ProposerTests(OptionTests):
    """Tests of a proposer of draft tokens, ``proposer``: the registered name, or the class."""

    proposer: ClassVar[str | type[Proposer]]

    def make_checks(self, *, whole: bool) -> Checks:
        """Return the laws for several numbers of drafts."""
        return self.checks_of(self.proposer, "proposer", proposer_checks)


class LogitsProcessorTests(OptionTests):
    """Tests of a logits processor, ``processor``: the registered name, or the class; ``options`` are a request's."""

    processor: ClassVar[str | type[LogitsProcessor]]

    def make_checks(self, *, whole: bool) -> Checks:
        """Return the laws, for a vocabulary of bytes."""
        return self.checks_of(self.processor, "logits_processor", logits_processor_checks)
