"""Every committed page is what its record says, written by the present code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest

from benchmarks.attention import chosen, cpu, formats, fuzz, metadata
from benchmarks.cache import core, definition, eviction, growth
from benchmarks.engine import beside_vllm, drafts, generate, kept_tokens, profile_step, server, skipping, soak
from benchmarks.harness import pages, record
from benchmarks.memory import plans, traffic
from benchmarks.serving import evaluation, hostile
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
    "hostile": hostile.write_report,
    "kernels_fuzz": fuzz.write_report,
    "eviction": eviction.write_report,
    "formats": formats.write_report,
    "generate": generate.write_report,
    "kept_tokens": kept_tokens.write_report,
    "memory": plans.write_report,
    "memory_traffic": traffic.write_report,
    "metadata": metadata.write_report,
    "server": server.write_report,
    "skipping": skipping.write_report,
    "soak": soak.write_report,
    "step_profile": profile_step.write_report,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_committed_page_is_that_of_its_record(name: str) -> None:
    assert page_of(name) == PAGES[name](record_of(name))


def test_every_committed_page_is_checked() -> None:
    assert {path.stem for path in RESULTS.glob("*.md")} == {*PAGES, "compare_hits", "gpu"}


# --- what benchmarks share --------------------------------------------------------------------------------------------


def test_sides_take_turns_and_each_round_says_what_each_did() -> None:
    done: list[tuple[str, int]] = []
    found = [*record.by_turns("ab", 2, lambda side, number: done.append((side, number)) or number, warm_up=True)]
    assert [("b", -1), ("a", -1), ("a", 0), ("b", 0), ("b", 1), ("a", 1)] == done
    assert [(-1, ["a", "b"]), (0, ["a", "b"]), (1, ["a", "b"])] == [(number, [*sides]) for number, sides in found]
    assert {"a": [0, 1], "b": [0, 1]} == record.counted(found)
    assert [(0, {})] == [*record.by_turns([], 1, lambda side, number: None)]


def test_ratios_are_of_the_same_round() -> None:
    assert [3.0, 0.5] == record.ratios([6.0, 2.0], [2.0, 4.0])


def test_a_median_is_shown_with_its_range() -> None:
    assert "2.0 (1.0 to 6.0)" == pages.spread([0.001, 0.006, 0.002], "{:.1f}", scale=1000)


def test_a_table_of_figures_shows_medians_numbers_and_text_and_says_what_is_missing() -> None:
    rows = {"one": {"time": [0.001, 0.003, 0.002], "count": 2000, "how": "itself"}, "two": {"count": 1}}
    columns = {"time": ("ms", "{:.0f}", 1000), "count": ("number", "{:,}"), "how": ("reads", "{}")}
    assert pages.figures(rows, columns, "name", "none").splitlines() == [
        "| name | ms | number | reads |",
        "|---|---|---|---|",
        "| one | 2 (1 to 3) | 2,000 | itself |",
        "| two | none | 1 | none |",
    ]


def test_progress_adds_up_what_was_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    monkeypatch.setattr(record.render, "progress", lambda description, total: nullcontext(shown.append))
    with record.progress("measuring", 5) as advance:
        advance(1)
        advance(3)
    assert [1, 4] == shown
