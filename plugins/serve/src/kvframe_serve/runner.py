"""What answers need of whatever runs requests: an engine's thread in this process, or engines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from kvframe import Prompt, SamplingParams

Receive = Callable[[Any], None]
"""Takes a request's outputs, on the event loop; the last one of each sample has a ``finish_reason`` or an error."""


@attrs.frozen(kw_only=True)
class EngineRequest:
    """One prompt for an engine, as a value that can be sent to another process.

    Attributes:
        prompt: The token ids.
        boundaries: Where it is worth to keep what continues from its first tokens.
        params: How it is sampled; None for an embedding.
        options: The other arguments of the engine's ``add_request``, by name.
        stream: Whether the client reads the answer while it is generated.
    """

    prompt: Sequence[int]
    boundaries: Sequence[int] = ()
    params: SamplingParams | None = None
    options: Mapping[str, Any]
    stream: bool = False

    @property
    def num_samples(self) -> int:
        """The samples of the prompt."""
        return 1 if self.params is None else self.params.n

    def add_to(self, engine: Any) -> str:
        """Add the request to an engine and return its id."""
        prompt = Prompt(decoder=self.prompt, boundaries=self.boundaries) if self.boundaries else self.prompt
        params = () if self.params is None else (self.params,)
        return str(engine.add_request(prompt, *params, **self.options))


@attrs.frozen(kw_only=True)
class EngineEnded:
    """What a receiver gets in place of further outputs if the engine has ended."""

    error: str


class RequestRunner(Protocol):
    """Runs requests."""

    async def add(self, request: EngineRequest, receive: Receive) -> str:
        """Add a request and return an id for ``abort``.

        Args:
            request: The request.
            receive: Is called on the event loop with each output, or with an ``EngineEnded``.

        Raises:
            RequestError: The engine refuses the request.
            EngineError: No requests are served (``closed``).
        """

    def abort(self, request_id: str) -> None:
        """Abort a request whose client disconnected; its outputs are no longer delivered."""
