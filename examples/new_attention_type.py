"""A new attention type, from its definition to a real model, in one script and without packaging.

The type is the fixed pattern of Sparse Transformers (arXiv 1904.10509): a query sees its own stretch of ``stride``
tokens, and of every earlier stretch the last ``num_summary`` tokens. The script declares that as a live range:
planning, paging, freeing and prefix caching follow from it. It declares it once more as a function of positions, for
FlexAttention (``kvframe-flex``). A small hybrid model then runs with it, by the reference backend, which reads live
ranges, and by FlexAttention, which knows the function only. Every generated token is compared with plain transformers
under a dense mask.

    python examples/new_attention_type.py
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import attrs
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from kvframe import Stack
from kvframe.contract import AttentionSpec, MaskFunction, TokenRange, hookimpl, positive_int

# --- the attention type: this is all that a researcher writes ---------------------------------------------------------


@attrs.frozen(kw_only=True)
class FixedPatternSpec(AttentionSpec):
    """Keys and values of the query's own stretch, and of the summary tokens at the end of each earlier one.

    Attributes:
        stride: Tokens of a stretch.
        num_summary: Tokens at the end of a stretch that every later query sees.
    """

    kind = "fixed_pattern"

    stride: int = positive_int
    num_summary: int = positive_int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the summaries of the stretches before ``n``'s own, and its own up to ``n``."""
        own = n - n % self.stride
        summaries = [(end - self.num_summary, end) for end in range(self.stride, own + 1, self.stride)]
        return (*summaries, (own, n)) if own < n else tuple(summaries)

    @property
    def mask_function(self) -> MaskFunction:
        """Return the same as a function of the positions of queries and keys, which are arrays."""
        stride, first_summary = self.stride, self.stride - self.num_summary
        return lambda query, key: (
            (key <= query) & ((key // stride == query // stride) | (key % stride >= first_summary))
        )


@hookimpl
def kvframe_register_specs(register: Any) -> None:
    """Register the type under the name that layers and stacks use."""
    register("fixed_pattern", FixedPatternSpec)


# --- a model that uses it ---------------------------------------------------------------------------------------------

STRIDE, NUM_SUMMARY = 16, 4
PATTERN = {"stride": STRIDE, "num_summary": NUM_SUMMARY}
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
BACKENDS: dict[str, dict[str, Any]] = {
    "torch_reference": {},
    # So few tokens are not worth the minute that compiling takes.
    "flex": {"compile": "never"},
}


def make_stack(backend: str) -> Stack:
    """Return a stack with a small cache, that gives layers the new type, and the type a backend."""
    return Stack.from_mapping(
        {
            "cache": {"memory": "1MiB", "block_size": 4},
            "limits": {"max_num_batched_tokens": 32},
            "rules": [
                # The windowed layers get the new type. When the model is attached, a packed run is compared with dense
                # attention under what the type's live ranges show.
                {"kind": "sliding_window", "spec": {"kind": "fixed_pattern", **PATTERN}},
                {"kind": "fixed_pattern", "backend": {"name": backend, **BACKENDS[backend]}},
            ],
        }
    )


def make_model() -> Gemma3ForCausalLM:
    """Return a small random hybrid model: two layers for the new type, one with full attention."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=len(LAYER_TYPES),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=LAYER_TYPES,
        max_position_embeddings=512,
        initializer_range=0.3,  # large enough that attention is far from uniform
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    return Gemma3ForCausalLM(config)


def generate_densely(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Generate with plain transformers: the whole sequence again for each token, under a dense mask."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        position = torch.arange(len(token_ids))
        query, key = position[:, None], position[None, :]
        causal = key <= query
        mask = causal & ((key // STRIDE == query // STRIDE) | (key % STRIDE >= STRIDE - NUM_SUMMARY))
        masks = {"sliding_attention": mask[None, None], "full_attention": causal[None, None]}
        with torch.no_grad():
            logits = model(torch.tensor([token_ids]), attention_mask=masks, use_cache=False).logits
        token_ids.append(int(logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


def main() -> None:
    """Run three prompts that share a prefix by both backends, and compare."""
    from kvframe import Engine, SamplingParams  # here, because vLLM serves the type without kvframe's own engine

    shared = [token * 7 % 128 for token in range(1, 81)]
    prompts = [[*shared, *tail] for tail in ([5], [9, 9, 2], [100, 3])]
    params = SamplingParams(max_new_tokens=24)
    model = make_model()
    expected = [generate_densely(model, prompt, params.max_new_tokens) for prompt in prompts]
    all_equal = True
    for backend in BACKENDS:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            this = sys.modules[__name__]
            with Engine.from_pretrained(folder, stack=make_stack(backend), plugins=[this]) as engine:
                for choice in engine.choices:
                    print(f"{choice.layer}: backend {choice.backend}")
                outputs = [engine.generate([prompts[0]], params)[0], *engine.generate(prompts[1:], params)]
                stats = engine.stats()
                for group, max_blocks in zip(engine.plan.groups, stats.peak_blocks_held, strict=True):
                    print(f"{group.spec.kind}: {len(group.layers)} layers, at most {max_blocks} blocks held")
                print(f"generated for the first prompt: {list(outputs[0].token_ids)}")
                print(f"prefix cache: {stats.cached_prompt_tokens} of {stats.prompt_tokens} prompt tokens")
        equal = [list(output.token_ids) == tokens for output, tokens in zip(outputs, expected, strict=True)]
        print(f"{backend}: tokens equal to the dense reference: {sum(equal)} of {len(prompts)} requests")
        all_equal = all_equal and all(equal)
    if not all_equal:
        sys.exit(1)


if __name__ == "__main__":
    main()
