"""A proposer for tests: it knows what requests will generate, and makes mistakes on purpose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import ModuleType

import attrs
from kvframe_engine.contract import DraftRequest, Proposer

from tests.support.plugins import plugin

MAX_DRAFTS = 4
ANSWERS: list[list[int]] = []
"""The tokens of each request, prompt and answer, that the proposer knows."""


@attrs.define(kw_only=True, eq=False)
class Knowing(Proposer):
    """Knows what requests will generate, and makes a mistake in three of ten tokens."""

    name = "knowing"
    max_drafts: int = MAX_DRAFTS

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        return [self.drafts_of(list(request.token_ids), request.max_drafts) for request in requests]

    def drafts_of(self, tokens: list[int], max_drafts: int) -> list[int]:
        chance = random.Random(sum(tokens) + len(tokens))
        answers = (answer for answer in ANSWERS if answer[: len(tokens)] == tokens)
        following = next(answers, tokens)[len(tokens) : len(tokens) + max_drafts]
        return [token if chance.random() < 0.7 else (token + 1) % 128 for token in following]

    def forget(self, request_ids: Sequence[str]) -> None:
        pass


def make_manifest() -> ModuleType:
    return plugin("knowing_plugin", proposers={"knowing": Knowing})
