"""Generating tokens only: the worked example, unchanged fields, and every token's request and position."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_decode_only.wrapper import DecodeOnly
from kvframe_testing.case import Request
from kvframe_testing.framework import apply_wrapper, check_order, pad_metadata
from kvframe_testing.metadata import find_problem, make_metadata
from kvframe_testing.suites import WrapperTests

from kvframe import FullAttentionSpec
from kvframe.contract import (
    SEQ_STARTS,
    Axis,
    CommonAttentionMetadata,
    Extension,
    LayerSpec,
    MetadataWrapper,
    WrapperError,
)

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)
SHARING = LayerSpec(name="layer.1", spec=SPEC, shares_with="layer.0")


def step(*requests: Request) -> CommonAttentionMetadata:
    return make_metadata(requests, block_size=4)


def worked_example() -> CommonAttentionMetadata:
    """Three requests: the end of a prompt, a prompt's end with one more row wanted, and the end of a prompt."""
    metadata = step(Request(26, 15), Request(26, 5, 2), Request(32, 8))
    indices = torch.tensor([14, 18, 19, 27])
    assert [0, 15, 20, 28] == metadata.query_start_loc.tolist()
    assert indices.tolist() == metadata.generating_indices.tolist()
    return metadata


def pad_to(metadata: CommonAttentionMetadata, num_generating: int, num_tokens: int = 40) -> CommonAttentionMetadata:
    return pad_metadata(
        metadata,
        num_reqs=metadata.num_reqs + 2,
        num_tokens=num_tokens,
        num_generating=num_generating,
        max_query_len=metadata.max_query_len,
    )


def test_the_worked_example() -> None:
    decoding = DecodeOnly()(worked_example())
    assert [0, 1, 3, 4] == decoding.query_start_loc.tolist() == decoding.query_start_loc_cpu.tolist()
    assert [1, 2, 1] == decoding.query_start_loc.diff().tolist()
    assert [41, 31, 40] == decoding.seq_lens.tolist() == decoding.seq_lens_cpu.tolist()
    assert (3, 4, 4, 2, 41) == (
        decoding.num_reqs,
        decoding.num_actual_tokens,
        decoding.num_generating,
        decoding.max_query_len,
        decoding.max_seq_len,
    )


def test_kept_tokens_keep_their_slots_and_are_numbered_anew() -> None:
    metadata = worked_example()
    decoding = DecodeOnly()(metadata)
    assert metadata.slot_mapping[[14, 18, 19, 27]].tolist() == decoding.slot_mapping.tolist()
    assert [0, 1, 2, 3] == decoding.generating_indices.tolist() == decoding.generating_indices_cpu.tolist()


def test_starts_keep_their_dtype() -> None:
    decoding = DecodeOnly()(worked_example())
    assert {torch.int32} == {decoding.query_start_loc.dtype, decoding.query_start_loc_cpu.dtype}


@pytest.mark.parametrize(
    "requests", [(Request(5, 1), Request(9, 1)), (Request(5, 3, 3), Request(9, 1)), (Request(0, 7, 7),)]
)
def test_a_step_where_all_tokens_generate_comes_back_itself(requests: tuple[Request, ...]) -> None:
    metadata = step(*requests)
    assert metadata is DecodeOnly()(metadata)


def test_a_step_whose_generating_tokens_are_unknown_comes_back_itself() -> None:
    metadata = step(Request(0, 7), Request(5, 1))
    unknown = attrs.evolve(metadata, num_generating=8, generating_indices=None, generating_indices_cpu=None)
    assert unknown is DecodeOnly()(unknown)


def test_a_prompt_that_goes_on_keeps_its_row_and_no_token() -> None:
    decoding = DecodeOnly()(step(Request(4, 1), Request(0, 8, 0), Request(9, 1)))
    assert [1, 0, 1] == decoding.query_start_loc.diff().tolist()
    assert [5, 8, 10] == decoding.seq_lens.tolist()


def test_where_nothing_generates_one_padded_token_is_left() -> None:
    decoding = DecodeOnly()(step(Request(4, 4, 0), Request(0, 8, 0)))
    assert [0, 0, 0] == decoding.query_start_loc.tolist()
    assert (0, [0], [0], 1) == (
        decoding.num_actual_tokens,
        decoding.slot_mapping.tolist(),
        decoding.generating_indices.tolist(),
        decoding.max_query_len,
    )


def test_queries_that_see_later_keys_still_do() -> None:
    metadata = attrs.evolve(worked_example(), causal=False)
    assert not apply_wrapper(DecodeOnly(), metadata).causal


# --- padding ----------------------------------------------------------------------------------------------------------


