"""Encoder-decoder models through the paged cache: the tokens of ``transformers.generate()``, each input held once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from kvframe_engine.requests.progress import input_sequences
from kvframe_engine.running.model_runner import TokenRunner
from kvframe_transformers.model_inputs import features_input
from kvframe_transformers.testing import ENCODER_DECODER_FAMILIES, MORE_ENCODER_DECODER_FAMILIES, save_tiny

from kvframe import Engine, Prompt, RequestOutput, SamplingParams
from kvframe.attention.batch_metadata import StepBatch
from kvframe.cli import main
from kvframe.contract.errors import ModelError, RequestError
from tests.covering import cover_values, few
from tests.models.encoder_decoder import (
    START,
    EncoderCalls,
    decoder_of,
    encoder_inputs,
    generated,
    log_mel,
    plain_logits,
    prompts,
    recording,
)
from tests.models.serving import TinyModel, held_pages, ids
from tests.support.commands import run, run_json
from tests.support.engines import manager_of, pool_of, runner_of, scheduler_of
from tests.support.models import save_tokenizer, trained_tokenizer

NUM_NEW_TOKENS = 8
GREEDY = SamplingParams(max_new_tokens=NUM_NEW_TOKENS)
FAMILIES = ENCODER_DECODER_FAMILIES
BLOCK = 16


@pytest.fixture(scope="module")
def references(models: Callable[[str], TinyModel]) -> Callable[[str], list[tuple[int, ...]]]:
    """Return what transformers generates for each prompt of a family."""
    return cache(
        lambda family: [generated(models(family), family, prompt, NUM_NEW_TOKENS) for prompt in prompts(family)]
    )


def served(engine: Engine, family: str) -> list[tuple[int, ...]]:
    """Serve a family's prompts to their ends, and check that no block is held at the end."""
    outputs = engine.generate(prompts(family), GREEDY)
    assert {"length"} == {output.finish_reason for output in outputs}
    assert 0 == held_pages(engine)
    return [output.token_ids for output in outputs]


def cross_group(engine: Engine) -> int:
    """Return the index of the group that keeps the encoder's keys and values."""
    (index,) = [group.index for group in engine.plan.groups if group.is_of_input]
    return index


# --- equal to generate() ----------------------------------------------------------------------------------------------


# Each chunk size with each batch size, for two block sizes.
SETTINGS = [(3, 1, 16), (7, 3, 4), (24, 8, 16), (2048, 8, 4), (24, 1, 4), (3, 8, 16)]


@pytest.mark.parametrize(
    ("family", "max_num_batched_tokens", "max_num_seqs", "block_size", "prefix_caching"),
    few(4, cover_values(FAMILIES, SETTINGS, (True, False), times=2)),
)
def test_tokens_equal_those_of_generate(
    models: Any,
    references: Any,
    family: str,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    block_size: int,
    prefix_caching: bool,
) -> None:
    expected = references(family)
    with models(family).engine(
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching,
    ) as engine:
        assert expected == served(engine, family)
        assert (prefix_caching and block_size == 4) <= (engine.stats().cached_prompt_tokens > 0)


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_tokens_of_the_reference_backend_equal_those_of_generate(models: Any, references: Any, family: str) -> None:
    expected = references(family)
    with models(family).engine(backend="torch_reference", max_num_batched_tokens=24) as engine:
        assert {"kvframe:torch_reference"} == {choice.backend for choice in engine.choices}
        assert expected == served(engine, family)


