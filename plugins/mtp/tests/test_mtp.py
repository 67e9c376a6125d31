"""What ``mtp`` proposes, and the laws of proposers. The engine's tests run it with models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvframe_engine.contract import DraftRequest
from kvframe_engine.testing.suites import ProposerTests
from kvframe_mtp.proposer import MTPProposer


class TestMTP(ProposerTests):
    proposer = "mtp"


class TestMTPOfOneToken(ProposerTests):
    proposer = "mtp"
    options: ClassVar[Mapping[str, Any]] = {"max_drafts": 1}


def test_the_drafts_of_the_heads_are_proposed() -> None:
    proposer = MTPProposer()
    requests = [
        DraftRequest("a", [1, 2], 1, 3, "", continuation=(5, 6, 7)),
        DraftRequest("b", [1, 2], 1, 3, ""),
    ]
    assert proposer.uses_prediction_heads
    assert None is proposer.draft_model()
    assert [[5, 6, 7], []] == proposer.propose(requests)
