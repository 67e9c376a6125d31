"""Checks that a page store keeps the laws of the contract, in one process and in several. Imports no torch.

A store may lose records at any time. So a check fails if a store returns other bytes than were written, says something
else than it does, or keeps nothing at all, and not if a record is missing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

import attrs

from kvframe.contract.page_store import OpenPageStore, PageStore
from kvframe_testing.checks import Check, Checks, make_part
from kvframe_testing.laws import ConformanceError, answer_of, require
from kvframe_testing.store_writer import Job, key_of, record_of

SIZES = (512, 4097, 65_536, 2**20, 2**24 + 7)
"""Bytes of records; those larger than an eighth of the store are left out."""

MOST_CAPACITY = 2**26
"""The bound of a larger store is not checked, because that would take long."""

NUM_KILLS, NUM_KILLS_WHOLE = 30, 300
"""How many writers are killed in usual runs, and in whole ones."""

NO_BOUND, LARGE_BOUND, OWN_PROCESS = "no_capacity", "large_capacity", "own_process"
"""Codes of what is not checked: the store names no capacity or a large one; each process has records of its own."""

_ORIGIN, _OTHER_ORIGIN = "5f" * 16, "a0" * 16
_BATCH = 8
_LATE_SECONDS = 0.1
_LONGEST_SECONDS = 120.0
"""How long a check may take before the store counts as stuck."""


def check_page_store(store: PageStore) -> None:
    """Check a store: its options, every method, two that are open at once, and processes that write and are killed.

    * *form*: the store is frozen, equal if its options are, and its answers have the promised types and lengths;
    * *whole*: a record is read as it was written, or not at all: also while it is written, after its writer was
      killed, after it was written again, and if the buffer has another size;
    * *copies*: a record does not change if the buffers do that were given to ``write``, and no buffer changes after
      ``read`` has returned;
    * *honest*: what ``find`` says, ``read`` does; ``write`` returns how many keys have a record; what is forgotten is
      not found;
    * *useful*: at least half of a few records are found, also when the store was closed and opened again;
    * *bound*: the records that are found are at most the store's capacity, and new records replace others.
    """
    for check in _checks_of(store, NUM_KILLS):
        check.run()


def page_store_checks(
    store_class: type[PageStore], options: Mapping[str, Any] | None = None, *, name: str = "", whole: bool = False
) -> Checks:
    """Return the checks of a store, which write to it; ``whole`` kills more writers."""
    part = f"page store {name or store_class.name!r}"
    store = make_part(part, store_class, options)
    second_store = make_part(part, store_class, options)
    form = Check(name="options", features=("options",), run=partial(_check_options, store, second_store))
    return Checks(part=part, checks=(form, *_checks_of(store, NUM_KILLS_WHOLE if whole else NUM_KILLS)))


def _checks_of(store: PageStore, num_kills: int) -> list[Check]:
    capacity = answer_of("form: capacity", lambda: store.capacity)
    is_size = type(capacity) is int and capacity > 0
    require(capacity is None or is_size, f"form: capacity has to be a number of bytes or None, not {capacity!r}")
    sizes = [size for size in SIZES if capacity is None or size <= capacity // 8] or [SIZES[0]]
    checks: list[tuple[str, str, Callable[[PageStore], str | None]]] = [
        ("secret", "the secret", _check_secret),
        ("empty", "empty batches", _check_empty),
        ("unknown", "unknown keys", _check_unknown),
        *((f"size={size}", f"records of {size:,} bytes", partial(_check_round_trip, size=size)) for size in sizes),
        ("contents", "any bytes", _check_contents),
        ("similar-keys", "similar keys", _check_similar_keys),
        ("many", "many records at once", _check_many),
        ("other-sizes", "buffers of another size", _check_other_sizes),
        ("duplicates", "keys that are given twice", _check_duplicates),
        ("written-again", "records that are written again", _check_written_again),
        ("copies", "buffers that change after a write", _check_copies),
        ("late", "answers that are late", _check_late),
        ("forget", "forgotten records", _check_forget),
        ("reopen", "closing and opening again", _check_reopen),
        ("two-open", "two open stores", _check_two_open),
        ("origins", "several origins", _check_origins),
        ("bound", "the bound", _check_bound),
        ("processes", "two writers and a reader in processes", _check_processes),
        (f"killed={num_kills}", "writers that are killed", partial(_check_killed, num_kills=num_kills)),
    ]
    return [Check(name=name, features=(feature,), run=partial(_in_thread, run, store)) for name, feature, run in checks]


# --- a store whose answers are checked --------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class _CheckedStore:
    """An open store, each of whose answers has its form checked."""

    opened: OpenPageStore

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return _flags("find", answer_of("form: find()", self.opened.find, keys), len(keys))

    def read(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bytes | None]:
        """Return the records, None for each that was not read."""
        buffers = [bytearray(size) for size in sizes]
        are_read = self.read_into(keys, buffers)
        return [bytes(buffer) if is_read else None for buffer, is_read in zip(buffers, are_read, strict=True)]

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[bytearray]) -> list[bool]:
        views = [memoryview(buffer) for buffer in buffers]
        return _flags("read", answer_of("form: read()", self.opened.read, keys, views), len(keys))

    def write(self, keys: Sequence[bytes], records: Sequence[bytes | bytearray]) -> int:
        views = [memoryview(record).toreadonly() for record in records]
        count: int = answer_of("form: write()", self.opened.write, keys, views)
        require(
            type(count) is int and 0 <= count <= len(keys),
            f"form: write() of {len(keys)} keys has to return a number up to that, not {count!r}",
        )
        return count

    def forget(self, keys: Sequence[bytes]) -> None:
        answer_of("form: forget()", self.opened.forget, keys)

    def keep(self, keys: Sequence[bytes], num_bytes: int) -> None:
        """Write the records of keys; require that half of them are found, and as many as ``write`` says."""
        count = self.write(keys, [record_of(key, num_bytes) for key in keys])
        num_found = sum(self.find(keys))
        require(count == num_found, f"honest: write() says {count} keys have a record, and find() finds {num_found}")
        require(2 * count >= len(keys), f"useful: of {len(keys)} records of {num_bytes:,} bytes, {count} are kept")

    def require_absent(self, keys: Sequence[bytes], which_keys: str) -> None:
        """Require that no record of keys is found or read."""
        require(not any(self.find(keys)), f"honest: find() finds {which_keys}")
        records = self.read(keys, [SIZES[0]] * len(keys))
        require(records == [None] * len(keys), f"honest: read() reads records of {which_keys}")

    def require_right(self, keys: Sequence[bytes], num_bytes: int, *, when: str) -> int:
        """Require that found records are read and have their bytes; return how many were read."""
        are_found = self.find(keys)
        records = self.read(keys, [num_bytes] * len(keys))
        for key, is_found, record in zip(keys, are_found, records, strict=True):
            require(
                record is None or record == record_of(key, num_bytes),
                f"whole: a record of {num_bytes:,} bytes is read with other bytes {when}",
            )
            require(is_found or record is None, f"honest: a record is read that find() does not find, {when}")
            require(record is not None or not is_found, f"honest: find() finds a record that is not read, {when}")
        return sum(record is not None for record in records)


def _flags(method: str, answers: Any, length: int) -> list[bool]:
    try:
        flags = list(answers)
    except TypeError:
        flags = []
    require(
        len(flags) == length and all(flag in (True, False) for flag in flags),
        f"form: {method}() of {length} keys has to return as many times True or False, not {answers!r}",
    )
    return [bool(flag) for flag in flags]


@contextmanager
def _open(store: PageStore, origin: str = _ORIGIN) -> Iterator[_CheckedStore]:
    opened = answer_of("form: open()", store.open, origin)
    require(isinstance(opened, OpenPageStore), f"form: open() has to return an OpenPageStore, not {opened!r}")
    try:
        yield _CheckedStore(opened)
    finally:
        answer_of("form: close()", opened.close)


def _new_keys(count: int) -> list[bytes]:
    seed = os.urandom(8).hex()
    return [key_of(seed, index) for index in range(count)]


def _in_thread(run: Callable[[PageStore], str | None], store: PageStore) -> str | None:
    """Run a check in a thread of its own, as an engine does, and give up on a store that is stuck."""
    result: list[str | None] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            result.append(run(store))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_LONGEST_SECONDS)
    require(not thread.is_alive(), f"useful: the store has not answered for {_LONGEST_SECONDS:.0f} seconds")
    for error in errors:
        if isinstance(error, ConformanceError):
            raise ConformanceError(f"{store!r}: {error}") from error
        raise error
    return result[0]


# --- options and declarations -----------------------------------------------------------------------------------------


def _check_options(store: PageStore, second_store: PageStore) -> None:
    require(store == second_store, f"form: two stores with the same options differ: {store!r} and {second_store!r}")
    try:
        hash(store)
    except TypeError as error:
        raise ConformanceError(f"form: a store is a frozen value, and {store!r} has no hash: {error}") from error


def _check_secret(store: PageStore) -> None:
    secrets = [answer_of("form: local_secret()", store.local_secret) for _ in range(2)]
    for secret in secrets:
        is_secret = isinstance(secret, bytes) and len(secret) == 32
        require(secret is None or is_secret, "form: local_secret() has to return 32 bytes or None")
    require(secrets[0] == secrets[1], "form: local_secret() returns another secret when it is called again")


# --- one open store ---------------------------------------------------------------------------------------------------


def _check_empty(store: PageStore) -> None:
    with _open(store) as opened:
        opened.find([])
        opened.read([], [])
        opened.write([], [])
        opened.forget([])


def _check_unknown(store: PageStore) -> None:
    with _open(store) as opened:
        keys = _new_keys(_BATCH)
        opened.require_absent(keys, "keys that were never written")
        opened.forget(keys)
        known_keys = _new_keys(_BATCH)
        opened.keep(known_keys, SIZES[0])
        mixed_keys = [key for pair in zip(keys, known_keys, strict=True) for key in pair]
        opened.require_right(mixed_keys, SIZES[0], when="beside unknown keys")
        opened.require_absent(keys, "unknown keys beside known ones")


def _check_round_trip(store: PageStore, *, size: int) -> None:
    most_bytes = min(2**25, (store.capacity or 2**40) // 4)
    with _open(store) as opened:
        keys = _new_keys(max(1, min(_BATCH, most_bytes // size)))
        opened.keep(keys, size)
        require(opened.require_right(keys, size, when="after it was written") > 0, "useful: nothing is read")
        opened.require_right(keys[::-1], size, when="in another order")


def _check_contents(store: PageStore) -> None:
    """Check bytes that a store could take for an end, a space or nothing."""
    size = SIZES[0]
    contents = [bytes(size), b"\xff" * size, b" " * size, b"\r\n" * (size // 2), bytes(range(256)) * (size // 256)]
    contents += [bytes(size - 1) + b"\n", b"\x1a" + bytes(size - 1)]
    with _open(store) as opened:
        keys = _new_keys(len(contents))
        opened.write(keys, contents)
        for content, record in zip(contents, opened.read(keys, [size] * len(keys)), strict=True):
            require(record in (None, content), f"whole: a record of bytes like {content[-3:]!r} is read with others")


def _check_similar_keys(store: PageStore) -> None:
    """Check keys that differ in a bit, or have bytes with a meaning in texts and names of files."""
    (base,) = _new_keys(1)
    number = int.from_bytes(base, "big")
    keys = [base, *((number ^ (1 << bit)).to_bytes(32, "big") for bit in range(256))]
    keys += [byte * 32 for byte in (b"\0", b"\n", b"/", b".", b" ", b"\xff", b"a", b"A")]
    with _open(store) as opened:
        opened.forget(keys)
        half = keys[::2]
        opened.keep(half, SIZES[0])
        opened.require_right(keys, SIZES[0], when="beside similar keys")
        opened.require_absent(keys[1::2], "keys that are similar to written ones")


def _check_many(store: PageStore) -> None:
    capacity = store.capacity or 2**24
    with _open(store) as opened:
        keys = _new_keys(max(_BATCH, min(2000, capacity // (8 * SIZES[0]))))
        opened.keep(keys, SIZES[0])
        opened.require_right(keys, SIZES[0], when="among many")


def _check_other_sizes(store: PageStore) -> None:
    size, other_sizes = SIZES[0], [1, 256, 511, 513, 4096]
    with _open(store) as opened:
        keys = _new_keys(_BATCH)
        opened.keep(keys, size)
        for other_size in other_sizes:
            require(
                opened.read(keys, [other_size] * len(keys)) == [None] * len(keys),
                f"whole: a record of {size} bytes is read to a buffer of {other_size}",
            )
        sizes = [size if index % 2 else other_sizes[index // 2] for index in range(len(keys))]
        records = opened.read(keys, sizes)
        require(records[::2] == [None] * len(records[::2]), "whole: records are read to buffers of another size")
        require(
            all(record in (None, record_of(key, size)) for key, record in zip(keys, records, strict=True)),
            "whole: a record is read with other bytes beside buffers of another size",
        )
        opened.require_right(keys, size, when="after buffers of another size")


def _check_duplicates(store: PageStore) -> None:
    with _open(store) as opened:
        keys = _new_keys(_BATCH)
        pairs = [key for key in keys for _ in range(2)]
        count = opened.write(pairs, [record_of(key, SIZES[0]) for key in pairs])
        require(count == sum(opened.find(pairs)), "honest: write() counts keys that are given twice in another way")
        opened.require_right(pairs, SIZES[0], when="if its key is given twice")
        opened.keep(keys, SIZES[0])
        opened.require_right(keys, SIZES[0], when="after it was written twice")
        opened.forget(pairs)
        opened.require_absent(keys, "keys that were forgotten twice")


def _check_written_again(store: PageStore) -> None:
    """Check that one whole record stays, of either size."""
    small, large = SIZES[0], SIZES[1]
    with _open(store) as opened:
        keys = _new_keys(_BATCH)
        opened.keep(keys, small)
        written_records = {key: [record_of(key, small)] for key in keys}
        for turn, size in enumerate((small, large, small)):
            records = [record_of(key[:turn], size) for key in keys]
            for key, record in zip(keys, records, strict=True):
                written_records[key].append(record)
            count = opened.write(keys, records)
            require(count == sum(opened.find(keys)), "honest: write() counts keys that have a record in another way")
            for key, small_record, large_record in zip(
                keys, opened.read(keys, [small] * len(keys)), opened.read(keys, [large] * len(keys)), strict=True
            ):
                require(small_record is None or large_record is None, "whole: a key has records of two sizes")
                require(
                    all(record is None or record in written_records[key] for record in (small_record, large_record)),
                    "whole: a record that was written again is read with bytes of both",
                )


def _check_copies(store: PageStore) -> None:
    with _open(store) as opened:
        keys = _new_keys(_BATCH)
        buffers = [bytearray(record_of(key, SIZES[1])) for key in keys]
        opened.write(keys, buffers)
        for buffer, key in zip(buffers, keys, strict=True):
            require(bytes(buffer) == record_of(key, SIZES[1]), "copies: write() changes the records that it is given")
            buffer[:] = bytes(len(buffer))
        opened.require_right(keys, SIZES[1], when="after the buffers changed that were given to write()")


def _check_late(store: PageStore) -> None:
    """Check that nothing happens to a buffer after ``read`` has returned."""
    with _open(store) as opened:
        keys, unknown_keys = _new_keys(_BATCH), _new_keys(_BATCH)
        opened.keep(keys, SIZES[2])
        buffers = [bytearray(SIZES[2]) for _ in (*keys, *unknown_keys)]
        are_read = opened.read_into([*keys, *unknown_keys], buffers)
        for key, is_read, buffer in zip(keys, are_read, buffers, strict=False):
            require(
                not is_read or bytes(buffer) == record_of(key, SIZES[2]),
                "whole: a buffer does not have its record when read() returns",
            )
        for buffer in buffers:
            buffer[:] = b"\x55" * len(buffer)
        time.sleep(_LATE_SECONDS)
        for buffer in buffers:
            require(bytes(buffer) == b"\x55" * len(buffer), "copies: a buffer changes after read() has returned")


def _check_forget(store: PageStore) -> None:
    with _open(store) as opened:
        keys, forgotten_keys = _new_keys(_BATCH), _new_keys(_BATCH)
        for key, forgotten_key in zip(keys, forgotten_keys, strict=True):
            opened.keep([key, forgotten_key], SIZES[0])
        opened.forget([*forgotten_keys, *_new_keys(2)])
        opened.require_absent(forgotten_keys, "forgotten keys")
        opened.require_right(keys, SIZES[0], when="after others were forgotten")
        opened.keep(forgotten_keys, SIZES[0])
        opened.require_right(forgotten_keys, SIZES[0], when="after it was forgotten and written again")
        opened.forget(forgotten_keys)
    with _open(store) as opened:
        opened.require_absent(forgotten_keys, "forgotten keys when the store is opened again")


# --- several open stores ----------------------------------------------------------------------------------------------


def _check_reopen(store: PageStore) -> None:
    keys = _new_keys(_BATCH)
    with _open(store) as opened:
        opened.keep(keys, SIZES[1])
    with _open(store) as opened:
        num_read = opened.require_right(keys, SIZES[1], when="after the store was opened again")
        require(2 * num_read >= len(keys), f"useful: of {len(keys)} records, a store opened again has {num_read}")
        opened.keep(_new_keys(_BATCH), SIZES[1])


def _check_two_open(store: PageStore) -> None:
    keys = _new_keys(2 * _BATCH)
    with _open(store) as first_store, _open(store) as second_store:
        for index, key in enumerate(keys):
            writer, reader = (first_store, second_store) if index % 2 else (second_store, first_store)
            writer.keep([key], SIZES[0])
            reader.require_right(keys, SIZES[0], when="by a second open store")
        first_store.forget(keys[:_BATCH])
        second_store.require_right(keys[_BATCH:], SIZES[0], when="after a second open store forgot others")
        second_store.forget(keys[:_BATCH])
        for opened in (first_store, second_store):
            opened.require_absent(keys[:_BATCH], "keys that both open stores forgot")
    with _open(store) as opened:
        opened.require_right(keys, SIZES[0], when="after two open stores were closed")


def _check_origins(store: PageStore) -> None:
    keys, other_keys = _new_keys(_BATCH), _new_keys(_BATCH)
    with _open(store) as first_store, _open(store, _OTHER_ORIGIN) as second_store:
        first_store.keep(keys, SIZES[0])
        second_store.keep(other_keys, SIZES[1])
        first_store.require_right(keys, SIZES[0], when="beside another origin")
        second_store.require_right(other_keys, SIZES[1], when="beside another origin")


def _check_bound(store: PageStore) -> str | None:
    capacity = store.capacity
    if capacity is None:
        return NO_BOUND
    if capacity > MOST_CAPACITY:
        return LARGE_BOUND
    size = max(256, min(2**20, capacity // 32))
    keys = _new_keys(2 * capacity // size)
    with _open(store) as opened:
        for start in range(0, len(keys), 4):
            opened.write(keys[start : start + 4], [record_of(key, size) for key in keys[start : start + 4]])
        num_read = opened.require_right(keys, size, when="in a full store")
        require(
            num_read * size <= capacity, f"bound: {num_read} records of {size:,} bytes are found in {capacity:,} bytes"
        )
        require(any(opened.find(keys[-4:])), "bound: a full store keeps no new records")
        require(num_read > 1, "bound: a full store keeps one record only")
        (larger,) = _new_keys(1)
        opened.write([larger], [bytes(capacity + 1)])
        require(not any(opened.find([larger])), "bound: a record is found that is larger than the store")
    return None


# --- several processes ------------------------------------------------------------------------------------------------


@contextmanager
def _writing(*jobs: Job) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a process for each job; all begin once every store is open. Processes that are left over are killed."""
    command = [sys.executable, "-m", "kvframe_testing.store_writer"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile())
        processes = []
        for job in jobs:
            try:
                pickled = pickle.dumps(job)
            except Exception as error:
                raise ConformanceError(f"form: the store cannot be given to another process: {error}") from error
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            _pipe(process.stdin).write(pickled)
            _pipe(process.stdin).flush()
            processes.append(process)
        for process in processes:
            is_open = _pipe(process.stdout).readline() == b"open\n"
            require(is_open, f"form: open() failed in another process: {_last_line(errors)}")
        for process in processes:
            _pipe(process.stdin).write(b"begin\n")
            _pipe(process.stdin).flush()
        yield processes
        for process in processes:
            is_right = process.wait() in (0, -signal.SIGKILL)
            require(is_right, f"form: a process that writes beside others failed: {_last_line(errors)}")


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed no error"


