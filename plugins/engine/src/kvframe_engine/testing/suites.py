"""Test classes for the parts of plugins that an engine serves by, as ``kvframe_testing.suites`` has for others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvframe_testing.checks import Checks, make_checks
from kvframe_testing.laws import ConformanceError
from kvframe_testing.suites import KitTests

from kvframe.contract.model import ModelAdapter
from kvframe_engine.contract.logits import LogitsProcessor
from kvframe_engine.contract.proposer import Proposer
from kvframe_engine.contract.scheduling import SchedulingPolicy


class AdapterTests(KitTests):
    """Tests of a model adapter.

    Attributes:
        adapter: The registered name, or the class; it has to be installed.
    """

    kind, part = "model_adapter", "adapter"
    adapter: ClassVar[str | type[ModelAdapter]]

    def make_model(self) -> Path:
        """Return where a small model is that the adapter reads; made when tests are collected."""
        raise ConformanceError(f"{type(self).__name__} has no model to test with: override make_model()")

    def make_checks(self, *, whole: bool) -> Checks:
        """Return how it reads the model, and how the engine serves it."""
        name, adapter_class = self.find_part()
        return make_checks(self.kind, adapter_class, name=name, model=self.make_model())


class ProposerTests(KitTests):
    """Tests of a proposer of draft tokens, ``proposer``, with ``options``: the laws for several numbers of drafts."""

    kind, part = "proposer", "proposer"
    proposer: ClassVar[str | type[Proposer]]
    options: ClassVar[Mapping[str, Any]] = {}


class LogitsProcessorTests(KitTests):
    """Tests of a logits processor, ``processor``, for a vocabulary of bytes; ``options`` are those of a request."""

    kind, part = "logits_processor", "processor"
    processor: ClassVar[str | type[LogitsProcessor]]
    options: ClassVar[Mapping[str, Any]] = {}


class SchedulingTests(KitTests):
    """Tests of a scheduling policy, ``policy``, with ``options``: the laws for requests of several kinds."""

    kind, part = "scheduling", "policy"
    policy: ClassVar[str | type[SchedulingPolicy]]
    options: ClassVar[Mapping[str, Any]] = {}
