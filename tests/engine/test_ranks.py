"""The parts of an engine over several ranks, each without another process: agreement, tables, connections."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.commands.prompts import read_prompts
from kvframe_engine.contract.errors import EngineError
from kvframe_engine.ranks import links, step_limit
from kvframe_engine.ranks.agreement import RankSetup, agree
from kvframe_engine.ranks.environment import ProcessRank, find_rank, stack_of_rank
from kvframe_engine.ranks.fingerprint import Fingerprint
from kvframe_engine.ranks.follower import Follower
from kvframe_engine.ranks.joining import collectives_for, join_ranks
from kvframe_engine.ranks.leader import Leader
from kvframe_engine.ranks.links import END, Failure, Link, connect, listen, packed
from kvframe_engine.ranks.messages import TableEntries
from kvframe_engine.ranks.step_limit import StepLimit

from kvframe import Stack
from kvframe.attention.batch_metadata import StepBatch
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.cache.block_table import BlockTables
from kvframe.contract.errors import BackendError, KVFrameError, RequestError, SpecError, StackError
from kvframe.contract.specs import ENCODER, TOKENS, LayerSpec
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import KVCachePlan, plan_cache
from kvframe.selection.choice import Identity

SECRET = b"0123456789abcdef"


# --- ranks of processes -----------------------------------------------------------------------------------------------


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))


def test_a_process_knows_its_rank_from_the_environment_of_torchrun(
    second_of_two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ProcessRank(1, 2, 1, 2) == find_rank()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_rank() is None
    monkeypatch.delenv("LOCAL_RANK")
    assert find_rank() is None


def test_each_rank_of_a_machine_takes_the_gpu_of_its_number() -> None:
    process = ProcessRank(rank=5, num_ranks=8, local_rank=1, num_local_ranks=4)
    assert "cuda:1" == stack_of_rank(Stack.from_mapping({"model": {"device": "cuda"}}), process).model.device
    assert "cpu" == stack_of_rank(Stack.from_mapping({"model": {"device": "cpu"}}), process).model.device
    with pytest.raises(StackError, match="'cuda:0' is one device, and there are 8 ranks; set it to 'cuda'"):
        stack_of_rank(Stack.from_mapping({"model": {"device": "cuda:0"}}), process)


def test_ranks_on_cpus_use_gloo_and_on_gpus_nccl_if_torch_has_it() -> None:
    stack, gpu = Stack.from_mapping({"model": {"device": "cuda"}}), torch.device("cuda:0")
    assert "gloo" == collectives_for(torch.device("cpu"), Stack())
    if torch.distributed.is_nccl_available():
        assert "nccl" == collectives_for(gpu, stack)
    else:
        with pytest.raises(StackError, match="ranks on 'cuda' communicate through nccl, which this build of torch"):
            collectives_for(gpu, stack)


def test_a_rank_whose_gpu_is_not_there_is_refused_before_it_joins(
    second_of_two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "63")
    process, expected = find_rank(), "model.device 'cuda:63' cannot be used"
    assert process is not None
    with (
        pytest.raises(StackError, match=expected),
        join_ranks(process, Stack.from_mapping({"model": {"device": "cuda"}})),
    ):
        pass


def test_several_ranks_read_no_prompts_from_standard_input(second_of_two: None) -> None:
    with pytest.raises(RequestError, match="several ranks, which share one standard input: give prompts in a file"):
        read_prompts(Path("-"))


# --- agreement --------------------------------------------------------------------------------------------------------


@attrs.frozen
class Together:
    """A rank whose partners' setups are known."""

    rank: int
    setups: list[RankSetup]

    @property
    def num_ranks(self) -> int:
        return len(self.setups)

    def exchange(self, own: RankSetup) -> list[RankSetup]:
        return self.setups


