"""What ``draft_model`` proposes, and the laws of proposers. The engine's tests run it with models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from kvframe_draft_model.proposer import DraftModelProposer
from kvframe_engine.contract import DraftRequest
from kvframe_engine.testing.suites import ProposerTests


class TestDraftModel(ProposerTests):
    proposer = "draft_model"
    options: ClassVar[Mapping[str, Any]] = {"model": "small"}


class TestDraftModelOfOneToken(ProposerTests):
    proposer = "draft_model"
    options: ClassVar[Mapping[str, Any]] = {"model": "small", "max_drafts": 1}


def test_the_continuation_is_proposed() -> None:
    proposer = DraftModelProposer(model="small")
    requests = [
        DraftRequest("a", [1, 2], 1, 3, "", continuation=(5, 6, 7)),
        DraftRequest("b", [1, 2], 1, 3, ""),
    ]
    assert "small" == proposer.draft_model()
    assert [[5, 6, 7], []] == proposer.propose(requests)


@pytest.mark.parametrize("model", ["", 3, None])
def test_the_model_is_a_path(model: object) -> None:
    with pytest.raises(ValueError, match="model must be the path of a model's folder"):
        DraftModelProposer(model=model)  # type: ignore[arg-type]
