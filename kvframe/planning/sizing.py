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
"""The most of a device's free memory that ``memory = "auto"`` takes: a model's activations need room too."""


def choose_max_model_len(description: ModelDescription, stack: Stack) -> int:
    """Return the most tokens of a request: what the stack says, or what the model takes.

    Args:
        description: The model.
        stack: Its ``[engine] max_model_len``.

    Raises:
        StackError: The stack asks for longer requests than the model takes.
    """
    longest, asked = min(description.max_model_len, MAX_WHOLE), stack.engine.max_model_len
    if asked is not None and asked > longest:
        raise StackError(
            f"[engine] max_model_len = {asked} is more than the {longest} tokens that {description.name} takes; "
            "leave it out, or make it smaller"
        )
    return longest if asked is None else asked


def plan_for_stack(
    grouping: Grouping,
    stack: Stack,
    max_model_len: int,
    max_input_lens: Mapping[str, int] | None = None,
    copied: Sequence[LayerSpec] = (),
) -> KVCachePlan:
    """Return the cache plan of a stack's memory, device and limits.

    Args:
        grouping: The model's groups.
        stack: Its ``[cache] memory`` and ``[engine]`` limits. ``"auto"`` is what the most requests of the greatest
            length need, but no more than a share of the memory that is free now, copies of pages included. Where no
            layer keeps anything, there is nothing to measure or to check.
        max_model_len: The most tokens of a request.
        max_input_lens: For each sequence that requests bring beside their tokens, the most tokens of it.
        copied: The layers whose backends are given copies of their pages.

    Raises:
        PlanError: The memory is too small, or ``"auto"`` and the free memory is unknown, or a group keeps state of a
            sequence whose length is not given.
    """

    def plan(memory_bytes: int) -> KVCachePlan:
        return plan_cache(
            grouping,
            memory_bytes=memory_bytes,
            max_model_len=max_model_len,
            max_num_batched_tokens=stack.engine.max_num_batched_tokens,
            max_input_lens=max_input_lens,
        )

    if not grouping.groups:
        return plan(0)
    if stack.cache.memory != "auto":
        return plan(stack.cache.memory)
    available = int(_available_bytes(stack.engine.device) * SHARE_OF_AVAILABLE_MEMORY)
    largest = plan(available)
    if copied:
        copies = copied_bytes(largest, grouping, copied)
        largest = plan(available * largest.total_bytes // (largest.total_bytes + copies))
    peaks = largest.peak_blocks(max_model_len)
    wanted = largest.num_slabs_for((blocks * stack.engine.max_num_seqs for blocks in peaks), num_rest_pages=0)
    if wanted >= largest.num_slabs:
        return largest
    return plan(largest.null_bytes + wanted * largest.slab_bytes)


def copied_bytes(plan: KVCachePlan, grouping: Grouping, copied: Sequence[LayerSpec]) -> int:
    """Return the bytes of the copies that a step reads at most: of every page, for one layer after the other.

    Requests that share pages have a copy each, so that a step of many such requests may take more.

    Args:
        plan: What is allocated.
        grouping: The groups that it was made of.
        copied: The layers whose backends are given copies of their pages.
    """
    # Layers whose copies have one shape use the same memory.
    per_slab: dict[tuple[str, StateTensor], int] = {}
    for layer in copied:
        assert layer.spec is not None
        group = plan.groups[grouping.group_of(layer.name).index]
        for key in layer.spec.in_format(PLAIN).state_tensors().items():
            per_slab[key] = max(per_slab.get(key, 0), group.pages_per_slab * key[1].num_bytes)
    return (plan.num_slabs + bool(plan.num_rest_pages)) * sum(per_slab.values())


def num_host_slabs(plan: KVCachePlan, stack: Stack) -> int:
    """Return how many slabs of preempted requests the host keeps; 0 if requests are not swapped.

    Args:
        plan: What the slabs are copies of.
        stack: Its ``[cache] preemption`` and ``swap_memory``.

    Raises:
        PlanError: The memory does not even hold one slab for each group, so that no request would ever be swapped.
    """
    if stack.cache.swap_memory is None or stack.cache.preemption != "swap" or not plan.groups:
        return 0
    num_slabs = stack.cache.swap_memory // plan.slab_bytes
    if num_slabs < len(plan.groups):
        raise PlanError(
            f"swap_memory of {stack.cache.swap_memory} bytes holds {num_slabs} slabs of {plan.slab_bytes} bytes, but "
            f"each of the {len(plan.groups)} groups needs one; give at least {len(plan.groups) * plan.slab_bytes} "
            'bytes, or preemption = "recompute"'
        )
    return num_slabs


def _available_bytes(device: str) -> int:
    try:
        if device.partition(":")[0] == "cuda":
            import torch

            return int(torch.cuda.mem_get_info(device)[0])
        return free_bytes()
    except (RuntimeError, AssertionError, AttributeError, ValueError) as error:
        # No such device here, a torch that is built without it, or an operating system that has no such figure.
        raise PlanError(
            f'memory "auto" is a share of what is free, and {device!r} does not say here how much that is '
            f"({str(error).strip().splitlines()[0]}); give a size, such as 2GiB"
        ) from error
