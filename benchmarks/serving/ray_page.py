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
        "frontend_ms": ("frontend, ms of processor a request", "{:,.0f}"),
        "engines_ms": ("engines", "{:,.0f}"),
        "all_ms": ("all processes", "{:,.0f}"),
        "hits": ("times the hits of the default", "{:.2f}"),
        "first": ("times its first token", "{:.2f}"),
        "speed": ("times its tokens per second", "{:.2f}"),
    }
    parts = []
    for setting, result in record["settings"].items():
        parts += [f"## {setting}", f"A cache of {result['memory']} in each engine."]
        for trace, routers in result["traces"].items():
            default = routers.get(DEFAULT)
            rows = {
                name: {
                    **values,
                    "share": ratios(values["hit_tokens"], values["prompt_tokens"]),
                    "hits": _times(values, default, "hit_tokens"),
                    "first": _times(values, default, "first_token_ms"),
                    "speed": _times(values, default, "tokens_per_s"),
                }
                for name, values in routers.items()
            }
            counts = next(iter(routers.values()))
            words = f"{counts['requests'][0]:,} requests and {counts['prompt_tokens'][0]:,} prompt tokens in a round."
            parts += [f"### {trace}", words, figures(rows, columns, "router")]
    note = (
        f"{AT_ONCE} requests at once, {REPLY_TOKENS} tokens in each answer. Clients, Ray and engines share the cores."
    )
    return page(
        heading("Routers on Ray Serve", record, medians(record), note),
        "Hits are prompt tokens that the engine did not compute, as answers say. Tokens per second are of prompts and "
        "answers. Processor time is that of all processes of a kind, divided by the requests; the router is in the "
        "frontend. The power of two choices is Ray's default. If none are expected, the router knows nothing of "
        "prompts that engines have not computed yet.",
        "If there are more engines than cores, they take processor time from each other. A router that leaves some "
        "idle then makes larger batches, which take less of it. With an engine for each core, this does not count.",
        *parts,
    )


def _times(values: Mapping[str, Any], default: Mapping[str, Any] | None, name: str) -> list[float]:
    """Return how many times the figure of the default a router's figure is, in each round."""
    if default is None or values is default or not all(default[name]):
        return []
    return ratios(values[name], default[name])
