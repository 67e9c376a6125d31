"""The page of what times tell across salts: the record as tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.pages import table

WORDS = (
    "One tenant's prompt is timed after, or beside, another prompt: the same one, or another one of the same length. "
    "*Right* is how often the longer of two times is that of the prompt that nobody had asked for before: 0.5 is a "
    "guess. Times across salts must not tell; those within one salt must, or the benchmark could not."
)


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    machine = record["machine"]
    lines = [
        "# What times tell of other tenants' prompts",
        "",
        f"Measured on {machine['date']} by `{machine['command']}`: processor time, {record['lookups']:,} lookups and "
        f"{record['requests']:,} requests of each kind of two salts, in random order; medians, with the 5th and 95th "
        "percentile in brackets.",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} torch thread(s), {machine['system']}; "
        f"Python {machine['python']}, torch {machine['torch']}, kvframe {machine['kvframe']} at {machine['commit']}.",
        "",
        WORDS,
    ]
    for measured in record["measured"].values():
        lines += ["", f"## {measured['title'].capitalize()}", "", *_times(measured), "", *_told(measured)]
        lines += ["", "As it must be." if measured["as_expected"] else "**Not as it must be.**"]
    return "\n".join(lines) + "\n"


def _times(measured: Mapping[str, Any]) -> list[str]:
    rows = []
    for kind, times in measured["nanoseconds"].items():
        parts = statistics.quantiles([each / 1000 for each in times], n=20, method="inclusive")
        rows.append((kind, f"{parts[9]:,.1f} ({parts[0]:,.1f} to {parts[18]:,.1f})"))
    return table(("before it", "µs"), rows)


def _told(measured: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, words in (("across", "of two salts"), ("within", "of one salt")):
        told = measured[name]
        p_value = f"{told['p_value']:.2g}" if told["p_value"] >= 1e-12 else "below 1e-12"
        rows.append((words, f"{told['right']:.3f} ({told['low']:.3f} to {told['high']:.3f})", p_value))
    return table(("", "right (95 % interval)", "p for a guess"), rows)
