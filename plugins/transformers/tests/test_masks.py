"""A mask function is classified by the tokens that it shows."""

from __future__ import annotations

from typing import Any

import torch
from kvframe_transformers.masks import classify_mask
from transformers import masking_utils


def test_a_causal_mask_is_full_attention() -> None:
    assert classify_mask(masking_utils.causal_mask_function, 100).kind == "full_attention"


def test_a_sliding_mask_is_a_window_of_its_size() -> None:
    mask = classify_mask(masking_utils.sliding_window_causal_mask_function(12), 100)
    assert ("sliding_window", {"window": 12}) == (mask.kind, mask.options)


def test_a_window_longer_than_the_model_is_still_a_window() -> None:
    mask = classify_mask(masking_utils.sliding_window_causal_mask_function(4096), 100, local_size=4096)
    assert ("sliding_window", {"window": 4096}) == (mask.kind, mask.options)


def test_a_window_of_one_token_is_not_chunks_of_one_token() -> None:
    assert classify_mask(masking_utils.sliding_window_causal_mask_function(1), 100).kind == "sliding_window"


def test_a_chunked_mask_is_chunks_of_its_size() -> None:
    function = masking_utils.chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64))
    mask = classify_mask(function, 100, local_size=16)
    assert ("chunked_local", {"chunk": 16}) == (mask.kind, mask.options)


def test_a_chunked_mask_over_tensors_without_data_is_known_by_the_config() -> None:
    function = masking_utils.chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64, device="meta"))
    mask = classify_mask(function, 100, local_size=16, chunk_size=16)
    assert ("chunked_local", {"chunk": 16}) == (mask.kind, mask.options)


def test_a_bidirectional_mask_is_unknown() -> None:
    mask = classify_mask(masking_utils.bidirectional_mask_function, 100)
    assert (None, "looks at tokens that come later (bidirectional attention)") == (mask.kind, mask.why)
    assert (True, {}) == (mask.is_bidirectional, mask.options)


def test_a_window_in_both_directions_has_two_sizes() -> None:
    mask = classify_mask(masking_utils.sliding_window_bidirectional_mask_function(4), 100)
    assert (None, True, {"window": 5, "lookahead": 4}) == (mask.kind, mask.is_bidirectional, mask.options)
    assert "but not at all of them (a window in both directions)" in mask.why


def test_a_window_in_both_directions_may_reach_further_to_one_side() -> None:
    def uneven(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key > query - 3) & (key <= query + 20)

    assert {"window": 3, "lookahead": 20} == classify_mask(uneven, 100).options


def test_later_tokens_that_are_no_window_are_unknown() -> None:
    def in_blocks(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key // 8 == query // 8

    def every_second(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query - key) % 2 == 0

    masks = [classify_mask(function, 100) for function in (in_blocks, every_second)]
    assert [False, False] == [mask.is_bidirectional for mask in masks]
    assert "but not at all of them, and not in a window" in masks[0].why
    assert "with gaps between them" in masks[1].why


def test_a_mask_with_gaps_is_unknown() -> None:
    def every_second(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & ((query - key) % 2 == 0)

    mask = classify_mask(every_second, 100)
    assert (None, "has a mask with gaps: position 2 sees 2 tokens of [0, 2]") == (mask.kind, mask.why)


def test_a_mask_that_reads_the_models_inputs_is_unknown() -> None:
    function = masking_utils.packed_sequence_mask_function(torch.zeros(1, 4, dtype=torch.int64, device="meta"))
    assert (None, "has a mask that depends on the model's inputs") == (
        (mask := classify_mask(function, 100)).kind,
        mask.why,
    )


def test_a_causal_mask_of_uneven_reach_is_unknown() -> None:
    def half(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (2 * key >= query)

    assert classify_mask(half, 100).kind is None
