"""Steps that the device still computes: their tokens on the device, and the host's wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NoReturn, Protocol

import attrs
import numpy as np
import torch

from kvframe.contract.order import IntArray
from kvframe_engine.graphs.device_graphs import Output
from kvframe_engine.graphs.step_graphs import Forward
from kvframe_engine.requests.progress import RequestT
from kvframe_engine.scheduling.step import ScheduledStep


class HostCopy:
    """A copy of a step's tokens on the host, which arrives when the device has computed the step."""

    def __init__(self, token_ids: torch.Tensor) -> None:
        """Queue the copy: ``[n], int64, device``."""
        self._arrived = None
        self._copy = token_ids
        if token_ids.is_cuda:
            self._copy = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._copy.copy_(token_ids, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[int]:
        """Wait for the device, and return the tokens."""
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids: list[int] = self._copy.tolist()
        return token_ids


class Late(Protocol):
    """A copy that arrives when work is done which was given to the device."""

    def result(self) -> HostCopy:
        """Wait for the work to be queued, and return the copy; raise what the work raised."""


Submit = Callable[[Callable[[], HostCopy]], Late]
"""Gives work to the device, in order. A device with a queue of its own takes it at once."""


@attrs.frozen
class Queued:
    """Work that was queued on a device, or done, when it was submitted."""

    copy: HostCopy

    def result(self) -> HostCopy:
        """Return the copy."""
        return self.copy


def submit_now(work: Callable[[], HostCopy]) -> Late:
    """Queue work on a device by calling it."""
    return Queued(work())


class LastTokens:
    """The last sampled token of each row, on the device, where the next step reads it.

    The host does not know such a token yet. In its place it writes a negative number that names the row.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        """Start with no tokens.

        Args:
            max_num_seqs: The number of rows.
            device: Where the model runs.
        """
        self.device = device
        self._tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def before(self, forward: Forward) -> Forward:
        """Return a forward that reads the tokens which the host does not know, and then computes ``forward``."""

        def read_and_compute(token_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> Output:
            last_tokens = self._tokens.index_select(0, (-1 - token_ids).clamp(min=0))
            return forward(torch.where(token_ids < 0, last_tokens, token_ids), positions, logits_indices)

        return read_and_compute

    @staticmethod
    def names_of(rows: IntArray) -> IntArray:
        """Return what stands on the host for the tokens of rows: ``[n]``."""
        return -1 - rows

    def store(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Store the tokens of rows, ``[n], int64, device``; a token that could not be sampled is stored as token 0."""
        self._tokens.index_copy_(0, rows, token_ids.clamp(min=0))


@attrs.frozen(eq=False)
class LaunchedStep(Generic[RequestT]):
    """A step that was given to the device.

    Attributes:
        step: The step.
        is_late: Whether its tokens are on the device only. If not, they are known already.
        wait: Waits for the device; raises what the step raised.
        outcomes: Waits, and returns the outcome of each request that gets a token.
        failure: What was raised when it was launched; None if it was.
    """

    step: ScheduledStep[RequestT]
    is_late: bool
    wait: Callable[[], object]
    outcomes: Callable[[], Sequence[int]]
    failure: BaseException | None = None

    @classmethod
    def of_known(cls, step: ScheduledStep[RequestT], outcomes: Sequence[int]) -> LaunchedStep[RequestT]:
        """Return a step whose outcomes are known."""
        return cls(step, False, lambda: None, lambda: outcomes)

    @classmethod
    def of_failed(cls, step: ScheduledStep[RequestT], error: BaseException) -> LaunchedStep[RequestT]:
        """Return a step that could not be launched."""

        def fail() -> NoReturn:
            raise error

        return cls(step, False, fail, fail, error)


def places_after(running: ScheduledStep[RequestT] | None, rows: IntArray) -> list[int] | None:
    """Return for each row how many tokens a running step samples for it, 0 or 1; None if no step runs."""
    if running is None:
        return None
    places: list[int] = np.isin(rows, running.rows[running.generating]).astype(int).tolist()
    return places
