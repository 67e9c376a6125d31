"""Sizing: how many tokens and bytes a stack gives a model, computed the same way for planning and for running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvframe.config.stack import Stack
from kvframe.contract.description import ModelDescription
from kvframe.contract.errors import PlanError, StackError
from kvframe.contract.formats import PLAIN, StateTensor
from kvframe.contract.specs import LayerSpec
from kvframe.loading.checks import MAX_WHOLE
from kvframe.planning.groups import Grouping
from kvframe.planning.memory import free_bytes
from kvframe.planning.plan import KVCachePlan, plan_cache

SHARE_OF_AVAILABLE_MEMORY = 0.5
"""The largest share of a device's free memory that ``memory = "auto"`` takes; a model's activations need the rest."""


def choose_max_model_len(description: ModelDescription, stack: Stack) -> int:
    """Return the most tokens of a request: the stack's limit, or the model's if the stack has none.

    Raises ``StackError`` if the stack asks for longer requests than the model takes.
    """
    model_limit, stack_limit = min(description.max_model_len, MAX_WHOLE), stack.limits.max_model_len
    if stack_limit is not None and stack_limit > model_limit:
        raise StackError(
            f"[limits] max_model_len = {stack_limit} is more than the {model_limit} tokens that {description.name} "
            "takes; leave it out, or make it smaller"
        )
    return model_limit if stack_limit is None else stack_limit


def plan_for_stack(
    grouping: Grouping,
    stack: Stack,
    max_model_len: int,
    max_input_lens: Mapping[str, int] | None = None,
    copied_layers: Sequence[LayerSpec] = (),
    num_local_ranks: int = 1,
) -> KVCachePlan:
    """Return the cache plan of a stack's memory, device and limits.

    Args:
        grouping: The model's groups.
        stack: Its ``[cache] memory`` and ``[limits]``. ``"auto"`` is the memory for ``max_num_seqs`` requests of
            the greatest length, but at most a share of the memory that is free now, including copies of pages. If no
            layer keeps state, the free memory is not checked.
        max_model_len: The most tokens of a request.
        max_input_lens: The most tokens of each input sequence, such as an encoder's, by name.
        copied_layers: The layers whose backends get copies of their pages.
        num_local_ranks: The number of ranks of this machine. Those that run on the CPU share its free memory.

    Raises:
        PlanError: The memory is too small, it is ``"auto"`` and the free memory is unknown, or a group keeps state of a
            sequence whose length is not given.
    """

    def plan(memory_bytes: int) -> KVCachePlan:
        return plan_cache(
            grouping,
            memory_bytes=memory_bytes,
            max_model_len=max_model_len,
            max_num_batched_tokens=stack.limits.max_num_batched_tokens,
            max_input_lens=max_input_lens,
        )

    if not grouping.groups:
        return plan(0)
    if stack.cache.memory != "auto":
        return plan(stack.cache.memory)
    num_sharing = num_local_ranks if stack.model.device == "cpu" else 1
    available = int(_available_bytes(stack.model.device) * SHARE_OF_AVAILABLE_MEMORY) // num_sharing
    largest = plan(available)
    if copied_layers:
        copies = copied_bytes(largest, grouping, copied_layers)
        largest = plan(available * largest.total_bytes // (largest.total_bytes + copies))
    peaks = largest.peak_blocks(max_model_len)
    num_wanted_slabs = largest.num_slabs_for(blocks * stack.limits.max_num_seqs for blocks in peaks)
    if num_wanted_slabs >= largest.num_slabs:
        return largest
    return plan(largest.null_bytes + num_wanted_slabs * largest.slab_bytes)


def copied_bytes(plan: KVCachePlan, grouping: Grouping, copied_layers: Sequence[LayerSpec]) -> int:
    """Return the most bytes that a step's copies of pages take: one copy of every page, for one layer at a time.

    Requests that share a page get a copy each, so a step of many such requests may take more. ``copied_layers`` are the
    layers whose backends get copies of their pages.
    """
    # Layers with copies of equal shapes use the same memory.
    per_slab: dict[tuple[str, StateTensor], int] = {}
    for layer in copied_layers:
        assert layer.spec is not None
        group = plan.groups[grouping.group_of(layer.name).index]
        for key in layer.spec.in_format(PLAIN).state_tensors().items():
            per_slab[key] = max(per_slab.get(key, 0), group.pages_per_slab * key[1].num_bytes)
    return plan.num_slabs * sum(per_slab.values())


def num_host_slabs(plan: KVCachePlan, stack: Stack) -> int:
    """Return the number of slabs in host memory, for evicted blocks; 0 if the stack has none.

    Raises ``PlanError`` if the memory does not hold one slab for each group, so that a block has no place.
    """
    if stack.cache.host_memory is None or not stack.cache.prefix_caching or not plan.groups:
        return 0
    num_slabs = stack.cache.host_memory // plan.slab_bytes
    if num_slabs < len(plan.groups):
        raise PlanError(
            f"host_memory of {stack.cache.host_memory} bytes holds {num_slabs} slabs of {plan.slab_bytes} bytes, but "
            f"each of the {len(plan.groups)} groups needs one; give at least {len(plan.groups) * plan.slab_bytes} "
            "bytes, or none"
        )
    return num_slabs


def _available_bytes(device: str) -> int:
    try:
        if device.partition(":")[0] == "cuda":
            import torch

            return int(torch.cuda.mem_get_info(device)[0])
        return free_bytes()
    except (RuntimeError, AssertionError, AttributeError, ValueError) as error:
        # The device does not exist, torch was built without it, or the operating system does not report the number.
        raise PlanError(
            f'memory = "auto" takes a share of the free memory, and the free memory of {device!r} is unknown '
            f"({str(error).strip().splitlines()[0]}); give a size, such as 2GiB"
        ) from error
