"""Greedy tokens through the paged cache equal those of ``transformers.generate()``, with all settings."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
from kvframe_engine.requests.request import SamplingParams
from kvframe_transformers.testing import FAMILIES, MORE_FAMILIES

from kvframe.builtin.torch_reference import TorchReferenceBackend
from tests.covering import cover_pairs, cover_values, few, keep
from tests.models.serving import PROMPTS, ids, served
from tests.support.commands import run_json
from tests.support.engines import storage_of

# --- equal to generate() ----------------------------------------------------------------------------------------------


BLOCK_SIZES, CHUNKS, BATCHES = (1, 16, 17), (7, 24, 2048), (1, 3, 8)


@pytest.mark.parametrize(
    ("family", "block_size", "max_num_batched_tokens", "max_num_seqs", "prefix_caching"),
    few(6, cover_pairs(FAMILIES, BLOCK_SIZES, CHUNKS, BATCHES, (True, False))),
)
def test_tokens_equal_those_of_generate(
    models: Any,
    references: Any,
    family: str,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    prefix_caching: bool,
) -> None:
    expected = references(family)
    with models(family).engine(
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching,
    ) as engine:
        assert expected == served(engine)
        assert prefix_caching == (engine.stats().cached_prompt_tokens > 0)


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_tokens_are_the_same_if_every_layer_keeps_every_token(models: Any, references: Any, family: str) -> None:
    expected = references(family)
    with models(family).engine(hybrid=False, max_num_batched_tokens=24, max_num_seqs=4) as engine:
        assert expected == served(engine)
        assert 1 == len(engine.plan.groups)


@pytest.mark.parametrize(
    ("family", "prefix_caching", "block_size"), few(3, cover_values(FAMILIES, product((True, False), (4, 5))))
)
def test_preempted_requests_give_the_same_tokens(
    models: Any, references: Any, family: str, prefix_caching: bool, block_size: int
) -> None:
    expected = references(family)
    options = {"max_model_len": 96, "max_num_batched_tokens": 12, "block_size": block_size}
    memory = models(family).tight_memory(75, **options)
    with models(family).engine(memory=memory, prefix_caching=prefix_caching, max_num_seqs=8, **options) as engine:
        assert expected == served(engine)
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("family", keep(FAMILIES, "llama", "gemma3_text"))
def test_prompts_that_wait_for_enough_free_blocks_give_the_same_tokens(
    models: Any, references: Any, family: str
) -> None:
    expected = references(family)
    options = {"max_model_len": 96, "max_num_batched_tokens": 12, "block_size": 5}
    memory = models(family).tight_memory(75, **options)
    num_preemptions = []
    for reserve_prompts in (True, False):
        with models(family).engine(
            memory=memory, prefix_caching=False, max_num_seqs=8, reserve_prompts=reserve_prompts, **options
        ) as engine:
            assert expected == served(engine)
            num_preemptions.append(engine.stats().preemptions)
    assert num_preemptions[0] <= num_preemptions[1] > 0


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_a_second_round_finds_the_prompts_of_the_first(models: Any, references: Any, family: str) -> None:
    expected = references(family)
    with models(family).engine(block_size=4) as engine:
        served(engine)
        before = engine.stats()
        assert expected == served(engine)
        # All full blocks of each prompt, except the one with the last token.
        hits = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
        assert hits == engine.stats().cached_prompt_tokens - before.cached_prompt_tokens


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_the_reference_backend_gives_the_same_tokens(models: Any, references: Any, family: str) -> None:
    expected = references(family)
    with models(family).engine(block_size=5, max_num_batched_tokens=24, backend="torch_reference") as engine:
        assert expected == served(engine)


@pytest.mark.parametrize("family", few(4, MORE_FAMILIES))
def test_families_that_no_code_names_give_the_tokens_of_generate(models: Any, references: Any, family: str) -> None:
    expected = references(family)
    with models(family).engine(block_size=5, max_num_batched_tokens=24, max_num_seqs=4, self_check=True) as engine:
        assert expected == served(engine)


@pytest.mark.parametrize("family", few(1, FAMILIES))
def test_a_slightly_wrong_attention_would_show(
    models: Any, references: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = references(family)
    attend = TorchReferenceBackend.attend

    @functools.wraps(attend)
    def scaled(self: Any, layer: Any, query: Any, *rest: Any, **options: Any) -> Any:
        return attend(self, layer, query * 1.05, *rest, **options)

    monkeypatch.setattr(TorchReferenceBackend, "attend", scaled)
    with models(family).engine(backend="torch_reference") as engine:
        assert expected != served(engine)


# --- a plan is what a run allocates -----------------------------------------------------------------------------------

OPTIONS = (
    ({}, []),
    ({"block_size": 1}, ["--block-size", "1"]),
    ({"block_size": 17}, ["--block-size", "17"]),
    ({"hybrid": False}, ["--no-hybrid"]),
    ({"max_model_len": 100}, ["--max-model-len", "100"]),
    ({"memory": 1_234_567}, ["--cache-memory", "1234567"]),
)


@pytest.mark.parametrize(
    ("family", "options", "arguments"),
    [*cover_values(FAMILIES, OPTIONS), *keep((family, *OPTIONS[0]) for family in MORE_FAMILIES)],
)
def test_plan_states_the_allocation_of_a_run_to_the_byte(
    models: Any, family: str, options: dict[str, Any], arguments: list[str]
) -> None:
    model = models(family)
    command = ["plan", str(model.path), "--dtype", "float32", "--cache-memory", "4MiB", *arguments, "--json"]
    planned = run_json(*command)
    with model.engine(**options) as engine:
        assert planned["total_bytes"] == engine.stats().cache_bytes
        assert planned["total_bytes"] == storage_of(engine).pool.untyped_storage().nbytes()
        for group, entry in zip(engine.plan.groups, planned["groups"], strict=True):
            tensors = [tensor for layer in group.layers for tensor in storage_of(engine).views[layer].values()]
            assert entry["page_bytes"] == sum(tensor[0].numel() * tensor.itemsize for tensor in tensors)
            assert {storage_of(engine).pool.data_ptr()} == {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_a_request_longer_than_half_the_model_is_served(models: Any) -> None:
    model, prompt = models("gemma3_text"), ids(9, 300)
    expected = model.reference(prompt, 40)
    with model.engine(block_size=16, max_num_batched_tokens=64) as engine:
        (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=40))
        assert expected == output.token_ids
        # The window of 8 holds 2 blocks at a time, or those of a chunk of 64; all tokens would need 22.
        windowed = next(group for group in engine.plan.groups if group.spec.kind != "full_attention")
        assert engine.stats().peak_blocks_held[windowed.index] <= 6
