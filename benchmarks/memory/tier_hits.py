"""Run multi-turn traces over a small pool with host memory and a page store beside it, and without. No model is loaded.

See benchmarks/README.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import click
import torch
from kvframe_engine.host_storage import HostStorage
from kvframe_engine.tiers.stored_pages import StoredPages
from kvframe_engine.tiers.tiers import Tiers
from kvframe_mamba.spec import MambaSpec
from kvframe_sliding_window.spec import SlidingWindowSpec

from benchmarks.harness import options
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.process import map_in_processes
from benchmarks.harness.record import benchmark, progress
from benchmarks.memory.simulator import Simulation
from benchmarks.memory.traces import TRACES, Conversation, Lengths, draw
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import KVCachePlan, plan_cache
from tests.support.stores import SHELVES, Shelf, ShelfStore

TOKENS_A_STEP, MAX_NUM_SEQS = 2_048, 64

MOONCAKE = Lengths(
    prompt=5_000,
    prompt_spread=0.9,
    reply=182,
    reply_spread=0.6,
    more=700,
    turns=(2, 6),
    shared=1_200,
    num_shared=4,
    pause=120,
)
"""Requests have 7,590 tokens and replies 182 on average in the published Mooncake trace (arXiv 2407.00079, table 1)."""

CHOSEN_TRACES = {"multi-turn": TRACES["multi-turn"], "mooncake": MOONCAKE}
FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=4)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=4, window=1_024)
STATE = MambaSpec(block_size=64, recurrent_shapes=((64,),), recurrent_dtypes=("float32",))
LAYERS: Mapping[str, Sequence[KVCacheSpec]] = {
    "full": [FULL] * 2,
    "hybrid": [WINDOW, WINDOW, FULL] * 2,
    "states": [STATE, STATE, STATE, FULL],
}


@attrs.frozen(kw_only=True)
class System:
    """The tiers beside the pool.

    Attributes:
        name: The name in the record.
        host: The host memory, as a share of the working set.
        has_store: Whether there is a page store, without a bound.
        by_lru: Whether host memory gives up the pages that were used least recently; otherwise those that were stored
            first.
    """

    name: str
    host: float = 0.0
    has_store: bool = False
    by_lru: bool = True


NONE = "none"
SYSTEMS = (
    System(name=NONE),
    System(name="host memory, a quarter", host=0.25),
    System(name="host memory, a quarter, first in, first out", host=0.25, by_lru=False),
    System(name="host memory, as large as the working set", host=1.0),
    System(name="store", has_store=True),
    System(name="host memory, a quarter, and store", host=0.25, has_store=True),
)


def make_plan(specs: Sequence[KVCacheSpec], longest: int, memory_bytes: int) -> KVCachePlan:
    """Return a pool."""
    layers = [LayerSpec(name=f"layer{index}", spec=spec) for index, spec in enumerate(specs)]
    return plan_cache(
        group_layers(layers),
        memory_bytes=memory_bytes,
        max_model_len=longest,
        max_num_batched_tokens=TOKENS_A_STEP,
        max_input_lens={},
    )


def working_set(conversations: Sequence[Conversation]) -> int:
    """Return the tokens of conversations at their ends."""
    return sum(len(conversation.token_ids) for conversation in conversations)


def run(name: str, layers: str, trace: str, size: int) -> dict[str, Any]:
    """Run a trace with a system's tiers and a number of users; return the row of the record."""
    system = next(system for system in SYSTEMS if system.name == name)
    lengths, specs = CHOSEN_TRACES[trace], LAYERS[layers]
    conversations = draw(lengths, 4 * size, 32_768)
    longest = max(len(conversation.token_ids) for conversation in conversations) + 1
    # Each user has one conversation of four at a time.
    tokens = working_set(conversations) // 4
    big = make_plan(specs, longest, 1 << 30)
    bytes_a_token = sum(group.page_bytes / group.block_size for group in big.groups)
    needed = big.num_slabs_for(big.peak_blocks(longest)) * big.slab_bytes + big.null_bytes
    plan = make_plan(specs, longest, max(round(tokens * bytes_a_token / 4), needed))
    pool = torch.zeros(plan.total_bytes, dtype=torch.uint8)
    host_slabs = round(system.host * tokens * bytes_a_token / plan.slab_bytes)
    host = HostStorage(plan, pool, host_slabs) if host_slabs else None
    SHELVES["hits"] = Shelf()
    stores = [ShelfStore(shelf="hits")] if system.has_store else []
    all_tiers: list[Tiers] = []

    def make_tiers(manager: KVCacheManager) -> Tiers:
        storage: Any = SimpleNamespace(pool=pool, plan=plan)
        pages = StoredPages(storage, stores, bytes(32), lambda: ["trace"]) if stores else None
        all_tiers.append(Tiers(manager, host, pages, bytes(32)))
        tier: Any = all_tiers[-1].host_tier
        if tier is not None and not system.by_lru:
            tier._use_again = lambda group, host_ids: None
        return all_tiers[-1]

    outcome = Simulation(
        plan,
        conversations,
        num_users=size,
        max_num_seqs=MAX_NUM_SEQS,
        input_lens={},
        make_tiers=make_tiers if host or stores else None,
        ends_all=True,
    ).run()
    row = {
        "system": system.name,
        "layers": layers,
        "trace": trace,
        "requests": outcome.requests,
        "prompt_tokens": outcome.prompt_tokens,
        "hit_tokens": outcome.hit_tokens,
        "preemptions": outcome.preemptions,
        "steps": outcome.steps,
        "pool_share": plan.total_bytes / (tokens * bytes_a_token),
        "restored_tokens": 0,
        "waits_in_vain": 0,
        "bytes_read": 0,
        "bytes_written": 0,
        "host_blocks_stored": 0,
        "host_blocks_read": 0,
    }
    for tiers in all_tiers:
        tiers.flush(600)
        stats = tiers.stats()
        tiers.close()
        row |= {
            **{name: stats[name] for name in ("restored_tokens", "waits_in_vain", "host_blocks_stored")},
            "host_blocks_read": stats["restored_blocks"].get("host_memory", 0),
            "bytes_read": sum(store.bytes_read for store in stats["stores"].values()),
            "bytes_written": sum(store.bytes_written for store in stats["stores"].values()),
        }
    return row


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    rows = record["rows"]
    note = f"The pool is a quarter of the working set; steps have at most {TOKENS_A_STEP:,} tokens."
    return page(
        heading("Prompt tokens that tiers find again", record, ".", note, how="Simulated"),
        "Hits are prompt tokens that were not computed. Host memory gives up the pages first that were used least "
        "recently, or those that were stored first (*first in, first out*).",
        *_sections(rows),
    )


