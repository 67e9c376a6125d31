"""Traffic with faults, also in the page store, ends without a wrong token and leaves nothing behind."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest

from tests.covering import few
from tests.engine.soak.scenarios import SCENARIOS_WITH_STORES, Scenario, Served
from tests.engine.soak.traffic import draw_arrivals
from tests.engine.soak.with_store import StoreSoak

NUM_PROMPTS, SECONDS, SEED = 6, 20, 1


@pytest.mark.parametrize("scenario", few(2, SCENARIOS_WITH_STORES), ids=lambda each: each.name)
def test_a_faulty_store_costs_hits_and_nothing_else(
    scenario: Scenario, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "kvframe")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        served = Served.of(scenario, tmp_path, NUM_PROMPTS)
        soak = StoreSoak(served, SEED)
        soak.run(draw_arrivals(scenario, served.prompts, SECONDS, SEED), lambda count: None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert {"differences": [], "mirror_differences": [], "leaks": []} == soak.wrong
    assert soak.shelf.struck.total() >= 5
    assert soak.counts["compared_tokens"] > 50
