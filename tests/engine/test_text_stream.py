"""The text of a request: no token twice, and cut before the first of several stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from kvframe_engine.requests.stops import NO_STOPS, StopStrings
from kvframe_engine.requests.text import TextStream
from kvframe_transformers.windows import decode_by_windows


def bytes_stream(token_ids: Sequence[int]) -> Callable[[Sequence[int], bool], str]:
    return decode_by_windows(lambda window: bytes(window).decode(errors="replace"), token_ids)


def stream_of(prompt: bytes = b"", stop: StopStrings = NO_STOPS) -> TextStream:
    return TextStream(bytes_stream, prompt, stop)


def test_the_first_of_several_stop_strings_cuts_the_text() -> None:
    stream = stream_of(stop=StopStrings(("d", "bc", "c")))
    stream.feed(b"abcde", final=False)
    assert ("a", True) == (stream.text, stream.stopped)


def test_a_stop_string_of_several_tokens_is_found_when_its_last_byte_comes() -> None:
    stream = stream_of("깰깰".encode(), StopStrings(("깰",)))
    for count in range(7, 10):
        stream.feed("깰깰깰".encode()[:count], final=False)
    assert ("", True) == (stream.text, stream.stopped)


def test_what_looked_like_a_stop_string_comes_out_at_the_end() -> None:
    stream = stream_of(stop=StopStrings(("<stop>",)))
    stream.feed(b"a<st", final=False)
    assert "a" == stream.text
    stream.feed(b"a<st", final=True)
    assert "a<st" == stream.text


@pytest.mark.parametrize("final", [False, True])
def test_tokens_that_are_read_again_add_nothing(final: bool) -> None:
    stream = stream_of(b"the ")
    for _ in range(3):
        stream.feed(b"the fox", final=final)
    assert "fox" == stream.text


def test_a_prompt_alone_has_no_text() -> None:
    stream = stream_of("né".encode()[:-1])
    stream.feed("né".encode()[:-1], final=True)
    assert "" == stream.text


def test_no_stream_is_opened_before_the_first_token() -> None:
    stream = TextStream(lambda token_ids: pytest.fail("it was opened"), b"the")
    stream.feed(b"the", final=False)
    assert "" == stream.text
