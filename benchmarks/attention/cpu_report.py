"""The page of attention on a CPU: the record as tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.pages import heading, spread, table


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = "the outputs of all systems agree in every turn"
    lines = heading("Attention on a CPU: kvframe's backends and vLLM's", record, note, dtype="float32 and bfloat16")
    versions = (f"{name} ({', '.join(map(' '.join, parts.items()))})" for name, parts in record["versions"].items())
    lines += ["", f"Systems: {'; '.join(versions)}."]
    for name, measured in record["shapes"].items():
        lines += ["", f"## {name}", "", _shape(measured), "", *_systems(measured)]
        for system, reason in measured["refused"].items():
            lines += ["", f"Not measured: {system} ({reason})."]
    return "\n".join(lines).rstrip() + "\n"


def _shape(measured: Mapping[str, Any]) -> str:
    shape = measured["shape"]
    window = "" if shape["window"] is None else f", window of {shape['window']:,} tokens"
    ceiling = spread([each / 1e9 for each in measured["ceiling"]], "{:,.1f}")
    what = "GB/s read" if shape["kind"] == "decode" else "GFLOP/s in a matrix product"
    return (
        f"{_requests(shape['requests'])}; {shape['num_heads']} query heads, {shape['num_kv_heads']} key and value "
        f"heads of {shape['head_size']}; {shape['dtype']}, pages of {shape['block_size']}{window}. "
        f"Ceiling: {ceiling} {what}."
    )


def _requests(requests: list[list[int]]) -> str:
    parts: dict[tuple[int, ...], int] = {}
    for request in requests:
        parts[tuple(request)] = parts.get(tuple(request), 0) + 1
    return ", ".join(
        f"{count} {'request' if count == 1 else 'requests'} of {new:,} new {'token' if new == 1 else 'tokens'} "
        f"after {computed:,}"
        for (computed, new), count in parts.items()
    )


def _systems(measured: Mapping[str, Any]) -> list[str]:
    rows = []
    fastest_first = sorted(measured["systems"].items(), key=lambda item: statistics.median(item[1]["seconds"]))
    for name, values in fastest_first:
        ratio = values.get("times_as_fast_as_vllm")
        rows.append(
            (
                name,
                spread([1e3 * each for each in values["seconds"]], "{:,.2f}"),
                spread([100 * each for each in values["share"]], "{:,.0f} %"),
                "" if ratio is None else spread(ratio, "{:.2f}"),
                f"{1e6 * statistics.median(values['metadata_seconds']):,.0f}",
                f"{values['error']:.1e}",
            )
        )
    heads = ("", "ms", "share of the ceiling", "times as fast as vLLM", "metadata, µs", "largest error")
    return table(heads, rows)
