"""Layers over an encoder's tokens: what a step stores and sees; and a decoder with windows and an optional encoder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from kvframe_cross_attention import CrossAttentionSpec
from kvframe_testing.reference import dense_attention

from kvframe import Prompt, SamplingParams
from kvframe.attention.batch_metadata import StepBatch, build_metadata, input_slots
from kvframe.attention.layers import Layers
from kvframe.attention.request_order import is_ordered
from kvframe.attention.storage import KVCacheStorage
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.order import BatchOrder
from kvframe.contract.specs import LayerSpec, QuerySpec
from kvframe.loading.plugins import load_plugins
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import plan_cache
from kvframe.selection.select import select_backends
from tests.covering import cover_values
from tests.models.mixed_decoder import MixedDecoder
from tests.models.serving import held_pages, ids, make_stack
from tests.support.plugins import plugin

CPU = torch.device("cpu")
QUERY = QuerySpec(num_heads=4, head_size=8, scale=0.3)
SIZES: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "head_size": 8}
LAYERS = (
    LayerSpec(name="self", spec=FullAttentionSpec(**SIZES), query=QUERY),
    LayerSpec(name="cross", spec=CrossAttentionSpec(**SIZES), query=QUERY),
)
LENS = {"a": 0, "b": 5, "c": 17, "d": 1}


class Bench:
    """A self-attention and a cross-attention layer over a cache that holds NaN in all unused memory."""

    def __init__(self, backend: str | type[AttentionBackend] = "torch") -> None:
        grouping = group_layers(LAYERS)
        plan = plan_cache(
            grouping,
            memory_bytes=200_000,
            max_model_len=64,
            max_num_batched_tokens=64,
            max_input_lens={"encoder": 20},
        )
        storage = KVCacheStorage(plan, grouping, CPU)
        storage.poison()
        self.manager = KVCacheManager(plan, max_num_seqs=256, prefix_caching=False)
        mine = [] if isinstance(backend, str) else [plugin("mine", backends={"mine": backend})]
        stack = make_stack(backend=backend if isinstance(backend, str) else "mine")
        choices = select_backends(LAYERS, stack, load_plugins(stack.plugins, mine).registry, "cpu")
        self.attention = Layers(LAYERS, choices, grouping, storage.views, CPU)
        self.lens: dict[str, int] = {}

    def start(self, name: str, num_input_tokens: int) -> None:
        inputs = {"encoder": InputSequence(num_input_tokens, name.encode())} if num_input_tokens else {}
        self.manager.start(name, [0] * 64, inputs=inputs)
        self.lens[name] = num_input_tokens

    def batch(self, names: Sequence[str], num_computed: Sequence[int], num_new: Sequence[int]) -> StepBatch:
        for name, computed, new in zip(names, num_computed, num_new, strict=True):
            assert self.manager.extend(name, computed + new)
        return StepBatch(
            rows=np.array([self.manager.row(name) for name in names]),
            num_computed=np.array(num_computed),
            query_lens=np.array(num_new),
            generating_indices=np.cumsum(num_new) - 1,
            input_lens={"encoder": np.array([self.lens[name] for name in names])},
            stores_input={"encoder": np.array([bool(self.manager.missing_inputs(name)) for name in names])},
        )

    def step(self, names: Sequence[str], num_computed: Sequence[int], num_new: Sequence[int]) -> torch.Tensor:
        """Run the cross-attention layer over one step; return its output."""
        batch = self.batch(names, num_computed, num_new)
        metadata = build_metadata(batch, self.manager.tables, CPU)
        self.attention.begin_step(metadata, batch=batch, tables=self.manager.tables)
        query = torch.cat(
            [
                draw(name, "q", computed + new)[computed:]
                for name, computed, new in zip(names, num_computed, num_new, strict=True)
            ]
        )
        new = [name for name in names if self.manager.missing_inputs(name)]
        # If a step stores nothing, a model may pass any keys and values.
        key, value = (
            torch.cat([draw(name, part, self.lens[name]) for name in new]) if new else torch.full((1, 2, 8), torch.nan)
            for part in "kv"
        )
        output = self.attention["cross"](query, key, value)
        for name, computed, new_tokens in zip(names, num_computed, num_new, strict=True):
            self.manager.commit(name, [0] * 64, computed + new_tokens)
        return output

    def dense(self, names: Sequence[str], num_computed: Sequence[int], num_new: Sequence[int]) -> torch.Tensor:
        """Return the same by definition."""
        outputs = []
        for name, computed, new in zip(names, num_computed, num_new, strict=True):
            query = draw(name, "q", computed + new)[computed:]
            key, value = (draw(name, part, self.lens[name]) for part in "kv")
            visible = torch.ones(len(query), len(key), dtype=torch.bool)
            outputs.append(dense_attention(QUERY, query, key, value, visible) if len(key) else torch.zeros_like(query))
        return torch.cat(outputs)


def draw(name: str, part: str, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * "qkv".index(part) + sum(name.encode()))
    return torch.randn(64, 4 if part == "q" else 2, 8, generator=generator)[:count]


@pytest.mark.parametrize("backend", ["torch", "torch_reference"])
def test_requests_with_and_without_an_input_attend_in_one_batch(backend: str) -> None:
    bench = Bench(backend)
    for name, length in LENS.items():
        bench.start(name, length)
    first, second = ((*LENS,), (0, 0, 0, 0), (3, 9, 2, 1)), ((*LENS,), (3, 9, 2, 1), (1, 4, 1, 8))
    for step in (first, second):
        found = bench.step(*step)
        torch.testing.assert_close(found, bench.dense(*step), rtol=1e-5, atol=1e-5)


class SharedBuilder(AttentionMetadataBuilder):
    """Asks for an order, and declares that its metadata serve any layer, except for the block table."""

    batch_order = BatchOrder(decode_threshold=2)
    table_fields = frozenset({"block_table"})
    reuse_key = "any layer"

    def build(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        assert is_ordered(self.batch_order, metadata)
        return metadata

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> dict[str, Any]:
        return {"block_table": metadata.block_table}


class SharingBackend(TorchReferenceBackend):
    def make_builder(self) -> SharedBuilder:
        return SharedBuilder()


def test_what_is_built_for_a_requests_own_tokens_is_not_taken_for_an_encoders() -> None:
    bench = Bench(SharingBackend)
    for name, length in LENS.items():
        bench.start(name, length)
    for step in (((*LENS,), (0, 0, 0, 0), (3, 9, 2, 1)), ((*LENS,), (3, 9, 2, 1), (1, 4, 1, 8))):
        torch.testing.assert_close(bench.step(*step), bench.dense(*step), rtol=1e-5, atol=1e-5)


def test_an_input_that_comes_later_is_stored_beside_those_that_are_there() -> None:
    bench = Bench()
    bench.start("b", 5)
    bench.step(["b"], [0], [3])
    bench.start("c", 17)
    step = (["b", "c"], [3, 0], [1, 6])
    torch.testing.assert_close(bench.step(*step), bench.dense(*step), rtol=1e-5, atol=1e-5)


def test_a_batch_in_which_no_request_has_an_input_gives_zeros() -> None:
    bench = Bench()
    bench.start("a", 0)
    assert not bench.step(["a"], [0], [3]).any()


def test_the_metadata_of_the_encoders_group_is_of_its_sequence() -> None:
    bench = Bench()
    for name, length in LENS.items():
        bench.start(name, length)
    own, cross = build_metadata(bench.batch([*LENS], [0] * 4, [3, 9, 2, 1]), bench.manager.tables, CPU)
    assert [0, 5, 17, 1] == cross.seq_lens.tolist() == cross.seq_lens_cpu.tolist()
    assert (17, False, True) == (cross.max_seq_len, cross.causal, own.causal)
    assert [3, 9, 2, 1] == own.seq_lens.tolist()
    assert own.query_start_loc is cross.query_start_loc
    assert [0] * 15 == cross.slot_mapping.tolist()
    assert (4, 5) == tuple(cross.block_table.shape)
    assert [0, 2, 5, 1] == cross.block_table.bool().sum(1).tolist()


def test_slots_are_those_of_new_inputs_alone_in_the_order_of_their_requests() -> None:
    bench = Bench()
    for name, length in LENS.items():
        bench.start(name, length)
    bench.step(["b"], [0], [2])
    batch = bench.batch(["d", "b", "a", "c"], [0, 2, 0, 0], [1, 1, 1, 1])
    (slots,) = input_slots(batch, bench.manager.tables, CPU).values()
    tables = bench.manager.tables[1].ids
    expected = [
        int(tables[bench.manager.row(name), token // 4]) * 4 + token % 4 for name in "dc" for token in range(LENS[name])
    ]
    assert expected == slots.flat.tolist()
    bench.step("dbac", [0, 2, 0, 0], [1, 1, 1, 1])
    later = bench.batch("dbac", [1, 3, 1, 1], [1, 1, 1, 1])
    assert {} == input_slots(later, bench.manager.tables, CPU)


def count_instructions(call: Callable[[], Any]) -> int:
    """Count the interpreter's instructions, whose number grows with a loop over requests."""
    call()
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_metadata_and_slots_of_inputs_take_no_loop_over_requests() -> None:
    counts = []
    for num_reqs in (8, 256):
        bench = Bench()
        tables = bench.manager.tables
        batch = StepBatch(
            rows=np.arange(num_reqs),
            num_computed=np.zeros(num_reqs, dtype=np.int64),
            query_lens=np.ones(num_reqs, dtype=np.int64),
            generating_indices=np.arange(num_reqs),
            input_lens={"encoder": np.arange(num_reqs) % 20},
            stores_input={"encoder": np.arange(num_reqs) % 3 > 0},
        )
        counts.append(
            count_instructions(lambda: (build_metadata(batch, tables, CPU), input_slots(batch, tables, CPU)))  # noqa: B023
        )
    assert counts[0] == counts[1]


