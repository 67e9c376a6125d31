"""A recording of steps agrees with the engine's counters, and says for each request what happened and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from kvframe_engine.step_trace import StepTrace

from kvframe import Engine
from tests.models.serving import GREEDY, PROMPTS, TinyModel, ids

Record = Callable[..., tuple[Engine, StepTrace]]  # type: ignore[type-arg]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path: Path = tmp_path_factory.mktemp("traced")
    return TinyModel.save(path, "gemma3_text")


def events(trace: StepTrace, what: str) -> list[str]:  # type: ignore[type-arg]
    return [event.request_id for event in trace.events if event.what == what]


def test_its_steps_add_up_to_the_counters(model: TinyModel) -> None:
    with model.engine(max_num_batched_tokens=32) as engine:
        trace = engine.start_trace()
        engine.generate(PROMPTS, GREEDY)
        stats = engine.stats()
    assert stats.steps == len(trace.steps)
    parts = [part for step in trace.steps for part in step.parts]
    assert stats.computed_tokens == sum(part.num_tokens for part in parts)
    assert stats.generated_tokens == sum(part.generates for part in parts)
    assert stats.cached_prompt_tokens == sum(event.found_tokens for event in trace.events if event.what == "admitted")
    assert stats.evictions == sum(stats.blocks_evicted) == sum(step.num_evicted for step in trace.steps)
    assert list(stats.blocks_held) == list(trace.steps[-1].blocks_held)
    assert [step.start <= step.stop for step in trace.steps] == [True] * len(trace.steps)
    assert len(PROMPTS) == len(events(trace, "ended"))


def test_preemptions_are_recorded(model: TinyModel) -> None:
    with model.engine(memory="150KiB", reserve_prompts=False) as engine:
        trace = engine.start_trace()
        engine.generate([ids(seed, 40) for seed in range(8)], attrs.evolve(GREEDY, max_new_tokens=40))
        stats = engine.stats()
    assert 0 < stats.preemptions == len(events(trace, "preempted"))


def test_drafts_are_recorded(model: TinyModel) -> None:
    with model.engine(drafts="ngram") as engine:
        trace = engine.start_trace()
        engine.generate([[3, 4, 5] * 9], attrs.evolve(GREEDY, max_new_tokens=300))
        stats = engine.stats()
    parts = [part for step in trace.steps for part in step.parts]
    assert stats.draft_tokens == sum(part.num_drafts for part in parts)
    assert 0 < stats.accepted_draft_tokens == sum(part.num_accepted for part in parts)


def test_what_limited_a_hit_is_said_and_a_failed_request_says_why(model: TinyModel) -> None:
    with model.engine() as engine:
        engine.generate([ids(3, 40)], GREEDY)
        trace = engine.start_trace()
        engine.generate([[*ids(3, 30), 1, 2, 3]], GREEDY)
        engine.add_request(ids(9, 20), GREEDY, "gone")
        engine.step()
        engine.abort("gone")
    first = trace.events[0]
    assert ("admitted", True) == (first.what, first.found_tokens > 0)
    assert trace.steps
    assert "gone" in events(trace, "admitted")


def test_a_recording_ends_when_it_is_stopped_or_another_begins(model: TinyModel) -> None:
    with model.engine() as engine:
        first = engine.start_trace()
        engine.generate([ids(1, 9)], GREEDY)
        recorded = len(first.steps)
        second = engine.start_trace()
        engine.generate([ids(2, 9)], GREEDY)
        engine.stop_trace()
        engine.generate([ids(4, 9)], GREEDY)
    assert (recorded, recorded) == (len(first.steps), len(second.steps))
