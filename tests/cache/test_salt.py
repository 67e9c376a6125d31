"""``cache_salt``: requests with one salt share cached prefixes and inputs; those with different salts share nothing."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from kvframe_engine.engine import Engine
from kvframe_engine.requests.request import SamplingParams

from kvframe.contract.errors import RequestError
from tests.engine.scripted_model import ScriptedModel
from tests.engine.test_embedding import Echo
from tests.engine.test_scheduler import CountingCache, encoder, request, run, scheduler
from tests.support.commands import run as run_command
from tests.support.engines import manager_of, requests_of, scheduler_of

PROMPT = "the quick brown"
SHORT = SamplingParams(max_new_tokens=3)
ONE_TOKEN = SamplingParams(max_new_tokens=1)


def cached_tokens(engine: Engine) -> int:
    return engine.stats().cached_prompt_tokens


# --- what is shared ---------------------------------------------------------------------------------------------------


def test_a_prefix_is_found_by_requests_of_its_salt_and_by_no_others() -> None:
    with ScriptedModel(PROMPT).engine() as engine:
        for salt, found in [("", 0), ("a", 0), ("b", 0), ("a", 12), ("", 24), ("c", 24), ("b", 36)]:
            engine.generate([PROMPT], SHORT, cache_salt=salt)
            assert found == cached_tokens(engine), salt


def test_prompts_of_one_batch_have_a_salt_each() -> None:
    with ScriptedModel(PROMPT).engine() as engine:
        outputs = engine.generate([PROMPT] * 4, SHORT, cache_salt=["a", "b", "a", ""])
        assert 12 == cached_tokens(engine)
        assert 1 == len({output.token_ids for output in outputs})


def test_a_stream_and_a_request_that_is_added_have_salts() -> None:
    with ScriptedModel(PROMPT).engine() as engine:
        list(engine.stream(PROMPT, SHORT, cache_salt="a"))
        engine.add_request(PROMPT, SHORT, cache_salt="b")
        while engine.has_unfinished:
            engine.step()
        assert 0 == cached_tokens(engine)
        engine.add_request(PROMPT, SHORT, cache_salt="a")
        engine.step()
        assert 12 == cached_tokens(engine)


def test_texts_to_embed_have_salts() -> None:
    text = [*range(12), 50]
    with Echo("full_attention").embedder() as embedder:
        for salt, found in [("a", 0), ("b", 0), ("a", 12), (["b", "c"], 24)]:
            embedder.embed([text] if isinstance(salt, str) else [text] * 2, cache_salt=salt)
            assert found == embedder.stats().cached_prompt_tokens


def test_a_request_that_was_preempted_is_still_of_its_salt() -> None:
    with ScriptedModel(PROMPT).engine(max_num_batched_tokens=8) as engine:
        engine.generate([PROMPT], SHORT, cache_salt="a")
        request_id = engine.add_request(PROMPT, SHORT, cache_salt="b")
        engine.step()
        scheduler_of(engine)._preempt(requests_of(engine)[request_id])
        while engine.has_unfinished:
            engine.step()
        assert 0 == cached_tokens(engine)


@pytest.mark.parametrize("seed", range(5))
def test_a_page_is_never_held_by_requests_of_two_salts(seed: int) -> None:
    chance = random.Random(seed)
    with ScriptedModel(PROMPT * 3).engine(max_num_batched_tokens=16) as engine:
        salts: dict[str, str] = {}
        for _ in range(60):
            if chance.random() < 0.4:
                salt = chance.choice(["", "a", "b"])
                prompt = PROMPT[: chance.randint(1, len(PROMPT))]
                salts[engine.add_request(prompt, SamplingParams(max_new_tokens=5), cache_salt=salt)] = salt
            engine.step()
            owner: dict[int, str] = {}
            for running in scheduler_of(engine).running:
                for page in filter(None, manager_of(engine).block_ids(running.request_id)[0]):
                    assert salts[running.request_id] == owner.setdefault(page, salts[running.request_id])


# --- within one step --------------------------------------------------------------------------------------------------


def test_a_request_does_not_wait_for_a_prefix_that_another_salt_computes() -> None:
    requests = [request(name, 9, first=1, salt=salt) for name, salt in [("a", "x"), ("b", "y"), ("c", "x")]]
    made = scheduler(CountingCache(), *requests, tokens=32, shared=4)
    assert [{"a": 9, "b": 9}, {"a": 1, "b": 1, "c": 9}] == run(made, 2)


def test_a_request_does_not_wait_for_an_input_that_another_salt_computes() -> None:
    requests = [request(name, 2, inputs=encoder("one"), salt=name) for name in "ab"]
    assert [{"a": 2, "b": 2}] == run(scheduler(CountingCache(), *requests, shared=4), 1)


def test_the_steps_of_a_tenant_are_the_same_whatever_another_asked_for() -> None:
    def steps(other: str) -> list[tuple[int, ...]]:
        with ScriptedModel(PROMPT).engine() as engine:
            engine.generate([other], SHORT, cache_salt="other")
            engine.add_request(other, SHORT, cache_salt="other")
            mine = engine.add_request(PROMPT, SHORT, cache_salt="mine")
            return [
                output.new_token_ids
                for _ in range(5)
                for output in [{each.request_id: each for each in engine.step()}.get(mine)]
                if output is not None
            ]

    assert steps(PROMPT) == steps(PROMPT[::-1]) != []


# --- what the work reveals --------------------------------------------------------------------------------------------


def lines_run(run: Callable[[], object]) -> list[tuple[str, int]]:
    """Return every line of kvframe's code that a call runs, in order."""
    lines: list[tuple[str, int]] = []

    def note(frame: FrameType, event: str, _: Any) -> Any:
        if f"{os.sep}kvframe{os.sep}" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        run()
    finally:
        sys.settrace(before)
    return lines


