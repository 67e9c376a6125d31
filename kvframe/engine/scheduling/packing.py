"""How a step's requests lie in its packed batch, and which rows of its logits are used for what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.engine.requests.progress import RequestT
from kvframe.engine.scheduling.step import ScheduledStep

IntArray = npt.NDArray[np.int64]
FindOrder = Callable[[IntArray, IntArray], IntArray | None]


@attrs.frozen(kw_only=True, eq=False)
class PackedStep(Generic[RequestT]):
    """A step's requests in the order in which their tokens are packed.

    For each request, the step needs the logits (or hidden states) of its last tokens: of its last known token, from
    which the next one is sampled, and of prompt tokens if the request wants those.

    Attributes:
        requests: The requests.
        rows: ``[num_reqs]``: each request's row in the block tables.
        num_computed: ``[num_reqs]``: tokens that were computed before.
        query_lens: ``[num_reqs]``: tokens to compute.
        num_wanted: ``[num_reqs]``: the number of wanted rows of logits of each request.
        logits_indices: ``[num_rows]``: the packed tokens whose logits are wanted, in order.
        is_sampled: ``[num_reqs], bool``: whether a token is sampled: the request's last known token is computed.
        sampled: ``[num_sampled]``: the rows of the logits that tokens are sampled from, in the order of requests.
        places: ``[num_sampled]``: for the requests that get a token, in the order of the step, their index in
            ``sampled``; None if the two orders are equal.
        prompt_rows: ``[num_prompt_rows]``: the other rows of the logits.
        prompt_positions: ``[num_prompt_rows]``: the positions of their tokens.
        prompt_requests: ``[num_prompt_rows]``: the indices of their requests, in order.
    """

    requests: Sequence[RequestT]
    rows: IntArray
    num_computed: IntArray
    query_lens: IntArray
    num_wanted: IntArray
    logits_indices: IntArray
    is_sampled: npt.NDArray[np.bool_]
    sampled: IntArray
    places: IntArray | None
    prompt_rows: IntArray
    prompt_positions: IntArray
    prompt_requests: IntArray

    @classmethod
    def of(cls, step: ScheduledStep[RequestT], order_for: FindOrder) -> PackedStep[RequestT]:
        """Pack a step's requests.

        Args:
            step: The step.
            order_for: Returns the order to pack them in, for ``num_computed`` and ``query_lens``; None for this order.
        """
        requests, rows = step.requests, step.rows
        num_computed, query_lens, num_known = step.num_computed, step.num_scheduled, step.num_known
        order = order_for(num_computed, query_lens)
        if order is not None:
            requests, rows = [requests[i] for i in order], rows[order]
            num_computed, query_lens, num_known = num_computed[order], query_lens[order], num_known[order]
        first_wanted = num_known - 1
        for index, request in enumerate(requests):
            if request.wants_prompt_rows:
                first_wanted[index] = request.first_prompt_row
        num_after = num_computed + query_lens
        num_wanted = np.maximum(num_after - np.maximum(num_computed, first_wanted), 0)
        ends = np.cumsum(num_wanted)
        logits_rows = np.arange(ends[-1])
        is_sampled = num_after == num_known
        sampled = (ends - 1)[is_sampled]
        prompt_rows = prompt_requests = logits_rows[:0]
        if len(sampled) < len(logits_rows):
            prompt_rows = np.delete(logits_rows, sampled)
            prompt_requests = np.repeat(np.arange(len(requests)), num_wanted)[prompt_rows]
        return cls(
            requests=requests,
            rows=rows,
            num_computed=num_computed,
            query_lens=query_lens,
            num_wanted=num_wanted,
            logits_indices=logits_rows + np.repeat(np.cumsum(query_lens) - ends, num_wanted),
            is_sampled=is_sampled,
            sampled=sampled,
            places=None if order is None else np.argsort(order[is_sampled]),
            prompt_rows=prompt_rows,
            prompt_positions=prompt_rows + (num_after - ends)[prompt_requests],
            prompt_requests=prompt_requests,
        )
