"""All attention layers of a model at run time: begins each step by building what the layers read in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from kvframe.attention.batch_metadata import StepBatch, input_slots, split_mapping
from kvframe.attention.build import GroupMetadata, MetadataPlan, PreparedStep
from kvframe.attention.captured import CapturedStep
from kvframe.attention.copies import CopyScratch
from kvframe.attention.group import AttentionGroup, form_groups
from kvframe.attention.layer import AttentionLayer, GroupStep
from kvframe.attention.local import LocalCaches
from kvframe.attention.request_order import find_order
from kvframe.attention.staging import StagedMemory, Staging
from kvframe.attention.state import StateLayers
from kvframe.cache.block_table import BlockTables
from kvframe.contract.backend import KVCache
from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import BackendError
from kvframe.contract.formats import PLAIN
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.order import IntArray
from kvframe.contract.specs import TOKENS, LayerSpec
from kvframe.contract.state import StateStep
from kvframe.planning.groups import Grouping
from kvframe.selection.choice import Choice

NO_SLOTS: Mapping[int, torch.Tensor] = MappingProxyType({})


class AttentionLayers(Mapping[str, AttentionLayer]):
    """All attention layers of a model, by name, and its state layers (``states``).

    Invariant: between ``begin_step`` and the next, every layer of a group reads the same metadata.

    Attributes:
        groups: The attention groups, in the order of their first layers.
        local: The scratch pages of layers that keep nothing of the past.
        states: The layers that keep a state, which the model computes itself on their pages; by name.
        skipped: The layers that compute only the generating tokens of a step, in the order in which they run.
        copies: Memory for copies of pages, for backends that do not read the format of their layers.
        dtypes: The dtypes of the layers' caches, as they are read.
        of_inputs: The indices of the cache groups that keep state of an input sequence.
        kept_rows: ``[num_generating + padding], int64, device``: the rows of the packed batch that the skipped layers
            compute in this step; None for all. Before the first of these layers, the model drops the other rows of its
            hidden states. It gives logits for exactly these rows.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        choices: Sequence[Choice],
        grouping: Grouping,
        views: Mapping[str, KVCache],
        device: torch.device,
        skipped: Sequence[str] = (),
        local: LocalCaches | None = None,
        max_static_copies: int | None = None,
        *,
        audited: bool = False,
    ) -> None:
        """Group the layers and make one backend instance per group.

        Args:
            layers: The model's layers.
            choices: Wrapper chain and backend of each layer that attends, in the same order.
            grouping: The cache groups.
            views: Each layer's state tensors.
            device: Where the backends run.
            skipped: The layers that were chosen to be skipped.
            local: The scratch pages of the layers that keep nothing; None if every layer keeps something.
            max_static_copies: The most bytes of the copies of pages that a graph reads; None for any.
            audited: Whether the results of wrappers are checked on the device too; then each step waits for it.

        Raises:
            BackendError: A backend could not be set up.
        """
        attending = [layer for layer in layers if layer.query is not None]
        self.local = LocalCaches((), device, max_tokens=0, max_reqs=0) if local is None else local
        self.copies = CopyScratch(device, max_static_copies)
        self.groups = form_groups(attending, choices, grouping, device, self.local.places, self.copies)
        views = {**views, **self.local.views}
        stored = [layer.spec for layer in layers if layer.spec is not None and layer.name in views]
        states = (tensor for spec in stored for tensor in spec.in_format(PLAIN).state_tensors().values())
        self.dtypes = frozenset(getattr(torch, tensor.dtype) for tensor in states)
        keeping = [layer for layer in layers if layer.query is None and layer.name in views]
        self.states = StateLayers(keeping, grouping, views)
        self._keeps_states = bool(keeping)
        self._staging = Staging(device)
        self.skipped = tuple(skipped)
        self.kept_rows: torch.Tensor | None = None
        self._steps = tuple(GroupStep(group) for group in self.groups)
        self._layers: dict[str, AttentionLayer] = {
            layer.name: AttentionLayer(layer, views[layer.name], step)
            for step in self._steps
            for layer in step.group.layers
        }
        self._unchecked = [layer for layer in self._layers.values() if layer.lacks_parameters]
        self._order = {layer.name: index for index, layer in enumerate(attending)}
        pages = {
            group.cache_group: tensor for group in self.groups for tensor in [*views[group.layers[0].name].values()][:1]
        }
        num_cache_groups = len(grouping.groups) + self.local.num_places
        self._plan = MetadataPlan(self.groups, num_cache_groups, pages, audited=audited)
        stores = {group.cache_group for group in self.groups if group.writes}
        self.of_inputs = frozenset(group.index for group in grouping.groups if group.spec.sequence != TOKENS)
        self._stores_tokens, self._stores_inputs = sorted(stores - self.of_inputs), bool(stores & self.of_inputs)
        by_size = sorted(self.groups, key=lambda group: -len(group.layers))
        orders = [group.builder.batch_order for group in by_size]
        self._orders = tuple(dict.fromkeys(order for order in orders if order is not None))

    @property
    def capture(self) -> GraphCapture:
        """The batches for which the metadata of all groups can be captured as part of a graph."""
        return min((group.capture for group in self.groups), default=GraphCapture.ALWAYS)

    @property
    def least_captured(self) -> str:
        """A phrase that names the layer that limits ``capture``, and its backend."""
        return _named(min(self.groups, key=lambda group: group.capture))

    @property
    def without_ranges(self) -> str | None:
        """A phrase that names a layer over requests' own tokens that ignores ranges of prompts; None for none."""
        unaware = (group for group in self.groups if group.sequence == TOKENS and not group.takes_ranges)
        return next(map(_named, unaware), None)

    def order_for(self, num_computed: IntArray, query_lens: IntArray) -> IntArray | None:
        """Return the order in which to pack a step's requests, so that the backends need not reorder them.

        If two groups ask for orders that contradict each other, the group with more layers gets its order, and the
        other group reorders the batch for itself.

        Args:
            num_computed: ``[num_reqs]``: tokens of each request that were computed before.
            query_lens: ``[num_reqs]``: tokens that the step computes.

        Returns:
            ``[num_reqs]``: the requests in order; None if they may stay as they are.
        """
        return find_order(self._orders, num_computed, query_lens) if self._orders else None

    def begin_step(
        self,
        metadata: Sequence[CommonAttentionMetadata],
        *,
        batch: StepBatch | None = None,
        tables: BlockTables | None = None,
        inputs: tuple[torch.Tensor, ...] = (),
    ) -> tuple[torch.Tensor, ...]:
        """Build every attention group's metadata of a step, and work out which states the state layers read and write.

        Wrapper chains are applied on the host if the metadata lies there, and builders that build on the host do so.
        Then one copy brings everything to the device, and the other builders build. A builder may make further copies.

        Args:
            metadata: The batch, one value per cache group, and then what ``local.metadata`` returns for it. The tensors
                lie on the host or on the device.
            batch: What the metadata was made of. It is read if there are state layers, or groups that keep state of an
                input sequence.
            tables: The block tables that the metadata was made with. They are read if the batch is.
            inputs: Further tensors of the step, on the host, such as its token ids. They are copied too.

        Returns:
            ``inputs`` on the device.

        Raises:
            BackendError: A layer declares a learned tensor and was bound none, or its backend takes causal batches
                only.
            WrapperError: A wrapper cannot take the step.
        """
        if self._unchecked:
            self._check_bound()
        states = self.states.steps(batch, tables) if self._keeps_states else ()
        slots = NO_SLOTS
        if self._stores_inputs:
            assert batch is not None
            assert tables is not None
            slots = input_slots(batch, tables, metadata[0].slot_mapping.device)
        prepared = self._prepare(metadata, states, slots)
        if self._staging.is_needed:
            prepared, inputs = self._staging.to_device((prepared, inputs))
        if prepared.states:
            self.states.select(prepared.states)
        self._give(self._plan.build(prepared), prepared.kept_rows)
        return inputs

    def capture_step(
        self,
        metadata: Sequence[CommonAttentionMetadata],
        inputs: tuple[torch.Tensor, ...],
        states: Sequence[StateStep] = (),
    ) -> CapturedStep:
        """Begin a step whose tensors stay where they are, for a graph that is captured of it.

        Args:
            metadata: As for ``begin_step``, on the host, at a graph's sizes. The step stores nothing of inputs beside
                tokens.
            inputs: As for ``begin_step``.
            states: What ``states.rounds`` returned for the step, if there are state layers.

        Raises:
            WrapperError: A wrapper cannot take the step.
        """
        prepared = self._prepare(metadata, states)
        memory = StagedMemory.of((prepared, inputs), self._staging.device)
        prepared, inputs = self._staging.to_device((prepared, inputs), memory)
        groups = self._plan.build(prepared)
        captured = CapturedStep.of(memory, groups, prepared.kept_rows, inputs, prepared.states)
        self._give_captured(captured)
        return captured

    def replay_step(
        self,
        captured: CapturedStep,
        metadata: Sequence[CommonAttentionMetadata],
        inputs: tuple[torch.Tensor, ...],
        states: Sequence[StateStep] = (),
    ) -> None:
        """Begin a step in the tensors of one that was captured.

        Args:
            captured: What ``capture_step`` returned.
            metadata: As for ``capture_step``, at the same sizes.
            inputs: As for ``begin_step``, of the same shapes.
            states: As for ``capture_step``, at the same sizes.

        Raises:
            NotReplayableError: Something other than the values of tensors differs from what was captured.
            WrapperError: A wrapper cannot take the step.
        """
        prepared = self._prepare(metadata, states)
        prepared, _ = self._staging.to_device((prepared, inputs), captured.memory)
        captured.refresh(self._plan.build(prepared), prepared.kept_rows)
        self._give_captured(captured)

    def _give_captured(self, captured: CapturedStep) -> None:
        self.states.select(captured.states)
        self._give(captured.groups, captured.kept_rows)

    def _give(self, groups: Sequence[GroupMetadata], kept_rows: torch.Tensor | None) -> None:
        """Give each group's layers what they read in a step."""
        for step, read in zip(self._steps, groups, strict=True):
            step.read = read
        self.kept_rows = kept_rows

    def _check_bound(self) -> None:
        lacking = [layer.spec.name for layer in self._unchecked if layer.lacks_parameters]
        if lacking:
            raise BackendError(
                f"the layers {', '.join(map(repr, lacking))} need learned tensors, and the model bound none; it has to "
                "call bind() of each when it is attached"
            )
        self._unchecked = []

    def _prepare(
        self,
        metadata: Sequence[CommonAttentionMetadata],
        states: Sequence[StateStep],
        input_mappings: Mapping[int, torch.Tensor] = NO_SLOTS,
    ) -> PreparedStep:
        prepared = self._plan.prepare(metadata)
        mappings = {index: metadata[index].slot_mapping for index in self._stores_tokens}
        mappings.update(input_mappings)
        prepared.slots = {
            index: split_mapping(mapping, metadata[index].block_size) for index, mapping in mappings.items()
        }
        prepared.states = states
        if self.skipped and not metadata[0].all_generate:
            prepared.kept_rows = metadata[0].generating_indices
        return prepared

    def __getitem__(self, name: str) -> AttentionLayer:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._layers)


def _named(group: AttentionGroup) -> str:
    """Return a phrase that names the first layer of a group, and its backend."""
    chain = "".join(f" after {wrapper.name!r}" for wrapper in group.wrappers)
    return f"layer {group.layers[0].name!r}, on the backend {group.backend_name!r}{chain}"