def setup(
    *,
    heads: int = 1,
    memory: int = 2**16,
    backend: str = "torch",
    block_size: int = 4,
    stack: Any = None,
    fingerprint: Fingerprint | None = None,
) -> RankSetup:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=4)
    chosen = (("0", backend, (Identity(backend, "module:Class"),)),)
    grouping = group_layers([LayerSpec(name="0", spec=spec)])
    return RankSetup(
        plan=plan_cache(grouping, memory_bytes=memory, max_model_len=64, max_num_batched_tokens=16),
        stack=Stack.from_mapping(stack or {}),
        chosen=chosen,
        fingerprint=fingerprint or Fingerprint(model="m", versions={}, config="", weights={}),
    )


def agreed(*setups: RankSetup, rank: int = 0) -> KVCachePlan:
    ranks: Any = Together(rank, list(setups))
    own: Any = SimpleNamespace(plan=setups[rank].plan, choices=(), stack=setups[rank].stack)
    return agree(ranks, own, setups[rank].fingerprint)


def test_the_rank_with_the_least_memory_decides_for_all() -> None:
    setups = (setup(), setup(memory=2**14))
    found = [agreed(*setups, rank=rank) for rank in (0, 1)]
    assert found[0] == found[1] == setups[1].plan
    assert found[0].num_slabs < agreed(setup(), setup()).num_slabs


def test_ranks_with_different_stacks_are_refused() -> None:
    other = {"cache": {"hybrid": False}, "limits": {"max_num_seqs": 3}, "rules": [{"layers": "0", "backend": "cpu"}]}
    with pytest.raises(
        StackError,
        match=r"rank 1 has another stack than rank 0: \[limits\] max_num_seqs, \[cache\] hybrid, \[\[rules\]\] differ",
    ):
        agreed(setup(), setup(stack=other))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"versions": {"torch": "2", "own": "2"}}, "rank 1 has other packages than rank 0: own 2 instead of 1"),
        ({"config": '{"a": 1, "heads": 4}'}, 'rank 1 has another config of m than rank 0: "heads": 4'),
        (
            {"weights": {"up": b"2"}},
            "rank 1 has other weights of m than rank 0: up; give all ranks the same checkpoint",
        ),
    ],
)
def test_ranks_with_other_packages_configs_or_weights_are_refused(changed: dict[str, Any], message: str) -> None:
    one = Fingerprint(
        model="m", versions={"torch": "2", "own": "1"}, config='{"a": 1, "heads": 2}', weights={"up": b"1"}
    )
    agreed(setup(fingerprint=one), setup(fingerprint=one))
    with pytest.raises(KVFrameError, match=re.escape(message)):
        agreed(setup(fingerprint=one), setup(fingerprint=attrs.evolve(one, **changed)))


def test_ranks_may_have_memory_and_devices_of_their_own() -> None:
    own = {"cache": {"memory": "3MiB", "key": "ab" * 32}, "model": {"device": "cuda:1"}}
    assert agreed(setup(), setup(stack=own)) == agreed(setup(), setup())


def test_ranks_that_chose_different_backends_are_refused() -> None:
    with pytest.raises(BackendError, match="layer '0' has backend 'torch' on rank 0 and 'cpu' on rank 1"):
        agreed(setup(), setup(backend="cpu"))


def test_ranks_that_plan_a_layer_differently_are_refused() -> None:
    with pytest.raises(
        SpecError, match=r"'0' is not the same on rank 0 and rank 1,.*block_size=4.* and .*block_size=8"
    ):
        agreed(setup(), setup(block_size=8))
    with pytest.raises(SpecError, match=r"num_kv_heads=1.* and .*num_kv_heads=2.*: give each rank as many heads"):
        agreed(setup(), setup(heads=2))


