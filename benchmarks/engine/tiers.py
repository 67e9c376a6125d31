"""Measure the cost of a long prefix that is found on the device, in host memory, on disk or in a server.

See benchmarks/README.md.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, cast

import attrs
import click
import torch
from kvframe_disk.store import DiskStore
from kvframe_engine.tiers import tiers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
)

from benchmarks.harness import models, options
from benchmarks.harness.pages import Column, case_page, figures
from benchmarks.harness.record import benchmark, by_turns, counted, measure_each, ratios
from kvframe import Engine, RequestOutput, SamplingParams, Stack
from kvframe.contract import OpenPageStore
from tests.support.engines import fetcher_of
from tests.support.plugins import plugin
from tests.support.store_server import PROGRAM, StoreServer

VOCABULARY, TAIL = 1024, 32
COMPUTED, DEVICE, HOST, DISK, SERVER = "computed again", "device", "host memory", "disk", "server"
SLOW = "slow disk"
SLOW_PLACES = {SLOW: (True, True), f"{SLOW}, always read": (False, True), f"{SLOW}, always waited for": (False, False)}
"""By name, whether an engine skips reads that take longer than computing, and whether a request's wait has a limit."""

FIRST_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)
NO_END: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


@attrs.frozen(kw_only=True)
class Model:
    """A random model.

    Attributes:
        name: The name for ``--model`` and the record.
        what: Its layers, in words.
        save: Saves it into a folder, for requests of a number of tokens.
    """

    name: str
    what: str
    save: Callable[[str, int], None]


def _attention(longest: int, hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": 6,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 256),
        "head_dim": 64,
        "max_position_embeddings": longest,
        **NO_END,
    }


def _save_full(path: str, longest: int, hidden: int) -> None:
    LlamaForCausalLM(LlamaConfig(**_attention(longest, hidden))).save_pretrained(path)


def _save_hybrid(path: str, longest: int, hidden: int) -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(layer_types=types, sliding_window=512, **_attention(longest, hidden))
    Gemma3ForCausalLM(config).save_pretrained(path)


def _save_states(path: str, longest: int, hidden: int) -> None:
    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        state_size=32,
        num_heads=hidden // 16,
        head_dim=32,
        n_groups=1,
        num_hidden_layers=6,
        chunk_size=64,
        **NO_END,
    )
    Mamba2ForCausalLM(config).save_pretrained(path)


MODELS = (
    Model(name="full", what="6 layers of full attention", save=partial(_save_full, hidden=512)),
    Model(
        name="hybrid",
        what="4 layers with windows of 512 tokens and 2 of full attention",
        save=partial(_save_hybrid, hidden=512),
    ),
    Model(name="states", what="6 layers with Mamba-2 states", save=partial(_save_states, hidden=384)),
    Model(name="tiny-full", what="6 layers of full attention", save=partial(_save_full, hidden=64)),
)


