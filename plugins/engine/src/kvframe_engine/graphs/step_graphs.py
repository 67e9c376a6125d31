"""Captures and replays steps as graphs, and runs a step without a graph if it cannot be captured.

A graph holds one step's work at fixed sizes. A step is padded to the next captured size, with requests without tokens
and with tokens in the null page. The usual sizes are captured before the first request; a graph of another size is
captured in the first step that needs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import attrs
import numpy as np
import torch

from kvframe import BlockTables, Layers, Stack, Step, StepBatch
from kvframe.contract.capture import GraphCapture, NotReplayableError
from kvframe.contract.errors import StackError
from kvframe.contract.metadata import SEQ_STARTS, Axis, CommonAttentionMetadata, Extension
from kvframe.contract.order import IntArray
from kvframe.contract.state import StateStep
from kvframe_engine.graphs.device_graphs import CaptureError, Output, StepGraph, graph_factory
from kvframe_engine.graphs.sizes import Generating, GraphSizes, SizeChoice, UsualStep, asked_sizes, context_sizes

_log = logging.getLogger("kvframe")

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Output]


@attrs.frozen(eq=False)
class _CapturedGraph:
    step: Step
    graph: StepGraph
    output: Output


class StepGraphs:
    """An engine's graphs.

    Invariant: each size has at most one graph, and the graph's input tensors are written to only for a replay.

    Attributes:
        num_replays: Steps that were replayed.
    """

    def __init__(
        self,
        layers: Layers,
        forward: Forward,
        device: torch.device,
        *,
        num_reqs: Sequence[int],
        query_lens: Sequence[int],
        max_model_len: int,
        max_num_batched_tokens: int,
        max_input_len: int = 0,
        usual_steps: Collection[UsualStep] | None = None,
    ) -> None:
        """Keep what a capture needs.

        Args:
            layers: The model's attention layers.
            forward: The model's forward. It takes token ids, positions and the rows whose logits are wanted. It returns
                these logits, and other tensors of the same rows, if any are wanted.
            device: The device of the model.
            num_reqs: The numbers of requests that steps are padded to, ascending.
            query_lens: The numbers of tokens of each request that steps are captured for, ascending.
            max_model_len: The most tokens of a request.
            max_num_batched_tokens: The most tokens of a step. Sizes with more tokens, including padding, are captured
                only when a step first needs them.
            max_input_len: The most tokens of an input that a request brings beside its tokens.
            usual_steps: The kinds of steps that are captured before the first request. Unless given, those in which
                each request computes one of ``query_lens`` and wants the logits of its last token.
        """
        self._usual = (
            tuple((query_len, Generating.LAST) for query_len in query_lens)
            if usual_steps is None
            else tuple(usual_steps)
        )
        self._layers = layers
        self._forward = forward
        self._choice = SizeChoice(
            num_reqs=tuple(num_reqs),
            query_lens=tuple(query_lens),
            max_seq_lens=context_sizes(max_model_len),
            level=layers.capture,
            skips=bool(layers.skipped),
            max_rounds=layers.states.max_rounds,
            max_input_lens=context_sizes(max_input_len),
        )
        self._max_num_tokens = max_num_batched_tokens
        self._make_graph = graph_factory(device)
        self._graphs: dict[GraphSizes, _CapturedGraph] = {}
        self._uncapturable: set[GraphSizes] = set()
        self._reasons: set[str] = set()
        self.num_replays = 0

    @classmethod
    def of(
        cls,
        stack: Stack,
        layers: Layers,
        forward: Forward,
        device: torch.device,
        *,
        max_model_len: int,
        max_input_lens: Mapping[str, int],
        usual_steps: Collection[UsualStep] | None = None,
        source: str,
    ) -> StepGraphs | None:
        """Return the graphs that a stack asks for; None if its steps cannot be captured, and it names no sizes.

        Args:
            stack: Its limits and its graphs.
            layers: The model's attention layers.
            forward: The model's forward.
            device: The device of the model.
            max_model_len: The most tokens of a request.
            max_input_lens: The most tokens of each input that requests bring beside their tokens.
            usual_steps: The kinds of steps that are captured before the first request. Their numbers of tokens of a
                request are captured beside those of the stack. Unless given, steps that want the last logits.
            source: Where the stack was read, for errors.

        Raises:
            StackError: The stack names sizes, and a wrapper or a backend cannot be captured; or its numbers of tokens
                of a request are all larger than a step that can be captured has.
        """
        options = stack.model
        if layers.capture is GraphCapture.NEVER:
            why = f"nothing can be captured of {layers.least_captured}"
            if options.graphs == "auto":
                _log.warning("steps run without graphs: %s", why)
                return None
            raise StackError(
                f'{source}: model.graphs names sizes, but {why}; "auto" runs such steps without', code="not_captured"
            )
        longest = min(stack.limits.max_num_batched_tokens, max_model_len, layers.states.max_rounds or max_model_len)
        num_reqs, query_lens = asked_sizes(stack, longest, [query_len for query_len, _ in usual_steps or ()])
        if not query_lens:
            raise StackError(
                f"{source}: model.graph_query_lens is {list(options.graph_query_lens)}, and a request computes at "
                f"most {longest} tokens in a step that can be captured"
            )
        return cls(
            layers,
            forward,
            device,
            num_reqs=num_reqs,
            query_lens=query_lens,
            max_model_len=max_model_len,
            max_num_batched_tokens=stack.limits.max_num_batched_tokens,
            max_input_len=max(max_input_lens.values(), default=0),
            usual_steps=usual_steps,
        )

    @property
    def max_num_tokens(self) -> int:
        """The most packed tokens of a step that is captured, padding included."""
        return max(self._choice.num_reqs) * max(self._choice.query_lens)

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return len(self._graphs)

    def clear(self) -> None:
        """Forget the captured graphs and the failed captures; each is tried again when a step needs it."""
        self._graphs.clear()
        self._uncapturable.clear()

    def sizes_for(self, batch: StepBatch, num_wanted: int) -> GraphSizes | None:
        """Return the sizes of the graph that can replay a step; None if no graph fits it.

        Args:
            batch: The step.
            num_wanted: The number of wanted rows of logits.
        """
        sizes = self._choice.of(batch, num_wanted)
        return None if sizes in self._uncapturable else sizes

    def capture_usual(self, tables: BlockTables, num_hidden: int | None = None) -> None:
        """Capture the usual steps, so that no request waits for it; log how many, and how long it took.

        The captured step has a few tokens in the null page, so it changes no state of a request. The largest graph is
        captured first, so that the others reuse its memory.

        Args:
            tables: Block tables whose first row is empty.
            num_hidden: How many tokens of each request are hidden in every step (``SEQ_STARTS``); None if steps have no
                hidden tokens.
        """
        usual = self._choice.usual(self._max_num_tokens, self._usual)
        _log.info("capturing %d graphs of steps of up to %d requests", len(usual), max(self._choice.num_reqs))
        start_time, first = time.monotonic(), num_hidden or 0
        extensions = {}
        if num_hidden is not None:
            hidden = torch.full((1,), num_hidden, dtype=torch.int32)
            extensions[SEQ_STARTS] = Extension(hidden, Axis.REQUEST, hidden)
        with torch.inference_mode():
            for sizes, (query_len, rows) in usual.items():
                query_offsets = np.arange(query_len)
                generating = query_offsets if rows in (Generating.ALL, Generating.FEW) else query_offsets[-1:]
                batch = StepBatch(
                    rows=np.zeros(1, dtype=np.int64),
                    num_computed=np.full(1, first),
                    query_lens=np.array([query_len]),
                    generating_indices=generating,
                    extensions=extensions,
                )
                states = self._layers.states.rounds(None, tables, sizes.num_reqs, sizes.query_len)
                assert states is not None
                metadata = self._layers.build_metadata(batch, tables)
                wanted_indices = generating[: sizes.num_wanted]
                self._run(
                    sizes, tables, metadata, states, np.zeros_like(query_offsets), query_offsets + first, wanted_indices
                )
        _log.info("captured %d graphs in %.1f s", self.num_graphs, time.monotonic() - start_time)

    def run(
        self,
        batch: StepBatch,
        tables: BlockTables,
        metadata: Sequence[CommonAttentionMetadata],
        token_ids: IntArray,
        positions: IntArray,
        wanted_indices: IntArray,
    ) -> Output | None:
        """Run a step from its graph, after capturing the graph if there is none yet.

        Args:
            batch: The step.
            tables: The block tables of all cache groups.
            metadata: What ``Layers.build_metadata`` made of both, on the host.
            token_ids: ``[num_tokens]``.
            positions: ``[num_tokens]``.
            wanted_indices: ``[num_wanted]``: the packed tokens whose logits are wanted.

        Returns:
            What the forward returns: logits of the wanted rows, then of padding; the next step overwrites them. None if
            no graph fits the step, a state layer has no page for the state between two of a request's tokens, or the
            capture raised any exception. In the last case, steps of these sizes run without a graph from then on, and
            each reason is logged once. The pages stay correct: the step without a graph writes again what the capture
            wrote.
        """
        sizes = self.sizes_for(batch, len(wanted_indices))
        if sizes is None:
            return None
        states = self._layers.states.rounds(batch, tables, sizes.num_reqs, sizes.query_len)
        if states is None:
            return None
        return self._run(sizes, tables, metadata, states, token_ids, positions, wanted_indices)

    def _run(
        self,
        sizes: GraphSizes,
        tables: BlockTables,
        metadata: Sequence[CommonAttentionMetadata],
        states: Sequence[StateStep],
        token_ids: IntArray,
        positions: IntArray,
        wanted_indices: IntArray,
    ) -> Output | None:
        padded = self._layers.pad_metadata(
            metadata,
            num_reqs=sizes.num_reqs,
            num_tokens=sizes.num_tokens,
            num_generating=sizes.num_generating,
            max_query_len=sizes.query_len,
            max_seq_len=sizes.max_seq_len,
            max_input_len=sizes.max_input_len,
        )
        inputs = (
            torch.from_numpy(np.pad(token_ids, (0, sizes.num_tokens - len(token_ids)))),
            torch.from_numpy(np.pad(positions, (0, sizes.num_tokens - len(positions)))),
            torch.from_numpy(np.pad(wanted_indices, (0, sizes.num_wanted - len(wanted_indices)), mode="edge")),
        )
        captured = self._graphs.get(sizes)
        is_first = captured is None
        try:
            if captured is None:
                # A capture runs the step several times. Keys and values may be written again, but a state would advance
                # each time, so the captured step's states are in the null page.
                no_states = self._layers.states.rounds(None, tables, sizes.num_reqs, sizes.query_len)
                assert no_states is not None
                captured = self._graphs[sizes] = self._capture(padded, inputs, no_states)
            self._layers.replay_step(captured.step, padded, inputs, states)
            captured.graph.replay()
            self.num_replays += not is_first
        except (NotReplayableError, CaptureError) as error:
            self._graphs.pop(sizes, None)
            self._uncapturable.add(sizes)
            if str(error) not in self._reasons:
                self._reasons.add(str(error))
                _log.warning("steps of %d requests run without a graph: %s", sizes.num_reqs, error)
            return None
        return captured.output

    def _capture(
        self,
        metadata: Sequence[CommonAttentionMetadata],
        inputs: tuple[torch.Tensor, ...],
        states: Sequence[StateStep],
    ) -> _CapturedGraph:
        step, graph = self._layers.capture_step(metadata, inputs, states), self._make_graph()
        token_ids, positions, wanted_indices = step.inputs
        try:
            output = graph.capture(lambda: self._forward(token_ids, positions, wanted_indices))
        except torch.OutOfMemoryError as error:
            raise CaptureError("the device has no memory left for it; give the cache less") from error
        except (NotReplayableError, CaptureError):
            raise
        except Exception as error:
            raise CaptureError(f"its capture raised {type(error).__name__}: {error}") from error
        return _CapturedGraph(step, graph, output)
