"""The agreement of all ranks before they serve: one stack, one model, the same backends, plans with as many slabs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import zip_longest

import attrs

from kvframe import KVCachePlan, Setup, Stack
from kvframe.contract.errors import BackendError, SpecError, StackError, listed, shown
from kvframe_engine.ranks.fingerprint import Fingerprint, check_equal
from kvframe_engine.ranks.follower import Follower
from kvframe_engine.ranks.leader import Leader

OWN_KEYS = ("memory", "device", "key")
"""Keys that may differ between ranks: the least memory counts, and each rank seals what it stores with its own key."""

STORED = ("spec", "layers", "layer_offsets", "page_bytes", "num_parts")
"""What groups of all ranks have alike."""


@attrs.frozen(kw_only=True)
class RankSetup:
    """The set-up of one rank, which it sends to the others.

    Attributes:
        plan: Its own plan, for its share of the heads and its memory.
        stack: Its stack.
        chosen: For each layer, its backend's name, and what identifies its wrappers and its backend.
        fingerprint: Its packages and its model.
    """

    plan: KVCachePlan
    stack: Stack
    chosen: tuple[tuple[str, str, tuple[Hashable, ...]], ...]
    fingerprint: Fingerprint


def agree(ranks: Leader | Follower, setup: Setup, fingerprint: Fingerprint) -> KVCachePlan:
    """Return the plan of the rank that has the least memory, which fits every rank; every rank calls this.

    All ranks store as many heads of a layer, so that plans for equal memory are equal. Cache managers with equal plans
    make the same decisions, and rank 0's block ids are used on every rank.

    Args:
        ranks: The ranks: one tensor-parallel group.
        setup: What the stack does with this rank's share of the model.
        fingerprint: This rank's packages and model.

    Raises:
        StackError: The ranks have different stacks.
        EngineError: The ranks have different packages (``ranks_differ``).
        ModelError: The ranks have different models.
        SpecError: The ranks store something different of a layer, such as another number of heads.
        BackendError: Two ranks chose different wrappers or backends for a layer.
    """
    own_setup = RankSetup(
        plan=setup.plan,
        stack=setup.stack,
        chosen=tuple(
            (choice.layer, choice.backend, (*choice.wrapper_ids, choice.backend_id)) for choice in setup.choices
        ),
        fingerprint=fingerprint,
    )
    setups: list[RankSetup] = ranks.exchange(own_setup)
    _check_stacks(setups)
    check_equal([setup.fingerprint for setup in setups])
    _check_chosen(setups)
    _check_groups(setups)
    return min((setup.plan for setup in setups), key=lambda plan: plan.memory_bytes)


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


def _check_groups(setups: Sequence[RankSetup]) -> None:
    for rank, setup in enumerate(setups):
        for first, other in zip_longest(setups[0].plan.groups, setup.plan.groups):
            if first is None or other is None or any(getattr(first, name) != getattr(other, name) for name in STORED):
                groups = [group for group in (first, other) if group is not None]
                specs = " and ".join("nothing" if group is None else shown(group.spec) for group in (first, other))
                raise SpecError(
                    f"layer {groups[0].layers[0]!r} is not the same on rank 0 and rank {rank}, which store {specs}: "
                    "give each rank as many heads of every layer"
                )
