"""What comes to a soak at random, on a simulated clock: requests in bursts, and what an operator does meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from benchmarks.engine.soak_scenarios import Asked, Scenario
from kvframe import Engine
from kvframe.cache.pins import Pin
from kvframe.contract.errors import PlanError, RequestError
from tests.engine.injected_faults import Faults

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


# --- the operator

RESETS = 1 / 500
"""Steps before which the prefix cache is reset."""
GROWTHS, SHRINKS, PINS = 1 / 150, 1 / 40, 1 / 10
"""Steps before which a tight cache grows, and before which a larger one is made tight, or a prefix is pinned in it."""
NO_MEMORY = 0.2
"""Of the sizes that are asked for, those for which there is no memory."""
UNPINNED = 0.7
"""Of the times that a cache is to be made tight, those at which what is pinned is let go of before."""


@attrs.define
class Operator:
    """An operator of an engine.

    Attributes:
        engine: The engine.
        faults: What breaks it.
        asked: The prompts whose prefixes may be pinned.
        source: Chance.
        counts: Where each operation is counted.
        mistakes: What should not have happened, in words.
    """

    engine: Engine
    faults: Faults
    asked: Sequence[Asked]
    source: random.Random
    counts: Counter[str]
    mistakes: list[str]
    _pins: list[Pin] = attrs.field(factory=list)
    _tight: int = attrs.field(init=False, default=attrs.Factory(lambda self: self.engine.plan.num_slabs, True))

    def chosen(self) -> list[Callable[[], None]]:
        """Return what is to be done before a step; what breaks meanwhile raises, as a step does."""
        is_tight = self.engine.plan.num_slabs == self._tight
        chances = [(self._reset, RESETS)]
        chances += [(self._grow, GROWTHS)] if is_tight else [(self._shrink, SHRINKS), (self._pin, PINS)]
        return [act for act, chance in chances if self.source.random() < chance]

    def _reset(self) -> None:
        self._pins.clear()
        self.counts["resets"] += 1
        self.engine.reset_prefix_cache()

    def _grow(self) -> None:
        # Beside what is pinned there has to be room for the longest request with the longest input, which is not tight.
        plan = self.engine.plan
        self._resize(self._tight + self.source.randint(1, plan.num_slabs_for(plan.peak_blocks(plan.max_model_len))))

    def _shrink(self) -> None:
        if self.source.random() < UNPINNED:
            while self._pins:
                self.engine.unpin(self._pins.pop())
        self._resize(self._tight)

    def _resize(self, num_slabs: int) -> None:
        plan = self.engine.plan
        breaks = not self.faults.is_armed and self.source.random() < NO_MEMORY
        if breaks:
            self.faults.arm("resize")
        try:
            self.engine.resize_cache(plan.total_bytes + (num_slabs - plan.num_slabs) * plan.slab_bytes)
            self.counts["resizes"] += 1
        except PlanError as error:
            self.counts["resizes_refused"] += 1
            if self.engine.plan != plan or not (breaks or self._pins):
                self.mistakes.append(f"{plan.num_slabs} slabs did not become {num_slabs}: {error}")
        finally:
            if breaks:
                self.faults.disarm()

    def _pin(self) -> None:
        self.counts["pins_asked"] += 1
        try:
            self._pins.append(
                self.engine.pin_prefix(self.source.choice(self.asked).prompt, cache_salt=self.source.choice(SALTS))
            )
            self.counts["pins"] += 1
        except RequestError:
            pass  # It has no whole block, failed as others do, or leaves no room for the longest request.
