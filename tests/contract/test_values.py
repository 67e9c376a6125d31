"""The values of a step's metadata that kernels trust: each is accepted at its limit, and refused one beyond it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from kvframe_testing.case import Request
from kvframe_testing.metadata import make_metadata

from kvframe.attention.padding import pad_metadata
from kvframe.attention.shapes import find_misfit
from kvframe.attention.values import find_contradiction, find_foreign_id, find_wrong_tensor
from kvframe.contract.metadata import (
    RANGE_ENDS,
    SEQ_STARTS,
    Axis,
    CommonAttentionMetadata,
    Extension,
)

NUM_BLOCK_IDS = 7

EXTENSIONS = {SEQ_STARTS: Axis.REQUEST, RANGE_ENDS: Axis.TOKEN}


def step() -> CommonAttentionMetadata:
    """Return a step of 11 and 3 tokens, 2 and 3 of them new, in blocks of 4: ids 1 to 6, capacity for 12 tokens."""
    return make_metadata([Request(9, 2), Request(0, 3)], block_size=4)


def padded() -> CommonAttentionMetadata:
    """Return the same at a graph's sizes: 8 tokens, 5 of them actual, and 4 requests."""
    return pad_metadata(step(), num_reqs=4, num_tokens=8, num_generating=3, max_query_len=6)


def changed(metadata: CommonAttentionMetadata, **changes: Any) -> CommonAttentionMetadata:
    """Return metadata with other numbers; a list stands for a tensor and its host copy, or for an extension."""
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        if name in EXTENSIONS:
            values = torch.tensor(value, dtype=torch.int32)
            fields["extensions"] = {name: Extension(values, EXTENSIONS[name], values)}
        elif isinstance(value, list):
            dtype = getattr(metadata, name).dtype
            fields |= {name: torch.tensor(value, dtype=dtype), f"{name}_cpu": torch.tensor(value, dtype=dtype)}
        else:
            fields[name] = value
    return attrs.evolve(metadata, **fields)


RIGHT: dict[str, Mapping[str, Any]] = {
    "as it is": {},
    "a limit of queries that is the step": {"max_query_len": 5},
    "a limit of tokens that is the table": {"max_seq_len": 12},
    "a request that fills the table": {"seq_lens": [12, 3], "max_seq_len": 12},
    "no generating token": {"num_generating": 0},
    "starts at the first new tokens": {SEQ_STARTS: [9, 0]},
    "starts at the ends, if the mask is not causal": {SEQ_STARTS: [11, 3], "causal": False},
    "ranges that end with their requests": {RANGE_ENDS: [11, 11, 2, 2, 0]},
    "ranges of a step that is not causal, which no kernel reads": {RANGE_ENDS: [99, 0, 0, 0, 0], "causal": False},
    "fewer keys than queries, if the mask is not causal": {"seq_lens": [11, 2], "causal": False},
}

