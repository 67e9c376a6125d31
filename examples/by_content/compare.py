"""Runs an attention type in a small random model, and compares its tokens with those of dense attention."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from kvframe import Engine, SamplingParams, Stack
from kvframe.contract import KVCacheSpec, LayerSpec, QuerySpec

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 16
PROMPTS = [[token * 7 % 128 for token in range(1, 71)] + tail for tail in ([5], [9, 9, 2], [100, 3])]
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)

Definition = Callable[..., torch.Tensor]
"""Returns the attention of all tokens, given the type, a layer, the prompt's length, and queries, keys and values."""


def make_model() -> LlamaForCausalLM:
    """Return a small random model whose attention is far from uniform."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": HEAD_SIZE}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, initializer_range=0.3, eos_token_id=None, **sizes, **heads))


def define(spec: Any, layer: LayerSpec, num_prompt_tokens: int, *tensors: torch.Tensor) -> torch.Tensor:
    """Return the attention of all tokens of a request: the definition of a type that asks for no prompt's length."""
    output: torch.Tensor = spec.dense_attention(layer, *tensors, {})
    return output


def generate_densely(model: Any, spec: KVCacheSpec, prompt: list[int], definition: Definition) -> list[int]:
    """Generate with plain transformers: the whole sequence again for each token, with the type's own definition."""
    query_side = QuerySpec(num_heads=HEADS, head_size=HEAD_SIZE, scale=HEAD_SIZE**-0.5)
    layer = LayerSpec(name="dense", spec=spec, query=query_side)

    def attend(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        rows, keys, values = (tensor[0].transpose(0, 1).double() for tensor in (query, key, value))
        return definition(spec, layer, len(prompt), rows, keys, values).to(query.dtype).unsqueeze(0), None

    AttentionInterface.register("dense_definition", attend)
    model.set_attn_implementation("dense_definition")
    token_ids = list(prompt)
    for _ in range(PARAMS.max_new_tokens):
        with torch.no_grad():
            token_ids.append(int(model(torch.tensor([token_ids]), use_cache=False).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


def run(
    plugin: ModuleType, spec_class: type[KVCacheSpec], options: Mapping[str, Any], definition: Definition = define
) -> None:
    """Serve three prompts with a common beginning by a plugin, in small steps, and compare their tokens.

    Args:
        plugin: The module, whose hooks register the type and its backend.
        spec_class: The type.
        options: Its own options.
        definition: The attention of a whole request, if it depends on which tokens are the prompt.
    """
    model = make_model()
    shape = {"block_size": 8, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE}
    expected = [generate_densely(model, spec_class(**shape, **options), prompt, definition) for prompt in PROMPTS]
    model.set_attn_implementation("sdpa")
    plain = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=PARAMS.max_new_tokens, do_sample=False)
    rule = {"kind": "full_attention", "spec": {"kind": spec_class.kind, **options}}
    tables = {"cache": {"memory": "2MiB", "block_size": 8}, "limits": {"max_num_batched_tokens": 23}, "rules": [rule]}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with Engine.from_pretrained(folder, stack=Stack.from_mapping(tables), plugins=[plugin]) as engine:
            outputs = [engine.generate([PROMPTS[0]], PARAMS)[0], *engine.generate(PROMPTS[1:], PARAMS)]
            stats = engine.stats()
            for group, max_blocks in zip(engine.plan.groups, stats.peak_blocks_held, strict=True):
                print(f"{group.layers[0]}: at most {max_blocks} blocks held")
            print(f"prefix cache: {stats.cached_prompt_tokens} of {stats.prompt_tokens} prompt tokens")
    equal = [list(output.token_ids) == tokens for output, tokens in zip(outputs, expected, strict=True)]
    print(f"other tokens than full attention: {plain[0, len(PROMPTS[0]) :].tolist() != expected[0]}")
    print(f"tokens equal to the dense definition: {sum(equal)} of {len(PROMPTS)} requests")
    if not all(equal):
        sys.exit(1)
