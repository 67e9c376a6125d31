"""Turns token ids into text as they come, with a tokenizer that only decodes lists of ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

_WHOLE = re.compile(rf"[^\s{_INCOMPLETE}]")

_NUM_FIRST = 4
"""Prompt tokens that are decoded with the first generated ones, unless more are needed."""

_WINDOW = 16
"""Tokens that are decoded together. If there are more, the window moves on to the last ones."""

_MAX_WINDOW = 256
"""From this many tokens on, the window moves on even if its text then has another beginning."""

_MAX_WAITING = 16
"""Tokens without a whole character for which the text waits. Then their incomplete characters are certain."""

_MAX_PARTS = 3
"""The most replacement characters that one incomplete character of UTF-8 can have."""


def decode_by_windows(
    decode: Callable[[Sequence[int]], str],
    token_ids: Sequence[int],
    decode_open: Callable[[Sequence[int]], str] | None = None,
) -> Callable[[Sequence[int], bool], str]:
    """Return a function that decodes the tokens after a prompt as they come, as ``LoadedModel.decode_stream`` says.

    Each call decodes the new tokens together with some before them, because the text of a token may depend on its
    neighbours. The window of these tokens begins where decoding from there gives the end of the text that decoding from
    further back gives, and after at least one whole character that is no space. So the text is what ``decode`` gives
    for all tokens, if ``decode`` changes a character only because of tokens within the window.

    A call decodes its new tokens and 4 to 16 others. If no place in the text is safe, for example in many tokens
    without text, the window doubles up to 256 tokens, the most that a new token costs. The first call decodes as much
    of the prompt as it needs for a safe place, at worst the prompt 1.3 times.

    Args:
        decode: Returns the text of token ids. A character that is incomplete at the end is a replacement character.
        token_ids: The prompt.
        decode_open: Returns the beginning of the text of ``decode`` that tokens to come cannot change; None if they
            only add to it, apart from an incomplete character.
    """
    return _Windows(decode, token_ids, decode_open or decode)


class _Windows:
    """The window of one request.

    Invariant: ``_shown`` is the beginning of the text of ``_window`` that was returned, or that the prompt has.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        token_ids: Sequence[int],
        decode_open: Callable[[Sequence[int]], str],
    ) -> None:
        self._decode = decode
        self._decode_open = decode_open
        self._window, self._shown = self._end_of(token_ids)
        self._has_returned = False
        self._max_len = _WINDOW
        self._num_waiting = 0

    def __call__(self, token_ids: Sequence[int], final: bool) -> str:
        self._window.extend(token_ids)
        self._num_waiting += len(token_ids)
        if final:
            return self._new_of(self._decode(self._window))
        text = self._decode_open(self._window)
        whole_text = text.rstrip(_INCOMPLETE)
        if len(whole_text) < len(text) and self._num_waiting > _MAX_WAITING:
            whole_text = text[: max(len(whole_text), len(text) - _MAX_PARTS)]
        if self._shown.startswith(whole_text):
            new_text = ""
        else:
            new_text = self._new_of(whole_text)
            self._num_waiting = 0 if len(whole_text) == len(text) else len(token_ids)
        if len(self._window) > self._max_len:
            self._move_on(text)
        return new_text

    def _new_of(self, text: str) -> str:
        """Return what the text of the window has after the text that was returned."""
        shown, self._shown = self._shown, text
        if text.startswith(shown):
            new_text = text[len(shown) :]
        elif not self._has_returned:  # the first tokens change the end of the prompt's text
            differing = (index for index, pair in enumerate(zip(shown, text, strict=False)) if pair[0] != pair[1])
            new_text = text[next(differing, len(text)) :]
        else:
            # The new tokens change text that was returned already. It stays, and they are decoded by themselves.
            new_text = self._decode(self._window[len(self._window) - self._num_waiting :])
        self._has_returned = self._has_returned or bool(new_text)
        return new_text

    def _end_of(self, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """Return the last tokens of a prompt that decide about the text after it, and their text."""
        num_tokens, num_more = _NUM_FIRST, 4 * _NUM_FIRST
        tokens = list(token_ids[-num_tokens:])
        text = self._decode(tokens)
        while len(token_ids) > num_tokens:
            more_tokens = list(token_ids[-num_more:])
            more_text = self._decode(more_tokens)
            if _is_safe(text, more_text, len(text)):
                break
            num_tokens, num_more = num_more, 4 * num_more
            tokens, text = more_tokens, more_text
        return tokens, text

    def _move_on(self, text: str) -> None:
        """Leave out the first tokens of the window, if the others have the same text without them."""
        tokens = self._window[-(self._max_len // 4) :]
        last_text = self._decode_open(tokens)
        num_shown = max(0, len(last_text) + len(self._shown) - len(text))
        if _is_safe(last_text, text, num_shown) or self._max_len >= _MAX_WINDOW:
            # The end of the prompt's text may be longer than the part of it that is certain.
            self._shown = last_text[:num_shown] + self._shown[len(text) :]
            self._window, self._max_len = tokens, _WINDOW
        else:
            self._max_len *= 2


def _is_safe(text: str, more_text: str, num_shown: int) -> bool:
    """Return whether the text of some tokens is the end of the text of more tokens, apart from its own beginning."""
    match = _WHOLE.search(text, 0, num_shown)
    return match is not None and more_text.endswith(text[match.start() :])
