"""Serve simulated traffic while faults strike at random, and compare every token.

Only the clock is simulated: a step's time grows with its tokens, and an idle engine gets its next request at once.
``python -m benchmarks.engine.soak`` runs an hour of it; see benchmarks/README.md.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from kvframe_engine.core import STEP_FAILED
from kvframe_testing.audit import audit

from kvframe import Engine, RequestOutput, SamplingParams
from kvframe.cache.events import CacheEvent
from kvframe.contract.errors import BackendError, WrapperError
from tests.cache.mirror import Mirror
from tests.engine.injected_faults import KINDS, Faults, InjectedError
from tests.engine.soak.scenarios import Served
from tests.engine.soak.traffic import Arrival, Operator
from tests.support.engines import audit_host_tier, host_tier_of, manager_of, pool_of

STEP_SECONDS, TOKEN_SECONDS = 0.03, 0.003
FAULTS = 1 / 40
"""The share of steps before which a fault is armed."""
MOST_AFTER = {"memory": 60, "host": 0}
"""How often the place of a fault may be reached before it strikes; 3 for other faults."""
MOST_STEPS_ARMED = 100
"""If a fault's place, such as a copy to host memory, is not reached by then, another fault is armed."""
STEPS_PER_AUDIT = 50
WRONG = ("differences", "mirror_differences", "leaks")
"""The mistakes that must not happen; each one is described in words."""

_Made = TypeVar("_Made")


