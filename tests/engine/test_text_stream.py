"""Tokens to text: the context on which a token's text depends, and the first of several stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from kvframe.engine.requests.stops import StopStrings
from kvframe.engine.requests.text import TextStream


def decode_bytes(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


def decode_words(token_ids: Sequence[int]) -> str:
    """Put a space between words and none at the start, like tokenizers whose tokens begin with a space."""
    return " ".join(f"w{token}" for token in token_ids)


def test_a_space_after_the_prompt_is_part_of_the_text() -> None:
    stream = TextStream(decode_words, [1, 2])
    stream.feed([1, 2, 3], final=False)
    stream.feed([1, 2, 3, 4], final=True)
    assert " w3 w4" == stream.text


def test_a_character_that_the_prompt_began_is_part_of_the_text() -> None:
    prompt = list("né".encode())[:-1]
    stream = TextStream(decode_bytes, prompt)
    stream.feed(list("née".encode()), final=True)
    assert "ée" == stream.text


def test_the_first_of_several_stop_strings_cuts_the_text() -> None:
    stream = TextStream(decode_bytes, [], StopStrings(("d", "bc", "c")))
    stream.feed(list(b"abcde"), final=False)
    assert ("a", True) == (stream.text, stream.stopped)


def test_what_looked_like_a_stop_string_comes_out_at_the_end() -> None:
    stream = TextStream(decode_bytes, [], StopStrings(("<stop>",)))
    stream.feed(list(b"a<st"), final=False)
    assert "a" == stream.text
    stream.feed(list(b"a<st"), final=True)
    assert "a<st" == stream.text


def test_a_token_is_decoded_in_one_call_with_few_others() -> None:
    lens: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        lens.append(len(token_ids))
        return decode_words(token_ids)

    prompt, text = [0] * 100, [*range(64)]
    stream = TextStream(decode, prompt)
    for count in range(1, 65):
        stream.feed([*prompt, *text[:count]], final=count == 64)
    assert "".join(f" w{token}" for token in text) == stream.text
    assert len(lens) <= 64 + 64 // 10
    assert max(lens) <= 17


def test_characters_of_several_tokens_come_out_whole_at_every_window() -> None:
    text = "aé漢🙂" * 9
    stream, parts = TextStream(decode_bytes, [], StopStrings(())), []
    for count in range(1, len(text.encode()) + 1):
        before = stream.text
        stream.feed(list(text.encode()[:count]), final=False)
        parts.append(stream.text[len(before) :])
    assert list(text) == [part for part in parts if part]
