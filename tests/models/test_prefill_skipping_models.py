"""Prefill skipping on models of transformers: the same tokens, with fewer rows in the layers that share a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_engine.requests.request import SamplingParams
from kvframe_transformers.checkpoint import quiet
from kvframe_transformers.testing import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from kvframe import Engine, Setup, load_plugins
from kvframe.attention.batch_metadata import StepBatch
from kvframe.contract.errors import ModelError, StackError
from kvframe.planning.recognise import find_adapter
from tests.covering import cover_pairs, few, keep
from tests.models.serving import GREEDY, PROMPTS, TinyModel, Tokens, make_stack, served
from tests.support.engines import runner_of

SKIPPING = "decode_only"
BACKENDS = ("torch", "torch_reference")

_ALTERNATING = ["sliding_attention", "full_attention"]
# Each family with the number of its last layers that share a cache.
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any], int]] = {
    "gemma3n": ("gemma3n_text", {}, 2),
    "gemma3n, most layers share": ("gemma3n_text", {"num_kv_shared_layers": 4}, 4),
    "gemma3n, one layer shares": ("gemma3n_text", {"num_kv_shared_layers": 1}, 1),
    "gemma3n, two streams": ("gemma3n_text", {"altup_num_inputs": 2}, 2),
    "gemma3n, windows share last": ("gemma3n_text", {"layer_types": _ALTERNATING[::-1] * 3}, 2),
    "gemma4": ("gemma4_text", {}, 2),
    "gemma4, most layers share": ("gemma4_text", {"num_kv_shared_layers": 4, "use_double_wide_mlp": True}, 4),
    "gemma4, experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        2,
    ),
}
MAIN = ("gemma3n", "gemma4")
SHARING = (*MAIN, "gemma3n, most layers share", "gemma3n, windows share last", "gemma4, experts")
"""Those that usual runs compare with ``generate``; the others have other numbers of layers and streams."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    folder = tmp_path_factory.mktemp("models")

    @cache
    def make(variant: str) -> TinyModel:
        family, overrides, _ = VARIANTS[variant]
        return TinyModel.save(folder / variant, family, **overrides)

    return make


@pytest.fixture(scope="module")
def references(models: Callable[[str], TinyModel]) -> Callable[[str], Tokens]:
    return cache(lambda variant: [models(variant).reference(prompt) for prompt in PROMPTS])


# --- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "skipping"),
    [
        *few(3, keep(((variant, SKIPPING) for variant in VARIANTS), *SHARING)),
        *(pytest.param(variant, None, marks=[] if variant in MAIN else pytest.mark.whole) for variant in VARIANTS),
    ],
)
def test_tokens_equal_those_of_generate(models: Any, references: Any, variant: str, skipping: str | None) -> None:
    expected = references(variant)
    with models(variant).engine(
        prefill_skipping=skipping, block_size=5, max_num_batched_tokens=24, max_num_seqs=4, self_check=True
    ) as engine:
        assert expected == served(engine)
        assert (0 if skipping is None else VARIANTS[variant][2]) == len(runner_of(engine)._layers.skipped)


# With 7 tokens a step, the prompt of 64 takes steps in which no request generates; with 24, there are steps in which
# one request decodes, one ends its prompt and one is in the middle of it.
SETTINGS = [
    {"block_size": 1, "max_num_batched_tokens": 24, "max_num_seqs": 3, "prefix_caching": True},
    {"block_size": 4, "max_num_batched_tokens": 7, "max_num_seqs": 8, "prefix_caching": True},
    {"block_size": 5, "max_num_batched_tokens": 24, "max_num_seqs": 8, "prefix_caching": False},
    {"block_size": 16, "max_num_batched_tokens": 2048, "max_num_seqs": 8, "prefix_caching": True},
    {"block_size": 17, "max_num_batched_tokens": 7, "max_num_seqs": 1, "prefix_caching": False},
]


@pytest.mark.parametrize(
    ("variant", "backend", "settings", "hybrid"), few(2, cover_pairs(MAIN, BACKENDS, SETTINGS, (True, False)))
)
def test_tokens_are_the_same_whatever_the_settings(
    models: Any, references: Any, variant: str, backend: str, settings: dict[str, Any], hybrid: bool
) -> None:
    expected = references(variant)
    with models(variant).engine(prefill_skipping=SKIPPING, backend=backend, hybrid=hybrid, **settings) as engine:
        assert expected == served(engine)
        assert settings["prefix_caching"] == (engine.stats().cached_prompt_tokens > 0)
        assert (2 if hybrid else 1) == len(engine.plan.groups)


