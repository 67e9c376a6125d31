"""Cache plans of ranks that compute shares of the same layers: each rank has some of a layer's heads.

Each rank plans its own memory. A group's number, the tokens of its blocks, the pages of a slab and the number of slabs
are the same on all ranks. Cache managers on different ranks therefore make the same decisions if they get the same
calls. The shares of a layer have one name, and their specs differ in their layout only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvframe.contract.errors import PlanError, SpecError, listed, shown
from kvframe.contract.specs import LayerSpec
from kvframe.planning.groups import Grouping, group_layers, placement_of, stored_state
from kvframe.planning.plan import KVCachePlan, plan_cache


def plan_ranks(
    ranks: Sequence[Sequence[LayerSpec]],
    *,
    memory_bytes: Sequence[int],
    max_model_len: int,
    max_num_batched_tokens: int,
    max_input_lens: Mapping[str, int] | None = None,
    hybrid: bool = True,
) -> tuple[KVCachePlan, ...]:
    """Plan the caches of ranks; the rank with the least memory for its shares decides the number of slabs of all.

    Args:
        ranks: Each rank's shares of all layers, in the order they run.
        memory_bytes: The most bytes that each rank allocates.
        max_model_len: As for ``plan_cache``, like the next two.
        max_num_batched_tokens: The most tokens that one step computes.
        max_input_lens: The most tokens of each input sequence.
        hybrid: As for ``group_layers``.

    Raises:
        SpecError: As for ``group_layers``; or the shares of a layer differ in more than their layout.
        PlanError: As for ``plan_cache``, with the rank.
    """
    _check_shares(ranks, hybrid=hybrid)
    groupings = [group_layers(layers, hybrid=hybrid) for layers in ranks]

    def plan(grouping: Grouping, memory: int, pages_per_slab: Sequence[int] | None) -> KVCachePlan:
        return plan_cache(
            grouping,
            memory_bytes=memory,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_input_lens=max_input_lens,
            pages_per_slab=pages_per_slab,
        )

    pages_per_slab = [group.pages_per_slab for group in plan(groupings[0], min(memory_bytes), None).groups]
    plans = []
    for rank, (grouping, memory) in enumerate(zip(groupings, memory_bytes, strict=True)):
        try:
            plans.append(plan(grouping, memory, pages_per_slab))
        except PlanError as error:
            raise PlanError(f"rank {rank}: {error}") from error
    num_slabs = min(rank_plan.num_slabs for rank_plan in plans)
    return tuple(attrs.evolve(rank_plan, num_slabs=num_slabs) for rank_plan in plans)


def _check_shares(ranks: Sequence[Sequence[LayerSpec]], *, hybrid: bool) -> None:
    """Raise for ranks with other layers, or that would keep different tokens, or read the caches of other layers."""
    if len({tuple(layer.name for layer in layers) for layers in ranks}) > 1:
        raise SpecError("the ranks have different layers; each of them has a share of every layer")
    for shares in zip(*ranks, strict=True):
        ranks_by_share: dict[object, list[int]] = {}
        for rank, layer in enumerate(shares):
            state = stored_state(layer, hybrid=hybrid)
            placement = None if state is None else placement_of(state)
            ranks_by_share.setdefault((layer.shares_with, layer.spec is None, placement), []).append(rank)
        if len(ranks_by_share) > 1:
            descriptions = "; ".join(
                f"{_named(same_ranks)}: {_described(shares[same_ranks[0]])}" for same_ranks in ranks_by_share.values()
            )
            raise SpecError(
                f"layer {shares[0].name!r} is not the same on all ranks ({descriptions}); its specs may differ in "
                "their layout only, such as in their heads"
            )


def _described(layer: LayerSpec) -> str:
    spec = "keeps nothing" if layer.spec is None else shown(layer.spec)
    return spec if layer.shares_with is None else f"{spec}, with the cache of {layer.shares_with!r}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(map(str, ranks))}"
