"""Which tokens ``ngram`` proposes, the laws of proposers, and that a long request costs no more than a short one."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.contract import DraftRequest
from kvframe_engine.testing.suites import ProposerTests
from kvframe_ngram.proposer import NgramIndex, NgramProposer
from kvframe_ngram.shared import MAX_SALTS, GeneratedTexts, SharedTexts

Tokens = Sequence[int]


def drafts(tokens: Tokens, *, max_drafts: int = 4, **options: int) -> list[int]:
    proposer = NgramProposer(max_drafts=max_drafts, **options)
    return proposer.propose([DraftRequest("a", array("I", tokens), 1, max_drafts, "")])[0]


def test_what_followed_the_same_tokens_before_is_proposed() -> None:
    assert [4, 5, 6, 7] == drafts([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])


def test_tokens_that_did_not_occur_before_give_no_draft() -> None:
    assert [] == drafts([1, 2, 3, 4, 5])
    assert [] == drafts([7])


def test_one_token_that_occurred_before_is_enough_while_drafts_are_cheap() -> None:
    tokens = array("I", [1, 2, 3, 9, 2, 3])
    proposals = [
        NgramProposer(max_drafts=4).propose([DraftRequest("a", tokens, 1, max_drafts, "")])[0] for max_drafts in (4, 3)
    ]
    assert [[9, 2, 3, 9], []] == proposals
    # The last place counts, and a longer match comes first.
    assert [9, 8, 2, 9] == drafts([2, 3, 2, 9, 8, 2])
    assert [4, 3, 1, 2] == drafts([1, 2, 3, 4, 3, 1, 2, 3])


def test_the_longest_match_counts_and_the_last_one_among_equally_long_ones() -> None:
    # 2 3 4 occurred twice; before the first place stands what also stands before the end.
    assert [5] == drafts([1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 1, 2, 3, 4], max_drafts=1)
    assert [6] == drafts([8, 2, 3, 4, 5, 9, 2, 3, 4, 6, 1, 2, 3, 4], max_drafts=1)


def test_a_text_that_goes_round_is_continued_over_its_end() -> None:
    assert [1, 2, 3, 1, 2] == drafts([1, 2, 3, 1, 2, 3], max_drafts=5)


def test_options_limit_what_is_compared() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 1, 2, 3, 4]
    assert [6] == drafts(tokens, max_drafts=1, num_candidates=1)
    assert [6] == drafts(tokens, max_drafts=1, max_match=3)
    assert [] == drafts([1, 2, 3, 1, 2], min_match=3, max_drafts=1)
    assert [3] == drafts([1, 2, 3, 1, 2], min_match=2, max_drafts=1)


@pytest.mark.parametrize("option", ["max_drafts", "min_match", "max_match", "num_candidates"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "3"])
def test_options_are_whole_numbers_of_at_least_one(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option} must be a whole number of at least 1"):
        NgramProposer(**{option: value})


@pytest.mark.parametrize("value", [-1, True, 2.0])
def test_shared_tokens_is_a_whole_number(value: object) -> None:
    with pytest.raises(ValueError, match="shared_tokens must be a whole number of at least 0"):
        NgramProposer(shared_tokens=value)  # type: ignore[arg-type]


class TestNgram(ProposerTests):
    proposer = "ngram"


class TestNgramOfOneToken(ProposerTests):
    proposer = "ngram"
    options: ClassVar[Mapping[str, Any]] = {"min_match": 1, "max_match": 1}


class TestNgramThatShares(ProposerTests):
    proposer = "ngram"
    options: ClassVar[Mapping[str, Any]] = {"min_match": 2, "shared_tokens": 20}


def test_nothing_of_ended_requests_is_kept() -> None:
    proposer = NgramProposer()
    proposer.propose([DraftRequest(name, [1, 2, 3], 1, 2, "") for name in ("a", "b")])
    proposer.forget(["a", "b"])
    assert {} == proposer._indexes == proposer._num_shared


def test_what_others_of_the_salt_generated_is_proposed_if_asked() -> None:
    def steps(proposer: NgramProposer, salt: str) -> list[list[int]]:
        first = DraftRequest("a", array("I", [9, 8, 7, 1, 2, 3, 4, 5, 6]), 3, 2, "mine")
        second = DraftRequest("b", array("I", [5, 1, 2, 3]), 1, 2, salt)
        proposer.propose([first])
        proposer.forget(["a"])
        return proposer.propose([second])

    assert [[4, 5]] == steps(NgramProposer(shared_tokens=100), "mine")
    assert [[]] == steps(NgramProposer(shared_tokens=100), "other")
    assert [[]] == steps(NgramProposer(), "mine")


def test_a_request_repeats_itself_before_it_repeats_others_and_no_prompt_is_shared() -> None:
    proposer = NgramProposer(shared_tokens=100)
    proposer.propose([DraftRequest("a", array("I", [7, 7, 7, 1, 2, 3, 4]), 3, 1, "")])
    own = array("I", [1, 2, 3, 5, 0, 1, 2, 3])
    assert [[5], []] == proposer.propose(
        [DraftRequest("b", own, 1, 1, ""), DraftRequest("c", array("I", [0, 7, 7, 7]), 1, 1, "")]
    )


def test_two_requests_that_generate_the_same_find_each_other() -> None:
    proposer, answer = NgramProposer(shared_tokens=100, max_drafts=1), [3, 1, 4, 1, 5, 9, 2, 6]
    for stop in range(1, 9):
        request = DraftRequest("a", array("I", [0, *answer[:stop]]), 1, 1, "")
        proposer.propose([request])
    proposals = [
        proposer.propose([DraftRequest("b", array("I", [1, *answer[:stop]]), 1, 1, "")])[0] for stop in range(1, 9)
    ]
    assert [[], [], [1], [5], [9], [2], [6], []] == proposals


def test_the_texts_of_the_oldest_requests_are_dropped() -> None:
    texts = GeneratedTexts(2, 6)
    texts.read("a", [1, 2, 3])
    texts.read("b", [1, 2, 4])
    assert ([4], 6) == (texts.find([1, 2], 3), texts.num_tokens)
    texts.read("c", [2, 3])
    assert ([4], [], [], 5) == (texts.find([1, 2], 3), texts.find([2, 3], 3), texts.find([3, 4], 3), texts.num_tokens)
    assert {"b", "c"} == {*texts._texts}
    # One text alone may be longer.
    texts.read("d", range(9))
    assert ({"d"}, 9, 8) == ({*texts._texts}, texts.num_tokens, len(texts._last))


def test_few_salts_are_kept() -> None:
    shared = SharedTexts(2, 6)
    text = shared["first"]
    for index in range(MAX_SALTS + 5):
        shared[str(index)].read("a", [1])
        assert text is shared["first"]
    assert MAX_SALTS == len(shared)


def last_place(tokens: Tokens) -> int:
    """Return the last place before the end where the last token ends; 0 for none."""
    return max((end for end in range(1, len(tokens)) if tokens[end - 1] == tokens[-1]), default=0)


def longest_match(tokens: Tokens, size: int) -> int:
    """Return where the longest earlier match of at least ``size`` tokens ends, the last of several; 0 for none."""
    match_end, longest = 0, size - 1
    for end in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < end and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > longest:
            match_end, longest = end, length
    return match_end


@pytest.mark.parametrize("most_searched", [0, 3, 9, 1000])
@given(
    # Some have bytes in common at different places, so that bytes are the same across tokens.
    st.lists(st.sampled_from([0, 1, 1 << 8, 1 << 24, (1 << 24) + 1]), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 60),
)
def test_the_index_finds_what_a_search_through_all_tokens_finds(
    most_searched: int, tokens: list[int], size: int, first: int
) -> None:
    index = NgramIndex(size, most_searched)
    index.read(array("I", tokens[:first]))
    for stop in range(min(first, len(tokens)), len(tokens) + 1):
        index.read(array("I", tokens[:stop]))
    assert longest_match(tokens, size) == index.find(num_candidates=len(tokens), most=len(tokens))
    assert last_place(tokens) == index.find_token()


class CountingTokens(Sequence[int]):
    """Tokens that count how many of them are read."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens, self.num_read = list(tokens), 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int | slice) -> int | list[int]:  # type: ignore[override]
        tokens = self.tokens[index]
        self.num_read += len(tokens) if isinstance(tokens, list) else 1
        return tokens


def test_a_step_reads_the_new_tokens_only() -> None:
    tokens, proposer = CountingTokens([1, 2, 3, 4] * 2000), NgramProposer()
    proposer.propose([DraftRequest("a", tokens, 1, 4, "")])
    tokens.num_read = 0
    tokens.tokens += [1, 2]
    assert [[3, 4, 1, 2]] == proposer.propose([DraftRequest("a", tokens, 1, 4, "")])
    assert 2 + 4 == tokens.num_read
