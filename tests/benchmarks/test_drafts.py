"""The benchmark of draft tokens runs at a tiny size, and the recorded run reached its aims."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from benchmarks.engine import drafts, own_engines
from benchmarks.engine.serving import load, serve, setting_of, start_servers
from benchmarks.harness import edit_model
from tests.benchmarks.calling import measured, record_of

TINY = next(each for each in drafts.TEXTS if each.name == "tiny")


@pytest.mark.whole  # five systems, each in a process that loads the model for each number of requests
def test_every_system_serves_every_number_of_requests(tmp_path: Path) -> None:
    record = record_of("drafts", measured(tmp_path, "model.drafts", "--text", "tiny", "--repeats", "1"))
    assert ["1", "8", "32"] == list(record["texts"]["tiny"])
    for batch in record["texts"]["tiny"].values():
        assert {*drafts.BY_LOOKUP, *drafts.BY_DRAFT_MODEL} == {*batch["tokens_per_second"]}
        assert {1} == {len(times) for times in batch["tokens_per_second"].values()}
        # The draft model is the served one, so it is always right.
        assert batch["draft_tokens"] == batch["accepted_draft_tokens"] > 0


def test_systems_load_the_model_again_after_a_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    text = attrs.evolve(TINY, systems=drafts.BY_LOOKUP)
    loads: list[int] = []
    served: list[list[list[int]]] = []

    def serve(what: str, engines: Any, repeats: int, batch: Any, *_: Any, **__: Any) -> Any:
        served.extend(batch(number)[0] for number in range(repeats))
        return {name: repeats * [{"seconds": 1, "draft_tokens": 3, "accepted_draft_tokens": 2}] for name in engines}

    monkeypatch.setattr(drafts, "setting_of", lambda *_, **__: (None, {}))
    monkeypatch.setattr("benchmarks.harness.models.path_of", str)
    monkeypatch.setattr(drafts, "load", lambda *_, **__: loads.append(len(served)))
    monkeypatch.setattr(drafts, "serve_by_turns", serve)
    found = drafts._measure(attrs.evolve(text, num_prompts=1), dict.fromkeys(text.systems), 7, lambda _: None)  # type: ignore[arg-type]
    assert [0, 5] == loads
    assert [text.prompts(number, 0)[:1] for number in range(7)] == served
    assert (7, 6, 4) == (
        len(found["tokens_per_second"][drafts.WITH_NGRAM]),
        found["draft_tokens"],
        found["accepted_draft_tokens"],
    )


def test_engines_with_and_without_drafts_compute_with_the_same_weights() -> None:
    setting, _ = setting_of(attrs.evolve(TINY, num_prompts=2))
    engines = own_engines.make_sharing([replace(setting, max_drafts=most) for most in (0, 2)])
    first, second = ([each.data_ptr() for each in engine._engine.model.model.parameters()] for engine in engines)  # type: ignore[attr-defined]
    assert first == second
    for engine in engines:
        engine.close()


def test_systems_that_differ_in_drafts_are_told_apart_in_one_process() -> None:
    with start_servers([drafts.PLAIN, drafts.WITH_NGRAM], 1) as engines:
        assert engines[drafts.PLAIN] is engines[drafts.WITH_NGRAM]
        setting, _ = setting_of(attrs.evolve(TINY, num_prompts=1))
        load(engines, setting, max_drafts=4)
        served = {name: serve(engines, name, [[7, 8, 9] * 8], 8) for name in engines}
    assert served[drafts.PLAIN]["tokens"] == served[drafts.WITH_NGRAM]["tokens"]
    assert 0 == served[drafts.PLAIN]["draft_tokens"] < served[drafts.WITH_NGRAM]["draft_tokens"]


def test_an_edit_replaces_some_names_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_model, "edits", lambda: ((10, 20), (11, 21)))
    code = torch.tensor([5, 10, 6, 11, 20, 10])
    assert [5, 20, 6, 21, 20, 20] == edit_model.edited(code).tolist()
    assert [5, 10, 6, 11, 20, 10] == code.tolist()
    task = edit_model.edit_task(torch.cat([code, code[:1]]), torch.Generator().manual_seed(0), 6).tolist()
    assert [1, 5, 10, 6, 11, 20, 10, 2, 5, 20, 6, 21, 20, 20, 0] == task


def times_as_fast(text: str, batch: int) -> dict[str, float]:
    measured_then = record_of("drafts")["texts"][text][str(batch)]
    return {peer: statistics.median(each) for peer, each in measured_then["times_as_fast"].items()}


@pytest.mark.parametrize("batch", drafts.BATCHES)
def test_copies_are_generated_as_fast_as_the_aim_says(batch: int) -> None:
    assert times_as_fast("copy", batch)[drafts.PLAIN] >= 1.5


@pytest.mark.parametrize("batch", drafts.BATCHES)
def test_copies_are_generated_faster_than_by_prompt_lookup(batch: int) -> None:
    assert times_as_fast("copy", batch)[drafts.WITH_LOOKUP] > 1.0


@pytest.mark.parametrize("batch", drafts.BATCHES)
def test_edits_are_not_generated_slower_and_some_of_their_drafts_are_wrong(batch: int) -> None:
    assert times_as_fast("edit", batch)[drafts.PLAIN] >= 1.0
    measured_then = record_of("drafts")["texts"]["edit"][str(batch)]
    assert 0.5 < measured_then["accepted_draft_tokens"] / measured_then["draft_tokens"] < 0.99


@pytest.mark.parametrize("batch", drafts.BATCHES)
def test_a_draft_model_costs_no_time_and_several_requests_are_faster_than_assisted_generation(batch: int) -> None:
    times = times_as_fast("draft-model", batch)
    assert times[drafts.PLAIN] >= 1.0
    # With one request, both do the same: the medians of four recorded runs were 0.83 to 1.07.
    assert times[drafts.WITH_ASSISTANT] >= (0.8 if batch == 1 else 1.0)


@pytest.mark.parametrize("batch", drafts.BATCHES)
def test_text_that_does_not_repeat_itself_is_hardly_slower(batch: int) -> None:
    assert times_as_fast("sampled", batch)[drafts.PLAIN] >= 0.97
