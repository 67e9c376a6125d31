"""The ranks after rank 0: each sets up the same engine, and executes the commands of rank 0 until that closes it."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import torch

from kvframe import BlockTables, KVCachePlan, KVCacheStorage
from kvframe.contract.errors import KVFrameError, PlanError, shorten
from kvframe.contract.order import IntArray
from kvframe_engine.host_storage import HostStorage
from kvframe_engine.ranks.links import END, RANK_FAILED_EXIT_CODE, Aside, Failure, Link, end_process, packed
from kvframe_engine.ranks.messages import StepMessage
from kvframe_engine.ranks.step_limit import StepLimit, late
from kvframe_engine.running.launched_steps import LastTokens
from kvframe_engine.running.model_runner import ModelRunner, TokenRunner
from kvframe_engine.tiers.stored_pages import StoredPages

PATIENCE_SECONDS = 5.0
"""How long a rank that failed waits for rank 0 to say so."""

_MOMENT_SECONDS = 1.0
"""How long the main thread has to end after rank 0 has ended."""

_MAX_SENTENCE = 2_000

_SIGNALS_OF_RANK_0 = ("SIGINT", "SIGTERM", "SIGHUP")
"""Signals after which rank 0 may still complete requests, for which it needs the other ranks."""


class Follower:
    """The connection of another rank to rank 0.

    Attributes:
        rank: Its number.
        num_ranks: The number of ranks.
        num_local_ranks: The number of ranks of this machine.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        num_local_ranks: int,
        connection: socket.socket,
        end: Callable[[str | None], None] = end_process,
    ) -> None:
        """Take a connected socket.

        Args:
            rank: Its number.
            num_ranks: The number of ranks.
            num_local_ranks: The number of ranks of this machine.
            connection: The connection to rank 0.
            end: Ends this process, with a sentence.
        """
        self.rank, self.num_ranks, self.num_local_ranks = rank, num_ranks, num_local_ranks
        self._end = end
        self._is_over, self._is_lost = threading.Event(), threading.Event()
        self._link = Link(connection, on_failure=lambda _: None, on_lost=self._lost)

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; every rank calls this with its own."""
        with suppress(OSError):  # rank 0 has ended: either it said so, or the thread of the link ends this process
            self._link.send(packed(value))
        values = self._link.values.get()
        if values == END:
            raise SystemExit(RANK_FAILED_EXIT_CODE)
        all_values: list[Any] = values
        return all_values

    def follow(
        self,
        runner: ModelRunner,
        tables: BlockTables,
        storage: KVCacheStorage,
        host: HostStorage | None,
        pages: StoredPages | None = None,
        *,
        max_step_seconds: float,
    ) -> None:
        """Execute rank 0's commands until its engine is closed.

        Args:
            runner: Computes the steps, with this rank's layers.
            tables: The block tables that the runner reads; rank 0's entries are written here.
            storage: This rank's pool.
            host: Its host store; None without host memory.
            pages: Moves its pages from and to page stores; None for no stores.
            max_step_seconds: How long a step may take; rank 0 is told where this rank is after that.
        """
        # Ctrl-C in a terminal, and a signal that ends torchrun, reach all processes; rank 0 decides what they mean.
        with suppress(ValueError):  # not the main thread
            for name in _SIGNALS_OF_RANK_0:
                if hasattr(signal, name):
                    signal.signal(getattr(signal, name), signal.SIG_IGN)
        limit = StepLimit(max_step_seconds, partial(self._late, max_step_seconds))
        commands: dict[str, Callable[..., None]] = {
            "step": lambda step: _run(step, runner, tables, limit),
            "copy_pages": storage.copy_pages,
            "fill": storage.fill,
            "resize": lambda *size: _resize(storage, runner, *size),
            "can_reserve": lambda *size: self._link.send(packed(_why_too_large(storage, *size))),
        }
        if isinstance(runner, TokenRunner) and runner.last_tokens is not None:
            commands["receive_tokens"] = partial(_receive_tokens, runner.last_tokens, limit)
        if host is not None:
            commands |= {"copy_out": host.copy_out, "copy_in": host.copy_in}
        if pages is not None:
            commands |= {"give": pages.give, "write": pages.write, "release": pages.release}
            commands["flush"] = lambda seconds: self._link.send(packed(pages.flush(seconds)))
            threading.Thread(target=self._answer_asides, args=(pages,), name="kvframe-asides", daemon=True).start()
        while True:
            command, arguments = self._link.values.get()
            if command == END[0]:
                break
            commands[command](*arguments)
        limit.close()
        self.close()

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._is_over.set()
        self._link.close()

    def report(self, error: BaseException) -> None:
        """Report to rank 0 that this rank failed, wait until rank 0 has ended or lets this rank end, and close."""
        with suppress(OSError):
            self._link.send(packed(Failure(sentence_of(error))))
        self._is_lost.wait(PATIENCE_SECONDS)
        self.close()

    def _answer_asides(self, pages: StoredPages) -> None:
        """Find and read pages of this rank, which may wait for stores, as long as rank 0 asks."""
        calls: dict[str, Callable[..., list[bool]]] = {"find": pages.find, "read": pages.read}
        while (question := self._link.asides.get()) is not None:
            call, arguments = question
            try:
                answer: list[bool] | Failure = calls[call](*arguments)
            except Exception as error:  # such as too little memory; the stores' own failures do not come here
                answer = Failure(sentence_of(error))
            with suppress(OSError):
                self._link.send(packed(Aside(answer)))
        pages.close_reading()

    def _late(self, max_seconds: float, line: str | None) -> None:
        if line is not None:  # otherwise this rank waits for another one
            with suppress(OSError):
                self._link.send(packed(Failure(late(max_seconds, line))))

    def _lost(self, reason: str | None) -> None:
        if reason is not None and not self._is_over.is_set():
            # Rank 0 cannot say why all ranks end, so rank 1 does.
            self._end(f"rank 0 is lost: {reason}; all ranks end" if self.rank == 1 else None)
        self._is_lost.set()
        # The main thread may wait in a collective operation for rank 0, which has left it.
        if not self._is_over.wait(_MOMENT_SECONDS):
            self._end(None)


def sentence_of(error: BaseException) -> str:
    """Return an error in one line."""
    text = str(error) if isinstance(error, KVFrameError) else f"{type(error).__name__}: {error}"
    return shorten(" ".join(text.split()), _MAX_SENTENCE)


def _run(step: StepMessage, runner: ModelRunner, tables: BlockTables, limit: StepLimit) -> None:
    """Compute this rank's share of a step."""
    for stack, (entry_indices, ids) in zip(tables.stacks, step.entries, strict=True):
        stack.flat[entry_indices] = ids
    batch = step.batch()
    requests, positions = batch.token_positions
    runner.tokens[batch.rows[requests], positions] = step.tokens
    for name, lens in step.input_lens.items():
        runner.input_lens[name][batch.rows] = lens
    logits_indices = batch.generating_indices if step.logits_indices is None else step.logits_indices
    with limit:
        runner.compute(batch, logits_indices, step.new_inputs)


def _receive_tokens(last_tokens: LastTokens, limit: StepLimit, rows: IntArray) -> None:
    """Store the tokens that rank 0 sampled for rows, from its device, so that the next step can read them."""
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=last_tokens.device)
    with limit, torch.inference_mode():
        torch.distributed.broadcast(token_ids, 0)
        last_tokens.store(rows, token_ids)


def _resized(storage: KVCacheStorage, num_slabs: int, memory_bytes: int) -> KVCachePlan:
    return attrs.evolve(storage.plan, num_slabs=num_slabs, memory_bytes=memory_bytes)


def _why_too_large(storage: KVCacheStorage, num_slabs: int, memory_bytes: int) -> str | None:
    """Return why a pool of this size cannot be allocated; None if it can."""
    try:
        storage.reserve(_resized(storage, num_slabs, memory_bytes))
    except PlanError as error:
        return str(error)
    return None


def _resize(storage: KVCacheStorage, runner: ModelRunner, num_slabs: int, memory_bytes: int) -> None:
    plan = _resized(storage, num_slabs, memory_bytes)
    storage.move(plan, storage.reserve(plan))
    runner.drop_graphs()  # they hold the old addresses
