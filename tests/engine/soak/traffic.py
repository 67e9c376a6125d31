"""Draw the random traffic of a soak on a simulated clock: requests in bursts, and the actions of an operator."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from kvframe import Engine
from kvframe.cache.prefix_lookup import Pin
from kvframe.contract.errors import PlanError, RequestError
from tests.engine.injected_faults import Faults
from tests.engine.soak.scenarios import CheckedPrompt, Scenario

SALTS = ("", "", "", "anna", "ben")
SECONDS_BETWEEN_BURSTS = 180
BURST_SECONDS = 8
BURST = 40
"""The rate of requests in a burst, as a multiple of the usual rate."""
ABORTED = 0.1
SAMPLES = (1, 1, 1, 1, 1, 1, 1, 1, 2, 3)


@attrs.frozen(kw_only=True)
class Arrival:
    """A request that is still to come.

    Attributes:
        second: The time of its arrival.
        prompt: The prompt, with its expected tokens.
        num_tokens: The number of tokens to generate.
        salt: Its cache salt.
        num_samples: The number of samples. They are greedy, so all are equal.
        patience: The number of steps after which its owner aborts it; None if it is never aborted.
    """

    second: float
    prompt: CheckedPrompt
    num_tokens: int
    salt: str
    num_samples: int
    patience: int | None


def draw_arrivals(scenario: Scenario, prompts: Sequence[CheckedPrompt], seconds: float, seed: int) -> list[Arrival]:
    """Return the requests of so many seconds in the order of their arrival."""
    source = random.Random(f"{scenario.name}-{seed}")
    arrivals: list[Arrival] = []
    second = 0.0
    while True:
        is_burst = second % SECONDS_BETWEEN_BURSTS < BURST_SECONDS
        second += source.expovariate(scenario.per_second * (BURST if is_burst else 1))
        if second >= seconds:
            return arrivals
        kind = source.random()
        # The shortest and the longest prompt come more often than the others.
        which = prompts[0] if kind < 0.1 else prompts[1] if kind < 0.15 else source.choice(prompts)
        most = len(which.expected)
        arrivals.append(
            Arrival(
                second=second,
                prompt=which,
                num_tokens=1 if kind < 0.05 else most if source.random() < 0.6 else source.randint(1, most),
                salt=source.choice(SALTS),
                num_samples=source.choice(SAMPLES),
                patience=source.randint(0, 20) if source.random() < ABORTED else None,
            )
        )


# --- the operator

RESETS = 1 / 500
"""The share of steps before which the prefix cache is reset."""
GROWTHS, SHRINKS, PINS = 1 / 150, 1 / 40, 1 / 10
"""The shares of steps before which a small cache grows, a larger one becomes small, and a prefix is pinned in it."""
NO_MEMORY = 0.2
"""The share of resizes for which no memory is left."""
UNPINNED = 0.7
"""The share of shrinks before which all prefixes are unpinned."""


@attrs.define
class Operator:
    """Resets and resizes the cache of an engine at random, and pins prefixes.

    Attributes:
        engine: The engine.
        faults: The injected faults.
        prompts: The prompts whose prefixes may be pinned.
        source: The source of random numbers.
        counts: The counts of all actions.
        mistakes: Descriptions of what should not have happened.
    """

    engine: Engine
    faults: Faults
    prompts: Sequence[CheckedPrompt]
    source: random.Random
    counts: Counter[str]
    mistakes: list[str]
    _pins: list[Pin] = attrs.field(factory=list)
    _tight: int = attrs.field(init=False, default=attrs.Factory(lambda self: self.engine.plan.num_slabs, True))

    def chosen(self) -> list[Callable[[], None]]:
        """Return the actions before a step. Like a step, an action raises if a fault strikes."""
        is_tight = self.engine.plan.num_slabs == self._tight
        chances = [(self._reset, RESETS)]
        chances += [(self._grow, GROWTHS)] if is_tight else [(self._shrink, SHRINKS), (self._pin, PINS)]
        return [act for act, chance in chances if self.source.random() < chance]

    def _reset(self) -> None:
        self._pins.clear()
        self.counts["resets"] += 1
        self.engine.reset_prefix_cache()

    def _grow(self) -> None:
        # Beside the pins, the longest request with the longest input must fit, which needs more than a small cache.
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
                self.engine.pin_prefix(self.source.choice(self.prompts).prompt, cache_salt=self.source.choice(SALTS))
            )
            self.counts["pins"] += 1
        except RequestError:
            pass  # The prefix has no whole block, a fault struck, or the longest request would no longer fit.
