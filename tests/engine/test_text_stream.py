"""Tokens to text: the context that a token's text depends on, and the first of several stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from kvframe.engine.requests.stops import StopStrings
from kvframe.engine.requests.text import TextStream


def decode_bytes(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


def decode_words(token_ids: Sequence[int]) -> str:
    """Put a space between words and none at the start, as tokenizers do whose tokens begin with a space."""
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
