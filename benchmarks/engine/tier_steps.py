"""Measure what steps lose while pages move to host memory and to a page store. See benchmarks/README.md."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import click
import torch

from benchmarks.engine.tiers import MODELS, VOCABULARY, Model
from benchmarks.harness import models, options
from benchmarks.harness.pages import Column, case_page, figures
from benchmarks.harness.record import benchmark, by_turns, counted, measure_each, ratios
from kvframe import Engine, SamplingParams, Stack

NONE, HOST, DISK = "none", "host memory", "disk"
NUM_REQUESTS = 8


@attrs.frozen(eq=False)
class Server:
    """An engine with tiers.

    Attributes:
        name: The tiers.
        engine: The engine.
    """

    name: str
    engine: Engine

    @classmethod
    def start(cls, name: str, path: str, num_tokens: int, num_new: int, folder: Path) -> Server:
        """Start an engine whose pool holds the requests of one round, so that those of the round before are evicted."""
        cache: dict[str, Any] = {"memory": "1GiB"}
        if name == HOST:
            cache["host_memory"] = "1GiB"
        elif name == DISK:
            cache["disk"] = {"path": str(folder / "pages"), "size": "8GiB"}
        stack = {
            "cache": cache,
            "limits": {
                "max_model_len": num_tokens + num_new,
                "max_num_batched_tokens": 512,
                "max_num_seqs": NUM_REQUESTS,
            },
            "engine": {"self_check": False},
        }
        engine = Engine.from_pretrained(path, stack=Stack.from_mapping(stack))
        plan = engine.plan
        num_slabs = NUM_REQUESTS * plan.num_slabs_for(plan.peak_blocks(num_tokens + num_new))
        engine.resize_cache(plan.total_bytes + (num_slabs - plan.num_slabs) * plan.slab_bytes)
        return cls(name, engine)

    def serve(self, prompts: Sequence[Sequence[int]], num_new: int) -> dict[str, float]:
        """Serve requests; return the times, and what was moved."""
        before = self._moved()
        began = time.thread_time(), time.process_time(), time.perf_counter()
        self.engine.generate(prompts, SamplingParams(max_new_tokens=num_new, ignore_eos=True))
        thread, process, clock = time.thread_time(), time.process_time(), time.perf_counter()
        return {
            "thread_seconds": thread - began[0],
            "cpu_seconds": process - began[1],
            "seconds": clock - began[2],
            "moved": self._moved() - before,
        }

    def _moved(self) -> int:
        stats = self.engine.stats()
        return stats.host_blocks_stored + sum(store.pages_stored for store in stats.stores.values())


def measure(model: Model, num_tokens: int, num_new: int, repeats: int, advance: Any) -> dict[str, Any]:
    """Serve the same prompts by turns of the tiers."""
    torch.manual_seed(0)
    source = random.Random(0)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        path = str(folder / "model")
        model.save(path, 2 * (num_tokens + num_new))
        servers = [Server.start(name, path, num_tokens, num_new, folder) for name in (NONE, HOST, DISK)]
        for server in servers:
            opened.callback(server.engine.close)
        prompts = [
            [[source.randrange(VOCABULARY) for _ in range(num_tokens)] for _ in range(NUM_REQUESTS)]
            for _ in range(repeats + 1)
        ]
        turns = by_turns(
            servers, repeats, lambda server, number: server.serve(prompts[number], num_new), advance, warm_up=True
        )
        rows_by_tier = counted((number, {server.name: row for server, row in rows.items()}) for number, rows in turns)
    return {
        "what": model.what,
        "num_prompt_tokens": num_tokens,
        "num_new_tokens": num_new,
        "tiers": {name: {key: [row[key] for row in rows] for key in rows[0]} for name, rows in rows_by_tier.items()},
    }


COLUMNS: dict[str, Column] = {
    "thread_seconds": ("the engine's thread, ms", "{:,.0f}", 1000),
    "thread": ("beside none", "{:.3f}"),
    "cpu_seconds": ("all threads, ms", "{:,.0f}", 1000),
    "all": ("beside none", "{:.3f}"),
    "seconds": ("time, ms", "{:,.0f}", 1000),
    "moved": ("pages moved", "{:,.0f}"),
}


def _section(measured: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{measured['what']}; {NUM_REQUESTS} requests at once with prompts of {measured['num_prompt_tokens']:,} tokens "
        f"that share nothing, and {measured['num_new_tokens']:,} new tokens each. The pool holds one round's requests."
    )
    none = measured["tiers"][NONE]
    rows = {}
    for name, row in measured["tiers"].items():
        # How many times the time without tiers.
        thread, every = (ratios(row[key], none[key]) for key in ("thread_seconds", "cpu_seconds"))
        rows[name] = {**row, "thread": thread, "all": every}
    yield figures(rows, COLUMNS)


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = "float32; the times of threads are processor time."
    return case_page("What steps lose while pages move", record, "models", _section, note)


@benchmark("tier_steps", write_report, cases="models")
@options.repeats(7)
@options.threads(1)
@click.option("--num-tokens", default=256, show_default=True, help="Tokens of each prompt.")
@click.option("--num-new", default=64, show_default=True, help="Tokens that are generated.")
@options.choose("--model", "selection", MODELS)
def main(repeats: int, threads: int, num_tokens: int, num_new: int, selection: Sequence[Model]) -> dict[str, Any]:
    """Measure the models; write one JSON file and one page."""
    models.silence_transformers()
    results = measure_each(
        selection, repeats + 1, lambda model, advance: measure(model, num_tokens, num_new, repeats, advance)
    )
    return {"repeats": repeats, "models": results}


if __name__ == "__main__":
    main()