class Soak:
    """One engine under traffic.

    Attributes:
        counts: What happened how often, by name.
        ends: The number of requests by the reason of their end.
        raised: The number of exceptions of steps and operations by their class.
        wrong: Descriptions of mistakes by ``WRONG``.
    """

    def __init__(self, served: Served, seed: int) -> None:
        """Make the engine and its faults."""
        self.counts: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.raised: Counter[str] = Counter()
        self.wrong: dict[str, list[str]] = {what: [] for what in WRONG}
        self.engine: Engine = served.engine()
        self.faults = Faults(self.engine, self._hear)
        self._mirror = Mirror()
        source = random.Random(f"{served.scenario.name}-operator-{seed}")
        self._operator = Operator(
            self.engine, self.faults, served.prompts, source, self.counts, self.wrong["differences"]
        )
        # The operator injects wrong sizes; other faults need host memory or a wrapper.
        left_out = {"resize"}
        left_out |= set() if "host_memory" in served.scenario.cache else {"host"}
        left_out |= set() if served.scenario.wrappers else {"shape"}
        self._kinds = [kind for kind in KINDS if kind not in left_out]
        self._source = random.Random(f"{served.scenario.name}-faults-{seed}")
        self._has_owners = served.scenario.has_owners
        self._second = 0.0
        self._armed_until = 0
        self._running: dict[tuple[str, int], Arrival] = {}
        self._patience: dict[str, int] = {}
        self._last_errors: set[str] = set()

    def run(self, arrivals: Sequence[Arrival], advance: Callable[[int], None]) -> None:
        """Serve requests to their ends.

        Args:
            arrivals: The requests, in order.
            advance: Called with the number of requests that have arrived.
        """
        coming = list(reversed(arrivals))
        while coming or self.engine.has_unfinished:
            if not self.engine.has_unfinished:
                self._second = max(self._second, coming[-1].second)
            num_before = len(coming)
            while coming and coming[-1].second <= self._second:
                self._take(coming.pop())
            advance(num_before - len(coming))
            self._disturb()
            self._step()
            if self.counts["steps"] % STEPS_PER_AUDIT == 0:
                self._audit()
        self.faults.disarm()
        self._look_for_leaks()

    def _take(self, arrival: Arrival) -> None:
        params = SamplingParams(max_new_tokens=arrival.num_tokens, n=arrival.num_samples)
        owner = arrival.salt if self._has_owners else ""
        name = self.engine.add_request(arrival.prompt.prompt, params, cache_salt=arrival.salt, owner=owner)
        for sample in range(arrival.num_samples):
            self._running[name, sample] = arrival
        if arrival.patience is not None:
            self._patience[name] = self.counts["steps"] + arrival.patience
        self.counts["requests"] += arrival.num_samples
        self.counts["prompt_tokens"] += arrival.num_samples * arrival.prompt.num_tokens
        self.counts["most_at_once"] = max(self.counts["most_at_once"], len(self._running))

    def _disturb(self) -> None:
        """Abort requests whose owners give up; arm a fault and let the operator act, both at random."""
        for name in [name for name, step in self._patience.items() if step <= self.counts["steps"]]:
            del self._patience[name]
            self.engine.abort(name)
        self._attempt(self.faults.listen)
        if self.counts["steps"] >= self._armed_until:
            self.faults.disarm()
        if not self.faults.is_armed and self._source.random() < FAULTS:
            kind = self._source.choice(self._kinds)
            self.faults.arm(kind, self._source.randint(0, MOST_AFTER.get(kind, 3)))
            self._armed_until = self.counts["steps"] + MOST_STEPS_ARMED
        for act in self._operator.chosen():
            self._attempt(act)

    def _attempt(self, act: Callable[[], _Made]) -> _Made | None:
        """Call a function; if a fault makes it raise, count this and return None."""
        try:
            return act()
        except (Exception, KeyboardInterrupt) as error:
            cause = error.__cause__ if isinstance(error, BackendError) else error  # It names the backend that failed.
            self.raised[type(cause).__name__] += 1
            if not isinstance(cause, InjectedError | torch.OutOfMemoryError | WrapperError | KeyboardInterrupt):
                raise
            self._last_errors.add(STEP_FAILED)
            return None

    def _step(self) -> None:
        before = self.engine.stats().computed_tokens
        for output in self._attempt(self.engine.step) or ():
            if output.finish_reason is not None:
                self._end(output)
        self.counts["steps"] += 1
        self._second += STEP_SECONDS + TOKEN_SECONDS * (self.engine.stats().computed_tokens - before)

    def _end(self, output: RequestOutput) -> None:
        arrival = self._running.pop((output.request_id, output.sample))
        if not any((output.request_id, sample) in self._running for sample in range(arrival.num_samples)):
            self._patience.pop(output.request_id, None)
        self.ends[str(output.finish_reason)] += 1
        wanted = arrival.prompt.expected[: arrival.num_tokens]
        if output.finish_reason != "length":
            # A request that was aborted or has failed must have the right tokens up to its end.
            wanted = wanted[: len(output.token_ids)]
        self.counts["compared_tokens"] += len(wanted)
        if wanted != output.token_ids:
            self.wrong["differences"].append(f"{output.request_id}: {output.token_ids} and not {wanted}")
        if output.finish_reason == "error":
            self._judge(output)

    def _judge(self, output: RequestOutput) -> None:
        """Check that a request failed because of a fault."""
        error = str(output.error)
        if "is not numbers" in error:
            self.ends["not numbers"] += 1
            if self.ends["not numbers"] > self.faults.struck["logits"] + self.faults.struck["state"]:
                self.wrong["differences"].append(f"{output.request_id}: more than one failed of a NaN: {error}")
        elif error not in self._last_errors:
            self.wrong["differences"].append(f"{output.request_id} failed without a reason: {error}")

    def _audit(self) -> None:
        self.counts["audits"] += 1
        try:
            audit(manager_of(self.engine))
            if (tier := host_tier_of(self.engine)) is not None:
                audit_host_tier(tier)
        except AssertionError as error:
            self.wrong["leaks"].append(f"step {self.counts['steps']}: {error}")
        self._compare_mirror()

    def _hear(self, events: Sequence[CacheEvent]) -> None:
        try:
            self._mirror.replay(events)
        except (AssertionError, KeyError) as error:
            self.wrong["mirror_differences"].append(f"step {self.counts['steps']}: events out of order: {error!r}")

    def _compare_mirror(self) -> None:
        """Compare the blocks that the listener knows with those that a new listener is told."""
        engine: Any = self.engine
        num_interrupts = self.faults.struck["told"]
        self._attempt(engine._settle)
        self._attempt(engine._cache_events.deliver)
        if engine.on_cache_events is not None and num_interrupts == self.faults.struck["told"]:
            self.counts["mirrors"] += 1
            late = Mirror()
            engine.on_cache_events = late.replay
            if late.blocks.keys() != self._mirror.blocks.keys():
                sizes = f"{len(self._mirror.blocks)} blocks and not {len(late.blocks)}"
                self.wrong["mirror_differences"].append(f"step {self.counts['steps']}: {sizes}")
            engine.on_cache_events = None
            self._attempt(self.faults.listen)

    def _look_for_leaks(self) -> None:
        """Check that no page is held without an owner, and that all memory is free after the prefix cache is reset."""
        self._audit()
        manager: Any = manager_of(self.engine)
        tier = host_tier_of(self.engine)
        self.engine.reset_prefix_cache()
        for what, found, expected in (
            ("requests without an end", len(self._running), 0),
            ("pages held", manager.num_held_pages, 0),
            ("bytes held in host memory", 0 if tier is None else tier.pool.held_bytes, 0),
            ("rows free", manager.num_free_rows, self.engine.stack.limits.max_num_seqs),
            ("slabs idle", pool_of(manager).num_idle_slabs, self.engine.plan.num_slabs),
            ("pages cached", pool_of(manager).num_cached, 0),
        ):
            if found != expected:
                self.wrong["leaks"].append(f"{what}: {found} and not {expected}")
