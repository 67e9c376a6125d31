"""What one step computes: made by the scheduler, read by the runner."""

from __future__ import annotations

from typing import Generic

import attrs
import numpy as np

from kvframe.engine.requests.progress import RequestT
from kvframe.engine.scheduling.running_requests import IntArray


@attrs.frozen(eq=False)
class ScheduledStep(Generic[RequestT]):
    """The work of one step. Each request's scheduled tokens follow its computed ones.

    Attributes:
        requests: The requests of the step, each once, in the order in which they are packed.
        admitted: The requests that were admitted in this step.
        rows: ``[num_reqs], int64, host``: the row of each request.
        num_computed: Likewise, its tokens that were computed before.
        num_known: Likewise, all its tokens that are known.
        num_scheduled: Likewise, its tokens that the step computes, at least one.
        num_tokens: Tokens that the step computes.
    """

    requests: list[RequestT]
    admitted: list[RequestT]
    rows: IntArray
    num_computed: IntArray
    num_known: IntArray
    num_scheduled: IntArray
    num_tokens: int

    @property
    def generating(self) -> IntArray:
        """``[num_generating], int64, host``: the indices of the requests whose last known token is computed."""
        return np.flatnonzero(self.num_computed + self.num_scheduled == self.num_known)
