"""The page of the cache core: the record as tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.pages import heading, spread, table

FACTS = {
    "num_groups": ("groups", "{:,}"),
    "calls_per_request": ("Python calls for each request", "{:,.1f}"),
    "num_held": ("blocks held at the end", "{:,}"),
    "slowest_us": ("slowest step of the last round, µs", "{:,.1f}"),
    "lookup_us": ("lookup, µs", "{:,.1f}"),
    "release_us": ("release, µs", "{:,.1f}"),
    "empty_bytes_per_block": ("bytes a block, new", "{:,.1f}"),
    "cached_bytes_per_block": ("bytes a block, all cached", "{:,.1f}"),
}
"""Of what a check says, what is shown: its column, and how a number is written."""


RATIO = "{:.3g}"


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = "every side is checked to hold and find the blocks that it should, in a process that used memory before"
    lines = heading("The cache core: kvframe's and vLLM's", record, note, dtype="Blocks of 16 tokens")
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines += ["", f"Sides: {versions}.", "", *_summary(record["cases"])]
    for name, measured in record["cases"].items():
        lines += ["", f"## {name}", "", f"{measured['title']}. {measured['words']}", "", *_sides(measured)]
    return "\n".join(lines) + "\n"


def _summary(cases: Mapping[str, Any]) -> list[str]:
    rows = []
    for measured in cases.values():
        names = [name for name, values in measured["sides"].items() if values["times_as_fast"]]
        aim = "" if measured["aim"] is None else f"{measured['aim']:g}"
        for index, name in enumerate(names):
            ratio = spread(measured["sides"][name]["times_as_fast"], RATIO)
            rows.append((measured["title"] if index == 0 else "", name, ratio, aim if index == 0 else ""))
    return table(("", "", "times as fast as vLLM", "aim"), rows) if rows else []


def _sides(measured: Mapping[str, Any]) -> list[str]:
    sides, num_requests = measured["sides"], measured["sizes"].get("num_requests")
    shown = [name for name in FACTS if any(name in values for values in sides.values())]
    fastest = min(min(values["seconds"]) for values in sides.values())
    unit, scale = ("ms", 1e3) if fastest > 1e-3 else ("µs", 1e6)
    rows = []
    for name, values in sides.items():
        ratio = values["times_as_fast"]
        facts = [FACTS[fact][1].format(values[fact]) for fact in shown]
        if num_requests is not None:
            facts.insert(0, f"{1e6 * statistics.median(values['seconds']) / num_requests:,.2f}")
        time = spread([scale * each for each in values["seconds"]], "{:,.1f}")
        rows.append((name, time, spread(ratio, RATIO) if ratio else "", *facts))
    each = [] if num_requests is None else ["µs for each request"]
    return table(("", unit, "times as fast", *each, *(FACTS[fact][0] for fact in shown)), rows)
