"""State layers at run time: which state each request continues from, and which page gets the new state.

A state layer keeps no keys and values. It keeps a state, which the model computes from all tokens so far; the cache
decides where states lie. After a step, the page of each block that the step computed tokens of holds the state after
the block's last computed token, so a page is final when its block is full. If a layer has rollback states, a block that
is not full has a second page, and its states alternate between the two (``kvframe.planning.rollback``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.attention.batch_metadata import StepBatch
from kvframe.attention.staging import HOST
from kvframe.cache.block_table import BlockTables
from kvframe.contract.backend import KVCache
from kvframe.contract.order import IntArray
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.contract.state import StateRound, StateRun, StateStep
from kvframe.planning.groups import Grouping


@attrs.frozen(eq=False)
class RollbackTable:
    """The pages of a group of rollback states.

    Attributes:
        ids: ``[max_num_seqs, max_blocks], int32, host``: the group's block table.
        num_states: States of a page.
        ids_per_state: Block ids from one state of a page to the next.
    """

    ids: npt.NDArray[np.int32]
    num_states: int
    ids_per_state: int


def state_step(
    rows: IntArray,
    num_computed: IntArray,
    query_lens: IntArray,
    table: npt.NDArray[np.int32],
    spec: KVCacheSpec,
    device: torch.device,
    rollback: RollbackTable | None = None,
) -> StateStep:
    """Return the step of a packed batch.

    Args:
        rows: ``[num_reqs]``: each request's row in the block table.
        num_computed: ``[num_reqs]``: tokens that were computed before.
        query_lens: ``[num_reqs]``: tokens that the step computes, at least one each.
        table: ``[max_num_seqs, max_blocks], int32, host``: the group's block table.
        spec: What the group stores.
        device: Where the model runs.
        rollback: Where its rollback states lie; None if it has none.
    """
    locations = _StateLocations(rows, num_computed, query_lens, table, spec, rollback)
    in_rounds = locations.in_rounds()
    rounds = [_round(locations, index, in_rounds, device) for index in range(locations.num_rounds(in_rounds))]
    return StateStep(tuple(rounds), tuple(_runs(locations, np.flatnonzero(~in_rounds))))


@attrs.frozen(eq=False, slots=False)
class _StateLocations:
    """Where the states of a packed batch lie."""

    rows: IntArray
    num_computed: IntArray
    query_lens: IntArray
    table: npt.NDArray[np.int32]
    spec: KVCacheSpec
    rollback: RollbackTable | None

    @cached_property
    def starts(self) -> IntArray:
        """``[num_reqs]``: each request's first packed row."""
        starts: IntArray = np.cumsum(self.query_lens) - self.query_lens
        return starts

    def after(self, requests: IntArray, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return the page that holds the state after each token (0 for none), and the state's index in the page."""
        rows, blocks = self.rows[requests], positions // self.spec.block_size
        pages = self.table[rows, blocks].astype(np.int64)
        if self.rollback is None:
            return pages, positions % self.spec.states_per_block
        # Counted back from the block's last token, because that token's state must be in the block's own page.
        turns = (-1 - positions) % self.spec.block_size % (1 + self.rollback.num_states)
        rollback_pages = self.rollback.ids[rows, blocks].astype(np.int64)
        rollback_pages = np.where(rollback_pages > 0, rollback_pages + (turns - 1) * self.rollback.ids_per_state, 0)
        return np.where(turns > 0, rollback_pages, pages), np.zeros_like(positions)

    @property
    def num_states(self) -> int:
        """The most consecutive tokens whose states can all be kept."""
        return self.spec.states_per_block if self.rollback is None else 1 + self.rollback.num_states

    def in_rounds(self) -> npt.NDArray[np.bool_]:
        """Return for each request whether it has computed tokens, and pages for the state after each new token."""
        fits = (self.query_lens <= self.num_states) & (self.num_computed > 0)
        for index in range(1, self.num_rounds(fits)):
            # Without a page, the state that a later token continues from would be lost.
            requests = np.flatnonzero(fits & (self.query_lens > index))
            pages, _ = self.after(requests, self.num_computed[requests] + index - 1)
            fits[requests[pages == 0]] = False
        return fits

    def num_rounds(self, in_rounds: npt.NDArray[np.bool_]) -> int:
        """Return the number of rounds: the most new tokens of a request that is computed in rounds."""
        return int(self.query_lens[in_rounds].max(initial=0))


def _round(
    locations: _StateLocations, index: int, in_rounds: npt.NDArray[np.bool_], device: torch.device
) -> StateRound:
    """Return the round of the ``index``-th new token of each request that is computed in rounds and has that many."""
    requests = np.flatnonzero(in_rounds & (locations.query_lens > index))
    positions = locations.num_computed[requests] + index
    sources, targets = locations.after(requests, positions - 1), locations.after(requests, positions)
    # One copy to the device for all of it.
    packed = np.stack([locations.starts[requests] + index, *sources, *targets])
    return StateRound(*torch.from_numpy(packed).to(device, non_blocking=True).unbind())


def _runs(locations: _StateLocations, requests: IntArray) -> list[StateRun]:
    """Return the runs of requests: each run ends with a block that has a page, or with the step."""
    size = locations.spec.block_size
    begin, end = locations.num_computed[requests], (locations.num_computed + locations.query_lens)[requests]
    num_blocks = (end - 1) // size - begin // size + 1
    request_indices = np.repeat(np.arange(len(requests)), num_blocks)
    blocks = np.arange(len(request_indices)) + (begin // size - np.cumsum(num_blocks) + num_blocks)[request_indices]
    stops = np.minimum((blocks + 1) * size, end[request_indices])
    pages, state_indices = locations.after(requests[request_indices], stops - 1)
    is_kept = (pages > 0) | (stops == end[request_indices])
    request_indices, stops, pages, state_indices = (
        column[is_kept] for column in (request_indices, stops, pages, state_indices)
    )
    is_first = np.diff(request_indices, prepend=-1) > 0
    starts = np.where(is_first, begin[request_indices], np.roll(stops, 1))
    source_pages, source_indices = locations.after(requests[request_indices], np.maximum(starts - 1, 0))
    to_row = (locations.starts[requests] - begin)[request_indices]
    columns = (starts + to_row, stops + to_row, starts > 0, source_pages, source_indices, pages, state_indices)
    return [
        StateRun(start, stop, (source_page, source_index) if has_past else None, (page, state_index))
        for start, stop, has_past, source_page, source_index, page, state_index in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _pad_rounds(step: StateStep, num_rows: int, num_rounds: int) -> StateStep:
    """Return a step without runs with as many rounds and rows. Added rows read and write the null page.

    Added rows compute the last packed token, which is padding if there is an added row.
    """
    rounds = []
    for index in range(num_rounds):
        columns = torch.zeros(len(attrs.fields(StateRound)), num_rows, dtype=torch.int64)
        columns[0] = num_rows * num_rounds - 1
        for state_round in step.rounds[index : index + 1]:
            for column, values in zip(columns, attrs.astuple(state_round, recurse=False), strict=True):
                column[: len(values)] = values
        rounds.append(StateRound(*columns.unbind()))
    return StateStep(tuple(rounds), ())


class StateLayer:
    """One state layer: the model computes it on the pages that the cache gives it.

    Attributes:
        spec: The layer.
        pages: Its state tensors by name, each ``[num_block_ids, states_per_block, *shape], device``.
    """

    def __init__(self, spec: LayerSpec, pages: KVCache) -> None:
        """Take the layer and its pages."""
        self.spec = spec
        self.pages = pages
        self._step: StateStep | None = None

    @property
    def stored(self) -> KVCacheSpec:
        """The spec of what it keeps."""
        assert self.spec.spec is not None
        return self.spec.spec

    @property
    def step(self) -> StateStep:
        """The work of the running step."""
        assert self._step is not None
        return self._step

    @step.setter
    def step(self, step: StateStep) -> None:
        self._step = step


class StateLayers(Mapping[str, StateLayer]):
    """All state layers of a model, by name.

    Invariant: every layer has the step that was selected last.
    """

    def __init__(self, layers: Iterable[LayerSpec], grouping: Grouping, views: Mapping[str, KVCache]) -> None:
        """Give each layer its pages.

        Args:
            layers: The layers that keep state and do not attend, in the order they run.
            grouping: The cache groups.
            views: Each layer's state tensors.
        """
        self._layers = {layer.name: StateLayer(layer, views[layer.name]) for layer in layers}
        # Layers of one cache group with equally many states in a page share their steps.
        alike: dict[tuple[int, int], list[StateLayer]] = {}
        self._rollback: dict[int, tuple[int, int, int]] = {}
        for layer in self._layers.values():
            group, *rollback_groups = grouping.groups_of(layer.spec.name)
            alike.setdefault((group.index, layer.stored.states_per_block), []).append(layer)
            for rollback_group in rollback_groups:
                # The first dimension of every view is that of block ids.
                pages = next(iter(layer.pages.values()))
                ids_per_state = group.page_bytes // (pages.stride(0) * pages.element_size())
                self._rollback[group.index] = (rollback_group.index, rollback_group.num_parts, ids_per_state)
        self._alike = [(group, tuple(members)) for (group, _), members in alike.items()]

    def steps(self, batch: StepBatch | None, tables: BlockTables | None) -> list[StateStep]:
        """Return the steps of the layers, on the host, one for each set of layers that share it.

        Args:
            batch: The step; None if there are no layers.
            tables: The block tables of all cache groups; None if there are no layers.
        """
        steps = []
        for group, (layer, *_) in self._alike:
            assert batch is not None
            assert tables is not None
            rollback = None
            if group in self._rollback:
                rollback_group, num_states, ids_per_state = self._rollback[group]
                rollback = RollbackTable(tables[rollback_group].ids, num_states, ids_per_state)
            steps.append(
                state_step(
                    batch.rows, batch.num_computed, batch.query_lens, tables[group].ids, layer.stored, HOST, rollback
                )
            )
        return steps

    @property
    def max_rounds(self) -> int | None:
        """The most new tokens of a request that all layers take in rounds; None if there are no layers."""
        return min((self._num_states(group, layers[0]) for group, layers in self._alike), default=None)

    def _num_states(self, group: int, layer: StateLayer) -> int:
        _, num_rollback_states, _ = self._rollback.get(group, (0, 0, 0))
        return layer.stored.states_per_block + num_rollback_states

    def rounds(
        self, batch: StepBatch | None, tables: BlockTables, num_rows: int, num_rounds: int
    ) -> list[StateStep] | None:
        """Return the steps of the layers, on the host, at the sizes of a graph; None if a request needs a run.

        Args:
            batch: The step; None for a step of padding only.
            tables: The block tables of all cache groups.
            num_rows: The requests of the graph, those of padding included.
            num_rounds: The most tokens that one of them computes.
        """
        steps = [StateStep((), ())] * len(self._alike) if batch is None else self.steps(batch, tables)
        if any(step.runs for step in steps):
            return None
        return [_pad_rounds(step, num_rows, num_rounds) for step in steps]

    def select(self, steps: Sequence[StateStep]) -> None:
        """Give the layers the steps that ``steps`` returned."""
        for (_, members), step in zip(self._alike, steps, strict=True):
            for layer in members:
                layer.step = step

    def __getitem__(self, name: str) -> StateLayer:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)