def lines_to_a_token(before: str, salt: str, is_beside: bool) -> list[tuple[str, int]]:
    """Return the lines from a prompt to its first token; the prompt ``before`` ended, or waits beside it."""
    with ScriptedModel(PROMPT).engine() as engine:
        engine.add_request(before, ONE_TOKEN, cache_salt=salt)
        while engine.has_unfinished and not is_beside:
            engine.step()

        def serve() -> None:
            mine = engine.add_request(PROMPT, ONE_TOKEN, cache_salt="mine")
            while mine not in [output.request_id for output in engine.step()]:
                pass

        return lines_run(serve)


@pytest.mark.parametrize("is_beside", [False, True])
def test_the_work_for_a_prompt_does_not_reveal_a_prompt_of_another_salt(is_beside: bool) -> None:
    lines_to_a_token(PROMPT, "mine", is_beside)  # What is computed once is computed now.
    same, other = (lines_to_a_token(before, "theirs", is_beside) for before in (PROMPT, PROMPT[::-1]))
    assert same == other
    # Within one salt, it does: otherwise this test would see nothing.
    same, other = (lines_to_a_token(before, "mine", is_beside) for before in (PROMPT, PROMPT[::-1]))
    assert same != other


# --- values that are not a salt ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", [None, 5, b"a", "\ud800"])
def test_what_is_no_text_is_refused(salt: Any) -> None:
    with ScriptedModel(PROMPT).engine() as engine:
        with pytest.raises(RequestError, match="cache_salt") as refusal:
            engine.add_request(PROMPT, cache_salt=salt)
        assert "bad_salt" == refusal.value.code
        assert not engine.has_unfinished
    with Echo("full_attention").embedder() as embedder, pytest.raises(RequestError, match="cache_salt"):
        embedder.add_request([1, 2], cache_salt=salt)


def test_a_wrong_salt_is_refused_alone() -> None:
    with ScriptedModel(PROMPT).engine() as engine:
        good, wrong = engine.generate([PROMPT] * 2, SHORT, cache_salt=["a", 5])  # type: ignore[list-item]
    assert ("stop", "refused", "cache_salt must be a string, not 5") == (
        good.finish_reason,
        wrong.finish_reason,
        wrong.error,
    )


def test_as_many_salts_as_prompts_are_needed() -> None:
    with (
        ScriptedModel(PROMPT).engine() as engine,
        pytest.raises(RequestError, match="2 requests have 1 values of cache_salt"),
    ):
        engine.generate([PROMPT] * 2, cache_salt=["a"])


@pytest.mark.parametrize("command", ["generate", "embed"])
def test_the_command_says_how_often_a_salt_is_given(command: str, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[[1, 2], [1, 2], [1, 2]]")
    given = ("--prompt-token-ids" if command == "generate" else "--token-ids", str(tmp_path / "ids.json"))
    result = run_command(command, str(tmp_path), *given, "--cache-salt", "a", "--cache-salt", "b")
    assert 2 == result.exit_code
    assert "give --cache-salt once, or once for each of 3 requests, not 2 times" in result.stderr
