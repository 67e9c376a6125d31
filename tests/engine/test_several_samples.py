"""Several samples of one prompt equal those of separate requests, and the prompt is computed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from kvframe_engine.engine import Engine
from kvframe_engine.requests.output import RequestOutput
from kvframe_engine.requests.request import SamplingParams

from kvframe.contract.errors import RequestError
from tests.covering import keep
from tests.models.serving import TinyModel, held_pages, ids
from tests.support.engines import manager_of

PARAMS = SamplingParams(n=4, max_new_tokens=9, temperature=1.5, seed=11)
PROMPT = ids(3, 45)
OTHERS = [ids(4, 30), ids(5, 21)]


@pytest.fixture(scope="module", params=keep(["llama", "gemma3_text", "jamba"], "gemma3_text", "jamba"))
def model(request: pytest.FixtureRequest, models: Callable[[str], TinyModel]) -> TinyModel:
    return models(request.param)


@pytest.fixture(scope="module")
def reference(model: TinyModel) -> list[tuple[int, ...]]:
    """Return the outputs of separate requests."""
    params = [attrs.evolve(PARAMS, n=1, seed=11 + sample) for sample in range(4)]
    with model.engine(prefix_caching=False) as engine:
        tokens = [output.token_ids for output in engine.generate([PROMPT] * 4, params)]
    assert len(set(tokens)) > 1
    return tokens


def tokens_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    assert [0, 1, 2, 3] == [output.sample for output in outputs]
    assert 1 == len({output.request_id for output in outputs})
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_samples_are_those_of_requests_by_themselves(
    model: TinyModel, reference: list[tuple[int, ...]], prefix_caching: bool
) -> None:
    with model.engine(prefix_caching=prefix_caching, audit=True) as engine:
        outputs = engine.generate([PROMPT, *OTHERS], [PARAMS, *[attrs.evolve(PARAMS, n=1)] * 2])
        assert reference == tokens_of(outputs[:4])
        stats = engine.stats()
        # All prompt tokens but the last once, then each sample's own tokens.
        assert len(PROMPT) - 1 + 4 * 9 + sum(len(prompt) + 8 for prompt in OTHERS) == stats.computed_tokens
        assert 0 == held_pages(engine)


def test_a_prompt_of_many_steps_is_computed_once(model: TinyModel, reference: list[tuple[int, ...]]) -> None:
    with model.engine(max_num_batched_tokens=8, prefix_caching=False) as engine:
        assert reference == tokens_of(engine.generate([PROMPT], PARAMS))
        assert len(PROMPT) - 1 + 4 * 9 == engine.stats().computed_tokens


def test_a_cached_prompt_is_not_computed_again(model: TinyModel, reference: list[tuple[int, ...]]) -> None:
    with model.engine(block_size=4) as engine:
        for _ in range(2):
            assert reference == tokens_of(engine.generate([PROMPT], PARAMS))


def test_samples_that_are_preempted_go_on(model: TinyModel, reference: list[tuple[int, ...]]) -> None:
    memory = model.tight_memory(55, block_size=4, max_num_batched_tokens=16)
    with model.engine(
        block_size=4, memory=memory, max_num_batched_tokens=16, prefix_caching=False, audit=True
    ) as engine:
        assert reference == tokens_of(engine.generate([PROMPT], PARAMS))
        assert engine.stats().preemptions > 0
        assert 0 == held_pages(engine)


def test_more_samples_than_may_run_at_once(model: TinyModel, reference: list[tuple[int, ...]]) -> None:
    for most in (1, 3):
        with model.engine(max_num_seqs=most) as engine:
            assert reference == tokens_of(engine.generate([PROMPT], PARAMS))


# --- streams, aborts, ids ---------------------------------------------------------------------------------------------


def expected(engine: Engine) -> list[tuple[int, ...]]:
    return tokens_of(engine.generate([PROMPT], PARAMS))


def test_a_stream_has_the_outputs_of_all_samples(llama: TinyModel) -> None:
    with llama.engine() as engine:
        tokens = expected(engine)
        streamed: dict[int, tuple[int, ...]] = dict.fromkeys(range(4), ())
        ended = set()
        for output in engine.stream(PROMPT, PARAMS):
            streamed[output.sample] += output.new_token_ids
            if output.finish_reason is not None:
                ended.add(output.sample)
        assert tokens == [streamed[sample] for sample in range(4)]
        assert {0, 1, 2, 3} == ended
        assert not engine.has_unfinished


def test_leaving_a_stream_early_ends_all_samples(llama: TinyModel) -> None:
    with llama.engine() as engine:
        stream = engine.stream(PROMPT, PARAMS)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert not engine.has_unfinished
        assert 0 == held_pages(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_abort_ends_all_samples(llama: TinyModel, num_steps: int) -> None:
    with llama.engine(audit=True) as engine:
        name = engine.add_request(PROMPT, PARAMS)
        for _ in range(num_steps):
            engine.step()
        engine.abort(name)
        outputs = engine.step()
        assert [0, 1, 2, 3] == sorted(output.sample for output in outputs)
        assert {(name, "aborted")} == {(output.request_id, output.finish_reason) for output in outputs}
        assert not engine.has_unfinished
        assert 0 == held_pages(engine)


def test_samples_go_on_when_the_first_has_ended(llama: TinyModel) -> None:
    with llama.engine() as engine:
        tokens = expected(engine)
        stop = attrs.evolve(PARAMS, stop_token_ids=frozenset({tokens[0][0]}))
        outputs = engine.generate([PROMPT], stop)
        assert ("stop", tokens[0][:1]) == (outputs[0].finish_reason, outputs[0].token_ids)
        for whole, output in zip(tokens, outputs, strict=True):
            assert whole[: len(output.token_ids)] == output.token_ids


def test_an_id_is_taken_until_all_samples_have_ended(llama: TinyModel) -> None:
    with llama.engine() as engine:
        engine.add_request(PROMPT, PARAMS, "mine")
        for taken in ("mine", "mine/2"):
            with pytest.raises(RequestError, match=f"a request '{taken}' is in the engine already"):
                engine.add_request(PROMPT, PARAMS, taken)
        while engine.has_unfinished:
            engine.step()
        assert "mine" == engine.add_request(PROMPT, PARAMS, "mine")


def test_a_refused_prompt_has_as_many_outputs(llama: TinyModel) -> None:
    with llama.engine() as engine:
        outputs = engine.generate([[], PROMPT], PARAMS)
        assert ["refused"] * 4 == [output.finish_reason for output in outputs[:4]]
        assert [0, 1, 2, 3] * 2 == [output.sample for output in outputs]


def test_every_sample_has_the_log_probabilities_of_the_prompt(llama: TinyModel) -> None:
    with llama.engine() as engine:
        alone = engine.generate([PROMPT], attrs.evolve(PARAMS, n=1, prompt_logprobs=True))[0].prompt_logprobs
        outputs = engine.generate([PROMPT], attrs.evolve(PARAMS, prompt_logprobs=True))
        assert alone is not None
        for output in outputs:
            assert output.prompt_logprobs is not None
            assert alone[1:] == pytest.approx(output.prompt_logprobs[1:], abs=1e-4)


def test_a_prompt_of_one_token_has_nothing_to_share(llama: TinyModel) -> None:
    with llama.engine() as engine:
        params = [attrs.evolve(PARAMS, n=1, seed=11 + sample) for sample in range(4)]
        alone = [output.token_ids for output in engine.generate([[7]] * 4, params)]
        assert alone == tokens_of(engine.generate([[7]], PARAMS))


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError()], ids=repr)
def test_a_copy_that_fails_costs_a_computation(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with llama.engine(audit=True, prefix_caching=False) as engine:
        tokens = expected(engine)

        def fail(*_: Any) -> None:
            raise error

        monkeypatch.setattr(manager_of(engine), "_copier", fail)
        assert tokens == expected(engine)
        assert 0 == held_pages(engine)


def test_a_copy_that_breaks_leaves_nothing_behind(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with llama.engine(audit=True, prefix_caching=False) as engine:
        tokens = expected(engine)

        def fail(*_: Any) -> None:
            monkeypatch.undo()
            raise ValueError("no such page")

        monkeypatch.setattr(manager_of(engine), "_copier", fail)
        engine.add_request(PROMPT, PARAMS)
        ended: dict[int, RequestOutput] = {}
        while engine.has_unfinished:
            ended |= {output.sample: output for output in engine.step()}
        (failed,) = (sample for sample in range(4) if ended[sample].finish_reason == "error")
        assert "no such page" in str(ended[failed].error)
        others = [sample for sample in range(4) if sample != failed]
        assert [tokens[sample] for sample in others] == [ended[sample].token_ids for sample in others]
        assert 0 == held_pages(engine)


def test_a_wrong_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="n must be a whole number of at least 1, not 0"):
        SamplingParams(n=0)
