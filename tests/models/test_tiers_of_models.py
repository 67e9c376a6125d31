"""Prefill and decode apart, and small pools with host memory: real models get the tokens of ``generate()``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import pytest
from kvframe_transformers.testing import ENCODER_DECODER_FAMILIES, FAMILIES, MORE_STATE_FAMILIES, STATE_FAMILIES

from kvframe import Engine, SamplingParams, load_plugins
from tests.covering import few
from tests.models import by_content
from tests.models.encoder_decoder import generated, prompts
from tests.models.serving import GREEDY, PROMPTS, TinyModel, Tokens, held_pages, served
from tests.support.stores import SHELVES, Shelf, shelf_plugin

ALL = [*FAMILIES, *STATE_FAMILIES, *MORE_STATE_FAMILIES]
JUST_PROMPT = SamplingParams(max_new_tokens=1)
STORE: dict[str, Any] = {"block_size": 4, "stores": ["shelf"]}


@pytest.fixture(autouse=True)
def shelf() -> Shelf:
    SHELVES.clear()
    return SHELVES.setdefault("one", Shelf())


@pytest.fixture(scope="module")
def models_by_content(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Make models that choose their past by content, each once."""
    return cache(lambda family: by_content.save(tmp_path_factory.mktemp(family) / family, family))


def with_shelf(model: TinyModel) -> TinyModel:
    return attrs.evolve(model, registry=load_plugins(plugins=[shelf_plugin()]).registry)


def prefill(engine: Engine, prompts: list[Any]) -> None:
    engine.generate(prompts, JUST_PROMPT)
    assert engine.flush_page_stores()


@pytest.mark.parametrize("family", few(7, ALL))
def test_one_engine_computes_prompts_and_another_generates(
    models: Callable[[str], TinyModel], references: Callable[[str], Tokens], family: str
) -> None:
    tokens = references(family)
    check_apart(with_shelf(models(family)), tokens)


@pytest.mark.parametrize("family", few(4, by_content.FAMILIES))
def test_entries_beside_keys_travel_too(models_by_content: Callable[[str], TinyModel], family: str) -> None:
    tokens = [models_by_content(family).reference(prompt) for prompt in PROMPTS]
    check_apart(with_shelf(models_by_content(family)), tokens)


def check_apart(model: TinyModel, tokens: Tokens) -> None:
    with model.engine(**STORE) as first:
        prefill(first, list(PROMPTS))
    with model.engine(**STORE, audit=True) as second:
        assert tokens == served(second)
        if second.plan.groups and any(len(prompt) > second.plan.alignment for prompt in PROMPTS):
            assert second.stats().restored_tokens > 0


@pytest.mark.parametrize("family", few(3, ENCODER_DECODER_FAMILIES))
def test_an_encoder_runs_once_for_all_engines(models: Callable[[str], TinyModel], family: str) -> None:
    tokens = [generated(models(family), family, prompt, 8) for prompt in prompts(family)]
    model = with_shelf(models(family))
    with model.engine(**STORE) as first:
        prefill(first, prompts(family))
        assert first.stats().computed_input_tokens > 0
    with model.engine(**STORE, audit=True) as second:
        outputs = second.generate(prompts(family), attrs.evolve(JUST_PROMPT, max_new_tokens=8))
        assert tokens == [output.token_ids for output in outputs]
        assert 0 == second.stats().computed_input_tokens
        assert 0 == held_pages(second)


@pytest.mark.parametrize("family", few(7, ALL))
def test_a_small_pool_with_host_memory_gives_the_same_tokens(
    models: Callable[[str], TinyModel], references: Callable[[str], Tokens], family: str
) -> None:
    tokens, model = references(family), models(family)
    limits: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 12, "block_size": 4}
    memory = model.tight_memory(75, **limits)
    with model.engine(memory=memory, host_memory="4MiB", audit=True, **limits) as engine:
        assert tokens == served(engine)
        assert tokens == served(engine)
        outputs = engine.generate([PROMPTS[5]], GREEDY)
        assert tokens[5] == outputs[0].token_ids