def _sections(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for trace, layers in dict.fromkeys((row["trace"], row["layers"]) for row in rows):
        trace_rows = [row for row in rows if (row["trace"], row["layers"]) == (trace, layers)]
        none = next(row for row in trace_rows if row["system"] == NONE)
        yield f"## {trace}, {layers}"
        yield (
            f"{none['requests']:,} requests, {none['prompt_tokens']:,} prompt tokens; the pool is "
            f"{none['pool_share']:.2f} of the working set."
        )
        yield table(
            ("tiers", "hit tokens", "share", "brought back", "bytes written per byte found", "waited in vain"),
            [_cells(row) for row in trace_rows],
        )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    num_written, num_read = row["bytes_written"], row["bytes_read"]
    if row["host_blocks_stored"] and not num_written:
        num_written, num_read = row["host_blocks_stored"], row["host_blocks_read"]
    return (
        row["system"],
        f"{row['hit_tokens']:,}",
        f"{row['hit_tokens'] / row['prompt_tokens']:.1%}",
        f"{row['restored_tokens']:,}",
        f"{num_written / num_read:.2f}" if num_read else "",
        f"{row['waits_in_vain']}",
    )


def finds_fewer(record: Mapping[str, Any]) -> bool:
    """Return whether a trace finds fewer tokens with tiers than without."""
    none = {(row["trace"], row["layers"]): row["hit_tokens"] for row in record["rows"] if row["system"] == NONE}
    return any(row["hit_tokens"] < none[row["trace"], row["layers"]] for row in record["rows"])


@benchmark("tier_hits", write_report, fails=finds_fewer)
@options.choose("--trace", "traces", CHOSEN_TRACES)
@options.choose("--layers", "layers", LAYERS)
@click.option("--size", type=click.IntRange(1), default=8, show_default=True, help="The number of users.")
@click.option("--workers", type=click.IntRange(1), default=os.cpu_count(), help="The number of processes.")
def main(traces: Sequence[str], layers: Sequence[str], size: int, workers: int) -> dict[str, Any]:
    """Run the traces; write one JSON file and one page; fail if tiers find fewer tokens than none."""
    jobs = [(system.name, layer_set, trace, size) for trace in traces for layer_set in layers for system in SYSTEMS]
    rows = []
    with progress("traces with tiers", len(jobs)) as advance:
        for row in map_in_processes(run, jobs, workers):
            rows.append(row)
            advance(1)
    return {"size": size, "rows": rows}


if __name__ == "__main__":
    main()
