"""The reference backend on all that it declares, and the conformance kit on wrong backends."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from kvframe_testing.case import Case, Request
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_cases, make_layers
from kvframe_testing.laws import ConformanceError
from kvframe_testing.reference import dense_attention, visible_tokens
from kvframe_testing.state import GridSpec
from kvframe_testing.suites import BackendTests

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract.backend import AttentionBackend, KVCache
from kvframe.contract.capabilities import Capabilities
from kvframe.contract.specs import (
    ENCODER,
    AttentionSpec,
    LayerSpec,
    QuerySpec,
    RelativeBias,
    StateTensor,
)
from kvframe.selection.refusals import find_not_causal, find_refusals
from tests.testing.mutant_backends import MISTAKES


def case_of(backend: type[AttentionBackend], name: str) -> Case:
    (case,) = (case for case in make_cases(backend.capabilities) if case.name == name)
    return case


class TestReference(BackendTests):
    backend = "torch_reference"
    together = (("batch", "visible"), ("format", "dtype"), ("has_sinks", "soft_cap"))


# --- declarations and refusals ----------------------------------------------------------------------------------------


def test_the_reference_serves_every_layer_of_the_grid() -> None:
    capabilities = TorchReferenceBackend.capabilities
    assert [] == [
        refusal for _, layer in make_layers(capabilities) for refusal in find_refusals(capabilities, layer, "cpu")
    ]


NARROW = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({"float16", "bfloat16"}),
    masks=frozenset({"causal"}),
    head_sizes=frozenset({64, 128}),
    block_size_multiple=16,
)
NARROW_SPEC = GridSpec(block_size=32, num_kv_heads=1, head_size=64, dtype="float16")
NARROW_QUERY = QuerySpec(num_heads=2, head_size=64, scale=0.125)


class RenamedState(GridSpec):
    """Stores a latent vector instead of keys and values."""

    def state_tensors(self) -> dict[str, StateTensor]:
        return {"latent": StateTensor((self.block_size, self.head_size), self.dtype)}


def refusals(spec: AttentionSpec = NARROW_SPEC, device: str = "cuda", **query: Any) -> list[str]:
    layer = LayerSpec(name="layer", spec=spec, query=attrs.evolve(NARROW_QUERY, **query))
    return [refusal.code for refusal in find_refusals(NARROW, layer, device)]


def test_what_is_declared_is_not_refused() -> None:
    assert [] == refusals()
    assert [] == refusals(attrs.evolve(NARROW_SPEC, head_size=128, head_size_v=128, block_size=16), head_size=128)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("dtype", {"dtype": "float32"}),
        ("mask_bidirectional", {"causal": False}),
        ("mask_window", {"window": 8}),
        ("mask_bidirectional_window", {"causal": False, "window": 8, "lookahead": 8}),
        ("mask_chunk", {"chunk": 8}),
        ("mask_live_range", {"stride": 8}),
        ("mask_function", {"stride": 8, "has_function": True}),
        ("mask_sparse", {"window": 4, "dilation": 2}),
        ("value_size", {"head_size_v": 32}),
        ("block_size", {"block_size": 24}),
    ],
)
def test_a_spec_beyond_what_is_declared_is_refused_by_code(code: str, changes: dict[str, Any]) -> None:
    assert [code] == refusals(attrs.evolve(NARROW_SPEC, **changes))


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("soft_cap", {"soft_cap": 1.0}),
        ("sinks", {"has_sinks": True}),
        ("relative_bias", {"relative_bias": RelativeBias(num_buckets=8, max_distance=20)}),
        ("alibi", {"alibi_slopes": (0.5, 0.25)}),
    ],
)
def test_a_query_side_beyond_what_is_declared_is_refused_by_code(code: str, changes: dict[str, Any]) -> None:
    assert [code] == refusals(**changes)


def test_a_layer_that_the_model_merges_is_refused_by_code_without_a_log_sum_exp() -> None:
    layer = LayerSpec(name="layer", spec=NARROW_SPEC, query=attrs.evolve(NARROW_QUERY, merged=True))
    assert ["lse"] == [refusal.code for refusal in find_refusals(NARROW, layer, "cuda")]
    assert [] == find_refusals(attrs.evolve(NARROW, returns_lse=True), layer, "cuda")


def test_another_device_head_size_or_state_is_refused_by_code() -> None:
    assert ["device"] == refusals(device="cpu")
    assert ["head_size"] == refusals(attrs.evolve(NARROW_SPEC, head_size=80, head_size_v=80), head_size=80)
    assert ["state"] == refusals(RenamedState(block_size=32, num_kv_heads=1, head_size=64, dtype="float16"))


def test_keys_of_another_sequence_are_for_a_backend_that_takes_batches_without_an_order() -> None:
    class Encoded(GridSpec):
        sequence = ENCODER

    assert ["mask_bidirectional"] == refusals(Encoded(block_size=32, num_kv_heads=1, head_size=64, dtype="float16"))
    assert ["mask_bidirectional"] == refusals(
        Encoded(block_size=32, num_kv_heads=1, head_size=64, dtype="float16", causal=False)
    )


@pytest.mark.parametrize("mask", ["bidirectional", "mask_function", "live_range"])
def test_who_serves_masks_of_any_kind_takes_batches_that_are_not_causal(mask: str) -> None:
    refusal = find_not_causal(NARROW)
    assert refusal is not None
    assert "mask_bidirectional" == refusal.code
    assert find_not_causal(attrs.evolve(NARROW, masks=frozenset({"causal", mask}))) is None


def test_every_reason_is_given_at_once() -> None:
    spec = attrs.evolve(NARROW_SPEC, window=8, num_sink_tokens=1, block_size=8)
    assert ["device", "mask_sink_tokens", "mask_window", "soft_cap", "block_size"] == refusals(
        spec, "cpu", soft_cap=1.0
    )


# --- the reference, in plain numbers ----------------------------------------------------------------------------------


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> list[float]:
    visible = options.pop("visible", torch.ones(query.shape[0], key.shape[0], dtype=torch.bool))
    learned = options.pop("sinks", None), options.pop("bias", None)
    layer = QuerySpec(num_heads=query.shape[1], head_size=1, **{"scale": 1.0, **options})
    output: list[float] = dense_attention(layer, query, key, value, visible, *learned).flatten().tolist()
    return output


def test_equal_scores_give_the_mean_of_what_is_seen() -> None:
    visible = torch.tensor([[True, True, False], [True, True, True]])
    assert [3.0, 4.0] == pytest.approx(attend(numbers(0, 0), numbers(1, 2, 3), numbers(2, 4, 6), visible=visible))


def test_the_scale_is_a_factor_on_the_scores() -> None:
    assert [0.75] == pytest.approx(attend(numbers(1), numbers(0, 1), numbers(0, 1), scale=1.0986122886681098))


def test_a_learned_sink_takes_its_share_and_gives_nothing() -> None:
    assert [6.0] == pytest.approx(attend(numbers(0), numbers(1, 2, 3), numbers(8, 8, 8), sinks=torch.zeros(1).double()))


def test_a_soft_cap_bounds_the_scores() -> None:
    assert [3.0] == pytest.approx(attend(numbers(1e3), numbers(1, -1), numbers(2, 4), soft_cap=1e-9))


def test_a_learned_bias_is_added_to_the_capped_scores() -> None:
    bias = torch.tensor([[[0.0, 1.0986122886681098]]])
    assert [3.5] == pytest.approx(attend(numbers(1e3), numbers(1, -1), numbers(2, 4), soft_cap=1e-9, bias=bias))


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    hidden = torch.tensor([[False, False], [True, False]])
    assert [0.0, 6.0] == attend(numbers(1, 1), numbers(1, 2), numbers(6, 8), visible=hidden)
    assert [0.0] == attend(numbers(1), numbers(), numbers())


def test_query_heads_share_the_key_head_of_their_group() -> None:
    query, key = torch.zeros(1, 4, 1), torch.zeros(1, 2, 1)
    assert [5.0, 5.0, 7.0, 7.0] == attend(query, key, torch.tensor([[[5.0], [7.0]]]))


def test_a_query_sees_what_is_live_and_itself() -> None:
    window = attrs.evolve(NARROW_SPEC, window=2, num_sink_tokens=1)
    assert [[1, 0, 1, 1, 0], [1, 0, 0, 1, 1]] == visible_tokens(window, 3, 5).int().tolist()
    assert [[0, 0, 1, 0], [0, 0, 1, 1]] == visible_tokens(attrs.evolve(NARROW_SPEC, chunk=2), 2, 4).int().tolist()


# --- the kit finds bugs -----------------------------------------------------------------------------------------------


class SeesItself(TorchReferenceBackend):
    """Assumes that a query's own key is in the cache."""

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **options: Any
    ) -> torch.Tensor:
        least = metadata.query_start_loc_cpu.diff()
        longer = attrs.evolve(metadata, seq_lens_cpu=metadata.seq_lens_cpu.maximum(least))
        return super().attend(layer, query, kv_cache, longer, **options)