# --- a decoder with windows, whose encoder's input is optional --------------------------------------------------------


NUM_NEW_TOKENS = 12
GREEDY = SamplingParams(max_new_tokens=NUM_NEW_TOKENS)


def tokens(start: int, count: int) -> list[int]:
    return [token % 64 for token in ids(start, count)]


SHARED = tokens(9, 21)
REQUESTS: list[tuple[list[int], list[int] | None]] = [
    (tokens(1, 3), tokens(2, 9)),
    (tokens(3, 17), None),
    (SHARED, tokens(4, 33)),
    ([*SHARED, 5, 6], tokens(4, 33)),
    ([*SHARED, 5, 6], None),
    ([*SHARED, 7], None),
    ([1], tokens(5, 1)),
    (tokens(6, 40), tokens(7, 16)),
]


@pytest.fixture(scope="module")
def model() -> MixedDecoder:
    return MixedDecoder()


@pytest.fixture(scope="module")
def expected(model: MixedDecoder) -> list[tuple[int, ...]]:
    return [model.generate(own, encoder, NUM_NEW_TOKENS) for own, encoder in REQUESTS]


def served(engine: Any) -> list[tuple[int, ...]]:
    outputs = engine.generate([Prompt(encoder=encoder, decoder=own) for own, encoder in REQUESTS], GREEDY)
    assert {"length"} == {output.finish_reason for output in outputs}
    assert 0 == held_pages(engine)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    ("chunk", "max_num_seqs", "block_size", "backend", "prefix_caching"),
    cover_values([(3, 8, 4), (16, 2, 5), (2048, 8, 16), (7, 8, 1)], ["torch", "torch_reference"], [True, False]),
)
def test_windows_and_optional_inputs_equal_dense(
    model: MixedDecoder,
    expected: list[tuple[int, ...]],
    chunk: int,
    max_num_seqs: int,
    block_size: int,
    backend: str,
    prefix_caching: bool,
) -> None:
    with model.engine(
        max_num_batched_tokens=chunk,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        backend=backend,
        prefix_caching=prefix_caching,
    ) as engine:
        assert ["sliding_window", "cross_attention"] == [group.spec.kind for group in engine.plan.groups]
        assert expected == served(engine)


