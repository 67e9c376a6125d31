"""A model with a dilated window, which sees fewer tokens than it keeps: every token equals that of a dense mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_testing.laws import check_spec
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from kvframe import Engine, SamplingParams, Setup, Stack, load_plugins
from kvframe.contract import AttentionSpec, BackendError, MaskFunction, TokenRange, positive_int
from kvframe.planning.recognise import find_adapter
from tests.support.plugins import plugin

WINDOW, DILATION = 6, 3
SHARED = [token * 7 % 128 for token in range(1, 41)]
PROMPTS = [[*SHARED, *tail] for tail in ([5], [9, 9, 2], [100, 3])]
PARAMS = SamplingParams(max_new_tokens=16)


@attrs.frozen(kw_only=True)
class DilatedSpec(AttentionSpec):
    """A window in which a query sees every ``dilation``-th token (Longformer, arXiv 2004.05150)."""

    kind = "dilated"
    is_sparse = True

    window: int = positive_int
    dilation: int = positive_int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        start = max(0, n - (self.window - 1) * self.dilation)
        return ((start, n),) if start < n else ()

    @property
    def mask_function(self) -> MaskFunction:
        size, dilation = self.window * self.dilation, self.dilation
        return lambda query, key: (key <= query) & (key > query - size) & ((query - key) % dilation == 0)


DILATED = plugin("dilated", specs={"dilated": DilatedSpec})


def make_model() -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    return Gemma3ForCausalLM(config)


def make_engine(path: Path, backend: str) -> Engine:
    """Return an engine whose windowed layers have a dilated window."""
    options = {"compile": "never"} if backend == "flex" else {}
    stack = Stack.from_mapping(
        {
            "cache": {"memory": "1MiB", "block_size": 4},
            # The model's own forward has another mask.
            "limits": {"max_num_batched_tokens": 24, "max_model_len": 96},
            "engine": {"self_check": False},
            "rules": [{"kind": "dilated", "backend": {"name": backend, **options}}],
        }
    )
    registry = load_plugins(stack.plugins, plugins=[DILATED]).registry
    model = find_adapter(path, registry).load(path, device="cpu", dtype="float32")
    layers = tuple(
        attrs.evolve(layer, kind="dilated", options={**layer.options, "window": WINDOW, "dilation": DILATION})
        if layer.kind == "sliding_window"
        else layer
        for layer in model.description.layers
    )
    description = attrs.evolve(model.description, layers=layers)
    return Engine(
        model,
        Setup.of(description, stack, registry, dtype="float32"),
    )


def generate_densely(model: Any, prompt: list[int], dilation: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(PARAMS.max_new_tokens):
        position = torch.arange(len(token_ids))
        distance = position[:, None] - position
        causal = distance >= 0
        dilated = causal & (distance < WINDOW * DILATION) & (distance % dilation == 0)
        masks = {"sliding_attention": dilated[None, None], "full_attention": causal[None, None]}
        with torch.no_grad():
            logits = model(torch.tensor([token_ids]), attention_mask=masks, use_cache=False).logits
        token_ids.append(int(logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


@pytest.fixture(scope="module")
def model() -> Gemma3ForCausalLM:
    return make_model()


@pytest.mark.parametrize("backend", ["torch_reference", "flex"])
def test_tokens_equal_those_of_a_dense_mask(model: Any, backend: str, tmp_path: Path) -> None:
    expected = [generate_densely(model, prompt, DILATION) for prompt in PROMPTS]
    assert expected != [generate_densely(model, prompt, 1) for prompt in PROMPTS]
    model.save_pretrained(tmp_path)
    with make_engine(tmp_path, backend) as engine:
        outputs = [engine.generate(PROMPTS[:1], PARAMS)[0], *engine.generate(PROMPTS[1:], PARAMS)]
        assert expected == [list(output.token_ids) for output in outputs]
        assert engine.stats().cached_prompt_tokens > 0
        peak_blocks = dict(
            zip((group.spec.kind for group in engine.plan.groups), engine.stats().peak_blocks_held, strict=True)
        )
        assert peak_blocks["dilated"] < peak_blocks["full_attention"]


def test_a_backend_that_would_see_every_kept_token_is_refused_by_name(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(BackendError, match="has no mask sparse, and would see every live token"):
        make_engine(tmp_path, "torch")


def test_the_type_keeps_the_laws() -> None:
    check_spec(DilatedSpec(block_size=4, num_kv_heads=1, head_size=8, window=WINDOW, dilation=DILATION))
