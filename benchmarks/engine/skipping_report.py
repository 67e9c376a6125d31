"""The page of prefill skipping: the record as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.pages import heading, spread, table


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    lines = heading("Prefill skipping: on and off", record, "the first token is equal in every repeat")
    for name, measured in record["workloads"].items():
        lines += ["", f"## {name}", "", _shape(measured), "", *_seconds(measured), "", *_predictions(measured)]
    lines += [
        "",
        "Published, on a GPU: in vLLM pull request 19719, with Qwen2 and a prompt of 8,192 tokens, the second group of "
        "layers takes 9.7 ms with skipping and 16.6 ms without, 0.58.",
    ]
    return "\n".join(lines) + "\n"


def _shape(measured: Mapping[str, Any]) -> str:
    rows = measured["rows"]
    return (
        f"Model `{measured['model']}`: the last {measured['num_trailing_layers']} of {measured['num_layers']} layers "
        f"share keys and values of earlier ones. Prompts of {measured['num_prompt_tokens']:,} tokens in steps of at "
        f"most {measured['max_num_batched_tokens']:,}; each trailing layer computes {rows['off']:,} rows of a prompt "
        f"without skipping and {rows['on']:,} with it."
    )


def _seconds(measured: Mapping[str, Any]) -> list[str]:
    rows = []
    for clock, figures in measured["clocks"].items():
        for title, part in (("trailing layers", "trailing"), ("whole prefill", "whole")):
            times = figures["seconds"][part]
            shown = [spread([1000 * each for each in times[name]], "{:,.1f}") for name in ("off", "on")]
            rows.append((f"{title}, {clock}", *shown, f"{figures[f'{part}_ratio']:.3f}"))
    return table(("", "off, ms", "on, ms", "on is … of off"), rows)


def _predictions(measured: Mapping[str, Any]) -> list[str]:
    rows = [
        (clock, *(f"{figures[key]:.2f}" for key in ("trailing_share", "predicted_whole_ratio", "whole_ratio")))
        for clock, figures in measured["clocks"].items()
    ]
    return table(("", "trailing layers' share, off", "so of the whole is left", "measured"), rows)