# --- block tables -----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sets(st.integers(0, 4), min_size=1), st.integers(0, 2**16)), min_size=1, max_size=8))
def test_a_rank_that_gets_the_changes_has_the_entries_that_each_batch_reads(steps: list[tuple[set[int], int]]) -> None:
    shape: Any = (5, 40, (4, 8, 4), (TOKENS, TOKENS, ENCODER), {ENCODER: 12})
    tables, other = BlockTables(*shape), BlockTables(*shape)
    entries = TableEntries(tables)
    for rows, seed in steps:
        random = np.random.default_rng(seed)
        for stack in tables.stacks:  # rows outside of the batch change too
            changed = random.random(stack.ids.shape) < 0.3
            stack.ids[changed] = random.integers(0, 100, changed.sum())
        lens = random.integers(1, 40, len(rows))
        batch = StepBatch(
            rows=np.array(sorted(rows)),
            num_computed=lens - 1,
            query_lens=np.ones(len(rows), dtype=np.int64),
            generating_indices=np.arange(len(rows)),
        )
        told = entries.take(batch)
        for stack, (at, ids) in zip(other.stacks, told, strict=True):
            stack.flat[at] = ids
        for table, copy in zip(tables, other, strict=True):
            for row, num_tokens in zip(batch.rows, lens, strict=True):
                width = -(-int(num_tokens) // table.block_size)
                assert table.ids[row, :width].tolist() == copy.ids[row, :width].tolist()
    assert [0] * len(told) == [len(at) for at, _ in entries.take(batch)]


# --- connections ------------------------------------------------------------------------------------------------------


def joined(num_ranks: int, join: Callable[[int], None]) -> dict[int, socket.socket]:
    """Return rank 0's connections, after ``join(port)`` has let the others connect."""
    threads: list[threading.Thread] = []

    def publish(port: int) -> None:
        threads.append(threading.Thread(target=join, args=(port,)))
        threads[0].start()

    found = listen(num_ranks, "127.0.0.1", SECRET, publish)
    threads[0].join()
    return found


def test_rank_0_takes_only_connections_that_begin_with_the_secret() -> None:
    def join(port: int) -> None:
        kept.append(connect(2, "127.0.0.1", port, b"another secret!!"))
        kept.append(connect(9, "127.0.0.1", port, SECRET))
        kept.extend(connect(rank, "127.0.0.1", port, SECRET) for rank in (2, 1))

    kept: list[socket.socket] = []
    found = joined(3, join)
    assert [1, 2] == list(found)
    for each in (*found.values(), *kept):
        each.close()


def test_a_rank_that_does_not_connect_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_CONNECTING_SECONDS", 0.1)
    with pytest.raises(EngineError, match="of 3 ranks, 1, 2 did not connect to rank 0"):
        listen(3, "127.0.0.1", SECRET, lambda port: None)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        return server.accept()[0], other


def pair() -> tuple[Leader, socket.socket, SimpleQueue[str | None]]:
    """Return rank 0, the other end of its connection to rank 1, and the sentences with which rank 0 would end."""
    mine, other = tcp_pair()
    ended: SimpleQueue[str | None] = SimpleQueue()
    return Leader({1: mine}, 2, ended.put), other, ended


def following(
    connection: socket.socket, end: Callable[[str | None], None] = lambda sentence: None, *, rank: int = 1
) -> Follower:
    return Follower(rank, 3, 3, connection, end)


def test_every_rank_gets_the_values_of_all() -> None:
    leader, other, _ = pair()
    follower = following(other)
    threading.Thread(target=leader.exchange, args=({"rank": 0},)).start()
    assert [{"rank": 0}, {"rank": 1}] == follower.exchange({"rank": 1})
    leader.close()
    follower.close()


def test_the_end_of_a_rank_is_said_once_and_not_after_the_engine_was_closed() -> None:
    leader, other, ended = pair()
    other.close()
    assert "rank 1 is lost: its process was killed or its machine was lost; all ranks end" == ended.get(timeout=10)
    leader.close()
    leader, other, ended = pair()
    leader.close()
    other.close()
    assert ended.empty()


def test_a_rank_that_sends_no_beat_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BEAT_SECONDS", 0.05)
    leader, other, ended = pair()
    expected = "rank 1 is lost: nothing was heard from it for 1 seconds, so its process is stopped or its machine hangs"
    assert f"{expected}; all ranks end" == ended.get(timeout=10)
    leader.close()
    other.close()


def test_a_rank_that_is_idle_sends_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BEAT_SECONDS", 0.05)
    leader, other, ended = pair()
    follower = following(other, ended.put)
    with pytest.raises(Empty):
        ended.get(timeout=2.5)  # three times as long as a silent rank is waited for
    leader.close()
    follower.close()


def test_a_message_that_cannot_be_read_ends_all() -> None:
    leader, other, ended = pair()
    message = b"cno_such_module\nvalue\n."  # pickled by a process with other packages
    other.sendall(links._LENGTH.pack(len(message)) + message)
    sentence = ended.get(timeout=10)
    assert sentence is not None
    assert "its message cannot be read (No module named 'no_such_module'); install the same packages" in sentence
    leader.close()
    other.close()


@pytest.mark.parametrize(("rank", "says"), [(1, True), (2, False)])
def test_rank_1_says_that_rank_0_was_killed(rank: int, says: bool) -> None:
    mine, other = tcp_pair()
    ended: SimpleQueue[str | None] = SimpleQueue()
    follower = following(other, ended.put, rank=rank)
    mine.close()
    expected = "rank 0 is lost: its process was killed or its machine was lost; all ranks end" if says else None
    assert expected == ended.get(timeout=10)
    follower.close()


def test_a_rank_that_rank_0_told_why_all_end_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframe_engine.ranks.follower._MOMENT_SECONDS", 0.05)
    mine, other = tcp_pair()
    lost, lost_too = tcp_pair()
    ended: SimpleQueue[str | None] = SimpleQueue()
    said: SimpleQueue[str | None] = SimpleQueue()

    def end(sentence: str | None) -> None:
        said.put(sentence)
        mine.close()

    Leader({1: mine, 2: lost}, 3, end)
    follower = following(other, ended.put)
    lost_too.close()
    assert "rank 2 is lost" in str(said.get(timeout=10))
    assert ended.get(timeout=10) is None
    follower.close()


def test_rank_0_may_report_an_error_of_its_own_before_that_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframe_engine.ranks.leader.GRACE_SECONDS", 0.2)
    leader, other, ended = pair()
    other.sendall(packed(Failure("the same mistake")))
    leader.close()
    other.close()
    with pytest.raises(Empty):
        ended.get(timeout=0.5)
    leader, other, ended = pair()
    other.sendall(packed(Failure("another mistake")))
    assert "rank 1: another mistake" == ended.get(timeout=10)
    leader.close()
    other.close()


def wait_in(module: str, lock: Any, limit: StepLimit) -> None:
    """Wait in a step for a lock, in code of a module."""
    code = "def wait(lock, limit):\n    with limit:\n        lock.acquire()\n    lock.release()\n"
    space: dict[str, Any] = {"__name__": module}
    exec(code, space)
    threading.Thread(target=space["wait"], args=(lock, limit), daemon=True).start()


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("hanging", "line 3 of 'hanging'"),
        ("torch.distributed.collectives", None),
        (torch.cuda.Event.synchronize.__module__, None),
    ],
)
def test_a_step_that_does_not_end_is_told_with_its_line_unless_it_waits_for_another_rank(
    module: str, expected: str | None
) -> None:
    lines: SimpleQueue[str | None] = SimpleQueue()
    lock = threading.Lock()
    with lock:
        wait_in(module, lock, StepLimit(0.2, lines.put))
        assert expected == lines.get(timeout=10)


