"""Wrong proposers that the kit finds, each by the law that it breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
from kvframe_engine.contract import DraftRequest, Proposer
from kvframe_engine.testing.proposers import check_proposer
from kvframe_testing.laws import ConformanceError


@attrs.define(kw_only=True, eq=False)
class LastToken(Proposer):
    """Proposes a request's last token."""

    name = "last_token"
    last_tokens: list[int] = attrs.field(factory=list)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        return [[request.token_ids[-1]] for request in requests]

    def forget(self, request_ids: Sequence[str]) -> None:
        pass


def test_a_right_proposer_passes() -> None:
    check_proposer(LastToken)


def remember(self: LastToken, requests: Sequence[DraftRequest]) -> Any:
    self.last_tokens += [request.token_ids[-1] for request in requests]
    return [[sum(self.last_tokens) % 8] for _ in requests]


def append(self: LastToken, requests: Sequence[DraftRequest]) -> Any:
    requests[0].token_ids.append(1)  # type: ignore[attr-defined]
    return [[] for _ in requests]


def fail(self: LastToken, requests: Any) -> Any:
    raise KeyError("unknown")


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        ("propose", lambda self, requests: None, "returned None for 2 requests"),
        ("propose", lambda self, requests: [[]], r"returned \[\[\]\] for 2 requests"),
        ("propose", lambda self, requests: [[1] * 9 for _ in requests], "with max_drafts 1; return at most so many"),
        ("propose", lambda self, requests: [[-1] for _ in requests], "as a list of int"),
        ("propose", lambda self, requests: [[1.0] for _ in requests], "as a list of int"),
        ("propose", lambda self, requests: ["a" for _ in requests], "as a list of int"),
        ("propose", fail, r"propose\(\) failed: KeyError"),
        ("propose", append, r"propose\(\) changed the tokens of a request"),
        ("propose", remember, "the drafts of a request depend on requests of another salt"),
        ("forget", fail, r"forget\(\) failed: KeyError"),
    ],
)
def test_a_wrong_proposer_is_found(
    method: str, wrong: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LastToken, method, wrong)
    with pytest.raises(ConformanceError, match=message):
        check_proposer(LastToken)
