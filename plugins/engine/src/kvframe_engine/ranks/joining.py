"""Joins the processes that torchrun started: collective operations, and a connection of rank 0 to every other rank."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from kvframe import Stack
from kvframe.contract.errors import StackError
from kvframe_engine.ranks.environment import ProcessRank, stack_of_rank
from kvframe_engine.ranks.follower import Follower
from kvframe_engine.ranks.leader import Leader
from kvframe_engine.ranks.links import RANK_FAILED_EXIT_CODE, connect, listen

_LOADING_TIME = timedelta(hours=2)
"""The time limit of a collective operation: a rank may load its weights for long. A rank that ends is found at once;
``StepLimit`` finds one that does not end a step."""

_numbers = itertools.count()
"""Numbers the engines of this process; all ranks make the same engines in the same order."""


@contextmanager
def join_ranks(process: ProcessRank, stack: Stack) -> Iterator[tuple[Leader | Follower, Stack]]:
    """Join the other ranks, and end all ranks if the set-up inside the block fails on one.

    Args:
        process: This process among the ranks.
        stack: What to use.

    Yields:
        This rank, and the stack with its device.

    Raises:
        StackError: The stack names the device of one rank for all; or this rank's device cannot be used, or this build
            of torch has nothing that carries collective operations between such devices.
    """
    stack = stack_of_rank(stack, process)
    ranks = _join(process, stack)
    try:
        yield ranks, stack
    except BaseException as error:
        if isinstance(ranks, Leader):
            ranks.close()
            raise
        ranks.report(error)
        raise SystemExit(RANK_FAILED_EXIT_CODE) from error


def collectives_for(device: torch.device, stack: Stack) -> str:
    """Return torch's name of what carries collective operations between ranks on such devices: gloo, NCCL.

    Args:
        device: The device of one rank.
        stack: What to use.

    Raises:
        StackError: This build of torch does not have it.
    """
    import torch.distributed as dist

    name = dist.get_default_backend_for_device(device)
    if not dist.is_backend_available(name):
        raise StackError(
            f"{stack.source}: ranks on {device.type!r} communicate through {name}, which this build of torch does not "
            'have; install one that has it, or set model.device to "cpu"'
        )
    return name


def _join(process: ProcessRank, stack: Stack) -> Leader | Follower:
    import torch.distributed as dist  # a process that is alone need not load it

    if not dist.is_initialized():
        stack.check_device()
        device = torch.device(stack.model.device)
        backend = collectives_for(device, stack)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        dist.init_process_group(backend, timeout=_LOADING_TIME, device_id=None if device.type == "cpu" else device)
    store: Any = dist.distributed_c10d._get_default_store()
    key = f"kvframe/{next(_numbers)}"
    host = "127.0.0.1" if process.is_one_machine else os.environ.get("MASTER_ADDR", socket.gethostname())
    if process.rank == 0:
        secret = secrets.token_bytes(16)
        connections = listen(
            process.num_ranks,
            host if process.is_one_machine else "",
            secret,
            lambda port: store.set(key, f"{host} {port} {secret.hex()}"),
        )
        return Leader(connections, process.num_local_ranks)
    host, port, secret_hex = store.get(key).decode().split()
    # Rank 0 logs the same messages: all ranks set up the same engine.
    logging.getLogger("kvframe").setLevel(logging.WARNING)
    connection = connect(process.rank, host, int(port), bytes.fromhex(secret_hex))
    return Follower(process.rank, process.num_ranks, process.num_local_ranks, connection)
