"""Overlap: the next step is chosen while the device computes the last one, and every token stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.requests.output import RequestOutput
from kvframe_engine.requests.request import Request, SamplingParams
from kvframe_engine.running.launched_steps import LastTokens
from kvframe_engine.running.model_runner import Sampling
from kvframe_engine.scheduling.step import PackedStep, ScheduledStep

from kvframe import Prompt, Stack
from kvframe.contract.errors import StackError
from tests.covering import cover_values
from tests.engine.scripted_model import ScriptedModel
from tests.engine.test_processors import Instead
from tests.models.serving import TinyModel, held_pages, ids
from tests.support.engines import storage_of
from tests.support.overlap import EXTRAS, call_at_random, on_queue
from tests.support.plugins import plugin

PROMPTS = [ids(seed, length) for seed, length in enumerate((33, 5, 17, 64, 1, 40, 12, 25))]
PARAMS = [
    SamplingParams(
        max_new_tokens=4 + 3 * index,
        temperature=0.0 if index % 2 else 1.5,
        seed=index,
        top_k=index % 3 * 9,
        **extras,
    )
    for index, extras in enumerate(EXTRAS)
]


def check_equal(expected: list[RequestOutput], found: list[RequestOutput]) -> None:
    """Check that outputs have the same tokens and log-probabilities; those of other batches differ in the last bits."""
    assert [output.token_ids for output in expected] == [output.token_ids for output in found]
    assert [_likely(output) for output in expected] == [pytest.approx(_likely(output), abs=1e-3) for output in found]


def _likely(output: RequestOutput) -> list[float]:
    tops = [*(output.top_logprobs or ()), *(output.prompt_top_logprobs or ())]
    values = [
        *(output.logprobs or ()),
        *(output.prompt_logprobs or ()),
        *(value for top in tops for value in (top or {}).values()),
    ]
    return [value for value in values if value is not None]


FAMILIES = ("gemma3_text", "jamba", "llama4_text", "deepseek_v3")
OPTIONS: dict[str, dict[str, Any]] = {
    "blocks of one": {"block_size": 1, "max_num_seqs": 3},
    "small steps": {"block_size": 4, "max_num_batched_tokens": 16, "audit": True},
    "graphs": {"prefix_caching": False, "graphs": [1, 4, 8]},
}


@pytest.mark.parametrize(("family", "name"), cover_values(FAMILIES, OPTIONS))
def test_tokens_are_those_without_overlap(models: Callable[[str], TinyModel], family: str, name: str) -> None:
    model, options = models(family), OPTIONS[name]
    with model.engine(**options) as engine:
        expected = engine.generate(PROMPTS, PARAMS)
    with model.engine(overlap="on", **options) as engine:
        # A step is computed when it is launched, and then reads tokens that the host does not know.
        check_equal(expected, engine.generate(PROMPTS, PARAMS))
        if "graphs" not in options:
            on_queue(engine)
        check_equal(expected, engine.generate(PROMPTS, PARAMS))  # on cached prefixes
        assert 0 == held_pages(engine)


@pytest.mark.parametrize(("family", "host_memory"), cover_values(FAMILIES, [None, "1MiB"]))
def test_preempted_requests_get_the_same_tokens(
    models: Callable[[str], TinyModel], family: str, host_memory: str | None
) -> None:
    model = models(family)
    sizes = {"block_size": 4, "max_model_len": 96, "max_num_batched_tokens": 24}
    options = {**sizes, "memory": model.tight_memory(96, **sizes), "host_memory": host_memory}
    with model.engine(**sizes) as engine:
        expected = engine.generate(PROMPTS, PARAMS)
    with model.engine(overlap="on", **options) as engine:
        if host_memory is not None:
            on_queue(engine)
        check_equal(expected, engine.generate(PROMPTS, PARAMS))
        assert engine.stats().preemptions > 0
        assert 0 == held_pages(engine)


def test_an_encoder_decoder_gets_the_same_tokens(models: Callable[[str], TinyModel]) -> None:
    model = models("bart")
    prompts: list[Any] = [{"encoder": ids(seed, 9 + seed), "decoder": [2]} for seed in range(4)]
    asked = [Prompt(**prompt) for prompt in prompts]
    with model.engine() as engine:
        expected = engine.generate(asked, PARAMS[:4])
    with model.engine(overlap="on") as engine:
        on_queue(engine)
        check_equal(expected, engine.generate(asked, PARAMS[:4]))


# --- the host's waits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extras", [[{}] * len(EXTRAS), EXTRAS], ids=["plain", "extras"])
def test_the_host_waits_once_a_step_and_the_device_has_another_one(
    models: Callable[[str], TinyModel], extras: list[dict[str, Any]]
) -> None:
    params = [SamplingParams(**{**own, "max_new_tokens": 20}, ignore_eos=True) for own in extras]
    with models("llama").engine(overlap="on") as engine:
        queue = on_queue(engine, seconds=None)
        engine.generate(PROMPTS, params)
        steps = engine.stats().steps
    # Each step but the last one is computed while the next one is queued.
    assert [2] * (steps - 1) + [1] == queue.queued_at_wait


def test_what_chooses_tokens_reads_nothing_back() -> None:
    """A meta tensor has no numbers: an operation for which the host would wait raises."""
    meta = torch.device("meta")
    tokens, last_tokens = np.zeros((4, 64), np.int64), LastTokens(4, meta)
    requests = [
        Request.create(str(row), PROMPTS[0], params, eos_token_ids=frozenset({1}), max_model_len=64)
        for row, params in enumerate(PARAMS[index] for index in (0, 1, 4, 5))
    ]
    for row, request in enumerate(requests):
        request.row = row
    num_known = np.full(4, len(PROMPTS[0]))
    counts = num_known - np.array([0, 0, 0, 8])
    step = ScheduledStep(requests, requests, np.arange(4), num_known - counts, num_known, counts, int(counts.sum()))
    following = step.following(1000)
    assert following is not None
    for chosen, running in ((step, None), (following, step)):
        packed = PackedStep.of(chosen, lambda query_lens: None)
        sampling = Sampling.of(packed, tokens, meta, running)
        logits = torch.empty(len(packed.generating_indices), 96, device=meta)
        token_ids, *logprobs = sampling.sample(logits, last_tokens.read)
        assert ((len(sampling.rows),), 2) == (token_ids.shape, len(logprobs))
        last_tokens.store(sampling.rows, token_ids)
        with pytest.raises(NotImplementedError):
            token_ids.tolist()


def test_no_step_is_computed_in_vain_if_lengths_end_the_requests() -> None:
    with ScriptedModel("abcdefghijklmnop").engine(overlap="on") as engine:
        engine.generate(["a", "ab"], SamplingParams(max_new_tokens=5))
        assert (1 + 2 + 2 * 4, 10, 5) == (
            engine.stats().computed_tokens,
            engine.stats().generated_tokens,
            engine.stats().steps,
        )


def test_a_request_that_turns_out_to_have_ended_costs_one_token() -> None:
    with ScriptedModel("abcd").engine(overlap="on") as engine:
        (output,) = engine.generate(["a"], SamplingParams(max_new_tokens=9))
        assert ("bcd", "stop") == (output.text, output.finish_reason)
        # The end token is computed from "d"; the token after it is the one in vain.
        assert (5, 4) == (engine.stats().computed_tokens, engine.stats().generated_tokens)
        assert 0 == held_pages(engine)


# --- what ends requests ----------------------------------------------------------------------------------------------


def test_a_broken_output_ends_its_request_and_no_other() -> None:
    def spoil(last: torch.Tensor, logits: torch.Tensor) -> None:
        logits[last == ord("u"), 5] = torch.nan

    model = ScriptedModel("the quick brown fox")
    model.spoil = spoil
    with model.engine(overlap="on") as engine:
        on_queue(engine)
        broken, sound = engine.generate(["the q", "the quic"], SamplingParams(max_new_tokens=6))
        assert ("error", "u") == (broken.finish_reason, broken.text)
        assert ("length", "k brow") == (sound.finish_reason, sound.text)
        assert 0 == held_pages(engine)


def test_a_request_whose_cached_state_may_be_broken_is_computed_anew(models: Callable[[str], TinyModel]) -> None:
    model = models("jamba")
    prompt, params = ids(1, 40), SamplingParams(max_new_tokens=9, temperature=1.0, seed=3)
    with model.engine(block_size=4) as engine:
        expected = engine.generate([prompt], params)
    with model.engine(block_size=4, overlap="on") as engine:
        engine.generate([prompt], SamplingParams(max_new_tokens=1))
        storage_of(engine).pool.fill_(0xFF)  # NaN in every dtype
        check_equal(expected, engine.generate([prompt], params))
        assert 1 == engine.stats().retries


def test_a_step_that_fails_ends_its_requests_after_the_tokens_before_it() -> None:
    def spoil(last: torch.Tensor, logits: torch.Tensor) -> None:
        if ord("u") in last.tolist():
            raise ValueError("out of luck")

    model = ScriptedModel("the quick brown fox")
    model.spoil = spoil
    with model.engine(overlap="on") as engine:
        queue = on_queue(engine)
        engine.add_request("the", request_id="a")
        assert [" ", "q", "u"] == [engine.step()[0].new_text for _ in range(3)]
        with pytest.raises(ValueError, match="out of luck"):
            engine.step()
        (output,) = engine.step()
        assert ("a", "error") == (output.request_id, output.finish_reason)
        assert 0 == held_pages(engine)
        assert 0 == queue.num_queued
        assert "ck" == engine.generate(["the qui"], SamplingParams(max_new_tokens=2))[0].text


def test_an_interrupt_of_the_wait_costs_nothing() -> None:
    with ScriptedModel(SCRIPT).engine(overlap="on") as engine:
        on_queue(engine, seconds=None).interrupted_step = 0
        engine.add_request("the", SamplingParams(max_new_tokens=6))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        texts = []
        while engine.has_unfinished:
            texts += [output.new_text for output in engine.step()]
        assert " quick" == "".join(texts)
        assert 0 == held_pages(engine)


def test_a_request_with_logits_processors_keeps_steps_from_overlapping_and_the_trace_says_so() -> None:
    params = [
        SamplingParams(max_new_tokens=3, processors={"instead": {"of": "q", "comes": "z"}}),
        SamplingParams(max_new_tokens=7, repetition_penalty=1.1),
    ]
    with ScriptedModel(SCRIPT).engine(overlap="on", plugins=[PLUGIN]) as engine:
        queue, trace = on_queue(engine), engine.start_trace()
        outputs = engine.generate(["the ", "the "], params)
        assert ["zui", "quick b"] == [output.text for output in outputs]
        why = "a request names logits processors, which read its tokens on the host"
        # The request is in three steps, and each of the three after them was chosen when its tokens were known.
        assert [why] * 3 == [step.waited_for for step in trace.steps if step.waited_for]
        assert 4 == len(queue.queued_at_wait)
        assert [step.start < step.stop for step in trace.steps] == [True] * 7


def test_drafts_and_overlap_exclude_each_other(
    models: Callable[[str], TinyModel], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StackError, match=r'engine.overlap = "on" and model.drafts exclude each other') as refused:
        models("llama").engine(overlap="on", drafts="ngram")
    assert "overlap_with_drafts" == refused.value.code
    caplog.set_level("INFO", "kvframe")
    models("llama").engine(drafts="ngram").close()
    assert "steps do not overlap, because the accepted drafts" in caplog.text
    models("llama").engine(overlap="on").close()
    assert "the next step is launched while one is computed" in caplog.text


# --- any order of calls -----------------------------------------------------------------------------------------------

SCRIPT = "the quick brown fox jumps over the lazy dog"
PLUGIN = plugin("plugin_of_instead", logits_processors={"instead": Instead})


@given(st.integers(0, 2**32))
def test_any_calls_give_the_outputs_of_an_engine_without_overlap(seed: int) -> None:
    results = []
    extras = [{}, {}, *EXTRAS, {"processors": {"instead": {"of": "o", "comes": "a"}}}]
    for overlap in ("off", "on"):
        ends: dict[tuple[str, int], RequestOutput] = {}
        options: dict[str, Any] = {"max_num_seqs": 3, "audit": True, "plugins": [PLUGIN]}
        with ScriptedModel(SCRIPT).engine(overlap=overlap, **options) as engine:
            for output in call_at_random(
                engine, seed, lambda length: SCRIPT[:length], extras, ("w", "ox"), ("16KiB", "24KiB")
            ):
                ends[output.request_id, output.sample] = output
            assert 0 == held_pages(engine)
        results.append(ends)
    off, on = results
    assert off.keys() == on.keys()
    for key, output in off.items():
        if "aborted" not in (output.finish_reason, on[key].finish_reason):
            assert (output.finish_reason, output.text) == (on[key].finish_reason, on[key].text)
            check_equal([output], [on[key]])


@pytest.mark.parametrize("overlap", [True, "yes", 1])
def test_another_value_is_refused(overlap: object) -> None:
    with pytest.raises(StackError, match="overlap"):
        Stack.from_mapping({"engine": {"overlap": overlap}})


def test_a_closed_engine_leaves_nothing_on_the_device() -> None:
    with ScriptedModel(SCRIPT).engine(overlap="on") as engine:
        queue = on_queue(engine)
        engine.add_request("the")
        engine.step()
    assert 0 == queue.num_queued
