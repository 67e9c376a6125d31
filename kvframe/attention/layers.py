"""All attention layers of a model at run time: begins each step by building what the layers read in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
import torch

from kvframe.attention.batch_metadata import StepBatch, build_metadata, input_slots, split_mapping
from kvframe.attention.build import GroupStep, MetadataPlan, PreparedStep
from kvframe.attention.copies import CopyScratch
from kvframe.attention.entries import AttachedEntryLayer, form_entry_groups
from kvframe.attention.group import AttentionGroup, form_groups
from kvframe.attention.layer import AttentionLayer, QueryStoringLayer, stores_queries
from kvframe.attention.nested import replace_tensors
from kvframe.attention.padding import pad_step
from kvframe.attention.request_order import find_order
from kvframe.attention.staging import HOST, StagedMemory, Staging
from kvframe.attention.state import StateLayers
from kvframe.attention.step import Step
from kvframe.attention.storage import LocalCaches
from kvframe.cache.block_table import BlockTables
from kvframe.contract.backend import KVCache
from kvframe.contract.capture import GraphCapture, NotReplayableError
from kvframe.contract.errors import BackendError
from kvframe.contract.formats import PLAIN
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.order import IntArray
from kvframe.contract.slots import Slots
from kvframe.contract.specs import TOKENS, LayerSpec
from kvframe.contract.state import StateStep
from kvframe.planning.groups import Grouping, group_layers, is_step_local
from kvframe.selection.choice import Choice
from kvframe.selection.select import select_backends
from kvframe.selection.skipping import Skipping

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.loading.registry import Registry

NO_SLOTS: Mapping[int, Slots] = MappingProxyType({})


class Layers(Mapping[str, AttentionLayer]):
    """The attention layers of a model, by name, and its state layers (``states``).

    A host begins a step, and then computes it: a model that is attached calls the layers, each on its pages of the
    pool. A host with pages of its own calls ``write`` and ``attend`` with the step, and may begin several steps before
    it computes the first.

    Invariant: between ``begin_step`` and the next, every layer of a group reads the same metadata.

    Attributes:
        choices: For each attention layer, its wrapper chain, the chosen backend, and why the others were not chosen.
        groups: The attention groups, in the order of their first layers.
        local: The scratch pages of layers that keep nothing of the past.
        entries: The entries that layers keep beside their main state, by their full names.
        states: The layers that keep a state, which the model computes itself on their pages; by name.
        skipped: The layers that compute only the generating tokens of a step, in the order in which they run.
        dtypes: The dtypes of the layers' caches, as they are read.
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
            views: Each layer's state tensors; none of a layer whose pages the host gives with each call.
            device: Where the backends run.
            skipped: The layers that were chosen to be skipped.
            local: The scratch pages of the layers that keep nothing; None if every layer keeps something.
            max_static_copies: The most bytes of the copies of pages that a graph reads; None for any.
            audited: Whether the results of wrappers, and chosen tokens, are checked on the device too; then each step
                waits for it.

        Raises:
            BackendError: A backend could not be set up.
        """
        attending = [layer for layer in layers if layer.query is not None]
        self.choices = tuple(choices)
        self.local = LocalCaches((), device, max_tokens=0, max_reqs=0) if local is None else local
        self._device, self._max_static_copies = device, max_static_copies
        local_indices = self.local.metadata_indices
        self.groups = form_groups(attending, choices, grouping, device, local_indices, lambda: self.copies)
        if entries := [layer for layer in layers if layer.entry_of is not None]:
            self.groups += form_entry_groups(entries, grouping, device)
        views = {**views, **self.local.views}
        stored_specs = [layer.spec for layer in layers if layer.spec is not None and layer.name in views]
        states = (tensor for spec in stored_specs for tensor in spec.in_format(PLAIN).state_tensors().values())
        self.dtypes = frozenset(getattr(torch, tensor.dtype) for tensor in states)
        keeping = [layer for layer in layers if layer.query is None and layer.name in views and not layer.entry_of]
        self.states = StateLayers(keeping, grouping, views)
        self._keeps_states = bool(keeping)
        self._is_staged = device.type != HOST.type
        self.skipped = tuple(skipped)
        self.kept_rows: torch.Tensor | None = None
        self._steps = tuple(GroupStep(group, index) for index, group in enumerate(self.groups))
        self.entries = {
            entry.name: AttachedEntryLayer(entry, views[entry.name], step)
            for step in self._steps
            for entry in step.group.layers
            if entry.entry_of is not None
        }
        self._layers: dict[str, AttentionLayer] = {
            layer.name: (QueryStoringLayer if stores_queries(layer) else AttentionLayer)(
                layer, views[layer.name] if views else {}, step, self.entries
            )
            for step in self._steps
            for layer in step.group.layers
            if layer.entry_of is None
        }
        self._unchecked = [layer for layer in self._layers.values() if layer.lacks_parameters]
        self._order = {layer.name: index for index, layer in enumerate(attending)}
        pages = {
            group.cache_group: tensor
            for group in self.groups
            if group.layers[0].entry_of is None
            for tensor in [*self._layers[group.layers[0].name].kv_cache.values()][:1]
        }
        # A host with pages of its own has blocks of one size, and may not know exact lengths.
        sizes = {layer.spec.block_size for layer in attending if layer.spec is not None}
        self._block_sizes = frozenset() if views else frozenset(sizes)
        self._needs_exact = any(group.builder.needs_exact_lens for group in self.groups)
        self._builds_on_host = self._is_staged and any(group.builder.on_host for group in self.groups)
        num_cache_groups = len(grouping.groups) + self.local.num_groups
        self._plan = MetadataPlan(self.groups, num_cache_groups, pages, audited=audited)
        choosing = [step for step in self._steps if step.group.wrapped.query and step.group.wrapped.query.choice]
        self._audited_steps = choosing if audited else []
        stores = {group.cache_group for group in self.groups if group.writes}
        self._input_groups = frozenset(group.index for group in grouping.groups if group.spec.sequence != TOKENS)
        self._stores_tokens = sorted(stores - self._input_groups)
        self._stores_inputs = bool(stores & self._input_groups)
        orders = [group.builder.batch_order for group in self.groups]
        self._orders = tuple(dict.fromkeys(order for order in orders if order is not None))

    @classmethod
    def on_host_pages(
        cls,
        layers: Sequence[LayerSpec],
        stack: Stack,
        registry: Registry,
        device: torch.device,
        *,
        skipped: Collection[str] = (),
        owners: Sequence[LayerSpec] = (),
    ) -> Layers:
        """Return layers that share one cache group of a host: its pages, its block table, its scheduler.

        Args:
            layers: The layers, in the order they run, all with pages of the host's group.
            stack: Chooses their wrapper chains and backends.
            registry: Where backends and wrappers are looked up (``load_plugins(stack.plugins).registry``).
            device: Where the host computes.
            skipped: The layers for which the host computes only the tokens that generate. Their chains begin with the
                wrapper ``prefill_skipping`` of the stack.
            owners: Layers of the host's group whose caches some of ``layers`` read, and which are served elsewhere.

        Raises:
            BackendError: No backend serves a layer, or the named one cannot, or it could not be set up. Or a layer
                keeps nothing of the tokens of its own request, so that a host's batch does not say what it computes.
            WrapperError: A wrapper cannot serve a layer, or is at a wrong place in its chain.
            KVFrameError: What else ``select_backends`` raises.
        """
        for layer in layers:
            check_on_host_pages(layer)
        choices = select_backends(layers, stack, registry, device.type, Skipping(layers=tuple(skipped)))
        grouping = group_layers([*owners, *layers])
        # The host has one block table for all of them.
        names = tuple(name for group in grouping.groups for name in group.layers)
        stored_specs = tuple(spec for group in grouping.groups for spec in group.stored)
        groups = (attrs.evolve(grouping.groups[0], layers=names, stored=stored_specs),)
        return cls(layers, choices, attrs.evolve(grouping, groups=groups), {}, device, tuple(skipped))

    @cached_property
    def copies(self) -> CopyScratch:
        """Memory for copies of pages, for backends that do not read the format of their layers."""
        return CopyScratch(self._device, self._max_static_copies)

    @cached_property
    def _staging(self) -> Staging:
        """What brings steps to the device. A host that is the device needs none, unless it captures steps."""
        return Staging(self._device)

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

    def order_for(self, query_lens: IntArray) -> IntArray | None:
        """Return the order in which to pack a step's requests, so that the backends need not reorder them.

        Args:
            query_lens: ``[num_reqs]``: tokens of each request that the step computes.

        Returns:
            ``[num_reqs]``: the requests in order; None if they may stay as they are.
        """
        return find_order(self._orders, query_lens) if self._orders else None

    # --- a step -------------------------------------------------------------------------------------------------------

    def build_metadata(self, batch: StepBatch, tables: BlockTables) -> tuple[CommonAttentionMetadata, ...]:
        """Return a step's metadata, as ``begin_step`` takes it: on the host unless an extension has no host copy.

        Args:
            batch: At least one request, each with at least one token.
            tables: The groups' block tables, with blocks for every token of the batch and of its inputs.
        """
        device = HOST
        if batch.extensions:
            extensions = {
                name: attrs.evolve(extension, values=extension.values_cpu)
                for name, extension in batch.extensions.items()
                if extension.values_cpu is not None
            }
            if len(extensions) < len(batch.extensions):
                device = self._device
            else:
                batch = attrs.evolve(batch, extensions=extensions)
        metadata = build_metadata(batch, tables, device)
        return metadata if not self.local.metadata_indices else (*metadata, *self.local.metadata(batch))

    def pad_metadata(
        self,
        metadata: Sequence[CommonAttentionMetadata],
        *,
        num_reqs: int,
        num_tokens: int,
        num_generating: int,
        max_query_len: int,
        max_seq_len: int,
        max_input_len: int = 0,
    ) -> tuple[CommonAttentionMetadata, ...]:
        """Return a step's metadata at a graph's sizes, as ``capture_step`` and ``replay_step`` take it.

        Added requests have no tokens, added tokens lie in the null page, added generating rows repeat the last one.

        Args:
            metadata: What ``build_metadata`` returned; never written to.
            num_reqs: The graph's requests.
            num_tokens: Its packed tokens.
            num_generating: Its generating rows, at least one.
            max_query_len: The most new tokens of a request in any batch that it is replayed for.
            max_seq_len: The longest request in any such batch.
            max_input_len: The longest input beside the tokens in any such batch.

        Raises:
            BatchError: The step does not fit into these sizes, or the sizes do not fit together.
        """
        return pad_step(
            metadata,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_generating=num_generating,
            max_query_len=max_query_len,
            max_seq_lens=[
                max_input_len if index in self._input_groups else max_seq_len for index in range(len(metadata))
            ],
        )

    def begin_step(
        self,
        metadata: Sequence[CommonAttentionMetadata],
        *,
        batch: StepBatch | None = None,
        tables: BlockTables | None = None,
        inputs: tuple[torch.Tensor, ...] = (),
    ) -> Step:
        """Build every attention group's metadata of a step, and work out which states the state layers read and write.

        Wrapper chains are applied on the host if the metadata lies there, and builders that build on the host do so.
        Then one copy brings everything to the device, and the other builders build. A builder may make further copies.

        Args:
            metadata: The batch, one value per cache group, and then what ``local.metadata`` returns for it. The tensors
                lie on the host or on the device. It is not written to. Its fields with the suffix ``_cpu`` are not read
                after this returns; those on the device are, until the layers have run.
            batch: What the metadata was made of. It is read if there are state layers, or groups that keep state of an
                input sequence.
            tables: The block tables that the metadata was made with. They are read if the batch is.
            inputs: Further tensors of the step, on the host, such as its token ids. They are copied too.

        Raises:
            BackendError: A layer declares a learned tensor and was bound none. Or the batch of a host with pages of its
                own has blocks of another size than the layers' specs. Or a backend or its builder cannot take the step:
                it is not causal (``mask_bidirectional``), has only upper bounds of lengths (``inexact_lens``), or says
                for each request whether it is causal (``causal_per_request``). Or a builder raised something
                (``failed``).
            WrapperError: A wrapper cannot take the step.
        """
        states = self.states.steps(batch, tables) if self._keeps_states else ()
        slots = NO_SLOTS
        if self._stores_inputs:
            assert batch is not None
            assert tables is not None
            slots = input_slots(batch, tables, metadata[0].slot_mapping.device)
        prepared = self._prepare(metadata, states, slots)
        if self._is_staged:
            prepared, inputs = self._staging.to_device((prepared, inputs))
        return self._select(Step(self._plan.build(prepared), inputs, prepared.kept_rows, prepared.states))

    def capture_step(
        self,
        metadata: Sequence[CommonAttentionMetadata],
        inputs: tuple[torch.Tensor, ...] = (),
        states: Sequence[StateStep] = (),
    ) -> Step:
        """Begin a step whose tensors stay where they are, for a graph that is captured of it.

        Args:
            metadata: As for ``begin_step``, at a graph's sizes. The step stores nothing of inputs beside tokens.
            inputs: As for ``begin_step``.
            states: What ``states.rounds`` returned for the step, if there are state layers.

        Raises:
            BackendError: As for ``begin_step``.
            WrapperError: A wrapper cannot take the step.
        """
        prepared = self._prepare(metadata, states)
        memory = StagedMemory.of((prepared, inputs), self._device)
        prepared, inputs = self._staging.to_device((prepared, inputs), memory)
        step = Step(self._plan.build(prepared), inputs, prepared.kept_rows, prepared.states)
        return self._select(step.kept_in(memory))

    def replay_step(
        self,
        step: Step,
        metadata: Sequence[CommonAttentionMetadata],
        inputs: tuple[torch.Tensor, ...] = (),
        states: Sequence[StateStep] = (),
    ) -> None:
        """Begin a step in the tensors of one that was captured.

        Args:
            step: What ``capture_step`` returned.
            metadata: As for ``capture_step``, at the same sizes.
            inputs: As for ``begin_step``, of the same shapes.
            states: As for ``capture_step``, at the same sizes.

        Raises:
            NotReplayableError: The step was not captured, or something other than the values of tensors differs.
            BackendError: As for ``begin_step``.
            WrapperError: A wrapper cannot take the step.
        """
        if step.memory is None:
            raise NotReplayableError("the step was not captured: begin it by capture_step")
        prepared = self._prepare(metadata, states)
        prepared, inputs = self._staging.to_device((prepared, inputs), step.memory)
        step.refresh(Step(self._plan.build(prepared), inputs, prepared.kept_rows, prepared.states))
        self._select(step)

    def _select(self, step: Step) -> Step:
        """Let all layers read a step."""
        if step.states:
            self.states.select(step.states)
        for group_step, group_metadata in zip(self._steps, step.groups, strict=True):
            group_step.read = group_metadata
        self.kept_rows = step.kept_rows
        return step

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
        slots_of_inputs: Mapping[int, Slots] = NO_SLOTS,
    ) -> PreparedStep:
        if self._unchecked:
            self._check_bound()
        if self._block_sizes:
            metadata = [self._of_host(common) for common in metadata]
        for step in self._audited_steps:
            step.audited = metadata[step.group.cache_group]
        prepared = self._plan.prepare(metadata)
        stored = [(index, metadata[index]) for index in self._stores_tokens]
        slots = {index: split_mapping(common.slot_mapping, common.block_size) for index, common in stored}
        prepared.slots = {**slots, **slots_of_inputs}
        prepared.states = states
        if self.skipped and not metadata[0].all_generate:
            prepared.kept_rows = metadata[0].generating_indices
        return prepared

    def _of_host(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the batch of a host with pages of its own as the wrappers and builders take it."""
        if self._block_sizes != {metadata.block_size}:
            raise BackendError(
                f"the batch has blocks of {metadata.block_size} tokens, and the layers' specs have "
                f"{', '.join(map(str, sorted(self._block_sizes)))}; give both the host's block size"
            )
        if self._needs_exact and not metadata.exact_lens and metadata.seq_lens.is_cpu:
            exact = metadata.seq_lens.clone()
            metadata = attrs.evolve(metadata, seq_lens_cpu=exact, max_seq_len=int(exact.max()), exact_lens=True)
        if self._builds_on_host:
            metadata = replace_tensors(metadata, lambda tensor: tensor.to(HOST))
        return metadata

    # --- a layer ------------------------------------------------------------------------------------------------------

    def write(self, step: Step, layer: str, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache) -> None:
        """Store a step's keys and values in a host's pages, unless the layer shares another's cache.

        Args:
            step: The step.
            layer: The layer's name.
            key: ``[num_tokens, num_kv_heads, head_size], device``.
            value: ``[num_tokens, num_kv_heads, head_size_v], device``.
            kv_cache: Its state tensors, each ``[num_blocks, *StateTensor.shape], device``, of any strides; written to.

        Raises:
            BackendError: There is no such layer, or as ``AttentionLayer.write`` raises it.
        """
        served = self._of(layer)
        served.write(key, value, kv_cache, step.groups[served.step.index])

    def attend(
        self,
        step: Step,
        layer: str,
        query: torch.Tensor,
        kv_cache: KVCache,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a layer's attention in a step, over a host's pages.

        Args:
            step: The step.
            layer: The layer's name.
            query: ``[num_tokens, num_heads, head_size], device``; of a skipped layer, the tokens that generate.
            kv_cache: The state tensors of the layer, or of the layer whose cache it shares; not written to.
            sinks: ``[num_heads], device``: learned sink logits; None unless the layer has them.
            out: Where the result has to be, contiguous, in the query's dtype; None for a new tensor.

        Returns:
            The attention of ``query``, ``[num_tokens, num_heads, head_size_v], device``: ``out`` if it is given.

        Raises:
            BackendError: There is no such layer, or as ``AttentionLayer.attend`` raises it.
        """
        served = self._of(layer)
        return served.attend(query, kv_cache, step.groups[served.step.index], sinks, out)

    def _of(self, layer: str) -> AttentionLayer:
        served = self._layers.get(layer)
        if served is None:
            raise BackendError(f"there is no layer {layer!r} here; there are {', '.join(map(repr, self._layers))}")
        return served

    def __getitem__(self, name: str) -> AttentionLayer:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._layers)


def check_on_host_pages(layer: LayerSpec) -> None:
    """Raise ``BackendError`` for a layer that a host cannot compute on pages of its own.

    Args:
        layer: The layer.
    """
    if layer.spec is None or layer.query is None or layer.spec.sequence != TOKENS or is_step_local(layer):
        raise BackendError(
            f"layer {layer.name!r} cannot be hosted: it does not attend to the tokens of its own request and keep "
            "them; give layers with a cache spec over tokens and a query side"
        )
    if layer.spec.entries or layer.spec.inputs(layer.query):
        raise BackendError(
            f"layer {layer.name!r} cannot be hosted: its type {layer.spec.kind!r} has inputs, or entries beside its "
            "state, for which a host's call and pages have no place; give it another type"
        )
    if layer.spec.prompt_budget is not None:
        raise BackendError(
            f"layer {layer.name!r} cannot be hosted: its type {layer.spec.kind!r} gives up tokens of prompts, and the "
            "host would keep their pages; give it another type"
        )


def _named(group: AttentionGroup) -> str:
    """Return a phrase that names the first layer of a group, and its backend."""
    chain = "".join(f" after {wrapper.name!r}" for wrapper in group.wrappers)
    return f"layer {group.layers[0].name!r}, on the backend {group.backend_name!r}{chain}"
