"""Keep the tokens that requests of a salt generated, so that other requests of the salt can repeat them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

MAX_SALTS = 256
"""The most salts whose tokens are kept; the least recently used salt is dropped first."""


class GeneratedTexts:
    """The tokens that the requests of one salt generated lately, and the last place where each of their n-grams ended.

    Invariant: every n-gram in ``_last`` is in the text that its entry names. Together the texts have at most ``most``
    tokens, unless there is only one text.
    """

    def __init__(self, size: int, most: int) -> None:
        """Start without a text.

        Args:
            size: The number of tokens of an n-gram.
            most: The most tokens that are kept; the oldest request's tokens are dropped first.
        """
        self._size, self._most = size, most
        self._texts: OrderedDict[str, array[int]] = OrderedDict()
        self._last: dict[bytes, tuple[array[int], int]] = {}
        self.num_tokens = 0

    def read(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add the next generated tokens of a request."""
        text = self._texts.setdefault(request_id, array("I"))
        for token in token_ids:
            text.append(token)
            if len(text) >= self._size:
                self._last[text[-self._size :].tobytes()] = text, len(text)
        self.num_tokens += len(token_ids)
        while self.num_tokens > self._most and len(self._texts) > 1:
            self._drop(*self._texts.popitem(last=False))

    def find(self, end: Sequence[int], most: int) -> list[int]:
        """Return at most ``most`` tokens that followed the n-gram ``end`` at its last place; none if it is unknown."""
        text, place = self._last.get(array("I", end).tobytes(), (array("I"), 0))
        return text[place : place + most].tolist()

    def _drop(self, _: str, text: array[int]) -> None:
        self.num_tokens -= len(text)
        for stop in range(self._size, len(text) + 1):
            gram = text[stop - self._size : stop].tobytes()
            if self._last.get(gram, (None, 0))[0] is text:
                del self._last[gram]


class SharedTexts:
    """The generated texts of each salt. Requests of one salt never see texts of another."""

    def __init__(self, size: int, most: int) -> None:
        """Start without a salt; the arguments are those of ``GeneratedTexts``."""
        self._size, self._most = size, most
        self._of_salt: OrderedDict[str, GeneratedTexts] = OrderedDict()

    def __getitem__(self, salt: str) -> GeneratedTexts:
        """Return the texts of a salt."""
        texts = self._of_salt.get(salt)
        if texts is None:
            texts = self._of_salt[salt] = GeneratedTexts(self._size, self._most)
            if len(self._of_salt) > MAX_SALTS:
                self._of_salt.popitem(last=False)
        self._of_salt.move_to_end(salt)
        return texts

    def __len__(self) -> int:
        """Return the number of salts."""
        return len(self._of_salt)
