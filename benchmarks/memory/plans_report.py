"""The page of planned memory: the record as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.pages import table
from kvframe.cli.render import format_bytes

SYSTEMS = ("hybrid", "full", "padded")
"""kvframe, every layer full, equal padded groups."""


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    lines = [
        "# Planned memory of published models",
        "",
        f"Planned on {record['date']} by `{record['command']}`, kvframe {record['kvframe']}: 80 GB of cache "
        f"({record['memory_bytes']:,} bytes; weights are not counted), keys and values in {record['dtype']}, blocks of "
        f"{record['block_size']} tokens, steps of at most {record['max_num_batched_tokens']:,} tokens.",
        "",
        "## What is planned",
        "",
        *table(
            ("", "groups", "one more token", "each request, whatever its length", "wasted"),
            [_planned(row) for row in record["models"]],
        ),
        "",
        "## Requests that fit at once",
        "",
        *table(
            (
                *("", "tokens each", "kvframe", "every layer full", "equal padded groups"),
                *("MiB a request: kvframe", "every layer full", "equal padded groups", "of these wasted"),
            ),
            [line for row in record["models"] for line in _requests(row)],
        ),
        "",
        "## The equal padded groups",
        "",
        *table(
            ("", "groups", "layers a group", "layers that are not there", "tokens a block", "groups of kvframe"),
            [_padded(row) for row in record["models"]],
        ),
    ]
    return "\n".join(lines) + "\n"


def _planned(row: Mapping[str, Any]) -> tuple[str, ...]:
    groups = ", ".join(f"{group['num_layers']} {group['kind']}" for group in row["groups"])
    held = [format_bytes(row["bytes_per_request"])] if row["bytes_per_request"] else []
    for sequence, num_bytes in row["bytes_per_input_token"].items():
        longest = row["max_input_lens"][sequence]
        held.append(f"{format_bytes(num_bytes * longest)} for {longest:,} {sequence} tokens")
    wasted = f"{format_bytes(row['wasted_bytes'])}, {row['wasted']:.2%}"
    return row["title"], groups, format_bytes(row["bytes_per_token"]), ", ".join(held), wasted


def _requests(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    found = []
    for index, length in enumerate(row["lengths"]):
        counts = (row["requests"][name][index] for name in SYSTEMS)
        sizes = (row["request_bytes"][name][index] / 2**20 for name in SYSTEMS)
        found.append(
            (
                row["title"] if index == 0 else "",
                f"{length:,}",
                *(f"{count:,}" for count in counts),
                *(f"{size:,.1f}" for size in sizes),
                f"{row['padded']['wasted'][index]:.1%}",
            )
        )
    return found


def _padded(row: Mapping[str, Any]) -> tuple[str, ...]:
    padded = row["padded"]
    sizes = ", ".join(f"{size:,}" for size in sorted(set(padded["block_sizes"])))
    numbers = padded["num_groups"], padded["group_size"], padded["num_missing_layers"]
    return row["title"], *map(str, numbers), sizes, str(len(row["groups"]))
