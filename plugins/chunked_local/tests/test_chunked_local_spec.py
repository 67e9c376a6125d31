"""The chunks' live ranges in plain numbers, and the fast derivations against the general ones."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from kvframe_chunked_local import ChunkedLocalSpec
from kvframe_testing.suites import SpecTests

from kvframe import FullAttentionSpec
from kvframe.contract import AttentionMask, SpecError


def chunked(chunk: int, block_size: int = 4) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(block_size=block_size, num_kv_heads=1, head_size=8, chunk=chunk)


@pytest.mark.parametrize(
    ("n", "expected"), [(0, ()), (1, ((0, 1),)), (3, ((0, 3),)), (4, ()), (5, ((4, 5),)), (103, ((100, 103),))]
)
def test_a_chunk_of_4_keeps_the_tokens_since_it_began(n: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert expected == chunked(4).live_ranges(n)


def test_the_mask_says_the_same() -> None:
    assert AttentionMask(chunk=6) == chunked(6).mask


def test_the_wrapper_of_the_same_name_runs_it_unless_a_stack_gives_another() -> None:
    assert ("chunked_local",) == chunked(4).default_wrappers


def test_retaining_all_is_full_attention_over_the_same_state() -> None:
    spec = attrs.evolve(chunked(4), num_kv_heads=3, head_size_v=5, dtype="bfloat16")
    expected = FullAttentionSpec(block_size=4, num_kv_heads=3, head_size=8, head_size_v=5, dtype="bfloat16")
    assert expected == spec.retain_all()
    assert expected.state_tensors() == spec.state_tensors()


def test_a_long_request_holds_a_chunk_and_a_step() -> None:
    assert 2 == chunked(8).peak_blocks(1000, 1)
    assert 2 + 2 == chunked(8).peak_blocks(1000, 9)


def test_a_chunk_that_begins_inside_of_a_block_holds_one_more() -> None:
    assert 3 == chunked(6).peak_blocks(1000, 5)
    assert 4 == chunked(7).peak_blocks(1000, 5)


def test_chunks_of_different_lengths_share_no_group() -> None:
    assert chunked(4).group_key != chunked(5).group_key


@pytest.mark.parametrize("chunk", [0, -1, 1.5, True])
def test_a_chunk_holds_at_least_one_token(chunk: Any) -> None:
    with pytest.raises(SpecError, match=r"ChunkedLocalSpec\.chunk must be a whole number of at least 1"):
        attrs.evolve(chunked(4), chunk=chunk)


class TestChunkedLocal(SpecTests):
    spec = "chunked_local"
    options = tuple({"chunk": chunk} for chunk in (1, 4, 6, 50))


@pytest.mark.whole
class TestMoreChunks(SpecTests):
    spec = "chunked_local"
    options = tuple({"chunk": chunk} for chunk in (2, 5, 8, 15))
