"""Measure formats of stored keys and values: lost accuracy, and saved memory and time. See benchmarks/README.md."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import attrs
import click
import numpy as np
import torch
from kvframe_testing.grid import installed_formats
from transformers import AutoTokenizer

from benchmarks.engine.workloads import SEED
from benchmarks.harness import models, options
from benchmarks.harness.layers import page_views, usable_backends
from benchmarks.harness.machine import ROOT
from benchmarks.harness.pages import Column, figures, heading, medians, page, spread, table
from benchmarks.harness.process import timed
from benchmarks.harness.record import benchmark, by_turns, counted
from kvframe import Engine, FullAttentionSpec, Registry, SamplingParams, Stack, group_layers, load_plugins
from kvframe.attention.batch_metadata import StepBatch, build_metadata
from kvframe.attention.layers import Layers
from kvframe.cache.block_table import BlockTables
from kvframe.contract import LayerSpec, QuerySpec
from kvframe.contract.formats import PLAIN, KVFormat
from kvframe.contract.slots import Slots
from kvframe.planning.layer_file import read_layer_file
from kvframe.planning.layer_specs import make_layer_specs
from kvframe.planning.sizing import plan_for_stack
from kvframe.selection.select import select_backends

TEXT_TOKENS = 384
LEARNED, OTHER = ("shlex", "textwrap"), ("cmd", "getopt")
"""Modules whose source the demo's model was trained on, and modules of a similar style that it has not seen."""
NUM_ANSWER_TOKENS = 48
TASKS_IN_A_ROW = 4
"""Copy tasks in a row; the model answers the last one. It was trained on rows of up to five."""
MIN_COPIED = 0.95
"""The least share of right copied tokens in float32. Below it, wrong tokens would show the model and not the format."""

NUM_REQS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 8, 32, 8, 128, 16
LLAMA = ROOT / "examples" / "layers" / "llama_3_1_8b.toml"
MEMORY_BYTES = 8 * 2**30
CPU = torch.device("cpu")
Tasks = Sequence[tuple[list[int], list[int]]]
"""Prompts, and the right tokens after each."""


@attrs.frozen
class Stored:
    """One way to store keys and values: its name in the record, the format, and the dtype of the attention."""

    title: str
    kv_format: KVFormat
    dtype: str


def ways() -> list[Stored]:
    """Return plain storage in three dtypes, and every installed format with attention in float32."""
    plain = [Stored(dtype, PLAIN, dtype) for dtype in ("float32", "float16", "bfloat16")]
    return [*plain, *(Stored(kv_format.name, kv_format, "float32") for kv_format in installed_formats())]


# --- the demo's trained model -----------------------------------------------------------------------------------------


