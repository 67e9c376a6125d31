"""Set-up: what a stack does with a model, as one value that planning, explaining and serving read."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvframe.contract.formats import PLAIN
from kvframe.hosting.drafts import check_draft_layers, find_drafts
from kvframe.planning.groups import Grouping, group_layers, make_layer_specs
from kvframe.planning.layer_file import is_layer_file
from kvframe.planning.machine import with_device, with_dtype
from kvframe.planning.recognise import describe_model
from kvframe.planning.sizing import choose_max_model_len, num_host_slabs, plan_for_stack
from kvframe.selection.skipping import DRAFTING, Skipping, find_skipping

if TYPE_CHECKING:
    from kvframe.config.options import Rule
    from kvframe.config.stack import Stack
    from kvframe.contract.description import ModelDescription
    from kvframe.contract.specs import LayerSpec
    from kvframe.loading.registry import Registry
    from kvframe.planning.plan import KVCachePlan
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
        drafts_with_heads: Whether these are the model's prediction heads, which run after its last layer.
        num_local_ranks: The number of ranks of this machine, among which the CPU's free memory is divided.
    """

    description: ModelDescription
    layers: tuple[LayerSpec, ...]
    stack: Stack
    registry: Registry
    draft_layers: tuple[LayerSpec, ...] = ()
    drafts_with_heads: bool = False
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
            stack = attrs.evolve(stack, engine=attrs.evolve(stack.engine, dtype=dtype))
        drafts = find_drafts(description, stack, registry)
        specs = make_layer_specs(drafts.beside(description), registry, stack, stack.engine.dtype, drafts.max_tokens)
        own, drafting = specs[: len(description.layers)], specs[len(description.layers) :]
        check_draft_layers(drafting, stack)
        return cls(
            description=description,
            layers=own,
            stack=stack,
            registry=registry,
            draft_layers=drafting,
            drafts_with_heads=drafts.are_heads,
        )

    @classmethod
    def read(cls, path: Path, stack: Stack, registry: Registry, *, runs_here: bool = True) -> Setup:
        """Describe the model at a path without its weights, and set it up.

        Args:
            path: A model's folder, its config file, or a layer file.
            stack: What to use; a device and a dtype that it leaves open are chosen.
            registry: Where names are looked up.
            runs_here: Whether the model would run on this machine; if not, it is planned for another one. A layer file
                is then planned without torch, which alone knows this machine's devices.

        Raises:
            ModelError: The path is not a model, or is a model that no adapter can describe.
            KVFrameError: What else ``of`` raises.
        """
        if runs_here or not is_layer_file(path):
            stack = with_device(stack)
        stack = with_dtype(stack, path, registry, runs_here=runs_here)
        return cls.of(describe_model(path, registry), stack, registry)

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
        heads = self.draft_layers if self.drafts_with_heads else ()
        return find_skipping(self.layers, heads, is_on=self.stack.engine.prefill_skipping is not None)

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
        return self.stack.engine.device.partition(":")[0]

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
        copied = self.layers_on_copies if self.stack.cache.memory == "auto" else []
        return plan_for_stack(
            self.grouping,
            self.stack,
            self.max_model_len,
            self.description.max_input_lens,
            copied,
            self.num_local_ranks,
        )

    def num_host_slabs(self, plan: KVCachePlan) -> int:
        """Return the number of slabs for preempted requests in CPU memory; 0 if requests are not swapped.

        Args:
            plan: The plan of the pool: ``plan``, or what several ranks agreed on.

        Raises:
            PlanError: The memory does not hold one slab for each group.
        """
        return num_host_slabs(plan, self.stack)

    def choose_under(self, rule: Rule, layer: LayerSpec) -> Choice:
        """Return what would be chosen for a layer of the model if the stack had one more rule.

        Args:
            rule: The rule.
            layer: The layer, which attends.

        Raises:
            KVFrameError: What ``choices`` raises.
        """
        stack = attrs.evolve(self.stack, rules=(*self.stack.rules, rule))
        (choice,) = attrs.evolve(self, stack=stack)._choose((layer,), self.skipping)
        return choice

    def _choose(self, layers: tuple[LayerSpec, ...], skipping: Skipping) -> tuple[Choice, ...]:
        from kvframe.selection.select import select_backends

        return select_backends(layers, self.stack, self.registry, self.device_type, skipping)
