"""Event publishers: tell other processes, such as routers, what an engine's prefix cache holds.

An engine gives a publisher its cache's events as plain values, in order, from a thread of its own, never from the
thread that computes steps. If a publisher is slow or fails, requests are not affected.

The first event that an open publisher gets is ``cleared``, and the events after it give all that is cached. The same
happens again if events were lost in between. An event is a dictionary of texts, numbers, bytes, sequences, dictionaries
and None. The page on cache events describes its fields; a later version may add fields and types of events.

Nothing here imports NumPy or torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from kvframe.contract.growth import Growing


class OpenEventPublisher(Growing, ABC):
    """An open publisher: what ``EventPublisher.open`` returns. One thread calls its methods, and they may block.

    If a method raises, the exception is logged, and the publisher is closed and opened again later.
    """

    @abstractmethod
    def publish(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Send events together, after those of the call before.

        Args:
            events: The events of one step or several, in order; at least one.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the publisher holds, such as sockets; called once."""


@attrs.frozen(kw_only=True)
class EventPublisher(Growing, ABC):
    """How events reach other processes: the base of every publisher.

    A publisher is a frozen value; its fields are the options that a stack gives. Making one connects to nothing, and
    checks its options: a wrong one raises ``ValueError`` with a sentence.
    """

    name: ClassVar[str]
    """The registered name (``"zmq"``)."""

    @abstractmethod
    def open(self) -> OpenEventPublisher:
        """Open the publisher; called in the thread that will call it, and again after failures.

        Raises:
            Exception: The publisher cannot be opened now; the engine tries again later.
        """
