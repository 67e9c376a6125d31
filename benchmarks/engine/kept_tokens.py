"""Measure the time and pages saved by layers that keep only a part of a prompt. See benchmarks/README.md."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import options
from benchmarks.harness.pages import heading, medians, page, spread, table
from benchmarks.harness.record import benchmark, ratios
from kvframe import Engine, SamplingParams, Stack

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "by_content"
HEADS, KV_HEADS, HEAD_SIZE, NUM_LAYERS, LAST = 16, 4, 64, 4, 32
ROWS = {"choice": "the step with the choice, ms", "token": "each later token, ms", "pages": "pages held later"}


def save_model(path: str, num_tokens: int) -> None:
    """Save a random model with layers of 1,024."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=2048,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=num_tokens + 128,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def start(path: str, num_tokens: int, budget: int | None) -> Engine:
    """Return an engine that keeps whole prompts, or ``budget`` tokens of each."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import snap_kv
    finally:
        sys.path.remove(str(EXAMPLES))
    tables: dict[str, Any] = {
        "cache": {"memory": "1GiB", "prefix_caching": False},
        "limits": {"max_model_len": num_tokens + 128, "max_num_batched_tokens": 1024},
    }
    if budget is not None:
        spec = {"kind": "snap_kv", "num_heads": HEADS, "budget": budget, "last": min(LAST, budget)}
        tables["rules"] = [{"kind": "full_attention", "spec": spec}]
    return Engine.from_pretrained(path, stack=Stack.from_mapping(tables), plugins=[snap_kv])


def measure(engine: Engine, num_tokens: int, num_new: int) -> dict[str, float]:
    """Serve one request; return the seconds of its first step after the prompt, of a later one, and its pages."""
    prompt = [(place * 7919 + place // 31) % 512 for place in range(num_tokens)]
    times, pages = [], 0
    for _ in engine.stream(prompt, SamplingParams(max_new_tokens=num_new, ignore_eos=True)):
        times.append(time.perf_counter())
        pages = max(pages, sum(engine.stats().blocks_held)) if len(times) > 2 else 0
    steps = [after - before for before, after in pairwise(times)]
    return {"choice": steps[0], "token": sorted(steps[1:])[len(steps) // 2], "pages": pages}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of a record."""
    formats = {"choice": ("{:,.1f}", 1000), "token": ("{:,.2f}", 1000), "pages": ("{:,.0f}", 1)}
    rows = [
        [
            title,
            *(spread(record[way][name], formats[name][0], scale=formats[name][1]) for way in ("whole", "part")),
            spread(ratios(record["whole"][name], record["part"][name]), "{:.2f}"),
        ]
        for name, title in ROWS.items()
    ]
    text = (
        f"One request of {record['num_tokens']:,} prompt tokens and {record['num_new']} new ones, in a random Llama "
        f"with {NUM_LAYERS} layers, {HEADS} heads of {HEAD_SIZE} and {KV_HEADS} KV heads. Its layers keep the whole "
        f"prompt, or {record['budget']:,} tokens of it (`examples/by_content/snap_kv.py`)."
    )
    columns = ["", "whole prompt", "a part of it", "ratio"]
    return page(heading("Keeping a part of each prompt", record, medians(record)), text, table(columns, rows))


@benchmark("kept_tokens", write_report)
@options.repeats(7)
@options.threads(1)
@click.option("--num-tokens", default=8192, help="Tokens of the prompt.")
@click.option("--num-new", default=24, help="Tokens that are generated, at least 4.")
@click.option("--budget", default=1024, help="Tokens of the prompt that are kept.")
def main(repeats: int, threads: int, num_tokens: int, num_new: int, budget: int) -> dict[str, Any]:
    """Measure an engine that keeps whole prompts and one that keeps a part, by turns, in one process."""
    values_by_way: dict[str, dict[str, list[float]]] = {way: {name: [] for name in ROWS} for way in ("whole", "part")}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, num_tokens)
        with start(folder, num_tokens, None) as whole_engine, start(folder, num_tokens, budget) as part_engine:
            for _ in range(repeats):
                for way, engine in (("whole", whole_engine), ("part", part_engine)):
                    for name, value in measure(engine, num_tokens, num_new).items():
                        values_by_way[way][name].append(value)
    return {"num_tokens": num_tokens, "num_new": num_new, "budget": budget, "repeats": repeats, **values_by_way}


if __name__ == "__main__":
    main()
