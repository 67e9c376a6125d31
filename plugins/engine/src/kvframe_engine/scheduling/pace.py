"""How many drafts a request gets, and how long it waits for the next ones, from what became of its last drafts."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

MAX_PAUSE = 32
"""The most steps without drafts between two attempts of a request."""


@attrs.define
class Pace:
    """How many drafts a request gets.

    Attributes:
        num_drafts: Drafts of its next step with drafts, at least one.
        first_pause: Steps that it pauses after a step that accepts fewer than half.
        pause: Steps that it pauses after the next step of that kind; doubled each time.
        silence: Steps that it pauses if the proposer has no drafts; about doubled each time.
        num_tries: Drafts that are tried, and not computed, before it gets drafts, if all of them are right.
        tried: The place of a tried draft among the request's tokens, and the draft; None if none waits for its token.
    """

    num_drafts: int
    first_pause: int = 1
    pause: int = attrs.field(default=attrs.Factory(lambda self: self.first_pause, takes_self=True))
    silence: int = 0
    num_tries: int = 0
    tried: tuple[int, int] | None = None

    def compare(self, token_ids: Sequence[int]) -> bool | None:
        """Return whether the tried draft is the token in its place; None if there is no such draft or token yet."""
        if self.tried is None or len(token_ids) <= self.tried[0]:
            return None
        (position, draft), self.tried = self.tried, None
        return token_ids[position] == draft

    def skip(self, max_steps: int) -> int:
        """Return the steps to wait before the next question, because the proposer had no drafts; at most so many."""
        num_waiting, self.silence = self.silence, min(2 * self.silence + 1, max(max_steps, self.first_pause - 1))
        return num_waiting

    def learn(self, num_proposed: int, num_accepted: int, max_drafts: int) -> int:
        """Choose the number of the next drafts from what became of the last ones; return the steps to wait first."""
        self.silence = 0
        self.num_drafts = min(2 * num_proposed, max_drafts) if num_accepted == num_proposed else max(1, num_accepted)
        if 2 * num_accepted >= num_proposed:
            self.pause = self.first_pause
            return 0
        num_waiting, self.pause = self.pause, min(2 * self.pause, MAX_PAUSE)
        return num_waiting
