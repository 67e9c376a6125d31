"""Where queries stop seeing later tokens: ranges of prompts that see each other both ways, windows with a lookahead."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.contract.metadata import RANGE_ENDS, CommonAttentionMetadata


def lookahead_ends(step: CommonAttentionMetadata, lookahead: int) -> npt.NDArray[np.int32]:
    """Return, for each new token of a step, the token after the last one that a window in both directions shows it.

    With these values in the place of ``RANGE_ENDS``, a causal window shows the same tokens as a window in both
    directions with this ``AttentionMask.lookahead``. So a backend that honours ranges serves such windows too. The step
    has exact lengths; the result is ``[num_tokens], host``, with 0 for padding.
    """
    bounds, seq_lens = step.query_start_loc_cpu.numpy(), step.seq_lens_cpu.numpy()
    ends = np.zeros(len(step.slot_mapping), dtype=np.int32)
    num_queries = np.diff(bounds)
    stops, shifts = seq_lens.repeat(num_queries), (seq_lens - bounds[1:]).repeat(num_queries)
    ends[: len(stops)] = np.minimum(np.arange(1, len(stops) + 1) + shifts + lookahead, stops)
    return ends


@attrs.frozen(kw_only=True, eq=False)
class RangeRuns:
    """A step with ``RANGE_ENDS`` as runs: consecutive queries of one request that lie in one range, or in none.

    A library whose calls have one mask for all queries computes such a step by two calls. One is causal, for the runs
    in no range. The other one is not, for the runs in a range, which see all tokens up to the range's end.

    A builder makes it in ``build``, and its tensors are copied to the device with the step. ``finish`` takes its
    ``parts``.

    Attributes:
        step: The step.
        query_start_loc: ``[num_runs + 1], int32, device``: where each run's queries start.
        requests: ``[num_runs], int32, device``: its request.
        num_later: ``[num_runs], int32, device``: the request's queries after the run.
        is_causal: ``[num_runs], int32, device``: 1 for a run in no range; otherwise 0.
        range_lens: ``[num_runs], int32, device``: the tokens up to the end of a run's range; 0 if it is in none.
        max_query_len: The most queries of a run; at least 2, because libraries read 1 as a promise that row ``r`` is
            the query of request ``r``.
    """

    step: CommonAttentionMetadata
    query_start_loc: torch.Tensor
    requests: torch.Tensor
    num_later: torch.Tensor
    is_causal: torch.Tensor
    range_lens: torch.Tensor
    max_query_len: int

    @classmethod
    def of(cls, step: CommonAttentionMetadata) -> RangeRuns:
        """Return the runs of a causal step with ``RANGE_ENDS``, on the host; with static shapes, as many as tokens."""
        values_cpu, bounds = step.extensions[RANGE_ENDS].values_cpu, step.query_start_loc_cpu.numpy()
        assert values_cpu is not None
        request = np.arange(step.num_reqs).repeat(np.diff(bounds))
        ends = values_cpu.numpy()[: len(request)]
        starts = np.flatnonzero(np.diff(request, prepend=-1) | np.diff(ends, prepend=-1))
        stops, requests, range_lens = np.append(starts[1:], len(request)), request[starts], ends[starts]
        longest = step.max_query_len if step.static_shapes else int((stops - starts).max(initial=0))
        num_padding = len(step.slot_mapping) - len(starts) if step.static_shapes else 0

        def tensor(array: Any, padding_value: int = 0) -> torch.Tensor:
            return torch.from_numpy(np.pad(array, (0, num_padding), constant_values=padding_value).astype(np.int32))

        return cls(
            step=step,
            query_start_loc=tensor(np.append(starts, len(request)), len(request)),
            requests=tensor(requests),
            num_later=tensor(bounds[1:][requests] - stops),
            is_causal=tensor(range_lens == 0),
            range_lens=tensor(range_lens),
            max_query_len=max(2, longest),
        )

    def parts(self) -> tuple[CommonAttentionMetadata, CommonAttentionMetadata]:
        """Return the step of the runs in no range, and that of the runs in one.

        Both have a request for each run. In either of them the other one's runs have no keys, so the sum of both
        outputs is the step's output. What a part's host copies say is still that of the step.
        """
        runs: dict[str, Any] = {
            "query_start_loc": self.query_start_loc,
            "block_table": self.step.block_table.index_select(0, self.requests),
            "max_query_len": self.max_query_len,
        }
        # The host may know no exact lengths.
        causal_lens = (self.step.seq_lens.index_select(0, self.requests) - self.num_later) * self.is_causal
        causal, ranged = (attrs.evolve(self.step, seq_lens=lens, **runs) for lens in (causal_lens, self.range_lens))
        return causal, ranged
