"""Rank 0: it schedules, samples and owns all tables, and sends the other ranks each step and each move of pages.

Only rank 0 has requests. An abort, a pin, a prefix hit or a reset changes its tables alone. The other ranks receive
the batch of each step with the entries of block tables that have changed, and every copy and move of pages. If
steps overlap, the devices of the other ranks receive the sampled tokens from the device of rank 0.
While their main threads execute that, another thread of each answers what rank 0 asks about page stores.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from kvframe import BlockTables, KVCachePlan, KVCacheStorage, StepBatch
from kvframe.contract.errors import PlanError
from kvframe.contract.foreign import safe_text
from kvframe.contract.model import ModelInput
from kvframe.contract.order import IntArray
from kvframe_engine.contract.errors import EngineError
from kvframe_engine.host_storage import HostStorage
from kvframe_engine.ranks.links import END, Aside, Failure, Link, end_process, packed
from kvframe_engine.ranks.messages import StepMessage, TableEntries
from kvframe_engine.ranks.step_limit import StepLimit, late
from kvframe_engine.running.launched_steps import HostCopy, LastTokens, Late
from kvframe_engine.running.model_runner import ModelRunner, TokenRunner

RANKS_ENDED = "a step failed on rank 0, so its ranks have ended"
"""Why an engine over ranks is closed, without the exception, which may hold a request's data."""

GRACE_SECONDS = 2.0
"""How long the main thread has to report an error of its own after another rank has reported one."""

ANSWERING_SECONDS = 1.0
"""How long this process may answer its callers after another rank has failed, before it ends."""

_RANK_HAS_ENDED = "another rank has ended"

_MOMENT_SECONDS = 0.5
"""How long the end of another process may take to be noticed after a collective operation has failed."""

NewInputs = Mapping[str, Mapping[int, ModelInput]]


class Leader:
    """Rank 0's connections to the other ranks.

    Attributes:
        rank: 0.
        num_ranks: The number of ranks.
        num_local_ranks: The number of ranks of this machine.
        is_over: Whether nothing more is sent to the other ranks: the engine was closed, or a step failed.
    """

    rank = 0

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        num_local_ranks: int,
        end: Callable[[str | None], None] = end_process,
    ) -> None:
        """Take connected sockets.

        Args:
            connections: By rank.
            num_local_ranks: The number of ranks of this machine.
            end: Ends this process, with a sentence.
        """
        self.num_ranks, self.num_local_ranks = 1 + len(connections), num_local_ranks
        self.is_over = False
        self._on_failed_step: Callable[[str], None] | None = None
        self._before_end: Callable[[], None] | None = None
        self._limit: StepLimit | None = None
        self._end = end
        self._has_ended = threading.Lock()
        self._links = {
            rank: Link(connection, on_failure=partial(self._failed, rank), on_lost=partial(self._lost, rank))
            for rank, connection in connections.items()
        }

    # --- messages ----------------------------------------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; every rank calls this with its own."""
        values = [value, *(link.values.get() for link in self._links.values())]
        self._send(values)
        return values

    def send_command(self, command: str, *arguments: Any) -> None:
        """Let every other rank execute a command."""
        if not self.is_over:
            self._send((command, arguments))

    def request(self, command: str, *arguments: Any) -> dict[int, Any]:
        """Let every other rank execute a command, and return the results by rank."""
        self._send((command, arguments))
        return {rank: link.values.get() for rank, link in self._links.items()}

    def ask_aside(self, call: str, *arguments: Any) -> None:
        """Ask the thread of every other rank that waits for page stores; ``answers_aside`` returns the answers.

        Raises:
            OSError: A rank has ended.
        """
        if self.is_over:
            raise ConnectionError(_RANK_HAS_ENDED)
        self._send(Aside((call, arguments)))

    def answers_aside(self) -> list[Any]:
        """Return the answers of the other ranks to ``ask_aside``.

        Raises:
            ConnectionError: A rank has ended.
        """
        answers = []
        for link in self._links.values():
            answer = link.asides.get()
            if answer is None:
                link.asides.put(None)  # for the next call
                raise ConnectionError(_RANK_HAS_ENDED)
            answers.append(answer)
        return answers

    def lead(
        self,
        runner: ModelRunner,
        tables: BlockTables,
        *,
        on_failed_step: Callable[[str], None],
        before_end: Callable[[], None] | None = None,
        max_step_seconds: float,
    ) -> None:
        """Let every other rank compute the batches of a runner too.

        Args:
            runner: The engine's runner.
            tables: The block tables of the engine.
            on_failed_step: Called with a sentence when a step has failed, after the command to end was sent to the
                other ranks.
            before_end: Called by another thread before this process ends because a rank failed. The process ends when
                the call returns, and after ``ANSWERING_SECONDS`` at the latest.
            max_step_seconds: How long a step may take; all ranks end after that.
        """
        self._on_failed_step, self._before_end = on_failed_step, before_end
        self._limit = limit = StepLimit(max_step_seconds, partial(self._late, max_step_seconds))
        entries, compute = TableEntries(tables), runner.compute

        def compute_everywhere(batch: StepBatch, logits_indices: IntArray, new_inputs: NewInputs) -> torch.Tensor:
            with self._or_give_up(), limit:
                message = StepMessage.of(batch, logits_indices, new_inputs, runner.tokens, entries)
                self.send_command("step", message)
                return compute(batch, logits_indices, new_inputs)

        runner.compute = compute_everywhere
        if isinstance(runner, TokenRunner):
            submit, runner.wait_limit = runner.submit, limit

            def submit_everywhere(work: Callable[[], HostCopy]) -> Late:
                def work_or_give_up() -> HostCopy:
                    with self._or_give_up():
                        return work()

                return submit(work_or_give_up)

            runner.submit = submit_everywhere

    def close(self) -> None:
        """Let the other ranks end. Safe to call twice."""
        if self._limit is not None:
            self._limit.close()
        if not self.is_over:
            self.is_over = True
            with suppress(OSError):
                self._send(END)
            for link in self._links.values():
                link.close()

    # --- failures -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """Compute this rank's part of a step in this context: if it raises, the other ranks end.

        Raises:
            EngineError: The other ranks have ended (``closed``).
        """
        if self.is_over:
            raise EngineError(RANKS_ENDED, code="closed")
        try:
            yield
        except BaseException as error:
            if not self.is_over:
                self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """End the other ranks: they wait in the middle of a step that this rank has left."""
        if isinstance(error, Exception):
            # If the step failed because another rank was lost, the thread of its link ends this process.
            time.sleep(_MOMENT_SECONDS)
            if self._has_ended.locked():
                threading.Event().wait()
        self.close()
        if self._on_failed_step is not None:
            self._on_failed_step(f"{RANKS_ENDED}: {safe_text(error)}")

    def _send(self, value: Any) -> None:
        message = packed(value)
        for link in self._links.values():
            link.send(message)

    def _failed(self, rank: int, sentence: str) -> None:
        # The same mistake often fails on all ranks, and this rank then reports it to its caller.
        time.sleep(GRACE_SECONDS)
        self._end_all(f"rank {rank}: {sentence}")

    def _lost(self, rank: int, reason: str | None) -> None:
        if reason is not None:  # otherwise the rank has said itself why it failed
            self._end_all(f"rank {rank} is lost: {reason}; all ranks end")

    def _late(self, max_seconds: float, line: str | None) -> None:
        if line is None:  # another rank has more to say, and _failed then ends all
            time.sleep(2 * GRACE_SECONDS)
        self._end_all(late(max_seconds, line) if line is None else f"rank 0: {late(max_seconds, line)}")

    def _end_all(self, sentence: str) -> None:
        if not self.is_over and self._has_ended.acquire(blocking=False):
            for link in self._links.values():
                link.try_send(packed(Failure(sentence)))
            if self._before_end is not None:
                answering = threading.Thread(target=self._before_end, daemon=True)
                answering.start()
                answering.join(ANSWERING_SECONDS)
            self._end(sentence)


class LeadingTokens(LastTokens):
    """Rank 0's sampled tokens, which the other ranks get from its device, so that the host waits for none of them."""

    def __init__(self, leader: Leader, *arguments: Any) -> None:
        """Take the arguments of ``LastTokens``."""
        super().__init__(*arguments)
        self._leader = leader

    def store(self, rows: IntArray, token_ids: torch.Tensor) -> None:
        """Store the tokens of rows on every rank."""
        if len(rows):
            self._leader.send_command("receive_tokens", rows)
            torch.distributed.broadcast(token_ids, 0)
        super().store(rows, token_ids)