@pytest.mark.parametrize("family", few(2, MORE_ENCODER_DECODER_FAMILIES))
def test_families_that_no_code_names_are_served_by_rule(models: Any, references: Any, family: str) -> None:
    expected = references(family)
    with models(family).engine(max_num_batched_tokens=24, block_size=4, self_check=True) as engine:
        assert expected == served(engine, family)


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_prompt_logprobs_are_those_of_the_plain_model(models: Any, family: str) -> None:
    # More than tokens show: every logit of a long decoder prompt, computed in chunks beside others.
    model, chosen_prompts = models(family), [prompts(family)[index] for index in (3, 6, 7)]
    expected = []
    for prompt in chosen_prompts:
        decoder = decoder_of(prompt)
        logprobs = plain_logits(model, family, prompt.encoder, decoder).log_softmax(-1)
        expected.append(logprobs[range(len(decoder) - 1), decoder[1:]])
    with model.engine(max_num_batched_tokens=7, block_size=4) as engine:
        outputs = engine.generate(chosen_prompts, SamplingParams(max_new_tokens=1, prompt_logprobs=True))
    for logprobs, output in zip(expected, outputs, strict=True):
        assert output.prompt_logprobs is not None
        # Ten times the largest difference that was measured, here and with draft tokens.
        torch.testing.assert_close(torch.tensor(output.prompt_logprobs[1:]), logprobs, rtol=2e-4, atol=2e-3)


@pytest.mark.parametrize(("family", "host_memory"), few(2, cover_values(FAMILIES, (None, "4MiB"))))
def test_preempted_requests_give_the_same_tokens(
    models: Any, references: Any, family: str, host_memory: str | None
) -> None:
    expected = references(family)
    options: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 12, "block_size": 4}
    memory = models(family).tight_memory(56 if family == "t5gemma" else 58, {"encoder": 50}, **options)
    with models(family).engine(memory=memory, host_memory=host_memory, max_num_seqs=8, **options) as engine:
        assert expected == served(engine, family)
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_requests_that_come_while_others_run_give_the_same_tokens(models: Any, references: Any, family: str) -> None:
    expected = references(family)
    with models(family).engine(block_size=4, max_num_batched_tokens=24) as engine:
        tokens: dict[str, tuple[int, ...]] = {}
        for index, prompt in enumerate(prompts(family)):
            engine.add_request(prompt, GREEDY, str(index))
            tokens |= {output.request_id: output.token_ids for output in engine.step()}
        while engine.has_unfinished:
            tokens |= {output.request_id: output.token_ids for output in engine.step()}
    assert expected == [tokens[str(index)] for index in range(len(expected))]


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_draft_tokens_are_judged_by_the_logits_of_the_plain_model(models: Any, family: str) -> None:
    model, encoder = models(family), encoder_inputs(family)[2]
    decoder = [START, *ids(14, 9)]
    drafted = [*decoder[:8], 5, 6]  # the last two drafts are wrong
    expected, of_drafts = (plain_logits(model, family, encoder, tokens) for tokens in (decoder, drafted))
    with model.engine(block_size=4) as engine:
        runner, manager = runner_of(engine), manager_of(engine)
        assert isinstance(runner, TokenRunner)
        prepared = model.loaded.prepare_input("encoder", encoder)
        assert prepared is not None
        brought = {"encoder": prepared}
        request, logits = "drafts", []
        manager.start(request, decoder, inputs=input_sequences(brought))
        row = manager.row(request)
        for tokens, num_computed, num_new, num_accepted in ((decoder, 0, 6, 6), (drafted, 6, 4, 2), (decoder, 8, 2, 2)):
            assert manager.extend(request, num_computed + num_new)
            new = manager.missing_inputs(request)
            runner.set_row(row, tokens, brought)
            logits.append(
                runner.forward(
                    StepBatch(
                        rows=np.array([row]),
                        num_computed=np.array([num_computed]),
                        query_lens=np.array([num_new]),
                        generating_indices=np.arange(num_new),
                    ),
                    {name: {row: brought[name]} for name in new},
                )
            )
            manager.commit(request, tokens, num_computed + num_accepted)
        manager.free(request)
    accepted = torch.cat([logits[0], logits[2]])
    torch.testing.assert_close(accepted, expected[[*range(6), 8, 9]], rtol=2e-4, atol=5e-3)
    torch.testing.assert_close(logits[1], of_drafts[6:], rtol=2e-4, atol=5e-3)


