"""Count what happens in a soak, and write its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.pages import heading, page, table
from tests.engine.injected_faults import KINDS

WRONG = ("differences", "mirror_differences", "leaks")
"""The mistakes that must not happen; the record describes each one in words."""

COUNTS = {
    "requests": "requests, each sample counted",
    "most_at_once": "most of them at once",
    "prompt_tokens": "prompt tokens",
    "generated_tokens": "generated tokens",
    "compared_tokens": "tokens compared with `transformers.generate()`",
    "steps": "steps",
    "preemptions": "preemptions",
    "swaps": "of these, to host memory",
    "failed_swaps": "copies that failed",
    "retries": "requests computed again without a prefix that gave NaN",
    "hit_tokens": "prompt tokens found in the cache",
    "evictions": "cached pages evicted",
    "resets": "resets of the prefix cache",
    "resizes": "caches made larger, or small again",
    "resizes_refused": "sizes refused, because of pins or too little memory",
    "pins_asked": "prefixes to pin",
    "pins": "of these, prefixes that fitted",
    "audits": "audits",
    "mirrors": "mirrors of cache events compared with the cache",
}
"""The counts, in words."""

ENDS = {"length": "served", "aborted": "aborted by their owners", "error": "failed"}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    scenarios = record["scenarios"]
    what = f": {record['minutes']:g} minutes of simulated traffic for each scenario, seed {record['seed']}."
    found = list(scenarios.values())
    rows = [(text, [each[key] for each in found]) for key, text in COUNTS.items()]
    rows += [(f"requests {text}", [each["ends"].get(key, 0) for each in found]) for key, text in ENDS.items()]
    rows += [(f"fault: {text}", [each["faults"].get(kind, 0) for each in found]) for kind, text in KINDS.items()]
    wrong = ("tokens that differ, failures without a reason", "mirrors that differ", "leaks")
    for key, text in zip(WRONG, wrong, strict=True):
        rows.append((f"**{text}**", [len(each[key]) for each in found]))
    return page(
        heading("Soak: traffic while things break", record, what, "float32, greedy.", how="Run"),
        "\n".join(
            f"- **{name}**: tiny `{each['family']}`; {each['what']}; {each['slabs']} slabs."
            for name, each in scenarios.items()
        ),
        table(
            ("", *scenarios, "all"),
            [(text, *(f"{value:,}" for value in values), f"{sum(values):,}") for text, values in rows],
        ),
    )
