"""Tokens to text: the context on which a token's text depends, and the first of several stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


class Streams:
    """Streams over UTF-8 bytes, and how many tokens they decoded."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def start(self, context: Sequence[int]) -> Callable[[Sequence[int]], str]:
        pending: list[int] = []

        def decode_next(token_ids: Sequence[int]) -> str:
            self.num_decoded += len(token_ids)
            pending.extend(token_ids)
            text = decode_bytes(pending)
            if text.endswith("\N{REPLACEMENT CHARACTER}"):
                return ""
            pending.clear()
            return text

        return decode_next


def text_of(prompt: Sequence[int], rest: Sequence[int], streams: Streams) -> str:
    """Return the text of tokens that come one by one."""
    stream = TextStream(decode_bytes, prompt, decode_stream=streams.start)
    for count in range(1, len(rest) + 1):
        stream.feed([*prompt, *rest[:count]], final=count == len(rest))
    return stream.text


def test_a_stream_decodes_whatever_follows_a_prompt_that_ends_within_a_character() -> None:
    prompt, rest, streams = "né".encode()[:-1], "née, pas élevée".encode()[2:], Streams()
    assert "ée, pas élevée" == text_of(prompt, rest, streams)
    assert len(rest) - 1 == streams.num_decoded


def test_a_stream_that_finds_no_character_is_given_up() -> None:
    broken, streams = b"\xe6" * 20, Streams()
    assert "a" + "\N{REPLACEMENT CHARACTER}" * 20 + "bcd" == text_of(b"", b"a" + broken + b"bcd", streams)
    assert 1 + 17 == streams.num_decoded


def test_a_stream_that_raises_is_not_opened_again() -> None:
    opened: list[int] = []

    def fail(token_ids: Sequence[int]) -> str:
        raise ValueError

    def start(context: Sequence[int]) -> Callable[[Sequence[int]], str]:
        opened.append(len(context))
        return fail

    stream = TextStream(decode_bytes, [], decode_stream=start)
    for count in range(1, 4):
        stream.feed(b"abc"[:count], final=False)
    assert ("abc", [0]) == (stream.text, opened)
