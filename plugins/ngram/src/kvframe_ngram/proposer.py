"""Prompt lookup: find a request's last tokens earlier in its text, and propose the tokens that followed them.

If asked for, the text that other requests of the same salt generated is searched too.

The method is prompt lookup decoding (Saxena, 2023), transformers' ``prompt_lookup_num_tokens``. Here, a long request
has an index of its n-grams that grows with it, so a step costs the same at any length of the request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import ClassVar

import attrs
from kvframe_engine.contract import DraftRequest, Proposer

from kvframe_ngram.shared import SharedTexts

MOST_SEARCHED = 1024
"""The most tokens whose bytes are searched. A search takes about one microsecond, and to index two tokens as long."""


class NgramIndex:
    """The tokens of a sequence, and where its n-grams end.

    The bytes of a short sequence are searched. A longer sequence gets an index. Invariant of the index:
    ``_last[n-gram]`` is the last place where the n-gram ends. ``_before[end - 1]`` is the last place before ``end``
    where the same n-gram ends as at ``end``; 0 if there is none. ``_of_tokens`` and ``_token_before`` are the same for
    single tokens.
    """

    def __init__(self, size: int, most_searched: int = MOST_SEARCHED) -> None:
        """Start without tokens.

        Args:
            size: The number of tokens of an n-gram.
            most_searched: The most tokens that are searched without an index.
        """
        self._size, self._most_searched = size, most_searched
        self._tokens = array("I")
        self._last: dict[bytes, int] = {}
        self._before = array("Q")
        self._of_tokens: dict[int, int] = {}
        self._token_before = 0

    def read(self, token_ids: Sequence[int]) -> None:
        """Add the new tokens of the sequence. Its earlier tokens must be those of the last call."""
        self._tokens.extend(token_ids[len(self._tokens) :])
        if len(self._tokens) > self._most_searched:
            self._extend_index()

    def _extend_index(self) -> None:
        """Add the tokens to the index that are not in it."""
        tokens, size, start = self._tokens, self._size, len(self._before)
        data, width = tokens.tobytes() if start == 0 else b"", tokens.itemsize
        for end in range(start + 1, len(tokens) + 1):
            token = tokens[end - 1]
            self._token_before = self._of_tokens.get(token, 0)
            self._of_tokens[token] = end
            if end < size:
                self._before.append(0)
                continue
            gram = data[(end - size) * width : end * width] if data else tokens[end - size : end].tobytes()
            self._before.append(self._last.get(gram, 0))
            self._last[gram] = end

    def find(self, num_candidates: int, most: int) -> int:
        """Return the place where the longest match of the sequence's end ends, the last one of several; 0 for none.

        Args:
            num_candidates: The most places that are compared; later places come first.
            most: The most tokens of a match that are compared.
        """
        tokens, size = self._tokens, self._size
        stop = len(tokens)
        if stop < size:
            return 0
        found, longest = 0, 0
        data = tokens.tobytes() if stop <= self._most_searched else b""
        place = self._place_before(stop, size, data)
        while place and num_candidates:
            length = size
            while length < most and length < place and tokens[place - 1 - length] == tokens[stop - 1 - length]:
                length += 1
            if length > longest:
                found, longest = place, length
                if length == most:
                    break
            place, num_candidates = self._place_before(place, size, data), num_candidates - 1
        return found

    def find_token(self) -> int:
        """Return the last place before the end where the last token occurred; 0 if there is none."""
        if len(self._tokens) > self._most_searched:
            return self._token_before
        return self._place_before(len(self._tokens), 1, self._tokens.tobytes())

    def _place_before(self, place: int, size: int, data: bytes) -> int:
        """Return the last place before ``place`` where the last ``size`` tokens end too; 0 if there is none.

        Args:
            place: A place where they end.
            size: As many tokens as an n-gram has, or 1 if ``data`` is given.
            data: The bytes of all tokens, to be searched; empty if there is an index.
        """
        if not data:
            return self._before[place - 1]
        width = self._tokens.itemsize
        last, stop = data[-size * width :], (place - 1) * width
        while True:
            end = data.rfind(last, 0, stop) + size * width
            if end < size * width:
                return 0
            # The same bytes can lie across tokens.
            if end % width == 0:
                return end // width
            stop = end - end % width


def _whole(instance: object, attribute: attrs.Attribute[int], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{attribute.name} must be a whole number of at least 1, not {value!r}")


def _not_negative(instance: object, attribute: attrs.Attribute[int], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{attribute.name} must be a whole number of at least 0, not {value!r}")


@attrs.define(kw_only=True, eq=False)
class NgramProposer(Proposer):
    """Proposes the tokens that followed the request's last tokens when these occurred before.

    Attributes:
        max_drafts: The most draft tokens of a request in a step.
        min_match: The least tokens that must occur again. If fewer do, but the last token does, a request that is to
            get ``max_drafts`` drafts gets what followed that token: the host asks for so many while drafts are cheap.
        max_match: The most tokens that are compared to find the longest match.
        num_candidates: The most earlier places that are compared.
        shared_tokens: The most generated tokens of each salt that other requests of the salt may repeat; 0 for none. A
            request's own tokens come first.
    """

    name: ClassVar[str] = "ngram"

    max_drafts: int = attrs.field(default=8, validator=_whole)
    min_match: int = attrs.field(default=3, validator=_whole)
    max_match: int = attrs.field(default=16, validator=_whole)
    num_candidates: int = attrs.field(default=8, validator=_whole)
    shared_tokens: int = attrs.field(default=0, validator=_not_negative)
    _indexes: dict[str, NgramIndex] = attrs.field(init=False, factory=dict, repr=False)
    _shared: SharedTexts = attrs.field(
        init=False,
        repr=False,
        default=attrs.Factory(lambda self: SharedTexts(self.min_match, self.shared_tokens), True),
    )
    _num_shared: dict[str, int] = attrs.field(init=False, factory=dict, repr=False)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return, for each request, the tokens that followed its last tokens earlier."""
        drafts = []
        for request in requests:
            index = self._indexes.get(request.request_id)
            if index is None:
                index = self._indexes[request.request_id] = NgramIndex(self.min_match)
            index.read(request.token_ids)
            start = index.find(self.num_candidates, max(self.min_match, self.max_match))
            if not start and request.max_drafts == self.max_drafts > 1:
                start = index.find_token()
            found: list[int] = []
            if start:
                # At the end of the sequence, the proposal goes on at its start: the text may repeat itself.
                period = len(request.token_ids) - start
                found = [request.token_ids[start + place % period] for place in range(request.max_drafts)]
            others = self._of_others(request) if self.shared_tokens else []
            drafts.append(found or others)
        return drafts

    def _of_others(self, request: DraftRequest) -> list[int]:
        """Return the tokens that followed a request's last tokens in its salt's texts, and share its own new tokens."""
        texts, known = self._shared[request.cache_salt], len(request.token_ids)
        found: list[int] = []
        if known >= self.min_match:
            # The search comes first, because the request's own shared tokens end with the same n-gram.
            found = texts.find(request.token_ids[known - self.min_match : known], request.max_drafts)
        start = self._num_shared.get(request.request_id, request.num_prompt_tokens)
        texts.read(request.request_id, request.token_ids[start:known])
        self._num_shared[request.request_id] = known
        return found

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the indexes of requests. Their generated tokens stay for other requests."""
        for request_id in request_ids:
            self._indexes.pop(request_id, None)
            self._num_shared.pop(request_id, None)
