"""The engine's verbs: the outputs that each request's owner gets, and that no block is held at the end."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from kvframe_engine.core import STEP_FAILED
from kvframe_engine.requests.output import RequestOutput
from kvframe_engine.requests.request import SamplingParams

from kvframe.contract.errors import KVFrameError, ModelError, RequestError
from tests.engine.scripted_model import MAX_MODEL_LEN, ScriptedModel
from tests.support.engines import scheduler_of

SCRIPT = "the quick brown fox jumps"


def text_of(script: str, prompt: str, **params: Any) -> RequestOutput:
    with ScriptedModel(script).engine() as engine:
        (output,) = engine.generate([prompt], SamplingParams(**params))
        assert 0 == sum(engine.stats().blocks_held)
        return output


# --- ends -------------------------------------------------------------------------------------------------------------


def test_the_models_end_token_ends_a_request_and_is_part_of_its_tokens() -> None:
    output = text_of("abcd", "ab")
    assert ("stop", "cd", (99, 100, 0)) == (output.finish_reason, output.text, output.token_ids)


def test_a_limit_ends_a_request() -> None:
    output = text_of(SCRIPT, "the", max_new_tokens=6)
    assert ("length", " quick") == (output.finish_reason, output.text)


def test_the_models_length_ends_a_request() -> None:
    output = text_of("x" * MAX_MODEL_LEN, "xx", max_new_tokens=1000)
    assert ("length", MAX_MODEL_LEN - 2) == (output.finish_reason, len(output.token_ids))


def test_ignore_eos_goes_on_after_the_end_token() -> None:
    assert (99, 0, 0, 0) == text_of("abc", "ab", max_new_tokens=4, ignore_eos=True).token_ids


def test_a_stop_token_ends_a_request() -> None:
    assert " quick" == text_of(SCRIPT, "the", stop_token_ids=[ord("k")]).text


def test_a_stop_string_is_cut_off_though_its_tokens_are_there() -> None:
    output = text_of(SCRIPT, "the", stop=["row", "bro"])
    assert ("stop", " quick ", " quick bro") == (
        output.finish_reason,
        output.text,
        bytes(output.token_ids).decode(),
    )


# --- streaming --------------------------------------------------------------------------------------------------------


def test_a_stream_gives_each_token_once_and_its_pieces_add_up() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        outputs = list(engine.stream("the", SamplingParams(max_new_tokens=6)))
    assert [" ", "q", "u", "i", "c", "k"] == [output.new_text for output in outputs]
    assert [1] * 6 == [len(output.new_token_ids) for output in outputs]
    assert [None] * 5 + ["length"] == [output.finish_reason for output in outputs]


def test_a_stream_never_ends_within_a_character() -> None:
    with ScriptedModel("aé€𝄞b").engine() as engine:
        pieces = [output.new_text for output in engine.stream("a")]
    assert ["", "é", "", "", "€", "", "", "", "𝄞", "b", ""] == pieces


def test_a_stream_holds_back_what_may_be_a_stop_string() -> None:
    with ScriptedModel("ab<st<stop>x").engine() as engine:
        pieces = [output.new_text for output in engine.stream("a", SamplingParams(stop="<stop>"))]
    assert ["b", "", "", "", "<st", "", "", "", "", ""] == pieces


def test_an_incomplete_character_comes_out_at_the_end() -> None:
    assert "\N{REPLACEMENT CHARACTER}" == text_of("aé", "a", max_new_tokens=1).text


def test_leaving_a_stream_early_gives_its_blocks_back() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        for output in engine.stream("the"):
            if output.text.endswith("quick"):
                break
        del output
        assert not engine.has_unfinished
        assert 0 == sum(engine.stats().blocks_held)


def test_what_others_produce_during_a_stream_is_kept_for_step() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        other = engine.add_request("the q", SamplingParams(max_new_tokens=4))
        assert " quick" == list(engine.stream("the", SamplingParams(max_new_tokens=6)))[-1].text
        (output,) = engine.step()
        assert (other, "uick", "length") == (output.request_id, output.new_text, output.finish_reason)
        assert not engine.has_unfinished


def test_two_streams_take_turns_and_each_gives_token_by_token() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        params = SamplingParams(max_new_tokens=4)
        first, second = engine.stream("the", params), engine.stream("the qui", params)
        pieces = [(one.new_text, other.new_text) for one, other in zip(first, second, strict=True)]
        assert [(" ", "c"), ("q", "k"), ("u", " "), ("i", "b")] == pieces
        assert 4 == engine.stats().steps


# --- steps and aborts -------------------------------------------------------------------------------------------------


def test_steps_report_what_is_new_of_every_request() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        engine.add_request("the", SamplingParams(max_new_tokens=2), "a")
        engine.add_request("the qui", SamplingParams(max_new_tokens=1), "b")
        seen = []
        while engine.has_unfinished:
            seen.append([(output.request_id, output.new_text) for output in engine.step()])
    assert [[("a", " "), ("b", "c")], [("a", "q")]] == seen


def test_a_request_that_has_nothing_new_is_not_reported_again() -> None:
    with ScriptedModel(SCRIPT).engine(max_num_batched_tokens=4) as engine:
        engine.add_request("the", SamplingParams(max_new_tokens=8), "a")
        engine.add_request("t", SamplingParams(max_new_tokens=8), "b")
        for _ in range(4):
            assert ["a", "b"] == [output.request_id for output in engine.step()]
        engine.reset_prefix_cache()
        scheduler_of(engine).preempt_last()
        # The five tokens of "b" have to be computed again, and the step has three left beside that of "a".
        assert ["a"] == [output.request_id for output in engine.step()]


def test_an_output_stays_as_it_was_when_its_request_goes_on() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        engine.add_request("the", SamplingParams(max_new_tokens=4))
        outputs = [output for _ in range(4) for output in engine.step()]
        assert [b" ", b" q", b" qu", b" qui"] == [bytes(output.token_ids) for output in outputs]
        assert [b" ", b"q", b"u", b"i"] == [bytes(output.new_token_ids) for output in outputs]


def test_an_aborted_request_ends_at_once_and_the_others_go_on() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        for name in ("a", "b"):
            engine.add_request("the", SamplingParams(max_new_tokens=5), name)
        engine.step()
        engine.abort("a")
        engine.abort("nobody")
        assert 1 == len(scheduler_of(engine).running) + len(scheduler_of(engine).waiting)
        last: dict[str, RequestOutput] = {}
        while engine.has_unfinished:
            last |= {output.request_id: output for output in engine.step()}
        assert ("aborted", " ") == (last["a"].finish_reason, last["a"].text)
        assert ("length", " quic") == (last["b"].finish_reason, last["b"].text)
        assert 0 == sum(engine.stats().blocks_held)


def test_closing_ends_everything_and_detaches_the_model() -> None:
    model = ScriptedModel(SCRIPT)
    engine = model.engine()
    engine.add_request("the")
    engine.step()
    assert model.attached
    engine.close()
    engine.close()
    assert not model.attached
    assert not engine.has_unfinished
    assert 0 == sum(engine.stats().blocks_held)


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[Any, str]] = [
    ("", "empty_prompt"),
    ([], "empty_prompt"),
    ("x" * MAX_MODEL_LEN, "prompt_too_long"),
    ([1, 256], "bad_token"),
    ([1, -1], "bad_token"),
    ([1, 2.5], "bad_token"),
    ([True], "bad_token"),
    ("\ud800", "bad_text"),
    ("x" * 55, "too_large"),
]


@pytest.mark.parametrize(("prompt", "code"), REFUSED)
def test_a_request_that_can_never_be_served_is_refused(prompt: Any, code: str) -> None:
    with ScriptedModel(SCRIPT).engine(memory=1800) as engine:
        with pytest.raises(RequestError) as refusal:
            engine.add_request(prompt)
        assert code == refusal.value.code
        assert not engine.has_unfinished


def test_a_token_id_has_four_bytes_whatever_the_model_says_of_its_vocabulary() -> None:
    model = ScriptedModel(SCRIPT)
    model.description = attrs.evolve(model.description, vocab_size=None)
    with model.engine() as engine:
        engine.add_request([2**32 - 1])
        with pytest.raises(RequestError, match="4294967296 is not a token id"):
            engine.add_request([2**32])


def test_refused_prompts_leave_the_others_of_a_batch_alone() -> None:
    with ScriptedModel(SCRIPT).engine(memory=1800) as engine:
        prompts = [prompt for prompt, _ in REFUSED]
        outputs = engine.generate(["the", *prompts, "the"], SamplingParams(max_new_tokens=10))
        assert ["length", *["refused"] * len(REFUSED), "length"] == [output.finish_reason for output in outputs]
        assert [" quick bro"] * 2 == [outputs[0].text, outputs[-1].text]
        assert all(output.error for output in outputs[1:-1])
        assert 0 == sum(engine.stats().blocks_held)


def test_an_id_is_taken_until_its_last_output_is_reported() -> None:
    with ScriptedModel("abc").engine() as engine:
        engine.add_request("ab", SamplingParams(max_new_tokens=1), "a")
        with pytest.raises(RequestError, match="in the engine already"):
            engine.add_request("ab", request_id="a")
        engine.step()
        assert "a" == engine.add_request("ab", request_id="a")


def test_stop_strings_need_a_tokenizer() -> None:
    with (
        ScriptedModel(SCRIPT, tokenizer=False).engine() as engine,
        pytest.raises(RequestError, match="use stop_token_ids"),
    ):
        engine.add_request([1], SamplingParams(stop="x"))


def test_text_without_a_tokenizer_is_refused_in_one_sentence() -> None:
    with ScriptedModel(SCRIPT, tokenizer=False).engine() as engine, pytest.raises(KVFrameError, match="no tokenizer"):
        engine.add_request("the")


@pytest.mark.parametrize("wrong", [5, None, object(), b"ab", {97}, iter([97.5]), "the", np.array(97)])
def test_what_is_no_prompt_is_refused_alone(wrong: Any) -> None:
    with ScriptedModel("abcd", tokenizer=False).engine() as engine:
        first, refused, last = engine.generate([[97, 98], wrong, [97, 98]])
        assert ("refused", ()) == (refused.finish_reason, refused.prompt_token_ids)
        assert [(99, 100, 0)] * 2 == [first.token_ids, last.token_ids]


def test_a_batch_of_nothing_but_text_without_a_tokenizer_is_one_error() -> None:
    with ScriptedModel(SCRIPT, tokenizer=False).engine() as engine, pytest.raises(ModelError, match="no tokenizer"):
        engine.generate(["the", "the"])


def test_a_model_without_a_tokenizer_serves_token_ids() -> None:
    with ScriptedModel("abcd", tokenizer=False).engine() as engine:
        (output,) = engine.generate([[97, 98]])
    assert ((99, 100, 0), "") == (output.token_ids, output.text)


def test_as_many_params_as_prompts_are_needed() -> None:
    with ScriptedModel(SCRIPT).engine() as engine, pytest.raises(RequestError, match="2 prompts have 1 params"):
        engine.generate(["a", "b"], [SamplingParams()])


# --- errors of a model ------------------------------------------------------------------------------------------------


def test_logits_that_are_not_numbers_end_their_request_only() -> None:
    model = ScriptedModel(SCRIPT)

    def spoil(last: torch.Tensor, logits: torch.Tensor) -> None:
        logits[last == ord("u"), 5] = torch.nan

    model.spoil = spoil
    with model.engine() as engine:
        broken, sound = engine.generate(["the", "the quick"], SamplingParams(max_new_tokens=6))
        assert ("error", " qu") == (broken.finish_reason, broken.text)
        assert "not numbers" in (broken.error or "")
        assert ("length", " brown") == (sound.finish_reason, sound.text)
        assert 0 == sum(engine.stats().blocks_held)


def test_the_state_of_a_broken_request_is_not_found_by_others() -> None:
    model = ScriptedModel(SCRIPT)

    def spoil(last: torch.Tensor, logits: torch.Tensor) -> None:
        logits[last == ord("u"), 5] = torch.nan

    model.spoil = spoil
    with model.engine() as engine:
        for _ in range(2):
            (broken,) = engine.generate([20 * "x" + "u"])
            assert "error" == broken.finish_reason
        assert 0 == engine.stats().cached_prompt_tokens


def test_a_model_that_raises_fails_the_step_and_leaks_nothing() -> None:
    model = ScriptedModel(SCRIPT)

    def spoil(last: torch.Tensor, logits: torch.Tensor) -> None:
        if ord("u") in last.tolist():
            raise ValueError("out of luck")

    model.spoil = spoil
    with model.engine() as engine:
        with pytest.raises(ValueError, match="out of luck"):
            engine.generate(["the", "the quick"])
        assert not engine.has_unfinished
        assert 0 == sum(engine.stats().blocks_held)
        engine.add_request("the", request_id="a")
        assert [" ", "q", "u"] == [engine.step()[0].new_text for _ in range(3)]
        with pytest.raises(ValueError, match="out of luck"):
            engine.step()
        (output,) = engine.step()
        assert ("a", "error", STEP_FAILED) == (
            output.request_id,
            output.finish_reason,
            output.error,
        )
        assert " brown" == engine.generate(["the quick"], SamplingParams(max_new_tokens=6))[0].text


def test_the_seconds_of_a_step_count_while_it_runs_and_are_0_between_steps() -> None:
    model, seconds = ScriptedModel("abcd"), []
    with model.engine() as engine:

        def look(tokens: torch.Tensor, logits: torch.Tensor) -> None:
            seconds.append(engine.step_seconds)
            if len(seconds) == 2:
                raise RuntimeError("out of luck")

        model.spoil = look
        engine.add_request("a")
        seconds.append(engine.step_seconds)
        with pytest.raises(RuntimeError):
            engine.step()
        seconds.append(engine.step_seconds)
    assert [False, True, False] == [each > 0 for each in seconds]


def test_what_a_failed_step_says_of_one_tenant_is_not_told_to_another() -> None:
    model = ScriptedModel(SCRIPT)

    def spoil(last: torch.Tensor, logits: torch.Tensor) -> None:
        raise ValueError(f"cannot compute {bytes(last.tolist())!r}")

    model.spoil = spoil
    with model.engine(self_check=False) as engine:
        engine.add_request("a!", cache_salt="anna")
        engine.add_request("b?", cache_salt="ben")
        with pytest.raises(ValueError, match="cannot compute b'!\\?'"):
            engine.step()
        assert [STEP_FAILED] * 2 == [output.error for output in engine.step()]
        stream = engine.stream("the", cache_salt="ben")
        with pytest.raises(ValueError, match="cannot compute b'e'"):
            next(stream)
        assert STEP_FAILED == next(stream).error


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_counts_the_prompts_that_are_done_after_each_step() -> None:
    seen: list[int] = []
    with ScriptedModel(SCRIPT).engine() as engine:
        params = [SamplingParams(max_new_tokens=count) for count in (1, 3, 3, 1)]
        engine.generate(["the", "the q", "a", ""], params, on_progress=seen.append)
        # The empty prompt is refused, so it counts as finished at once.
    assert [2, 2, 4] == seen


# --- sampling through the engine --------------------------------------------------------------------------------------


def sampled(prompts: list[str], seeds: list[int], **engine_options: Any) -> list[tuple[int, ...]]:
    params = [SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed, ignore_eos=True) for seed in seeds]
    with ScriptedModel(SCRIPT).engine(**engine_options) as engine:
        return [output.token_ids for output in engine.generate(prompts, params)]


def test_a_seeded_request_is_the_same_alone_and_in_any_batch() -> None:
    together = sampled(["the", "the quick", "a"], [1, 2, 3])
    assert together == [*sampled(["the"], [1]), *sampled(["the quick"], [2]), *sampled(["a"], [3])]
    assert together == sampled(["the", "the quick", "a"], [1, 2, 3], max_num_batched_tokens=2, max_num_seqs=2)


def test_another_seed_gives_other_tokens() -> None:
    first, second = sampled(["the", "the"], [1, 2])
    assert first != second


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_stats_count_what_was_done() -> None:
    model = ScriptedModel(SCRIPT)
    with model.engine() as engine:
        engine.generate(["the quick", "the quick brown"], SamplingParams(max_new_tokens=3))
        stats = engine.stats()
        # The second prompt waits one step for the two blocks of 4 tokens that it shares with the first.
        assert (9 + 15, 8, 8 / 24) == (stats.prompt_tokens, stats.cached_prompt_tokens, stats.prefix_hit_rate)
        # The last token of each request is never computed.
        (lookups,) = stats.to_dict()["lookups"]
        assert {"asked_tokens": 24, "found_tokens": 8, "hit_tokens": 8, "times_limiting": 0} == {
            key: value for key, value in lookups.items() if key != "kind"
        }
        assert (9 + 7 + 2 + 2, 6, 4) == (stats.computed_tokens, stats.generated_tokens, stats.steps)
        # The peak: 11 computed tokens of the first, 16 of the second, two blocks shared: 3 + 4 - 2.
        assert ((0,), (5,)) == (stats.blocks_held, stats.peak_blocks_held)
        assert 5 * 4 * 2 * 4 * 4 == stats.peak_bytes_held
        assert engine.plan.total_bytes == stats.cache_bytes == stats.to_dict()["cache_bytes"]


def test_a_model_that_keeps_nothing_takes_the_same_path() -> None:
    model = ScriptedModel(SCRIPT)
    model.description = attrs.evolve(model.description, layers=())
    with model.engine(max_num_batched_tokens=6) as engine:
        outputs = engine.generate(["the", "the qu", "the qui"], SamplingParams(max_new_tokens=4))
        assert [" qui", "ick ", ""] == [output.text for output in outputs]
        # A part of a prompt would be lost after its step, so prompts are computed whole.
        assert "7 tokens, and the model computes a prompt in one step" in (outputs[2].error or "")
        assert (0, 0, ()) == (engine.plan.total_bytes, engine.stats().cache_bytes, engine.stats().blocks_held)
        assert 0 == engine.stats().cached_prompt_tokens
