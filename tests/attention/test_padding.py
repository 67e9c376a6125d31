"""A step's metadata at a graph's sizes: the padding is added, and the rest is unchanged."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_testing.batches import wrapper_batches
from kvframe_testing.case import Request
from kvframe_testing.metadata import find_problem, make_metadata

from kvframe.attention.padding import pad_metadata
from kvframe.contract.errors import BatchError
from kvframe.contract.metadata import Axis, CommonAttentionMetadata, Extension

SIZES = {"num_reqs": 4, "num_tokens": 8, "num_generating": 3, "max_query_len": 6}


def step() -> CommonAttentionMetadata:
    return make_metadata([Request(2, 3), Request(4, 1)], block_size=4)


def test_added_requests_have_no_tokens_and_the_null_page() -> None:
    padded = pad_metadata(step(), **SIZES)
    assert [0, 3, 4, 4, 4] == padded.query_start_loc.tolist() == padded.query_start_loc_cpu.tolist()
    assert [5, 5, 0, 0] == padded.seq_lens.tolist() == padded.seq_lens_cpu.tolist()
    assert [[1, 2], [3, 4], [0, 0], [0, 0]] == padded.block_table.tolist()
    assert 4 == padded.num_reqs


def test_added_tokens_lie_in_the_null_page() -> None:
    padded = pad_metadata(step(), **SIZES)
    assert [6, 7, 8, 16, 0, 0, 0, 0] == padded.slot_mapping.tolist()
    assert 4 == padded.num_actual_tokens


def test_added_generating_rows_repeat_the_last() -> None:
    padded = pad_metadata(step(), **SIZES)
    assert [2, 3, 3] == padded.generating_indices.tolist() == padded.generating_indices_cpu.tolist()
    assert 2 == padded.num_generating


def test_limits_are_the_graphs() -> None:
    padded = pad_metadata(step(), **SIZES, max_seq_len=14)
    assert (6, 14, True) == (padded.max_query_len, padded.max_seq_len, padded.static_shapes)
    assert [[1, 2, 0, 0], [3, 4, 0, 0]] == padded.block_table[:2].tolist()


def test_extensions_are_padded_along_their_axis() -> None:
    def extension(axis: Axis, values: list[int]) -> Extension:
        return Extension(torch.tensor(values), axis, torch.tensor(values))

    extensions = {
        "lengths": extension(Axis.REQUEST, [1, 2]),
        "of_tokens": Extension(torch.tensor([1, 2, 3, 4]), Axis.TOKEN),
        "of_the_step": extension(Axis.STEP, [7, 7, 7]),
    }
    padded = pad_metadata(attrs.evolve(step(), extensions=extensions), **SIZES).extensions
    of_requests, of_tokens = padded["lengths"], padded["of_tokens"]
    assert of_requests.values_cpu is not None
    assert [1, 2, 0, 0] == of_requests.values.tolist() == of_requests.values_cpu.tolist()
    assert ([1, 2, 3, 4, 0, 0, 0, 0], None) == (of_tokens.values.tolist(), of_tokens.values_cpu)
    assert [7, 7, 7] == padded["of_the_step"].values.tolist()


@pytest.mark.parametrize(
    ("name", "size", "least"),
    [
        ("num_reqs", 1, 2),
        ("num_tokens", 3, 6),
        ("num_generating", 1, 2),
        ("max_query_len", 2, 3),
        ("max_seq_len", 4, 5),
    ],
)
def test_a_graph_that_is_too_small_is_refused(name: str, size: int, least: int) -> None:
    with pytest.raises(BatchError, match=f"{name} = {size} is too small for this step, which needs at least {least}"):
        pad_metadata(step(), **{**SIZES, name: size})


BATCHES = wrapper_batches(4)


@given(name=st.sampled_from(sorted(BATCHES)), more=st.tuples(*[st.integers(0, 5)] * 5))
def test_real_rows_stay_as_they_are(name: str, more: tuple[int, ...]) -> None:
    metadata = make_metadata(BATCHES[name], block_size=4)
    more_reqs, more_tokens, more_generating, more_query, more_seq = more
    padded = pad_metadata(
        metadata,
        num_reqs=metadata.num_reqs + more_reqs,
        num_tokens=metadata.num_actual_tokens + more_query + more_tokens,
        num_generating=len(metadata.generating_indices) + more_generating,
        max_query_len=metadata.max_query_len + more_query,
        max_seq_len=metadata.max_seq_len + more_seq,
    )
    assert "" == find_problem(padded)
    for field in attrs.fields(CommonAttentionMetadata):
        before: Any = getattr(metadata, field.name)
        if isinstance(before, torch.Tensor):
            real = tuple(slice(size) for size in before.shape)
            assert torch.equal(before, getattr(padded, field.name)[real]), field.name
    same = ("num_actual_tokens", "num_generating", "block_size", "causal")
    assert [getattr(metadata, name) for name in same] == [getattr(padded, name) for name in same]


def test_a_padded_step_can_be_padded_further() -> None:
    once = pad_metadata(step(), **{**SIZES, "num_reqs": 3, "num_tokens": 7})
    twice, directly = pad_metadata(once, **SIZES), pad_metadata(step(), **SIZES)
    assert directly.slot_mapping.tolist() == twice.slot_mapping.tolist()
    assert directly.query_start_loc.tolist() == twice.query_start_loc.tolist()