WRONG: dict[str, tuple[Mapping[str, Any], str]] = {
    "no request": (
        {"query_start_loc": [0], "seq_lens": [], "block_table": torch.zeros(0, 3, dtype=torch.int32), "num_reqs": 0},
        "there is no request",
    ),
    "a first start after 0": ({"query_start_loc": [1, 2, 5]}, "query_start_loc starts at 1, not at 0"),
    "a start that falls": ({"query_start_loc": [0, 6, 5]}, "query_start_loc falls after request 1"),
    "an end before the last token": ({"query_start_loc": [0, 2, 4]}, "ends at 4, and num_actual_tokens is 5"),
    "an end after the last token": ({"query_start_loc": [0, 2, 6]}, "ends at 6, and num_actual_tokens is 5"),
    "more tokens than there are": (
        {"query_start_loc": [0, 2, 6], "num_actual_tokens": 6},
        "slot_mapping has 5 tokens, and num_actual_tokens is 6",
    ),
    "a limit of queries that is too low": ({"max_query_len": 2}, "max_query_len is 2, and the longest request has 3"),
    "a limit of queries beyond the step": ({"max_query_len": 6}, "max_query_len is 6, and the longest request has 3"),
    "a length below 0": ({"seq_lens": [11, -1]}, "seq_lens of request 1 is -1"),
    "a length beyond the table": (
        {"seq_lens": [13, 3], "max_seq_len": 12},
        "seq_lens of request 0 is 13, and block_table has blocks of 12 tokens",
    ),
    "a limit of tokens that is too low": ({"max_seq_len": 10}, "max_seq_len is 10, the longest request has 11 tokens"),
    "a limit of tokens beyond the table": ({"max_seq_len": 13}, "max_seq_len is 13, the longest request has 11 tokens"),
    "fewer keys than queries": ({"seq_lens": [11, 2]}, "request 1 has 3 new tokens, and seq_lens of it is 2"),
    "a negative number that generate": ({"num_generating": -1}, "num_generating is -1, of 5 tokens"),
    "more that generate than are listed": ({"num_generating": 3}, "num_generating is 3, of 5 tokens and 2 generating"),
    "a generating token below 0": ({"generating_indices": [-1, 4]}, "names tokens from -1 to 4, and there are 5"),
    "a generating token beyond the step": ({"generating_indices": [1, 5]}, "names tokens from 1 to 5, and there are 5"),
    "generating tokens that fall": ({"generating_indices": [4, 1]}, "generating_indices does not rise"),
    "a generating token twice": ({"generating_indices": [4, 4]}, "generating_indices does not rise"),
    "a start below 0": ({SEQ_STARTS: [-1, 0]}, "the extension 'seq_starts' does not lie between 0 and"),
    "a start after the first new token": ({SEQ_STARTS: [10, 0]}, "the extension 'seq_starts' does not lie between"),
    "a range that ends after its request": (
        {RANGE_ENDS: [0, 12, 0, 0, 0]},
        "the extension 'range_ends' does not lie between each token and the end of its request",
    ),
    "a range that ends before its token": ({RANGE_ENDS: [0, 0, 0, 0, 2]}, "the extension 'range_ends' does not"),
    "a range that ends below 0": ({RANGE_ENDS: [-1, 0, 0, 0, 0]}, "the extension 'range_ends' does not lie"),
    "a start after the end": ({SEQ_STARTS: [12, 3], "causal": False}, "the extension 'seq_starts' does not lie betwe"),
}

WRONG_WHEN_PADDED: dict[str, tuple[Mapping[str, Any], str]] = {
    "a generating token that is padding": ({"generating_indices": [1, 5, 5]}, "from 1 to 5, and there are 5"),
    "a generating token beyond the padding": ({"generating_indices": [1, 4, 8]}, "from 1 to 8, and there are 5"),
    "padded generating tokens that fall": ({"generating_indices": [1, 4, 0]}, "generating_indices does not rise"),
}


@pytest.mark.parametrize("what", RIGHT)
def test_numbers_at_their_limits_are_taken(what: str) -> None:
    assert find_contradiction(changed(step(), **RIGHT[what])) is None
    assert find_contradiction(padded()) is None


@pytest.mark.parametrize("what", WRONG)
def test_numbers_beyond_their_limits_are_refused_whatever_a_wrapper_left_as_it_was(what: str) -> None:
    changes, message = WRONG[what]
    batch = changed(step(), causal=changes.get("causal", True))
    for before in (None, batch):
        assert message in str(find_contradiction(changed(batch, **changes), before))


@pytest.mark.parametrize("what", WRONG_WHEN_PADDED)
def test_numbers_of_padded_tokens_are_refused(what: str) -> None:
    changes, message = WRONG_WHEN_PADDED[what]
    assert message in str(find_contradiction(changed(padded(), **changes), padded()))


def test_a_mask_that_a_wrapper_makes_causal_is_checked() -> None:
    batch = changed(step(), seq_lens=[11, 2], causal=False)
    assert find_contradiction(batch) is None
    assert "request 1 has 3 new tokens" in str(find_contradiction(attrs.evolve(batch, causal=True), batch))


def test_fewer_slots_or_a_narrower_table_than_a_wrapper_was_given_are_checked() -> None:
    batch = step()
    fewer = attrs.evolve(batch, slot_mapping=batch.slot_mapping[:4])
    assert "slot_mapping has 4 tokens, and num_actual_tokens is 5" in str(find_contradiction(fewer, batch))
    narrower = attrs.evolve(batch, block_table=batch.block_table[:, :2])
    assert "block_table has blocks of 8 tokens" in str(find_contradiction(narrower, batch))


