"""Pinning a prompt's prefix in an engine: it is computed once, always hit afterwards, and changes no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kvframe_engine.requests.request import SamplingParams

from kvframe import Engine
from kvframe.contract.errors import RequestError
from tests.cache.plans import evict_all
from tests.covering import keep
from tests.engine.scripted_model import ScriptedModel
from tests.models.serving import GREEDY, TinyModel, held_pages, ids
from tests.support.engines import manager_of

SYSTEM = ids(3, 37)
ASKED = [[*SYSTEM, *ids(6, 3)], [*SYSTEM, *ids(7, 19)]]


@pytest.fixture(
    scope="module", params=keep(["mistral", "gemma3_text", "mamba2", "qwen3_next"], "gemma3_text", "mamba2")
)
def tiny(request: pytest.FixtureRequest, models: Callable[[str], TinyModel]) -> TinyModel:
    """A window, windows and full attention, states, gated delta rules and full attention."""
    return models(request.param)


def flood(engine: Engine) -> None:
    """Serve one-off prompts until all unpinned cached blocks were evicted."""
    for number in range(40, 60):
        engine.generate([ids(number, 60)], SamplingParams(max_new_tokens=1))


def found(engine: Engine) -> int:
    return engine.stats().cached_prompt_tokens


def test_a_pinned_prefix_is_found_after_a_flood_and_gives_the_same_tokens(tiny: TinyModel) -> None:
    memory = 4 * tiny.tight_memory(96, block_size=4, max_model_len=96)
    with tiny.engine(block_size=4, max_model_len=96, memory=memory) as engine:
        expected = [output.token_ids for output in engine.generate(ASKED, GREEDY)]
        pin = engine.pin_prefix(SYSTEM)
        kept = len(SYSTEM) // engine.plan.alignment * engine.plan.alignment
        assert kept == pin.num_tokens > 0
        flood(engine)
        assert engine.stats().evictions > 0
        before = found(engine)
        assert expected == [output.token_ids for output in engine.generate(ASKED, GREEDY)]
        assert 2 * kept <= found(engine) - before
        engine.unpin(pin)
        assert 0 == held_pages(engine)
        evict_all(manager_of(engine))
        before = found(engine)
        assert expected[:1] == [output.token_ids for output in engine.generate(ASKED[:1], GREEDY)]
        assert before == found(engine)


def test_others_go_on_while_a_prefix_is_computed() -> None:
    with ScriptedModel("0123456789 and so on until it is over").engine(memory=64 * 1024) as engine:
        request_id = engine.add_request("ab")
        pin = engine.pin_prefix("012345678")
        assert 8 == pin.num_tokens
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        assert {request_id} == {output.request_id for output in outputs}
        assert "23456789 and so on until it is over" == "".join(output.new_text for output in outputs)


def test_a_prefix_is_pinned_for_its_salt() -> None:
    with ScriptedModel("x" * 40).engine(memory=64 * 1024) as engine:
        engine.pin_prefix("a system prompt", cache_salt="tenant")
        for salt, hit in (("", 0), ("tenant", 12)):
            before = found(engine)
            engine.generate(["a system prompt, and more"], cache_salt=salt)
            assert hit == found(engine) - before


def test_what_cannot_be_pinned_is_refused_in_one_sentence() -> None:
    model = ScriptedModel("x" * 40)
    with model.engine() as engine:
        for prompt, code in (("abc", "prompt_too_short"), ("", "empty_prompt"), ("a" * 64, "prompt_too_long")):
            with pytest.raises(RequestError) as refused:
                engine.pin_prefix(prompt)
            assert code == refused.value.code
        with pytest.raises(RequestError, match="cache_salt must be a string"):
            engine.pin_prefix("a system prompt", cache_salt=1)  # type: ignore[arg-type]
        pins = [engine.pin_prefix(letter * 32) for letter in "abcdefghijklm"]
        with pytest.raises(RequestError, match=r"^with these 32 tokens pinned") as refused:
            engine.pin_prefix("n" * 32)
        assert "no_capacity" == refused.value.code
        # A request of the greatest length fits beside all of them.
        (output,) = engine.generate(["y" * 20], SamplingParams(max_new_tokens=44, ignore_eos=True))
        assert (64, "length") == (20 + len(output.token_ids), output.finish_reason)
        assert all(pin.is_held for pin in pins)


def test_without_a_prefix_cache_nothing_is_pinned(tmp_path: Path) -> None:
    tiny = TinyModel.save(tmp_path, "llama")
    with (
        tiny.engine(prefix_caching=False) as engine,
        pytest.raises(RequestError, match=r"^this engine keeps no prefixes") as refused,
    ):
        engine.pin_prefix(SYSTEM)
    assert "no_prefix_caching" == refused.value.code


def test_a_prefix_whose_computing_fails_is_not_pinned() -> None:
    model = ScriptedModel("x" * 40)
    with model.engine() as engine:
        model.spoil = lambda tokens, logits: logits.fill_(float("nan"))
        with pytest.raises(RequestError, match="is not numbers"):
            engine.pin_prefix("a system prompt")
        assert (0, False) == (held_pages(engine), engine.has_unfinished)
