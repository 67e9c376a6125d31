"""Set-up: what a stack does with a model, as one value that planning, explaining and serving read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvframe import engine
from kvframe.config.choices import make_page_stores, make_part
from kvframe.config.options import Rule, Use
from kvframe.contract.errors import StackError, shown
from kvframe.contract.formats import PLAIN
from kvframe.contract.page_store import PageStore
from kvframe.hosting.drafts import Drafts, check_draft_layers
from kvframe.planning.groups import Grouping, group_layers
from kvframe.planning.layer_file import LayerFiles
from kvframe.planning.layer_specs import make_layer_specs
from kvframe.planning.recognise import find_reader, with_dtype
from kvframe.planning.sizing import choose_max_model_len, copied_bytes, num_host_slabs, plan_for_stack
from kvframe.planning.tiers import TierCapacity, host_capacity, store_capacity
from kvframe.selection.skipping import DRAFTING, Skipping, find_skipping

if TYPE_CHECKING:
    from kvframe.attention.layers import Layers
    from kvframe.cache.coordinator import TokenMover
    from kvframe.config.stack import Stack
    from kvframe.contract.backend import KVCache
    from kvframe.contract.description import ModelDescription
    from kvframe.contract.event_publisher import EventPublisher
    from kvframe.contract.specs import LayerSpec
    from kvframe.loading.registry import Registry
    from kvframe.planning.plan import KVCachePlan
    from kvframe.planning.recognise import FoundAdapter
    from kvframe.selection.choice import Choice


@attrs.frozen(kw_only=True, eq=False, slots=False)
class Setup:
    """What a stack does with a model: its layers, their groups, the choices for each layer, and the cache plan.

    Each part is worked out when it is first read, so that a plan of plain layers imports no backend, and choices need
    no memory size.

    Attributes:
        description: The model, whose layers may have other types than its adapter described.
        layers: The specs of its layers, in the order they run.
        stack: The stack, with a device and a dtype.
        registry: Where names are looked up.
        draft_layers: The layers that draft for the model, by their names in the plan; none without a draft model.
        drafts: What the stack's proposer adds to the model.
        num_local_ranks: The number of ranks of this machine, among which the CPU's free memory is divided.
    """

    description: ModelDescription
    layers: tuple[LayerSpec, ...]
    stack: Stack
    registry: Registry
    draft_layers: tuple[LayerSpec, ...] = ()
    drafts: Drafts = attrs.field(factory=Drafts)
    num_local_ranks: int = 1

    @classmethod
    def of(cls, description: ModelDescription, stack: Stack, registry: Registry, *, dtype: str | None = None) -> Setup:
        """Make the specs of a model's layers, and of those that draft for it.

        Args:
            description: The model.
            stack: What to use, with a device and a dtype.
            registry: Where names are looked up.
            dtype: The model's dtype by name, in place of the stack's; None if the stack names it.

        Raises:
            StackError: A rule or the format does not fit the model, or what drafts cannot continue its requests.
            SpecError: No plugin provides a layer's kind, or the options do not fit it.
            ModelError: There is no such draft model.
        """
        if dtype is not None:
            stack = attrs.evolve(stack, model=attrs.evolve(stack.model, dtype=dtype))
        drafts = Drafts()
        if stack.model.drafts is not None:
            proposer = make_part("proposer", stack.model.drafts, registry)
            drafts = engine.find_drafts(proposer, description, stack, registry)
        described = drafts.beside(description) if drafts.layers else description
        specs = make_layer_specs(described, registry, stack, stack.model.dtype, drafts.max_tokens)
        names = {layer.name for layer in description.layers}
        own_specs = tuple(spec for spec in specs if spec.name in names or spec.entry_of in names)
        draft_specs = specs[len(own_specs) :]
        if draft_specs:
            check_draft_layers(draft_specs, stack)
        return cls(
            description=description,
            layers=own_specs,
            stack=stack,
            registry=registry,
            draft_layers=draft_specs,
            drafts=drafts,
        )

    @classmethod
    def read(
        cls,
        path: Path,
        stack: Stack,
        registry: Registry,
        *,
        runs_here: bool = True,
        reader: FoundAdapter | LayerFiles | None = None,
    ) -> Setup:
        """Describe the model at a path without its weights, and set it up.

        Args:
            path: A model's folder, its config file, or a layer file.
            stack: What to use; a device and a dtype that it leaves open are chosen.
            registry: Where names are looked up.
            runs_here: Whether the model would run on this machine; if not, it is planned for another one. A layer file
                is then planned without torch, which alone knows this machine's devices.
            reader: What reads the path; looked up unless given.

        Raises:
            ModelError: The path is not a model, or is a model that no adapter can describe.
            KVFrameError: What else ``of`` raises.
        """
        reader = find_reader(path, registry) if reader is None else reader
        if runs_here or not isinstance(reader, LayerFiles):
            stack = stack.with_device()
        stack = with_dtype(stack, path, reader, runs_here=runs_here)
        return cls.of(reader.describe(path), stack, registry)

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """The model's layers, and then those that draft for it."""
        return (*self.layers, *self.draft_layers)

    @cached_property
    def grouping(self) -> Grouping:
        """The cache groups of all layers."""
        return group_layers(self.all_layers, hybrid=self.stack.cache.hybrid)

    @cached_property
    def skipping(self) -> Skipping:
        """Which layers compute only the tokens that generate."""
        heads = self.draft_layers if self.drafts.are_heads else ()
        if self.stack.model.prefill_skipping is None:
            return Skipping(heads=tuple(heads))
        return find_skipping(self.layers, heads)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """For each layer of the model that attends, its wrapper chain and backend, and why not the others.

        Raises:
            KVFrameError: What ``select_backends`` raises.
        """
        return self._choose(self.layers, self.skipping)

    @cached_property
    def draft_choices(self) -> tuple[Choice, ...]:
        """The same for the layers that draft; by their names in the plan."""
        return self._choose(self.draft_layers, DRAFTING)

    @property
    def device_type(self) -> str:
        """The type of the device, such as ``"cuda"``."""
        return self.stack.model.device.partition(":")[0]

    @property
    def note(self) -> str | None:
        """One sentence on what the model and its stack rule out together; None if there is nothing to say."""
        return self.grouping.note or self.skipping.note

    @cached_property
    def max_model_len(self) -> int:
        """The most tokens of a request.

        Raises:
            StackError: The stack asks for longer requests than the model takes.
        """
        return choose_max_model_len(self.description, self.stack)

    @cached_property
    def layers_on_copies(self) -> list[LayerSpec]:
        """The layers whose backends get copies of their pages, because they do not read their format."""
        if all(layer.spec is None or layer.spec.kv_format == PLAIN for layer in self.all_layers):
            return []  # every backend reads plain pages, so none has to be imported
        on_copies = {choice.layer for choice in (*self.choices, *self.draft_choices) if choice.on_copies}
        return [layer for layer in self.all_layers if layer.name in on_copies]

    @cached_property
    def plan(self) -> KVCachePlan:
        """The cache plan of the stack's memory and limits.

        Raises:
            PlanError: The memory is too small, or it is ``"auto"`` and the free memory is unknown.
        """
        copied_layers = self.layers_on_copies if self.stack.cache.memory == "auto" else []
        return plan_for_stack(
            self.grouping,
            self.stack,
            self.max_model_len,
            self.description.max_input_lens,
            copied_layers,
            self.num_local_ranks,
        )

    def num_host_slabs(self, plan: KVCachePlan) -> int:
        """Return the number of slabs for evicted blocks in CPU memory; 0 without host memory.

        Args:
            plan: The plan of the pool: ``plan``, or what several ranks agreed on.

        Raises:
            PlanError: The memory does not hold one slab for each group.
        """
        return num_host_slabs(plan, self.stack)

    @property
    def caches_prefixes(self) -> bool:
        """Whether later requests find the prefixes of earlier ones."""
        # The state of a token of a bidirectional prompt depends on the whole prompt, so no other prompt can use it.
        has_prefixes = not self.grouping.whole_prompts and not self.description.bidirectional_prompts
        return self.stack.cache.prefix_caching and has_prefixes

    def tiers(self) -> list[TierCapacity]:
        """Return what host memory and the page stores hold, in the order in which they are asked.

        Raises:
            StackError: A page store is unknown, cannot be imported, or does not take its options.
            PlanError: The host memory does not hold one slab for each group.
        """
        stores, plan = self.make_page_stores(), self.plan
        if not self.caches_prefixes or plan.shortest_prefix is None:
            return []
        num_slabs = self.num_host_slabs(plan)
        host = [host_capacity(plan, num_slabs)] if num_slabs else []
        return [*host, *(store_capacity(plan, store.name, _capacity_of(store)) for store in stores)]

    def make_part(self, kind: str, use: Use) -> Any:
        """Return a new instance of what the stack names, such as its policy of eviction, with its options.

        Args:
            kind: A key of ``[plugins.owners]``, such as ``"eviction"``.
            use: What the stack says, such as ``stack.cache.eviction``.

        Raises:
            StackError: The name is unknown, its class cannot be imported, or does not take the options.
        """
        return make_part(kind, use, self.registry)

    def make_page_stores(self) -> list[PageStore]:
        """Return the page stores of the stack, in the order in which they are asked.

        Raises:
            StackError: A store is unknown, cannot be imported, or does not take its options.
        """
        return make_page_stores(self.stack.page_stores, self.registry)

    def make_event_publisher(self) -> EventPublisher | None:
        """Return the publisher of the cache's events; None if the stack names none, or no prefix is cached.

        Raises:
            StackError: The publisher is unknown, cannot be imported, or does not take its options.
        """
        use = self.stack.cache.events
        return self.make_part("event_publisher", use) if use is not None and self.caches_prefixes else None

    def make_mover(self, views: Mapping[str, KVCache]) -> TokenMover | None:
        """Return what moves the tokens that layers keep of a prompt; None if all layers keep whole prompts.

        Args:
            views: Each layer's state tensors in the pool.
        """
        if all(layer.spec is None or layer.spec.prompt_budget is None for layer in self.all_layers):
            return None
        from kvframe.attention.kept_tokens import KeptTokens

        return KeptTokens(self.all_layers, self.grouping, views)

    def make_layers(
        self,
        views: Mapping[str, KVCache],
        plan: KVCachePlan | None = None,
        choices: Sequence[Choice] | None = None,
        layers: Sequence[LayerSpec] | None = None,
    ) -> Layers:
        """Return the attention layers of the model, and its state layers, on the pages of a pool.

        Args:
            views: Each layer's state tensors in the pool (``KVCacheStorage.views``).
            plan: The plan of the pool; ``plan`` unless several ranks agreed on another one.
            choices: Other wrapper chains and backends for the layers that attend; ``choices`` unless given.
            layers: Which of the model's layers; all unless given.

        Raises:
            BackendError: A backend could not be set up.
            PlanError: The device has no memory for the scratch pages of layers that keep nothing of the past.
        """
        import torch

        from kvframe.attention.layers import Layers
        from kvframe.attention.storage import LocalCaches
        from kvframe.selection.choice import layers_on_copies

        choices = self.choices if choices is None else choices
        layers = self.layers if layers is None else layers
        limits, device = self.stack.limits, torch.device(self.stack.model.device)
        local = LocalCaches(layers, device, max_tokens=limits.max_num_batched_tokens, max_reqs=limits.max_num_seqs)
        num_copied_bytes = copied_bytes(plan or self.plan, self.grouping, layers_on_copies(layers, choices))
        return Layers(
            layers,
            choices,
            self.grouping,
            views,
            device,
            self.skipping.layers,
            local,
            num_copied_bytes,
            audited=self.stack.cache.audit,
        )

    def choose_on(self, backend: str, layer: LayerSpec, *, keep_wrappers: bool = True) -> Choice:
        """Return what would be chosen for a layer if the stack named its backend.

        Args:
            backend: The backend's registered name.
            layer: A layer of the model, which attends.
            keep_wrappers: Whether the layer keeps its wrapper chain. A wrapper of prefill skipping always stays,
                because the layers after it get no other tokens.

        Raises:
            BackendError: The backend cannot serve the layer.
            KVFrameError: What else ``choices`` raises.
        """
        rule = Rule(layers=escape(layer.name), backend=Use(backend), wrappers=None if keep_wrappers else ())
        stack = attrs.evolve(self.stack, rules=(*self.stack.rules, rule))
        (choice,) = attrs.evolve(self, stack=stack)._choose((layer,), self.skipping)
        return choice

    def _choose(self, layers: tuple[LayerSpec, ...], skipping: Skipping) -> tuple[Choice, ...]:
        from kvframe.selection.select import select_backends

        return select_backends(layers, self.stack, self.registry, self.device_type, skipping)


def _capacity_of(store: PageStore) -> int | None:
    """Return the most bytes of a store's records; raise ``StackError`` if it answers something else."""
    capacity: object = store.capacity
    if capacity is not None and (type(capacity) is not int or capacity < 0):
        raise StackError(
            f"page store {store.name!r}: capacity must be a number of bytes or None, not {shown(capacity)}"
        )
    return store.capacity
