"""Special tokens in the text of a request, if it asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvframe import SamplingParams
from kvframe.contract.errors import RequestError
from tests.engine.scripted_model import END, ScriptedModel

SCRIPT = "abcd~call~"


class SpecialModel(ScriptedModel):
    """A model with two special tokens: ``~`` and its end token."""

    def decode(self, token_ids: Sequence[int]) -> str | None:
        return super().decode([token for token in token_ids if token != ord("~")])

    def decode_with_special_tokens(self, token_ids: Sequence[int]) -> str | None:
        if not self.tokenizer:
            return None
        return bytes(token_ids).decode(errors="replace").replace("\0", "<end>").replace("~", "<mark>")


def text_of(params: SamplingParams, prompt: str = "abcd") -> tuple[str, str | None]:
    """Return the text of a request, which is that of its stream, too."""
    with SpecialModel(SCRIPT).engine() as engine:
        (output,) = engine.generate([prompt], params)
        assert output.text == "".join(part.new_text for part in engine.stream(prompt, params))
    return output.text, output.finish_reason


def test_special_tokens_are_shown_but_for_the_one_that_ended_the_request() -> None:
    assert ("<mark>call<mark>", "stop") == text_of(SamplingParams(special_tokens=True))
    assert ("call", "stop") == text_of(SamplingParams())


def test_an_end_token_that_ends_nothing_is_shown() -> None:
    params = SamplingParams(special_tokens=True, ignore_eos=True, max_new_tokens=8)
    assert ("<mark>call<mark><end><end>", "length") == text_of(params)


@pytest.mark.parametrize(("special_tokens", "expected"), [(False, "cal"), (True, "<mark>ca")])
def test_a_stop_token_that_is_not_special_has_its_text_unless_special_tokens_are_shown(
    special_tokens: bool, expected: str
) -> None:
    params = SamplingParams(special_tokens=special_tokens, stop_token_ids=[ord("l")])
    assert (expected, "stop") == text_of(params)


def test_a_special_token_may_be_a_stop_string() -> None:
    params = SamplingParams(special_tokens=True, stop=["l<mark>"])
    assert ("<mark>cal", "stop") == text_of(params)


def test_the_end_token_of_a_prompt_is_not_taken_for_the_end_of_a_request() -> None:
    params = SamplingParams(special_tokens=True, max_new_tokens=1)
    assert ("<mark>", "length") == text_of(params, "abc" + chr(END))


@pytest.mark.parametrize("model", [ScriptedModel(SCRIPT), SpecialModel(SCRIPT, tokenizer=False)])
def test_a_model_that_cannot_show_special_tokens_says_so(model: ScriptedModel) -> None:
    with model.engine() as engine, pytest.raises(RequestError, match="scripted cannot show special tokens") as refusal:
        engine.add_request([1, 2], SamplingParams(special_tokens=True))
    assert "bad_params" == refusal.value.code
