"""Pools hidden states into embeddings; an embedding request ends when its prompt is computed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress
from typing import Any

import attrs
import numpy as np
import torch

from kvframe import Hints
from kvframe.contract.description import Pooling
from kvframe_engine.requests.progress import NO_HINTS, FinishReason, RequestProgress
from kvframe_engine.running.model_runner import ModelRunner
from kvframe_engine.running.next_tokens import FAILED
from kvframe_engine.scheduling.step import PackedStep, ScheduledStep

COMPUTED = 0
"""The outcome of a request whose embedding was computed."""


@attrs.frozen(kw_only=True)
class EmbeddingOutput:
    """The result of a request for an embedding.

    Attributes:
        request_id: The request.
        token_ids: Its tokens, special ones included.
        embedding: The embedding; None if there is none.
        finish_reason: ``computed``, or why there is no embedding.
        error: One sentence if the reason is ``refused`` or ``error``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    embedding: tuple[float, ...] | None = None
    finish_reason: FinishReason
    error: str | None = None


@attrs.define(eq=False, kw_only=True)
class EmbeddingRequest(RequestProgress):
    """A request for the embedding of its tokens; nothing is generated.

    Invariant: ``partial`` holds the pooled hidden states of its first ``num_pooled`` tokens, each counted once, however
    often it is computed.

    Attributes:
        num_pooled: The number of tokens whose hidden states were pooled.
        partial: ``[hidden_size], float32, device``: the result of pooling them; None at first.
        embedding: The embedding, after its last token is computed.
    """

    num_pooled: int = 0
    partial: torch.Tensor | None = None
    embedding: tuple[float, ...] | None = None

    @classmethod
    def create(
        cls,
        request_id: str,
        token_ids: Sequence[int],
        pooling: Pooling,
        cache_salt: str = "",
        owner: str = "",
        hints: Hints = NO_HINTS,
        num_joint_tokens: int = 0,
    ) -> EmbeddingRequest:
        """Return a request that has not started.

        Args:
            request_id: Unique among the requests in the engine.
            token_ids: Checked token ids, at least one.
            pooling: How its embedding is made: of its last token alone, or of others too.
            cache_salt: The request shares cached prefixes with requests of the same salt.
            owner: Whose request it is.
            hints: What its sender knows of it.
            num_joint_tokens: As for ``RequestProgress``.
        """
        request = cls(
            request_id=request_id,
            token_ids=array("I", token_ids),
            num_prompt_tokens=len(token_ids),
            cache_salt=cache_salt,
            owner=owner,
            hints=hints,
            num_joint_tokens=num_joint_tokens,
        )
        request.wants_prompt_rows = pooling.mode != "last"
        return request

    @property
    def first_prompt_row(self) -> int:
        """The first token that is not pooled yet."""
        return min(self.num_pooled, len(self.token_ids) - 1)

    def take(self, outcome: int) -> None:
        """End the request: its embedding was computed."""
        self.finish_reason = "computed"

    def forget_partial(self) -> None:
        """Forget the tokens that were pooled so far."""
        self.partial, self.num_pooled = None, 0

    def report(self) -> EmbeddingOutput:
        """Return the result."""
        assert self.finish_reason is not None
        return EmbeddingOutput(
            request_id=self.request_id,
            token_ids=tuple(self.token_ids),
            embedding=self.embedding,
            finish_reason=self.finish_reason,
            error=self.error,
        )


class PoolingRunner(ModelRunner):
    """Runs steps of a model without head to the embeddings of its requests."""

    def __init__(self, pooling: Pooling, *arguments: Any, **limits: Any) -> None:
        """Take the pooling, and the arguments of ``ModelRunner``."""
        super().__init__(*arguments, **limits)
        self._mode, self._normalize = pooling.mode, pooling.normalize

    def run(self, step: ScheduledStep[EmbeddingRequest]) -> Sequence[int]:
        """Compute a step, and pool its hidden states.

        Args:
            step: The step; every request has a row, and blocks for its tokens.

        Returns:
            For each request whose last token is computed, in the step's order, ``COMPUTED``; ``FAILED`` where its
            embedding is not numbers.
        """
        packed = self.pack(step)
        hidden = self.forward(packed)
        with torch.inference_mode():
            pooled = hidden[self.to_device(packed.sampled)] if self._mode == "last" else self._pool(packed, hidden)
            embeddings = pooled.float()
            if self._normalize:
                embeddings = torch.nn.functional.normalize(embeddings, dim=-1)
            values = embeddings.cpu().numpy()
        outcomes = np.where(np.isfinite(values).all(axis=1), COMPUTED, FAILED).tolist()
        for request, value in zip(compress(packed.requests, packed.is_sampled), values.tolist(), strict=True):
            request.embedding = tuple(value)
        return packed.in_step_order(outcomes)

    def _pool(self, packed: PackedStep[EmbeddingRequest], hidden: torch.Tensor) -> torch.Tensor:
        """Pool the step's hidden states of each request; return the results of requests whose last token it computes.

        Args:
            packed: The step; its wanted rows are those of all tokens that are not pooled yet.
            hidden: ``[num_rows, hidden_size], device``: the hidden states of these tokens.

        Returns:
            ``[num_sampled, hidden_size], float32, device``.
        """
        counts = packed.num_wanted
        pooled = hidden.new_zeros(len(counts), hidden.shape[1], dtype=torch.float32)
        if self._mode == "mean":
            owners = np.repeat(np.arange(len(counts)), counts)
            pooled.index_add_(0, self.to_device(owners), hidden.float())
        else:
            # A request's first row is that of its first token, unless that was pooled in an earlier step.
            with_rows = np.flatnonzero(counts)
            firsts = (np.cumsum(counts) - counts)[with_rows]
            pooled.index_copy_(0, self.to_device(with_rows), hidden[self.to_device(firsts)].float())
        # All requests but those whose tokens are all computed in this step for the first time.
        in_parts = ~packed.is_sampled | (counts < packed.num_computed + packed.query_lens)
        for index in np.flatnonzero(in_parts).tolist():
            request = packed.requests[index]
            if request.partial is not None:
                pooled[index] = pooled[index] + request.partial if self._mode == "mean" else request.partial
            request.partial = pooled[index].clone()
            request.num_pooled += int(counts[index])
        pooled = pooled[self.to_device(np.flatnonzero(packed.is_sampled))]
        if self._mode == "mean":
            pooled /= self.to_device((packed.num_computed + packed.query_lens)[packed.is_sampled])[:, None]
        return pooled
