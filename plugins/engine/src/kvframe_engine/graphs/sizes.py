"""The sizes of graphs: which steps are captured, and to which size each is padded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

import attrs
import numpy as np

from kvframe import Stack, StepBatch
from kvframe.contract.capture import GraphCapture


class Generating(Enum):
    """Which tokens of a request generate in a step that is captured, and whose logits are wanted."""

    LAST = "the last one, whose logits are wanted"
    STORED = "the last one, and no logits are wanted"
    ALL = "all of them, whose logits are wanted"
    FEW = "all of them, with logits of no more than there are requests"


UsualStep = tuple[int, Generating]
"""A kind of step that is captured before the first request: the tokens of each request, and which of them generate."""

SHORTEST_CONTEXT = 1024
"""The smallest request length that graphs are captured for; each next one is four times as long."""


@attrs.frozen(kw_only=True)
class GraphSizes:
    """The sizes of a step that a graph is captured for.

    Attributes:
        num_reqs: Requests, including padding.
        query_len: The most tokens that one request computes.
        num_generating: Generating rows, including padding.
        num_wanted: Rows of logits, including padding.
        max_seq_len: The most tokens of a request after the step.
        all_generate: Whether every token generates, so that no layer skips any.
        max_input_len: The most tokens of an input beside the request's own; 0 if requests bring none.
        has_ranges: Whether a range of a prompt is computed whose tokens see each other in both directions.
    """

    num_reqs: int
    query_len: int
    num_generating: int
    num_wanted: int
    max_seq_len: int
    all_generate: bool
    max_input_len: int = 0
    has_ranges: bool = False

    @property
    def num_tokens(self) -> int:
        """Packed tokens, padding included."""
        return self.num_reqs * self.query_len


@attrs.frozen(kw_only=True)
class SizeChoice:
    """The sizes that graphs are captured for.

    Attributes:
        num_reqs: The numbers of requests that steps are padded to, ascending.
        query_lens: The numbers of tokens of each request that steps are captured for, ascending.
        max_seq_lens: The lengths of the longest request that steps are padded to, ascending.
        level: The kinds of batches that can be captured.
        skips: Whether layers can compute generating tokens only.
        max_rounds: The most tokens of a request that the state layers take in rounds; None if there are none.
        max_input_lens: The lengths of the longest input beside tokens that steps are padded to, ascending.
    """

    num_reqs: tuple[int, ...]
    query_lens: tuple[int, ...]
    max_seq_lens: tuple[int, ...]
    level: GraphCapture
    skips: bool
    max_rounds: int | None = None
    max_input_lens: tuple[int, ...] = (0,)

    def of(self, batch: StepBatch, num_wanted: int) -> GraphSizes | None:
        """Return the sizes of the graph that can replay a step; None if no graph fits it.

        Args:
            batch: The step.
            num_wanted: The number of wanted rows of logits.
        """
        longest, shortest = int(batch.query_lens.max()), int(batch.query_lens.min())
        needed_capture = GraphCapture.DECODE if longest == 1 else GraphCapture.UNIFORM
        num_reqs = _next(self.num_reqs, len(batch.rows))
        query_len: int | None = longest if longest in self.query_lens else None
        num_generating, all_generate = len(batch.generating_indices), True
        if num_generating < int(batch.query_lens.sum()):
            all_generate = False
            if self.skips:
                needed_capture = GraphCapture.ALWAYS  # the remaining batches mix requests with and without tokens
        if self.level is GraphCapture.ALWAYS:
            query_len = _next(self.query_lens, longest)
        elif needed_capture > self.level or shortest < longest:
            return None
        max_seq_len = _next(self.max_seq_lens, int((batch.num_computed + batch.query_lens).max()))
        if num_reqs is None or query_len is None or max_seq_len is None or not num_generating:
            return None
        # Metadata that does not lie on the host cannot be padded there.
        if any(extension.values_cpu is None for extension in batch.extensions.values()):
            return None
        # A prompt's first token continues from no state.
        if self.max_rounds is not None and (longest > self.max_rounds or not batch.num_computed.all()):
            return None
        if any(is_new.any() for is_new in batch.stores_input.values()):
            return None
        max_input_len = _next(
            self.max_input_lens, max((int(lens.max()) for lens in batch.input_lens.values()), default=0)
        )
        assert max_input_len is not None, "an input is no longer than the plan allows"
        rows = num_reqs, num_reqs * query_len
        padded_wanted = _next(rows, num_wanted) if num_wanted else 0
        generating = rows[1] if all_generate else _next(rows, num_generating)
        if padded_wanted is None or generating is None:
            return None
        return GraphSizes(
            num_reqs=num_reqs,
            query_len=query_len,
            num_generating=generating,
            num_wanted=padded_wanted,
            max_seq_len=max_seq_len,
            all_generate=all_generate,
            max_input_len=max_input_len,
            has_ranges=batch.range_ends is not None,
        )

    def usual(self, max_num_tokens: int, steps: Collection[UsualStep]) -> dict[GraphSizes, UsualStep]:
        """Return the sizes of some kinds of steps in which all requests compute equally many tokens.

        Args:
            max_num_tokens: The most tokens of a step, including padding; larger sizes are left out.
            steps: The kinds.

        Returns:
            A kind of step for each size, the largest first.
        """
        usual_steps: dict[GraphSizes, UsualStep] = {}
        for num_reqs in self.num_reqs:
            for query_len, rows in steps:
                for max_seq_len in self.max_seq_lens:
                    lens = np.full(num_reqs, query_len)
                    last_rows = np.cumsum(lens) - 1
                    batch = StepBatch(
                        rows=np.arange(num_reqs),
                        num_computed=np.full(num_reqs, max_seq_len - query_len),
                        query_lens=lens,
                        generating_indices=np.arange(lens.sum())
                        if rows in (Generating.ALL, Generating.FEW)
                        else last_rows,
                    )
                    num_wanted = {Generating.STORED: 0, Generating.ALL: num_reqs * query_len}.get(rows, num_reqs)
                    sizes = self.of(batch, num_wanted)
                    if sizes is not None and query_len <= max_seq_len and sizes.num_tokens <= max_num_tokens:
                        for length in self.max_input_lens:
                            usual_steps.setdefault(attrs.evolve(sizes, max_input_len=length), (query_len, rows))

        def largest_first(found_sizes: GraphSizes) -> tuple[int, ...]:
            return tuple(
                -length for length in (found_sizes.num_tokens, found_sizes.max_seq_len, found_sizes.max_input_len)
            )

        return {sizes: usual_steps[sizes] for sizes in sorted(usual_steps, key=largest_first)}


def auto_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return numbers of requests up to ``max_num_seqs``: powers of two, and the midpoints between them."""
    sizes, size = {max_num_seqs}, 1
    while size < max_num_seqs:
        sizes |= {size, min(max_num_seqs, size + size // 2)}
        size *= 2
    return tuple(sorted(sizes))


def asked_sizes(
    stack: Stack, longest: int, more_query_lens: Collection[int] = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the stack's numbers of requests and of tokens per request, ascending, limited to what a step can have.

    A number of requests above ``max_num_seqs`` is replaced by ``max_num_seqs``, because padding costs time and memory.

    Args:
        stack: Its limits and its graphs, which are on.
        longest: The most tokens of a request in a step that can be captured.
        more_query_lens: Further numbers of tokens of a request, such as those of steps with drafts.
    """
    options, max_num_seqs = stack.model, stack.limits.max_num_seqs
    num_reqs = (
        auto_sizes(max_num_seqs)
        if isinstance(options.graphs, str)
        else {min(size, max_num_seqs) for size in options.graphs}
    )
    query_lens = {*options.graph_query_lens, *more_query_lens}
    return tuple(sorted(num_reqs)), tuple(sorted(size for size in query_lens if size <= longest))


def context_sizes(max_model_len: int) -> tuple[int, ...]:
    """Return the request lengths that graphs are captured for: each four times the one before, up to the most."""
    sizes = []
    size = SHORTEST_CONTEXT
    while size < max_model_len:
        sizes.append(size)
        size *= 4
    return (*sizes, max_model_len)


def _next(sizes: Sequence[int], least: int) -> int | None:
    """Return the first of the ascending sizes that is at least ``least``; None if all are smaller."""
    return next((size for size in sizes if size >= least), None)
