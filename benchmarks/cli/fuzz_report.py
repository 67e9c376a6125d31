"""The page of the command line's fuzz: how many calls ended how, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.pages import heading, table

CODES = {"0": "served", "1": "some refused", "2": "refused", "130": "interrupted"}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    ended = record["ended"]
    codes = [*CODES, *sorted({code for counts in ended.values() for code in counts} - {*CODES})]
    rows = [
        (f"`kvframe {command}`", *(str(counts.get(code, 0)) for code in codes), str(sum(counts.values())))
        for command, counts in ended.items()
    ]
    what = (
        f": {record['count']} calls drawn from seed {record['seed']}, {record['processes']} of them in a Python of "
        "their own, the others forked."
    )
    lines = [
        *heading("The command line with hostile input", record["machine"], what, how="Run"),
        "",
        f"**{len(record['faults'])} faults**: tracebacks, crashes, hangs, other exit codes, more than one line for a "
        "mistake, files that changed or were left behind.",
        "",
        "How calls ended:",
        "",
        *table(("command", *(f"{code}: {CODES.get(code, 'fault')}" for code in codes), "calls"), rows),
        "",
        "What was hostile about them (a call may have several of these, or none):",
        "",
        *table(("kind", "calls"), [(name, str(count)) for name, count in record["hostile"].items()]),
        "",
        f"{len(record['sentences'])} different errors were said, by their first words.",
        "",
        *(f"- {each['number']}: {'; '.join(each['faults'])}: `{each['call']}`" for each in record["faults"]),
    ]
    return "\n".join(lines).rstrip() + "\n"