def test_padding_to_a_graphs_size_leaves_real_rows_unchanged() -> None:
    decoding, padded = DecodeOnly()(worked_example()), DecodeOnly()(pad_to(worked_example(), 7))
    assert [0, 1, 3, 4, 4, 4] == padded.query_start_loc.tolist()
    assert decoding.slot_mapping.tolist() == padded.slot_mapping[:4].tolist()
    assert (4, 7) == (padded.num_actual_tokens, len(padded.slot_mapping))


def test_padded_tokens_lie_in_the_null_page_and_repeat_the_last_index() -> None:
    padded = DecodeOnly()(pad_to(worked_example(), 7))
    assert [0, 0, 0] == padded.slot_mapping[4:].tolist()
    assert [0, 1, 2, 3, 3, 3, 3] == padded.generating_indices.tolist() == padded.generating_indices_cpu.tolist()


@pytest.mark.parametrize(("num_tokens", "same"), [(6, True), (8, False)])
def test_a_padded_step_comes_back_itself_where_as_many_rows_are_padded(num_tokens: int, same: bool) -> None:
    metadata = pad_to(step(Request(5, 1), Request(9, 1)), 6, num_tokens)
    decoding = DecodeOnly()(metadata)
    assert same is (decoding is metadata)
    assert ([0, 1, 2, 2, 2], 6) == (decoding.query_start_loc.tolist(), len(decoding.slot_mapping))


def test_in_a_graph_no_request_is_taken_to_have_more_tokens_than_there_are_rows() -> None:
    assert 15 == DecodeOnly()(pad_to(worked_example(), 20)).max_query_len
    assert 7 == DecodeOnly()(pad_to(worked_example(), 7)).max_query_len


# --- extensions, layers, chains ---------------------------------------------------------------------------------------


def test_what_counts_requests_is_handed_on() -> None:
    extensions = {SEQ_STARTS: Extension(torch.tensor([1, 2, 3], dtype=torch.int32), Axis.REQUEST)}
    decoding = apply_wrapper(DecodeOnly(), attrs.evolve(worked_example(), extensions=extensions))
    assert extensions == decoding.extensions


def test_an_extension_that_it_does_not_know_is_refused() -> None:
    extensions = {"tree_mask": Extension(torch.zeros(28), Axis.TOKEN)}
    with pytest.raises(WrapperError, match="does not know the extension 'tree_mask'") as refused:
        apply_wrapper(DecodeOnly(), attrs.evolve(worked_example(), extensions=extensions))
    assert "unknown_extension" == refused.value.code


def test_a_layer_that_keeps_a_cache_is_refused() -> None:
    with pytest.raises(WrapperError, match=r"'layer\.1': the layer keeps a cache of its own") as refused:
        DecodeOnly().for_layer(attrs.evolve(SHARING, shares_with=None))
    assert "keeps_cache" == refused.value.code


@pytest.mark.parametrize("effect", ["drops_tokens", "virtual_requests"])
def test_it_stands_before_what_drops_tokens_or_makes_rows_of_a_request(effect: str) -> None:
    other = type("Other", (MetadataWrapper,), {"name": "other", "effects": frozenset({effect})})
    with pytest.raises(WrapperError, match=f"'decode_only' cannot come after 'other' .{effect}") as refused:
        check_order([other, DecodeOnly])
    assert "chain_order" == refused.value.code


class TestDecodeOnly(WrapperTests):
    wrapper = "decode_only"


# --- every token ------------------------------------------------------------------------------------------------------

REQUESTS = st.builds(
    lambda computed, new, share: Request(computed, new, round(share * new)),
    st.integers(0, 30),
    st.integers(1, 20),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)


def positions_by_request(metadata: CommonAttentionMetadata) -> list[tuple[int, int]]:
    """Return each real token's request and position, one by one, by the definition in the contract."""
    starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    positions = []
    for request in range(metadata.num_reqs):
        query_len = starts[request + 1] - starts[request]
        positions += [(request, seq_lens[request] - query_len + i) for i in range(query_len)]
    return positions


@given(requests=st.lists(REQUESTS, min_size=1, max_size=8), padding=st.none() | st.integers(0, 4))
def test_every_generating_token_keeps_its_request_its_position_and_its_slot(
    requests: Sequence[Request], padding: int | None
) -> None:
    metadata = step(*requests)
    if padding is not None:
        metadata = pad_to(metadata, len(metadata.generating_indices) + padding, metadata.num_actual_tokens + padding)
    generating = metadata.generating_indices_cpu[: metadata.num_generating].tolist()
    tokens = positions_by_request(metadata)
    decoding = DecodeOnly()(metadata)
    assert "" == find_problem(decoding)
    assert [tokens[index] for index in generating] == positions_by_request(decoding)
    slots = metadata.slot_mapping.tolist()
    assert [slots[index] for index in generating] == decoding.slot_mapping[: decoding.num_actual_tokens].tolist()
    assert len(metadata.generating_indices) == len(decoding.generating_indices)
