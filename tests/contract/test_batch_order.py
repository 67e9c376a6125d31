"""The order of a batch's requests: what backends ask for, and the one order for all; it is always a permutation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_testing.case import Request

from kvframe.attention.request_order import find_order, is_ordered, permute
from kvframe.contract.errors import BackendError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.order import BatchOrder, BatchSplit, split_batch
from tests.attention.batches import Requests, any_request, assert_equal, device_tensors, metadata_of, padded

FULL = BatchOrder()
LATENT = BatchOrder(decode_threshold=4)

ORDERS = st.builds(BatchOrder, decode_threshold=st.integers(0, 4))
BATCHES = st.lists(any_request(), min_size=1, max_size=6)

FRESH_OF_3 = Request(num_computed=0, num_new=3)
EXTEND_OF_9 = Request(num_computed=5, num_new=9)
DECODE = Request(num_computed=7, num_new=1)


def lengths(requests: Requests) -> np.ndarray:
    return np.array([request.num_new for request in requests])


def arranged(requests: Requests, order: np.ndarray | None) -> Requests:
    return requests if order is None else [requests[index] for index in order]


def token_facts(metadata: CommonAttentionMetadata) -> list[tuple[list[int], int, int, bool, int]]:
    """Return, for each packed token without padding, its request, position, slot and kind."""
    starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    generating = metadata.generating_indices.tolist()[: metadata.num_generating]
    names = metadata.extensions["names"].values.tolist()
    slots = metadata.slot_mapping.tolist()
    return [
        (
            metadata.block_table[request].tolist(),
            seq_lens[request] - (stop - token),
            slots[token],
            token in generating,
            names[token],
        )
        for request, (start, stop) in enumerate(itertools.pairwise(starts))
        for token in range(start, stop)
    ]


def test_ranks_are_decodes_then_longer_requests_then_padding() -> None:
    assert [0, 1, 1, 0, 2, 2] == BatchOrder(decode_threshold=2).ranks([1, 3, 3, 2, 0, 0]).tolist()


def test_requests_are_put_in_the_order_that_is_asked_for_and_stay_in_theirs_otherwise() -> None:
    requests = [FRESH_OF_3, DECODE, EXTEND_OF_9, FRESH_OF_3, DECODE, EXTEND_OF_9]
    order = find_order([FULL], lengths(requests))
    assert order is not None
    assert [1, 4, 0, 2, 3, 5] == order.tolist()


def test_requests_that_are_in_order_stay() -> None:
    requests = [DECODE, DECODE, EXTEND_OF_9, EXTEND_OF_9, FRESH_OF_3]
    assert find_order([FULL, BatchOrder()], lengths(requests)) is None


def test_several_orders_are_met_by_one_order() -> None:
    requests = [EXTEND_OF_9, FRESH_OF_3, DECODE]
    order = find_order([LATENT, BatchOrder()], lengths(requests))
    assert order is not None
    assert [2, 1, 0] == order.tolist()


@given(requests=BATCHES, orders=st.lists(ORDERS, min_size=1, max_size=3))
def test_one_order_satisfies_all_and_keeps_what_they_do_not_tell_apart(
    requests: Requests, orders: Sequence[BatchOrder]
) -> None:
    order = find_order(orders, lengths(requests))
    indices = list(range(len(requests))) if order is None else order.tolist()
    assert sorted(indices) == list(range(len(requests)))
    ranks = [batch_order.ranks(lengths(requests))[indices].tolist() for batch_order in orders]
    assert all(sorted(row_ranks) == row_ranks for row_ranks in ranks)
    alike = [(a, b) for (a, *x), (b, *y) in itertools.pairwise(zip(indices, *ranks, strict=True)) if x == y]
    assert all(before < after for before, after in alike)


@given(requests=BATCHES, order=ORDERS, num_reqs=st.integers(0, 2), num_tokens=st.integers(0, 3))
def test_a_permuted_batch_has_the_same_tokens_in_order(
    requests: Requests, order: BatchOrder, num_reqs: int, num_tokens: int
) -> None:
    metadata = metadata_of(requests)
    if num_reqs + num_tokens:
        metadata = padded(metadata, num_reqs=num_reqs, num_tokens=num_tokens)
    permuted, permutation = permute(metadata, order)
    assert is_ordered(order, permuted)
    total = metadata.slot_mapping.shape[0]
    actual = metadata.num_actual_tokens
    tokens, inverse = permutation.tokens.tolist(), permutation.inverse.tolist()
    assert list(range(total)) == [tokens[place] for place in inverse]
    assert list(range(actual, total)) == tokens[actual:]
    facts = token_facts(metadata)
    assert [facts[token] for token in tokens[:actual]] == token_facts(permuted)
    owners = metadata.extensions["owners"].values.tolist()
    assert [owners[request] for request in permutation.requests] == permuted.extensions["owners"].values.tolist()
    assert metadata.extensions["seed"] is permuted.extensions["seed"]
    copies: list[tuple[torch.Tensor, torch.Tensor | None]] = [
        (permuted.query_start_loc, permuted.query_start_loc_cpu),
        (permuted.seq_lens, permuted.seq_lens_cpu),
        (permuted.generating_indices, permuted.generating_indices_cpu),
        (permuted.extensions["owners"].values, permuted.extensions["owners"].values_cpu),
    ]
    assert all(here is not None and torch.equal(there, here) for there, here in copies)
    assert [tensor.dtype for tensor in device_tensors(metadata).values()] == [
        tensor.dtype for tensor in device_tensors(permuted).values()
    ]


@given(requests=BATCHES, order=ORDERS)
def test_permuting_is_what_building_in_that_order_is(requests: Requests, order: BatchOrder) -> None:
    metadata = metadata_of(requests)
    permuted, permutation = permute(metadata, order)
    built = metadata_of(arranged(requests, permutation.requests.numpy()))
    expected = attrs.evolve(
        permuted, block_table=built.block_table, slot_mapping=built.slot_mapping, extensions=built.extensions
    )
    assert_equal(built, expected)


def test_requests_of_one_kind_stay_in_their_order_in_a_batch_of_any_size() -> None:
    requests = [EXTEND_OF_9, DECODE] * 20
    expected = [*range(1, 40, 2), *range(0, 40, 2)]
    order = find_order([FULL], lengths(requests))
    assert order is not None
    assert expected == order.tolist()
    assert expected == permute(metadata_of(requests), FULL)[1].requests.tolist()


def test_a_row_without_tokens_comes_after_the_others() -> None:
    metadata = metadata_of([DECODE, DECODE, DECODE])
    starts = torch.tensor([0, 1, 1, 3], dtype=torch.int32)
    metadata = attrs.evolve(metadata, query_start_loc=starts, query_start_loc_cpu=starts.clone())
    permuted, permutation = permute(metadata, BatchOrder(decode_threshold=2))
    assert [0, 2, 1] == permutation.requests.tolist()
    assert [0, 1, 2] == permutation.tokens.tolist()
    assert [0, 1, 3, 3] == permuted.query_start_loc.tolist()


def test_generating_rows_stay_in_order_and_padding_repeats_the_last() -> None:
    requests = [Request(0, 3, num_generating=0), Request(4, 2, num_generating=2), Request(8, 1, num_generating=1)]
    metadata = padded(metadata_of(requests), num_reqs=0, num_tokens=2)
    assert [3, 4, 5, 5] == metadata.generating_indices.tolist()
    permuted, permutation = permute(metadata, FULL)
    assert [2, 0, 1] == permutation.requests.tolist()
    assert [5, 0, 1, 2, 3, 4, 6, 7] == permutation.tokens.tolist()
    assert [0, 4, 5, 5] == permuted.generating_indices.tolist()


def test_the_padded_row_of_a_step_without_generating_tokens_stays_the_last_token() -> None:
    permuted, _ = permute(metadata_of([Request(0, 3, num_generating=0), Request(4, 2, num_generating=0)]), FULL)
    assert (0, [4]) == (permuted.num_generating, permuted.generating_indices.tolist())


def test_nothing_that_was_given_is_written_to() -> None:
    metadata = metadata_of([FRESH_OF_3, EXTEND_OF_9, DECODE])
    before = {name: tensor.clone() for name, tensor in device_tensors(metadata).items()}
    permute(metadata, FULL)
    assert_equal(metadata_of([FRESH_OF_3, EXTEND_OF_9, DECODE]), metadata)
    assert all(torch.equal(before[name], tensor) for name, tensor in device_tensors(metadata).items())


def test_nothing_is_read_from_the_device() -> None:
    requests = [FRESH_OF_3, EXTEND_OF_9, DECODE]
    # Tensors of the meta device hold no values, so reading one raises.
    permuted, permutation = permute(metadata_of(requests, device="meta"), FULL)
    assert is_ordered(FULL, permuted)
    assert 1 == split_batch(permuted, FULL).num_decodes
    assert {"meta"} == {
        tensor.device.type for tensor in (permutation.tokens, permutation.inverse, permuted.slot_mapping)
    }


def test_a_split_counts_each_kind_and_leaves_padding_out() -> None:
    requests = [DECODE, DECODE, EXTEND_OF_9, FRESH_OF_3, Request(0, 5)]
    metadata = padded(metadata_of(requests), num_reqs=2, num_tokens=4)
    assert BatchSplit(
        num_decodes=2,
        num_decode_tokens=2,
        num_longer=3,
        num_longer_tokens=17,
    ) == split_batch(metadata, FULL)


def test_a_batch_that_is_not_in_order_is_not_split() -> None:
    with pytest.raises(BackendError) as caught:
        split_batch(metadata_of([DECODE, EXTEND_OF_9, DECODE]), FULL)
    assert (
        "the batch is not in the order BatchOrder(decode_threshold=1): request 2 is a decode (query length 1) and "
        "comes after a longer request (query length 9); a builder that splits its batches must set batch_order to "
        "the order that it splits by"
    ) == str(caught.value)


@given(requests=BATCHES, order=ORDERS)
def test_the_kinds_of_a_split_are_the_whole_batch_each_in_its_slice(requests: Requests, order: BatchOrder) -> None:
    metadata, _ = permute(metadata_of(requests), order)
    split = split_batch(metadata, order)
    assert len(requests) == split.num_decodes + split.num_longer
    assert metadata.num_actual_tokens == split.num_decode_tokens + split.num_longer_tokens
    query_lens = metadata.query_start_loc.diff().tolist()
    assert split.num_decode_tokens == sum(query_lens[: split.num_decodes])
    assert all(query_len <= order.decode_threshold for query_len in query_lens[: split.num_decodes])
    assert all(query_len > order.decode_threshold for query_len in query_lens[split.num_decodes :])