@pytest.mark.parametrize(("variant", "backend", "prefix_caching"), few(2, cover_pairs(MAIN, BACKENDS, (True, False))))
def test_preempted_requests_give_the_same_tokens(
    models: Any, references: Any, variant: str, backend: str, prefix_caching: bool
) -> None:
    expected = references(variant)
    options = {"max_model_len": 96, "max_num_batched_tokens": 12, "block_size": 5}
    memory = models(variant).tight_memory(75, **options)
    with models(variant).engine(
        prefill_skipping=SKIPPING,
        backend=backend,
        memory=memory,
        prefix_caching=prefix_caching,
        max_num_seqs=8,
        **options,
    ) as engine:
        assert expected == served(engine)
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("variant", MAIN)
def test_a_prompts_log_probabilities_are_the_same(models: Any, variant: str) -> None:
    """A request with prompt log-probabilities computes all its rows; others in its steps do not."""
    params = [SamplingParams(max_new_tokens=5, prompt_logprobs=index % 3 == 0) for index in range(len(PROMPTS))]
    outputs = []
    for skipping in (None, SKIPPING):
        with models(variant).engine(prefill_skipping=skipping, max_num_batched_tokens=24) as engine:
            outputs.append(engine.generate(PROMPTS, params))
    for plain, skipped in zip(*outputs, strict=True):
        assert plain.token_ids == skipped.token_ids
        assert (plain.prompt_logprobs is None) == (skipped.prompt_logprobs is None)
        if plain.prompt_logprobs is not None:
            assert pytest.approx(plain.prompt_logprobs[1:], abs=1e-4) == skipped.prompt_logprobs[1:]


def test_the_text_part_of_a_composite_model_skips(tmp_path: Path) -> None:
    special = ("image", "boi", "eoi", "audio", "boa", "eoa", "video")
    ids = {f"{name}_token_id": 127 - index for index, name in enumerate(special)}
    text = tiny_config("gemma4_text", pad_token_id=120).to_dict()
    config = AutoConfig.for_model("gemma4", text_config=text, vision_config=None, audio_config=None, **ids)
    torch.manual_seed(0)
    with quiet():
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    registry = load_plugins().registry
    model = TinyModel(
        tmp_path, find_adapter(tmp_path, registry).load(tmp_path, device="cpu", dtype="float32"), registry
    )
    prompts = [[token % 100 for token in prompt] for prompt in PROMPTS]
    expected = [model.reference(prompt) for prompt in prompts]
    with model.engine(prefill_skipping=SKIPPING, max_num_batched_tokens=24, self_check=True) as engine:
        assert ("model.language_model.layers.4.self_attn", "model.language_model.layers.5.self_attn") == (
            runner_of(engine)._layers.skipped
        )
        assert expected == [output.token_ids for output in engine.generate(prompts, GREEDY)]


# --- fewer rows -------------------------------------------------------------------------------------------------------


@contextmanager
def counting(model: TinyModel) -> Iterator[dict[str, int]]:
    """Count the rows that each linear map of the model's blocks computes, by its path."""
    loaded: Any = model.loaded
    rows: dict[str, int] = {}

    def count(path: str) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            rows[path] = rows.get(path, 0) + output.shape[-2]

        return hook

    handles = [
        module.register_forward_hook(count(path))
        for path, module in loaded.model.named_modules()
        if ".layers." in path and path.endswith("_proj")
    ]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def prompt_and_one(engine: Engine, prompt: list[int]) -> None:
    engine.generate([prompt], SamplingParams(max_new_tokens=1))


@pytest.mark.parametrize("variant", few(3, VARIANTS))
def test_sharing_layers_compute_only_a_prompts_last_token(models: Any, variant: str) -> None:
    model, num_skipped = models(variant), VARIANTS[variant][2]
    with (
        model.engine(prefill_skipping=SKIPPING, prefix_caching=False) as engine,
        counting(model) as rows,
    ):
        prompt_and_one(engine, PROMPTS[3])
    for path, count in rows.items():
        block = int(path.split(".layers.")[1].split(".")[0])
        assert (64 if block < 6 - num_skipped else 1) == count, path
    assert {f"model.layers.{block}.self_attn.q_proj" for block in range(6)} <= set(rows)


@pytest.mark.parametrize("variant", few(3, VARIANTS))
def test_sharing_layers_never_project_keys_or_values(models: Any, references: Any, variant: str) -> None:
    model, num_skipped = models(variant), VARIANTS[variant][2]
    with model.engine(prefill_skipping=SKIPPING) as engine, counting(model) as rows:
        served(engine)
    projecting = {path.split(".")[2] for path in rows if path.endswith(("k_proj", "v_proj"))}
    assert {str(block) for block in range(6 - num_skipped)} == projecting


