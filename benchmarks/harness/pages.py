"""The page of results: the record as tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    note = "greedy; the tokens of all systems are equal in every repeat"
    lines = heading("Generating: kvframe and transformers", record, note)
    for name, measured in record["workloads"].items():
        lines += ["", f"## {name}", "", _batch(measured), "", *_speeds(measured)]
        if "first_token_seconds" in measured:
            lines += ["", *_first_token(measured["first_token_seconds"])]
    return "\n".join(lines) + "\n"


def heading(title: str, record: Mapping[str, Any], note: str, *, dtype: str = "float32") -> list[str]:
    """Return a page's first lines: its title, and where and how its figures were measured."""
    machine = record["machine"]
    return [
        f"# {title}",
        "",
        f"Measured on {machine['date']} by `{machine['command']}`, median of {record['repeats']} alternating repeats "
        "(lowest to highest in brackets).",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} torch thread(s), {machine['system']}; "
        f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"kvframe {machine['kvframe']} at {machine['commit']}. {dtype}, {note}.",
    ]


def _batch(measured: Mapping[str, Any]) -> str:
    batch = measured["batch"]
    prefix = f" after a common prefix of {batch['prefix']}" if batch["prefix"] else ", nothing in common"
    return (
        f"Model `{measured['model']}`; {batch['num_prompts']} prompts of {batch['shortest']} to {batch['longest']} "
        f"tokens{prefix}; {batch['num_new_tokens']} new tokens each."
    )


def _speeds(measured: Mapping[str, Any]) -> list[str]:
    rows = []
    dense = measured["dense_bytes"]
    for name, speeds in measured["tokens_per_second"].items():
        ratio = measured["times_as_fast"].get(name)
        num_bytes = measured["cache_bytes"][name]
        held = "not reported" if num_bytes is None else f"{num_bytes / 1e6:.1f} MB"
        rows.append((name, spread(speeds, "{:,.0f}"), "" if ratio is None else f"{ratio:.2f}", held))
    rows.append(("every layer full, padded, contiguous", "", "", f"{dense / 1e6:.1f} MB"))
    return table(("", "generated tokens/s", "kvframe is … times as fast", "keys and values held at most"), rows)


def _first_token(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    rows = [(name, spread([1000 * each for each in times], "{:,.1f}")) for name, times in seconds.items()]
    return table(("one request alone", "time to its first token, ms"), rows)


def spread(values: Sequence[float], form: str) -> str:
    """Return the median with the lowest and highest in brackets, each as ``form`` writes a number."""
    middle, low, high = (form.format(value) for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
