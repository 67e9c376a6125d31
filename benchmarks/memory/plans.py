"""Plan the cache memory of published models, and of the same layers in other groupings. No model is loaded.

See benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness import options
from benchmarks.harness.machine import ROOT
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.record import benchmark
from benchmarks.memory.padded_groups import PaddedGroups
from kvframe.cli.render import format_bytes
from kvframe.config.stack import Stack
from kvframe.contract.description import ModelDescription
from kvframe.loading.plugins import load_plugins
from kvframe.loading.registry import Registry
from kvframe.planning.groups import group_layers, make_layer_specs
from kvframe.planning.layer_file import read_layer_file
from kvframe.planning.plan import KVCachePlan
from kvframe.planning.sizing import plan_for_stack

LAYER_FILES = ROOT / "examples" / "layers"
MEMORY_BYTES = 80_000_000_000
MAX_MODEL_LEN = 131_072
LENGTHS = (8_192, MAX_MODEL_LEN)
"""Tokens of the counted requests; if a model takes fewer, as many as it takes."""

DTYPE = "bfloat16"
STATES_ONCE = {"rules": [{"kind": "mamba", "spec": {"checkpoints": "none"}, "optional": True}]}
"""Keep one state for each request, and none for prefix caching."""

MODELS = {
    "llama_3_1_8b.toml": "Llama 3.1 8B",
    "gemma_3_27b.json": "Gemma 3 27B",
    "gemma_3n_e4b.toml": "Gemma 3n E4B",
    "llama_4_scout.toml": "Llama 4 Scout",
    "gpt_oss_20b.toml": "gpt-oss-20b",
    "qwen3_next_80b.toml": "Qwen3-Next 80B",
    "jamba_mini.toml": "Jamba Mini",
    "falcon_h1_7b.toml": "Falcon-H1 7B",
    "phi_4_mini_flash.toml": "Phi-4-mini-flash",
    "deepseek_v3.toml": "DeepSeek-V3",
    "whisper_large_v3.toml": "Whisper large v3",
}
"""The models' names by their layer file."""


def measure(file: str, registry: Registry) -> list[dict[str, Any]]:
    """Return a model's rows: one, or two if it keeps states."""
    description, title = read_layer_file(LAYER_FILES / file), MODELS[file]
    rows = [_row(title, description, registry, {})]
    if any(group["kind"] == "mamba" for group in rows[0]["groups"]):
        rows.append(_row(f"{title}, one state a request", description, registry, STATES_ONCE))
    return rows


def _row(title: str, description: ModelDescription, registry: Registry, changes: dict[str, Any]) -> dict[str, Any]:
    max_model_len = min(MAX_MODEL_LEN, description.max_model_len)
    stack = Stack.from_mapping({"cache": {"memory": str(MEMORY_BYTES)}, "engine": {"dtype": DTYPE}, **changes})
    layers = make_layer_specs(description, registry, stack, DTYPE)
    lens = description.max_input_lens
    plan = plan_for_stack(group_layers(layers), stack, max_model_len, lens)
    padded = PaddedGroups.of(layers)
    plans = {
        "hybrid": plan,
        "full": plan_for_stack(group_layers(layers, hybrid=False), stack, max_model_len, lens),
        "padded": padded.plan(MEMORY_BYTES, max_model_len, plan.max_num_batched_tokens, lens),
    }
    lengths = sorted({min(length, max_model_len) for length in LENGTHS})
    held = {name: [held_bytes(each, length) for length in lengths] for name, each in plans.items()}
    equal = plans["padded"]
    blocks = [equal.slab_bytes * equal.num_slabs_for(equal.peak_blocks(length)) for length in lengths]
    return {
        "title": title,
        "model": description.name,
        "max_model_len": max_model_len,
        "max_input_lens": dict(plan.max_input_lens),
        "groups": [
            {"kind": group.spec.kind, "num_layers": len(group.layers), "page_bytes": group.page_bytes}
            for group in plan.groups
        ],
        "bytes_per_token": plan.bytes_per_token,
        "bytes_per_request": plan.bytes_per_request,
        "bytes_per_input_token": dict(plan.bytes_per_input_token),
        "wasted": wasted_share(plan),
        "wasted_bytes": round(wasted_share(plan) * plan.memory_bytes),
        "lengths": lengths,
        "generating": [plan.max_generating(length) for length in lengths],
        "requests": {name: [each.max_concurrency(length) for length in lengths] for name, each in plans.items()},
        "request_bytes": {**held, "padded": blocks},
        "padded": {
            "num_groups": padded.num_groups,
            "group_size": padded.group_size,
            "num_missing_layers": padded.num_missing,
            "page_bytes": padded.page_bytes,
            "block_sizes": [spec.block_size for spec, _ in padded.types if not spec.is_per_block],
            "wasted": [1 - used / whole for used, whole in zip(held["padded"], blocks, strict=True)],
        },
    }


