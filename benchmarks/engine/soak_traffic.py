"""What comes to a soak, and when: requests at random on a simulated clock, in bursts, some of them given up."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from benchmarks.engine.soak_scenarios import Asked, Scenario

SALTS = ("", "", "", "anna", "ben")
SECONDS_BETWEEN_BURSTS = 180
BURST_SECONDS = 8
BURST = 40
"""How many times as many requests come in a burst."""
ABORTED = 0.1
SAMPLES = (1, 1, 1, 1, 1, 1, 1, 1, 2, 3)


@attrs.frozen(kw_only=True)
class Arrival:
    """A request on its way.

    Attributes:
        second: When it comes.
        asked: What it asks for.
        num_tokens: How many tokens.
        salt: Whom it shares with.
        num_samples: How many samples; they are greedy, so all are the same.
        patience: Steps after which its owner gives up; None to wait for its end.
    """

    second: float
    asked: Asked
    num_tokens: int
    salt: str
    num_samples: int
    patience: int | None


def draw_arrivals(scenario: Scenario, asked: Sequence[Asked], seconds: float, seed: int) -> list[Arrival]:
    """Return the requests of so many seconds, in the order in which they come."""
    source = random.Random(f"{scenario.name}-{seed}")
    arrivals: list[Arrival] = []
    second = 0.0
    while True:
        is_burst = second % SECONDS_BETWEEN_BURSTS < BURST_SECONDS
        second += source.expovariate(scenario.per_second * (BURST if is_burst else 1))
        if second >= seconds:
            return arrivals
        kind = source.random()
        # The shortest and the longest that there are, beside all others.
        which = asked[0] if kind < 0.1 else asked[1] if kind < 0.15 else source.choice(asked)
        most = len(which.expected)
        arrivals.append(
            Arrival(
                second=second,
                asked=which,
                num_tokens=1 if kind < 0.05 else most if source.random() < 0.6 else source.randint(1, most),
                salt=source.choice(SALTS),
                num_samples=source.choice(SAMPLES),
                patience=source.randint(0, 20) if source.random() < ABORTED else None,
            )
        )
