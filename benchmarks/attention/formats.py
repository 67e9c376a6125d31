"""Measure formats of stored keys and values: lost accuracy, and saved memory and time. See benchmarks/README.md."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import torch
from transformers import AutoTokenizer

from benchmarks.attention.format_layers import Decode, Stored, memory_of
from benchmarks.engine.workloads import SEED
from benchmarks.harness import models, options
from benchmarks.harness.layers import usable_backends
from benchmarks.harness.pages import Column, figures, heading, medians, page, spread, table
from benchmarks.harness.process import timed
from benchmarks.harness.record import benchmark, by_turns, counted
from kvframe import Engine, SamplingParams, Stack
from kvframe.contract.formats import PLAIN
from kvframe.loading.plugins import load_plugins
from kvframe.testing.formats import installed_formats

TEXT_TOKENS = 384
LEARNED, OTHER = ("shlex", "textwrap"), ("cmd", "getopt")
"""Modules whose source the demo's model was trained on, and modules of a similar style that it has not seen."""

NUM_BEGUN = 256
"""A greedy continuation starts after so many tokens of a text."""

NUM_NEW_TOKENS = 48
TASKS_IN_A_ROW = 4
"""Copy tasks in a row; the model answers the last one. It was trained on rows of up to five."""

MIN_COPIED = 0.95
"""The least share of right copied tokens in float32. Below it, wrong tokens would show the model and not the format."""

NUM_REQS = 8
SPEED_DTYPES = ("float32", "bfloat16")
Tasks = Sequence[tuple[list[int], list[int]]]
"""Prompts, and the right tokens after each."""


def ways() -> list[Stored]:
    """Return plain storage in three dtypes, and every installed format with attention in float32."""
    plain = [Stored(dtype, PLAIN, dtype) for dtype in ("float32", "float16", "bfloat16")]
    return [*plain, *(Stored(each.name, each, "float32") for each in installed_formats())]


