"""Overlap: the next step is chosen and launched while the device computes the last one.

The device keeps the tokens that the host does not know yet, and the next step reads them there. So the host waits once
a step, for tokens of a step after which the device has another one to compute. A request that turns out to have ended
is computed for one token more, which no one sees. A step that depends on more than that, such as on penalties, on
drafts or on blocks that others have to give back, is chosen after the outcomes are known.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Generic, Protocol

from kvframe_engine.requests.progress import RequestT
from kvframe_engine.running.launched_steps import LaunchedStep
from kvframe_engine.scheduling.scheduler import Scheduler
from kvframe_engine.scheduling.step import ScheduledStep


class Launcher(Protocol[RequestT]):
    """Gives steps to the device (``TokenRunner``)."""

    def launch(self, step: ScheduledStep[RequestT], running: ScheduledStep[RequestT] | None) -> LaunchedStep[RequestT]:
        """Give a step to the device, while it still computes the running one."""


class StepPipeline(Generic[RequestT]):
    """Keeps a step on the device while the host works.

    Invariant: between two calls, at most one step is on the device, and every request of it has a row and its blocks.
    """

    def __init__(self, scheduler: Scheduler[RequestT], runner: Launcher[RequestT]) -> None:
        """Start without a step.

        Args:
            scheduler: Chooses the steps.
            runner: Launches them.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._launched: list[LaunchedStep[RequestT]] = []
        self._without_outcome: set[int] = set()

    @property
    def is_vain(self) -> bool:
        """Whether a step is on the device in which no request has an end to come."""
        return bool(self._launched) and all(
            request.finish_reason is not None for launched in self._launched for request in launched.step.requests
        )

    @property
    def has_step(self) -> bool:
        """Whether a step is on the device."""
        return bool(self._launched)

    def launch(self, step: ScheduledStep[RequestT]) -> None:
        """Give a step to the device; what is raised by that is raised when the step would be complete."""
        before = self._launched[-1].step if self._launched else None
        try:
            launched = self._runner.launch(step, before)
        except BaseException as error:
            launched = LaunchedStep.of_failed(step, error)
        self._launched.append(launched)

    def choose_next(self) -> ScheduledStep[RequestT] | None:
        """Choose the step after the one on the device; None if its outcomes have to be known before."""
        (launched,) = self._launched
        if not launched.is_late or self._without_outcome:
            return None
        return self._scheduler.schedule_ahead(launched.step)

    def wait(self) -> None:
        """Wait until the device has computed its first step. It may be interrupted."""
        self._launched[0].wait()

    def complete(self) -> tuple[ScheduledStep[RequestT], list[RequestT]]:
        """Wait for the first step on the device, and record its outcomes.

        Returns:
            The step, and the requests with a new token or an end.

        Raises:
            BaseException: The device, or the scheduler, could not complete it; ``fail`` has to be called.
        """
        launched = self._launched[0]
        step = launched.step
        token_ids = launched.outcomes()
        self._launched.remove(launched)
        if not self._launched:
            self._scheduler.forget_ahead()
        requests = [step.requests[index] for index in step.generating.tolist()]
        over = {id(request) for request in requests if self._is_over(request)}
        outcomes = [-1 if id(request) in over else each for request, each in zip(requests, token_ids, strict=True)]
        self._without_outcome = {
            id(request) for request, outcome in zip(requests, outcomes, strict=True) if outcome < 0 and self._launched
        }
        completed = self._scheduler.complete(step, outcomes)
        return step, [request for request in completed if id(request) not in over]

    def _is_over(self, request: RequestT) -> bool:
        return request.finish_reason is not None or id(request) in self._without_outcome

    def fail(self, error: str) -> list[RequestT]:
        """End the requests of all steps on the device, after one of them failed, and return them."""
        self._scheduler.forget_ahead()
        launched, self._launched = self._launched, []
        self._without_outcome = set()
        failed: dict[int, RequestT] = {}
        for each in launched:
            with suppress(BaseException):
                each.outcomes()  # after it, the device writes to no page of these requests
            going_on = [request for request in each.step.requests if request.finish_reason is None]
            self._scheduler.fail(each.step, error)
            failed.update((id(request), request) for request in going_on)
        return list(failed.values())
