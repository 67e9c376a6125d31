"""Steps as graphs: which steps are captured, at which sizes, and what becomes of the others.

A graph holds one step's work at fixed sizes, so a step is padded to the next ones that there are graphs for: requests
without tokens, tokens in the null page. Each size is captured when a step first has it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch

from kvframe.attention.capture import GraphCapture
from kvframe.attention.captured import CapturedStep, NotReplayableError
from kvframe.attention.layer import AttentionLayers
from kvframe.attention.metadata import CommonAttentionMetadata
from kvframe.attention.padding import pad_step
from kvframe.attention.step import StepBatch
from kvframe.engine.graph import CaptureError, StepGraph, graph_factory
from kvframe.engine.packing import IntArray
from kvframe.errors import StackError
from kvframe.options import EngineOptions

_log = logging.getLogger("kvframe")

SHORTEST_CONTEXT = 1024
"""Tokens of the longest request, for the graphs of short ones; the next ones have four times as many, and so on."""

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@attrs.frozen(kw_only=True)
class GraphSizes:
    """What a graph is captured for.

    Attributes:
        num_reqs: Requests, padded ones included.
        query_len: The most tokens that one of them computes.
        num_generating: Generating rows, padding included.
        num_wanted: Rows of logits, padding included.
        max_seq_len: The most tokens of a request after the step.
        all_generate: Whether every token does, so that no layer skips any.
    """

    num_reqs: int
    query_len: int
    num_generating: int
    num_wanted: int
    max_seq_len: int
    all_generate: bool

    @property
    def num_tokens(self) -> int:
        """Packed tokens, padding included."""
        return self.num_reqs * self.query_len


@attrs.frozen(eq=False)
class _Held:
    step: CapturedStep
    graph: StepGraph
    output: torch.Tensor


class StepGraphs:
    """Owns an engine's graphs.

    Invariant: a size has one graph at most, and its tensors are written to only to replay it.

    Attributes:
        num_replays: Steps that were replayed.
    """

    def __init__(
        self,
        layers: AttentionLayers,
        forward: Forward,
        device: torch.device,
        *,
        num_reqs: Sequence[int],
        query_lens: Sequence[int],
        max_model_len: int,
    ) -> None:
        """Take what steps are captured of.

        Args:
            layers: The model's attention layers.
            forward: The model's forward, of token ids, positions and the rows whose logits are wanted.
            device: Where it runs.
            num_reqs: The numbers of requests that steps are padded to, ascending.
            query_lens: The numbers of tokens of each request that steps are captured for, ascending.
            max_model_len: The most tokens of a request.
        """
        self._layers = layers
        self._forward = forward
        self._num_reqs = tuple(num_reqs)
        self._query_lens = tuple(query_lens)
        self._max_seq_lens = context_sizes(max_model_len)
        self._make_graph = graph_factory(device)
        self._held: dict[GraphSizes, _Held] = {}
        self._given_up: set[GraphSizes] = set()
        self._level = layers.capture
        self.num_replays = 0

    @classmethod
    def of(
        cls,
        options: EngineOptions,
        layers: AttentionLayers,
        forward: Forward,
        device: torch.device,
        *,
        max_model_len: int,
        has_inputs: bool,
        source: str,
    ) -> StepGraphs | None:
        """Return the graphs that a stack asks for; None where steps run without.

        Args:
            options: The stack's.
            layers: The model's attention layers.
            forward: The model's forward.
            device: Where it runs.
            max_model_len: The most tokens of a request.
            has_inputs: Whether requests bring more than tokens.
            source: Where the stack was read, for errors.

        Raises:
            StackError: It names sizes, and the model, a wrapper or a backend cannot be captured.
        """
        if options.graphs == "off":
            return None
        why = None
        if has_inputs:
            why = "requests of this model bring inputs beside their tokens"
        elif layers.capture is GraphCapture.NEVER:
            why = f"nothing can be captured of {layers.least_captured}"
        if why is not None and options.graphs == "auto":
            _log.warning("steps run without graphs: %s", why)
            return None
        if why is not None:
            raise StackError(f'{source}: engine.graphs names sizes, but {why}; "auto" runs such steps without')
        return cls(
            layers,
            forward,
            device,
            num_reqs=auto_sizes(options.max_num_seqs) if options.graphs == "auto" else options.graphs,
            query_lens=options.graph_query_lens,
            max_model_len=max_model_len,
        )

    @property
    def num_graphs(self) -> int:
        """How many there are."""
        return len(self._held)

    def sizes_for(self, batch: StepBatch, num_wanted: int) -> GraphSizes | None:
        """Return the sizes of the graph that a step can be replayed from; None if there is none for such steps.

        Args:
            batch: The step.
            num_wanted: Rows of logits that are wanted.
        """
        longest, shortest = int(batch.query_lens.max()), int(batch.query_lens.min())
        needed = GraphCapture.DECODE if longest == 1 else GraphCapture.UNIFORM
        num_reqs = _next(self._num_reqs, len(batch.rows))
        query_len: int | None = longest if longest in self._query_lens else None
        num_generating, all_generate = len(batch.generating_indices), True
        if num_generating < int(batch.query_lens.sum()):
            all_generate = False
            if self._layers.skipped:
                needed = GraphCapture.ALWAYS  # what is left has requests with and without tokens
        if self._level is GraphCapture.ALWAYS:
            query_len = _next(self._query_lens, longest)
        elif needed > self._level or shortest < longest:
            return None
        max_seq_len = _next(self._max_seq_lens, int((batch.num_computed + batch.query_lens).max()))
        if num_reqs is None or query_len is None or max_seq_len is None or batch.extensions or not num_wanted:
            return None
        rows = num_reqs, num_reqs * query_len
        wanted, generating = _next(rows, num_wanted), rows[1] if all_generate else _next(rows, num_generating)
        if wanted is None or generating is None:
            return None
        sizes = GraphSizes(
            num_reqs=num_reqs,
            query_len=query_len,
            num_generating=generating,
            num_wanted=wanted,
            max_seq_len=max_seq_len,
            all_generate=all_generate,
        )
        return None if sizes in self._given_up else sizes

    def run(
        self,
        sizes: GraphSizes,
        metadata: Sequence[CommonAttentionMetadata],
        token_ids: IntArray,
        positions: IntArray,
        wanted: IntArray,
    ) -> torch.Tensor | None:
        """Run a step from its graph, which is captured if there is none yet.

        Args:
            sizes: What ``sizes_for`` returned of the step.
            metadata: The step, one value per cache group; on the host.
            token_ids: ``[num_tokens]``.
            positions: ``[num_tokens]``.
            wanted: ``[num_wanted]``: the packed tokens whose logits are wanted.

        Returns:
            Logits of the wanted rows, then padding, good until the next step; None if it could not be run this way,
            which is said once.
        """
        padded = pad_step(
            metadata,
            num_reqs=sizes.num_reqs,
            num_tokens=sizes.num_tokens,
            num_generating=sizes.num_generating,
            max_query_len=sizes.query_len,
            max_seq_len=sizes.max_seq_len,
        )
        inputs = (
            torch.from_numpy(np.pad(token_ids, (0, sizes.num_tokens - len(token_ids)))),
            torch.from_numpy(np.pad(positions, (0, sizes.num_tokens - len(positions)))),
            torch.from_numpy(np.pad(wanted, (0, sizes.num_wanted - len(wanted)), mode="edge")),
        )
        held = self._held.get(sizes)
        try:
            if held is None:
                held = self._held[sizes] = self._capture(padded, inputs)
            else:
                self._layers.replay_step(held.step, padded, inputs)
                held.graph.replay()
                self.num_replays += 1
        except (NotReplayableError, CaptureError) as error:
            self._held.pop(sizes, None)
            self._given_up.add(sizes)
            _log.warning("steps of %d requests run without a graph: %s", sizes.num_reqs, error)
            return None
        return held.output

    def _capture(self, metadata: Sequence[CommonAttentionMetadata], inputs: tuple[torch.Tensor, ...]) -> _Held:
        step, graph = self._layers.capture_step(metadata, inputs), self._make_graph()
        token_ids, positions, wanted = step.inputs
        return _Held(step, graph, graph.capture(lambda: self._forward(token_ids, positions, wanted)))


def auto_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return numbers of requests up to the most that run at once: powers of two, and halfway to the next."""
    sizes, size = {max_num_seqs}, 1
    while size < max_num_seqs:
        sizes |= {size, min(max_num_seqs, size + size // 2)}
        size *= 2
    return tuple(sorted(sizes))


def context_sizes(max_model_len: int) -> tuple[int, ...]:
    """Return the lengths of requests that graphs are captured for: four times as many tokens each, up to the most."""
    sizes = []
    size = SHORTEST_CONTEXT
    while size < max_model_len:
        sizes.append(size)
        size *= 4
    return (*sizes, max_model_len)


def _next(sizes: Sequence[int], least: int) -> int | None:
    """Return the first of ascending sizes that is enough; None if none is."""
    return next((size for size in sizes if size >= least), None)