def _check_processes(store: PageStore) -> str | None:
    """Read while two processes write the same keys, and forget some of them."""
    size = _fitting(store, 2**18)
    job = Job(
        store=store,
        origin=_ORIGIN,
        seed=os.urandom(8).hex(),
        num_keys=9,
        num_rounds=60,
        record_bytes=size,
        batch=3,
        forgets=True,
    )
    keys = [key_of(job.seed, index) for index in range(job.num_keys)]
    num_read = 0
    with _open(store) as opened, _writing(job, attrs.evolve(job, backwards=True)) as processes:
        # A process that cannot print waits, so its lines are read.
        for process in processes:
            threading.Thread(target=_pipe(process.stdout).read, daemon=True).start()
        while any(process.poll() is None for process in processes):
            records = opened.read(keys, [size] * len(keys))
            for key, record in zip(keys, records, strict=True):
                require(
                    record is None or record == record_of(key, size),
                    "whole: a record is read with other bytes while two processes write it",
                )
            num_read += sum(record is not None for record in records)
        num_read += opened.require_right(keys, size, when="after two processes wrote it")
        opened.keep(_new_keys(_BATCH), SIZES[0])
    return None if num_read else OWN_PROCESS


def _check_killed(store: PageStore, *, num_kills: int) -> None:
    """Kill processes that write, and read everything that they could have written."""
    job = Job(
        store=store,
        origin=_ORIGIN,
        seed=os.urandom(8).hex(),
        num_keys=10**6,
        num_rounds=1,
        record_bytes=_fitting(store, 2**18),
        batch=8,
        num_kills=num_kills,
    )
    with _open(store) as opened, _writing(job) as (process,):
        for kill in range(num_kills):
            num_batches = 0
            while (line := _pipe(process.stdout).readline()) != b"killed\n":
                require(line != b"", "form: a process that starts writers ended")
                num_batches += line == b"batch\n"
            # The last batch is the one that was being written.
            start, stop = max(0, num_batches - 8), num_batches + 1
            keys = [key_of(job.killed_seed(kill), index) for index in range(job.batch * start, job.batch * stop)]
            opened.require_right(keys, job.record_bytes, when="after its writer was killed")
            _pipe(process.stdin).write(b"next\n")
            _pipe(process.stdin).flush()
        keys = keys[-job.batch :]
        opened.keep(keys, job.record_bytes)
        opened.require_right(keys, job.record_bytes, when="after another writer was killed while it wrote it")


def _fitting(store: PageStore, num_bytes: int) -> int:
    """Return a size of records of which the store has 32."""
    return num_bytes if store.capacity is None else max(256, min(num_bytes, store.capacity // 64))