def wrong_tensors() -> dict[str, tuple[CommonAttentionMetadata, str | None]]:
    """Return metadata with one changed tensor, and the expected error."""
    batch, wide = step(), padded()
    table, slots = batch.block_table, batch.slot_mapping
    starts = torch.tensor([9, 0], dtype=torch.int32)
    on_device = {SEQ_STARTS: Extension(starts + 1, Axis.REQUEST, starts)}
    wrong_padding = wide.slot_mapping.clone()
    wrong_padding[-1] = 1
    return {
        "as it is": (batch, None),
        "padded": (wide, None),
        "starts": (attrs.evolve(batch, query_start_loc=batch.query_start_loc + 1), "query_start_loc is not what "),
        "lengths": (attrs.evolve(batch, seq_lens=batch.seq_lens + 1), "seq_lens is not what seq_lens_cpu says"),
        "generating": (
            attrs.evolve(batch, generating_indices=batch.generating_indices + 1),
            "generating_indices is not what generating_indices_cpu says",
        ),
        "an extension": (attrs.evolve(batch, extensions=on_device), "the extension 'seq_starts' is not what it is on"),
        "the last block": (attrs.evolve(batch, block_table=table.clamp(max=NUM_BLOCK_IDS - 1)), None),
        "a block beyond": (
            attrs.evolve(batch, block_table=table.where(table < 6, NUM_BLOCK_IDS)),
            "block_table names 7, and there are 7 in all",
        ),
        "a block below": (attrs.evolve(batch, block_table=table - 2), "block_table names -1, and there are 7 in all"),
        "the last slot": (attrs.evolve(batch, slot_mapping=torch.full_like(slots, 27)), None),
        "a slot beyond": (attrs.evolve(batch, slot_mapping=slots * 0 + 28), "slot_mapping names 28, and there are 28"),
        "a slot below": (attrs.evolve(batch, slot_mapping=slots * 0 - 1), "slot_mapping names -1, and there are 28"),
        "a slot of padding": (attrs.evolve(wide, slot_mapping=wrong_padding), "a padded token has a slot other than 0"),
    }


@pytest.mark.parametrize("what", wrong_tensors())
def test_tensors_that_kernels_read_are_refused_beyond_their_limits(what: str) -> None:
    metadata, message = wrong_tensors()[what]
    for before in (None, step()):
        problem = find_wrong_tensor(metadata, before, NUM_BLOCK_IDS)
        assert problem is None if message is None else message in str(problem)


def test_of_a_pool_of_unknown_size_only_ids_below_0_are_refused() -> None:
    assert find_wrong_tensor(attrs.evolve(step(), block_table=step().block_table + 10**6)) is None
    assert "block_table names -1" in str(find_wrong_tensor(attrs.evolve(step(), block_table=step().block_table - 2)))


def test_blocks_and_slots_of_other_steps_are_foreign() -> None:
    batch = step()
    reversed_ = attrs.evolve(batch, block_table=batch.block_table.flip(1) * (batch.block_table > 1))
    assert find_foreign_id(reversed_, batch) is None
    assert "block_table names 7, which is none of those" in str(
        find_foreign_id(attrs.evolve(batch, block_table=batch.block_table + 1), batch)
    )
    assert "slot_mapping names 100, which is none of those" in str(
        find_foreign_id(attrs.evolve(batch, slot_mapping=torch.full_like(batch.slot_mapping, 100)), batch)
    )


@pytest.mark.parametrize("name", EXTENSIONS)
def test_extensions_that_kernels_read_are_int32_and_of_one_dimension(name: str) -> None:
    batch = step()
    count = {Axis.REQUEST: 2, Axis.TOKEN: 5}
    other = Axis.TOKEN if EXTENSIONS[name] is Axis.REQUEST else Axis.REQUEST

    def problem(axis: Axis, *shape: int, dtype: torch.dtype = torch.int32) -> str | None:
        values = torch.ones(shape, dtype=dtype)
        return find_misfit(attrs.evolve(batch, extensions={name: Extension(values, axis, values)}))

    own = EXTENSIONS[name]
    assert problem(own, count[own]) is None
    assert f"the extension {name!r} has the dtype torch.int64, not" in str(problem(own, count[own], dtype=torch.int64))
    assert f"the extension {name!r} has 2 dimensions, the first for each {own}" in str(problem(own, count[own], 1))
    for axis, length in ((other, count[other]), (Axis.STEP, 1)):
        assert f"the first for each {axis}, not one for each {own}" in str(problem(axis, length))
