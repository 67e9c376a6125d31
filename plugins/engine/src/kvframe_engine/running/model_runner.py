"""Runs a step: packs the scheduled requests into tensors, runs the model and samples the next tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, compress
from types import MappingProxyType
from typing import Any, Protocol, cast

import attrs
import numpy as np
import torch

from kvframe import BlockTables, Layers, StepBatch, allocating
from kvframe.contract.errors import ModelError
from kvframe.contract.model import LoadedModel, ModelInput
from kvframe.contract.order import IntArray
from kvframe_engine.graphs.step_graphs import Forward, StepGraphs
from kvframe_engine.requests.progress import NO_INPUTS, RequestT
from kvframe_engine.requests.request import Request
from kvframe_engine.running.launched_steps import (
    HostCopy,
    LastTokens,
    LaunchedStep,
    Submit,
    names_of,
    names_of_unknown,
    submit_now,
)
from kvframe_engine.running.logits_processors import (
    ChangedRow,
    ReadTokens,
    changed_rows,
    process_logits,
    run_processors,
)
from kvframe_engine.running.logprobs import StepLogprobs
from kvframe_engine.running.next_tokens import Draws, accept_drafts, sample_on_device, to_device
from kvframe_engine.scheduling.step import Outcomes, PackedStep, ScheduledStep

SkipPolicy = Callable[[StepBatch], bool]
"""Decides for a step whether layers that can skip tokens compute only the tokens that generate."""


Compute = Callable[[StepBatch, IntArray, Mapping[str, Mapping[int, ModelInput]]], torch.Tensor]
"""Computes a batch, and returns the logits of the packed tokens whose indices are given."""

NONE_WANTED: IntArray = np.zeros(0, dtype=np.int64)
"""Asks for no row of logits."""

NO_NEW_INPUTS: Mapping[str, Mapping[int, ModelInput]] = MappingProxyType({})


class ModelRunner:
    """Runs packed batches of a model.

    Invariant: ``tokens[row, :n]`` are the ``n`` known tokens of the request that has ``row`` in the block tables.

    Attributes:
        tokens: ``[max_num_seqs, max_model_len], int64, host``.
        input_lens: For each input sequence of the model, ``[max_num_seqs], int64, host``: the length of the sequence of
            the request that has the row; 0 for none.
        num_joint_tokens: By row, a request's first tokens that see each other in both directions, until the step that
            computes them.
        device: Where the model runs.
        graphs: The graphs that steps are replayed from if possible; None for none.
        compute: Computes a batch: ``compute(batch, logits_indices, new_inputs)``. On rank 0 of several ranks, it first
            sends the batch to the others.
        hidden_states: The rows of the last step that its tokens were sampled from, by request; None if no proposer
            needs them.
        hidden_rows: The hidden states of the last step, of all its tokens or of its rows of logits; None if there are
            none. The next step overwrites them.
    """

    def __init__(
        self,
        model: LoadedModel,
        layers: Layers,
        tables: BlockTables,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_model_len: int,
        skip_policy: SkipPolicy | None = None,
        graphs: StepGraphs | None = None,
        tokens: IntArray | None = None,
        hidden_states: dict[str, torch.Tensor] | None = None,
        forward: Forward | None = None,
        keeps_all_rows: bool = False,
    ) -> None:
        """Keep what steps need.

        Args:
            model: The model, attached to ``layers``.
            layers: Its attention layers.
            tables: The block tables of the cache manager that gives out rows, one per cache group.
            device: Where the model runs.
            max_num_seqs: The most requests at a time.
            max_model_len: The most tokens of a request.
            skip_policy: Whether layers that can skip tokens of a step do so; always unless given.
            graphs: The graphs that steps are replayed from if possible; none unless given.
            tokens: The ``tokens`` of another runner, which it then shares; its own unless given.
            hidden_states: Where each step leaves the hidden states of the requests that it gives tokens.
            forward: What computes a step. It returns the logits and, if they are kept, hidden states. The model's
                forward unless given.
            keeps_all_rows: Whether it returns the hidden states of all tokens of a step (``hidden_rows``).

        Raises:
            PlanError: The machine has no memory for the tokens.
        """
        advice = "a smaller max_num_seqs or max_model_len"
        if tokens is None:
            with allocating(8 * max_num_seqs * max_model_len, f"for the tokens of {max_num_seqs} requests", advice):
                tokens = np.empty((max_num_seqs, max_model_len), dtype=np.int64)
        self.tokens: IntArray = tokens
        self.input_lens: dict[str, IntArray] = {
            name: np.zeros(max_num_seqs, dtype=np.int64) for name in model.description.max_input_lens
        }
        self.num_joint_tokens: dict[int, int] = {}
        self._model = model
        self._layers = layers
        self._tables = tables
        self.device = device
        self._skip_policy = skip_policy
        self.graphs = graphs
        self.compute: Compute = self._compute
        self.hidden_states = hidden_states
        self._keeps_all_rows = keeps_all_rows
        if forward is None:
            forward = forward_of(model, with_hidden_states=hidden_states is not None or keeps_all_rows)
        self._forward = forward
        self.hidden_rows: torch.Tensor | None = None

    def warm_up(self) -> None:
        """Capture the usual graphs, so that the first request need not wait for them. No row may be set yet."""
        if self.graphs is not None:
            self.graphs.capture_usual(self._tables)

    @property
    def num_replays(self) -> int:
        """How often a captured step was replayed."""
        return 0 if self.graphs is None else self.graphs.num_replays

    def drop_graphs(self) -> None:
        """Forget the captured graphs; each is captured again when a step needs it."""
        if self.graphs is not None:
            self.graphs.clear()

    def pack(self, step: ScheduledStep[RequestT]) -> PackedStep[RequestT]:
        """Store the tokens of a step's new requests, and its drafts; pack it in the order that backends ask for.

        Args:
            step: The step; every request has a row, and blocks for its tokens.
        """
        for request in step.admitted:
            self.set_row(request.row, request.token_ids, request.inputs, request.num_joint_tokens)
        for index, drafts in enumerate(step.drafts):
            if drafts:
                row, start = step.rows[index], step.num_known[index]
                self.tokens[row, start : start + len(drafts)] = drafts
        return PackedStep.of(step, self._layers.order_for)

    def set_row(
        self,
        row: int,
        token_ids: Sequence[int],
        inputs: Mapping[str, ModelInput] = NO_INPUTS,
        num_joint_tokens: int = 0,
    ) -> None:
        """Store what is known of the request that has a row: its tokens, input lengths, and joint tokens."""
        self.tokens[row, : len(token_ids)] = token_ids
        if num_joint_tokens:
            self.num_joint_tokens[row] = num_joint_tokens
        elif self.num_joint_tokens:
            self.num_joint_tokens.pop(row, None)
        for name, lens in self.input_lens.items():
            lens[row] = inputs[name].num_tokens if name in inputs else 0

    def forward(
        self,
        batch: StepBatch,
        new_inputs: Mapping[str, Mapping[int, ModelInput]] = NO_NEW_INPUTS,
        *,
        wants_logits: bool = True,
    ) -> torch.Tensor:
        """Run the model over one packed batch whose rows were set.

        If layers can skip tokens, they compute only those whose logits are wanted. They compute all tokens if the
        policy says so, and also if the wanted tokens of a request are not its last ones: only what is not needed later
        is skipped.

        Args:
            batch: The batch. Its ``generating_indices`` are the tokens whose logits are wanted.
            new_inputs: By sequence and row, the inputs beside tokens that this step computes and stores.
            wants_logits: Whether these logits are computed. Without them, the same tokens count as generating.

        Returns:
            Logits ``[num_wanted, vocab_size], device``.

        Raises:
            WrapperError: A wrapper cannot take the step.
            BackendError: A backend returned a wrong output.
            ModelError: The model did.
        """
        if self.input_lens:
            batch = attrs.evolve(
                batch,
                input_lens={name: lens[batch.rows] for name, lens in self.input_lens.items()},
                stores_input={name: np.isin(batch.rows, [*new_inputs.get(name, ())]) for name in self.input_lens},
            )
        if self.num_joint_tokens:
            batch = attrs.evolve(batch, range_ends=self._range_ends(batch))
        logits_indices = batch.generating_indices if wants_logits else NONE_WANTED
        if self._layers.skipped:
            num_tokens = len(batch.token_positions[1])
            if len(logits_indices) < num_tokens and not self._may_skip(batch):
                batch = attrs.evolve(batch, generating_indices=np.arange(num_tokens))
        return self.compute(batch, logits_indices, new_inputs)

    def _compute(
        self, batch: StepBatch, logits_indices: IntArray, new_inputs: Mapping[str, Mapping[int, ModelInput]]
    ) -> torch.Tensor:
        requests, positions = batch.token_positions
        metadata = self._layers.build_metadata(batch, self._tables)
        tensors = (self.tokens[batch.rows[requests], positions], positions, logits_indices)
        with torch.inference_mode():
            if self.input_lens:
                self._model.compute_inputs(
                    {
                        name: [new_inputs[name][row] for row in batch.rows[batch.stores_input[name]].tolist()]
                        for name in new_inputs
                    }
                )
            if self.graphs is not None:
                rows_of_graph = self.graphs.run(batch, self._tables, metadata, *tensors)
                if rows_of_graph is not None:
                    logits, *others = rows_of_graph
                    num_rows = len(positions) if self._keeps_all_rows else len(logits_indices)
                    return self._split_output([logits[: len(logits_indices)], *(each[:num_rows] for each in others)])
            inputs = tuple(map(torch.from_numpy, tensors))
            step = self._layers.begin_step(metadata, batch=batch, tables=self._tables, inputs=inputs)
            output, kept_rows = self._forward(*step.inputs), step.kept_rows
            num_wanted = len(logits_indices if kept_rows is None else kept_rows)
            num_others = len(positions) if self._keeps_all_rows else num_wanted
            for tensor, count in zip(output, (num_wanted, num_others), strict=False):
                self._check_logits(tensor, count)
            if kept_rows is None:
                return self._split_output(output)
            # The rows that the layers computed, then padding.
            is_kept, wanted_indices = batch.generating_indices is logits_indices, step.inputs[2]
            return self._split_output(
                [each[: len(wanted_indices)] if is_kept else each[wanted_indices] for each in output]
            )

    def hidden_rows_of(self, packed: StepBatch, rows: IntArray, counts: IntArray) -> torch.Tensor:
        """Return the hidden states of the first tokens of some requests of the last step, ``[sum(counts), …], device``.

        Args:
            packed: The batch of the step.
            rows: ``[num_reqs]``: the requests' rows.
            counts: ``[num_reqs]``: how many of the tokens that it computed of each.
        """
        assert self.hidden_rows is not None
        starts = np.zeros(len(self.tokens), dtype=np.int64)
        starts[packed.rows] = np.cumsum(packed.query_lens) - packed.query_lens
        row_indices = np.arange(int(counts.sum())) + np.repeat(starts[rows] - np.cumsum(counts) + counts, counts)
        return self.hidden_rows.index_select(0, self.to_device(row_indices))

    def _split_output(self, output: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the logits of a step, and keep the hidden states of the same rows, if there are any."""
        logits, *others = output
        self.hidden_rows = others[0] if others else None
        return logits

    def _check_logits(self, logits: Any, num_rows: int) -> None:
        """Refuse another number of rows than was asked for, which would give requests each other's tokens."""
        if isinstance(logits, torch.Tensor) and logits.ndim == 2 and logits.shape[0] == num_rows:
            return
        answer = list(logits.shape) if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__!r}"
        raise ModelError(
            f"{self._model.description.name}: its model adapter's forward returned {answer}, and not a tensor "
            f"[{num_rows}, vocab_size]: this is a mistake in the model adapter"
        )

    def _range_ends(self, batch: StepBatch) -> IntArray | None:
        """Return where the joint tokens of each token end, ``[num_tokens]``, 0 for none; None if the step has none."""
        range_ends: IntArray | None = None
        first_tokens = np.cumsum(batch.query_lens) - batch.query_lens
        for row, first_token in zip(batch.rows.tolist(), first_tokens.tolist(), strict=True):
            num_joint = self.num_joint_tokens.pop(row, 0)
            if num_joint:
                range_ends = np.zeros(int(batch.query_lens.sum()), np.int64) if range_ends is None else range_ends
                range_ends[first_token : first_token + num_joint] = num_joint
        return range_ends

    def _may_skip(self, batch: StepBatch) -> bool:
        return are_last_tokens(batch) and (self._skip_policy is None or self._skip_policy(batch))

    def to_device(self, values: IntArray) -> torch.Tensor:
        """Return a copy on the model's device."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)


class Drafts(Protocol):
    """What runs a draft model, or prediction heads, beside the served model (``DraftRunner``)."""

    def warm_up(self) -> None:
        """Capture the usual graphs."""

    def drop_graphs(self) -> None:
        """Forget the captured graphs."""

    def follow(self, step: ScheduledStep[Request], outcomes: Outcomes) -> None:
        """Compute the state of what a step keeps."""


class TokenRunner(ModelRunner):
    """Runs a step to the next tokens of its requests.

    Attributes:
        draft: Runs the draft model, or the prediction heads, over the same steps; None for none.
        packed: The batch of the last step.
        last_tokens: Where a launched step leaves its tokens for the next one; None if no step is launched.
        submit: Gives the work of a launched step to the device.
        wait_limit: The context of a wait for the device.
    """

    draft: Drafts | None = None
    packed: StepBatch
    last_tokens: LastTokens | None = None
    submit: Submit = staticmethod(submit_now)
    wait_limit: AbstractContextManager[object] = nullcontext()

    def warm_up(self) -> None:
        """Capture the usual graphs of both models."""
        super().warm_up()
        if self.draft is not None:
            self.draft.warm_up()

    def drop_graphs(self) -> None:
        """Forget the captured graphs of both models."""
        super().drop_graphs()
        if self.draft is not None:
            self.draft.drop_graphs()

    def run(self, step: ScheduledStep[Request]) -> Outcomes:
        """Compute a step and return the next token of each request whose last known token it computes.

        Requests that want log-probabilities of their prompt get those of the tokens that this step computes.

        Args:
            step: The step; every request has a row, and blocks for its tokens.

        Returns:
            Token ids in the step's order; ``FAILED`` for a request whose logits are not numbers. Of a step with drafts,
            for each request the accepted drafts and the token after them; none if its logits are not numbers.
        """
        outcomes = self._run(step)
        if self.draft is not None:
            self.draft.follow(step, outcomes)
        return outcomes

    def launch(self, step: ScheduledStep[Request], running: ScheduledStep[Request] | None) -> LaunchedStep[Request]:
        """Give a step to the device, and do not wait for its tokens if the next step can be chosen without them.

        The host needs the tokens at once if a request names logits processors, which read them: such a step is computed
        as by ``run``.

        Args:
            step: The step. It may continue requests of the running one, whose tokens the device has.
            running: The step that the device still computes; None for none.
        """
        if any(request.needs_outcomes for request in step.requests):
            assert running is None
            return LaunchedStep.of_known(step, cast(Sequence[int], self.run(step)))
        assert self.last_tokens is not None
        last_tokens, packed = self.last_tokens, self.pack(step)
        self.packed, inputs = packed, new_inputs_of(step) if self.input_lens else NO_NEW_INPUTS
        sampling = Sampling.of(packed, self.tokens, self.device, running)
        rows, positions = sampling.rows, sampling.num_known
        self.tokens[rows, positions] = names_of(rows)

        def compute() -> HostCopy:
            logits = self.forward(packed, inputs)
            with torch.inference_mode():
                results = sampling.sample(logits, last_tokens.read)
                last_tokens.store(rows, results[0])
                return HostCopy(results)

        copy = self.submit(compute)

        def outcomes() -> Sequence[int]:
            token_ids: list[int]
            token_ids, *logprobs = copy.result().numbers()
            sampling.give_logprobs(logprobs)
            self.tokens[rows, positions] = token_ids
            return packed.in_step_order(token_ids)

        def wait() -> None:
            with self.wait_limit:
                copy.result().wait()

        return LaunchedStep(step, True, wait, outcomes)

    def _run(self, step: ScheduledStep[Request]) -> Outcomes:
        packed = self.packed = self.pack(step)
        if self.hidden_states is not None:
            self.hidden_states.clear()
        logits = self.forward(packed, new_inputs_of(step) if self.input_lens else NO_NEW_INPUTS)
        sampling = Sampling.of(packed, self.tokens, self.device)
        token_ids, *logprobs = [result.tolist() for result in sampling.sample(logits)]
        sampling.give_logprobs(logprobs)
        if not sampling.drafts:
            if self.hidden_states is not None:
                self._keep_hidden_states(packed, sampling, [[each] for each in token_ids])
            self.tokens[sampling.rows, sampling.num_known] = token_ids
            return packed.in_step_order(token_ids)
        runs = accept_drafts(token_ids, sampling.drafts)
        if self.hidden_states is not None:
            self._keep_hidden_states(packed, sampling, runs)
        num_new = np.array([len(run) for run in runs])
        first = sampling.num_known - np.array([len(each) for each in sampling.drafts])
        places = np.arange(int(num_new.sum())) + np.repeat(first + num_new - np.cumsum(num_new), num_new)
        self.tokens[np.repeat(sampling.rows, num_new), places] = [*chain.from_iterable(runs)]
        return packed.in_step_order(runs)

    def _keep_hidden_states(
        self, packed: PackedStep[Request], sampling: Sampling, runs: Sequence[Sequence[int]]
    ) -> None:
        """Keep a row for each new token of each request: copies, because the next step overwrites those of a graph.

        Args:
            packed: The step.
            sampling: What its tokens were sampled with.
            runs: The new tokens of each request, which follow the first of its rows.
        """
        if not runs:
            return
        assert self.hidden_states is not None
        assert self.hidden_rows is not None
        rows, counts = self.hidden_rows, [sum(token >= 0 for token in run) for run in runs]
        num_rows = [1 + len(each) for each in sampling.drafts] or [1] * len(runs)
        starts = np.cumsum(num_rows) - num_rows
        sampled_indices = np.concatenate(
            [np.arange(count) + start for start, count in zip(starts, counts, strict=True)]
        )
        hidden_states = rows.index_select(0, self.to_device(packed.sampled[sampled_indices]))
        for request, part in zip(sampling.requests, hidden_states.split(counts), strict=True):
            if len(part):
                self.hidden_states[request.request_id] = part
        self.hidden_rows = None


@attrs.frozen(eq=False)
class Sampling:
    """What the tokens of a step are sampled with; the device needs nothing else but the logits.

    Attributes:
        requests: The requests that get tokens.
        rows: ``[n], int64, host``: their rows in the block tables.
        num_known: ``[n], int64, host``: the number of tokens of each, drafts included, before those it gets.
        drafts: The drafts of each; empty if the step has none.
        draws: The rows of logits whose tokens are drawn.
        extras: What only some requests ask for; None if no request does.
    """

    requests: Sequence[Request]
    rows: IntArray
    num_known: IntArray
    drafts: Sequence[Sequence[int]]
    draws: Sequence[Draws]
    extras: Extras | None

    @classmethod
    def of(
        cls,
        packed: PackedStep[Request],
        tokens: IntArray,
        device: torch.device,
        running: ScheduledStep[Request] | None = None,
    ) -> Sampling:
        """Read what requests ask for.

        Args:
            packed: The step.
            tokens: ``[max_num_seqs, max_model_len], int64, host``: the tokens of each row of the block tables.
            device: Where the logits will be.
            running: The step before, if its tokens are not known.
        """
        requests, rows, num_known = packed.sampled_requests()
        drafts, extras = [*compress(packed.drafts, packed.is_sampled)] if packed.drafts else (), None
        names = [] if running is None else names_of_unknown(running, rows)
        owners, num_drawn = _owners_of_rows(requests, drafts) if drafts else (requests, [len(own) for own in names])
        if packed.has_prompt_rows or any(request.params.has_extras for request in requests):
            extras = Extras.of(packed, requests, owners, drafts, names, tokens, device)
        return cls(requests, rows, num_known, drafts, Draws.of(owners, num_drawn, device), extras)

    def sample(self, logits: torch.Tensor, read_tokens: ReadTokens = lambda token_ids: token_ids) -> list[torch.Tensor]:
        """Return the tokens, ``[num_sampled], int64, device``, then what log-probabilities are read from.

        The host waits for nothing unless a request names logits processors.

        Args:
            logits: ``[num_rows, vocab_size], device``: those of the step.
            read_tokens: Reads the tokens that the host has names for.
        """
        if self.extras is not None:
            return self.extras.sample(logits, self.draws, read_tokens)
        return [sample_on_device(logits, self.draws)]

    def give_logprobs(self, numbers: Sequence[Any]) -> None:
        """Give requests their log-probabilities, from the numbers of what ``sample`` returns after the tokens."""
        if numbers:
            assert self.extras is not None
            assert self.extras.logprobs is not None
            self.extras.logprobs.give(*numbers)


@attrs.frozen(eq=False)
class Extras:
    """What only some requests of a step ask for: changed logits, and log-probabilities.

    Attributes:
        changed: The rows of logits that parameters change.
        processors: Lets the processors of plugins change logits; None if no request names one.
        sampled: ``[num_rows], int64, device``: the logits rows that tokens are sampled from; None for all.
        logprobs: The log-probabilities that are asked for; None for none.
    """

    changed: Sequence[ChangedRow]
    processors: Callable[[torch.Tensor], None] | None
    sampled: torch.Tensor | None
    logprobs: StepLogprobs | None

    @classmethod
    def of(
        cls,
        packed: PackedStep[Request],
        requests: Sequence[Request],
        owners: Sequence[Request],
        drafts: Sequence[Sequence[int]],
        names: Sequence[Sequence[int]],
        tokens: IntArray,
        device: torch.device,
    ) -> Extras:
        """Read what requests ask for.

        Args:
            packed: The step.
            requests: The requests that get tokens.
            owners: The request of each row that a token is sampled from.
            drafts: The drafts of each request; empty if the step has none.
            names: For each request, the names of the tokens that the host does not know; empty if it knows all.
            tokens: As for ``Sampling.of``.
            device: As for ``Sampling.of``.
        """
        wants_logprobs = packed.has_prompt_rows or any(request.params.logprobs for request in requests)
        has_processors = any(request.processors for request in requests)
        return cls(
            changed_rows(requests, drafts, names),
            partial(run_processors, requests=requests, drafts=drafts) if has_processors else None,
            to_device(torch.from_numpy(packed.sampled), device) if packed.has_prompt_rows else None,
            StepLogprobs(packed, owners, tokens, device) if wants_logprobs else None,
        )

    def sample(self, logits: torch.Tensor, draws: Sequence[Draws], read_tokens: ReadTokens) -> list[torch.Tensor]:
        """Return what ``Sampling.sample`` returns."""
        processed = sampled = logits if self.sampled is None else logits.index_select(0, self.sampled)
        if self.changed:
            processed = process_logits(sampled, self.changed, read_tokens)
        if self.processors is not None:
            self.processors(processed)
        token_ids = sample_on_device(processed, draws)
        return [token_ids] if self.logprobs is None else [token_ids, *self.logprobs.compute(logits, sampled, token_ids)]


def _owners_of_rows(
    requests: Sequence[Request], drafts: Sequence[Sequence[int]]
) -> tuple[Sequence[Request], Sequence[int]]:
    """Return the request of each sampled row, and how many uniform numbers of it the rows before use."""
    counts = [1 + len(own) for own in drafts]
    owners = [request for request, count in zip(requests, counts, strict=True) for _ in range(count)]
    return owners, [index for count in counts for index in range(count)]


def new_inputs_of(step: ScheduledStep[RequestT]) -> Mapping[str, Mapping[int, ModelInput]]:
    """Return by sequence and row the inputs that a step computes."""
    new_inputs: dict[str, dict[int, ModelInput]] = {}
    for request in step.admitted:
        for name in request.new_inputs:
            new_inputs.setdefault(name, {})[request.row] = request.inputs[name]
    return new_inputs


def forward_of(model: LoadedModel, *, with_hidden_states: bool = False) -> Forward:
    """Return a model's forward, which gives the hidden states that it was prepared for, if they are needed."""
    if with_hidden_states:
        return model.forward_with_hidden_states
    return lambda token_ids, positions, logits_indices: (model.forward(token_ids, positions, logits_indices),)


def are_last_tokens(batch: StepBatch) -> bool:
    """Return whether the generating tokens of every request are its last ones."""
    requests, _ = batch.token_positions
    counts = np.bincount(requests[batch.generating_indices], minlength=len(batch.rows))
    to_ends = np.repeat(np.cumsum(batch.query_lens) - np.cumsum(counts), counts)
    return np.array_equal(batch.generating_indices, np.arange(len(to_ends)) + to_ends)
