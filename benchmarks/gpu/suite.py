"""Measure attention on a GPU: every backend that runs there, beside the limits of the device.

``benchmarks/gpu.sh`` calls it after the tests; see benchmarks/README.md. Without a GPU it only writes the page of the
record, with rows for what was not measured yet.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import torch

from benchmarks.engine.workloads import Workload
from benchmarks.gpu.cases import TINY, Case, cases
from benchmarks.gpu.engine import TINY_WORKLOAD, WORKLOAD, measure_steps
from benchmarks.gpu.measure import measure_case, measure_host
from benchmarks.gpu.report import write_report
from benchmarks.gpu.timing import measure_ceilings
from benchmarks.harness.layers import usable_backends
from benchmarks.harness.machine import RESULTS, describe_machine
from benchmarks.harness.record import can_join, write
from kvframe.loading.plugins import load_plugins


def describe(device: torch.device) -> dict[str, Any]:
    """Return the machine, its versions and its GPU."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        **describe_machine(torch.get_num_threads(), "triton"),
        "device": getattr(properties, "name", device.type),
        "multiprocessors": getattr(properties, "multi_processor_count", None),
        "memory_bytes": getattr(properties, "total_memory", None),
        "l2_bytes": getattr(properties, "L2_cache_size", None),
    }


@click.command(help=__doc__)
@click.option("--budget", type=float, default=270.0, show_default=True, help="Seconds after which no case is started.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "none", help="Where to measure.")
@click.option("--tiny", is_flag=True, help="Small cases, to try the script.")
@click.option("--backend", "names", multiple=True, help="Measure this backend alone; may be given several times.")
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(budget: float, device: str, tiny: bool, names: tuple[str, ...], results: Path) -> None:
    """Measure, and write the record and its page."""
    results.mkdir(parents=True, exist_ok=True)
    path, page = results / "gpu.json", results / "gpu.md"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    wanted = TINY if tiny else tuple(cases())
    if device != "none":
        workload, before = TINY_WORKLOAD if tiny else WORKLOAD, record
        for found in run(torch.device(device), wanted, names, time.monotonic() + budget, workload):
            record = merged(before, found)
            write(results, "gpu", record, write_report(record, wanted))
    page.write_text(write_report(record, wanted), encoding="utf-8")
    print(page.read_text(encoding="utf-8"))


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
    device: torch.device, wanted: Sequence[Case], names: Sequence[str], end: float, workload: Workload
) -> Iterator[dict[str, Any]]:
    """Yield the record after each case, so that an interrupted run keeps its figures.

    If backends are named, the steps of an engine are left out.
    """
    torch.set_grad_enabled(False)
    registry = load_plugins().registry
    backends, missing = usable_backends(registry, device.type)
    backends = {name: each for name, each in backends.items() if not names or name in names}
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
    if not names:
        print("a step of an engine", file=sys.stderr, flush=True)
        record["engine"] = {"name": workload.name, "graphs": measure_steps(workload, device)}
        torch.cuda.empty_cache()
        yield record
    spent = dict.fromkeys(backends, 0.0)
    for case in wanted:
        if time.monotonic() > end:
            break
        print(case.key, file=sys.stderr, flush=True)
        found = measure_case(case, backends, registry, device, spent)
        record["cases"][case.key] = {
            "floor_seconds": case.floor(ceilings),
            "bytes": case.num_bytes(),
            "flops": case.num_flops,
            "measured": {name: attrs.asdict(each) for name, each in found.items()},
        }
        torch.cuda.empty_cache()
        yield record


if __name__ == "__main__":
    main()
