"""Models with recurrent and convolution state: the tokens are those of generate(), with all schedules and caches."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_transformers.testing import MORE_STATE_FAMILIES, STATE_FAMILIES

from kvframe import Engine, Prompt, SamplingParams, Stack
from kvframe.cache.stats import FoundPrefix
from kvframe.contract.errors import ModelError
from kvframe.contract.state import StateRound, StateRun
from tests.covering import cover_values, few
from tests.models.serving import GREEDY, PROMPTS, TinyModel, ids, served
from tests.support.engines import manager_of, scheduler_of, storage_of

ALL = pytest.mark.parametrize("family", few(4, STATE_FAMILIES))
HYBRID_FAMILIES = [family for family in STATE_FAMILIES if family not in ("mamba", "mamba2")]
HYBRIDS = pytest.mark.parametrize("family", few(3, HYBRID_FAMILIES))
CACHES = [("none", False), ("aligned", True), ("all", True)]


SETTINGS = [
    (1, 3, "aligned"),
    (7, 4, "all"),
    (7, 5, "aligned"),
    (16, 5, "none"),
    (64, 4, "aligned"),
    (64, 16, "all"),
    (512, 1, "all"),
]


@pytest.mark.parametrize(
    ("family", "max_num_batched_tokens", "block_size", "checkpoints"), few(4, cover_values(STATE_FAMILIES, SETTINGS))
)
def test_any_chunk_and_block_size_gives_the_tokens_of_generate(
    models: Any, references: Any, family: str, max_num_batched_tokens: int, block_size: int, checkpoints: str
) -> None:
    expected = references(family)
    options = {"max_num_batched_tokens": max_num_batched_tokens, "block_size": block_size}
    with models(family).engine(states={"checkpoints": checkpoints}, **options) as engine:
        assert expected == served(engine)
        assert expected == served(engine)  # hits the blocks of the first round, which are right


@pytest.mark.parametrize("family", few(3, MORE_STATE_FAMILIES))
def test_families_that_no_code_names_give_the_tokens_of_generate(models: Any, references: Any, family: str) -> None:
    expected = references(family)
    with models(family).engine(block_size=5, max_num_batched_tokens=24, max_num_seqs=4, self_check=True) as engine:
        assert expected == served(engine)


@pytest.mark.parametrize(
    ("family", "checkpoints", "prefix_caching", "host_memory"),
    few(
        3,
        cover_values(HYBRID_FAMILIES, [(*cache_options, host) for cache_options in CACHES for host in (None, "4MiB")]),
    ),
)
def test_preempted_requests_give_the_same_tokens(
    models: Any, references: Any, family: str, checkpoints: str, prefix_caching: bool, host_memory: str | None
) -> None:
    expected = references(family)
    options: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 12, "block_size": 4}
    options["states"] = {"checkpoints": checkpoints}
    memory = models(family).tight_memory(75, **options)
    if checkpoints == "none":
        memory = memory * 5 // 4  # the least memory has states for one request only, so nothing would be preempted
    options |= {"host_memory": host_memory, "prefix_caching": prefix_caching, "max_num_seqs": 8, "memory": memory}
    with models(family).engine(**options) as engine:
        assert expected == served(engine)
        assert engine.stats().preemptions > 0


@ALL
def test_the_self_check_accepts_it_and_the_model_comes_back_as_it_was(
    models: Any, references: Any, family: str
) -> None:
    model = models(family)
    expected = references(family)

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return model.loaded.model(torch.tensor([PROMPTS[3]])).logits

    before, forwards = logits(), {module: module.__dict__.get("forward") for module in model.loaded.model.modules()}
    with model.engine(self_check=True) as engine:
        assert expected == served(engine)
    assert torch.equal(before, logits())
    assert forwards == {module: module.__dict__.get("forward") for module in model.loaded.model.modules()}


@ALL
def test_a_state_that_is_not_read_would_show(
    models: Any, references: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = references(family)
    monkeypatch.setattr(StateRun, "read", lambda self, pages: None)
    with models(family).engine(max_num_batched_tokens=16) as engine:
        assert expected != served(engine)
    monkeypatch.undo()
    read = StateRound.read
    monkeypatch.setattr(
        StateRound, "read", lambda self, pages: {name: state * 0 for name, state in read(self, pages).items()}
    )
    with models(family).engine() as engine:
        assert expected != served(engine)


@ALL
def test_a_bfloat16_model_passes_the_self_check_and_keeps_the_scans_state_in_float32(models: Any, family: str) -> None:
    stack = Stack.from_mapping({"cache": {"memory": "4MiB"}, "model": {"dtype": "bfloat16"}})
    with Engine.from_pretrained(models(family).path, stack=stack) as engine:
        (output,) = engine.generate([PROMPTS[3]], GREEDY)
        assert "length" == output.finish_reason
        dtypes = {
            (name, tensor.dtype)
            for group in engine.plan.groups
            if group.spec.kind == "mamba"
            for layer in group.layers
            for name, tensor in storage_of(engine).views[layer].items()
        }
    assert {("conv_0", torch.bfloat16)} | ({("recurrent_0", torch.float32)} if family != "lfm2" else set()) == dtypes


def test_a_model_without_positions_is_served_at_its_length_of_a_million_tokens(tmp_path: Path) -> None:
    model = TinyModel.save(tmp_path, "mamba2", max_position_embeddings=None)
    expected = [model.reference(prompt) for prompt in PROMPTS]
    with model.engine(self_check=True) as engine:
        assert 1_048_576 == engine.plan.max_model_len
        assert expected == served(engine)


@pytest.mark.parametrize(
    "states", [{"conv_shapes": [[5, 4]]}, {"conv_dtypes": ["float16"]}, {"model_dtype": "bfloat16"}]
)
def test_a_rule_that_gives_a_state_another_form_is_named(models: Any, states: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"'model.layers.0.mamba' .* keeps conv_0 .* or a rule of the stack"):
        models("bamba").engine(states=states)


def test_a_mixer_computes_as_before_outside_of_a_step(models: Any) -> None:
    model = models("mamba2")
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = model.loaded.model(tokens).logits
        with model.engine() as engine:
            engine.add_request([4, 5, 6], SamplingParams(max_new_tokens=4))
            engine.step()
            assert torch.equal(expected, model.loaded.model(tokens).logits)


# --- prefixes ---------------------------------------------------------------------------------------------------------

SHARED = ids(3, 1000)
LONG = [[*SHARED, *ids(10 + index, 40)] for index in range(4)]


@pytest.fixture(scope="module")
def long_models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a family to a model for long prompts, and the tokens generated after each of ``LONG``."""
    folder = tmp_path_factory.mktemp("long")

    def make(family: str) -> tuple[TinyModel, list[tuple[int, ...]]]:
        model = TinyModel.save(folder / family, family, max_position_embeddings=2048)
        return model, [model.reference(prompt) for prompt in LONG]

    return cache(make)


