"""Chosen tokens: their form, where they lie, and what cannot be chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract import (
    RANGE_ENDS,
    SEQ_STARTS,
    AttentionMask,
    Axis,
    Capabilities,
    ChosenTokens,
    CommonAttentionMetadata,
    Extension,
    LayerSpec,
    QuerySpec,
    find_chosen,
)
from kvframe.contract.errors import BackendError, SpecError
from kvframe.selection.refusals import find_refusals


def batch(query_lens: list[int], seq_lens: list[int], block_size: int = 4, **fields: Any) -> CommonAttentionMetadata:
    """Return a step whose request ``r`` has the pages ``100 * r + 1`` and following ones."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    num_blocks = max(-(-length // block_size) for length in seq_lens)
    table = torch.arange(1, num_blocks + 1).int() + 100 * torch.arange(len(seq_lens)).int()[:, None]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu=lens,
        num_reqs=len(seq_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table=table.int(),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
        block_size=block_size,
        num_generating=sum(query_lens),
        **fields,
    )


def test_a_chosen_block_stands_for_its_tokens() -> None:
    choice = ChosenTokens(torch.tensor([[[2, -1]]], dtype=torch.int32), block_size=3)
    assert [[[6, 7, 8, -1, -1, -1]]] == choice.positions().tolist()


def test_each_negative_number_stands_for_no_token() -> None:
    assert [[[4, -1, 0]]] == ChosenTokens(torch.tensor([[[4, -7, 0]]], dtype=torch.int32)).positions().tolist()


def test_a_query_reads_the_chosen_tokens_up_to_its_own() -> None:
    # The queries are at the positions 5 and 6 of the first request, and at 2 of the second one.
    step = batch([2, 1], [7, 3])
    choice = ChosenTokens(torch.tensor([[[6, 1]], [[6, 1]], [[0, -1]]], dtype=torch.int32))
    places = find_chosen(choice, step, AttentionMask().sees)
    assert [[[False, True]], [[True, True]], [[True, False]]] == places.seen.tolist()
    assert [[[0, 1]], [[2, 1]], [[101, 0]]] == places.blocks.tolist()
    assert [[[0, 1]], [[2, 1]], [[0, 0]]] == places.offsets.tolist()


def test_a_window_hides_chosen_tokens() -> None:
    choice = ChosenTokens(torch.tensor([[[0, 3, 4]]], dtype=torch.int32))
    places = find_chosen(choice, batch([1], [6]), AttentionMask(window=3, num_sink_tokens=1).sees)
    assert [[[True, True, True]]] == places.seen.tolist()
    places = find_chosen(choice, batch([1], [6]), AttentionMask(window=2).sees)
    assert [[[False, False, True]]] == places.seen.tolist()


def test_tokens_before_the_start_of_a_sequence_are_hidden() -> None:
    starts = torch.tensor([2], dtype=torch.int32)
    step = batch([1], [6], extensions={SEQ_STARTS: Extension(starts, Axis.REQUEST, starts)})
    choice = ChosenTokens(torch.tensor([[[1, 2]]], dtype=torch.int32))
    assert [[[False, True]]] == find_chosen(choice, step, AttentionMask().sees).seen.tolist()


@given(st.data())
def test_the_places_are_those_of_the_block_table(data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    query_lens = [data.draw(st.integers(1, length)) for length in lens]
    size, num_chosen = data.draw(st.sampled_from([1, 4, 5])), data.draw(st.integers(1, 6))
    rows = [data.draw(st.permutations(range(-3, 20)))[:num_chosen] for _ in range(sum(query_lens))]
    step = batch(query_lens, lens, size)
    places = find_chosen(
        ChosenTokens(torch.tensor(rows, dtype=torch.int32).unsqueeze(1)), step, AttentionMask(window=7).sees
    )
    row = 0
    for request, (query_len, length) in enumerate(zip(query_lens, lens, strict=True)):
        for position in range(length - query_len, length):
            for index, token in enumerate(rows[row]):
                is_seen = max(0, position - 6) <= token <= position
                assert is_seen == places.seen[row, 0, index]
                if is_seen:
                    page = 100 * request + 1 + token // size
                    assert (page, token % size) == (places.blocks[row, 0, index], places.offsets[row, 0, index])
            row += 1


@pytest.mark.parametrize("fields", [{"max_chosen": 0}, {"max_chosen": True}, {"max_chosen": 4, "block_size": 1.5}])
def test_a_choice_of_no_count_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="must be a whole number of at least 1"):
        QuerySpec(num_heads=1, head_size=8, scale=1.0, choice=fields)


def test_a_choice_goes_with_no_bias_by_distance() -> None:
    with pytest.raises(SpecError, match="has a choice and a bias by distance"):
        QuerySpec(num_heads=1, head_size=8, scale=1.0, choice={"max_chosen": 4}, alibi_slopes=(0.5,))


def test_an_entry_has_the_name_of_its_layer_and_no_query_side() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)
    with pytest.raises(SpecError, match=r"'keys' is an entry of layer 'layer': it must be named layer/…"):
        LayerSpec(name="keys", spec=spec, entry_of="layer")
    assert "keys" == LayerSpec(name="layer/keys", spec=spec, entry_of="layer").entry


def plain_layer(**query: Any) -> LayerSpec:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)
    return LayerSpec(name="layer", spec=spec, query=QuerySpec(num_heads=1, head_size=8, scale=1.0, **query))


def test_a_backend_that_reads_all_tokens_is_refused_for_chosen_ones() -> None:
    plain = Capabilities(devices={"cpu"}, dtypes={"float32"}, masks={"causal", "ranges"}, extensions={RANGE_ENDS})
    for choice, code in (({"max_chosen": 4}, "choice_tokens"), ({"max_chosen": 4, "block_size": 8}, "choice_blocks")):
        assert [code] == [refusal.code for refusal in find_refusals(plain, plain_layer(choice=choice), "cpu")]
        assert [] == find_refusals(TorchReferenceBackend.capabilities, plain_layer(choice=choice), "cpu")


def test_a_backend_without_a_log_sum_exp_is_refused_for_a_merged_layer() -> None:
    plain = Capabilities(devices={"cpu"}, dtypes={"float32"}, masks={"causal"})
    assert ["lse"] == [refusal.code for refusal in find_refusals(plain, plain_layer(merged=True), "cpu")]


def test_an_unknown_choice_is_named() -> None:
    with pytest.raises(BackendError, match="there is no choice named 'token'"):
        Capabilities(devices={"cpu"}, dtypes={"float32"}, masks={"causal"}, choices={"token"})
