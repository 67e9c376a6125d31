"""Streams one request's outputs as an iterator; the request ends when the iterator is closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvframe_engine.requests.output import RequestOutput
from kvframe_engine.turns import Turns, verb


class RequestStream(Iterator[RequestOutput]):
    """The outputs of one request, all samples of it, as they are produced.

    Reading the stream runs steps of the engine. The exception of a step is raised here too, and the stream can be read
    on after it. The request ends when the stream is closed, or when nothing refers to it.
    """

    def __init__(
        self, turns: Turns, next_output: Callable[[], RequestOutput | None], forget: Callable[[], None]
    ) -> None:
        """Read a request that was added.

        Args:
            turns: The engine's turns.
            next_output: Runs steps until the request has something to report, and returns it; None if it has ended.
            forget: Ends the request without a report.
        """
        self._turns = turns
        self._next_output = next_output
        self._forget = forget

    @verb
    def __next__(self) -> RequestOutput:
        output = self._next_output()
        if output is None:
            raise StopIteration
        return output

    def close(self) -> None:
        """End the request, if it has not ended. Safe to call twice, and after the engine is closed."""
        self._turns.when_free(self._forget)

    def __del__(self) -> None:
        self.close()
