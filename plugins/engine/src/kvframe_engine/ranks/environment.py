"""This process among the ranks that torchrun started, read from the environment; nothing here loads torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import attrs

from kvframe.contract.errors import StackError

if TYPE_CHECKING:
    from kvframe import Stack

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@attrs.frozen
class ProcessRank:
    """A process that is one of several ranks.

    Attributes:
        rank: Its number. Rank 0 serves requests.
        num_ranks: The number of ranks, at least 2.
        local_rank: Its number among the ranks of its machine.
        num_local_ranks: The number of ranks of its machine.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int

    @property
    def is_one_machine(self) -> bool:
        """Whether all ranks run on this machine."""
        return self.num_local_ranks == self.num_ranks


def find_rank() -> ProcessRank | None:
    """Return this process among its ranks; None if it is alone."""
    try:
        rank, num_ranks, local_rank, num_local_ranks = (int(os.environ[name]) for name in _NAMES)
    except (KeyError, ValueError):
        return None
    return ProcessRank(rank, num_ranks, local_rank, num_local_ranks) if num_ranks > 1 else None


def stack_of_rank(stack: Stack, process: ProcessRank) -> Stack:
    """Return the stack with the device of one rank: of several GPUs, each rank of a machine takes its own.

    Raises:
        StackError: The stack names the GPU of one rank for all.
    """
    kind, _, index = stack.model.device.partition(":")
    if index:
        raise StackError(
            f"{stack.source}: model.device {stack.model.device!r} is one device, and there are {process.num_ranks} "
            f"ranks; set it to {kind!r}, and each rank takes the device of its own number"
        )
    if kind == "cpu":
        return stack
    return attrs.evolve(stack, model=attrs.evolve(stack.model, device=f"{kind}:{process.local_rank}"))
