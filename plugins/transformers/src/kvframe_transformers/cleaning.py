"""Cleans up the spaces of a text as it comes, as transformers' ``clean_up_tokenization`` does for a whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvframe_transformers.token_texts import without_common

_REPLACEMENTS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""What ``PreTrainedTokenizerBase.clean_up_tokenization`` replaces, in this order. Each begins with a space."""

_NUM_PROMPT_CHARS = 64
"""Characters at the end of a prompt that are cleaned up too. The longest match has six."""


class CleanedText:
    """The cleaned text of one request.

    All text together is the cleaned text of all tokens after its common beginning with the cleaned text of the prompt.
    It is exactly that if the last 64 characters of the prompt are all of it, or hold a space between two words, and the
    new tokens change nothing of the prompt's text before it is cleaned up.

    Invariant: ``_held[i]`` is the text before the ``i``-th replacement that may begin its pattern.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], decode_next: Decoder) -> None:
        """Start after a prompt.

        Args:
            decode: Returns text that is not cleaned up.
            token_ids: The prompt.
            decode_next: Returns the text of new tokens, not cleaned up.
        """
        num_tokens = _NUM_PROMPT_CHARS
        while len(text := decode(token_ids[-num_tokens:])) < _NUM_PROMPT_CHARS and num_tokens < len(token_ids):
            num_tokens *= 4
        self._decode_next = decode_next
        self._held = [""] * len(_REPLACEMENTS)
        self._clean_up(text, False)
        held_texts = self._held.copy()
        self._prompt_end = self._clean_up("", True)
        self._held = held_texts

    def __call__(self, token_ids: Sequence[int], final: bool) -> str:
        """Return the cleaned text that is certain after these tokens.

        Args:
            token_ids: The tokens after those of the last call.
            final: Whether no more tokens follow.
        """
        text = self._clean_up(self._decode_next(token_ids, final), final)
        if self._prompt_end and text:
            self._prompt_end, text = without_common(self._prompt_end, text)
        return text

    def _clean_up(self, text: str, final: bool) -> str:
        """Apply each replacement to what the one before it gives."""
        if " " not in text and not any(self._held):
            return text
        for index, (pattern, replacement) in enumerate(_REPLACEMENTS):
            *parts, open_end = (self._held[index] + text).split(pattern)
            num_sure = len(open_end) - (0 if final else _num_begun(open_end, pattern))
            text = "".join(part + replacement for part in parts) + open_end[:num_sure]
            self._held[index] = open_end[num_sure:]
        return text


def _num_begun(text: str, pattern: str) -> int:
    """Return the number of characters at the end of a text that may begin a pattern."""
    return next((size for size in range(len(pattern) - 1, 0, -1) if text.endswith(pattern[:size])), 0)


Decoder = Callable[[Sequence[int], bool], str]
