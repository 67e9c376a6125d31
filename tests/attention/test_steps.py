"""A step of attention groups: its cost, the order in which each group sees it, and that the host never waits."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_chunked_local import ChunkedLocalSpec
from kvframe_testing.case import Request
from kvframe_testing.metadata import on_device
from kvframe_testing.writes import WriteGuard, tensors_of

from kvframe.attention.batch_metadata import split_mapping
from kvframe.attention.layers import Layers
from kvframe.attention.padding import pad_metadata
from kvframe.attention.request_order import is_ordered, permute
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.config.stack import Stack
from kvframe.contract.backend import AttentionMetadataBuilder
from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import BackendError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.order import BatchOrder, split_batch
from kvframe.contract.specs import LayerSpec
from kvframe.planning.groups import group_layers
from tests.attention.attending import MIXED, Bench, close, eight_layers, full, layer, local
from tests.attention.batches import BLOCK_SIZE, metadata_of
from tests.support.layers import share_caches
from tests.support.plugins import plugin

SINGLE_TOKENS = [(0, 1), (0, 1), (0, 1)]

# --- valid steps -----------------------------------------------------------------------------------------------------


class CausalOnly(TorchReferenceBackend):
    """The reference, limited to causal masks."""

    capabilities = attrs.evolve(TorchReferenceBackend.capabilities, masks=frozenset({"causal", "window"}))


def test_a_batch_that_is_not_causal_is_refused_where_a_backend_has_no_such_mask() -> None:
    layers = [layer("full", full()), layer("window", local())]
    stack = Stack.from_mapping({"rules": [{"layers": "window", "backend": "causal_only"}]})
    bench = Bench(layers, stack, [plugin("mine", backends={"causal_only": CausalOnly})])
    metadata = bench.metadata(SINGLE_TOKENS)
    with pytest.raises(BackendError, match=r"causal_only', of layer 'window', .* it has no mask bidirec") as refused:
        bench.attention.begin_step([attrs.evolve(each, causal=False) for each in metadata])
    assert "mask_bidirectional" == refused.value.code
    bench.attention.begin_step([attrs.evolve(metadata[0], causal=False), metadata[1]])


def test_a_step_that_says_of_each_request_whether_it_is_causal_is_refused() -> None:
    bench = Bench([layer("full", full())], Stack.from_mapping({}), [])
    (metadata,) = bench.metadata(SINGLE_TOKENS)
    with pytest.raises(BackendError, match="causal is 'Tensor', and not a bool") as refused:
        bench.attention.begin_step([attrs.evolve(metadata, causal=torch.ones(metadata.num_reqs, dtype=torch.bool))])
    assert "causal_per_request" == refused.value.code


class ReadsBounds(TorchReferenceBackend):
    """The reference, whose builder says that it needs no exact lengths on the host."""

    def make_builder(self) -> AttentionMetadataBuilder:
        class Builder(type(super().make_builder())):  # type: ignore[misc]
            needs_exact_lens = False

        return Builder()


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("query", "key", "value", "sinks", "says"),
    [
        ((3, 3, 4), (3, 1, 4), (3, 1, 4), None, r"queries of \[3, 3, 4\], and it is specified with \[3, 2, 4\]"),
        ((3, 2, 5), (3, 1, 4), (3, 1, 4), None, r"queries of \[3, 2, 5\]"),
        ((3, 2, 4), (4, 1, 4), (4, 1, 4), None, r"keys and values of \[4, 1, 4\] and \[4, 1, 4\]"),
        ((3, 2, 4), (3, 2, 4), (3, 1, 4), None, r"keys and values of \[3, 2, 4\] and \[3, 1, 4\]"),
        ((3, 2, 4), (3, 1, 4), (3, 1, 2), None, r"specified with \[3, 1, 4\] and \[3, 1, 4\]"),
        ((3, 2, 4), (3, 1, 4), (3, 1, 4), (1,), r"sinks of \[1\], and it is specified with \[2\]"),
    ],
)
def test_a_layer_that_is_called_with_other_shapes_than_its_own_is_refused_before_a_kernel_reads_them(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], sinks: tuple[int, ...] | None, says: str
) -> None:
    bench = Bench([layer("full", full())])
    bench.attention.begin_step(bench.metadata(SINGLE_TOKENS))
    learned = None if sinks is None else torch.zeros(sinks)
    with pytest.raises(BackendError, match=f"^layer 'full' was called with .*{says}") as refused:
        bench.attention["full"](*tensors(query, key, value), learned)
    assert "wrong_input" == refused.value.code


def test_the_log_sum_exp_of_a_layer_that_is_not_merged_is_refused() -> None:
    bench = Bench([layer("full", full())])
    bench.attention.begin_step(bench.metadata(SINGLE_TOKENS))
    query, key, value, lse = tensors((3, 2, 4), (3, 1, 4), (3, 1, 4), (3, 2))
    with pytest.raises(BackendError, match="layer 'full' is not specified as merged") as refused:
        bench.attention["full"](query, key, value, lse=lse)
    assert "wrong_input" == refused.value.code


def test_memory_for_an_output_that_no_kernel_can_write_to_is_refused() -> None:
    bench = Bench([layer("full", full())])
    bench.attention.begin_step(bench.metadata(SINGLE_TOKENS))
    query, key, value = tensors((3, 2, 4), (3, 1, 4), (3, 1, 4))
    full_layer = bench.attention["full"]
    full_layer(query, key, value)
    kv_cache, read = full_layer.kv_cache, full_layer.step.read
    for out in (torch.zeros(3, 2, 4, dtype=torch.float64), torch.zeros(3, 4, 2).mT):
        with pytest.raises(BackendError, match="has to be contiguous and of the query's dtype"):
            full_layer.attend(query, kv_cache, read, None, out)


def test_a_token_with_a_negative_slot_is_given_the_null_page_and_no_page_from_the_end() -> None:
    slots = split_mapping(torch.tensor([9, -1, -7]), 4)
    assert ([2, 0, 0], [1, 0, 0]) == (slots.blocks.tolist(), slots.offsets.tolist())


def test_a_request_without_new_tokens_has_no_slot_in_a_step_of_decodes() -> None:
    metadata = metadata_of([Request(3, 1), Request(5, 0, 0), Request(1, 1)])
    assert [1 * BLOCK_SIZE + 3, 17 * BLOCK_SIZE + 1] == metadata.slot_mapping.tolist()


def test_upper_bounds_of_lengths_reach_no_builder_that_needs_exact_ones() -> None:
    layers = [layer("full", full()), layer("window", local())]
    stack = Stack.from_mapping({"rules": [{"layers": "window", "backend": "bounds"}]})
    bench = Bench(layers, stack, [plugin("mine", backends={"bounds": ReadsBounds})])
    exact, window = bench.metadata(SINGLE_TOKENS)
    bounds = attrs.evolve(window, exact_lens=False, seq_lens_cpu=window.seq_lens_cpu + 3)
    bench.attention.begin_step([exact, bounds])
    with pytest.raises(BackendError, match=r"of layer 'full', cannot take a batch that has only upper") as refused:
        bench.attention.begin_step([attrs.evolve(exact, exact_lens=False), window])
    assert "inexact_lens" == refused.value.code


# --- the cost of a step -----------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Counted:
    common: CommonAttentionMetadata
    table: torch.Tensor
    is_finished: bool = True


class Counting(TorchReferenceBackend):
    """The reference, with metadata that can be refreshed, and a record of the calls of its builder."""

    log: list[str] = []  # noqa: RUF012 - the test's

    class Builder(AttentionMetadataBuilder):
        table_fields = frozenset({"common", "table"})

        def __init__(self, log: list[str], key: Hashable) -> None:
            self._log = log
            self._key = key

        @property
        def reuse_key(self) -> Hashable:
            return self._key

        def build(self, metadata: CommonAttentionMetadata) -> Counted:
            self._log.append("build")
            return Counted(metadata, metadata.block_table)

        def refreshed_fields(self, built: Counted, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
            self._log.append("refresh")
            return {"common": metadata, "table": metadata.block_table}

        @classmethod
        def build_together(cls, builds: Any) -> list[Any]:
            builds[0][0]._log.append(f"{len(builds)} together")
            return super().build_together(builds)

    def make_builder(self) -> AttentionMetadataBuilder:
        return self.Builder(self.log, None)

    def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, **named: Any) -> torch.Tensor:
        assert metadata.is_finished
        assert metadata.table is metadata.common.block_table
        return super().attend(layer, query, kv_cache, metadata.common, **named)


def counted(
    layers: list[LayerSpec],
    requests: list[tuple[int, int]],
    stack: Any = None,
    backend: type[Counting] = Counting,
    **options: Any,
) -> list[str]:
    """Return the calls of builders in one step of fresh requests, after comparing its outputs."""

    class Fresh(backend):  # type: ignore[valid-type, misc]
        log: list[str] = []  # noqa: RUF012 - the test's

    tables = {"rules": [{"layers": "*", "backend": "counting"}], **(stack or {})}
    bench = Bench(layers, Stack.from_mapping(tables), [plugin("mine", backends={"counting": Fresh})], **options)
    outputs = bench.run(requests)
    if not bench.attention.skipped:
        assert all(close(bench.dense(spec, requests), outputs[spec.name]) for spec in layers)
    return Fresh.log


def test_a_group_of_many_layers_is_built_once_a_step() -> None:
    assert ["1 together", "build"] == counted([layer(name, full()) for name in "abcdef"], SINGLE_TOKENS)


def test_groups_with_another_mask_are_built_each_and_together() -> None:
    assert ["2 together", "build", "build"] == counted([layer("a", full()), layer("b", local())], SINGLE_TOKENS)


def apart(layers: Any, *, hybrid: bool = True) -> Any:
    """Group each layer by itself, as for layers of several models that are served together."""
    whole = group_layers(layers, hybrid=hybrid)
    groups = tuple(
        attrs.evolve(whole.groups[0], index=index, layers=(each.name,), stored=(each.spec,))
        for index, each in enumerate(layers)
    )
    return attrs.evolve(whole, groups=groups)


def test_another_cache_groups_metadata_is_refreshed_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer(name, full()) for name in "abc"]
    monkeypatch.setattr("tests.attention.attending.group_layers", apart)
    assert ["1 together", "build", "refresh", "refresh"] == counted(layers, SINGLE_TOKENS)


class Finishing(Counting):
    """Makes the last part of its metadata on the device."""

    class Builder(Counting.Builder):
        on_host = frozenset({"seq_lens", "block_table"})

        def build(self, metadata: CommonAttentionMetadata) -> Counted:
            return attrs.evolve(super().build(metadata), is_finished=False)

        def finish(self, built: Counted) -> Counted:
            self._log.append("finish")
            return attrs.evolve(built, is_finished=True)


def test_what_is_built_is_finished_once_and_then_taken_over_with_other_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.attention.attending.group_layers", apart)
    layers = [layer("full", full()), layer("window", local()), layer("another", full())]
    expected = ["2 together", "build", "build", "refresh", "finish", "finish"]
    assert expected == counted(layers, SINGLE_TOKENS, backend=Finishing)


def test_a_chain_that_changes_nothing_costs_no_metadata() -> None:
    layers = list(share_caches([layer(name, full()) for name in "abc"], {"b": "a", "c": "a"}))
    skipping = {"model": {"prefill_skipping": "decode_only"}}
    assert ["1 together", "build"] == counted(layers, SINGLE_TOKENS, skipping)
    assert ["2 together", "build", "build"] == counted(layers, [(0, 1), (0, 3)], skipping)


# --- order, capture ---------------------------------------------------------------------------------------------------


class Decodes(TorchReferenceBackend):
    """Asks for decodes first, and relies on that order."""

    order = BatchOrder(decode_threshold=1)

    def make_builder(self) -> AttentionMetadataBuilder:
        order = self.order

        class Builder(AttentionMetadataBuilder):
            capture = GraphCapture.UNIFORM
            batch_order = order

            def build(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
                split = split_batch(metadata, order)
                assert metadata.num_actual_tokens == split.num_decode_tokens + split.num_longer_tokens
                return metadata

        return Builder()


class ShortOnes(Decodes):
    order = BatchOrder(decode_threshold=4)


ORDERED = plugin("mine", backends={"decodes": Decodes, "short_ones": ShortOnes})


def ordered(**backends: str) -> Bench:
    rules = [{"layers": name, "backend": backend} for name, backend in backends.items()]
    return Bench([layer(name, full()) for name in backends], Stack.from_mapping({"rules": rules}), [ORDERED])


def test_backends_with_different_orders_each_see_their_own() -> None:
    bench = ordered(a="decodes", b="short_ones", c="torch", d="decodes")
    outputs = bench.run(MIXED)
    assert all(close(bench.dense(spec, MIXED), outputs[spec.name]) for spec in bench.layers)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=6))
def test_any_batch_comes_out_in_the_batchs_own_order(requests: list[tuple[int, int]]) -> None:
    bench = ordered(a="decodes", b="short_ones")
    outputs = bench.run(requests)
    assert all(close(bench.dense(spec, requests), outputs[spec.name]) for spec in bench.layers)


def test_a_batch_packed_in_the_wished_order_is_permuted_for_nobody() -> None:
    bench = ordered(a="decodes", b="torch")
    new = torch.tensor([num_new for _, num_new in MIXED]).numpy()
    order = bench.attention.order_for(new)
    assert order is not None
    bench.run([MIXED[index] for index in order])
    assert all(step.read.permutation is None for step in bench.attention._steps)
    assert ordered(a="torch").attention.order_for(new) is None


def test_cache_groups_that_are_permuted_alike_keep_their_own_tables() -> None:
    rules = [{"layers": "*", "backend": "short_ones"}]
    layers = [layer("a", full()), layer("b", local(3)), layer("c", local(7))]
    bench = Bench(layers, Stack.from_mapping({"rules": rules}), [ORDERED])
    outputs = bench.run(MIXED)
    assert 3 == len(bench.grouping.groups)
    (permutation,) = {step.read.permutation for step in bench.attention._steps}
    assert permutation is not None
    assert all(close(bench.dense(spec, MIXED), outputs[spec.name]) for spec in layers)


def test_of_a_permuted_step_it_stays_unknown_which_tokens_generate() -> None:
    (metadata,) = Bench([layer("a", full())], Stack.from_mapping({}), []).metadata(MIXED)
    unknown = attrs.evolve(
        metadata,
        num_generating=metadata.num_actual_tokens,
        generating_indices=None,
        generating_indices_cpu=None,
    )
    permuted, permutation = permute(unknown, BatchOrder())
    assert not is_ordered(BatchOrder(), unknown)
    assert (None, None) == (permuted.generating_indices, permuted.generating_indices_cpu)
    known, same = permute(metadata, BatchOrder())
    assert torch.equal(permutation.tokens, same.tokens)
    assert known.generating_indices is not None


def test_the_capture_level_is_the_least_of_all_parts() -> None:
    backends = {"mine": "decodes", "short": "short_ones", "torch": "torch"}
    levels = {name: ordered(a=backend).attention.capture for name, backend in backends.items()}
    assert {"mine": GraphCapture.UNIFORM, "short": GraphCapture.UNIFORM, "torch": GraphCapture.NEVER} == levels


def chunk_layers(chunk: int) -> tuple[LayerSpec, ...]:
    """Return a chunked layer, a full one, and two that read them and end the model."""
    chunks = ChunkedLocalSpec(block_size=4, num_kv_heads=1, head_size=4, chunk=chunk)
    layers = [layer("a", chunks), layer("b", full()), layer("c", chunks), layer("d", full())]
    return share_caches(layers, {"c": "a", "d": "b"})


def skipping(backend: str) -> Stack:
    """Return a stack with prefill skipping, and one backend for all layers."""
    rules = [{"layers": "*", "backend": backend}]
    return Stack.from_mapping({"model": {"prefill_skipping": "decode_only"}, "rules": rules})


@pytest.mark.parametrize("backend", ["torch", "torch_reference", "decodes"])
@pytest.mark.parametrize("chunk", [8, 6])
def test_a_step_asks_the_device_for_nothing_and_writes_to_no_metadata(backend: str, chunk: int) -> None:
    bench = Bench(chunk_layers(chunk), skipping(backend), [ORDERED])
    assert [["chunked_local"], [], ["decode_only", "chunked_local"], ["decode_only"]] == [
        [wrapper.name for wrapper in group.wrappers] for group in bench.attention.groups
    ]
    for requests in (MIXED, [(5, 1), (9, 1)]):
        metadata = bench.metadata(requests)
        guard = WriteGuard([tensor for common in metadata for tensor in tensors_of(common)])
        bench.attention.begin_step(metadata)
        guard.check("a step writes to its metadata")
        bench.attention.begin_step([on_device(common) for common in metadata])


SIZES: dict[str, int] = {"num_reqs": 6, "num_tokens": 30, "num_generating": 8, "max_query_len": 8, "max_seq_len": 40}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=6), st.sampled_from([8, 6]))
def test_every_batch_of_a_graphs_sizes_has_metadata_of_the_same_shapes(
    requests: list[tuple[int, int]], chunk: int
) -> None:
    bench = Bench(chunk_layers(chunk), skipping("torch_reference"))

    def shapes(requests: list[tuple[int, int]]) -> list[Any]:
        bench.attention.begin_step([pad_metadata(common, **SIZES) for common in bench.metadata(requests)])
        kept = bench.attention.kept_rows
        assert kept is not None
        found: list[Any] = [kept.shape]
        for step in bench.attention._steps:
            common = step.read.metadata
            tensors = {
                name: value for name, value in attrs.asdict(common, recurse=False).items() if name[-4:] != "_cpu"
            }
            found.append({name: v.shape for name, v in tensors.items() if isinstance(v, torch.Tensor)})
            found.append((common.num_reqs, common.max_query_len, common.max_seq_len, step.read.num_rows))
        return found

    assert shapes([(0, 1)]) == shapes(requests)


def test_layers_are_listed_in_the_models_order() -> None:
    attention: Layers = Bench(eight_layers(), hybrid=False).attention
    assert [f"L{index}" for index in range(8)] == list(attention)
