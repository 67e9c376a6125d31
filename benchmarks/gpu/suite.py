"""Measure attention on a GPU: every backend that runs there, beside the limits of the device.

``benchmarks/gpu.sh`` calls it after the tests; see benchmarks/README.md. Without a GPU it only writes the page of the
record, with rows for what was not measured yet.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import torch

from benchmarks.engine.workloads import Workload
from benchmarks.gpu.cases import ISSUED, TINY, Case, cases
from benchmarks.gpu.engine import GRAPHS, TINY_WORKLOAD, WORKLOAD, measure_steps
from benchmarks.gpu.measure import measure_case, measure_ceilings, measure_host
from benchmarks.harness.layers import usable_backends
from benchmarks.harness.machine import RESULTS, describe_machine
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.record import can_join, write
from kvframe.loading.plugins import load_plugins


def describe(device: torch.device) -> dict[str, Any]:
    """Return the machine, its versions and its GPU."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    names = {"multiprocessors": "multi_processor_count", "memory_bytes": "total_memory", "l2_bytes": "L2_cache_size"}
    described = {"device": getattr(properties, "name", device.type)}
    described |= {key: getattr(properties, name, None) for key, name in names.items()}
    return {**describe_machine(torch.get_num_threads(), "triton"), **described}


# --- the page ---------------------------------------------------------------------------------------------------------

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


def write_report(record: Mapping[str, Any], wanted_cases: Sequence[Case]) -> str:
    """Return the page as Markdown. Wanted cases that are not in the record, which may be empty, have rows too."""
    parts = [_heading(record), EXPLANATION]
    for kind in dict.fromkeys(case.kind for case in wanted_cases):
        members = [case for case in wanted_cases if case.kind == kind]
        results = [record.get("cases", {}).get(case.key) for case in members]
        names = [*dict.fromkeys(name for result in results if result for name in result["measured"])]
        rows = [_row(case, result, names) for case, result in zip(members, results, strict=True)]
        heads = (kind, "floor, µs", *(names or ["any backend"]))
        parts += [f"## {kind[0].upper()}{kind[1:]}", table(heads, rows)]
    hosts = [(name, _micro(statistics.median(times))) for name, times in record.get("host", {}).items()]
    parts += [
        "## On the host",
        table(("metadata of 256 decodes", "µs on the host"), hosts or [("any backend", NOT_YET)]),
    ]
    parts += ["## A step of an engine", STEPS, _steps(record.get("engine", {})), *_kernels(record.get("engine", {}))]
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


def _row(case: Case, result: Mapping[str, Any] | None, names: Sequence[str]) -> list[str]:
    if result is None:
        return [case.name, _micro(case.floor(ISSUED)), *[NOT_YET] * max(1, len(names))]
    floor, measured = result["floor_seconds"], result["measured"]
    times = {name: figures["seconds"] for name, figures in measured.items() if figures["seconds"]}

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
        result = engine.get("graphs", {}).get(graphs)
        row = [engine.get("name", WORKLOAD.name), graphs]
        if result is None or result["busy_seconds"] is None:
            text = NOT_YET if result is None else result["reason"]
            rows.append([*row, *[text] * 4, ""])
            continue
        step, busy = 1000 * result["seconds"], 1000 * result["busy_seconds"]
        idle = max(0.0, step - busy)
        backends = ", ".join(f"`{name}`" for name in result["backends"])
        rows.append([*row, f"{step:,.3f}", f"{busy:,.3f}", f"{idle:,.3f}", f"{100 * idle / step:.1f} %", backends])
    heads = ("requests", "graphs", "step, ms", "device works, ms", "host alone, ms", "share", "attention by")
    return table(heads, rows)


def _kernels(engine: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of the longest kernels of the fastest step that was measured, if a record names them."""
    steps = [result for result in engine.get("graphs", {}).values() if result.get("kernels")]
    if steps:
        fastest_step = min(steps, key=lambda step: step["seconds"])
        rows = [
            (f"`{name}`", _micro(seconds), f"{100 * seconds / fastest_step['busy_seconds']:.1f} %")
            for name, seconds in fastest_step["kernels"].items()
        ]
        yield "The kernels that take the most time in the fastest of these steps:"
        yield table(("kernel", "µs in a step", "of the device's time"), rows)


@click.command(help=__doc__)
@click.option("--budget", type=float, default=270.0, show_default=True, help="Seconds after which no case is started.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "none", help="Where to measure.")
@click.option("--tiny", is_flag=True, help="Small cases, to try the script.")
@click.option("--backend", "names", multiple=True, help="Measure this backend alone; may be given several times.")
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(budget: float, device: str, tiny: bool, names: tuple[str, ...], results: Path) -> None:
    """Measure, and write the record and its page."""
    results.mkdir(parents=True, exist_ok=True)
    path, page_path = results / "gpu.json", results / "gpu.md"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    wanted_cases = TINY if tiny else tuple(cases())
    if device != "none":
        workload, before = TINY_WORKLOAD if tiny else WORKLOAD, record
        for new_record in run(torch.device(device), wanted_cases, names, time.monotonic() + budget, workload):
            record = merged(before, new_record)
            write(results, "gpu", record, write_report(record, wanted_cases))
    page_path.write_text(write_report(record, wanted_cases), encoding="utf-8")
    print(page_path.read_text(encoding="utf-8"))


def merged(before: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Add the cases and backends of an earlier record to a record, if both can be joined."""
    if not before or not can_join(before, record):
        return record
    cases = dict(before["cases"])
    for name, case in record["cases"].items():
        others = cases[name]["measured"] if name in cases else {}
        cases[name] = {**case, "measured": {**others, **case["measured"]}}
    host = {**before["host"], **record["host"]}
    return {**record, "cases": cases, "host": host, "engine": record["engine"] or before["engine"]}


def run(
    device: torch.device, wanted_cases: Sequence[Case], names: Sequence[str], end: float, workload: Workload
) -> Iterator[dict[str, Any]]:
    """Yield the record after each case, so that an interrupted run keeps its figures."""
    torch.set_grad_enabled(False)
    registry = load_plugins().registry
    backends, missing = usable_backends(registry, device.type)
    backends = {name: backend_class for name, backend_class in backends.items() if not names or name in names}
    ceilings = measure_ceilings(device)
    record: dict[str, Any] = {
        "machine": describe(device),
        "ceilings": attrs.asdict(ceilings),
        "missing": missing,
        "cases": {},
        "host": measure_host(backends, registry, device),
        "engine": {},
    }
    yield record
    print("a step of an engine", file=sys.stderr, flush=True)
    modes = GRAPHS[:1] if workload is TINY_WORKLOAD else GRAPHS  # A compiler takes long to try a script.
    record["engine"] = {"name": workload.name, "graphs": measure_steps(workload, device, modes=modes)}
    torch.cuda.empty_cache()
    yield record
    spent = dict.fromkeys(backends, 0.0)
    for case in wanted_cases:
        if time.monotonic() > end:
            break
        print(case.key, file=sys.stderr, flush=True)
        measured = measure_case(case, backends, registry, device, spent)
        record["cases"][case.key] = {
            "floor_seconds": case.floor(ceilings),
            "bytes": case.num_bytes(),
            "flops": case.num_flops,
            "measured": {name: attrs.asdict(figures) for name, figures in measured.items()},
        }
        torch.cuda.empty_cache()
        yield record


if __name__ == "__main__":
    main()
