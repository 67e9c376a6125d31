"""Layers that keep no state: scratch pages of the running step, with the usual backends, wrappers and builders."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_attention_free import EncoderOnlySpec

from kvframe.attention.batch_metadata import StepBatch
from kvframe.attention.padding import pad_metadata
from kvframe.attention.storage import LocalCaches, num_pages
from kvframe.config.stack import Stack
from kvframe.contract.errors import SpecError
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import FieldUse, MetadataWrapper
from kvframe.planning.groups import group_layers
from tests.attention.attending import CPU, Bench, close, full, layer
from tests.support.layers import share_caches
from tests.support.plugins import plugin

MIXED = [(0, 9), (0, 1), (0, 4), (0, 12), (0, 3)]
LENS = [new for _, new in MIXED]


def encoder(**options: int) -> EncoderOnlySpec:
    return EncoderOnlySpec(**{"block_size": 4, "num_kv_heads": 1, "head_size": 4, **options})


def step(lens: Sequence[int]) -> StepBatch:
    ends = np.cumsum(lens) - 1
    # Their rows in the block tables do not matter.
    rows = np.arange(len(lens)) + 50
    return StepBatch(
        rows=rows, num_computed=np.zeros(len(lens), dtype=int), query_lens=np.array(lens), generating_indices=ends
    )


def caches(*specs: EncoderOnlySpec, max_tokens: int = 64, max_reqs: int = 8) -> LocalCaches:
    layers = [layer(f"L{index}", spec) for index, spec in enumerate(specs)]
    return LocalCaches(layers, CPU, max_tokens=max_tokens, max_reqs=max_reqs)


def backend(name: str) -> Stack:
    return Stack.from_mapping({"rules": [{"layers": "*", "backend": name}]})


# --- the pages --------------------------------------------------------------------------------------------------------


def test_requests_get_pages_that_follow_one_another() -> None:
    (metadata,) = caches(encoder()).metadata(step([5, 4, 1]))
    assert [[1, 2], [3, 0], [4, 0]] == metadata.block_table.tolist()
    assert [4, 5, 6, 7, 8, 12, 13, 14, 15, 16] == metadata.slot_mapping.tolist()
    assert [5, 4, 1] == metadata.seq_lens.tolist()


def test_a_shorter_step_sees_nothing_of_the_one_before() -> None:
    made = caches(encoder())
    made.metadata(step([20, 20]))
    (metadata,) = made.metadata(step([1, 3]))
    assert [[1], [2]] == metadata.block_table.tolist()


def test_layers_whose_state_is_alike_share_their_pages_and_others_do_not() -> None:
    made = caches(encoder(), encoder(), encoder(head_size=8), encoder(block_size=8))
    assert made.views["L0"] is made.views["L1"]
    places = {view["k"].untyped_storage().data_ptr() for view in made.views.values()}
    assert 3 == len(places)
    assert {"L0": 0, "L1": 0, "L2": 0, "L3": 1} == made.metadata_indices
    assert [4, 8] == [metadata.block_size for metadata in made.metadata(step([3]))]


def test_layers_that_keep_something_or_do_not_attend_have_no_scratch_pages() -> None:
    silent = LayerSpec(name="silent", spec=encoder())
    made = LocalCaches([layer("full", full()), silent], CPU, max_tokens=64, max_reqs=8)
    assert ({}, 0, ()) == (made.views, made.num_bytes, made.metadata(step([3])))


@given(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_the_pages_of_a_step_are_enough_and_never_two_requests(block_size: int, lens: list[int]) -> None:
    made = caches(encoder(block_size=block_size), max_tokens=sum(lens), max_reqs=len(lens))
    (metadata,) = made.metadata(step(lens))
    used = metadata.block_table[metadata.block_table > 0].tolist()
    assert list(range(1, len(used) + 1)) == sorted(used)
    assert len(used) <= num_pages(block_size, sum(lens), len(lens)) == len(made.views["L0"]["k"]) - 1
    slots = metadata.slot_mapping.tolist()
    assert len(set(slots)) == len(slots) == sum(lens)
    assert set(slots) <= {page * block_size + offset for page in used for offset in range(block_size)}


# --- through the backends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "torch_reference"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_token_sees_its_whole_request_and_no_other(name: str, block_size: int) -> None:
    specs = [layer("E0", encoder(block_size=block_size)), layer("E1", encoder(block_size=block_size))]
    bench = Bench(specs, backend(name))
    outputs = bench.run(MIXED)
    for spec in bench.layers:
        assert close(bench.dense(spec, MIXED), outputs[spec.name])


@pytest.mark.parametrize("name", ["torch", "torch_reference"])
def test_layers_with_caches_run_beside_them(name: str) -> None:
    layers = [layer("F0", full()), layer("E1", encoder(block_size=2)), layer("F2", full()), layer("E3", encoder())]
    bench = Bench(layers, backend(name))
    outputs = bench.run(MIXED)
    assert [("F0", "F2"), ("E1",), ("E3",)] == bench.groups()
    assert [("F0", "F2")] == [group.layers for group in bench.grouping.groups]
    for spec in bench.layers:
        assert close(bench.dense(spec, MIXED), outputs[spec.name])


@pytest.mark.parametrize("name", ["torch", "torch_reference"])
def test_a_padded_step_gives_the_same(name: str) -> None:
    bench = Bench([layer("E0", encoder())], backend(name))
    whole = step(LENS)
    metadata = [
        pad_metadata(each, num_reqs=8, num_tokens=40, num_generating=6, max_query_len=12)
        for each in bench.attention.local.metadata(whole)
    ]
    bench.attention.begin_step(metadata)
    query, key, value = (torch.randn(40, heads, 4) for heads in (2, 1, 1))
    found = bench.attention["E0"](query, key, value)[: sum(LENS)]
    bench.attention.begin_step(bench.attention.local.metadata(whole))
    assert close(bench.attention["E0"](query[: sum(LENS)], key[: sum(LENS)], value[: sum(LENS)]), found)


def test_a_wrapper_stands_before_them_as_before_any_layer() -> None:
    seen = []

    @attrs.frozen(kw_only=True)
    class Watch(MetadataWrapper):
        name = "watch"
        fields = dict.fromkeys(
            [field.name for field in attrs.fields(type(caches(encoder()).metadata(step([1]))[0]))], FieldUse.CARRY
        )

        def __call__(self, metadata):  # type: ignore[no-untyped-def]
            seen.append(metadata.block_table.tolist())
            return metadata

    stack = Stack.from_mapping({"rules": [{"layers": "*", "wrappers": ["watch"]}]})
    bench = Bench([layer("E0", encoder())], stack, [plugin("mine", wrappers={"watch": Watch})])
    assert close(bench.dense(bench.layers[0], MIXED), bench.run(MIXED)["E0"])
    assert [[1, 2, 3], [4, 0, 0], [5, 0, 0], [6, 7, 8], [9, 0, 0]] == seen[0]


# --- what it says of the model ----------------------------------------------------------------------------------------


def test_a_model_with_such_layers_computes_whole_prompts() -> None:
    beside = group_layers([layer("F0", full()), layer("E1", encoder())])
    assert (True, ("E1",)) == (beside.whole_prompts, beside.step_local)
    assert "such as 'E1' attend to whole requests and keep nothing" in (beside.note or "")


def test_a_model_that_keeps_nothing_computes_whole_prompts() -> None:
    for layers in ([], [layer("E0", encoder())]):
        assert group_layers(layers).whole_prompts
        assert "each prompt is computed in one step, and no prefix is cached" in (group_layers(layers).note or "")


def test_a_model_whose_layers_all_keep_something_has_nothing_to_say() -> None:
    grouping = group_layers([layer("F0", full())])
    assert (False, None) == (grouping.whole_prompts, grouping.note)


def test_nobody_reads_what_is_not_kept() -> None:
    with pytest.raises(SpecError, match="shares the cache of 'E0', which keeps none"):
        share_caches([layer("E0", encoder()), layer("E1", encoder())], {"E1": "E0"})
