"""Prompt lookup: finds a request's last tokens earlier, and proposes what followed there.

They are looked up in the same request, and if asked in what other requests of its salt generated.

The idea is that of prompt lookup decoding (Saxena, 2023), which transformers has as ``prompt_lookup_num_tokens``. Here
each request has an index of its n-grams that grows with it, so that a step costs the same however long a request is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvframe.contract import DraftRequest, Proposer
from kvframe_ngram.shared import SharedTexts


class NgramIndex:
    """Where each n-gram of a sequence of tokens ends.

    Invariant: ``_last[n-gram]`` is where it ended last, ``_before[end]`` where the n-gram that ends at ``end`` ended
    before; 0 for nowhere.
    """

    def __init__(self, size: int) -> None:
        """Start with no tokens; ``size`` is the tokens of an n-gram."""
        self._size = size
        self._tokens = array("I")
        self._last: dict[bytes, int] = {}
        self._before = array("Q")

    def read(self, token_ids: Sequence[int]) -> None:
        """Add the tokens that were not read yet; the others are those that were read before."""
        size, start = self._size, len(self._tokens)
        self._tokens.extend(token_ids[start:])
        data, width = self._tokens.tobytes() if start == 0 else b"", self._tokens.itemsize
        for end in range(start + 1, len(self._tokens) + 1):
            if end < size:
                self._before.append(0)
                continue
            gram = data[(end - size) * width : end * width] if data else self._tokens[end - size : end].tobytes()
            self._before.append(self._last.get(gram, 0))
            self._last[gram] = end

    def find(self, num_candidates: int, most: int) -> int:
        """Return where the longest known match of the sequence's end ended before, the last one if several; 0 for none.

        Args:
            num_candidates: The most places that are compared, the last ones first.
            most: The most tokens that a match is compared for.
        """
        tokens, size = self._tokens, self._size
        stop = len(tokens)
        if stop < size:
            return 0
        found, longest, place = 0, 0, self._before[stop - 1]
        while place and num_candidates:
            length = size
            while length < most and length < place and tokens[place - 1 - length] == tokens[stop - 1 - length]:
                length += 1
            if length > longest:
                found, longest = place, length
                if length == most:
                    break
            place, num_candidates = self._before[place - 1], num_candidates - 1
        return found


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
        min_match: The least tokens that must occur again.
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
        """Return what followed each request's last tokens before."""
        drafts = []
        for request in requests:
            index = self._indexes.get(request.request_id)
            if index is None:
                index = self._indexes[request.request_id] = NgramIndex(self.min_match)
            index.read(request.token_ids)
            start = index.find(self.num_candidates, max(self.min_match, self.max_match))
            # After the sequence's end, what follows is proposed once more: the text may go round.
            period = len(request.token_ids) - start
            places = range(request.max_drafts) if start else ()
            found = [request.token_ids[start + place % period] for place in places]
            others = self._of_others(request) if self.shared_tokens else []
            drafts.append(found or others)
        return drafts

    def _of_others(self, request: DraftRequest) -> list[int]:
        """Return what followed a request's last tokens in what its salt generated; share what it generated itself."""
        texts, known = self._shared[request.cache_salt], len(request.token_ids)
        found: list[int] = []
        if known >= self.min_match:
            # Before its own tokens are shared, because these end with the same tokens.
            found = texts.find(request.token_ids[known - self.min_match : known], request.max_drafts)
        start = self._num_shared.get(request.request_id, request.num_prompt_tokens)
        texts.read(request.request_id, request.token_ids[start:known])
        self._num_shared[request.request_id] = known
        return found

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the indexes of requests. What they generated stays for others."""
        for request_id in request_ids:
            self._indexes.pop(request_id, None)
            self._num_shared.pop(request_id, None)
