"""Cache plans of a model whose layers, or whose heads, are spread over several devices.

Each rank plans its own layers and its own memory. A group's number, the tokens of its blocks, the pages of a slab and
the number of slabs are the same on all ranks that keep state. Cache managers on different ranks therefore make the same
decisions if they get the same calls.

Ranks that compute shares of the same layers are a *tensor-parallel group*: each of them has some of a layer's heads.
The shares of a layer have one name, and their specs differ in their layout only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvframe.contract.errors import PlanError, SpecError, listed, shown
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.planning.groups import Grouping, group_layers, placement_of, stored_state
from kvframe.planning.plan import KVCachePlan, plan_cache

Shares = Mapping[int, LayerSpec]
"""The shares of one layer, by rank."""


@attrs.frozen(kw_only=True)
class RankPlans:
    """The plans of all ranks of a model.

    Attributes:
        whole: The grouping of all layers; of a layer with several shares, the share of the first rank.
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
        """One sentence that says why prompts are computed in one step; None if every layer keeps state."""
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
    tensor_parallel_size: int = 1,
) -> RankPlans:
    """Plan the caches of a model whose layers, or whose heads, are spread over ranks.

    The rank with the least memory for its layers decides the number of slabs of all ranks.

    Args:
        ranks: Each rank's layers, in the order they run. A rank may have no layer of a group, or no layer at all.
        memory_bytes: The most bytes that each rank allocates.
        max_model_len: As for ``plan_cache``, like the next two.
        max_num_batched_tokens: The most tokens that one step computes.
        max_input_lens: The most tokens of each input sequence.
        hybrid: As for ``group_layers``.
        prefix_caching: Whether prefixes are cached, if all layers allow it.
        tensor_parallel_size: The number of ranks of a tensor-parallel group. Each group is as many ranks that follow
            each other. Layers of one name on ranks of one group are shares of one layer.

    Raises:
        SpecError: As for ``group_layers``; or the shares of a layer differ in more than their layout; or a layer reads
            the cache of a layer that its rank does not have.
        PlanError: As for ``plan_cache``; or the ranks cannot be divided into groups of this size.
    """
    size = tensor_parallel_size
    if size < 1 or len(ranks) % size:
        raise PlanError(f"{len(ranks)} ranks cannot be divided into tensor-parallel groups of {size}")
    shares = _find_shares(ranks, size)
    for name, share in shares.items():
        _check_shares(name, share, hybrid=hybrid)
    whole = group_layers([share[min(share)] for share in shares.values()], hybrid=hybrid)
    for layer, target in whole.follows.items():
        for rank in shares[layer]:
            if rank not in shares[target]:
                raise SpecError(
                    f"layer {layer!r} of rank {rank} shares the cache of {target!r}, which is on "
                    f"{_named(shares[target])}; put them on one rank"
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

    groupings = tuple(_part_of(whole, layers, hybrid=hybrid) for layers in ranks)
    used = _bytes_of_whole(groupings, memory_bytes, size)
    pages_per_slab = [group.pages_per_slab for group in plan(whole, used, None).groups]
    plans = []
    for rank, (grouping, memory) in enumerate(zip(groupings, memory_bytes, strict=True)):
        try:
            plans.append(plan(grouping, memory, pages_per_slab))
        except PlanError as error:
            raise PlanError(f"rank {rank}: {error}") from error
    num_slabs = min((rank_plan.num_slabs for rank_plan in plans if rank_plan.groups), default=0)
    return RankPlans(
        whole=whole,
        groupings=groupings,
        plans=tuple(
            attrs.evolve(rank_plan, num_slabs=num_slabs) if rank_plan.groups else rank_plan for rank_plan in plans
        ),
        prefix_caching=prefix_caching and not whole.whole_prompts,
    )


def _find_shares(ranks: Sequence[Sequence[LayerSpec]], size: int) -> dict[str, Shares]:
    """Return the shares of each layer, in the order that the layers run."""
    found: dict[str, Shares] = {}
    for first in range(0, len(ranks), size):
        shares: dict[str, dict[int, LayerSpec]] = {}
        order: list[str] = []
        for rank in range(first, first + size):
            place = 0
            for layer in ranks[rank]:
                if layer.name in shares and rank in shares[layer.name]:
                    raise SpecError(f"two layers of rank {rank} are named {layer.name!r}")
                if layer.name not in shares:
                    # A layer that the ranks before do not have runs after the layer that is before it on its own rank.
                    shares[layer.name] = {}
                    order.insert(place, layer.name)
                shares[layer.name][rank] = layer
                place = order.index(layer.name) + 1
        for name in order:
            if name in found:
                raise SpecError(
                    f"two layers are named {name!r}, on {_named(found[name])} and on {_named(shares[name])}; only "
                    f"ranks of one tensor-parallel group have layers of one name, and a group is {size} ranks here"
                )
            found[name] = shares[name]
    return found


def _check_shares(name: str, shares: Shares, *, hybrid: bool) -> None:
    """Raise for a layer whose ranks would keep different tokens, or would read the caches of different layers."""
    alike: dict[object, list[int]] = {}
    for rank, layer in shares.items():
        stored = stored_state(layer, hybrid=hybrid)
        placement = None if stored is None else placement_of(stored)
        alike.setdefault((layer.shares_with, layer.spec is None, placement), []).append(rank)
    if len(alike) > 1:
        described = "; ".join(f"{_named(ranks)}: {_described(shares[ranks[0]])}" for ranks in alike.values())
        raise SpecError(
            f"layer {name!r} is not the same on the ranks of its tensor-parallel group ({described}); its specs may "
            "differ in their layout only, such as in their heads"
        )


def _described(layer: LayerSpec) -> str:
    spec = "keeps nothing" if layer.spec is None else shown(layer.spec)
    return spec if layer.shares_with is None else f"{spec}, with the cache of {layer.shares_with!r}"


def _named(ranks: Mapping[int, LayerSpec] | Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(map(str, ranks))}"


def _bytes_of_whole(groupings: Sequence[Grouping], memory_bytes: Sequence[int], size: int) -> int:
    """Return the memory for one share of every layer: of each tensor-parallel group, the least of its ranks."""
    stages = [
        [memory_bytes[rank] for rank in range(first, first + size) if groupings[rank].groups]
        for first in range(0, len(groupings), size)
    ]
    return sum(map(min, filter(None, stages)))


def _part_of(whole: Grouping, layers: Sequence[LayerSpec], *, hybrid: bool) -> Grouping:
    """Return a rank's part of each group, as this rank stores it; no groups if it has none of their layers."""
    stored: dict[str, KVCacheSpec | None] = {layer.name: stored_state(layer, hybrid=hybrid) for layer in layers}
    groups = []
    for group in whole.groups:
        mine = {name: spec for name in group.layers if (spec := stored.get(name)) is not None}
        groups.append(attrs.evolve(group, layers=tuple(mine), stored=tuple(mine.values())))
    return Grouping(
        groups=tuple(groups) if any(group.layers for group in groups) else (),
        follows={layer: target for layer, target in whole.follows.items() if layer in stored},
        step_local=tuple(layer for layer in whole.step_local if layer in stored),
    )