@pytest.mark.parametrize(
    ("moments", "num_late"),
    [
        ("b...e" * 3 + "." * 10, 0),  # steps that end in time, and an idle rank
        ("b..." + "eb..." * 5, 0),  # each begins as soon as the one before has ended
        ("b...e.b.....", 1),
        ("b" + "." * 20, 1),
    ],
)
def test_a_step_is_late_after_its_own_moments_only(
    moments: str, num_late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of four moments: steps begin (``b``) and end (``e``) while moments pass."""
    late: list[str | None] = []

    class Moments:
        def __init__(self) -> None:
            self._left = iter(re.findall(r"[be]*\.", moments))

        def wait(self, seconds: float) -> bool:
            assert seconds == 1
            for each in next(self._left, "x"):
                if each in "be":
                    limit.__enter__() if each == "b" else limit.__exit__(None, None, None)
                if each == "x":
                    return True
            return False

    class Thread:
        def __init__(self, **options: Any) -> None: ...

        def start(self) -> None: ...

    with monkeypatch.context() as patched:
        patched.setattr(step_limit.threading, "Event", Moments)
        patched.setattr(step_limit.threading, "Thread", Thread)
        limit = StepLimit(4, late.append)
    limit._measure()
    assert num_late == len(late)


class _Runner:
    """What rank 0 asks to compute a step: it waits, and then fails if an error is given."""

    tokens = np.zeros((1, 8), dtype=np.int64)

    def __init__(self, event: threading.Event, error: Exception | None = None) -> None:
        self._event, self._error = event, error

    def compute(self, *arguments: Any) -> None:
        self._event.wait(20)
        if self._error is not None:
            raise self._error


def start_step(runner: Any) -> None:
    """Let a thread compute a step of one request."""
    batch = StepBatch(
        rows=np.zeros(1, dtype=np.int64),
        num_computed=np.zeros(1, dtype=np.int64),
        query_lens=np.ones(1, dtype=np.int64),
        generating_indices=np.zeros(1, dtype=np.int64),
    )
    threading.Thread(target=runner.compute, args=(batch, batch.generating_indices, {}), daemon=True).start()


@pytest.mark.parametrize("is_told", [False, True])
def test_rank_0_ends_all_if_a_step_does_not_end(is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank that hangs says so. Without it, rank 0 says where it is itself."""
    monkeypatch.setattr("kvframe_engine.ranks.leader.GRACE_SECONDS", 0.2)
    leader, other, ended = pair()
    event = threading.Event()
    runner: Any = _Runner(event)
    leader.lead(runner, BlockTables(1, 8, [4]), on_failed_step=lambda: None, max_step_seconds=0.5)
    start_step(runner)
    if is_told:
        other.sendall(packed(Failure("a step has not ended")))
    sentence = str(ended.get(timeout=10))
    if is_told:
        assert "rank 1: a step has not ended" == sentence
    else:
        assert sentence.startswith("rank 0: a step has not ended within 0.5 seconds: it is in line ")
        assert "raise engine.max_step_seconds in the stack" in sentence
    event.set()
    leader.close()
    other.close()


def test_rank_0_answers_its_callers_before_it_ends_with_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends although the answers are never complete, and a step that fails meanwhile is not reported."""
    monkeypatch.setattr("kvframe_engine.ranks.leader.ANSWERING_SECONDS", 0.3)
    monkeypatch.setattr("kvframe_engine.ranks.leader._MOMENT_SECONDS", 0.05)
    leader, other, ended = pair()
    failed: SimpleQueue[str] = SimpleQueue()
    step, answering, never = threading.Event(), threading.Event(), threading.Event()

    def before_end() -> None:
        assert ended.empty()
        answering.set()
        never.wait(20)

    runner: Any = _Runner(step, RuntimeError("the other rank closed the connection"))
    leader.lead(runner, BlockTables(1, 8, [4]), on_failed_step=failed.put, before_end=before_end, max_step_seconds=60)
    start_step(runner)
    other.close()
    assert answering.wait(10)
    step.set()
    assert "rank 1 is lost: its process was killed or its machine was lost; all ranks end" == ended.get(timeout=10)
    with pytest.raises(Empty):
        failed.get(timeout=0.5)
    never.set()
    leader.close()


def test_a_rank_that_waits_in_its_set_up_ends_with_rank_0() -> None:
    leader, other, _ = pair()
    follower = following(other)
    leader.close()
    with pytest.raises(SystemExit, match="71"):
        follower.exchange(None)
    follower.close()


def test_values_of_any_size_arrive_in_order() -> None:
    mine, other = tcp_pair()
    found = Link(other, on_failure=lambda sentence: None, on_lost=lambda reason: None)
    link = Link(mine, on_failure=lambda sentence: None, on_lost=lambda reason: None)
    values = [END, b"x" * 3_000_000, {"small": 1}]
    for value in values:
        link.send(packed(value))
    assert values == [found.values.get(timeout=10) for _ in values]
    link.close()
    found.close()
