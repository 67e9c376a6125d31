"""Records what each step of an engine computed, and what happened to its requests."""

from __future__ import annotations

import time
from typing import Any, Generic

import attrs

from kvframe import FoundPrefix, KVCacheManager
from kvframe_engine.requests.progress import RequestT
from kvframe_engine.scheduling.scheduler import Scheduler
from kvframe_engine.scheduling.step import ScheduledStep


@attrs.frozen
class TracedPart:
    """What a step computed for one request.

    Attributes:
        request_id: The request.
        num_computed: Its tokens that were computed before.
        num_tokens: Its tokens that the step computed, drafts included.
        num_drafts: The drafts among them.
        num_accepted: The drafts that it took.
        generates: Whether the step gave it a next token.
    """

    request_id: str
    num_computed: int
    num_tokens: int
    num_drafts: int
    num_accepted: int
    generates: bool


@attrs.frozen
class TracedStep:
    """One step.

    Attributes:
        start: Seconds from the beginning of the trace to the step's.
        stop: The same to its end.
        parts: What it computed for each request.
        num_waiting: Requests that waited.
        blocks_held: Per cache group, the blocks that requests and pins hold after it.
        num_evicted: Cached blocks that were evicted for it.
        waited_for: Why it was chosen after the outcomes of the step before it were known. Empty if it was chosen
            before, if there was no step before, or if the engine's steps do not overlap.
    """

    start: float
    stop: float
    parts: tuple[TracedPart, ...]
    num_waiting: int
    blocks_held: tuple[int, ...]
    num_evicted: int
    waited_for: str


@attrs.frozen
class TracedEvent:
    """Something that happened to a request.

    Attributes:
        seconds: When, from the beginning of the trace.
        request_id: The request.
        what: ``"admitted"``, ``"preempted"`` or ``"ended"``.
        why: In a clause: what was found of its prompt and what limited it, how its state is kept, or why it ended.
        found_tokens: If it was admitted, its tokens that need not be computed.
    """

    seconds: float
    request_id: str
    what: str
    why: str = ""
    found_tokens: int = 0


class StepTrace(Generic[RequestT]):
    """A recording of an engine's steps since it began, as ``Engine.start_trace`` returns it.

    Attributes:
        steps: The steps.
        events: What happened to requests, in order.
    """

    def __init__(self, scheduler: Scheduler[RequestT], manager: KVCacheManager) -> None:
        """Begin, between two steps.

        Args:
            scheduler: The engine's scheduler.
            manager: Its cache manager.
        """
        self.steps: list[TracedStep] = []
        self.events: list[TracedEvent] = []
        self._scheduler = scheduler
        self._manager = manager
        self._began = time.perf_counter()
        # The steps that are not complete: two, if steps overlap.
        self._scheduled: dict[int, tuple[float, str]] = {}
        self._running: dict[str, RequestT] = {request.request_id: request for request in scheduler.running}
        self._num_evicted = manager.stats.num_evictions

    def note_scheduled(self, step: ScheduledStep[RequestT], waited_for: str = "") -> None:
        """Record which requests were preempted and admitted for a step, and why it was not chosen earlier."""
        self._scheduled[id(step)] = self._now(), waited_for
        running = {request.request_id: request for request in self._scheduler.running}
        for request_id, request in self._running.items():
            if request_id not in running and request.finish_reason is None:
                why = "other requests needed its blocks or its row; its tokens are computed again later"
                self._note(request, "preempted", why)
        computed = dict(zip((request.request_id for request in step.requests), step.num_computed.tolist(), strict=True))
        for request in step.admitted:
            cached: FoundPrefix | None = getattr(request, "cached", None)
            why = "" if cached is None else cached.why
            self._note(request, "admitted", why, computed[request.request_id])
        self._running = running

    def note_computed(self, step: ScheduledStep[RequestT]) -> None:
        """Record a step after its outcomes were taken."""
        stats, parts = self._manager.stats, []
        start, waited_for = self._scheduled.pop(id(step))
        generating = set(step.generating.tolist())
        columns = zip(step.requests, step.num_computed.tolist(), step.num_scheduled.tolist(), strict=True)
        for index, (request, num_computed, num_tokens) in enumerate(columns):
            num_drafts = len(step.drafts[index]) if step.drafts else 0
            num_new = len(request.token_ids) - int(step.num_known[index])
            parts.append(
                TracedPart(
                    request_id=request.request_id,
                    num_computed=num_computed,
                    num_tokens=num_tokens,
                    num_drafts=num_drafts,
                    num_accepted=max(0, num_new - 1) if num_drafts else 0,
                    generates=index in generating,
                )
            )
            if request.finish_reason is not None:
                self._note(request, "ended", request.error or request.finish_reason)
                self._running.pop(request.request_id, None)
        self.steps.append(
            TracedStep(
                start=start,
                stop=self._now(),
                parts=tuple(parts),
                num_waiting=len(self._scheduler.waiting),
                blocks_held=tuple(stats.blocks_held),
                num_evicted=stats.num_evictions - self._num_evicted,
                waited_for=waited_for,
            )
        )
        self._num_evicted = stats.num_evictions

    def to_dict(self) -> dict[str, Any]:
        """Return the recording as plain values, ready for JSON."""
        return {"steps": [attrs.asdict(step) for step in self.steps], "events": [attrs.asdict(e) for e in self.events]}

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _note(self, request: RequestT, what: str, why: str, found_tokens: int = 0) -> None:
        self.events.append(TracedEvent(self._now(), request.request_id, what, why, found_tokens))
