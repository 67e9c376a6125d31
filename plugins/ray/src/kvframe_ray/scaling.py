"""How many engines a deployment needs: as many as compute the prompts that wait in time."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from kvframe_ray.replica import WAITING_TOKENS


class ByWaitingTokens:
    """Ray's autoscaling policy: replicas in proportion to the tokens of prompts that wait.

    Requests that generate count too, so that no replica is taken away while all of them are full.
    """

    def __init__(self, target_tokens: int, target_requests: int) -> None:
        """Take what one replica should have.

        Args:
            target_tokens: The tokens of prompts that may wait for one replica.
            target_requests: The requests that one replica may serve at once.
        """
        self._target_tokens = target_tokens
        self._target_requests = target_requests

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the replicas that are needed now; Ray applies delays and bounds."""
        by_replica = (context.aggregated_metrics or {}).get(WAITING_TOKENS, {})
        by_tokens = sum(by_replica.values()) / self._target_tokens
        return max(by_tokens, context.total_num_requests / self._target_requests), {}
