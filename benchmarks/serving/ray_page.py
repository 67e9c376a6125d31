"""The page of the record of routers on Ray Serve; it is written without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.pages import Column, figures, heading, medians, page
from benchmarks.harness.record import ratios

TRACES = ("multi-turn", "shared prefixes", "nothing shared")
DEFAULT = "power of two choices"
REPLY_TOKENS, AT_ONCE = 16, 6


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    columns: dict[str, Column] = {
        "hit_tokens": ("hit tokens", "{:,.0f}"),
        "share": ("share", "{:.1%}"),
        "first_token_ms": ("first token, median, ms", "{:,.0f}"),
        "tokens_per_s": ("tokens per second", "{:,.0f}"),
        "hits": ("times the hits of the default", "{:.2f}"),
        "first": ("times its first token", "{:.2f}"),
    }
    parts = []
    for trace, routers in record["traces"].items():
        default = routers.get(DEFAULT)
        rows = {
            name: {
                **values,
                "share": ratios(values["hit_tokens"], values["prompt_tokens"]),
                "hits": _times(values, default, "hit_tokens"),
                "first": _times(values, default, "first_token_ms"),
            }
            for name, values in routers.items()
        }
        asked = next(iter(routers.values()))
        words = f"{asked['requests'][0]:,} requests and {asked['prompt_tokens'][0]:,} prompt tokens in a round."
        parts += [f"## {trace}", words, figures(rows, columns, "router")]
    note = (
        f"{record['replicas']} engines with a cache of {record['memory']} each, {AT_ONCE} requests at once, "
        f"{REPLY_TOKENS} tokens in each answer. Clients, Ray and engines share the cores."
    )
    return page(
        heading("Routers on Ray Serve", record, medians(record), note),
        "Hits are prompt tokens that the engine did not compute, as answers say. Tokens per second are of prompts and "
        "answers. The power of two choices is Ray's default. If none are expected, the router knows nothing of prompts "
        "that engines have not computed yet.",
        *parts,
    )


def _times(values: Mapping[str, Any], default: Mapping[str, Any] | None, name: str) -> list[float]:
    """Return how many times the figure of the default a router's figure is, in each round."""
    if default is None or values is default or not all(default[name]):
        return []
    return ratios(values[name], default[name])
