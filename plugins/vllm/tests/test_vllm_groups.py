"""One of vLLM's groups whose layers differ: each is computed as its own spec, query side and share of tokens say."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from kvframe import FullAttentionSpec, HostedModel, Stack, load_plugins
from kvframe.contract import BackendError, LayerDescription, LayerSpec, ModelDescription, QuerySpec

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make vllm"),
    pytest.mark.filterwarnings("ignore"),
]

LENS = [9, 6]
OPTIONS = {"block_size", "num_kv_heads", "head_size", "window"}
NUM_TOKENS = sum(LENS)
SPEC = FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=8, dtype="float32")
PLAIN = LayerSpec(name="plain", spec=SPEC, query=QuerySpec(num_heads=4, head_size=8, scale=0.5))
WINDOW = load_plugins().registry.specs.load("sliding_window")(
    block_size=8, num_kv_heads=2, head_size=8, dtype="float32", window=3
)
assert PLAIN.query is not None
CAPPED = attrs.evolve(PLAIN, name="capped", query=attrs.evolve(PLAIN.query, soft_cap=1.0))
WINDOWED = attrs.evolve(PLAIN, name="windowed", spec=WINDOW)
SHARING = attrs.evolve(PLAIN, name="sharing", shares_with="plain")


def make_builder(names: Sequence[str], layers: Sequence[LayerSpec], *, skips: bool = False) -> Any:
    """Return a group's builder, in blocks of 4: half of those that the layers were described with."""
    from kvframe_vllm.adapter.backend import HostedBuilder, HostedImpl

    rules: dict[str, Any] = {"rules": [{"layers": "*", "backend": "torch"}]}
    if skips:
        rules["model"] = {"prefill_skipping": "decode_only"}
    described = [
        LayerDescription(
            name=layer.name,
            kind=layer.spec.kind,
            options=attrs.asdict(layer.spec, recurse=False, filter=lambda field, _: field.name in OPTIONS),
            query=attrs.asdict(layer.query, recurse=False),
            shares_with=layer.shares_with,
        )
        for layer in layers
        if layer.spec is not None and layer.query is not None
    ]
    model = HostedModel(
        ModelDescription(name="made", layers=tuple(described), max_model_len=64),
        Stack.from_mapping(rules),
        load_plugins().registry,
        torch.float32,
        stored={layer.name: {"k": torch.float32, "v": torch.float32} for layer in layers},
        skips=skips,
    )
    impls = {}
    for layer in layers:
        impls[layer.name] = HostedImpl(4, 8, 0.5, 2)
        impls[layer.name].name, impls[layer.name].model = layer.name, model
    context = {name: SimpleNamespace(impl=impl) for name, impl in impls.items()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    return HostedBuilder(SimpleNamespace(block_size=4), list(names), config, torch.device("cpu")), impls


def batch(**more: Any) -> Any:
    """Return vLLM's batch of two prompts, in blocks 1 to 8."""
    table = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    slots = torch.cat([table[row, torch.arange(num) // 4] * 4 + torch.arange(num) % 4 for row, num in enumerate(LENS)])
    starts, lens = torch.tensor([0, 9, 15], dtype=torch.int32), torch.tensor(LENS, dtype=torch.int32)
    fields = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": lens,
        "seq_lens_cpu_upper_bound": lens,
    }
    fields |= {"num_reqs": 2, "num_actual_tokens": NUM_TOKENS, "max_query_len": 9, "max_seq_len": 9, "causal": True}
    fields |= {"block_table_tensor": table, "slot_mapping": slots}
    return SimpleNamespace(**{**fields, "logits_indices_padded": None, "num_logits_indices": None, **more})


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int = 99, cap: float | None = None
) -> Any:
    parts = []
    for start, num in ((0, 9), (9, 6)):
        q, k, v = (states[start : start + num] for states in (query, key, value))
        scores = 0.5 * torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1))
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        visible = torch.ones(num, num, dtype=torch.bool).tril() & torch.ones(num, num, dtype=torch.bool).triu(
            1 - window
        )
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1)))
    return torch.cat(parts)


def tensors() -> Mapping[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(NUM_TOKENS, heads, 8, generator=draw)
        for name, heads in (("query", 4), ("key", 2), ("value", 2))
    }


def test_layers_of_a_group_that_differ_in_spec_or_query_side_are_computed_apart() -> None:
    names = ["plain", "capped", "windowed"]
    builder, impls = make_builder(names, [PLAIN, CAPPED, WINDOWED])
    metadata, inputs = builder.build(0, batch()), tensors()
    options = {"plain": {}, "capped": {"cap": 1.0}, "windowed": {"window": 3}}
    outputs = {}
    for name in names:
        pages, outputs[name] = torch.full((10, 2, 4, 16), float("nan")), torch.empty(NUM_TOKENS, 4, 8)
        impls[name].forward(None, **inputs, kv_cache=pages, attn_metadata=metadata, output=outputs[name])
        torch.testing.assert_close(outputs[name], dense(**inputs, **options[name]))
    assert not torch.allclose(outputs["plain"], outputs["capped"])
    assert not torch.allclose(outputs["plain"], outputs["windowed"])


