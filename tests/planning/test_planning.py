"""Grouping and the cache plan: plain values, counted to the byte."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.config.stack import Stack
from kvframe.contract.errors import PlanError, SpecError, UnknownNameError
from kvframe.contract.specs import ENCODER, KVCacheSpec, LayerSpec
from kvframe.loading.plugins import load_plugins
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import KVCachePlan, plan_cache
from kvframe.planning.sizing import copied_bytes, num_host_slabs, plan_for_stack
from tests.cache.plans import RangeSpec, encoder, full, make_plan, ranged, state


def layer(name: str, spec: KVCacheSpec | None, shares_with: str | None = None) -> LayerSpec:
    return LayerSpec(name=name, spec=spec, shares_with=shares_with)


def test_layers_that_differ_in_layout_only_share_a_group() -> None:
    grouping = group_layers([layer("a", full(num_kv_heads=1)), layer("b", full(num_kv_heads=3))])
    (group,) = grouping.groups
    assert group.layers == ("a", "b")
    assert group.page_bytes == (1 + 3) * 2 * 4 * 4 * 4


def test_windows_of_different_sizes_are_different_groups() -> None:
    layers = [layer("a", ranged(window=4)), layer("b", ranged(window=8)), layer("c", ranged(window=4))]
    assert [("a", "c"), ("b",)] == [group.layers for group in group_layers(layers).groups]


def test_with_hybrid_off_a_type_without_a_full_form_keeps_its_own_group() -> None:
    grouping = group_layers([layer("a", full()), layer("b", ranged(window=4))], hybrid=False)
    assert [("a",), ("b",)] == [group.layers for group in grouping.groups]


def test_a_sharing_layer_follows_the_layer_that_keeps_the_cache() -> None:
    layers = [layer("a", full()), layer("b", full(), "a"), layer("c", full(), "b")]
    grouping = group_layers(layers)
    assert grouping.follows == {"b": "a", "c": "a"}
    assert grouping.group_of("c").layers == ("a",)


def test_layers_that_keep_nothing_are_in_no_group() -> None:
    assert () == group_layers([layer("a", None)]).groups


def test_a_slab_is_cut_into_as_many_small_pages_as_the_largest_page_needs() -> None:
    grouping = group_layers([layer("a", full(16, 100)), layer("b", ranged(16, 6597, window=64))])
    plan = plan_cache(grouping, memory_bytes=2**30, max_model_len=4096, max_num_batched_tokens=64)
    small, large = plan.groups
    # With 65 small pages, almost one more would fit into each of their slabs.
    assert (66, 1) == (small.pages_per_slab, large.pages_per_slab)
    assert 66 * small.page_bytes == plan.slab_bytes
    assert 0.0005 > plan.waste_fraction


@pytest.mark.parametrize(
    ("layers", "error", "sentence"),
    [
        ([layer("a", full()), layer("a", full())], SpecError, "two layers are named 'a'"),
        ([layer("abc", full()), layer("b", full(), "abd")], UnknownNameError, "did you mean 'abc'"),
        ([layer("a", full(), "b"), layer("b", full(), "a")], SpecError, "in a circle: a → b → a"),
        ([layer("a", None), layer("b", full(), "a")], SpecError, "'a', which keeps none"),
    ],
)
def test_layers_that_do_not_fit_together_are_refused(
    layers: list[LayerSpec], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        group_layers(layers)


def test_one_group_has_slabs_of_one_page_and_wastes_nothing() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    grouping = group_layers([layer(f"layers.{index}", spec) for index in range(32)])
    plan = plan_cache(grouping, memory_bytes=2**30, max_model_len=4096, max_num_batched_tokens=512)
    page_bytes = 32 * 16 * 8 * 128 * 2 * 2
    assert plan.groups[0].page_bytes == page_bytes
    assert plan.slab_bytes == page_bytes
    assert plan.bytes_per_token == 32 * 8 * 128 * 2 * 2
    assert plan.num_slabs == 2**30 // page_bytes - 1
    assert plan.waste_fraction == 0.0
    assert plan.max_concurrency() == plan.num_slabs // (4096 // 16)
    assert plan.fits(4096)


def test_a_hybrid_of_27_billion_parameters_wastes_under_one_percent() -> None:
    window = ranged(block_size=16, num_kv_heads=16, window=1024)
    full_spec = full(block_size=16, num_kv_heads=16)
    layers = [layer(str(index), full_spec if index % 6 == 5 else window) for index in range(62)]
    plan = plan_cache(group_layers(layers), memory_bytes=2**30, max_model_len=8192, max_num_batched_tokens=512)
    assert [52, 10] == [len(group.layers) for group in plan.groups]
    assert plan.waste_fraction < 0.01
    assert plan.total_bytes <= 2**30


def test_memory_that_is_too_short_for_a_slab_is_not_allocated() -> None:
    window, full_spec = ranged(block_size=16, num_kv_heads=9, window=64), full(block_size=16, num_kv_heads=2)
    grouping = group_layers([layer("a", window), layer("b", full_spec)])

    def planned(memory_bytes: int) -> KVCachePlan:
        return plan_cache(grouping, memory_bytes=memory_bytes, max_model_len=4096, max_num_batched_tokens=64)

    start = planned(2**22)
    for more in (0, start.groups[1].page_bytes, start.slab_bytes - 1):
        plan = planned(start.total_bytes + more)
        assert (start.num_slabs, start.total_bytes) == (plan.num_slabs, plan.total_bytes)
        assert plan == plan.resized(plan.memory_bytes)
    assert start.total_bytes + start.slab_bytes == start.resized(start.total_bytes + start.slab_bytes).total_bytes


def test_a_plan_of_nothing_takes_nothing() -> None:
    plan = make_plan()
    assert plan.total_bytes == 0
    assert plan.fits(10**6)
    assert plan.max_concurrency() is None
    assert plan.to_dict()["groups"] == []


@pytest.mark.parametrize("memory", ["auto", 1])
def test_if_no_layer_keeps_state_no_memory_is_measured_or_checked(
    memory: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("kvframe.planning.sizing._available_bytes")
    stack = Stack.from_mapping({"cache": {"memory": memory, "host_memory": 1}})
    plan = plan_for_stack(group_layers([layer("a", None)]), stack, 64)
    assert (0, 0, 0) == (plan.total_bytes, plan.num_slabs, num_host_slabs(plan, stack))


def test_auto_counts_copies_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframe.planning.sizing._available_bytes", lambda device: 2**22)
    kv_format = load_plugins().registry.formats.load("int8_token_head")()
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, format=kv_format)
    layers = [layer("a", spec), layer("b", spec)]
    grouping = group_layers(layers)
    uncopied = plan_for_stack(grouping, Stack(), 2**16)
    assert 2**21 - uncopied.slab_bytes < uncopied.total_bytes <= 2**21
    # Of two layers of int8 and scales, one is copied as float32, so all copies take almost twice the pages.
    assert 1.7 * uncopied.total_bytes < copied_bytes(uncopied, grouping, layers) < 2 * uncopied.total_bytes
    plan = plan_for_stack(grouping, Stack(), 2**16, copied_layers=layers)
    total_bytes = plan.total_bytes + copied_bytes(plan, grouping, layers)
    assert 0.98 * 2**21 < total_bytes <= 2**21


def test_too_little_memory_says_how_much_is_needed() -> None:
    grouping = group_layers([layer("a", full()), layer("b", ranged(window=4))])
    with pytest.raises(PlanError, match="give at least") as caught:
        plan_cache(grouping, memory_bytes=100, max_model_len=8, max_num_batched_tokens=8)
    enough = int(str(caught.value).split("give at least ")[1].split()[0])
    plan = plan_cache(grouping, memory_bytes=enough, max_model_len=8, max_num_batched_tokens=8)
    assert plan.total_bytes == enough


@given(
    shapes=st.lists(st.tuples(st.sampled_from([1, 4, 16, 17]), st.integers(1, 9), st.integers(2, 40)), max_size=5),
    memory=st.integers(2**16, 2**22),
    length=st.integers(1, 200),
)
def test_as_many_requests_as_planned_fit_at_once(shapes: list[tuple[int, int, int]], memory: int, length: int) -> None:
    layers = [layer(str(i), ranged(block_size=b, num_kv_heads=h, window=w)) for i, (b, h, w) in enumerate(shapes)]
    try:
        plan = plan_cache(group_layers(layers), memory_bytes=memory, max_model_len=length, max_num_batched_tokens=32)
    except PlanError:
        return
    assert plan.total_bytes <= memory
    for group in plan.groups:
        assert group.pages_per_slab * group.page_bytes <= plan.slab_bytes
        assert group.page_bytes % plan.block_id_bytes == 0
    max_requests = plan.max_concurrency()
    if max_requests is not None:
        blocks = plan.peak_blocks(length)
        assert plan.num_slabs_for(count * max_requests for count in blocks) <= plan.num_slabs
        assert plan.num_slabs_for(count * (max_requests + 1) for count in blocks) > plan.num_slabs
        assert plan.fits(length) == (max_requests >= 1)


def test_a_plan_says_what_requests_hold_while_they_generate() -> None:
    specs = [ranged(block_size=4, window=8), full(block_size=4)]
    layers = [LayerSpec(name=str(index), spec=spec) for index, spec in enumerate(specs)]
    plan = plan_cache(group_layers(layers), memory_bytes=2**18, max_model_len=64, max_num_batched_tokens=16)
    assert ((7, 16), (3, 16)) == (plan.peak_blocks(64), plan.generating_blocks(64))
    max_requests = plan.max_generating()
    assert max_requests is not None
    assert max_requests > (plan.max_concurrency() or 0)
    counts = ((max_requests - 1) * 3 + 7, max_requests * 16)
    assert plan.num_slabs_for(counts) <= plan.num_slabs < plan.num_slabs_for((counts[0] + 3, counts[1] + 16))
    assert {"max_generating": max_requests, "shortest_prefix": 4}.items() <= plan.to_dict().items()
    assert [3, 16] == [group["generating_blocks"] for group in plan.to_dict()["groups"]]


def test_the_shortest_prefix_is_whole_blocks_of_every_group() -> None:
    def shortest(*sizes: int, max_model_len: int = 64) -> int | None:
        specs = [ranged(block_size=sizes[0], window=8), full(block_size=sizes[1])]
        layers = [LayerSpec(name=str(index), spec=spec) for index, spec in enumerate(specs)]
        sizes_of_plan = {"max_model_len": max_model_len, "max_num_batched_tokens": 16}
        return plan_cache(group_layers(layers), memory_bytes=2**20, **sizes_of_plan).shortest_prefix

    assert (12, 8) == (shortest(4, 6), shortest(8, 4))
    # A prompt's last token is always computed.
    assert shortest(4, 6, max_model_len=12) is None


def test_a_longer_chunk_needs_more_blocks_of_a_window() -> None:
    spec = ranged(block_size=4, window=8)
    assert 3 == spec.peak_blocks(64, 1)
    assert 7 == spec.peak_blocks(64, 16)


def test_a_spec_with_a_bad_field_says_which() -> None:
    with pytest.raises(SpecError, match="block_size must be a whole number of at least 1, not 0"):
        full(block_size=0)
    with pytest.raises(UnknownNameError, match="did you mean 'float16'"):
        attrs.evolve(full(), dtype="flaot16")


# --- bytes of a token, a request and an input -------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class OneBlockSize(RangeSpec):
    """A window that works only with blocks of four tokens."""

    block_size: int = attrs.field(validator=attrs.validators.in_([4]))


def test_states_take_bytes_by_request_and_keys_by_token() -> None:
    plan = make_plan(full(), state())
    keys, states = plan.groups
    assert (False, True) == (keys.spec.is_per_block, states.spec.is_per_block)
    assert plan.bytes_per_token == keys.page_bytes // 4
    assert plan.bytes_per_request == states.peak_blocks * states.page_bytes
    assert {} == plan.bytes_per_input_token


def test_inputs_take_bytes_by_their_own_tokens() -> None:
    plan = make_plan(full(), encoder(), encoder(block_size=8), max_encoder_len=30)
    keys, *inputs = plan.groups
    assert plan.bytes_per_token == keys.page_bytes // 4
    assert 0 == plan.bytes_per_request
    assert {ENCODER: sum(group.page_bytes // group.block_size for group in inputs)} == plan.bytes_per_input_token


def test_a_type_of_one_block_size_keeps_something_of_each_token() -> None:
    assert not OneBlockSize(block_size=4, num_kv_heads=1, head_size=4, window=8).is_per_block
