"""Scheduling policies: in which order waiting requests are admitted, and which running ones give their blocks back.

When a request is added, the policy gives it a number, its order: once. The waiting request with the smallest number is
admitted first, and if running requests have to give blocks back, the one with the largest number does. A policy is not
asked in a step.

Nothing here imports NumPy or torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import attrs

from kvframe.contract.growth import Growing


@attrs.frozen(kw_only=True)
class QueuedRequest:
    """A request that is added, as far as its order may depend on it.

    Attributes:
        arrival: When it is added, in seconds of a clock that never goes back.
        priority: What its sender hints: a request with a smaller number is more urgent; 0 unless hinted.
        owner: Whose request it is, for example the name of a tenant.
        num_others: The unfinished requests of its owner that have its priority.
        num_prompt_tokens: The tokens of its prompt.
    """

    arrival: float
    priority: int = 0
    owner: str = ""
    num_others: int = 0
    num_prompt_tokens: int = 0


@attrs.frozen(kw_only=True)
class SchedulingPolicy(Growing, ABC):
    """In which order requests are served: the base of every policy.

    A policy is a frozen value; its fields are the options that a stack gives. Its answers depend on its arguments only.
    No request may wait for ever: for each request there is a time after which no request that is added then gets a
    smaller number.
    """

    name: ClassVar[str]
    """The registered name (``"priority"``)."""

    @abstractmethod
    def order(self, request: QueuedRequest) -> float:
        """Return a finite number: the request with the smallest one is served first. Called when a request is added.

        Of requests with equal numbers, the one that was added first is served first.
        """

    def preemption_gap(self) -> float:
        """Return by how much a waiting request's number is smaller than that of a running one which it may preempt.

        It does so if it finds no row or too few blocks otherwise. Called once. A positive number, so that the preempted
        request cannot preempt back; infinity, unless a policy says otherwise: no waiting request preempts.
        """
        return float("inf")


@attrs.frozen(kw_only=True)
class FirstComeFirstServed(SchedulingPolicy):
    """Serves requests in the order in which they come. Built in: the policy of a stack that names none.

    kvframe's engine divides what runs among owners then.
    """

    name: ClassVar[str] = "fcfs"

    def order(self, request: QueuedRequest) -> float:
        """Return the time of arrival."""
        return request.arrival


FCFS: SchedulingPolicy = FirstComeFirstServed()
"""The policy of an engine if none is chosen."""
