"""Sub-batches: each part of a step is what the step would have without the other requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.attention.step import build_metadata
from kvframe.attention.sub_batch import split_requests
from kvframe.contract.errors import BatchError
from kvframe.testing.case import Request
from tests.attention.batches import Requests, any_request, assert_equal, block_tables, metadata_of, padded, step

THREE = (Request(4, 1), Request(0, 6), Request(3, 2))


@st.composite
def cut_batches(draw: st.DrawFn) -> tuple[Requests, Sequence[tuple[int, int]]]:
    """Draw requests, and ranges that cut them."""
    requests = draw(st.lists(any_request(), min_size=1, max_size=6))
    cuts = sorted(draw(st.sets(st.integers(1, len(requests)))) - {len(requests)})
    return requests, list(itertools.pairwise([0, *cuts, len(requests)]))


@settings(max_examples=150, deadline=None)
@given(cut_batches())
def test_each_sub_batch_is_what_its_requests_alone_are(drawn: tuple[Requests, Sequence[tuple[int, int]]]) -> None:
    requests, ranges = drawn
    tables = block_tables(len(requests))
    (metadata,) = build_metadata(step(requests), tables, torch.device("cpu"))
    parts = split_requests(metadata, ranges)
    assert len(ranges) == len(parts)
    for (start, stop), part in zip(ranges, parts, strict=True):
        (alone,) = build_metadata(step(requests[start:stop], range(start, stop)), tables, torch.device("cpu"))
        assert_equal(alone, part)


def test_one_sub_batch_is_the_step_itself() -> None:
    metadata = metadata_of(THREE)
    (part,) = split_requests(metadata, [(0, 3)])
    assert metadata is part


def test_generating_tokens_are_counted_from_the_sub_batch_on() -> None:
    metadata = metadata_of([Request(4, 1), Request(0, 6, num_generating=0), Request(3, 2, num_generating=2)])
    assert [0, 7, 8] == metadata.generating_indices.tolist()
    parts = split_requests(metadata, [(0, 1), (1, 2), (2, 3)])
    assert [[0], [5], [0, 1]] == [part.generating_indices.tolist() for part in parts]
    assert [1, 0, 2] == [part.num_generating for part in parts]


def test_a_sub_batch_without_generating_tokens_has_one_padded_row() -> None:
    first, second = split_requests(metadata_of([Request(0, 4, num_generating=0), Request(0, 2)]), [(0, 1), (1, 2)])
    assert (0, [3], [3]) == (
        first.num_generating,
        first.generating_indices.tolist(),
        first.generating_indices_cpu.tolist(),
    )
    assert (1, [1]) == (second.num_generating, second.generating_indices.tolist())


def test_the_longest_request_is_the_sub_batchs_own() -> None:
    parts = split_requests(metadata_of(THREE), [(0, 1), (1, 3)])
    assert [(1, 5), (6, 6)] == [(part.max_query_len, part.max_seq_len) for part in parts]


def test_padded_tokens_go_to_the_last_sub_batch() -> None:
    first, second = split_requests(padded(metadata_of(THREE), num_reqs=2, num_tokens=3), [(0, 2), (2, 5)])
    assert (7, 7) == (first.num_actual_tokens, first.slot_mapping.shape[0])
    assert (2, 5) == (second.num_actual_tokens, second.slot_mapping.shape[0])
    assert [0, 2, 2, 2] == second.query_start_loc.tolist()
    assert (5, 3) == (len(second.extensions["names"].values), len(second.extensions["owners"].values))


def test_nothing_is_read_from_the_device() -> None:
    # Tensors of the meta device hold no values: reading one raises.
    parts = split_requests(
        metadata_of([Request(4, 1), Request(0, 6, num_generating=0)], device="meta"), [(0, 1), (1, 2)]
    )
    assert [1, 6] == [part.num_actual_tokens for part in parts]


@pytest.mark.parametrize(
    "ranges",
    [
        pytest.param([], id="none"),
        pytest.param([(0, 2)], id="too few"),
        pytest.param([(0, 1), (2, 3)], id="gap"),
        pytest.param([(0, 2), (1, 3)], id="overlap"),
        pytest.param([(1, 3), (0, 1)], id="out of order"),
        pytest.param([(0, 0), (0, 3)], id="empty"),
        pytest.param([(0, 4)], id="too many"),
    ],
)
def test_ranges_that_are_not_all_requests_in_order_are_refused(ranges: Sequence[tuple[int, int]]) -> None:
    shown = ", ".join(f"[{start}, {stop})" for start, stop in ranges) or "(none)"
    with pytest.raises(BatchError) as caught:
        split_requests(metadata_of(THREE), ranges)
    assert (
        "sub-batches must hold all 3 requests of the step, in order, at least one each; "
        f"got the ranges {shown}" == str(caught.value)
    )


def test_a_sub_batch_of_padding_alone_is_refused() -> None:
    with pytest.raises(BatchError, match=r"the requests \[3, 5\) has no token; join it with another"):
        split_requests(padded(metadata_of(THREE), num_reqs=2, num_tokens=3), [(0, 3), (3, 5)])


def test_a_step_with_static_shapes_is_not_cut() -> None:
    static = attrs.evolve(metadata_of(THREE), static_shapes=True)
    with pytest.raises(BatchError, match="cut the step before it is padded, and pad each sub-batch"):
        split_requests(static, [(0, 1), (1, 3)])
    assert (static,) == split_requests(static, [(0, 3)])
