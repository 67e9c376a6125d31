"""Steps that the device still computes: their tokens on the device, and the host's wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NoReturn, Protocol

import attrs
import numpy as np
import torch

from kvframe.contract.order import IntArray
from kvframe_engine.graphs.device_graphs import Output
from kvframe_engine.graphs.step_graphs import Forward
from kvframe_engine.requests.progress import RequestT
from kvframe_engine.running.next_tokens import to_device
from kvframe_engine.scheduling.step import ScheduledStep


class HostCopy:
    """A copy on the host of what a step results in, which arrives when the device has computed the step."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        """Queue one copy of all results: tensors on one device, of whole numbers below ``2**53`` or of floats."""
        self._forms = [(result.shape, result.dtype) for result in results]
        (packed, *others) = results
        if others:
            packed = torch.cat([result.reshape(-1).double() for result in results])
        self._arrived = None
        self._copy = packed
        if packed.is_cuda:
            self._copy = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._copy.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> None:
        """Wait for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def numbers(self) -> list[list[Any]]:
        """Wait for the device, and return the numbers of each result."""
        self.wait()
        results = self._copy.reshape(-1).split([shape.numel() for shape, _ in self._forms])
        forms = zip(results, self._forms, strict=True)
        return [result.to(dtype).view(shape).tolist() for result, (shape, dtype) in forms]


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
            return forward(self.read(token_ids), positions, logits_indices)

        return read_and_compute

    def read(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return token ids, ``[n], int64, device``, with the tokens in place of their names."""
        last_tokens = self._tokens.index_select(0, (-1 - token_ids).clamp(min=0))
        return torch.where(token_ids < 0, last_tokens, token_ids)

    def store(self, rows: IntArray, token_ids: torch.Tensor) -> None:
        """Store the tokens of rows, ``[n], int64, device``; a token that could not be sampled is stored as token 0."""
        self._tokens.index_copy_(0, to_device(torch.from_numpy(rows), self.device), token_ids.clamp(min=0))


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


def names_of(rows: IntArray) -> IntArray:
    """Return what stands on the host for the last tokens of rows that it does not know: ``[n]``."""
    return -1 - rows


def names_of_unknown(running: ScheduledStep[RequestT], rows: IntArray) -> list[list[int]]:
    """Return for each row the names of the tokens that a running step samples for it: one name, or none."""
    is_sampled = np.isin(rows, running.rows[running.generating]).tolist()
    return [[name] if sampled else [] for name, sampled in zip(names_of(rows).tolist(), is_sampled, strict=True)]
