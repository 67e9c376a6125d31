"""The comparison of two versions of the cache: what a run measures, and the page that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_a_run_says_what_was_found_and_the_page_shows_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import compare_hits
    from memory_traffic import Job

    row = compare_hits.measure(Job("whisper_large_v3.toml", "constant", 1))
    assert {"title", "trace", "size", "hit_rate", "preemptions", "steps", "seconds"} == set(row)
    before, after = {**row, "hit_rate": 0.25, "seconds": 8.0}, {**row, "hit_rate": 0.5, "seconds": 2.0}
    record = {
        "machine": {"processor": "a processor", "date": "a day"},
        "command": "a command",
        "before": "1111111",
        "after": "2222222",
        "sizes": [1],
        "rows": [{"title": row["title"], "trace": row["trace"], "size": 1, "before": before, "after": after}],
    }
    page = compare_hits.write_report(record)
    assert "| 25.0% | 50.0% |" in page
    assert page.rstrip().endswith("| 8.0 | 2.0 | 4.00 |")
