"""Every committed page is what its record says, written by the present code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from benchmarks.attention import chosen, cpu, formats, fuzz, metadata
from benchmarks.cache import core, definition, event_costs, eviction, growth, hints
from benchmarks.engine import (
    beside_vllm,
    drafts,
    generate,
    kept_tokens,
    profile_step,
    server,
    skipping,
    soak,
    soak_stores,
    tier_steps,
    tiers,
)
from benchmarks.memory import plans, tier_hits, traffic
from benchmarks.serving import evaluation, hostile, ray_page, routing
from tests.benchmarks.calling import RESULTS, page_of, record_of

PAGES: Mapping[str, Callable[[Any], str]] = {
    "beside_vllm": beside_vllm.write_report,
    "cache": core.write_report,
    "cache_growth": growth.write_report,
    "cache_model": definition.write_report,
    "cache_on_intel": core.write_report,
    "chosen_tokens": chosen.write_report,
    "cpu_attention": cpu.write_report,
    "drafts": drafts.write_report,
    "evaluation": evaluation.write_report,
    "event_costs": event_costs.write_report,
    "hostile": hostile.write_report,
    "kernels_fuzz": fuzz.write_report,
    "eviction": eviction.write_report,
    "formats": formats.write_report,
    "generate": generate.write_report,
    "hints": hints.write_report,
    "kept_tokens": kept_tokens.write_report,
    "memory": plans.write_report,
    "memory_traffic": traffic.write_report,
    "metadata": metadata.write_report,
    "ray_serve": ray_page.write_report,
    "routing": routing.write_report,
    "server": server.write_report,
    "skipping": skipping.write_report,
    "soak": soak.write_report,
    "soak_stores": soak_stores.write_report,
    "step_profile": profile_step.write_report,
    "tier_hits": tier_hits.write_report,
    "tier_steps": tier_steps.write_report,
    "tiers": tiers.write_report,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_committed_page_is_that_of_its_record(name: str) -> None:
    assert page_of(name) == PAGES[name](record_of(name))


def test_every_committed_page_is_checked() -> None:
    assert {path.stem for path in RESULTS.glob("*.md")} == {*PAGES, "compare_hits", "gpu"}