@pytest.mark.parametrize("host_memory", [None, "1MiB"])
def test_preempted_requests_with_and_without_inputs_equal_dense(
    model: MixedDecoder, expected: list[tuple[int, ...]], host_memory: str | None
) -> None:
    options: dict[str, Any] = {"memory": 24 * 1024, "block_size": 4, "max_num_batched_tokens": 16}
    with model.engine(host_memory=host_memory, **options) as engine:
        assert expected == served(engine)
        assert engine.stats().preemptions > 0


def test_a_prefix_without_an_input_is_not_that_of_a_request_with_one(
    model: MixedDecoder, expected: list[tuple[int, ...]]
) -> None:
    found = []
    with model.engine(block_size=4) as engine:
        for index in (2, 3, 4, 5):  # with an input, the same, without, without
            own, encoder = REQUESTS[index]
            before = engine.stats().cached_prompt_tokens
            (output,) = engine.generate([Prompt(encoder=encoder, decoder=own)], GREEDY)
            assert expected[index] == output.token_ids
            found.append(engine.stats().cached_prompt_tokens - before)
    assert [0, 20, 0, 20] == found


def test_an_input_is_computed_once_for_all_who_bring_it(model: MixedDecoder) -> None:
    model.encoded.clear()
    with model.engine(block_size=4) as engine:
        served(engine)
    assert [1, 9, 16, 33] == sorted(model.encoded)
