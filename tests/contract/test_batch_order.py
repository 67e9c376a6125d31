"""The order of a batch's requests: what backends ask for, and the one order for all; it is always a permutation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.attention.request_order import find_order, is_ordered, permute
from kvframe.contract.errors import BackendError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.order import BatchOrder, BatchSplit, split_batch
from kvframe.testing.case import Request
from tests.attention.batches import Requests, any_request, assert_equal, device_tensors, metadata_of, padded

FULL = BatchOrder(extends_first=True)
LATENT = BatchOrder(decode_threshold=4)

ORDERS = st.builds(BatchOrder, decode_threshold=st.integers(0, 4), extends_first=st.booleans())
BATCHES = st.lists(any_request(), min_size=1, max_size=6)

FRESH_OF_3 = Request(num_computed=0, num_new=3)
EXTEND_OF_9 = Request(num_computed=5, num_new=9)
DECODE = Request(num_computed=7, num_new=1)


def lengths(requests: Requests) -> tuple[np.ndarray, np.ndarray]:
    return np.array([each.num_computed for each in requests]), np.array([each.num_new for each in requests])


def is_satisfied(order: BatchOrder, requests: Requests) -> bool:
    ranks = order.ranks(*lengths(requests)).tolist()
    return bool(ranks == sorted(ranks))


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


def test_ranks_are_decodes_then_extends_then_fresh_prefills_then_padding() -> None:
    num_computed = [9, 9, 0, 0, 9, 0]
    query_lens = [1, 3, 3, 2, 0, 0]
    order = BatchOrder(decode_threshold=2, extends_first=True)
    assert [0, 1, 2, 0, 3, 3] == order.ranks(num_computed, query_lens).tolist()


def test_extends_and_fresh_prefills_rank_alike_where_they_may_be_mixed() -> None:
    assert [0, 1, 1, 3] == BatchOrder().ranks([9, 9, 0, 0], [1, 3, 3, 0]).tolist()


def test_a_fresh_request_as_short_as_a_decode_is_one() -> None:
    assert [0, 2] == FULL.ranks([0, 0], [1, 2]).tolist()


def test_requests_are_put_in_the_order_that_is_asked_for_and_stay_in_theirs_otherwise() -> None:
    requests = [FRESH_OF_3, DECODE, EXTEND_OF_9, FRESH_OF_3, DECODE, EXTEND_OF_9]
    order = find_order([FULL], *lengths(requests))
    assert order is not None
    assert [1, 4, 2, 5, 0, 3] == order.tolist()


def test_without_an_order_requests_stay() -> None:
    assert find_order([], *lengths([EXTEND_OF_9, DECODE])) is None


def test_requests_that_are_in_order_stay() -> None:
    requests = [DECODE, DECODE, EXTEND_OF_9, EXTEND_OF_9, FRESH_OF_3]
    assert find_order([FULL, BatchOrder()], *lengths(requests)) is None


def test_orders_that_agree_are_met_by_one_order() -> None:
    requests = [EXTEND_OF_9, FRESH_OF_3, DECODE]
    order = find_order([LATENT, BatchOrder()], *lengths(requests))
    assert order is not None
    assert [2, 1, 0] == order.tolist()


@pytest.mark.parametrize(
    ("orders", "expected"), [([FULL, LATENT], [2, 1, 0]), ([LATENT, FULL], [0, 2, 1])], ids=["full", "latent"]
)
def test_of_orders_that_contradict_each_other_the_first_is_satisfied(
    orders: Sequence[BatchOrder], expected: list[int]
) -> None:
    requests = [FRESH_OF_3, EXTEND_OF_9, DECODE]
    order = find_order(orders, *lengths(requests))
    assert order is not None
    assert expected == order.tolist()
    assert [True, False] == [is_satisfied(each, arranged(requests, order)) for each in orders]


@settings(max_examples=100, deadline=None)
@given(requests=BATCHES, orders=st.lists(ORDERS, min_size=1, max_size=3))
def test_no_order_satisfies_more_with_the_first_orders_first(requests: Requests, orders: Sequence[BatchOrder]) -> None:
    def satisfied(order: Sequence[int]) -> list[bool]:
        return [all(ranks[order[i]] <= ranks[order[i + 1]] for i in range(len(order) - 1)) for ranks in all_ranks]

    all_ranks = [each.ranks(*lengths(requests)).tolist() for each in orders]
    best = max(satisfied(order) for order in itertools.permutations(range(len(requests))))
    order = find_order(orders, *lengths(requests))
    found = list(range(len(requests))) if order is None else order.tolist()
    assert sorted(found) == list(range(len(requests)))
    assert best == satisfied(found)
    assert best[0]
    told_apart = [[ranks[index] for ranks, held in zip(all_ranks, best, strict=True) if held] for index in found]
    alike = [(a, b) for (a, x), (b, y) in itertools.pairwise(zip(found, told_apart, strict=True)) if x == y]
    assert all(before < after for before, after in alike)


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=50, deadline=None)
@given(requests=BATCHES, order=ORDERS)
def test_permuting_is_what_building_in_that_order_is(requests: Requests, order: BatchOrder) -> None:
    metadata = metadata_of(requests)
    permuted, permutation = permute(metadata, order)
    built = metadata_of(arranged(requests, permutation.requests.numpy()))
    kept = attrs.evolve(
        permuted, block_table=built.block_table, slot_mapping=built.slot_mapping, extensions=built.extensions
    )
    assert_equal(built, kept)


def test_requests_of_one_kind_stay_in_their_order_in_a_batch_of_any_size() -> None:
    requests = [EXTEND_OF_9, DECODE] * 20
    expected = [*range(1, 40, 2), *range(0, 40, 2)]
    order = find_order([FULL], *lengths(requests))
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
    assert [2, 1, 0] == permutation.requests.tolist()
    assert [5, 3, 4, 0, 1, 2, 6, 7] == permutation.tokens.tolist()
    assert [0, 1, 2, 2] == permuted.generating_indices.tolist()


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


def test_a_group_whose_order_is_not_met_gets_an_order_of_its_own() -> None:
    requests = [FRESH_OF_3, EXTEND_OF_9, DECODE]
    packed = arranged(requests, find_order([FULL, LATENT], *lengths(requests)))
    metadata = metadata_of(packed)
    assert [DECODE, EXTEND_OF_9, FRESH_OF_3] == packed
    assert (True, False) == (is_ordered(FULL, metadata), is_ordered(LATENT, metadata))
    permuted, permutation = permute(metadata, LATENT)
    assert is_ordered(LATENT, permuted)
    assert [0, 2, 1] == permutation.requests.tolist()
    assert [0, 10, 11, 12, *range(1, 10)] == permutation.tokens.tolist()
    assert 2 == split_batch(permuted, LATENT).num_decodes


def test_a_split_counts_each_kind_and_leaves_padding_out() -> None:
    requests = [DECODE, DECODE, EXTEND_OF_9, FRESH_OF_3, Request(0, 5)]
    metadata = padded(metadata_of(requests), num_reqs=2, num_tokens=4)
    assert BatchSplit(
        num_decodes=2,
        num_decode_tokens=2,
        num_extends=1,
        num_extend_tokens=9,
        num_prefills=2,
        num_prefill_tokens=8,
    ) == split_batch(metadata, FULL)


def test_an_extend_is_never_counted_as_a_fresh_prefill() -> None:
    mixed = metadata_of([FRESH_OF_3, EXTEND_OF_9, FRESH_OF_3])
    split = split_batch(mixed, BatchOrder())
    assert (1, 9) == (split.num_extends, split.num_extend_tokens)
    assert (2, 6) == (split.num_prefills, split.num_prefill_tokens)


def test_a_batch_that_is_not_in_order_is_not_split() -> None:
    with pytest.raises(BackendError) as caught:
        split_batch(metadata_of([DECODE, FRESH_OF_3, EXTEND_OF_9]), FULL)
    assert (
        "the batch is not in the order BatchOrder(decode_threshold=1, extends_first=True): request 2 is an extend "
        "(query length 9) and comes after a fresh prefill (query length 3); a builder that splits its batches must "
        "set batch_order to the order that it splits by"
    ) == str(caught.value)


@settings(max_examples=100, deadline=None)
@given(requests=BATCHES, order=ORDERS)
def test_the_kinds_of_a_split_are_the_whole_batch_each_in_its_slice(requests: Requests, order: BatchOrder) -> None:
    metadata, _ = permute(metadata_of(requests), order)
    split = split_batch(metadata, order)
    counts = [split.num_decodes, split.num_extends, split.num_prefills]
    tokens = [split.num_decode_tokens, split.num_extend_tokens, split.num_prefill_tokens]
    assert (len(requests), metadata.num_actual_tokens) == (sum(counts), sum(tokens))
    query_lens = metadata.query_start_loc.diff().tolist()
    contexts = (metadata.seq_lens - metadata.query_start_loc.diff()).tolist()
    starts = list(itertools.accumulate(counts, initial=0))
    assert split.num_decode_tokens == sum(query_lens[: starts[1]])
    assert all(query_len <= order.decode_threshold for query_len in query_lens[: starts[1]])
    assert all(query_len > order.decode_threshold for query_len in query_lens[starts[1] :])
    if order.extends_first:
        assert tokens[1:] == [sum(query_lens[starts[kind] : starts[kind + 1]]) for kind in (1, 2)]
        assert all(context > 0 for context in contexts[starts[1] : starts[2]])
        assert all(context == 0 for context in contexts[starts[2] :])
