"""Cache plans of a model whose layers are spread over several devices.

Each rank plans its own layers and its own memory. A group's number, the tokens of its blocks, the pages of a slab and
the number of slabs are the same on all ranks that keep state. Cache managers on different ranks therefore make the same
decisions if they get the same calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvframe.contract.errors import PlanError, SpecError
from kvframe.contract.specs import LayerSpec
from kvframe.planning.groups import Grouping, group_layers
from kvframe.planning.plan import KVCachePlan, plan_cache


@attrs.frozen(kw_only=True)
class RankPlans:
    """The plans of all ranks of a model.

    Attributes:
        whole: The grouping of all layers.
        groupings: Per rank, its layers of each group, by the group's number in ``whole``; no groups for a rank whose
            layers keep no state.
        plans: Per rank, its cache plan; an empty plan for a rank whose layers keep no state.
        prefix_caching: Whether requests reuse blocks of a common prefix, on every rank or on none.
    """

    whole: Grouping
    groupings: tuple[Grouping, ...]
    plans: tuple[KVCachePlan, ...]
    prefix_caching: bool

    @property
    def whole_prompts(self) -> bool:
        """Whether every prompt must be computed in one step, on all ranks if one rank requires it."""
        return self.whole.whole_prompts

    @property
    def note(self) -> str | None:
        """One sentence for people that says why prompts are computed in one step; None if every layer keeps state."""
        return self.whole.note


def plan_ranks(
    ranks: Sequence[Sequence[LayerSpec]],
    *,
    memory_bytes: Sequence[int],
    max_model_len: int,
    max_num_batched_tokens: int,
    max_input_lens: Mapping[str, int] | None = None,
    hybrid: bool = True,
    prefix_caching: bool = True,
) -> RankPlans:
    """Plan the caches of a model whose layers are spread over ranks.

    Args:
        ranks: Each rank's layers, in the order they run.
        memory_bytes: The most bytes that each rank allocates.
        max_model_len: The longest request, in tokens.
        max_num_batched_tokens: The most tokens that one step computes.
        max_input_lens: For each sequence that requests bring beside their tokens, its most tokens.
        hybrid: As for ``group_layers``.
        prefix_caching: Whether prefixes are cached, if all layers allow it.

    Raises:
        SpecError: As for ``group_layers``, or a layer reads the cache of a layer of another rank.
        PlanError: As for ``plan_cache``; the message names the rank.
    """
    whole = group_layers([layer for layers in ranks for layer in layers], hybrid=hybrid)
    rank_of = {layer.name: rank for rank, layers in enumerate(ranks) for layer in layers}
    for layer, target in whole.follows.items():
        if rank_of[layer] != rank_of[target]:
            raise SpecError(
                f"layer {layer!r} of rank {rank_of[layer]} shares the cache of {target!r}, which is on rank "
                f"{rank_of[target]}; put them on one rank"
            )

    def plan(grouping: Grouping, memory: int, pages_per_slab: Sequence[int] | None) -> KVCachePlan:
        return plan_cache(
            grouping,
            memory_bytes=memory,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_input_lens=max_input_lens,
            pages_per_slab=pages_per_slab if grouping.groups else None,
        )

    groupings = tuple(_part_of(whole, {layer.name for layer in layers}) for layers in ranks)
    used = sum(memory for memory, part in zip(memory_bytes, groupings, strict=True) if part.groups)
    pages_per_slab = [group.pages_per_slab for group in plan(whole, used, None).groups]
    plans = []
    for rank, (grouping, memory) in enumerate(zip(groupings, memory_bytes, strict=True)):
        try:
            plans.append(plan(grouping, memory, pages_per_slab))
        except PlanError as error:
            raise PlanError(f"rank {rank}: {error}") from error
    num_slabs = min((each.num_slabs for each in plans if each.groups), default=0)
    return RankPlans(
        whole=whole,
        groupings=groupings,
        plans=tuple(
            # The rest after the slabs differs between ranks, so no rank uses it.
            attrs.evolve(each, num_slabs=num_slabs, num_rest_pages=0) if each.groups else each
            for each in plans
        ),
        prefix_caching=prefix_caching and not whole.whole_prompts,
    )


def _part_of(whole: Grouping, names: set[str]) -> Grouping:
    """Return a rank's part of each group; no groups if it has none of their layers."""
    groups = tuple(
        attrs.evolve(
            group,
            layers=tuple(layer for layer in group.layers if layer in names),
            stored=tuple(spec for layer, spec in zip(group.layers, group.stored, strict=True) if layer in names),
        )
        for group in whole.groups
    )
    return Grouping(
        groups=groups if any(group.layers for group in groups) else (),
        follows={layer: target for layer, target in whole.follows.items() if layer in names},
        step_local=tuple(layer for layer in whole.step_local if layer in names),
    )
