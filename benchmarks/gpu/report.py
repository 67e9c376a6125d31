"""Write the page of figures on a GPU: each case beside the least time that it can take."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.cases import ISSUED, Case
from benchmarks.gpu.engine import GRAPHS, WORKLOAD
from benchmarks.harness.pages import heading, page, table

TITLE, NOT_YET = "Attention on a GPU", "not measured yet"

EXPLANATION = (
    "A cell is the time of one layer's attention in microseconds on the device and, in brackets, the share of it that "
    "the floor takes: bytes over the bandwidth of a copy, operations over the rate of a matrix product, whichever is "
    "more. If there are other systems, its rate over that of the fastest other one follows: x 0.75 is three quarters "
    "of that rate. The fastest is bold. [gpu/notes.md](../gpu/notes.md) says what was expected of each change and what "
    "it achieved."
)

STEPS = (
    "A step ends when the host has its tokens. The device works while kernels or copies run on it; in the rest of the "
    "step, it waits for the host. The layers are a fourth of those of Llama 3 with 8 billion "
    "parameters, in bfloat16."
)


def write_report(record: Mapping[str, Any], wanted: Sequence[Case]) -> str:
    """Return the page as Markdown. Cases that are not in the record have rows too.

    Args:
        record: The record; empty if nothing was measured.
        wanted: All cases, in the order of the page.
    """
    parts = [_heading(record), EXPLANATION]
    for kind in dict.fromkeys(case.kind for case in wanted):
        members = [case for case in wanted if case.kind == kind]
        found = [record.get("cases", {}).get(case.key) for case in members]
        names = [*dict.fromkeys(name for each in found if each for name in each["measured"])]
        rows = [_row(case, each, names) for case, each in zip(members, found, strict=True)]
        heads = (kind, "floor, µs", *(names or ["any backend"]))
        parts += [f"## {kind[0].upper()}{kind[1:]}", table(heads, rows)]
    hosts = [(name, _micro(statistics.median(times))) for name, times in record.get("host", {}).items()]
    parts += [
        "## On the host",
        table(("metadata of 256 decodes", "µs on the host"), hosts or [("any backend", NOT_YET)]),
    ]
    parts += ["## A step of an engine", STEPS, _steps(record.get("engine", {}))]
    if missing := record.get("missing"):
        parts += ["## Not on this machine", "\n".join(f"- `{name}`: {reason}" for name, reason in missing.items())]
    return page(*parts)


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _heading(record: Mapping[str, Any]) -> str:
    if not record:
        return (
            f"# {TITLE}\n\n"
            "Nothing was measured yet: `benchmarks/gpu.sh`, on a machine with a GPU, measures every row in one call. "
            f"Floors are those of {ISSUED.bytes_per_second / 1e12:.1f} TB/s and "
            f"{ISSUED.flops_per_second / 1e12:.0f} TFLOP/s, an H200's."
        )
    machine, ceilings = record["machine"], record["ceilings"]
    sizes = ""
    if machine["multiprocessors"]:
        l2 = "" if machine["l2_bytes"] is None else f", {machine['l2_bytes'] / 2**20:.0f} MB of L2"
        sizes = f", {machine['multiprocessors']} multiprocessors, {machine['memory_bytes'] / 2**30:.0f} GiB{l2}"
    note = (
        f"A copy on the device moved {ceilings['bytes_per_second'] / 1e12:.2f} TB/s, read and written, and a product "
        f"of bfloat16 matrices ran at {ceilings['flops_per_second'] / 1e12:.0f} TFLOP/s."
    )
    return heading(TITLE, record, f": {machine['device']}{sizes}, triton {machine['triton']}.", note)


def _row(case: Case, found: Mapping[str, Any] | None, names: Sequence[str]) -> list[str]:
    if found is None:
        return [case.name, _micro(case.floor(ISSUED)), *[NOT_YET] * max(1, len(names))]
    floor, measured = found["floor_seconds"], found["measured"]
    times = {name: each["seconds"] for name, each in measured.items() if each["seconds"]}

    def cell(name: str) -> str:
        if name not in times:
            return str(measured[name]["reason"]) if name in measured else ""
        others = min((time for other, time in times.items() if other != name), default=None)
        ratio = "" if others is None else f", x {others / times[name]:.2f}"
        text = f"{_micro(times[name])} ({100 * floor / times[name]:.0f} %{ratio})"
        return f"**{text}**" if times[name] == min(times.values()) else text

    return [case.name, _micro(floor), *(map(cell, names) if names else [NOT_YET])]


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
