"""Run the soak with a page store that is faulty too, and write its page. See benchmarks/README.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from benchmarks.engine import soak
from benchmarks.harness import options
from benchmarks.harness.record import benchmark, progress
from tests.engine.injected_faults import KINDS
from tests.engine.soak.faulty_store import STORE_FAULTS
from tests.engine.soak.scenarios import SCENARIOS_WITH_STORES, Scenario
from tests.engine.soak.with_store import StoreSoak

COUNTS = {
    **soak.COUNTS,
    "restored_tokens": "of these, brought back to the device from host memory and the store",
    "restored_from_host": "pages brought back from host memory",
    "restored_from_store": "pages brought back from the store",
    "host_stored": "pages copied to host memory",
    "store_stored": "pages that the store kept",
    "store_refused": "records with a wrong seal that were read, and refused",
    "store_dropped": "pages that were not given to the store, because it failed",
    "store_failures": "calls of the store that raised",
    "waits_in_vain": "requests that waited for the store in vain",
}
"""The counts, in words."""


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    title = "Soak: traffic while a page store is faulty and things break"
    return soak.write_page(
        record, title, COUNTS, {**KINDS, **{kind: f"the page store: {text}" for kind, text in STORE_FAULTS.items()}}
    )


def soak_with_store(
    scenario: Scenario, minutes: float, seed: int, num_prompts: int, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Run a scenario; return its record."""
    row, running, stats = soak.soak(scenario, minutes, seed, num_prompts, advance, make=StoreSoak)
    assert isinstance(running, StoreSoak)
    (store,) = stats.stores.values()
    return {
        **row,
        "faults": {**row["faults"], **{kind: running.shelf.struck[kind] for kind in STORE_FAULTS}},
        "restored_tokens": stats.restored_tokens,
        "restored_from_host": stats.restored_blocks.get("host_memory", 0),
        "restored_from_store": stats.restored_blocks.get("faulty", 0),
        "host_stored": stats.host_blocks_stored,
        "store_stored": store.pages_stored,
        "store_refused": store.pages_refused,
        "store_dropped": store.pages_dropped,
        "store_failures": store.failures,
        "waits_in_vain": stats.waits_in_vain,
    }


@benchmark("soak_stores", write_report, cases="scenarios", fails=soak.has_failed)
@click.option(
    "--minutes", type=click.FloatRange(min=0.1), default=60, show_default=True, help="Minutes of simulated traffic."
)
@click.option("--seed", type=int, default=0, show_default=True)
@options.choose("--scenario", "scenarios", SCENARIOS_WITH_STORES)
def main(minutes: float, seed: int, scenarios: Sequence[Scenario]) -> dict[str, Any]:
    """Serve every scenario's traffic; write one JSON file and one page; fail if anything differs or leaks."""
    soak.prepare()
    results: dict[str, Any] = {}
    for scenario in scenarios:
        with progress(scenario.name, int(60 * minutes * scenario.per_second)) as advance:
            results[scenario.name] = soak_with_store(scenario, minutes, seed, soak.prompts_for(minutes), advance)
    return {"minutes": minutes, "seed": seed, "scenarios": results}


if __name__ == "__main__":
    main()
