"""The benchmark of draft tokens runs at a tiny size, and the recorded run reached its aims."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks.engine import drafts
from tests.benchmarks.calling import measured, record_of


def test_every_system_serves_every_number_of_requests(tmp_path: Path) -> None:
    record = record_of("drafts", measured(tmp_path, "engine.drafts", "--text", "tiny", "--repeats", "1"))
    assert ["1", "8", "32"] == list(record["texts"]["tiny"])
    for batch in record["texts"]["tiny"].values():
        assert [drafts.PLAIN, drafts.NGRAM, drafts.GENERATE, drafts.LOOKUP] == list(batch["tokens_per_second"])
        assert {1} == {len(times) for times in batch["tokens_per_second"].values()}


@pytest.mark.parametrize("text", [each for each in drafts.TEXTS if each.aim], ids=lambda text: text.name)
@pytest.mark.parametrize("batch", drafts.BATCHES)
def test_the_recorded_run_reached_its_aims(text: drafts.Text, batch: int) -> None:
    measured_then = record_of("drafts")["texts"][text.name][str(batch)]
    times = {peer: statistics.median(each) for peer, each in measured_then["times_as_fast"].items()}
    assert text.aim <= times[drafts.PLAIN]
    if text.name == "copy":
        assert 1.0 < times[drafts.LOOKUP]
