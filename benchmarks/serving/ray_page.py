"""The page of the record of routers on Ray Serve; it is written without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.pages import heading, page, table

TRACES = ("multi-turn", "shared prefixes", "nothing shared")
REPLY_TOKENS, AT_ONCE = 16, 6


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    parts = []
    for trace in TRACES:
        rows = [row for row in record["rows"] if row["trace"] == trace]
        parts += [
            f"## {trace}",
            f"{rows[0]['requests']:,} requests, {rows[0]['prompt_tokens']:,} prompt tokens.",
            table(
                ("router", "hit tokens", "share", "first token, median", "tokens per second"),
                [
                    (
                        row["router"],
                        f"{row['hit_tokens']:,}",
                        f"{row['hit_tokens'] / row['prompt_tokens']:.1%}",
                        f"{row['first_token_ms']:,.0f} ms",
                        f"{row['tokens_per_s']:,.0f}",
                    )
                    for row in rows
                ],
            ),
        ]
    note = (
        f"{record['replicas']} engines with a cache of {record['memory']} each, {AT_ONCE} requests at once, "
        f"{REPLY_TOKENS} tokens in each answer. Clients, Ray and engines share the cores."
    )
    return page(
        heading("Routers on Ray Serve", record, ".", note),
        "Hits are prompt tokens that the engine did not compute, as answers say. Tokens per second are of prompts and "
        "answers. The power of two choices is Ray's default.",
        *parts,
    )