def test_a_step_without_generating_tokens_computes_one_row(models: Any) -> None:
    model = models("gemma3n")
    with (
        model.engine(prefill_skipping=SKIPPING, prefix_caching=False, max_num_batched_tokens=10) as engine,
        counting(model) as rows,
    ):
        prompt_and_one(engine, PROMPTS[3])
        assert 7 == engine.stats().steps
    assert 64 == rows["model.layers.3.self_attn.q_proj"]
    # One unused row in each of the first six steps, and the prompt's last token.
    assert 7 == rows["model.layers.4.self_attn.q_proj"]


def test_a_step_of_decodes_computes_all_its_rows(models: Any) -> None:
    model = models("gemma3n")
    with model.engine(prefill_skipping=SKIPPING, prefix_caching=False) as engine:
        for index in (1, 2):
            engine.add_request(PROMPTS[index], GREEDY, str(index))
        engine.step()
        with counting(model) as rows:
            engine.step()
        assert {2} == set(rows.values())


def test_a_prompt_that_wants_log_probabilities_alone_computes_all_its_rows(models: Any) -> None:
    model = models("gemma3n")
    params = [SamplingParams(max_new_tokens=1, prompt_logprobs=wants) for wants in (True, False, False)]
    with (
        model.engine(prefill_skipping=SKIPPING, prefix_caching=False) as engine,
        counting(model) as rows,
    ):
        engine.generate([PROMPTS[1], PROMPTS[2], PROMPTS[3]], params)
    assert 9 + 17 + 64 == rows["model.layers.3.self_attn.q_proj"]
    assert 9 + 1 + 1 == rows["model.layers.4.self_attn.q_proj"]


def test_a_policy_leaves_skipping_off(models: Any) -> None:
    model = models("gemma3n")
    stack = make_stack(prefill_skipping=SKIPPING, prefix_caching=False)

    def in_long_steps(batch: StepBatch) -> bool:
        return int(batch.query_lens.sum()) > 20

    with (
        Engine(
            model.loaded,
            Setup.of(model.loaded.description, stack, model.registry, dtype="float32"),
            skip_policy=in_long_steps,
        ) as engine,
        counting(model) as rows,
    ):
        prompt_and_one(engine, PROMPTS[3])
        assert 1 == rows["model.layers.5.self_attn.q_proj"]
        prompt_and_one(engine, PROMPTS[2])
        assert 1 + 17 == rows["model.layers.5.self_attn.q_proj"]


# --- the checks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", MAIN)
def test_closing_leaves_the_model_bit_for_bit_as_it_was(models: Any, variant: str) -> None:
    loaded: Any = models(variant).loaded
    tokens = torch.tensor([PROMPTS[3]])

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return loaded.model(tokens).logits

    before = logits()
    with models(variant).engine(prefill_skipping=SKIPPING, self_check=True) as engine:
        served(engine)
    assert torch.equal(before, logits())
    assert [] == [m for m in loaded.model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_a_model_whose_last_layers_look_at_other_tokens_is_refused_by_the_self_check(tmp_path: Path) -> None:
    model = TinyModel.save(tmp_path, "gemma3n_text")
    loaded: Any = model.loaded

    num_rows: list[int] = []

    def count(module: Any, args: Any, output: torch.Tensor) -> None:
        num_rows.append(output.shape[1])

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return -output if output.shape[1] < num_rows[-1] else output

    loaded.model.model.layers[0].mlp.register_forward_hook(count)
    loaded.model.model.layers[5].mlp.register_forward_hook(hook)
    with model.engine(self_check=True):
        pass
    with pytest.raises(ModelError, match=r"from 'model.layers.4.self_attn' on compute only the last tokens"):
        model.engine(self_check=True, prefill_skipping=SKIPPING)


def test_a_model_that_cannot_leave_rows_out_is_refused(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models("gemma3n")
    monkeypatch.setattr(type(model.loaded), "can_skip", lambda self, layers: False)
    with pytest.raises(StackError, match="cannot leave rows out of its forward"):
        model.engine(prefill_skipping=SKIPPING)


def test_a_model_without_sharing_layers_skips_nothing(tmp_path: Path) -> None:
    model = TinyModel.save(tmp_path, "llama")
    expected = [model.reference(prompt) for prompt in PROMPTS]
    with model.engine(prefill_skipping=SKIPPING) as engine:
        assert () == runner_of(engine)._layers.skipped
        assert expected == served(engine)


@pytest.mark.parametrize("max_model_len", [8, 20])
def test_the_self_check_keeps_to_the_longest_request(models: Any, max_model_len: int) -> None:
    with models("gemma3n").engine(self_check=True, prefill_skipping=SKIPPING, max_model_len=max_model_len) as engine:
        assert 1 == len(engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=2)))