# --- what requests share ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_ten_requests_with_one_input_encode_it_once_and_hold_its_blocks_once(models: Any, family: str) -> None:
    model, encoder, calls = models(family), encoder_inputs(family)[2], EncoderCalls()
    expected = generated(model, family, Prompt(encoder=encoder), NUM_NEW_TOKENS)
    num_tokens = 50 if family == "whisper" else len(encoder)
    handle = calls.count(model)
    with model.engine(block_size=BLOCK) as engine:
        for _ in range(10):
            engine.add_request(Prompt(encoder=encoder), GREEDY)
        tokens: dict[str, tuple[int, ...]] = {}
        held_blocks = set()
        while engine.has_unfinished:
            tokens |= {output.request_id: output.token_ids for output in engine.step()}
            if len(scheduler_of(engine).running) == 10:
                held_blocks.add(engine.stats().blocks_held)
        own = [10] * len(engine.plan.groups)
        own[cross_group(engine)] = -(-num_tokens // BLOCK)
        assert {tuple(own)} == held_blocks
        assert num_tokens == engine.stats().computed_input_tokens
    handle.remove()
    assert [1] == calls.sizes
    assert {expected} == set(tokens.values())
    assert 10 == len(tokens)


def test_ten_transcriptions_of_one_recording_read_from_its_wav_file_hold_its_blocks_once(models: Any) -> None:
    wav = recording(440)
    whisper = models("whisper")
    expected = generated(whisper, "whisper", Prompt(encoder=log_mel(wav)), NUM_NEW_TOKENS)
    with whisper.engine(block_size=BLOCK) as engine:
        # Each is read and analysed again, so only the content is equal.
        outputs = engine.generate([Prompt(encoder=log_mel(wav)) for _ in range(10)], GREEDY)
        assert [expected] * 10 == [output.token_ids for output in outputs]
        assert 4 == engine.stats().peak_blocks_held[cross_group(engine)]


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_without_prefix_caching_each_request_has_its_input_for_itself(models: Any, family: str) -> None:
    model, encoder, calls = models(family), encoder_inputs(family)[2], EncoderCalls()
    expected = generated(model, family, Prompt(encoder=encoder), NUM_NEW_TOKENS)
    num_blocks = -(-(50 if family == "whisper" else len(encoder)) // BLOCK)
    handle = calls.count(model)
    with model.engine(block_size=BLOCK, prefix_caching=False) as engine:
        outputs = engine.generate([Prompt(encoder=encoder)] * 3, GREEDY)
        assert 3 * num_blocks == engine.stats().peak_blocks_held[cross_group(engine)]
    handle.remove()
    assert [3] == calls.sizes  # inputs of equal lengths are encoded together
    assert [expected] * 3 == [output.token_ids for output in outputs]


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_a_later_request_finds_the_input_of_one_that_has_ended(models: Any, references: Any, family: str) -> None:
    expected, calls = references(family), EncoderCalls()
    with models(family).engine(block_size=4) as engine:
        served(engine, family)
        handle = calls.count(models(family))
        assert expected == served(engine, family)
        engine.reset_prefix_cache()
        assert [] == calls.sizes
        assert expected == served(engine, family)
        assert 4 == sum(calls.sizes)
        handle.remove()


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_a_decoder_prefix_is_found_after_the_same_input_and_after_no_other(models: Any, family: str) -> None:
    model, (first, second, *_) = models(family), encoder_inputs(family)
    shared = [START, *ids(9, 19)]
    longer = [*shared, *ids(15, 4)]
    expected = [
        generated(model, family, Prompt(encoder=encoder, decoder=longer), NUM_NEW_TOKENS) for encoder in (first, second)
    ]
    with model.engine(block_size=4) as engine:
        engine.generate([Prompt(encoder=first, decoder=shared)], GREEDY)
        hits = []
        for encoder in (first, second):
            before = engine.stats().cached_prompt_tokens
            (output,) = engine.generate([Prompt(encoder=encoder, decoder=longer)], GREEDY)
            hits.append((engine.stats().cached_prompt_tokens - before, output.token_ids))
    assert [(20, expected[0]), (0, expected[1])] == hits


def test_inputs_that_differ_in_one_number_share_nothing(models: Any) -> None:
    mel = log_mel(recording(440))
    other = mel.clone()
    other[0, 40, 50] += 1.0
    with models("whisper").engine(block_size=BLOCK) as engine:
        engine.generate([mel, other], GREEDY)
        assert 8 == engine.stats().peak_blocks_held[cross_group(engine)]


def test_a_step_encodes_no_more_new_tokens_than_it_computes_unless_one_input_has_more(models: Any) -> None:
    with models("bart").engine(max_num_batched_tokens=24) as engine:
        for start, count in enumerate((41, 12, 12, 12)):
            engine.add_request(Prompt(encoder=ids(start, count)), GREEDY)
        steps = []
        while engine.has_unfinished:
            before = engine.stats().computed_input_tokens
            engine.step()
            steps.append(engine.stats().computed_input_tokens - before)
    assert [41, 24, 12] == [tokens for tokens in steps if tokens]


# --- whatever ends a request ------------------------------------------------------------------------------------------


def assert_pool_as_before(engine: Engine) -> None:
    assert 0 == held_pages(engine)
    engine.reset_prefix_cache()
    pool = pool_of(manager_of(engine))
    assert (0, engine.plan.num_slabs) == (pool.num_cached, pool.num_idle_slabs)


@pytest.mark.parametrize(("family", "after"), few(4, product(FAMILIES, (0, 1, 4))))
def test_an_aborted_request_gives_its_blocks_back_and_leaves_those_that_others_hold(
    models: Any, references: Any, family: str, after: int
) -> None:
    expected = references(family)
    with models(family).engine(block_size=4) as engine:
        for index, prompt in enumerate(prompts(family)):
            engine.add_request(prompt, GREEDY, str(index))
        for _ in range(after):
            engine.step()
        for index in (2, 4, 5):
            engine.abort(str(index))
        last: dict[str, RequestOutput] = {}
        while engine.has_unfinished:
            last |= {output.request_id: output for output in engine.step()}
        others = (0, 1, 3, 6, 7)
        assert [expected[index] for index in others] == [last[str(index)].token_ids for index in others]
        assert_pool_as_before(engine)


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_an_encoder_that_raises_ends_the_requests_of_its_step_alone(models: Any, references: Any, family: str) -> None:
    expected = references(family)
    loaded: Any = models(family).loaded
    with models(family).engine(block_size=4) as engine:
        engine.add_request(prompts(family)[0], GREEDY, "first")
        engine.step()

        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        handle = loaded.model.get_encoder().register_forward_pre_hook(fail)
        engine.add_request(prompts(family)[1], GREEDY, "second")
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
        handle.remove()
        assert {"error"} == {output.finish_reason for output in engine.step()}
        assert expected == served(engine, family)
        assert_pool_as_before(engine)


# --- the self-check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "backend"), cover_values(FAMILIES, ["torch", "torch_reference"]))
def test_the_self_check_passes(models: Any, family: str, backend: str) -> None:
    with models(family).engine(self_check=True, backend=backend) as engine:
        assert (0, 0) == (held_pages(engine), engine.stats().steps)


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_the_self_check_finds_positions_that_are_not_passed(
    models: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without both of the two ways, of which a family has one or both.
    monkeypatch.setattr("kvframe_transformers.decoder_hooks.takes_position_ids", lambda module: False)
    monkeypatch.setattr(models(family).loaded, "_takes_decoder_positions", False)
    with pytest.raises(ModelError, match="gives other logits in a packed batch than alone"):
        models(family).engine(self_check=True)


def test_the_self_check_sees_a_wrong_table_of_biases(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvframe_transformers.attached.tables_of",
        lambda layers, modules, model: [
            (layer, torch.zeros(8, 4)) for layer in layers if "relative_bias" in layer.query
        ],
    )
    with pytest.raises(ModelError, match=r"from layer 'decoder\.block\.0\.layer\.0\.SelfAttention' on"):
        models("t5").engine(self_check=True)


# --- admission --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "prompt", "code"),
    [
        ("bart", Prompt(), "missing_input"),
        ("bart", Prompt(decoder=[START, 5]), "missing_input"),
        ("bart", [], "bad_input"),
        ("bart", [5, 128], "bad_input"),
        ("bart", [5, -1], "bad_input"),
        ("bart", [5, 0.5], "bad_input"),
        ("bart", ids(1, 257), "input_too_long"),
        ("bart", Prompt(encoder=[5], decoder=[]), "empty_prompt"),
        ("bart", Prompt(encoder=[5], decoder=[128]), "bad_token"),
        ("bart", Prompt(encoder=[5], decoder=ids(1, 256)), "prompt_too_long"),
        ("whisper", "some text", "bad_input"),
        ("whisper", [5, 6], "bad_input"),
        ("whisper", torch.zeros(80, 99), "bad_input"),
        ("whisper", torch.zeros(40, 100), "bad_input"),
        ("whisper", torch.full((80, 100), float("nan")), "bad_input"),
        ("whisper", torch.zeros(80, 100, dtype=torch.complex64), "bad_input"),
        ("whisper", torch.zeros(80, 0), "bad_input"),
        ("whisper", torch.empty(80, 100, device="meta"), "bad_input"),
        ("whisper", Prompt(decoder=[START]), "missing_input"),
        ("bart", 5, "bad_input"),
        ("bart", torch.tensor(5), "bad_input"),
        ("bart", torch.tensor([[5, 6]]), "bad_input"),
        ("bart", torch.empty(5, device="meta"), "bad_input"),
        ("bart", b"ab", "bad_input"),
        ("bart", {5, 6}, "bad_input"),
        ("bart", Prompt(encoder=[5], decoder=5), "bad_token"),
        ("bart", Prompt(encoder=[5], decoder=torch.tensor(5)), "bad_token"),
        ("llama", Prompt(encoder=[5], decoder=[5]), "extra_input"),
        ("llama", Prompt(), "empty_prompt"),
    ],
)
def test_an_input_that_cannot_be_served_is_refused_with_a_code(
    models: Any, family: str, prompt: Any, code: str
) -> None:
    with models(family).engine() as engine:
        with pytest.raises(RequestError) as caught:
            engine.add_request(prompt)
        assert code == caught.value.code
        assert (1, True) == (len(str(caught.value).splitlines()), len(str(caught.value)) < 200)
        for serve in (lambda: engine.generate([prompt]), lambda: engine.stream(prompt)):
            with pytest.raises(RequestError) as caught:
                serve()
            assert code == caught.value.code


def test_text_without_a_tokenizer_is_refused(models: Any) -> None:
    with models("bart").engine() as engine, pytest.raises(ModelError, match="has no tokenizer"):
        engine.add_request("some text")


@pytest.mark.parametrize("wrong", [5, b"ab", "some text", Prompt(encoder=[5], decoder="some text"), [[5]], ids(1, 300)])
def test_a_refused_prompt_leaves_the_others_of_its_batch(models: Any, wrong: Any) -> None:
    expected = generated(models("bart"), "bart", Prompt(encoder=[5, 6]), NUM_NEW_TOKENS)
    with models("bart").engine() as engine:
        first, refused, last = engine.generate([[5, 6], wrong, [5, 6]], GREEDY)
        assert (expected, expected) == (first.token_ids, last.token_ids)
        # Ids that were for the encoder are not the request's own.
        assert ("refused", ()) == (refused.finish_reason, refused.prompt_token_ids)
        assert 0 == held_pages(engine)


def test_features_too_short_for_a_token_are_refused() -> None:
    with pytest.raises(RequestError, match="too short for a token"):
        features_input(torch.zeros(80, 1), lambda shape: shape[1] // 2)


def test_a_prompt_of_two_parts_without_an_encoder_is_a_plain_one(models: Any) -> None:
    with models("llama").engine() as engine:
        first, second = engine.generate([Prompt(decoder=[5, 6]), [5, 6]], GREEDY)
    assert first.token_ids == second.token_ids


def test_arrays_and_tensors_are_one_input_whatever_their_dtype_says(models: Any) -> None:
    mel = log_mel(recording(440))
    with models("whisper").engine(block_size=BLOCK) as engine:
        outputs = engine.generate([mel, mel[0], mel.numpy(), mel.double()], GREEDY)
        assert 1 == len({output.token_ids for output in outputs})
        assert 4 == engine.stats().peak_blocks_held[cross_group(engine)]


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A random BART with a byte-pair tokenizer."""
    path = tmp_path_factory.mktemp("texts")
    save_tokenizer(path, trained_tokenizer([TEXT], 300))
    return TinyModel.save(path, "bart", vocab_size=300)


TEXT = "The encoder reads this sentence once, however many requests bring it. " * 3


def expected_text(model: TinyModel, encoder: str, decoder: str | None, num_new_tokens: int) -> str:
    loaded: Any = model.loaded
    prompt = Prompt(encoder=loaded.encode(encoder), decoder=loaded.start_token_ids(decoder))
    text = loaded.decode(generated(model, "bart", prompt, num_new_tokens))
    assert isinstance(text, str)
    return text


def test_text_goes_to_the_encoder_and_a_text_for_the_decoder_is_continued(texts: TinyModel) -> None:
    requests = [("The encoder reads", None), ("this sentence once", "however many")]
    expected = [expected_text(texts, encoder, decoder, 12) for encoder, decoder in requests]
    with texts.engine() as engine:
        params = SamplingParams(max_new_tokens=12)
        outputs = engine.generate([requests[0][0], Prompt(encoder=requests[1][0], decoder=requests[1][1])], params)
        assert expected == [output.text for output in outputs]
        pieces = [output.new_text for output in engine.stream(requests[0][0], params)]
        assert expected[0] == "".join(pieces)


def test_generate_reads_text_at_the_command_line(texts: TinyModel) -> None:
    expected = expected_text(texts, "bring it.", None, 6)
    arguments = ["--prompt", "bring it.", "--max-new-tokens", "6", "--memory", "4MiB", "--json"]
    (output,) = run_json("generate", str(texts.path), *arguments)["outputs"]
    assert (expected, [START]) == (output["text"], output["prompt_token_ids"])


def test_text_for_an_encoder_of_sound_is_refused_at_the_command_line(tmp_path: Any) -> None:
    save_tiny(tmp_path, "whisper")
    result = run("generate", str(tmp_path), "--prompt", "some text", "--memory", "4MiB")
    assert 2 == result.exit_code
    assert "reads features (input_features), a tensor or an array of numbers, not text" in result.output


# --- at the command line ----------------------------------------------------------------------------------------------


def test_the_plan_shows_the_encoders_group(tmp_path: Any) -> None:
    save_tiny(tmp_path, "whisper")
    result = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["plan", str(tmp_path), "--cache-memory", "4MiB"])
    assert 0 == result.exit_code, result.output
    (row,) = [line for line in result.output.splitlines() if "cross_attention" in line]
    assert "every encoder token" in row


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_generate_reads_prompts_as_the_encoders_input(family: str, tmp_path: Any) -> None:
    model = TinyModel.save(tmp_path, family)
    expected = generated(model, family, Prompt(encoder=ids(4, 17)), 5)
    (tmp_path / "prompts.jsonl").write_text(str(ids(4, 17)) + "\n")
    arguments = ["--prompt-token-ids", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "5", "--memory", "4MiB"]
    result = run("generate", str(tmp_path), *arguments)
    assert 0 == result.exit_code, result.output
    assert " ".join(map(str, expected)) in result.output
    (output,) = run_json("generate", str(tmp_path), *arguments, "--json", "--prompt-logprobs")["outputs"]
    # The continued tokens, as their log-probabilities are reported.
    assert ([START], [None]) == (output["prompt_token_ids"], output["prompt_logprobs"])
