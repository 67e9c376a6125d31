"""Every family, packed through dense attention layers, gives the logits of its own plain forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.checkpoint import quiet
from kvframe_transformers.testing import FAMILIES, MORE_FAMILIES, STATE_FAMILIES, rounding_of, save_tiny, tiny_config
from transformers import AutoModelForCausalLM, Gemma3Config

ALL = FAMILIES + MORE_FAMILIES + STATE_FAMILIES
PACKED, CHUNKED = (
    [pytest.param(family, marks=[] if index % 2 == odd else pytest.mark.whole) for index, family in enumerate(ALL)]
    for odd in (0, 1)
)
"""In usual runs, each family computes either packed prompts or chunks."""
CHECKED = [pytest.param(family, marks=[] if index % 6 == 0 else pytest.mark.whole) for index, family in enumerate(ALL)]


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return the checkpoint folder of a tiny model of a family, and the plain model; made once."""
    folder = tmp_path_factory.mktemp("families")
    return cache(lambda family: (folder / family, save_tiny(folder / family, family)))


@pytest.mark.parametrize("family", PACKED)
def test_packed_prompts_give_the_plain_logits(family: str, saved: Any, dense_layers: Any) -> None:
    path, plain = saved(family)
    prompts = [prompt(3, 1), prompt(21, 2), prompt(1, 3)]
    with torch.inference_mode():
        expected = [plain(torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts]
    model = TransformersAdapter().load(path, device="cpu", dtype="float32")
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    outputs = layers.run_packed(model, prompts)
    for want, have in zip(expected, outputs, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=rounding_of(plain, prompts))


@pytest.mark.parametrize("family", CHUNKED)
def test_chunks_of_several_requests_give_the_plain_logits(family: str, saved: Any, dense_layers: Any) -> None:
    path, plain = saved(family)
    first, second = prompt(20, 4), prompt(13, 5)
    with torch.inference_mode():
        expected = [plain(torch.tensor([ids]), use_cache=False).logits[0] for ids in (first, second)]
    model = TransformersAdapter().load(path, device="cpu", dtype="float32")
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    outputs: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for step in (
        {0: first[:7]},
        {0: first[7:8], 1: second[:10]},
        {1: second[10:11], 0: first[8:18]},
        {0: first[18:19], 1: second[11:]},
        {0: first[19:]},
    ):
        for request, logits in layers.step(model, step).items():
            outputs[request].append(logits)
    for request, want in enumerate(expected):
        torch.testing.assert_close(torch.cat(outputs[request]), want, rtol=0, atol=rounding_of(plain, [first, second]))


@pytest.mark.parametrize("family", CHECKED)
def test_the_self_check_accepts_it(family: str, saved: Any, dense_layers: Any) -> None:
    path, _ = saved(family)
    model = TransformersAdapter().load(path, device="cpu", dtype="float32")
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    model.self_check(partial(layers.run_packed, model))


def test_the_text_part_of_a_composite_model_runs(tmp_path: Path, dense_layers: Any) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=tiny_config("gemma3_text").to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1,
        image_token_index=127,
        boi_token_index=126,
        eoi_token_index=125,
    )
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with quiet():
        plain.save_pretrained(tmp_path)
    prompts = [list(range(20)), list(range(50, 57))]
    with torch.inference_mode():
        expected = [plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts]
    model = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    for want, have in zip(expected, layers.run_packed(model, prompts), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=2e-4)
