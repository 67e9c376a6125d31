"""The log-probabilities that a step computes: of its next tokens, and of tokens of prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from kvframe.contract.order import IntArray
from kvframe_engine.requests.request import Request
from kvframe_engine.running.next_tokens import to_device, token_logprobs
from kvframe_engine.scheduling.step import PackedStep


class StepLogprobs:
    """The log-probabilities that requests of a step ask for, computed on the device and given to the requests later."""

    def __init__(
        self, packed: PackedStep[Request], requests: Sequence[Request], tokens: IntArray, device: torch.device
    ) -> None:
        """Find out what is asked for.

        Args:
            packed: The step.
            requests: The request of each row that a token is sampled from.
            tokens: ``[max_num_seqs, max_model_len], int64, host``: the tokens of each row of the block tables.
            device: Where the logits are.
        """
        self._asking = [request for request in requests if request.params.logprobs]
        rows = [row for row, request in enumerate(requests) if request.params.logprobs]
        self._rows = to_device(torch.tensor(rows, dtype=torch.int64), device)
        self._num_top = max((request.params.top_logprobs for request in self._asking), default=0)
        prompt_rows, request_indices, positions = packed.prompt_rows()
        indices, counts = np.unique(request_indices, return_counts=True)
        self._prompts = [packed.requests[index] for index in indices.tolist()]
        self._counts: list[int] = counts.tolist()
        following = tokens[packed.rows[request_indices], positions + 1]
        self._prompt_rows = to_device(torch.from_numpy(prompt_rows), device)
        self._following = to_device(torch.from_numpy(following), device)
        self._num_top_prompt = max((request.num_top_prompt_logprobs for request in self._prompts), default=0)

    def compute(
        self, logits: torch.Tensor, sampled_logits: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what ``give`` takes, on the device, without a wait.

        Args:
            logits: ``[num_rows, vocab_size], device``: those of the step.
            sampled_logits: ``[num_sampled, vocab_size], device``: the rows of them that tokens are sampled from.
            token_ids: ``[num_sampled], int64, device``: the tokens.
        """
        own_logits, own_ids = sampled_logits.index_select(0, self._rows), token_ids.index_select(0, self._rows)
        rows = torch.arange(len(own_ids), device=own_ids.device)
        return (
            token_logprobs(own_logits, rows, own_ids, self._num_top),
            token_logprobs(logits, self._prompt_rows, self._following, self._num_top_prompt)
            if self._prompts
            else own_logits.new_zeros(0, 1),
        )

    def give(self, next_rows: Sequence[Sequence[float]], prompt_rows: Sequence[Sequence[float]]) -> None:
        """Give requests their log-probabilities, from the numbers of ``compute``."""
        for request in self._asking:
            request.next_logprobs = deque()
        for request, row in zip(self._asking, next_rows, strict=True):
            request.next_logprobs.append(_likely(row, request.params.top_logprobs))
        stop = 0
        for request, count in zip(self._prompts, self._counts, strict=True):
            start, stop = stop, stop + count
            likely = [_likely(row, request.num_top_prompt_logprobs) for row in prompt_rows[start:stop]]
            request.add_prompt_logprobs([value for value, _ in likely], [top for _, top in likely])


def _likely(row: Sequence[float], num_top: int) -> tuple[float, dict[int, float]]:
    """Return a token's log-probability and those of the most likely tokens, from a row of ``token_logprobs``."""
    value, *others = row
    ids, values = others[: len(others) // 2], others[len(others) // 2 :]
    return value, dict(zip(map(int, ids[:num_top]), values[:num_top], strict=True))