def make_texts(path: Path, count: int) -> dict[str, list[list[int]]]:
    """Return parts of Python's library by kind: one half is ``learned`` in training, the other is not."""
    tokenizer, found = AutoTokenizer.from_pretrained(path), {}
    for kind, names, number in (("learned", LEARNED, count // 2), ("other", OTHER, count - count // 2)):
        source = tokenizer.encode("".join(inspect.getsource(importlib.import_module(name)) for name in names))
        step = max(1, (len(source) - TEXT_TOKENS) // max(1, number - 1))
        found[kind] = [list(source[start : start + TEXT_TOKENS]) for start in range(0, number * step, step)]
    return found


def make_copy_tasks(count: int) -> Tasks:
    """Return copy tasks as in the demo's training: whole tasks, then one whose answer is left out.

    The answer is a random segment that lies before the model's windows.
    """
    generator = torch.Generator().manual_seed(SEED)
    copy_task, num_asked = models.demo_copy_task()
    rows = [torch.cat([copy_task(generator) for _ in range(TASKS_IN_A_ROW)]).tolist() for _ in range(count)]
    return [(row[:-num_asked], row[-num_asked:]) for row in rows]


def serve(path: Path, stored: Stored, texts: Mapping[str, Sequence[list[int]]], tasks: Tasks) -> dict[str, Any]:
    """Return the model's log-probabilities, continuations and answers with keys and values stored in one way."""
    cache = {"memory": "64MiB", "dtype": stored.dtype, "format": stored.kv_format.name}
    stack = Stack.from_mapping({"cache": cache, "engine": {"dtype": "float32"}})
    greedy = SamplingParams(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    scoring = SamplingParams(max_new_tokens=1, prompt_logprobs=True)
    with Engine.from_pretrained(path, stack=stack) as engine:
        scored = {kind: engine.generate(found, scoring) for kind, found in texts.items()}
        continued = engine.generate([text[:NUM_BEGUN] for found in texts.values() for text in found], greedy)
        copied = engine.generate([prompt for prompt, _ in tasks], greedy)
        backends = sorted({choice.backend for choice in engine.choices})
    return {
        "backends": backends,
        "logprobs": {
            kind: torch.tensor([value for output in outputs for value in (output.prompt_logprobs or [])[1:]])
            for kind, outputs in scored.items()
        },
        "continued": [list(output.token_ids) for output in continued],
        "copied": [list(output.token_ids) for output in copied],
    }


def compare(found: Mapping[str, Any], exact: Mapping[str, Any], tasks: Tasks) -> dict[str, Any]:
    """Return how the results of one way to store differ from those of float32."""
    logprobs: Mapping[str, torch.Tensor] = found["logprobs"]
    differences = torch.cat([(ours - exact["logprobs"][kind]).abs() for kind, ours in logprobs.items()])
    pairs = list(zip(found["continued"], exact["continued"], strict=True))
    return {
        "backends": found["backends"],
        "perplexity_learned": math.exp(-float(logprobs["learned"].mean())),
        "perplexity": math.exp(-float(logprobs["other"].mean())),
        "logprob_difference_mean": float(differences.mean()),
        "logprob_difference_max": float(differences.max()),
        "equal_continuations": fmean(ours == theirs for ours, theirs in pairs),
        "tokens_before_the_first_difference": fmean(_num_alike(*pair) for pair in pairs),
        "copied_right": share_right(found["copied"], tasks),
    }


def share_right(outputs: Sequence[list[int]], tasks: Tasks) -> float | None:
    """Return the share of the tasks' tokens that are right; None without tasks."""
    right = [
        ours == asked
        for output, (_, wanted) in zip(outputs, tasks, strict=True)
        for ours, asked in zip(output, wanted, strict=False)
    ]
    return fmean(right) if right else None


def check_copying(copied_right: float | None) -> None:
    """End the command if the model fails the copy tasks already in float32."""
    if copied_right is not None and copied_right < MIN_COPIED:
        raise click.ClickException(
            f"in float32 the model copies {copied_right:.1%} of the tokens right; it has to copy {MIN_COPIED:.0%}"
        )


def _num_alike(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((index for index, (one, other) in pairs if one != other), len(ours))


def measure_speed(context: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for every backend, dtype and format. All formats of one backend and dtype take turns."""
    registry, rows = load_plugins().registry, []
    for backend, backend_class in usable_backends(registry, "cpu")[0].items():
        if backend_class.capabilities.state != {"k", "v"} or backend_class.capabilities.preference < 0:
            continue  # It keeps latents, or is a fallback that is never preferred.
        for dtype in SPEED_DTYPES:
            stored = [Stored(each.name, each, dtype) for each in (PLAIN, *installed_formats())]
            decodes = {each.title: Decode(each, backend, registry, NUM_REQS, context) for each in stored}
            turns = by_turns([*decodes], repeats, lambda name, _: timed(decodes[name])[0], warm_up=True)  # noqa: B023
            seconds = counted(turns)
            rows += [
                {
                    "backend": backend,
                    "dtype": dtype,
                    "format": name,
                    "on_copies": decode.on_copies,
                    "num_bytes": decode.num_bytes,
                    "seconds": seconds[name],
                }
                for name, decode in decodes.items()
            ]
            click.echo(f"{backend} {dtype} done", err=True)
    return rows


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    model, memory, speed = record["model"], record["memory"], record["speed"]
    plain = memory["bfloat16"]["tokens"]
    return page(
        heading("Formats of stored keys and values", record, medians(record), "float32, unless a dtype is named."),
        "## The demo's trained model",
        f"{model['num_texts']} texts of {model['text_tokens']} tokens, teacher-forced, half of them of source "
        "that it was trained on and nearly repeats; greedy continuations of their first 256 tokens; "
        f"{model['num_tasks']} random segments to copy. The model computes in float32 throughout.",
        _ticked(model["ways"], WAYS),
        "## Memory",
        "Llama 3.1 8B, 32 layers of 8 KV heads of 128, in 8 GiB of cache.",
        _ticked({name: {**each, "times": each["tokens"] / plain} for name, each in memory.items()}, MEMORY),
        "## Decoding on a CPU",
        f"One layer, {speed['num_reqs']} requests of {speed['context']:,} tokens, pages of 16; a call stores a token "
        "of each request and attends. A backend that does not read a format itself is given copies of the pages.",
        _speed(speed["rows"]),
    )


WAYS: dict[str, Column] = {
    "perplexity_learned": ("perplexity, learned text", "{:.4f}"),
    "perplexity": ("perplexity, other text", "{:.2f}"),
    "logprob_difference_mean": ("log-probability of a token differs by, on average", "{:.2g}"),
    "logprob_difference_max": ("at most", "{:.2g}"),
    "equal_continuations": ("continuations equal to float32's", "{:.0%}"),
    "tokens_before_the_first_difference": ("tokens before the first difference, of 48", "{:.1f}"),
    "copied_right": ("copied tokens right", "{:.1%}"),
}
"""The columns for a way to store."""

MEMORY: dict[str, Column] = {
    "bytes_per_token": ("bytes of a token", "{:,}"),
    "tokens": ("tokens that fit", "{:,}"),
    "times": ("times as many as bfloat16", "{:.2f}"),
}


def _ticked(rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Column]) -> str:
    """Return a table with a row for each way to store; its name is set as code."""
    return figures({f"`{name}`": row for name, row in rows.items()}, columns, "stored as", "not measured")


def _speed(measured: list[Mapping[str, Any]]) -> str:
    middle = {(row["backend"], row["dtype"], row["format"]): median(row["seconds"]) for row in measured}
    rows = [
        (
            f"`{row['backend']}`",
            row["dtype"],
            f"`{row['format']}`",
            "copies" if row["on_copies"] else "itself",
            f"{row['num_bytes'] / 1e6:.1f}",
            spread(row["seconds"], "{:.1f}", scale=1000),
            f"{median(row['seconds']) / middle[row['backend'], row['dtype'], 'plain']:.2f}",
        )
        for row in measured
    ]
    return table(
        ("backend", "computes in", "stored as", "reads", "MB stored", "ms a call", "times as long as plain"), rows
    )


@benchmark("formats", write_report)
@options.repeats(7)
@options.threads(2)
@click.option("--texts", "num_texts", type=click.IntRange(min=2), default=16)
@click.option("--context", type=click.IntRange(min=16), default=2048, help="Tokens of each request, a multiple of 16.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    default=None,
    help="A checkpoint's folder; the default is the demo's model.",
)
def main(repeats: int, threads: int, num_texts: int, context: int, model: Path | None) -> dict[str, Any]:
    """Measure accuracy, memory and time of every format; write one JSON file and one page."""
    models.silence_transformers()
    path = models.path_of("demo") if model is None else model
    texts = make_texts(path, num_texts)
    tasks = make_copy_tasks(num_texts) if model is None else []
    served = {stored.title: serve(path, stored, texts, tasks) for stored in ways()}
    check_copying(share_right(served["float32"]["copied"], tasks))
    click.echo("the model is done", err=True)
    registry = load_plugins().registry
    return {
        "repeats": repeats,
        "model": {
            "num_texts": num_texts,
            "text_tokens": TEXT_TOKENS,
            "num_tasks": len(tasks),
            "ways": {title: compare(found, served["float32"], tasks) for title, found in served.items()},
        },
        "memory": {
            stored.title: memory_of(
                stored.kv_format, stored.dtype if stored.kv_format == PLAIN else "bfloat16", registry
            )
            for stored in ways()
        },
        "speed": {"num_reqs": NUM_REQS, "context": context, "rows": measure_speed(context, repeats)},
    }


if __name__ == "__main__":
    main()
