"""The page of what formats cost and save: the record as tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.pages import heading, medians, page, spread, table


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    model, speed = record["model"], record["speed"]
    return page(
        heading("Formats of stored keys and values", record, medians(record), "float32, but where a dtype is named."),
        "## The demo's trained model",
        f"{model['num_texts']} texts of {model['text_tokens']} tokens, teacher-forced, half of them of source "
        "that it was trained on and knows nearly by heart; greedy continuations of their first 256 tokens; "
        f"{model['num_tasks']} random segments to say again. The model computes in float32 throughout.",
        _ways(model["ways"]),
        "## Memory",
        "Llama 3.1 8B, 32 layers of 8 KV heads of 128, in 8 GiB of cache.",
        _memory(record["memory"]),
        "## Decoding on a CPU",
        f"One layer, {speed['num_reqs']} requests of {speed['context']:,} tokens, pages of 16; a call stores a token "
        "of each request and attends. A backend that does not read a format itself is given copies of the pages.",
        _speed(speed["rows"]),
    )


WAYS = {
    "perplexity_learned": ("perplexity, learned text", "{:.4f}"),
    "perplexity": ("perplexity, other text", "{:.2f}"),
    "logprob_difference_mean": ("log-probability of a token differs by, on average", "{:.2g}"),
    "logprob_difference_max": ("at most", "{:.2g}"),
    "equal_continuations": ("continuations equal to float32's", "{:.0%}"),
    "tokens_before_the_first_difference": ("tokens before the first difference, of 48", "{:.1f}"),
    "copied_right": ("copied tokens right", "{:.1%}"),
}
"""What is said of a way to store: its column, and how a number is written."""


def _ways(ways: Mapping[str, Mapping[str, Any]]) -> str:
    def cell(value: float | None, form: str) -> str:
        return "not measured" if value is None else form.format(value)

    rows = [(f"`{name}`", *(cell(way[key], form) for key, (_, form) in WAYS.items())) for name, way in ways.items()]
    return table(("stored as", *(head for head, _ in WAYS.values())), rows)


def _memory(memory: Mapping[str, Mapping[str, int]]) -> str:
    plain = memory["bfloat16"]["tokens"]
    rows = [
        (f"`{name}`", f"{each['bytes_per_token']:,}", f"{each['tokens']:,}", f"{each['tokens'] / plain:.2f}")
        for name, each in memory.items()
    ]
    return table(("stored as", "bytes of a token", "tokens that fit", "times as many as bfloat16"), rows)


def _speed(measured: list[Mapping[str, Any]]) -> str:
    median = {(row["backend"], row["dtype"], row["format"]): statistics.median(row["seconds"]) for row in measured}
    rows = [
        (
            f"`{row['backend']}`",
            row["dtype"],
            f"`{row['format']}`",
            "copies" if row["on_copies"] else "itself",
            f"{row['num_bytes'] / 1e6:.1f}",
            spread(row["seconds"], "{:.1f}", scale=1000),
            f"{statistics.median(row['seconds']) / median[row['backend'], row['dtype'], 'plain']:.2f}",
        )
        for row in measured
    ]
    return table(
        ("backend", "computes in", "stored as", "reads", "MB stored", "ms a call", "times as long as plain"), rows
    )