class Place:
    """An engine that finds the prefix in one place.

    Attributes:
        name: The place.
        engine: The engine.
    """

    def __init__(
        self, name: str, path: str, num_tokens: int, cache: Mapping[str, Any], plugins: Sequence[ModuleType] = ()
    ) -> None:
        """Make the engine, and compute the prefix once."""
        self.name = name
        longest = num_tokens + 2 * TAIL
        stack = {
            "cache": {"memory": "1GiB", **cache},
            "limits": {"max_model_len": longest, "max_num_batched_tokens": 1024, "max_num_seqs": 4},
            "engine": {"self_check": False},
        }
        self.engine = Engine.from_pretrained(path, stack=Stack.from_mapping(stack), plugins=plugins)
        if name == HOST:
            # One request fills the device's memory, so that another one evicts its pages.
            plan = self.engine.plan
            num_slabs = plan.num_slabs_for(plan.peak_blocks(longest))
            self.engine.resize_cache(plan.total_bytes + (num_slabs - plan.num_slabs) * plan.slab_bytes)
        self._source = random.Random(0)
        self._prefix = self.draw(num_tokens)
        self._num_tokens = num_tokens
        self.first()
        assert self.engine.flush_page_stores(600)

    def draw(self, count: int) -> list[int]:
        """Return random tokens."""
        return [self._source.randrange(VOCABULARY) for _ in range(count)]

    def first(self) -> RequestOutput:
        """Return the first token after the prefix and some further tokens."""
        (output,) = self.engine.generate([self._prefix + self.draw(TAIL)], FIRST_TOKEN)
        return output

    def prepare(self) -> None:
        """Let the prefix be in its place alone."""
        if self.name == HOST:
            self.engine.generate([self.draw(self._num_tokens + TAIL)], FIRST_TOKEN)
        elif self.name == DEVICE:
            self.first()
        else:
            self.engine.reset_prefix_cache()

    def measure(self) -> dict[str, float]:
        """Return the times of a first token, and what was found."""
        self.prepare()
        read = self._bytes_read()
        began = time.perf_counter(), time.process_time()
        output = self.first()
        seconds = time.perf_counter() - began[0], time.process_time() - began[1]
        hit = output.cached
        assert hit is not None
        return {
            "seconds": seconds[0],
            "cpu_seconds": seconds[1],
            "found_tokens": hit.num_tokens,
            "restored_tokens": hit.restored_tokens,
            "bytes_read": self._bytes_read() - read,
        }

    def _bytes_read(self) -> int:
        return sum(store.bytes_read for store in self.engine.stats().stores.values())


def _without_page_cache(folder: Path) -> None:
    """Let the system forget the content of files, so that it reads them from the disk again."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class DiskPlace(Place):
    """An engine whose prefix is in files of a folder, and not in the system's memory."""

    def __init__(self, name: str, path: str, num_tokens: int, folder: Path) -> None:
        """Make the engine."""
        self._folder = folder
        super().__init__(name, path, num_tokens, {"disk": {"path": str(folder), "size": "8GiB"}})

    def prepare(self) -> None:
        """Let the prefix be in the files alone."""
        super().prepare()
        _without_page_cache(self._folder)


