"""The comparison of two versions of the cache: what a run measures, and the page that it writes."""

from __future__ import annotations

from typing import Any

from benchmarks.cache import compare_hits
from benchmarks.memory import traffic


def test_a_record_is_made_in_parts_of_the_same_two_commits() -> None:
    def record(after: str, *rows: tuple[str, int, str]) -> dict[str, Any]:
        made = [{"title": title, "trace": "constant", "size": size, "found": found} for title, size, found in rows]
        return {"before": "1111111", "after": after, "sizes": [size for _, size, _ in rows], "rows": made}

    older = record("2222222", ("Gemma 3 27B", 8, "old"), ("Llama 3.1 8B", 32, "old"))
    newer = record("2222222", ("Gemma 3 27B", 8, "new"))
    compare_hits.add_other_rows(newer, older)
    found = [(row["title"], row["size"], row["found"]) for row in newer["rows"]]
    assert [("Llama 3.1 8B", 32, "old"), ("Gemma 3 27B", 8, "new")] == found
    assert [32, 8] == newer["sizes"]

    of_another_commit = record("3333333", ("Gemma 3 27B", 8, "new"))
    compare_hits.add_other_rows(of_another_commit, older)
    assert 1 == len(of_another_commit["rows"])


def test_a_run_says_what_was_found_and_the_page_shows_both() -> None:
    row = compare_hits.measure(traffic.Job("whisper_large_v3.toml", "constant", 1))
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
