"""Plan the cache memory of published models, and of the same layers in other groupings. No model is loaded.

See benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from benchmarks.harness import options
from benchmarks.harness.machine import ROOT
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.record import benchmark
from benchmarks.memory.padded_groups import PaddedGroups
from kvframe.cli.render import format_bytes
from kvframe.config.stack import Stack
from kvframe.contract.description import ModelDescription
from kvframe.contract.specs import LayerSpec, align_up
from kvframe.loading.plugins import load_plugins
from kvframe.loading.registry import Registry
from kvframe.planning.groups import Grouping, group_layers
from kvframe.planning.layer_file import read_layer_file
from kvframe.planning.layer_specs import make_layer_specs
from kvframe.planning.plan import KVCachePlan, plan_cache
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
    stack = Stack.from_mapping({"cache": {"memory": str(MEMORY_BYTES)}, "model": {"dtype": DTYPE}, **changes})
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
    request_bytes = {name: [held_bytes(plan, length) for length in lengths] for name, plan in plans.items()}
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
        "requests": {name: [plan.max_concurrency(length) for length in lengths] for name, plan in plans.items()},
        "request_bytes": {**request_bytes, "padded": blocks},
        "padded": {
            "block_sizes": [spec.block_size for spec, _ in padded.types if not spec.is_per_block],
            "wasted": [1 - num_bytes / total for num_bytes, total in zip(request_bytes["padded"], blocks, strict=True)],
        },
    }


def held_bytes(plan: KVCachePlan, num_tokens: int) -> int:
    """Return the most bytes that the pages of a request take."""
    return sum(count * group.page_bytes for count, group in zip(plan.peak_blocks(num_tokens), plan.groups, strict=True))


def wasted_share(plan: KVCachePlan) -> float:
    """Return the share of the memory that no page can use if the longest requests fill it.

    It consists of the bytes before the first slab, the ends of slabs, and the memory after the last slab.
    """
    used_bytes = plan.num_slabs * plan.slab_bytes * (1 - plan.waste_fraction)
    return 1 - used_bytes / plan.memory_bytes


# --- the memory that traffic runs on ----------------------------------------------------------------------------------

REQUEST_TOKENS = 8_192
"""The memory of a model is given in requests of so many tokens, or as many as the model takes."""

PAGES_PER_REQUEST = 8
"""The memory has at least so many of the largest pages for each of these requests, because states are large."""

TOKENS_A_STEP = 2_048
MAX_NUM_SEQS = 1_024

STATE_BLOCK = 64
"""Tokens between two states that are kept for prefix caching, in kvframe's layout with few states."""

FEWER = {"rules": [{"kind": "mamba", "spec": {"block_size": STATE_BLOCK}, "optional": True}]}
KVFRAME, FEW_STATES, PADDED = "kvframe", "kvframe, few states", "equal padded groups"


@attrs.frozen(kw_only=True)
class Shape:
    """A model's layers, and the memory that all its layouts get.

    Attributes:
        longest: The most tokens of a request: as many as the model takes, but at least four such requests fit.
        keeps_states: Whether some of the layers keep states.
    """

    description: ModelDescription
    longest: int
    memory_bytes: int
    keeps_states: bool

    @classmethod
    def read(cls, file: str, num_requests: int) -> Shape:
        """Read a model's layers from their file.

        The memory holds ``num_requests`` requests of ``REQUEST_TOKENS`` tokens if every layer keeps every token and one
        state.
        """
        description = read_layer_file(LAYER_FILES / file)
        longest = min(MAX_MODEL_LEN, description.max_model_len)
        full = _plan(group_layers(_layers(description, STATES_ONCE), hybrid=False), description, longest, 1 << 42)
        request_bytes = held_bytes(full, min(REQUEST_TOKENS, longest))
        largest = max(group.page_bytes for group in full.groups)
        return cls(
            description=description,
            longest=min(longest, num_requests * REQUEST_TOKENS // 4),
            memory_bytes=align_up(num_requests * max(request_bytes, PAGES_PER_REQUEST * largest), 1 << 20),
            keeps_states=any(group.spec.is_per_block for group in full.groups),
        )

    def plan(self, layout: str = KVFRAME) -> KVCachePlan:
        """Return the plan of the memory in a layout."""
        if layout == PADDED:
            groups = PaddedGroups.of(_layers(self.description, {}), has_longer_states=True)
            return groups.plan(self.memory_bytes, self.longest, TOKENS_A_STEP, self.description.max_input_lens)
        rules = FEWER if layout == FEW_STATES else {}
        return _plan(group_layers(_layers(self.description, rules)), self.description, self.longest, self.memory_bytes)

    def live_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the pages that the next token of a request with ``num_tokens`` tokens reads."""
        total = 0
        for group in self.plan().groups:
            length = self.description.max_input_lens.get(group.spec.sequence, num_tokens)
            total += group.page_bytes * sum(stop - start for start, stop in group.spec.live_blocks(length))
        return total


def _layers(description: ModelDescription, rules: dict[str, Any]) -> Sequence[LayerSpec]:
    stack = Stack.from_mapping({"model": {"dtype": DTYPE}, **rules})
    return make_layer_specs(description, load_plugins().registry, stack, DTYPE)


def _plan(grouping: Grouping, description: ModelDescription, longest: int, memory_bytes: int) -> KVCachePlan:
    return plan_cache(
        grouping,
        memory_bytes=memory_bytes,
        max_model_len=longest,
        max_num_batched_tokens=TOKENS_A_STEP,
        max_input_lens=description.max_input_lens,
    )


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
    )


def _planned(row: Mapping[str, Any]) -> tuple[str, ...]:
    groups = ", ".join(f"{group['num_layers']} {group['kind']}" for group in row["groups"])
    request_sizes = [format_bytes(row["bytes_per_request"])] if row["bytes_per_request"] else []
    for sequence, num_bytes in row["bytes_per_input_token"].items():
        longest = row["max_input_lens"][sequence]
        request_sizes.append(f"{format_bytes(num_bytes * longest)} for {longest:,} {sequence} tokens")
    wasted = f"{format_bytes(row['wasted_bytes'])}, {row['wasted']:.2%}"
    return row["title"], groups, format_bytes(row["bytes_per_token"]), ", ".join(request_sizes), wasted


def _requests(row: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for index, length in enumerate(row["lengths"]):
        title = row["title"] if index == 0 else ""
        counts = [f"{row['requests'][name][index]:,}" for name in SYSTEMS]
        counts.insert(1, f"{row['generating'][index]:,}")
        sizes = (f"{row['request_bytes'][name][index] / 2**20:,.1f}" for name in SYSTEMS)
        yield title, f"{length:,}", *counts, *sizes, f"{row['padded']['wasted'][index]:.1%}"


@benchmark("memory", write_report)
@options.choose("--model", "files", MODELS)
def main(files: Sequence[str]) -> dict[str, Any]:
    """Plan the models; write one JSON file and one page."""
    registry = load_plugins().registry
    return {
        "memory_bytes": MEMORY_BYTES,
        "dtype": DTYPE,
        "block_size": Stack().cache.block_size,
        "max_num_batched_tokens": Stack().limits.max_num_batched_tokens,
        "models": [row for file in files for row in measure(file, registry)],
    }


if __name__ == "__main__":
    main()