def computed_each(engine: Engine, expected: list[tuple[int, ...]]) -> list[int]:
    """Serve the long prompts one after the other; return the number of tokens that each computed."""
    computed = []
    for prompt, tokens in zip(LONG, expected, strict=True):
        before = engine.stats().computed_tokens
        (output,) = engine.generate([prompt], GREEDY)
        assert tokens == output.token_ids
        computed.append(engine.stats().computed_tokens - before)
    return computed


LONG_HYBRIDS = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("bamba", "kimi_linear") else pytest.mark.whole)
        for family in HYBRID_FAMILIES
    ],
)
"""In usual runs one family with a scan and one with a delta rule; the others find short prefixes in the tests above."""

# 1,040 tokens of a prompt and 9 of the 10 generated ones; the common prefix of 1,000 has 15 blocks of 64, 960 tokens.
WHOLE, REST = 1040 + 9, 1040 + 9 - 960


@LONG_HYBRIDS
def test_with_a_state_at_every_block_the_second_request_finds_the_prefix(long_models: Any, family: str) -> None:
    model, expected = long_models(family)
    with model.engine(block_size=64, memory="16MiB", states={"checkpoints": "all"}) as engine:
        assert [WHOLE, REST, REST, REST] == computed_each(engine, expected)


@LONG_HYBRIDS
def test_with_few_states_a_third_request_continues_where_the_second_differed_from_the_first(
    long_models: Any, family: str
) -> None:
    model, expected = long_models(family)
    with model.engine(block_size=64, memory="16MiB", states={"checkpoints": "aligned"}) as engine:
        assert [WHOLE, WHOLE, REST, REST] == computed_each(engine, expected)


@LONG_HYBRIDS
def test_a_named_boundary_lets_the_second_request_find_the_prefix(long_models: Any, family: str) -> None:
    model, expected = long_models(family)
    with model.engine(block_size=64, memory="16MiB", states={"checkpoints": "aligned"}) as engine:
        hits = []
        for prompt, tokens in zip(LONG, expected, strict=True):
            (output,) = engine.generate([Prompt(decoder=prompt, boundaries=[1000, 1000, 1040])], GREEDY)
            assert tokens == output.token_ids
            assert output.cached is not None
            hits.append(output.cached.num_tokens)
        assert [0, 960, 960, 960] == hits


