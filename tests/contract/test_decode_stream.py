"""The text of tokens as they come, by the way that a loaded model has by default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe.contract import LoadedModel

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def decode_bytes(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


def decode_words(token_ids: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in token_ids)


def stream_of(decode: Callable[[Sequence[int]], str | None], prompt: Sequence[int], **options: Any) -> Any:
    model: Any = SimpleNamespace(decode=decode, decode_with_special_tokens=lambda token_ids: f"<s>{decode(token_ids)}")
    return LoadedModel.decode_stream(model, prompt, **options)


@given(prompt=st.binary(max_size=9), rest=st.binary(max_size=20), lengths=st.lists(st.integers(1, 9), max_size=20))
def test_bytes_have_the_text_that_they_have_at_once(prompt: bytes, rest: bytes, lengths: list[int]) -> None:
    before, full_text = decode_bytes(prompt), decode_bytes(prompt + rest)
    complete = before.rstrip(INCOMPLETE)
    incomplete, expected = before[len(complete) :], full_text[len(complete) :]
    while incomplete and expected[:1] == incomplete[0]:
        incomplete, expected = incomplete[1:], expected[1:]
    decode_next, text, start = stream_of(decode_bytes, prompt), "", 0
    for length in lengths:
        text += decode_next(rest[start : start + length], False)
        start += length
    assert expected == text + decode_next(rest[start:], True)


def test_a_character_comes_out_whole() -> None:
    decode_next = stream_of(decode_bytes, b"a")
    assert ["", "é", "", "", "漢"] == [decode_next([byte], False) for byte in "é漢".encode()]


@pytest.mark.parametrize(("options", "prompt"), [({}, [1, 2]), ({"special_tokens": True}, [])])
def test_a_space_after_the_prompt_is_part_of_the_text(options: dict[str, Any], prompt: list[int]) -> None:
    decode_next = stream_of(decode_words, prompt, **options)
    assert (" w3" if prompt else "w3", " w4") == (decode_next([3], False), decode_next([4], True))


def test_a_model_without_a_tokenizer_has_no_text() -> None:
    assert "" == stream_of(lambda token_ids: None, [1])([2, 3], True)
