"""Serve a new architecture with kvframe, with prefill skipping off and on, and compare every token.

    python examples/yoco/run_yoco.py

``yoco_model.py`` is the model, in plain torch; ``yoco_adapter.py`` describes it to kvframe.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import torch
import yoco_plugin
from yoco_adapter import YocoModel, save_checkpoint
from yoco_model import YocoConfig, generate_densely, make_random

from kvframe import Engine, SamplingParams, Stack

PARAMS = SamplingParams(max_new_tokens=16)
SKIPPING: dict[str, dict[str, Any]] = {"off": {}, "on": {"prefill_skipping": "decode_only"}}


@attrs.frozen
class Run:
    """The results of one engine.

    Attributes:
        tokens: Generated for each prompt.
        cross_rows: Rows that each of the cross-decoder's layers computed.
        self_rows: Rows that each of the self-decoder's layers computed.
        cached: Prompt tokens that came from the prefix cache.
    """

    tokens: list[list[int]]
    cross_rows: int
    self_rows: int
    cached: int


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Return four prompts, three of which share a prefix."""
    generator = torch.Generator().manual_seed(1)
    shared, *tails = (
        torch.randint(vocab_size, (length,), generator=generator).tolist() for length in (160, 5, 40, 90, 200)
    )
    return [*([*shared, *tail] for tail in tails[:3]), tails[3]]


def count_rows(layer: Any) -> list[int]:
    """Return a list that gets the number of rows of each of the layer's forwards."""
    rows: list[int] = []
    layer.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    return rows


def run(path: Path, prompts: list[list[int]], model_options: dict[str, Any], *, show_plan: bool = False) -> Run:
    """Serve ``prompts`` in one engine, the first on its own, so that the others find its prefix."""
    cache, limits = {"memory": "1MiB", "block_size": 8}, {"max_num_batched_tokens": 64}
    stack = Stack.from_mapping({"model": model_options, "limits": limits, "cache": cache})
    with Engine.from_pretrained(path, stack=stack, plugins=[yoco_plugin]) as engine:
        if show_plan:
            for group in engine.plan.groups:
                print(f"{group.spec.kind}: the cache of {', '.join(group.layers)}")
            for layer, owner in engine.grouping.follows.items():
                print(f"no cache: {layer} reads {owner}")
        assert isinstance(engine.model, YocoModel)
        yoco = engine.model.model
        self_rows, cross_rows = count_rows(yoco.self_decoder[0]), count_rows(yoco.cross_decoder[0])
        outputs = [*engine.generate(prompts[:1], PARAMS), *engine.generate(prompts[1:], PARAMS)]
        return Run(
            tokens=[list(output.token_ids) for output in outputs],
            cross_rows=sum(cross_rows),
            self_rows=sum(self_rows),
            cached=engine.stats().cached_prompt_tokens,
        )


def main() -> None:
    """Run the same prompts both ways."""
    model = make_random(YocoConfig())
    prompts = make_prompts(model.config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "yoco"
        save_checkpoint(model, path)
        runs = {name: run(path, prompts, options, show_plan=name == "off") for name, options in SKIPPING.items()}
    num_prompt_tokens = sum(map(len, prompts))
    print(f"{len(prompts)} prompts, {num_prompt_tokens} tokens, {runs['off'].cached} of them from the prefix cache")
    for name, result in runs.items():
        print(
            f"prefill skipping {name}: {result.self_rows} rows in a layer of the self-decoder, "
            f"{result.cross_rows} in one of the cross-decoder"
        )
    expected = [generate_densely(model, prompt, PARAMS.max_new_tokens) for prompt in prompts]
    print(f"generated for the first prompt: {expected[0]}")
    for name, result in runs.items():
        num_equal = sum(tokens == right for tokens, right in zip(result.tokens, expected, strict=True))
        print(f"tokens equal to the dense reference, skipping {name}: {num_equal} of {len(prompts)} requests")
    if any(result.tokens != expected for result in runs.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
