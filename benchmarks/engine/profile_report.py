"""The page of where an engine's steps spend their time: the record as tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.pages import spread, table

COLUMNS = ("tokens", "host_share")


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    machine = record["machine"]
    lines = [
        "# Where the time of an engine's step goes",
        "",
        f"Measured on {machine['date']} by `{machine['command']}`: medians over {record['repeats']} decodes of all "
        "requests, and over the steps that compute prompts (lowest to highest in brackets).",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} torch thread(s), {machine['system']}; "
        f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"kvframe {machine['kvframe']} at {machine['commit']}. float32.",
    ]
    for name, measured in record["workloads"].items():
        backends = ", ".join(f"`{backend}`" for backend in measured["backends"])
        compiled = ", compiled around the attention" if measured["is_compiled"] else ""
        lines += [
            "",
            f"## {name}",
            "",
            f"Model `{measured['model']}`{compiled}; {measured['num_requests']} requests with prompts of "
            f"{measured['prompt_len']} tokens; attention by {backends}.",
            "",
            *_steps(measured["steps"]),
        ]
    return "\n".join(lines) + "\n"


def _steps(steps: Mapping[str, Any]) -> list[str]:
    rows = []
    parts = [part for part in steps["decode"] if part not in COLUMNS]
    totals = {
        kind: [sum(each) for each in zip(*(found[part] for part in parts), strict=True)]
        for kind, found in steps.items()
    }
    for part in parts:
        row = [part]
        for kind in ("decode", "prefill"):
            seconds = steps[kind][part]
            share = statistics.median(one / whole for one, whole in zip(seconds, totals[kind], strict=True))
            row += [spread([1000 * each for each in seconds], "{:,.3f}"), f"{100 * share:.1f} %"]
        rows.append(row)
    whole, host = ["the step"], ["all but attention and the model"]
    for kind in ("decode", "prefill"):
        whole += [spread([1000 * each for each in totals[kind]], "{:,.3f}"), "100 %"]
        host += ["", f"{100 * steps[kind]['host_share']:.1f} %"]
    heads = ("", "decode, ms", "share", "prompts, ms", "share")
    return table(heads, [*rows, whole, host])
