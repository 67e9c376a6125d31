"""Requests whose layers keep a part of the prompt: the tokens of the dense definition, with all schedules."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_engine.contract import DraftRequest
from kvframe_ngram.proposer import NgramProposer

from kvframe import Engine, SamplingParams, load_plugins
from tests.covering import cover_values, keep
from tests.models.serving import GREEDY, NUM_NEW_TOKENS, PROMPTS, TinyModel, Tokens, held_pages, ids, served
from tests.support.engines import scheduler_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "by_content"
NGRAM = {"name": "ngram", "max_drafts": 3, "min_match": 1, "shared_tokens": 1000}
BUDGET, LAST = 12, 5


@pytest.fixture(scope="module")
def snap_kv() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import snap_kv
    finally:
        sys.path.remove(str(EXAMPLES))
    return snap_kv


def rules(budget: int = BUDGET) -> dict[str, Any]:
    """Return the rule by which full attention keeps a part of each prompt."""
    return {"full_attention": {"spec": {"kind": "snap_kv", "num_heads": 4, "budget": budget, "last": LAST}}}


@attrs.frozen
class Served:
    """A tiny model whose layers keep a part of each prompt, and the tokens of the definition."""

    model: TinyModel
    tokens: Tokens
    full: Tokens

    def engine(self, budget: int = BUDGET, **options: Any) -> Engine:
        return self.model.engine(**{"audit": True, "rules": rules(budget), **options})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, snap_kv: Any) -> Served:
    import compare

    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("budget") / "llama"
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16}
    tiny = TinyModel.save(path, "llama", initializer_range=0.3, **heads)
    tiny = attrs.evolve(tiny, registry=load_plugins(plugins=[snap_kv]).registry)
    full = [tiny.reference(prompt) for prompt in PROMPTS]
    spec = snap_kv.SnapKVSpec(block_size=8, num_kv_heads=2, head_size=16, num_heads=4, budget=BUDGET, last=LAST)
    inner: Any = tiny.loaded
    kind = inner.model.config._attn_implementation
    params = SamplingParams(max_new_tokens=NUM_NEW_TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "PARAMS", params)
        tokens = [tuple(compare.generate_densely(inner.model, spec, prompt, snap_kv.define)) for prompt in PROMPTS]
    inner.model.set_attn_implementation(kind)
    return Served(tiny, tokens, full)


def test_the_choice_changes_tokens(model: Served) -> None:
    equal = [tokens == full for tokens, full in zip(model.tokens, model.full, strict=True)]
    # The first two prompts are shorter than the budget.
    assert equal[:2] == [True, True]
    assert equal.count(False) >= 4


@pytest.mark.parametrize(
    "backend", keep(["torch_reference", "torch", "cpu", "numba", "flex"], "torch_reference", "cpu")
)
def test_any_backend_of_full_attention_serves_it(model: Served, backend: str) -> None:
    with model.engine(backend=backend, block_size=4) as engine:
        assert model.tokens == served(engine)


@pytest.mark.parametrize(
    ("block_size", "chunk", "max_num_seqs", "prefix_caching"),
    [(1, 7, 3, True), (16, 24, 8, True), (17, 2048, 8, True), (4, 1, 1, True), (8, 24, 8, False), (5, 3, 2, True)],
)
def test_tokens_equal_those_of_the_definition(
    model: Served, block_size: int, chunk: int, max_num_seqs: int, prefix_caching: bool
) -> None:
    options = {"block_size": block_size, "max_num_batched_tokens": chunk, "max_num_seqs": max_num_seqs}
    with model.engine(prefix_caching=prefix_caching, **options) as engine:
        assert model.tokens == served(engine)
        assert model.tokens == served(engine)
        assert prefix_caching == (engine.stats().cached_prompt_tokens > 0)


@pytest.mark.parametrize(("host_memory", "block_size"), cover_values([None, "2MiB"], [4, 8]))
def test_preempted_requests_give_the_same_tokens(model: Served, host_memory: str | None, block_size: int) -> None:
    options: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 12, "max_num_seqs": 8}
    options["block_size"] = block_size
    memory = model.model.tight_memory(75, rules=rules(), **options)
    with model.engine(memory=memory, host_memory=host_memory, **options) as engine:
        assert model.tokens == served(engine)
        assert 0 < engine.stats().preemptions


def test_a_request_that_is_preempted_after_each_token_chooses_the_same(model: Served) -> None:
    with model.engine(block_size=4) as engine:
        tokens: list[int] = []
        for output in engine.stream(PROMPTS[3], GREEDY):
            tokens += output.new_token_ids
            if output.finish_reason is None:
                scheduler_of(engine).preempt_last()
        assert model.tokens[3] == tuple(tokens)


def test_right_drafts_wait_for_the_choice(model: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, tokens = PROMPTS[2], model.tokens[2]
    sequence = [*prompt, *tokens]

    def propose(_: Any, requests: Sequence[DraftRequest]) -> list[Sequence[int]]:
        return [sequence[len(request.token_ids) :][: request.max_drafts] for request in requests]

    monkeypatch.setattr(NgramProposer, "propose", propose)
    with model.engine(block_size=4, drafts=NGRAM) as engine:
        # Of the prompt's 17 tokens, the second request finds all but the last one.
        for _ in range(2):
            assert tokens == engine.generate([prompt], GREEDY)[0].token_ids
        assert 0 < engine.stats().accepted_draft_tokens == engine.stats().draft_tokens


@pytest.mark.parametrize("chunk", [7, 2048])
def test_drafts_change_no_token(model: Served, chunk: int) -> None:
    with model.engine(block_size=4, drafts=NGRAM, max_num_batched_tokens=chunk) as engine:
        assert model.tokens == served(engine)
        assert model.tokens == served(engine)
        stats = engine.stats()
        assert stats.accepted_draft_tokens < stats.draft_tokens


def test_samples_of_one_prompt_choose_each_for_itself(model: Served) -> None:
    with model.engine(block_size=4) as engine:
        params = attrs.evolve(GREEDY, n=3)
        outputs = engine.generate(PROMPTS, params)
        assert [tokens for tokens in model.tokens for _ in range(3)] == [output.token_ids for output in outputs]
        assert 0 == held_pages(engine)


def test_a_prompt_gives_its_blocks_back_and_others_still_find_them(model: Served) -> None:
    with model.engine(block_size=4, max_num_seqs=1) as engine:
        num_pages = []
        for _ in engine.stream(PROMPTS[3], attrs.evolve(GREEDY, max_new_tokens=5)):
            num_pages.append(held_pages(engine))
        groups = len(engine.plan.groups)
        # 12 tokens in at most 4 blocks of the main state, 5 queries in at most 3, and the next token's blocks.
        assert num_pages[2] <= 4 + 3 + groups
        assert len(PROMPTS[3]) // 4 <= num_pages[0] + 3
        engine.generate([PROMPTS[3] + ids(9, 4)], GREEDY)
        assert engine.stats().cached_prompt_tokens == 64


def test_what_follows_a_choice_is_found_by_nobody(model: Served) -> None:
    prompt, more = PROMPTS[3], ids(9, 40)
    with model.engine(block_size=4) as engine:
        answer = list(engine.generate([prompt], attrs.evolve(GREEDY, max_new_tokens=20))[0].token_ids)
        before = engine.stats().cached_prompt_tokens
        first = engine.generate([prompt + answer + more], GREEDY)[0]
        assert engine.stats().cached_prompt_tokens - before <= len(prompt)
    with model.engine(block_size=4, prefix_caching=False) as engine:
        assert first.token_ids == engine.generate([prompt + answer + more], GREEDY)[0].token_ids


def test_saved_prefixes_are_found_again(model: Served, tmp_path: Path) -> None:
    with model.engine(block_size=4) as engine:
        (saved,) = engine.save_prefixes(tmp_path / "prefixes", [PROMPTS[5]])
        assert 0 < saved.num_tokens
    with model.engine(block_size=4) as engine:
        engine.load_prefixes(tmp_path / "prefixes")
        assert model.tokens == served(engine)
        assert saved.num_tokens <= engine.stats().cached_prompt_tokens


@pytest.mark.parametrize(
    ("choose", "sentence"),
    [
        (lambda good: good[:, 1:], r"must return \[2, 12\] of torch.int64"),
        (lambda good: good.float(), r"must return \[2, 12\] of torch.int64"),
        (lambda good: torch.zeros_like(good), "each once for a head"),
        (lambda good: good + 1, r"must return positions in \[0,"),
        (lambda good: good - 1000, r"must return positions in \[0,"),
        (lambda good: None, "not None"),
        (lambda good: 1 / 0, "division by zero"),
    ],
)
def test_a_wrong_choice_ends_its_request_only(
    model: Served, snap_kv: Any, monkeypatch: pytest.MonkeyPatch, choose: Callable[[Any], Any], sentence: str
) -> None:
    right = snap_kv.SnapKVSpec.choose_kept

    def wrong(spec: Any, layer: Any, num_kept: int, state: Mapping[str, torch.Tensor], entries: Any) -> Any:
        good = right(spec, layer, num_kept, state, entries).sort().values
        return choose(good) if len(state["k"]) == 64 else good

    monkeypatch.setattr(snap_kv.SnapKVSpec, "choose_kept", wrong)
    with model.engine(block_size=4) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        assert outputs[3].finish_reason == "error"
        assert outputs[3].error is not None
        assert re.search(sentence, outputs[3].error)
        others = [index for index in range(len(PROMPTS)) if index != 3]
        assert [outputs[index].token_ids for index in others] == [model.tokens[index] for index in others]
        assert 0 == held_pages(engine)


def test_a_budget_that_no_prompt_exceeds_is_full_attention(model: Served) -> None:
    with model.engine(budget=100, block_size=4) as engine:
        assert model.full == served(engine)
