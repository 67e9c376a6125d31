"""Models that choose their past by content: the tokens of ``generate()``, with all schedules; a wrong choice shows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from kvframe_transformers.indexers import IndexDriver

from kvframe import KVCachePlan, Setup, Stack, load_plugins
from kvframe.contract import ChosenTokens, EntryStep
from kvframe.contract.errors import BackendError, ModelError, StackError
from tests.covering import cover_values, few
from tests.models.by_content import FAMILIES, save
from tests.models.serving import GREEDY, PROMPTS, TinyModel, Tokens, held_pages, served

Expected = Callable[[str], Tokens]
NGRAM = {"name": "ngram", "max_drafts": 3, "min_match": 1, "shared_tokens": 1000}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    torch.set_num_threads(1)
    return cache(lambda family: save(tmp_path_factory.mktemp(family) / family, family))


@pytest.fixture(scope="module")
def expected(models: Callable[[str], TinyModel]) -> Expected:
    return cache(lambda family: [models(family).reference(prompt) for prompt in PROMPTS])


@pytest.mark.parametrize(
    ("family", "block_size", "chunk", "max_num_seqs", "prefix_caching"),
    few(6, cover_values(FAMILIES, [(1, 7, 3), (16, 24, 8), (12, 2048, 8), (4, 1, 2)], (True, False))),
)
def test_tokens_equal_those_of_generate(
    models: Callable[[str], TinyModel],
    expected: Expected,
    family: str,
    block_size: int,
    chunk: int,
    max_num_seqs: int,
    prefix_caching: bool,
) -> None:
    tokens = expected(family)
    options: dict[str, Any] = {"block_size": block_size, "max_num_batched_tokens": chunk, "max_num_seqs": max_num_seqs}
    with models(family).engine(prefix_caching=prefix_caching, **options) as engine:
        assert tokens == served(engine)
        assert tokens == served(engine)
        assert prefix_caching == (engine.stats().cached_prompt_tokens > 0)


@pytest.mark.parametrize(("family", "host_memory"), few(3, cover_values(FAMILIES, [None, "2MiB"])))
def test_preempted_requests_give_the_same_tokens(
    models: Callable[[str], TinyModel], expected: Expected, family: str, host_memory: str | None
) -> None:
    tokens = expected(family)
    options: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 12, "block_size": 8, "max_num_seqs": 8}
    memory = models(family).tight_memory(75, **options)
    with models(family).engine(memory=memory, host_memory=host_memory, **options) as engine:
        assert tokens == served(engine)
        assert 0 < engine.stats().preemptions


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_rejected_drafts_change_no_token(models: Callable[[str], TinyModel], expected: Expected, family: str) -> None:
    tokens = expected(family)
    with models(family).engine(block_size=4, drafts=NGRAM) as engine:
        assert tokens == served(engine)
        assert tokens == served(engine)
        stats = engine.stats()
        assert stats.accepted_draft_tokens < stats.draft_tokens


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_saved_prefixes_are_found_again(
    models: Callable[[str], TinyModel], expected: Expected, family: str, tmp_path: Path
) -> None:
    tokens, path = expected(family), tmp_path / "prefixes"
    with models(family).engine(block_size=4) as engine:
        (saved,) = engine.save_prefixes(path, [PROMPTS[5]])
        assert 0 < saved.num_tokens
    with models(family).engine(block_size=4) as engine:
        (loaded,) = engine.load_prefixes(path)
        assert (saved.num_tokens, True) == (loaded.num_tokens, loaded.is_cached)
        assert tokens == served(engine)
        assert saved.num_tokens <= engine.stats().cached_prompt_tokens


INDEXED = [family for family in FAMILIES if family != "deepseek_v4"]


@pytest.mark.parametrize("family", few(2, INDEXED))
def test_a_choice_that_lacks_one_token_changes_tokens(
    models: Callable[[str], TinyModel], expected: Expected, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, choose = expected(family), IndexDriver.choose

    def lacking(driver: IndexDriver, *arguments: Any) -> ChosenTokens:
        chosen_tokens = choose(driver, *arguments)
        return attrs.evolve(chosen_tokens, indices=chosen_tokens.indices[..., 1:])

    monkeypatch.setattr(IndexDriver, "choose", lacking)
    with models(family).engine(block_size=4) as engine:
        assert tokens != served(engine)


@pytest.mark.parametrize("family", few(2, INDEXED))
def test_a_choice_by_the_keys_of_one_token_before_changes_tokens(
    models: Callable[[str], TinyModel], expected: Expected, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, read = expected(family), EntryStep.read_together

    def stale(step: EntryStep, *arguments: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.roll(1, 1) for name, tensor in read(step, *arguments).items()}

    monkeypatch.setattr(EntryStep, "read_together", stale)
    with models(family).engine(block_size=4) as engine:
        assert tokens != served(engine)


@pytest.mark.parametrize("finished", [True, False])
def test_entries_of_other_tokens_change_tokens(
    models: Callable[[str], TinyModel], expected: Expected, finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, read = expected("deepseek_v4"), EntryStep.read

    def wrong(step: EntryStep, *arguments: Any) -> dict[str, torch.Tensor]:
        entries = read(step, *arguments)
        if (step.tokens_per_entry > 1) == finished:
            entries = {name: tensor.flip(0) for name, tensor in entries.items()}
        return entries

    monkeypatch.setattr(EntryStep, "read", wrong)
    with models("deepseek_v4").engine(block_size=4) as engine:
        assert tokens != served(engine)


def test_the_self_check_refuses_a_wrong_choice(
    models: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = IndexDriver.choose

    def reversed_choice(driver: IndexDriver, *arguments: Any) -> ChosenTokens:
        return choose(driver, *arguments).rows(lambda rows: rows.flip(0))

    monkeypatch.setattr(IndexDriver, "choose", reversed_choice)
    with pytest.raises(ModelError, match="gives other logits in a packed batch than alone"):
        models("deepseek_v32").engine(self_check=True)


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_an_audited_engine_serves_the_same(models: Callable[[str], TinyModel], expected: Expected, family: str) -> None:
    tokens = expected(family)
    with models(family).engine(block_size=8, audit=True) as engine:
        assert tokens == served(engine)


def test_an_audited_choice_of_a_later_token_ends_its_request(
    models: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = IndexDriver.choose

    def later(driver: IndexDriver, *arguments: Any) -> ChosenTokens:
        return choose(driver, *arguments).rows(lambda rows: rows + 5)

    monkeypatch.setattr(IndexDriver, "choose", later)
    with models("deepseek_v32").engine(block_size=8, audit=True) as engine:
        with pytest.raises(BackendError, match=r"was called with a choice of the token \d+ for the query in row"):
            engine.generate([PROMPTS[2]], GREEDY)
        assert 0 == held_pages(engine)


def test_a_model_that_chooses_is_neither_compiled_nor_captured(models: Callable[[str], TinyModel]) -> None:
    refusal = "chooses tokens by content for each request of a step"
    with models("deepseek_v32").engine() as engine, pytest.raises(ModelError, match=refusal):
        engine.model.compile("eager")
    with pytest.raises(StackError, match=r"nothing can be captured of layer 'model\.layers\.0\.self_attn'"):
        models("deepseek_v32").engine(graphs=[4])


def test_the_index_keys_are_in_a_group_of_their_own_beside_the_latents(models: Callable[[str], TinyModel]) -> None:
    with models("deepseek_v32").engine(block_size=8) as engine:
        latents, keys = engine.plan.groups
        assert [f"{name}/index_keys" for name in latents.layers] == [*keys.layers]
        assert (4 * (16 + 8) * 8, 4 * 16 * 8) == (latents.page_bytes // 8, keys.page_bytes // 8)


def test_outside_of_steps_the_model_computes_as_transformers_made_it(models: Callable[[str], TinyModel]) -> None:
    tiny: Any = models("deepseek_v4")
    tokens = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        before = tiny.loaded.model(tokens).logits
        with tiny.engine() as engine:
            served(engine)
            torch.testing.assert_close(before, tiny.loaded.model(tokens).logits, rtol=0, atol=0)


def planned(path: Path, model_type: str) -> KVCachePlan:
    """Return the plan of a model of the published size, from its config alone."""
    config = transformers.AutoConfig.for_model(model_type)
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(path)
    tables = {"cache": {"memory": "64GiB"}, "model": {"dtype": "bfloat16", "device": "cuda"}}
    return Setup.read(path, Stack.from_mapping(tables), load_plugins().registry, runs_here=False).plan


def test_the_published_deepseek_v3_2_keeps_latents_and_index_keys_of_each_token(tmp_path: Path) -> None:
    plan = planned(tmp_path, "deepseek_v32")
    assert 61 * (512 + 64 + 128) * 2 == plan.bytes_per_token


@pytest.mark.whole  # discovering the layers of its size takes long
def test_the_published_deepseek_v4_keeps_few_bytes_of_an_old_token(tmp_path: Path) -> None:
    plan = planned(tmp_path, "deepseek_v4")
    groups = {(group.spec.kind, group.spec.tokens_per_entry, len(group.layers)): group for group in plan.groups}
    # 23 layers keep one key of 512 for 128 tokens; 20 layers keep one of 512, and one of 128 to choose by, for 4.
    assert 23 * 512 * 2 == groups["token_entries", 128, 23].page_bytes
    assert 20 * (512 + 128) * 2 * 4 == groups["token_entries", 4, 40].page_bytes
    assert {"sliding_window", "unfinished_group", "token_entries"} == {kind for kind, _, _ in groups}
    # The windows and unfinished groups of a long request take the same blocks at any length.
    bounded = [group for (kind, _, _), group in groups.items() if kind != "token_entries"]
    at_16k, at_64k = (plan.generating_blocks(length) for length in (16384, 65536))
    assert [at_16k[group.index] for group in bounded] == [at_64k[group.index] for group in bounded]