class LeadingStorage(KVCacheStorage):
    """Rank 0's pool; what is copied, filled or moved in it is copied, filled or moved on every rank."""

    def __init__(self, leader: Leader, *arguments: Any) -> None:
        """Take the arguments of ``KVCacheStorage``."""
        super().__init__(*arguments)
        self._leader = leader

    def copy_pages(self, group: int, block_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Copy pages of a group within the pool of every rank."""
        self._leader.send_command("copy_pages", group, [*block_ids], [*target_ids])
        super().copy_pages(group, block_ids, target_ids)

    def fill(self, group: int, block_ids: Sequence[int], value: float) -> None:
        """Fill pages with one value on every rank."""
        self._leader.send_command("fill", group, [*block_ids], value)
        super().fill(group, block_ids, value)

    def reserve(self, plan: KVCachePlan) -> torch.Tensor:
        """Return memory to ``move`` to; raise ``PlanError`` if a rank does not have as much."""
        pool = super().reserve(plan)
        for rank, refusal in self._leader.request("can_reserve", plan.num_slabs, plan.memory_bytes).items():
            if refusal is not None:
                raise PlanError(f"rank {rank}: {refusal}")
        return pool

    def move(self, plan: KVCachePlan, pool: torch.Tensor) -> None:
        """Grow or shrink the pool of every rank at its end."""
        self._leader.send_command("resize", plan.num_slabs, plan.memory_bytes)
        super().move(plan, pool)


class LeadingHostStorage(HostStorage):
    """Rank 0's host store; every rank copies its pages."""

    def __init__(self, leader: Leader, *arguments: Any, **named: Any) -> None:
        """Take the arguments of ``HostStorage``."""
        super().__init__(*arguments, **named)
        self._leader = leader

    def copy_out(self, group: int, block_ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """Copy pages of a group from the pool to the host store, on every rank."""
        self._leader.send_command("copy_out", group, [*block_ids], [*host_ids])
        super().copy_out(group, block_ids, host_ids)

    def copy_in(self, group: int, host_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy pages of a group from the host store to the pool, on every rank."""
        self._leader.send_command("copy_in", group, [*host_ids], [*block_ids])
        super().copy_in(group, host_ids, block_ids)