def test_boundaries_within_one_block_cost_one_step(long_models: Any) -> None:
    model, _ = long_models("bamba")
    prompt = Prompt(decoder=LONG[0], boundaries=[1000, 999, 3, 960, 1040])
    with model.engine(block_size=64, memory="16MiB") as engine:
        assert (960, 1024) == engine._admission.boundaries(prompt, 1040)
        assert () == engine._admission.boundaries(attrs.evolve(prompt, boundaries=[960]), 960)
        engine.generate([prompt], SamplingParams(max_new_tokens=1))
        assert 3 == engine.stats().steps


def test_an_output_says_which_group_limited_what_was_found(long_models: Any) -> None:
    model, _ = long_models("bamba")
    with model.engine(block_size=64, memory="16MiB", states={"checkpoints": "aligned"}) as engine:
        engine.generate(LONG[:1], GREEDY)
        (output,) = engine.generate(LONG[1:2], GREEDY)
        why = "group 0 (mamba) keeps states at few blocks' ends, and has none after token 0"
        assert FoundPrefix(known_tokens=960, of_groups={0: 0, 1: 960}, limited_by=(0,), why=why) == output.cached
        outputs = engine.generate(LONG[1:2], SamplingParams(n=2, max_new_tokens=2, seed=1))
        assert [1024, 1039] == [output.cached.num_tokens for output in outputs if output.cached is not None]
        (output,) = engine.generate(LONG[1:2], SamplingParams(prompt_logprobs=True, max_new_tokens=1))
        why = "every token of the prompt is computed for its log-probabilities"
        assert FoundPrefix(why=why) == output.cached


def test_as_many_requests_run_as_fit_while_all_but_one_generate(models: Any) -> None:
    options = {"block_size": 4, "memory": "168KiB", "max_model_len": 64, "max_num_batched_tokens": 48}
    with models("qwen3_next").engine(**options, reserve_prompts=True) as engine:
        assert (1, 2) == (engine.plan.max_concurrency(), engine.plan.max_generating())
        for start in range(4):
            engine.add_request(ids(start, 48), SamplingParams(max_new_tokens=16, ignore_eos=True))
        max_running = 0
        while engine.has_unfinished:
            engine.step()
            max_running = max(max_running, len(scheduler_of(engine).running))
        assert max_running >= 2
        assert 0 == engine.stats().preemptions


def test_with_few_states_a_request_continues_an_earlier_one(long_models: Any) -> None:
    model, expected = long_models("bamba")
    with model.engine(block_size=64, memory="16MiB", states={"checkpoints": "aligned"}) as engine:
        assert expected[0] == engine.generate([LONG[0]], GREEDY)[0].token_ids
        before = engine.stats().computed_tokens
        engine.generate([[*LONG[0], *expected[0], 5, 6, 7]], SamplingParams(max_new_tokens=1))
        # The last block that the prompt of 1,040 tokens filled ends at 1,024.
        assert 1040 + 10 + 3 - 1024 == engine.stats().computed_tokens - before


def test_without_states_nothing_is_found_and_the_stats_say_which_group_lacks_it(long_models: Any) -> None:
    model, expected = long_models("bamba")
    with model.engine(block_size=64, memory="16MiB", states={"checkpoints": "none"}) as engine:
        assert [WHOLE] * 4 == computed_each(engine, expected)
        lookups = {lookup.kind: lookup for lookup in engine.stats().lookups}
        assert 0 == lookups["mamba"].found_tokens < lookups["full_attention"].found_tokens
        assert 3 == lookups["mamba"].times_limiting


@HYBRIDS
def test_a_shared_state_is_continued_in_pages_of_ones_own(models: Any, family: str) -> None:
    prompts = [[*PROMPTS[7], *ids(20 + index, 9)] for index in range(3)]
    expected = [models(family).reference(prompt) for prompt in prompts]
    with models(family).engine(block_size=4, states={"checkpoints": "all"}) as engine:
        engine.generate([PROMPTS[7]], GREEDY)

        def shared_bytes() -> list[torch.Tensor]:
            """Return the bytes of every page that a request with this prefix references."""
            assert 36 == manager_of(engine).start("looks", [*PROMPTS[7], 127])
            pages = manager_of(engine).block_ids("looks")
            manager_of(engine).free("looks")
            groups = [group for group in engine.plan.groups if group.spec.kind == "mamba"]
            assert all(any(pages[group.index]) for group in groups)
            return [
                tensor[page].clone()
                for group in groups
                for page in filter(None, pages[group.index])
                for layer in group.layers
                for tensor in storage_of(engine).views[layer].values()
            ]

        before = shared_bytes()
        assert all(tensor.isfinite().all() for tensor in before)
        # All of them at once, each from the same state.
        assert expected == [output.token_ids for output in engine.generate(prompts, GREEDY)]
        assert all(map(torch.equal, before, shared_bytes()))
