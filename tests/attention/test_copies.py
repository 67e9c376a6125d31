"""Backends on copies of pages, if they do not read the format in which the pages are stored."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_chunked_local import ChunkedLocalSpec
from kvframe_kv_formats import Int4TokenHead, Int8TokenHead
from kvframe_sliding_window import SlidingWindowSpec
from kvframe_testing.metadata import on_device
from kvframe_testing.writes import WriteGuard, tensors_of
from kvframe_torch.backend import TorchBackend

from kvframe.attention.copies import CopiedMetadata, CopyingBuilder, CopyScratch
from kvframe.attention.padding import pad_metadata
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.config.stack import Stack
from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import BackendError
from kvframe.contract.formats import KVFormat, StateTensor
from kvframe.contract.specs import AttentionSpec, LayerSpec
from kvframe.selection.refusals import find_refusals
from tests.attention.attending import CPU, MIXED, SKIPPING, Bench, close, eight_layers, full, layer, local
from tests.covering import keep
from tests.models.rounding import rounding
from tests.support.backends import DecodesFirst
from tests.support.layers import share_caches
from tests.support.plugins import plugin

INT8 = Int8TokenHead()


def stored(layers: Sequence[LayerSpec], kv_format: KVFormat = INT8) -> tuple[LayerSpec, ...]:
    return tuple(attrs.evolve(each, spec=each.spec and each.spec.in_format(kv_format)) for each in layers)


def backend(name: str) -> Stack:
    return Stack.from_mapping({"rules": [{"layers": "*", "backend": name}]})


TORCH = backend("torch")
"""A backend that reads no format but the plain one."""

TORCH_SKIPPING = attrs.evolve(TORCH, model=SKIPPING.model)


def chunk_layers() -> tuple[LayerSpec, ...]:
    chunks = ChunkedLocalSpec(block_size=4, num_kv_heads=1, head_size=4, chunk=6)
    return share_caches([layer("a", chunks), layer("b", full()), layer("c", chunks)], {"c": "a"})


def sinks(window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=4, window=window, num_sink_tokens=5)


class Reads8(TorchReferenceBackend):
    """Declares that it reads the format itself; it is never run."""

    capabilities = attrs.evolve(TorchReferenceBackend.capabilities, formats=frozenset({"plain", "int8_token_head"}))


class TakesNoCopies(TorchBackend):
    capabilities = attrs.evolve(TorchBackend.capabilities, takes_copies=False)


PLUGIN = plugin("mine", backends={"reads8": Reads8, "takes_no_copies": TakesNoCopies})
ORDERED = plugin("ordered", backends={"decodes_first": DecodesFirst})

# --- what is computed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "all-tokens"])
@pytest.mark.parametrize("stack", [TORCH, TORCH_SKIPPING, backend("decodes_first")], ids=["all", "skipping", "ordered"])
@pytest.mark.parametrize("layers", [eight_layers(), chunk_layers(), (layer("s", sinks(6)), layer("f", full()))])
@pytest.mark.parametrize("kv_format", keep([INT8, Int4TokenHead()], INT8), ids=lambda each: each.name)
def test_layers_compute_on_copies_what_they_compute_on_plain_pages(
    layers: tuple[LayerSpec, ...], stack: Stack, kv_format: KVFormat, hybrid: bool
) -> None:
    with rounding(kv_format):
        expected = Bench(layers, TORCH, hybrid=hybrid).run(MIXED)
    bench = Bench(stored(layers, kv_format), stack, [ORDERED], hybrid=hybrid)
    found = bench.run(MIXED)
    for name, values in found.items():
        whole = expected[name]
        if name in bench.attention.skipped and values.shape != whole.shape:
            whole = whole[torch.tensor(list(itertools.accumulate(new for _, new in MIXED))) - 1]
        assert close(whole, values)


def test_plain_layers_are_computed_on_their_pages() -> None:
    bench = Bench([layer("plain", full()), *stored([layer("int8", full())])], TORCH)
    bench.attention.begin_step(bench.metadata(MIXED))
    plain, copied = (step.read.metadata for step in bench.attention._steps)
    assert not isinstance(plain, CopiedMetadata)
    assert isinstance(copied, CopiedMetadata)


# --- what is copied ---------------------------------------------------------------------------------------------------


def num_copied(spec: AttentionSpec, requests: list[tuple[int, int]], **sizes: int) -> int:
    """Return the number of pages of four tokens that a step copies for each layer."""
    bench = Bench(stored([layer("layer", spec)]), TORCH)
    (common,) = bench.metadata(requests)
    (builder,) = [group.builder for group in bench.attention.groups]
    built = builder.build(pad_metadata(common, **sizes) if sizes else common)
    return int(built.pages.shape[0])


@pytest.mark.parametrize(
    ("spec", "request_", "expected"),
    [
        (full(), (0, 1), 1),
        (full(), (40, 1), 11),
        (full(), (39, 1), 10),
        (full(), (38, 6), 11),
        (local(1), (40, 1), 1),
        (local(2), (40, 1), 2),  # tokens 39 and 40
        (local(5), (40, 1), 2),
        (local(6), (40, 1), 3),
        (local(6), (40, 9), 5),  # from token 35 to 48
        (local(60), (40, 1), 11),
        (sinks(6), (40, 1), 5),
        (sinks(6), (11, 1), 3),  # the window begins in the second block of sinks
        (sinks(6), (12, 1), 4),
    ],
)
def test_of_each_request_the_pages_that_its_queries_may_see_are_copied(
    spec: AttentionSpec, request_: tuple[int, int], expected: int
) -> None:
    assert expected == num_copied(spec, [request_])
    assert expected + 1 == num_copied(spec, [request_, (0, 2)])


SIZES = {"num_reqs": 3, "num_tokens": 24, "num_generating": 3, "max_query_len": 8, "max_seq_len": 60}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(full(), 3 * 15), (local(6), 3 * (14 // 4 + 2)), (sinks(6), 3 * (2 + 14 // 4 + 2)), (local(60), 3 * 15)],
)
def test_a_graph_copies_as_many_pages_as_any_batch_of_its_sizes_needs(spec: AttentionSpec, expected: int) -> None:
    assert expected == num_copied(spec, [(40, 1), (0, 8)], **SIZES)
    assert expected == num_copied(spec, [(0, 1)], **SIZES)


@pytest.mark.parametrize("spec", [full(), local(6), local(1), sinks(6), sinks(1)], ids=str)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), min_size=1, max_size=3))
def test_a_graphs_copies_are_those_of_the_batch_and_more(spec: AttentionSpec, requests: list[tuple[int, int]]) -> None:
    bench = Bench(stored([layer("layer", spec)]), backend("torch_reference"))
    (common,) = bench.metadata(requests)
    (builder,) = [group.builder for group in bench.attention.groups]
    exact, padded = builder.build(common), builder.build(pad_metadata(common, **SIZES))
    for row, (num_computed, num_new) in enumerate(requests):
        for token in {token for n in range(num_computed, num_computed + num_new) for token in live(spec, n)}:
            page = common.block_table[row, token // 4]
            for built in (exact, padded):
                place = int(built.built.block_table[row, token // 4])
                assert place > 0
                assert page == built.pages[place - 1]


def live(spec: AttentionSpec, position: int) -> list[int]:
    return [
        token for start, stop in (*spec.live_ranges(position), (position, position + 1)) for token in range(start, stop)
    ]


# --- set-up and steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "torch_reference", "decodes_first"])
def test_a_step_asks_the_device_for_nothing_and_writes_to_no_metadata(name: str) -> None:
    bench = Bench(stored((*eight_layers(), *chunk_layers())), backend(name), [ORDERED])
    for requests in (MIXED, [(5, 1), (9, 1)]):
        metadata = bench.metadata(requests)
        guard = WriteGuard([tensor for common in metadata for tensor in tensors_of(common)])
        bench.attention.begin_step(metadata)
        guard.check("a step writes to its metadata")
        bench.attention.begin_step([on_device(common) for common in metadata])


def test_another_cache_group_copies_its_own_pages_and_reads_the_same_metadata() -> None:
    far = [layer("a", local(60)), layer("b", local(61))]  # two cache groups, with windows longer than any request
    bench = Bench(stored(far), TORCH)
    first, second = (group.builder for group in bench.attention.groups)
    assert isinstance(first, CopyingBuilder)
    one, other = bench.metadata([(9, 1), (0, 7)])
    built = first.build(one)
    refreshed = attrs.evolve(built, **first.refreshed_fields(built, other))
    expected = second.build(other)
    assert torch.equal(expected.pages, refreshed.pages)
    assert not torch.equal(built.pages, refreshed.pages)
    wider = attrs.evolve(other, block_table=torch.nn.functional.pad(other.block_table, (0, 3)))
    assert torch.equal(expected.pages, first.refreshed_fields(built, wider)["pages"])


def test_what_can_be_captured_of_a_backend_can_be_captured_on_copies() -> None:
    for name in ("torch", "torch_reference"):
        (plain,), (copied,) = (
            Bench(layers, backend(name)).attention.groups
            for layers in ([layer("layer", full())], stored([layer("layer", full())]))
        )
        assert plain.capture == copied.capture
    assert GraphCapture.NEVER <= plain.capture


STATE = {"k": StateTensor((4, 1, 4), "float32"), "v": StateTensor((4, 1, 2), "float32")}


def test_all_layers_share_the_memory_of_copies() -> None:
    bench = Bench(stored(eight_layers()), TORCH)
    assert 0 == bench.attention.copies.num_bytes
    bench.run(MIXED)
    # 19 pages of 4 tokens and the null page, an eighth more, keys and values of four elements in four bytes.
    num_pages = sum(-(-(computed + new) // 4) for computed, new in MIXED)
    assert bench.attention.copies.num_bytes == (num_pages + 1) * 9 // 8 * 4 * 4 * 4 * 2


def test_copies_that_a_graph_remembers_stay_where_they_are() -> None:
    scratch = CopyScratch(CPU)
    small = scratch.take(STATE, 8, is_static=True)
    assert (9, 4, 1, 4) == tuple(small["k"].shape)
    large = scratch.take(STATE, 100, is_static=False)
    assert small["k"].data_ptr() != large["k"].data_ptr()
    assert scratch.num_bytes == (10 + 113) * (4 * 4 + 4 * 2) * 4
    again = scratch.take(STATE, 50, is_static=False)
    assert large["v"].data_ptr() == again["v"].data_ptr()
    scratch.take(STATE, 500, is_static=True)
    scratch.take(STATE, 1000, is_static=False)
    assert scratch.num_bytes == (10 + 563 + 1126) * (4 * 4 + 4 * 2) * 4


# --- who serves -------------------------------------------------------------------------------------------------------


def choice(name: str = "auto") -> Any:
    from kvframe.loading.plugins import load_plugins
    from kvframe.selection.select import select_backends

    registry = load_plugins(plugins=[PLUGIN]).registry
    (found,) = select_backends(stored([layer("layer", full())]), backend(name), registry, "cpu")
    return found


def test_a_backend_that_reads_a_format_itself_is_chosen_before_one_on_copies() -> None:
    found = choice()
    assert not found.on_copies
    (torch_backend,) = [each for each in found.candidates if each.name == "kvframe-torch:torch"]
    assert torch_backend.on_copies
    assert found.why_not(torch_backend) == (
        f"can serve this layer, on copies of what is stored as int8_token_head; {found.backend} reads it itself"
    )


def test_a_backend_that_is_named_is_taken_on_copies() -> None:
    found = choice("torch")
    assert ("kvframe-torch:torch", True, "int8_token_head") == (found.backend, found.on_copies, found.format)


def test_a_backend_without_copies_refuses_what_it_does_not_read() -> None:
    with pytest.raises(BackendError, match="reads the formats plain, not int8_token_head, and takes no copies"):
        choice("takes_no_copies")
    (refusal,) = find_refusals(TakesNoCopies.capabilities, *stored([layer("layer", full())]), "cpu")
    assert "format" == refusal.code
