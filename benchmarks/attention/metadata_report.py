"""The page of what metadata costs: the record as a table for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.pages import heading, spread, table


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    lines = heading("Attention metadata: host time per step", record, "all on the host")
    rows = []
    for name, part in record["parts"].items():
        limit, num_bytes = part["limit"], part["uploaded_bytes"]
        rows.append(
            (
                name,
                spread(part["microseconds"], "{:,.1f}"),
                "" if limit is None else f"{limit:,.0f}",
                f"{statistics.median(part['dense_microseconds']):,.1f}",
                f"{part['times_dense']:.1f}",
                "" if num_bytes is None else f"{num_bytes:,}",
            )
        )
    heads = ("", "µs per step", "at most", "one dense operation, µs", "times that", "bytes uploaded")
    return "\n".join([*lines, "", *table(heads, rows)]) + "\n"
