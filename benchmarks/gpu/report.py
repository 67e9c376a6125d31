"""The page of what was measured on a GPU: each case beside the least time that it can take."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.cases import ISSUED, Case
from benchmarks.gpu.engine import GRAPHS, WORKLOAD
from benchmarks.harness.pages import table

NOT_YET = "not measured yet"

EXPLANATION = (
    "A cell is the time of one layer's attention in microseconds on the device and, in brackets, the share of it that "
    "the floor takes: bytes over the bandwidth of a copy, operations over the rate of a matrix product, whichever is "
    "more. Behind it, where there are others, is its rate over that of the fastest of them: x 0.75 is three quarters "
    "of the best other's. The fastest is bold. [gpu/notes.md](../gpu/notes.md) says what was expected of each change "
    "and what came of it."
)

STEPS = (
    "A step ends when the host has its tokens. The device works while kernels or copies run on it; the rest of the "
    "step is the host's time that nothing hides. The layers are a fourth of those of Llama 3 with 8 billion "
    "parameters, in bfloat16."
)


def write_report(record: Mapping[str, Any], wanted: Sequence[Case]) -> str:
    """Return the page as Markdown; cases that are not in the record are rows too.

    Args:
        record: What was measured; empty if nothing was.
        wanted: All cases, in the order of the page.
    """
    lines = ["# Attention on a GPU", "", *_machine(record), ""]
    lines += [EXPLANATION]
    measured = record.get("cases", {})
    for group in dict.fromkeys(case.group for case in wanted):
        members = [case for case in wanted if case.group == group]
        found = [measured.get(f"{group}: {case.name}") for case in members]
        names = [*dict.fromkeys(name for each in found if each for name in each["measured"])]
        rows = [_row(case, each, names) for case, each in zip(members, found, strict=True)]
        heads = (group, "floor, µs", *(names or ["any backend"]))
        lines += ["", f"## {group[0].upper()}{group[1:]}", "", table(heads, rows)]
    lines += ["", "## On the host", "", _host(record.get("host", {}))]
    lines += ["", "## A step of an engine", "", STEPS, "", _steps(record.get("engine", {}))]
    if missing := record.get("missing"):
        lines += ["", "## Not on this machine", ""]
        lines += [f"- `{name}`: {reason}" for name, reason in missing.items()]
    return "\n".join(lines) + "\n"


def _machine(record: Mapping[str, Any]) -> list[str]:
    if not record:
        return [
            "Nothing was measured yet: `benchmarks/gpu.sh`, on a machine with a GPU, measures every row in one call. "
            f"Floors are those of {ISSUED.bytes_per_second / 1e12:.1f} TB/s and "
            f"{ISSUED.flops_per_second / 1e12:.0f} TFLOP/s, an H200's."
        ]
    machine, ceilings = record["machine"], record["ceilings"]
    sizes = ""
    if machine["multiprocessors"]:
        l2 = "" if machine["l2_bytes"] is None else f", {machine['l2_bytes'] / 2**20:.0f} MB of L2"
        sizes = f", {machine['multiprocessors']} multiprocessors, {machine['memory_bytes'] / 2**30:.0f} GiB{l2}"
    return [
        f"Measured on {machine['date']} by `{machine['command']}`: {machine['device']}{sizes}; "
        f"torch {machine['torch']}, triton {machine['triton']}, Python {machine['python']}, "
        f"kvframe at {machine['commit']}.",
        "",
        f"A copy on the device moved {ceilings['bytes_per_second'] / 1e12:.2f} TB/s, read and written, and a product "
        f"of bfloat16 matrices ran at {ceilings['flops_per_second'] / 1e12:.0f} TFLOP/s.",
    ]


def _row(case: Case, found: Mapping[str, Any] | None, names: Sequence[str]) -> list[str]:
    if found is None:
        return [case.name, f"{case.floor(ISSUED) * 1e6:,.1f}", *[NOT_YET] * max(1, len(names))]
    floor, measured = found["floor_seconds"], found["measured"]
    times = {name: each["seconds"] for name, each in measured.items() if each["seconds"]}
    best = min(times.values(), default=None)
    cells = []
    for name in names:
        if name not in measured:
            cells.append("")
        elif name not in times:
            cells.append(measured[name]["reason"])
        else:
            others = min((time for other, time in times.items() if other != name), default=None)
            ratio = "" if others is None else f", x {others / times[name]:.2f}"
            text = f"{times[name] * 1e6:,.1f} ({100 * floor / times[name]:.0f} %{ratio})"
            cells.append(f"**{text}**" if times[name] == best else text)
    return [case.name, f"{floor * 1e6:,.1f}", *(cells or [NOT_YET])]


def _steps(engine: Mapping[str, Any]) -> str:
    rows = []
    for graphs in GRAPHS:
        found = engine.get("graphs", {}).get(graphs)
        row = [engine.get("name", WORKLOAD.name), graphs]
        if found is None or found["busy_seconds"] is None:
            text = NOT_YET if found is None else found["reason"]
            rows.append([*row, *[text] * 4, ""])
            continue
        step, busy = 1000 * found["seconds"], 1000 * found["busy_seconds"]
        idle = max(0.0, step - busy)
        backends = ", ".join(f"`{name}`" for name in found["backends"])
        rows.append([*row, f"{step:,.3f}", f"{busy:,.3f}", f"{idle:,.3f}", f"{100 * idle / step:.1f} %", backends])
    heads = ("requests", "graphs", "step, ms", "device works, ms", "host alone, ms", "share", "attention by")
    return table(heads, rows)


def _host(host: Mapping[str, Sequence[float]]) -> str:
    if not host:
        rows = [["any backend", NOT_YET]]
    else:
        rows = [[name, f"{statistics.median(times) * 1e6:,.1f}"] for name, times in host.items()]
    return table(("metadata of 256 decodes", "µs on the host"), rows)
