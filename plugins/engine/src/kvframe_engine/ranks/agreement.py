"""The agreement of all ranks before they serve: one stack, one model, the same backends, plans with as many slabs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import attrs

from kvframe import KVCachePlan, Setup, Stack
from kvframe.contract.errors import BackendError, PlanError, StackError, listed
from kvframe.contract.specs import LayerSpec
from kvframe_engine.ranks.fingerprint import Fingerprint, check_equal
from kvframe_engine.ranks.follower import Follower
from kvframe_engine.ranks.leader import Leader

OWN_KEYS = ("memory", "device", "key")
"""Keys that may differ between ranks: the least memory counts, and each rank seals what it stores with its own key."""


@attrs.frozen(kw_only=True)
class RankSetup:
    """The set-up of one rank, which it sends to the others.

    Attributes:
        layers: Its layers, with its share of their heads.
        memory_bytes: The most bytes that it can allocate.
        stack: Its stack.
        chosen: For each layer, its backend's name, and what identifies its wrappers and its backend.
        fingerprint: Its packages and its model.
    """

    layers: tuple[LayerSpec, ...]
    memory_bytes: int
    stack: Stack
    chosen: tuple[tuple[str, str, tuple[Hashable, ...]], ...]
    fingerprint: Fingerprint


def agree(ranks: Leader | Follower, setup: Setup, fingerprint: Fingerprint) -> KVCachePlan:
    """Return this rank's plan, with the slabs of the rank that has the least memory; every rank calls this.

    Args:
        ranks: The ranks: one tensor-parallel group.
        setup: What the stack does with this rank's share of the model.
        fingerprint: This rank's packages and model.

    Raises:
        StackError: The ranks have different stacks.
        EngineError: The ranks have different packages (``ranks_differ``).
        ModelError: The ranks have different models.
        SpecError: The ranks keep different tokens of a layer.
        PlanError: A rank has too little memory, or the ranks store a different number of heads.
        BackendError: Two ranks chose different wrappers or backends for a layer.
    """
    plan, stack = setup.plan, setup.stack
    own_setup = RankSetup(
        layers=setup.all_layers,
        memory_bytes=plan.memory_bytes,
        stack=stack,
        chosen=tuple(
            (choice.layer, choice.backend, (*choice.wrapper_ids, choice.backend_id)) for choice in setup.choices
        ),
        fingerprint=fingerprint,
    )
    setups: list[RankSetup] = ranks.exchange(own_setup)
    _check_stacks(setups)
    check_equal([setup.fingerprint for setup in setups])
    _check_chosen(setups)
    plans = setup.plan_shares([each.layers for each in setups], [each.memory_bytes for each in setups])
    for rank, each in enumerate(plans):
        # Rank 0's block ids are used on every rank.
        if [group.page_bytes for group in each.groups] != [group.page_bytes for group in plans[0].groups]:
            raise PlanError(
                f"rank {rank} stores other bytes of a block than rank 0, and all ranks use rank 0's block tables: give "
                "each rank as many heads of a layer"
            )
    return plans[ranks.rank]


def _check_stacks(setups: Sequence[RankSetup]) -> None:
    first = setups[0].stack
    for rank, setup in enumerate(setups):
        different = [
            f"[{table}] {field.name}"
            for table in ("model", "limits", "cache", "engine")
            for field in attrs.fields(type(getattr(first, table)))
            if field.name not in OWN_KEYS
            and getattr(getattr(first, table), field.name) != getattr(getattr(setup.stack, table), field.name)
        ]
        different += ["[[rules]]"] if first.rules != setup.stack.rules else []
        if different:
            raise StackError(
                f"rank {rank} has another stack than rank 0: {listed(different)} differ; start all ranks with the same "
                "stack"
            )


def _check_chosen(setups: Sequence[RankSetup]) -> None:
    first = {layer: (backend, ids) for layer, backend, ids in setups[0].chosen}
    for rank, setup in enumerate(setups):
        for layer, backend, ids in setup.chosen:
            first_choice = first.get(layer, (backend, ids))
            if first_choice[1] != ids:
                raise BackendError(
                    f"layer {layer!r} has backend {first_choice[0]!r} on rank 0 and {backend!r} on rank {rank}, or "
                    "other wrappers or options of them; name them in a rule of the stack, or install the same plugins "
                    "on all machines",
                    "ranks_differ",
                )
