"""Entries of a layer at run time: written by a step's tokens, read by its requests, in pages of their own."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.contract import (
    EntryStep,
    LayerSpec,
    SpecError,
)
from kvframe.contract.errors import ModelError, WrapperError
from kvframe.contract.wrapper import MetadataWrapper
from kvframe.planning.spec_check import check_spec_at_set_up
from kvframe.selection.choice import bind_chain
from kvframe.selection.skipping import find_skippable_layers
from tests.contract.test_choice import batch, plain_layer


def step_of(tokens_per_entry: int, query_lens: list[int], seq_lens: list[int]) -> EntryStep:
    metadata = batch(query_lens, seq_lens)
    slots = []
    for request, (query_len, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        slots += [int(metadata.block_table[request, p // 4]) * 4 + p % 4 for p in range(length - query_len, length)]
    metadata = attrs.evolve(metadata, slot_mapping=torch.tensor(slots))
    return EntryStep({"key": torch.full((110, 4 // tokens_per_entry, 1), -1.0)}, metadata, tokens_per_entry)


def test_a_request_reads_the_entries_that_its_tokens_wrote() -> None:
    step = step_of(1, [7, 2], [7, 2])
    step.write(key=torch.arange(9.0)[:, None])
    assert [*range(7)] == step.read(0)["key"].flatten().tolist()
    assert [7, 8] == step.read(1)["key"].flatten().tolist()
    assert [3, 4] == step.read(0, 3, 5)["key"].flatten().tolist()


def test_several_requests_are_read_together() -> None:
    step = step_of(1, [6, 2], [6, 2])
    step.write(key=torch.arange(8.0)[:, None])
    first, second = step.read_together([0, 1])["key"][..., 0].tolist()
    assert ([0, 1, 2, 3, 4, 5], [6, 7]) == (first, second[:2])


def test_some_tokens_write_their_entries_alone() -> None:
    step = step_of(1, [3, 2], [3, 2])
    step.write(slice(3, 5), key=torch.tensor([[5.0], [6.0]]))
    assert [-1, -1, -1] == step.read(0)["key"].flatten().tolist()
    assert [5, 6] == step.read(1)["key"].flatten().tolist()


def test_entries_of_several_tokens_are_stored_by_their_number() -> None:
    # Tokens 4 to 8 of a request of 9: the third and the fourth group of two tokens end with the tokens 5 and 7.
    step = step_of(2, [5], [9])
    step.store(0, 2, key=torch.tensor([[5.0], [7.0]]))
    assert [-1, -1, 5, 7] == step.read(0)["key"].flatten().tolist()


def test_an_entry_of_a_token_that_is_not_computed_is_refused() -> None:
    with pytest.raises(ModelError, match="an entry is written with"):
        step_of(2, [5], [9]).store(0, 3, key=torch.zeros(2, 1))


def test_entries_of_several_tokens_are_not_written_token_by_token() -> None:
    with pytest.raises(ModelError, match="an entry is written with"):
        step_of(2, [5], [9]).write(key=torch.zeros(5, 1))


def test_requests_without_new_tokens_are_left_out() -> None:
    first, second = step_of(1, [3, 0, 2], [7, 4, 2]).requests
    assert (0, slice(0, 3), 4, 7) == (first.request, first.rows, first.first, first.stop)
    assert (2, slice(3, 5), 0, 2) == (second.request, second.rows, second.first, second.stop)


def test_entries_of_another_shape_are_refused() -> None:
    with pytest.raises(ModelError, match=r"an entry is written with \{'key': \(2, 3\)\}, and it keeps"):
        step_of(1, [2], [2]).write(key=torch.zeros(2, 3))
    with pytest.raises(ModelError, match="an entry is written with"):
        step_of(1, [2], [2]).write(value=torch.zeros(2, 1))


def test_a_block_that_would_hold_part_of_an_entry_is_refused_at_set_up() -> None:
    @attrs.frozen(kw_only=True)
    class Uneven(FullAttentionSpec):
        @property
        def tokens_per_entry(self) -> int:
            return 3

    spec = Uneven(block_size=4, num_kv_heads=1, head_size=8)
    with pytest.raises(SpecError, match="tokens_per_entry is 3; expected a divisor of its block_size, 4"):
        check_spec_at_set_up(spec, 20, 4)


@pytest.mark.parametrize("layer", [plain_layer(choice={"max_chosen": 2}), plain_layer(merged=True)])
def test_no_wrapper_serves_a_layer_whose_calls_have_rows_of_their_own(layer: LayerSpec) -> None:
    class Nothing(MetadataWrapper):
        name = "nothing"

        def __call__(self, metadata: Any) -> Any:
            return metadata

    with pytest.raises(WrapperError, match=r"wrapper 'nothing' cannot serve layer 'layer': it (reads|is merged)"):
        bind_chain([Nothing()], layer)


def test_layers_that_read_choices_are_not_skipped() -> None:
    owner = plain_layer()
    reader = attrs.evolve(plain_layer(choice={"max_chosen": 2}), name="reader", shares_with="layer")
    assert () == find_skippable_layers([owner, reader])
    assert ("plain",) == find_skippable_layers([owner, attrs.evolve(owner, name="plain", shares_with="layer")])