def make_texts(path: Path, count: int) -> dict[str, list[list[int]]]:
    """Return parts of Python's library by kind: one half is ``learned`` in training, the other is not."""
    tokenizer, texts = AutoTokenizer.from_pretrained(path), {}
    for kind, names, number in (("learned", LEARNED, count // 2), ("other", OTHER, count - count // 2)):
        source = tokenizer.encode("".join(inspect.getsource(importlib.import_module(name)) for name in names))
        step = max(1, (len(source) - TEXT_TOKENS) // max(1, number - 1))
        texts[kind] = [list(source[start : start + TEXT_TOKENS]) for start in range(0, number * step, step)]
    return texts


def make_copy_tasks(count: int) -> Tasks:
    """Return copy tasks as in the demo's training: whole tasks, then one whose answer is left out.

    The answer is a random segment that lies before the model's windows.
    """
    generator = torch.Generator().manual_seed(SEED)
    copy_task, num_asked = models.demo_copy_task()
    rows = [torch.cat([copy_task(generator) for _ in range(TASKS_IN_A_ROW)]).tolist() for _ in range(count)]
    return [(row[:-num_asked], row[-num_asked:]) for row in rows]


def serve(path: Path, storage: Stored, texts: Mapping[str, Sequence[list[int]]], tasks: Tasks) -> dict[str, Any]:
    """Return the log-probabilities of texts, the answers to tasks, and the backends, with one way to store."""
    cache = {"memory": "64MiB", "dtype": storage.dtype, "format": storage.kv_format.name}
    stack = Stack.from_mapping({"cache": cache, "model": {"dtype": "float32"}})
    greedy = SamplingParams(max_new_tokens=NUM_ANSWER_TOKENS, ignore_eos=True)
    scoring = SamplingParams(max_new_tokens=1, prompt_logprobs=True)
    with Engine.from_pretrained(path, stack=stack) as engine:
        scored = {kind: engine.generate(prompts, scoring) for kind, prompts in texts.items()}
        copied = engine.generate([prompt for prompt, _ in tasks], greedy)
        backends = sorted({choice.backend for choice in engine.choices})
    return {
        "backends": backends,
        "logprobs": {
            kind: torch.tensor([value for output in outputs for value in (output.prompt_logprobs or [])[1:]])
            for kind, outputs in scored.items()
        },
        "copied": [list(output.token_ids) for output in copied],
    }


def compare(results: Mapping[str, Any], exact: Mapping[str, Any], tasks: Tasks) -> dict[str, Any]:
    """Return how the results of one way to store differ from those of float32."""
    logprobs: Mapping[str, torch.Tensor] = results["logprobs"]
    differences = torch.cat([(ours - exact["logprobs"][kind]).abs() for kind, ours in logprobs.items()])
    return {
        "backends": results["backends"],
        "perplexity_learned": math.exp(-float(logprobs["learned"].mean())),
        "perplexity": math.exp(-float(logprobs["other"].mean())),
        "logprob_difference_mean": float(differences.mean()),
        "logprob_difference_max": float(differences.max()),
        "copied_right": share_right(results["copied"], tasks),
    }


def share_right(outputs: Sequence[list[int]], tasks: Tasks) -> float | None:
    """Return the share of the tasks' tokens that are right; None without tasks."""
    right = [
        ours == expected
        for output, (_, answer) in zip(outputs, tasks, strict=True)
        for ours, expected in zip(output, answer, strict=False)
    ]
    return fmean(right) if right else None


def check_copying(copied_right: float | None) -> None:
    """End the command if the model fails the copy tasks already in float32."""
    if copied_right is not None and copied_right < MIN_COPIED:
        raise click.ClickException(
            f"in float32 the model copies {copied_right:.1%} of the tokens right; it has to copy {MIN_COPIED:.0%}"
        )


# --- one layer --------------------------------------------------------------------------------------------------------


def memory_of(storage: Stored, registry: Registry) -> dict[str, int]:
    """Return the bytes of a token of Llama 3.1 8B, and the number of tokens that fit into 8 GiB."""
    description = read_layer_file(LLAMA)
    dtype = storage.dtype if storage.kv_format == PLAIN else "bfloat16"
    stack = Stack.from_mapping({"cache": {"memory": MEMORY_BYTES, "dtype": dtype, "format": storage.kv_format.name}})
    layers = make_layer_specs(description, registry, stack, dtype)
    plan = plan_for_stack(group_layers(layers), stack, description.max_model_len, description.max_input_lens)
    num_pages = sum(plan.num_slabs * group.pages_per_slab for group in plan.groups)
    return {"bytes_per_token": plan.bytes_per_token, "tokens": num_pages * plan.groups[0].block_size}


def decode(
    storage: Stored, backend: str, registry: Registry, context: int
) -> tuple[Callable[[], torch.Tensor], dict[str, Any]]:
    """Return a call that stores a token of each request and attends, and the facts of its row.

    Each request has ``context`` random tokens, a multiple of 16, in pages of its own.
    """
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": NUM_KV_HEADS, "head_size": HEAD_SIZE}
    spec = FullAttentionSpec(dtype=storage.dtype, format=storage.kv_format, **sizes)
    query = QuerySpec(num_heads=NUM_HEADS, head_size=HEAD_SIZE, scale=HEAD_SIZE**-0.5)
    layer = LayerSpec(name="layer", spec=spec, query=query)
    stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": backend}]})
    choices = select_backends([layer], stack, registry, "cpu")
    num_blocks = context // BLOCK_SIZE
    # Pages go to the requests by turns, so that no request's pages lie side by side.
    table = 1 + torch.arange(NUM_REQS * num_blocks).view(num_blocks, NUM_REQS).T
    views = page_views(spec, torch.zeros((1 + table.numel()) * spec.block_bytes, dtype=torch.uint8))
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, storage.dtype)

    def draw(num_tokens: int, num_heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, HEAD_SIZE, generator=generator).to(dtype)

    key, value = draw(context, NUM_KV_HEADS), draw(context, NUM_KV_HEADS)
    for row in table:
        slots = Slots.at(row.repeat_interleave(BLOCK_SIZE), torch.arange(context) % BLOCK_SIZE, BLOCK_SIZE)
        storage.kv_format.write(key, value, views, slots)
    tables = BlockTables(NUM_REQS, context, [BLOCK_SIZE])
    tables.stacks[0].ids[0] = table.numpy()
    ones, rows = np.ones(NUM_REQS, dtype=np.int64), np.arange(NUM_REQS)
    batch = StepBatch(rows=rows, num_computed=ones * (context - 1), query_lens=ones, generating_indices=rows)
    layers = Layers([layer], choices, group_layers([layer]), {"layer": views}, CPU)
    layers.begin_step(build_metadata(batch, tables, CPU))
    inputs = draw(NUM_REQS, NUM_HEADS), draw(NUM_REQS, NUM_KV_HEADS), draw(NUM_REQS, NUM_KV_HEADS)
    facts = {"on_copies": choices[0].on_copies, "num_bytes": NUM_REQS * num_blocks * spec.block_bytes}
    return lambda: layers["layer"](*inputs), facts


def measure_speed(registry: Registry, names: Sequence[str], context: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for every wanted backend, dtype and format. All formats of one backend and dtype take turns."""
    rows = []
    for backend, backend_class in usable_backends(registry, "cpu")[0].items():
        capabilities = backend_class.capabilities
        if capabilities.state != {"k", "v"} or capabilities.preference < 0 or backend not in (names or [backend]):
            continue  # It keeps latents, or is a fallback that is never preferred, or is not wanted.
        for dtype in ("float32", "bfloat16"):
            storages = [Stored(kv_format.name, kv_format, dtype) for kv_format in (PLAIN, *installed_formats())]
            calls = {storage.title: decode(storage, backend, registry, context) for storage in storages}
            turns = by_turns([*calls], repeats, lambda name, _: timed(calls[name][0])[0], warm_up=True)  # noqa: B023
            seconds = counted(turns)
            rows += [
                {"backend": backend, "dtype": dtype, "format": name, **facts, "seconds": seconds[name]}
                for name, (_, facts) in calls.items()
            ]
            click.echo(f"{backend} {dtype} done", err=True)
    return rows


WAYS: dict[str, Column] = {
    "perplexity_learned": ("perplexity, learned text", "{:.4f}"),
    "perplexity": ("perplexity, other text", "{:.2f}"),
    "logprob_difference_mean": ("log-probability of a token differs by, on average", "{:.2g}"),
    "logprob_difference_max": ("at most", "{:.2g}"),
    "copied_right": ("copied tokens right", "{:.1%}"),
}
MEMORY: dict[str, Column] = {
    "bytes_per_token": ("bytes of a token", "{:,}"),
    "tokens": ("tokens that fit", "{:,}"),
    "times": ("times as many as bfloat16", "{:.2f}"),
}
SPEED = ("backend", "computes in", "stored as", "reads", "MB stored", "ms a call", "times as long as plain")


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    model, memory, speed = record["model"], record["memory"], record["speed"]
    plain = memory["bfloat16"]["tokens"]
    return page(
        heading("Formats of stored keys and values", record, medians(record), "float32, unless a dtype is named."),
        "## The demo's trained model",
        f"{model['num_texts']} texts of {model['text_tokens']} tokens, teacher-forced, half of them of source "
        f"that it was trained on and nearly repeats; {model['num_tasks']} random segments to copy. The model computes "
        "in float32 throughout.",
        _ticked(model["ways"], WAYS),
        "## Memory",
        "Llama 3.1 8B, 32 layers of 8 KV heads of 128, in 8 GiB of cache.",
        _ticked({name: {**row, "times": row["tokens"] / plain} for name, row in memory.items()}, MEMORY),
        "## Decoding on a CPU",
        f"One layer, {speed['num_reqs']} requests of {speed['context']:,} tokens, pages of 16; a call stores a token "
        "of each request and attends. A backend that does not read a format itself is given copies of the pages.",
        table(SPEED, _speed(speed["rows"])),
    )


def _ticked(rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Column]) -> str:
    """Return a table with a row for each way to store; its name is set as code."""
    return figures({f"`{name}`": row for name, row in rows.items()}, columns, "stored as", "not measured")


def _speed(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    middle = {(row["backend"], row["dtype"], row["format"]): median(row["seconds"]) for row in rows}
    return [
        (
            f"`{row['backend']}`",
            row["dtype"],
            f"`{row['format']}`",
            "copies" if row["on_copies"] else "itself",
            f"{row['num_bytes'] / 1e6:.1f}",
            spread(row["seconds"], "{:.1f}", scale=1000),
            f"{median(row['seconds']) / middle[row['backend'], row['dtype'], 'plain']:.2f}",
        )
        for row in rows
    ]


@benchmark("formats", write_report)
@options.repeats(7)
@options.threads(2)
@click.option("--texts", "num_texts", type=click.IntRange(min=2), default=16)
@click.option("--context", type=click.IntRange(min=16), default=2048, help="Tokens of each request, a multiple of 16.")
@click.option("--backend", "backends", multiple=True, help="Time this backend alone; may be given several times.")
@click.option("--model", type=click.Path(path_type=Path), help="A checkpoint's folder instead of the demo's model.")
def main(
    repeats: int, threads: int, num_texts: int, context: int, backends: Sequence[str], model: Path | None
) -> dict[str, Any]:
    """Measure accuracy, memory and time of every format; write one JSON file and one page."""
    models.silence_transformers()
    path, registry = model or models.path_of("demo"), load_plugins().registry
    texts = make_texts(path, num_texts)
    tasks = make_copy_tasks(num_texts) if model is None else []
    served = {storage.title: serve(path, storage, texts, tasks) for storage in ways()}
    check_copying(share_right(served["float32"]["copied"], tasks))
    click.echo("the model is done", err=True)
    compared = {title: compare(results, served["float32"], tasks) for title, results in served.items()}
    rows = measure_speed(registry, backends, context, repeats)
    numbers = {"num_texts": num_texts, "text_tokens": TEXT_TOKENS, "num_tasks": len(tasks)}
    return {
        "repeats": repeats,
        "model": {**numbers, "ways": compared},
        "memory": {storage.title: memory_of(storage, registry) for storage in ways()},
        "speed": {"num_reqs": NUM_REQS, "context": context, "rows": rows},
    }


if __name__ == "__main__":
    main()
