"""Attention groups: which layers share metadata, which share a cache, and when two backends are identical."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping

import attrs
import pytest
import torch
from attrs.validators import ge, instance_of
from kvframe_chunked_local import ChunkedLocalSpec

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.config.stack import Stack
from kvframe.contract.errors import BackendError, PluginError, SpecError, StackError, UnknownNameError, WrapperError
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.loading.plugins import load_plugins
from kvframe.planning.groups import group_layers
from kvframe.selection.choice import Identity
from kvframe.selection.skipping import DRAFTING, NO_SKIPPING, Skipping, find_skippable_layers
from tests.attention.attending import MIXED, SKIPPING, Bench, close, eight_layers, full, layer, local
from tests.support.layers import share_caches
from tests.support.plugins import plugin


def chunked(chunk: int) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(block_size=4, num_kv_heads=1, head_size=4, chunk=chunk)


# --- the worked example -----------------------------------------------------------------------------------------------


def test_layers_form_attention_groups_within_one_cache_group() -> None:
    bench = Bench(eight_layers(), hybrid=False)
    assert [("L0", "L1", "L4", "L5")] == [group.layers for group in bench.grouping.groups]
    assert [("L0", "L4", "L2", "L6"), ("L1", "L5", "L3", "L7")] == bench.groups()


def test_with_prefill_skipping_the_last_layers_form_groups_of_their_own() -> None:
    bench = Bench(eight_layers(), SKIPPING, hybrid=False)
    assert [("L0", "L1", "L4", "L5")] == [group.layers for group in bench.grouping.groups]
    assert [("L0", "L4", "L2"), ("L1", "L5", "L3"), ("L6",), ("L7",)] == bench.groups()
    chains = [[wrapper.name for wrapper in group.wrappers] for group in bench.attention.groups]
    assert [[], [], ["decode_only"], ["decode_only"]] == chains
    assert ("L6", "L7") == bench.attention.skipped


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("stack", [Stack(), SKIPPING], ids=["all", "skipping"])
def test_every_layer_of_the_example_computes_its_own_mask(stack: Stack, hybrid: bool) -> None:
    bench = Bench(eight_layers(), stack, hybrid=hybrid)
    outputs = bench.run(MIXED)
    ends = torch.tensor([new for _, new in MIXED]).cumsum(0) - 1
    for spec in bench.layers:
        expected = bench.dense(spec, MIXED)
        assert close(expected[ends] if spec.name in bench.attention.skipped else expected, outputs[spec.name])


def test_layers_before_one_that_writes_are_not_skipped() -> None:
    layers = eight_layers()
    assert ("L6", "L7") == find_skippable_layers(layers)
    why_not = NO_SKIPPING.why_not
    assert "'L4' runs after 'L2' and keeps a cache of its own, for which it needs every token" == why_not(layers, "L2")
    assert "'L4' runs after 'L3'" in why_not(layers, "L3")
    assert "'L5' keeps a cache of its own, which must hold every token" == why_not(layers, "L5")


def test_why_a_layer_computes_every_token_is_told_of_what_runs_after_it() -> None:
    layers, drafting = eight_layers(), layer("draft:L0", full())
    off = "prefill skipping is off; 'L7' could be skipped: name the wrapper in prefill_skipping of [model]"
    # A draft model runs beside the layers, and prediction heads after them.
    assert off == NO_SKIPPING.why_not(layers, "L7")
    after = "'draft:L0' runs after 'L7' and keeps a cache of its own, for which it needs every token"
    assert after == Skipping(heads=(drafting,)).why_not(layers, "L7")
    never = "'draft:L0' drafts tokens, and prefill skipping is for the layers of the served model only"
    assert never == DRAFTING.why_not([drafting], "draft:L0")


def test_a_recurrent_layer_at_the_end_leaves_nothing_to_skip() -> None:
    # A layer with any kind of state and without a query side reads every token.
    state = LayerSpec(name="state", spec=full(), query=None)
    assert () == find_skippable_layers([*eight_layers(), state])


def test_a_layer_that_neither_keeps_nor_attends_is_in_nobodys_way() -> None:
    nothing = LayerSpec(name="nothing", spec=None, query=None)
    assert ("L6", "L7") == find_skippable_layers([*eight_layers(), nothing])


def test_dropping_tokens_where_all_are_needed_is_refused() -> None:
    stack = Stack.from_mapping({"rules": [{"layers": "L3", "wrappers": ["decode_only"]}]})
    with pytest.raises(WrapperError, match=r"layer 'L3': .* 'L4' runs after 'L3'") as caught:
        Bench(eight_layers(), stack)
    assert "not_skipped" == caught.value.code


def test_a_chain_that_drops_tokens_itself_is_left_as_it_is() -> None:
    rules = [{"layers": "L7", "wrappers": ["decode_only"]}]
    stack = Stack.from_mapping({"model": {"prefill_skipping": "decode_only"}, "rules": rules})
    assert [1, 1] == [len(group.wrappers) for group in Bench(eight_layers(), stack).attention.groups[2:]]


def test_a_layer_that_gets_rows_it_should_have_left_out_says_so() -> None:
    bench = Bench(eight_layers(), SKIPPING)
    bench.run([(0, 5)])
    with pytest.raises(BackendError, match=r"'L6' was called with 5 query rows, and its wrapper chain leaves 1"):
        bench.attention["L6"](torch.zeros(5, 2, 4), None, None)


@pytest.mark.parametrize("layers", [eight_layers(), (layer("a", full()),)], ids=["sharing", "none shares"])
def test_a_wrapper_that_leaves_every_token_in_cannot_skip_prompts(layers: tuple[LayerSpec, ...]) -> None:
    stack = Stack.from_mapping({"model": {"prefill_skipping": "chunked_local"}})
    with pytest.raises(StackError, match="prefill_skipping is 'chunked_local', a wrapper that drops no tokens"):
        Bench(layers, stack)


# --- sharing caches ---------------------------------------------------------------------------------------------------


def test_sharing_is_transitive_and_allocates_once() -> None:
    layers = share_caches([layer(name, full()) for name in "abc"], {"b": "a", "c": "b"})
    grouping = group_layers(layers)
    assert {"b": "a", "c": "a"} == grouping.follows
    assert [("a",)] == [group.layers for group in grouping.groups]


@pytest.mark.parametrize(
    ("targets", "error", "sentence"),
    [
        ({"L2": "L0", "L3": "L9"}, UnknownNameError, "no layer named 'L9'"),
        ({"L2": "L4"}, SpecError, "'L2' shares the cache of 'L4', which runs after it"),
        ({"L2": "L0", "L0": "L2"}, SpecError, "in a circle"),
        ({"L2": "L0", "L4": "L3"}, SpecError, "'L3', which no longer keeps all of the tokens 0 to 3 .* at position 4"),
    ],
)
def test_a_bad_target_is_one_error(targets: Mapping[str, str], error: type[Exception], sentence: str) -> None:
    layers = tuple(layer(f"L{index}", local(4) if index % 2 else full()) for index in range(8))
    with pytest.raises(error, match=sentence):
        share_caches(layers, targets)


def test_a_narrower_window_may_read_a_wider_one() -> None:
    layers = share_caches([layer("a", local(9)), layer("b", local(4))], {"b": "a"})
    with pytest.raises(SpecError, match="no longer keeps"):
        share_caches([layer("a", local(4)), layer("b", local(9))], {"b": "a"})
    bench = Bench(layers)
    outputs = bench.run(MIXED)
    assert all(close(bench.dense(spec, MIXED), outputs[spec.name]) for spec in layers)


@pytest.mark.parametrize(
    ("owner", "reader", "position"), [(1000, local(2), 1000), (1500, chunked(1000), 1500), (6, chunked(4), 6)]
)
def test_a_reader_of_chunks_keeps_within_them(owner: int, reader: KVCacheSpec, position: int) -> None:
    with pytest.raises(SpecError, match=f"no longer keeps .* at position {position}"):
        share_caches([layer("a", chunked(owner)), layer("b", reader)], {"b": "a"})
    layers = share_caches([layer("a", chunked(owner)), layer("b", chunked(owner // 2))], {"b": "a"})
    assert "a" == layers[1].shares_with


# --- hybrid off -------------------------------------------------------------------------------------------------------


def test_stored_as_full_and_computed_as_their_own_windows() -> None:
    layers = [layer("a", full()), layer("b", local(3)), layer("c", local(8)), layer("d", local(3))]
    bench = Bench(layers, hybrid=False)
    assert 1 == len(bench.grouping.groups)
    assert [("a",), ("b", "d"), ("c",)] == bench.groups()
    off, on = bench.run(MIXED), Bench(layers).run(MIXED)
    for spec in layers:
        assert close(bench.dense(spec, MIXED), off[spec.name])
        assert close(on[spec.name], off[spec.name])


# --- identity ---------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Options:
    splits: int = attrs.field(default=1, validator=[instance_of(int), ge(1)])
    tiles: tuple[int, ...] = ()


def make_backend() -> type[TorchReferenceBackend]:
    """Return a new class with the same name at each call."""

    class MyBackend(TorchReferenceBackend):
        options_class = Options

    return MyBackend


def test_two_plugins_classes_of_one_name_never_merge() -> None:
    first, second = (plugin(name, backends={"mine": make_backend()}) for name in ("first", "second"))
    rules = [{"layers": name, "backend": f"{owner}:mine"} for name, owner in (("a", "first"), ("b", "second"))]
    bench = Bench([layer("a", full()), layer("b", full())], Stack.from_mapping({"rules": rules}), [first, second])
    assert [("a",), ("b",)] == bench.groups()


def test_equal_things_always_merge() -> None:
    mine = plugin("mine", backends={"mine": make_backend()})
    backends = ({"name": "mine", "splits": 2, "tiles": [4, 8]}, {"tiles": (4, 8), "name": "mine:mine", "splits": 2})
    rules = [{"layers": name, "backend": backend} for name, backend in zip("ab", backends, strict=True)]
    bench = Bench([layer("a", full()), layer("b", full())], Stack.from_mapping({"rules": rules}), [mine])
    assert [("a", "b")] == bench.groups()
    assert Options(splits=2, tiles=[4, 8]) == bench.attention.groups[0].backend.options  # type: ignore[arg-type]


def test_an_option_at_its_default_is_the_option_left_out() -> None:
    mine = plugin("mine", backends={"mine": make_backend()})
    rules = [{"layers": "a", "backend": "mine"}, {"layers": "b", "backend": {"name": "mine", "splits": 1}}]
    bench = Bench([layer("a", full()), layer("b", full())], Stack.from_mapping({"rules": rules}), [mine])
    assert [("a", "b")] == bench.groups()


def test_other_parameters_make_another_backend() -> None:
    mine = plugin("mine", backends={"mine": make_backend()})
    rules = [{"layers": name, "backend": {"name": "mine", "splits": splits}} for name, splits in (("a", 1), ("b", 2))]
    bench = Bench([layer("a", full()), layer("b", full())], Stack.from_mapping({"rules": rules}), [mine])
    assert [("a",), ("b",)] == bench.groups()


def test_wrong_options_of_a_backend_name_those_it_has() -> None:
    mine = plugin("mine", backends={"mine": make_backend()})
    for backend, sentence in (
        ({"name": "mine", "split": 2}, "backend 'mine': .*its options: splits, tiles"),
        ({"name": "mine", "splits": 0}, "backend 'mine': 'splits' must be >= 1: 0; its options: splits, tiles"),
        ({"name": "mine", "splits": "a"}, r"backend 'mine': 'splits' must be .* \(got 'a' .*\)\.; its options: splits"),
        ({"name": "torch", "split": 2}, "backend 'torch' has no options, and is given split"),
    ):
        stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": backend}]})
        with pytest.raises(StackError, match=sentence):
            Bench([layer("a", full())], stack, [mine])


def test_options_beside_auto_are_refused() -> None:
    stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": {"name": "auto", "splits": 2}}]})
    with pytest.raises(StackError, match=r'rules\[0\].backend: "auto" has no options'):
        stack.check_names(load_plugins().registry)


def test_parameters_of_any_kind_are_frozen_and_others_refused() -> None:
    mixed = Identity.of("kvframe-mine", Options, {"tiles": {2: [1], "b": {"c", 3}}})
    assert mixed == Identity.of("kvframe-mine", Options, {"tiles": {"b": {3, "c"}, 2: (1,)}})
    with pytest.raises(PluginError, match=r"Options of kvframe-mine holds bytearray.* as its 'tiles'"):
        Identity.of("kvframe-mine", Options, {"tiles": bytearray(1)})


def test_an_identity_survives_pickling_and_means_the_same_in_another_process() -> None:
    identity = Identity.of("kvframe-mine", Options, {"tiles": [1, 2], "deep": {"b": 1, "a": {3, 2}}})
    copy = pickle.loads(pickle.dumps(identity))
    assert (identity, hash(identity)) == (copy, hash(copy))
    assert identity == Identity.of("kvframe-mine", Options, {"deep": {"a": {2, 3}, "b": 1}, "tiles": (1, 2)})
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()))"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(identity), capture_output=True, check=True)
    assert str(identity) == done.stdout.decode().strip()
