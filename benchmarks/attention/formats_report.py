"""The page of what formats cost and save: the record as tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.pages import heading, medians, spread, table


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    note = "float32, but where a dtype is named."
    lines = heading("Formats of stored keys and values", record["machine"], medians(record), note)
    return "\n".join([*lines, *_model(record["model"]), *_memory(record), *_speed(record)]) + "\n"


def _model(measured: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            f"`{name}`",
            f"{way['perplexity_learned']:.4f}",
            f"{way['perplexity']:.2f}",
            f"{way['logprob_difference_mean']:.2g}",
            f"{way['logprob_difference_max']:.2g}",
            f"{way['equal_continuations']:.0%}",
            f"{way['tokens_before_the_first_difference']:.1f}",
            "not measured" if way["copied_right"] is None else f"{way['copied_right']:.1%}",
        )
        for name, way in measured["ways"].items()
    ]
    return [
        "",
        "## The demo's trained model",
        "",
        f"{measured['num_texts']} texts of {measured['text_tokens']} tokens, teacher-forced, half of them of source "
        "that it was trained on and knows nearly by heart; greedy continuations of their first 256 tokens; "
        f"{measured['num_tasks']} random segments to say again. The model computes in float32 throughout.",
        "",
        *table(
            (
                "stored as",
                "perplexity, learned text",
                "perplexity, other text",
                "log-probability of a token differs by, on average",
                "at most",
                "continuations equal to float32's",
                "tokens before the first difference, of 48",
                "copied tokens right",
            ),
            rows,
        ),
    ]


def _memory(record: Mapping[str, Any]) -> list[str]:
    plain = record["memory"]["bfloat16"]["tokens"]
    rows = [
        (f"`{name}`", f"{each['bytes_per_token']:,}", f"{each['tokens']:,}", f"{each['tokens'] / plain:.2f}")
        for name, each in record["memory"].items()
    ]
    return [
        "",
        "## Memory",
        "",
        "Llama 3.1 8B, 32 layers of 8 KV heads of 128, in 8 GiB of cache.",
        "",
        *table(("stored as", "bytes of a token", "tokens that fit", "times as many as bfloat16"), rows),
    ]


def _speed(record: Mapping[str, Any]) -> list[str]:
    speed = record["speed"]
    plain = {
        (row["backend"], row["dtype"]): statistics.median(row["seconds"])
        for row in speed["rows"]
        if row["format"] == "plain"
    }
    rows = [
        (
            f"`{row['backend']}`",
            row["dtype"],
            f"`{row['format']}`",
            "copies" if row["on_copies"] else "itself",
            f"{row['num_bytes'] / 1e6:.1f}",
            spread(row["seconds"], "{:.1f}", scale=1000),
            f"{statistics.median(row['seconds']) / plain[row['backend'], row['dtype']]:.2f}",
        )
        for row in speed["rows"]
    ]
    return [
        "",
        "## Decoding on a CPU",
        "",
        f"One layer, {speed['num_reqs']} requests of {speed['context']:,} tokens, pages of 16; a call stores a token "
        "of each request and attends. A backend that does not read a format itself is given copies of the pages.",
        "",
        *table(
            ("backend", "computes in", "stored as", "reads", "MB stored", "ms a call", "times as long as plain"), rows
        ),
    ]
