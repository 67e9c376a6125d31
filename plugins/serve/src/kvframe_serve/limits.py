"""What the server takes from its clients: the keys of ``[plugin.serve]`` of the stack file."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvframe_serve.hinting import HintLimits
from kvframe_serve.plugin import SETTINGS, check_settings


@attrs.frozen(kw_only=True)
class Limits:
    """What the server takes from its clients.

    Attributes:
        max_requests: Samples that are served at once, those that wait for the engine included. A request of three
            prompts and ``n = 2`` has six samples. More are refused with 429.
        max_requests_per_key: Samples of one key at once; without a value, half of ``max_requests`` if the server has
            keys, and all of them if it has none.
        max_new_tokens: Generated tokens of a sample.
        max_logprobs: Log-probabilities that one answer may hold.
        max_body_bytes: Bytes of a request's body.
        max_connections: Open connections. If more come, the one that has waited for its client for longest is closed.
        client_seconds: Seconds in which a client has to send a request, and to read what is ready for it.
        read_seconds: Seconds that it may take to turn a body into tokens.
        read_memory_mb: Megabytes that this may take.
        answers: The registered name of the format in which the model marks its reasoning and its tool calls; without
            a value, the format that matches the checkpoint's chat template.
        min_priority: The smallest ``priority`` of a request: smaller ones, which are more urgent, count as this one.
        max_keep_seconds: The most ``keep_seconds`` of a request; longer times count as these.
        key_limits: Other values of the last two for some keys, by what the log says of the key (``key=``).
    """

    max_requests: int = 256
    max_requests_per_key: int | None = None
    max_new_tokens: int = 4096
    max_logprobs: int = 1 << 20
    max_body_bytes: int = 4 << 20
    max_connections: int = 1024
    client_seconds: int = 30
    read_seconds: int = 10
    read_memory_mb: int = 1024
    answers: str | None = None
    min_priority: int = 0
    max_keep_seconds: int = 3600
    key_limits: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict)

    def hint_limits(self, key_name: str) -> HintLimits:
        """Return the most that hints count for of the caller with a key, by the name that the log gives the key."""
        of_all = {"min_priority": self.min_priority, "max_keep_seconds": self.max_keep_seconds}
        return HintLimits(**{**of_all, **self.key_limits.get(key_name, {})})


def read_limits() -> Limits:
    """Return the limits of the stack that was loaded last.

    Raises:
        StackError: There is another key, or a value is wrong. An engine runs without a plugin whose settings are wrong;
            this server cannot.
    """
    check_settings()
    return Limits(**SETTINGS)
