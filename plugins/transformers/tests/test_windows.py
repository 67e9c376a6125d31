"""Tokens to text by windows: the tokens on which a token's text depends are decoded with it, and few others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvframe_transformers.windows import decode_by_windows

Decode = Callable[[Sequence[int]], str]


def decode_bytes(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


def decode_words(token_ids: Sequence[int]) -> str:
    """Put a space between words and none at the start, like tokenizers whose tokens begin with a space."""
    return " ".join(f"w{token}" for token in token_ids)


def decode_stripped(token_ids: Sequence[int]) -> str:
    """Strip the text, like tokenizers of SentencePiece in Python; 32 is a space, and from 100 on nothing."""
    return "".join(chr(token) for token in token_ids if token < 100).strip()


def text_of(decode: Decode, prompt: Sequence[int], rest: Sequence[int], lengths: Sequence[int] = ()) -> str:
    """Return the text of tokens that come in calls of these lengths, and then one by one."""
    decode_next, text, start = decode_by_windows(decode, prompt), "", 0
    for length in [*lengths, *[1] * len(rest)]:
        if start < len(rest):
            text += decode_next(rest[start : start + length], False)
        start += length
    return text + decode_next([], True)


def test_a_space_after_the_prompt_is_part_of_the_text() -> None:
    assert " w3 w4" == text_of(decode_words, [1, 2], [3, 4])


def test_a_space_before_tokens_without_text_is_part_of_the_text() -> None:
    assert " b" == text_of(decode_stripped, [*b"a"] + [100] * 20, [100, 32, 100, 100, ord("b")])


@pytest.mark.parametrize("num_spaces", [1, 5, 40, 200])
def test_spaces_that_the_tokenizer_shows_only_before_a_word_come_with_the_word(num_spaces: int) -> None:
    assert " " * num_spaces + "b" == text_of(decode_stripped, b"a", [32] * num_spaces + [ord("b")])


def test_a_prompt_without_text_strips_the_first_space() -> None:
    assert "b c" == text_of(decode_stripped, [100] * 50, b" b c")


def test_a_character_that_the_prompt_began_is_part_of_the_text() -> None:
    assert "ée" == text_of(decode_bytes, "né".encode()[:-1], "ée".encode()[1:])


def test_a_character_that_the_prompt_began_and_nothing_completes_is_part_of_the_prompt() -> None:
    assert "e" == text_of(decode_bytes, "né".encode()[:-1], b"e")


def test_characters_of_several_tokens_come_out_whole() -> None:
    text, parts = "aé漢🙂" * 9, []
    decode_next = decode_by_windows(decode_bytes, [])
    for byte in text.encode():
        parts.append(decode_next([byte], False))
    assert list(text) == [part for part in parts if part]


def test_bytes_that_are_no_character_come_out_while_others_follow() -> None:
    decode_next, text = decode_by_windows(decode_bytes, b"a"), ""
    for _ in range(20):
        text += decode_next([0xE6], False)
    assert "\N{REPLACEMENT CHARACTER}" * 14 == text
    assert "\N{REPLACEMENT CHARACTER}" * 5 + "漢" == decode_next("漢".encode()[1:], False)


@given(prompt=st.binary(max_size=30), rest=st.binary(max_size=60), lengths=st.lists(st.integers(1, 40), max_size=10))
def test_bytes_have_the_text_that_they_have_at_once(prompt: bytes, rest: bytes, lengths: list[int]) -> None:
    before, text = decode_bytes(prompt), decode_bytes(prompt + rest)
    complete = before.rstrip("\N{REPLACEMENT CHARACTER}")
    incomplete = before[len(complete) :]
    expected = text[len(complete) :]
    while incomplete and expected[:1] == incomplete[0]:
        incomplete, expected = incomplete[1:], expected[1:]
    assert expected == text_of(decode_bytes, prompt, rest, lengths)


def test_text_that_was_returned_stays_if_later_tokens_change_it() -> None:
    def decode(token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids)).replace("ab", "c")

    assert "ab!" == text_of(decode, [], b"ab!")


def test_text_that_later_tokens_may_change_waits_for_them() -> None:
    def decode(token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids)).replace("ab", "c")

    decode_next = decode_by_windows(decode, b"a", lambda token_ids: decode(token_ids).removesuffix("a"))
    parts = [decode_next(bytes([token]), False) for token in b"baxa"]
    assert (["c", "", "ax", ""], "a") == (parts, decode_next([], True))


@pytest.mark.parametrize("decode", [decode_words, decode_bytes, decode_stripped])
def test_a_token_is_decoded_with_few_others(decode: Decode) -> None:
    lens: list[int] = []

    def counted(token_ids: Sequence[int]) -> str:
        lens.append(len(token_ids))
        return decode(token_ids)

    prompt, rest = b"A" * 100, bytes(range(33, 97))
    assert decode([*prompt, *rest])[len(decode(prompt)) :] == text_of(counted, prompt, rest)
    assert len(lens) <= 64 + 64 // 8
    assert max(lens) <= 17


@pytest.mark.parametrize("silent", [100, 32])
def test_tokens_without_text_cost_a_window_each_at_most(silent: int) -> None:
    lens: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        lens.append(len(token_ids))
        return decode_stripped(token_ids)

    text_of(decode, b"ab", [silent] * 1000)
    assert max(lens) <= 257