@attrs.frozen(kw_only=True)
class SlowStore(DiskStore):
    """A folder from which a page is read slowly.

    Attributes:
        seconds: How long a page takes.
    """

    name: ClassVar[str] = "slow"
    seconds: float

    def open(self, origin: str) -> OpenPageStore:
        """Return the open folder."""
        opened: Any = super().open(origin)
        read = opened.read

        def read_slowly(keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Sequence[bool]:
            time.sleep(self.seconds * len(keys))
            return list(read(keys, buffers))

        opened.read = read_slowly
        return cast("OpenPageStore", opened)


class SlowPlace(Place):
    """An engine whose prefix is in a slow store, with the limits of what is read from it, or without."""

    def __init__(self, name: str, path: str, num_tokens: int, folder: Path, seconds: float) -> None:
        """Make the engine."""
        store = {"name": "slow", "path": str(folder), "size": "8GiB", "seconds": seconds}
        registering = plugin("slow", page_stores={"slow": SlowStore})
        super().__init__(name, path, num_tokens, {"stores": [store]}, [registering])
        skips, self._has_limit = SLOW_PLACES[name]
        if not skips:
            fetcher: Any = fetcher_of(self.engine)
            fetcher._is_worth = lambda *_: True

    def measure(self) -> dict[str, float]:
        """Measure as in any place, with this place's limit of a wait."""
        limits: Any = tiers
        limit = limits.LEAST_WAIT
        if not self._has_limit:
            limits.LEAST_WAIT = math.inf
        try:
            return super().measure()
        finally:
            limits.LEAST_WAIT = limit


def measure(
    model: Model,
    num_tokens: int,
    repeats: int,
    server: StoreServer | None,
    slow_seconds: float | None,
    advance: Callable[[int], object],
) -> dict[str, Any]:
    """Measure a model by turns of the places."""
    torch.manual_seed(0)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        path = str(folder / "model")
        model.save(path, 2 * num_tokens)
        key = {"key": "7" * 64}
        places = [
            Place(COMPUTED, path, num_tokens, {}),
            Place(DEVICE, path, num_tokens, {}),
            Place(HOST, path, num_tokens, {"host_memory": "1GiB"}),
            DiskPlace(DISK, path, num_tokens, folder / "pages"),
        ]
        if server is not None:
            store = {"name": "valkey", "url": server.url, "timeout": 60.0}
            places.append(Place(SERVER, path, num_tokens, {"stores": [store], **key}))
        if slow_seconds is not None:
            slow = [(name, folder / f"slow pages {number}") for number, name in enumerate(SLOW_PLACES)]
            places += [SlowPlace(name, path, num_tokens, pages, slow_seconds) for name, pages in slow]
        for place in places:
            opened.callback(place.engine.close)
        turns = by_turns(places, repeats, lambda place, _: place.measure(), advance, warm_up=True)
        rows_by_place = counted((number, {place.name: row for place, row in rows.items()}) for number, rows in turns)
        disk = next(iter(places[3].engine.stats().stores.values()))
        blocks = {place.name: sum(place.engine.stats().restored_blocks.values()) for place in places}
    return {
        "what": model.what,
        "num_prompt_tokens": num_tokens,
        "bytes_written": disk.bytes_written,
        "restored_blocks": blocks,
        "places": {name: {key: [row[key] for row in rows] for key in rows[0]} for name, rows in rows_by_place.items()},
    }


COLUMNS: dict[str, Column] = {
    "seconds": ("first token, ms", "{:,.0f}", 1000),
    "cpu_seconds": ("processor time, ms", "{:,.0f}", 1000),
    "times": ("computed again takes … times its processor time", "{:,.1f}"),
    "found_tokens": ("tokens found", "{:,}"),
    "restored_tokens": ("of these, brought back", "{:,}"),
    "bytes_read": ("MiB read", "{:,.1f}", 2**-20),
}


def _section(measured: Mapping[str, Any]) -> Iterator[str]:
    computed = measured["places"][COMPUTED]
    yield (
        f"{measured['what']}; a prefix of {measured['num_prompt_tokens']:,} tokens and {TAIL} further ones. The store "
        f"on disk was given {measured['bytes_written'] / 2**20:,.1f} MiB for all prompts of all rounds."
    )
    rows = {}
    for name, place in measured["places"].items():
        same = {key: max(place[key]) for key in ("found_tokens", "restored_tokens", "bytes_read")}
        rows[name] = {**place, **same, "times": ratios(computed["cpu_seconds"], place["cpu_seconds"])}
    yield figures(rows, COLUMNS)
    if SERVER not in rows:
        yield "There was no server: neither valkey-server nor redis-server is on this machine's PATH."


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    return case_page("A prefix that is found elsewhere: time to the first token", record, "models", _section, NOTE)


NOTE = "float32; processor time is that of the engine's process, all threads."


@benchmark("tiers", write_report, cases="models")
@options.repeats(7)
@options.threads(1)
@click.option("--num-tokens", default=4096, show_default=True, help="Tokens of the prefix.")
@click.option("--slow", type=click.FloatRange(0.0), help="Measure slow disks too: milliseconds that a page takes.")
@options.choose("--model", "selection", MODELS)
def main(repeats: int, threads: int, num_tokens: int, slow: float | None, selection: Sequence[Model]) -> dict[str, Any]:
    """Measure the models; write one JSON file and one page."""
    models.silence_transformers()
    with ExitStack() as opened:
        server = None
        if PROGRAM is not None:
            # The path of a socket is short.
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kvframe-")))
            server = opened.enter_context(StoreServer(folder))
        seconds = None if slow is None else slow / 1000
        results = measure_each(
            selection, repeats + 1, lambda model, advance: measure(model, num_tokens, repeats, server, seconds, advance)
        )
    return {"repeats": repeats, "models": results}


if __name__ == "__main__":
    main()