def test_skipped_layers_compute_the_rows_that_vllm_names_and_write_nothing() -> None:
    rows = torch.tensor([8, 14])
    keeping, impls = make_builder(["plain"], [PLAIN])
    skipping, skipped = make_builder(["sharing"], [PLAIN, SHARING], skips=True)
    inputs, pages, output = tensors(), torch.full((10, 2, 4, 16), float("nan")), torch.empty(NUM_TOKENS, 4, 8)
    impls["plain"].forward(None, **inputs, kv_cache=pages, attn_metadata=keeping.build(0, batch()), output=output)
    before = pages.clone()
    metadata = skipping.build(0, batch(logits_indices_padded=rows, num_logits_indices=2))
    kept_output, query = torch.empty(2, 4, 8), inputs["query"][rows]
    skipped["sharing"].forward(None, query, None, None, pages, metadata, kept_output)
    torch.testing.assert_close(kept_output, dense(**inputs)[rows])
    assert torch.equal(before.nan_to_num(), pages.nan_to_num())
    assert (2, [8, 14]) == (metadata.num_logits_indices, metadata.logits_indices_padded.tolist())
    with pytest.raises(
        BackendError, match="needs the 2 generating tokens only, but its model passes 15 tokens and skips none"
    ):
        skipped["sharing"].forward(None, inputs["query"], None, None, pages, metadata, output)


def test_a_layer_that_is_no_attention_is_refused_as_one_on_a_backend_of_vllms() -> None:
    """Recurrent layers have no implementation that could be asked."""
    from kvframe_vllm.adapter.layers import describe_layers
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Recurrent(AttentionLayerBase):
        def get_attn_backend(self) -> Any:
            return int

        def get_kv_cache_spec(self, vllm_config: Any) -> None:
            return None

    compiled = SimpleNamespace(static_forward_context={"layers.0": Recurrent()})
    config = SimpleNamespace(compilation_config=compiled)
    with pytest.raises(BackendError, match=r"layer 'layers\.0' would run on vLLM's own int"):
        describe_layers(config, {}, Stack(), load_plugins().registry)


@pytest.mark.parametrize(
    ("selection", "reason"),
    [
        ({"use_sparse": True, "use_mla": True}, "sparse not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_pcp": True, "use_mla": True}, "PCP not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
    ],
)
def test_layers_that_vllm_may_not_give_to_this_backend_are_refused_with_its_reason(
    selection: dict[str, Any], reason: str
) -> None:
    from kvframe_vllm.adapter.hooks import select_backend
    from vllm.v1.attention.selector import AttentionSelectorConfig

    if unknown := selection.keys() - {*AttentionSelectorConfig._fields}:
        pytest.skip(f"this vLLM does not know {', '.join(unknown)}")
    base_selection = {"head_size": 32, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": None}
    with pytest.raises(BackendError, match=rf"does not serve \({reason}\): unset KVFRAME_STACK"):
        select_backend(object, None, AttentionSelectorConfig(**{**base_selection, **selection}))


def test_windows_sinks_and_latents_are_served_by_the_class_for_them() -> None:
    from kvframe_vllm.adapter.hooks import select_backend
    from vllm.v1.attention.selector import AttentionSelectorConfig

    base_selection = {"head_size": 32, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 16}
    classes = {
        select_backend(object, None, AttentionSelectorConfig(**base_selection, **selection)).rpartition(".")[2]
        for selection in ({}, {"has_sink": True, "has_sliding_window": True}, {"use_kv_connector": True})
    }
    assert {"HostedBackend"} == classes
    latents = select_backend(object, None, AttentionSelectorConfig(**base_selection, use_mla=True))
    assert "kvframe_vllm.adapter.backend.HostedLatentBackend" == latents


def test_what_a_layer_is_made_with_and_kvframe_does_not_serve_is_noted() -> None:
    from kvframe_vllm.adapter.backend import HostedImpl, HostedLatentImpl

    as_vllm = (4, 8, 0.5, 2, None, 48, "auto", 30.0, "decoder", "layers.0")
    plain = HostedImpl(*as_vllm, sinks=torch.zeros(4))
    assert ([], 30.0, 0.5, (4,)) == (plain.unknown, plain.logits_soft_cap, plain.scale, tuple(plain.sinks.shape))
    sloped = HostedImpl(2, 8, 0.5, 2, [1.0, 0.5], lookback=3, chunk=None)
    assert (["lookback"], (1.0, 0.5)) == (sloped.unknown, sloped.alibi_slopes)
    latent = HostedLatentImpl(
        4, 8, 0.5, sliding_window=48, kv_lora_rank=3, v_head_dim=8, indexer=None, alibi_slopes=[1.0] * 4
    )
    assert ["alibi_slopes", "sliding_window"] == latent.unknown
