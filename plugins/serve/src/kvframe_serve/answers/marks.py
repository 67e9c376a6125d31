"""Finds marks in a text that arrives in parts, and holds back what may be the beginning of one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache


class Marks:
    """A set of marks. Of two marks that begin at one character, the longer one is found."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Prepare to find the marks ``texts``."""
        sorted_texts = sorted(filter(None, texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, sorted_texts)) or r"(?!)")
        self._beginnings = {text[:length] for text in sorted_texts for length in range(1, len(text))}
        self._longest_beginning = max(map(len, self._beginnings), default=0)

    def find(self, text: str, start: int, is_whole: bool) -> tuple[int, str]:
        """Return where the plain text from ``start`` on ends, and the mark that follows it.

        The mark is empty if there is none. Then what follows the plain text may become a mark if more text is added.

        Args:
            text: The text.
            start: Where to begin.
            is_whole: Whether no text will be added.
        """
        stop = len(text) if is_whole else self._begin_of_rest(text, start)
        match = self._pattern.search(text, start)
        if match is None or match.start() >= stop:
            return stop, ""
        return match.start(), match[0]

    def remove(self, text: str) -> str:
        """Return a text without its marks."""
        return self._pattern.sub("", text)

    def _begin_of_rest(self, text: str, start: int) -> int:
        for begin in range(max(start, len(text) - self._longest_beginning), len(text)):
            if text[begin:] in self._beginnings:
                return begin
        return len(text)


@lru_cache(maxsize=256)
def marks_of(texts: frozenset[str]) -> Marks:
    """Return ``Marks``. Requests share them: a tokenizer may have a thousand special tokens."""
    return Marks(texts)