LONG, SHORT = MISTAKES["a window is one token too long"][0], MISTAKES["a window is one token too short"][0]


@pytest.mark.parametrize(
    ("backend", "name", "message"),
    [
        (LONG, "window=5-block=1-decode", r"wrong, .*NaN is state that is not live"),
        (LONG, "window=5-block=16-prefill", r"wrong, the first at position 5 of request 0"),
        (SHORT, "window=5-block=16-decode", r"4 of 5 queries are wrong"),
        (MISTAKES["it computes in half precision"][0], "full-block=16-decode", r"wrong, .* by .* is allowed$"),
        (SeesItself, "bidirectional-block=16-cross_mixed", r"wrong, .*NaN is state that is not live"),
        (SeesItself, "full-block=16-cross_decode-padded-not_causal", r"wrong, .*at position 0 of request 0"),
    ],
)
def test_the_kit_says_what_a_wrong_backend_got_wrong(backend: type[AttentionBackend], name: str, message: str) -> None:
    case = case_of(backend, name)
    with pytest.raises(ConformanceError, match=f"^{backend.__name__} on {name}: .*{message}"):
        check_backend(backend, case)


def test_dead_blocks_are_not_resident_in_a_case() -> None:
    class Recorder(TorchReferenceBackend):
        def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
            tables.append(metadata.block_table.tolist())
            return super().attend(layer, query, kv_cache, metadata, **options)

    tables: list[list[list[int]]] = []
    spec = GridSpec(block_size=2, num_kv_heads=1, head_size=4, window=3, num_sink_tokens=1)
    layer = LayerSpec(name="layer", spec=spec, query=QuerySpec(num_heads=1, head_size=4, scale=1.0))
    check_backend(Recorder, Case(name="one", layer=layer, requests=(Request(9, 2),)))
    resident = [[[block > 0 for block in row] for row in table] for table in tables]
    assert [[[True, False, False, True, True, True]]] * 2 == resident, "with and without the log-sum-exp"


@pytest.mark.parametrize("masks", [{"causal", "bidirectional", "window", "live_range"}, {"mask_function", "sparse"}])
def test_only_a_declared_window_in_both_directions_is_served(masks: set[str]) -> None:
    spec = attrs.evolve(NARROW_SPEC, causal=False, window=8, lookahead=8)
    layer = LayerSpec(name="layer", spec=spec, query=NARROW_QUERY)
    narrow = attrs.evolve(NARROW, masks=frozenset(masks))
    assert ["mask_bidirectional_window"] == [refusal.code for refusal in find_refusals(narrow, layer, "cuda")]
    wide = attrs.evolve(NARROW, masks=frozenset({*masks, "bidirectional_window"}))
    assert [] == find_refusals(wide, layer, "cuda")
