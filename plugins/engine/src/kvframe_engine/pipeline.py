"""Overlap: the next step is chosen and launched while the device computes the last one.

The device keeps the tokens that the host does not know yet, and the next step reads them there. So the host waits once
a step, and the device has another step to compute meanwhile. If a request turns out to have ended, the next step
computes one token of it that no output shows. If a step depends on more than the last tokens, for example on blocks
that other requests have to give back, it is chosen after the outcomes are known.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Generic, Protocol

from kvframe_engine.requests.progress import RequestT
from kvframe_engine.running.launched_steps import LaunchedStep
from kvframe_engine.scheduling.scheduler import NEEDS_OUTCOMES, Scheduler
from kvframe_engine.scheduling.step import ScheduledStep


class Launcher(Protocol[RequestT]):
    """Gives steps to the device (``TokenRunner``)."""

    def launch(self, step: ScheduledStep[RequestT], running: ScheduledStep[RequestT] | None) -> LaunchedStep[RequestT]:
        """Give a step to the device, while it still computes the running one."""


class StepPipeline(Generic[RequestT]):
    """Keeps a step on the device while the host works.

    Invariant: every request of a step on the device has a row and its blocks. At most two steps are on the device.

    Attributes:
        waits_for: Why no step was chosen before the outcomes of the last one were known; empty if one was.
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
        self.waits_for = ""

    @property
    def is_unneeded(self) -> bool:
        """Whether a step is on the device and all its requests have ended."""
        return bool(self._launched) and all(
            request.finish_reason is not None for launched in self._launched for request in launched.step.requests
        )

    @property
    def has_step(self) -> bool:
        """Whether a step is on the device."""
        return bool(self._launched)

    def launch(self, step: ScheduledStep[RequestT]) -> None:
        """Give a step to the device; if that raises, ``wait`` and ``complete`` raise it for this step."""
        before = self._launched[-1].step if self._launched else None
        try:
            launched = self._runner.launch(step, before)
        except BaseException as error:
            launched = LaunchedStep.of_failed(step, error)
        self._launched.append(launched)

    def choose_next(self) -> ScheduledStep[RequestT] | None:
        """Choose the step after the one on the device; None if its outcomes have to be known before."""
        *earlier, launched = self._launched
        if earlier:
            return None
        if not launched.is_late or self._without_outcome:
            self.waits_for = "the output for a request was not numbers" if launched.is_late else NEEDS_OUTCOMES
            return None
        step = self._scheduler.schedule_ahead(launched.step)
        self.waits_for = self._scheduler.waits_for
        return step

    def wait(self) -> None:
        """Wait until the device has computed its first step. If Ctrl-C interrupts it, the steps stay on the device."""
        self._launched[0].wait()

    def is_failed_by(self, error: BaseException) -> bool:
        """Return whether a step on the device could not be launched because of this error."""
        return any(launched.failure is error for launched in self._launched)

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
        outcomes = [
            -1 if id(request) in over else token_id for request, token_id in zip(requests, token_ids, strict=True)
        ]
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
        for launched_step in launched:
            with suppress(BaseException):
                launched_step.outcomes()  # after it, the device writes to no page of these requests
            going_on = [request for request in launched_step.step.requests if request.finish_reason is None]
            self._scheduler.fail(launched_step.step, error)
            failed.update((id(request), request) for request in going_on)
        return list(failed.values())
