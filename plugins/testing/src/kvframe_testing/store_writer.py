"""A process that writes records to a page store. Imports the contract alone.

``python -m kvframe_testing.store_writer`` reads a pickled ``Job`` from its input. It prints a line when the store is
open, waits for one on its input, so that several processes begin together, and prints one after each batch. With
``num_kills``, it starts writers one after the other and kills each; it prints a line, and waits for one on its input.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable

import attrs

from kvframe.contract.page_store import PageStore

_REPEATED = 4099
"""Bytes of a record after which it repeats: a prime, so that a page at another offset differs."""

_MOST_SECONDS = 0.04
"""How long a writer writes before it is killed, at most."""


@attrs.frozen(kw_only=True)
class Job:
    """What a writer writes.

    Attributes:
        store: The store.
        origin: With which origin it is opened.
        seed: The keys are those of this seed; of a killed writer, those of ``killed_seed``.
        num_keys: How many keys there are.
        num_rounds: How often all keys are written.
        record_bytes: The size of a record.
        batch: How many records are written at once.
        forgets: Whether each second batch is forgotten after it was written.
        backwards: Whether the last keys are written first.
        num_kills: How many writers are killed; 0 to write without.
    """

    store: PageStore
    origin: str
    seed: str
    num_keys: int
    num_rounds: int
    record_bytes: int
    batch: int
    forgets: bool = False
    backwards: bool = False
    num_kills: int = 0

    def killed_seed(self, kill: int) -> str:
        """Return the seed of a writer that is killed."""
        return f"{self.seed}-{kill}"


def key_of(seed: str, index: int) -> bytes:
    """Return a key of 32 bytes."""
    return hashlib.sha256(f"{seed}-{index}".encode()).digest()


def record_of(key: bytes, num_bytes: int) -> bytes:
    """Return the record of a key, so that every process knows it."""
    return (hashlib.shake_128(key).digest(_REPEATED) * (num_bytes // _REPEATED + 1))[:num_bytes]


def _tell(line: bytes) -> None:
    # One system call, because a writer may be killed between two.
    os.write(1, line)


def write_all(job: Job, begin: Callable[[], object] = lambda: None) -> None:
    """Write what a job says, after ``begin`` has returned."""
    opened = job.store.open(job.origin)
    _tell(b"open\n")
    begin()
    order = range(job.num_keys)[:: -1 if job.backwards else 1]
    for round_number in range(job.num_rounds):
        for number, start in enumerate(range(0, job.num_keys, job.batch)):
            keys = [key_of(job.seed, index) for index in order[start : start + job.batch]]
            opened.write(keys, [memoryview(record_of(key, job.record_bytes)) for key in keys])
            if job.forgets and (number + round_number) % 2:
                opened.forget(keys)
            _tell(b"batch\n")
    opened.close()


def kill_writers(job: Job) -> None:
    """Start writers and kill each at a random moment."""
    job.store.open(job.origin).close()
    _tell(b"open\n")
    sys.stdin.buffer.readline()
    delays = random.Random(job.seed)
    for kill in range(job.num_kills):
        writer = os.fork()
        if not writer:
            write_all(attrs.evolve(job, seed=job.killed_seed(kill)))
            os._exit(0)
        time.sleep(delays.uniform(0.0, _MOST_SECONDS))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        _tell(b"killed\n")
        sys.stdin.buffer.readline()


if __name__ == "__main__":
    job = pickle.load(sys.stdin.buffer)
    if job.num_kills:
        kill_writers(job)
    else:
        write_all(job, begin=sys.stdin.buffer.readline)
