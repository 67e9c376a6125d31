"""Steps with ranges of prompts as runs of queries, and the two parts of such a step."""

from __future__ import annotations

import attrs
import torch
from kvframe_testing.case import Request
from kvframe_testing.framework import pad_metadata
from kvframe_testing.metadata import make_metadata

from kvframe.contract import RANGE_ENDS, Axis, CommonAttentionMetadata, Extension, RangeRuns, lookahead_ends

REQUESTS = [Request(9, 1), Request(3, 6), Request(5, 0, 0), Request(0, 3)]
ENDS = [0, 0, 6, 6, 8, 8, 0, 3, 3, 3]
"""The second request computes tokens 3 to 8, and its ranges are 4 and 5, and 6 and 7. The last one is one range."""


def ranged(step: CommonAttentionMetadata, ends: list[int]) -> CommonAttentionMetadata:
    values = torch.tensor(ends, dtype=torch.int32)
    return attrs.evolve(step, extensions={RANGE_ENDS: Extension(values.clone(), Axis.TOKEN, values)})


STEP = ranged(make_metadata(REQUESTS, 4), ENDS)


def test_a_run_is_consecutive_queries_of_a_request_with_one_end() -> None:
    runs = RangeRuns.of(STEP)
    assert [0, 1, 2, 4, 6, 7, 10] == runs.query_start_loc.tolist()
    assert [0, 1, 1, 1, 1, 3] == runs.requests.tolist()
    assert [0, 5, 3, 1, 0, 0] == runs.num_later.tolist()
    assert [1, 1, 0, 0, 1, 0] == runs.is_causal.tolist()
    assert [0, 0, 6, 8, 0, 3] == runs.range_lens.tolist()
    assert 3 == runs.max_query_len


def test_each_part_has_the_keys_of_its_own_runs_and_the_blocks_of_all() -> None:
    causal, both_ways = RangeRuns.of(STEP).parts()
    assert [10, 4, 0, 0, 9, 0] == causal.seq_lens.tolist()
    assert [0, 0, 6, 8, 0, 3] == both_ways.seq_lens.tolist()
    for part in (causal, both_ways):
        assert [0, 1, 2, 4, 6, 7, 10] == part.query_start_loc.tolist()
        assert [STEP.block_table[row].tolist() for row in (0, 1, 1, 1, 1, 3)] == part.block_table.tolist()
        assert {torch.int32} == {tensor.dtype for tensor in (part.seq_lens, part.query_start_loc, part.block_table)}
        assert 3 == part.max_query_len


def test_runs_of_one_query_are_said_to_have_two() -> None:
    assert 2 == RangeRuns.of(ranged(make_metadata([Request(9, 1), Request(0, 1)], 4), [0, 1])).max_query_len


def test_with_static_shapes_there_are_as_many_runs_as_tokens_and_the_last_ones_are_empty() -> None:
    step = make_metadata([Request(3, 3), Request(9, 1)], 4)
    step = pad_metadata(step, num_reqs=4, num_tokens=6, num_generating=4, max_query_len=5)
    runs = RangeRuns.of(ranged(step, [0, 6, 6, 0, 0, 0]))
    assert [0, 1, 3, 4, 4, 4, 4] == runs.query_start_loc.tolist()
    assert 5 == runs.max_query_len
    causal, both_ways = runs.parts()
    assert [4, 0, 10, 0, 0, 0] == causal.seq_lens.tolist()
    assert [0, 6, 0, 0, 0, 0] == both_ways.seq_lens.tolist()


def test_the_ends_of_a_lookahead_are_those_of_each_query_and_at_most_its_request() -> None:
    step = make_metadata(REQUESTS, 4)
    assert [10, 6, 7, 8, 9, 9, 9, 3, 3, 3] == lookahead_ends(step, 2).tolist()
    assert [10, 4, 5, 6, 7, 8, 9, 1, 2, 3] == lookahead_ends(step, 0).tolist()
    padded = pad_metadata(step, num_reqs=6, num_tokens=12, num_generating=12, max_query_len=6)
    assert [10, 6, 7, 8, 9, 9, 9, 3, 3, 3, 0, 0] == lookahead_ends(padded, 2).tolist()