def held_bytes(plan: KVCachePlan, num_tokens: int) -> int:
    """Return the most bytes that the pages of a request take."""
    return sum(count * group.page_bytes for count, group in zip(plan.peak_blocks(num_tokens), plan.groups, strict=True))


def wasted_share(plan: KVCachePlan) -> float:
    """Return the share of the memory that no page can use if the longest requests fill it.

    It consists of the bytes before the first slab, the ends of slabs, and the rest after the last slab.
    """
    used = plan.num_slabs * plan.slab_bytes * (1 - plan.waste_fraction) + plan.rest_bytes
    return 1 - used / plan.memory_bytes


SYSTEMS = ("hybrid", "full", "padded")
"""The groupings: kvframe's, every layer full, and equal padded groups."""


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = (
        f"80 GB of cache ({record['memory_bytes']:,} bytes; weights are not counted), keys and values in "
        f"{record['dtype']}, blocks of {record['block_size']} tokens, steps of at most "
        f"{record['max_num_batched_tokens']:,} tokens."
    )
    models = record["models"]
    return page(
        heading("Planned memory of published models", record, ".", note, how="Planned"),
        "## What is planned",
        table(("", "groups", "one more token", "each request, at any length", "wasted"), map(_planned, models)),
        "## Requests that fit at once",
        table(
            (
                *("", "tokens each", "kvframe", "all but one generating", "every layer full", "equal padded groups"),
                *("MiB a request: kvframe", "every layer full", "equal padded groups", "of these wasted"),
            ),
            [line for row in models for line in _requests(row)],
        ),
        "## The equal padded groups",
        table(
            ("", "groups", "layers a group", "layers that are not there", "tokens a block", "groups of kvframe"),
            map(_padded, models),
        ),
    )


def _planned(row: Mapping[str, Any]) -> tuple[str, ...]:
    groups = ", ".join(f"{group['num_layers']} {group['kind']}" for group in row["groups"])
    held = [format_bytes(row["bytes_per_request"])] if row["bytes_per_request"] else []
    for sequence, num_bytes in row["bytes_per_input_token"].items():
        longest = row["max_input_lens"][sequence]
        held.append(f"{format_bytes(num_bytes * longest)} for {longest:,} {sequence} tokens")
    wasted = f"{format_bytes(row['wasted_bytes'])}, {row['wasted']:.2%}"
    return row["title"], groups, format_bytes(row["bytes_per_token"]), ", ".join(held), wasted


def _requests(row: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for index, length in enumerate(row["lengths"]):
        title = row["title"] if index == 0 else ""
        counts = [f"{row['requests'][name][index]:,}" for name in SYSTEMS]
        counts.insert(1, f"{row['generating'][index]:,}")
        sizes = (f"{row['request_bytes'][name][index] / 2**20:,.1f}" for name in SYSTEMS)
        yield title, f"{length:,}", *counts, *sizes, f"{row['padded']['wasted'][index]:.1%}"


def _padded(row: Mapping[str, Any]) -> tuple[str, ...]:
    padded = row["padded"]
    sizes = ", ".join(f"{size:,}" for size in sorted(set(padded["block_sizes"])))
    numbers = padded["num_groups"], padded["group_size"], padded["num_missing_layers"]
    return row["title"], *map(str, numbers), sizes, str(len(row["groups"]))


@benchmark("memory", write_report)
@options.choose("--model", "files", MODELS)
def main(files: Sequence[str]) -> dict[str, Any]:
    """Plan the models; write one JSON file and one page."""
    registry = load_plugins().registry
    return {
        "memory_bytes": MEMORY_BYTES,
        "dtype": DTYPE,
        "block_size": Stack().cache.block_size,
        "max_num_batched_tokens": Stack().engine.max_num_batched_tokens,
        "models": [row for file in files for row in measure(file, registry)],
    }


if __name__ == "__main__":
    main()
