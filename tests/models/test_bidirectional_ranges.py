"""Prompts with ranges that see each other in both directions, as image tokens of Gemma 3: a real model, exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_torch.backend import TorchBackend
from kvframe_transformers.testing import quiet, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, Gemma3Config

from kvframe import Engine, Prompt, RequestOutput, SamplingParams, Stack
from kvframe.contract import RequestError
from tests.covering import keep
from tests.support.engines import runner_of

NUM_NEW, WINDOW = 6, 8
Ranges = Sequence[tuple[int, int]]
TEXT = [*range(3, 50)]
"""Longer than the windows of the model's layers, as most of the ranges are."""
CASES: list[tuple[list[int], Ranges]] = [
    (TEXT, [(4, 17), (20, 33)]),
    (TEXT, [(4, 17), (20, 32)]),
    (TEXT, [(4, 17), (33, 47)]),  # the last one ends with the prompt
    (TEXT, [(0, 9), (10, 24), (30, 31)]),
    (TEXT, []),
]

BACKENDS = ("torch_reference", "torch", "cpu", "numba", {"name": "flex", "compile": "never"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("model") / "tiny-gemma-3"
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=tiny_config("gemma3_text", sliding_window=WINDOW, tie_word_embeddings=False).to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1,
        image_token_index=127,
        boi_token_index=126,
        eoi_token_index=125,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with quiet():
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in made.parameters():
                if weight.ndim == 2:
                    weight.mul_(6)
        made.save_pretrained(path)
    return path, made


def own_logprobs(model: Any, tokens: Sequence[int], ranges: Ranges) -> torch.Tensor:
    """Return the model's own log-probabilities after each token, ``[num_tokens, vocab_size]``, given its images."""
    types = torch.zeros(1, len(tokens), dtype=torch.long)
    for start, stop in ranges:
        types[0, start:stop] = 1
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), token_type_ids=types, use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def check(
    model: Any,
    cases: Sequence[tuple[Sequence[int], Ranges]],
    outputs: Sequence[RequestOutput],
    logprobs: Callable[[Any, Sequence[int], Ranges], torch.Tensor] = own_logprobs,
) -> None:
    """Compare every generated token, and all log-probabilities, with the model's own forward over all tokens."""
    for (prompt, ranges), output in zip(cases, outputs, strict=True):
        assert output.error is None, output.error
        tokens, first = [*prompt, *output.token_ids], len(prompt) - 1
        expected = logprobs(model, tokens, ranges)
        assert list(output.token_ids) == expected[first:-1].argmax(-1).tolist()
        found = torch.tensor(output.logprobs, dtype=torch.float64)
        torch.testing.assert_close(found, expected[first:-1].max(-1).values, rtol=0, atol=2e-4)
        if output.prompt_logprobs is not None:
            found = torch.tensor(output.prompt_logprobs[1:], dtype=torch.float64)
            own = expected[torch.arange(first), torch.tensor(prompt[1:])]
            torch.testing.assert_close(found, own, rtol=0, atol=2e-4)


def make_engine(path: Path, *, backend: Any = "torch", **tables: Any) -> Engine:
    stack = {
        "cache": {"memory": "4MiB", "block_size": 4, **tables.get("cache", {})},
        "limits": {"max_model_len": 96, "max_num_batched_tokens": 16},
        "model": tables.get("model", {}),
        "rules": [{"layers": "*", "backend": backend}],
    }
    return Engine.from_pretrained(path, stack=Stack.from_mapping(stack))


def generate(engine: Engine, cases: Sequence[tuple[Sequence[int], Ranges]], **params: Any) -> list[RequestOutput]:
    prompts = [Prompt(decoder=tokens, bidirectional=ranges) for tokens, ranges in cases]
    return engine.generate(prompts, SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=True, **params))


@pytest.mark.parametrize("backend", keep(BACKENDS, "torch", "cpu"), ids=str)
def test_everything_is_the_models_own(model: tuple[Path, Any], backend: Any) -> None:
    path, own = model
    with make_engine(path, backend=backend) as engine:
        check(own, CASES, generate(engine, CASES, prompt_logprobs=True))
        check(own, CASES, generate(engine, CASES))  # on cached prefixes
        for case in CASES:
            check(own, [case], generate(engine, [case]))


def masked_logprobs(model: Any, tokens: Sequence[int], ranges: Ranges) -> torch.Tensor:
    """Return log-probabilities as ``own_logprobs``, of a model without images, given the masks of its layers."""
    places = torch.arange(len(tokens))
    later = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for start, stop in ranges:
        later[start:stop, start:stop] = True
    later &= places > places[:, None]
    causal = places <= places[:, None]
    chunk = getattr(model.config, "attention_chunk_size", len(tokens))
    seen = {"full_attention": causal, "chunked_attention": causal & (places // chunk == places[:, None] // chunk)}
    masks = {
        kind: torch.where(mask | later, 0.0, torch.finfo(torch.float32).min)[None, None] for kind, mask in seen.items()
    }
    given = masks if "attention_chunk_size" in model.config.to_dict() else masks["full_attention"]
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), attention_mask=given, use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize(
    ("family", "backend"), [("llama4_text", "torch"), ("llama4_text", "cpu"), ("deepseek_v3", "mla")]
)
def test_chunks_and_latents_take_ranges(family: str, backend: str, tmp_path: Path) -> None:
    own: Any = tiny_model(family)
    own.save_pretrained(tmp_path)
    own.set_attn_implementation("eager")
    with make_engine(tmp_path, backend=backend) as engine:
        check(own, CASES, generate(engine, CASES, prompt_logprobs=True), masked_logprobs)
        check(own, CASES, generate(engine, CASES), masked_logprobs)


def test_the_cases_differ(model: tuple[Path, Any]) -> None:
    found = [own_logprobs(model[1], *case)[-1] for case in CASES]
    assert all(not torch.allclose(one, other, atol=1e-2) for i, one in enumerate(found) for other in found[:i])


def test_a_prefix_is_found_up_to_whole_ranges(model: tuple[Path, Any]) -> None:
    path, own = model
    one, shorter, other_end = (TEXT, [(4, 17), (20, 33)]), (TEXT, [(4, 17), (20, 32)]), [*TEXT[:32], 99, *TEXT[33:]]
    with make_engine(path) as engine:

        def found(case: tuple[Sequence[int], Ranges]) -> int:
            (output,) = generate(engine, [case])
            check(own, [case], [output])
            assert output.cached is not None
            return output.cached.num_tokens

        assert [0, 44] == [found(one), found(one)]
        # The last 16 tokens before the second range are common, but not its first block.
        assert [20, 44] == [found(shorter), found(shorter)]
        # The same range, but for its last token: from the range on, only one of the two is kept.
        assert [20, 20] == [found((other_end, one[1])), found((other_end, one[1]))]
        assert [44, 4, 44] == [found(one), found((TEXT, [])), found((TEXT, []))]
        # Text after equal ranges is found as ever.
        assert 36 == found(([*TEXT[:38], 1, 2, 3], one[1]))
        assert 20 == found((TEXT[:22], [(4, 17)]))


def test_samples_preempted_requests_and_drafts_are_the_models_own(model: tuple[Path, Any]) -> None:
    path, own = model
    cases = [([*range(3 + i, 40 + i)], [(4, 17), (20 + i, 30 + i)]) for i in range(5)]
    for preemption in ({"preemption": "recompute"}, {"preemption": "swap", "host_memory": "1MiB"}):
        with make_engine(path, cache={**preemption, "memory": "56KiB", "audit": True}) as engine:
            check(own, cases, generate(engine, cases))
            stats = engine.stats()
        assert stats.preemptions > 0
    with make_engine(path, model={"drafts": "ngram"}) as engine:
        for case in CASES[1:3]:
            outputs = generate(engine, [case], n=2)
            check(own, [case] * len(outputs), outputs)


def test_steps_with_ranges_are_replayed_from_graphs(model: tuple[Path, Any]) -> None:
    path, own = model
    graphs: dict[str, Any] = {"graphs": [1, 4], "graph_query_lens": [1, 16]}
    with make_engine(path, backend="cpu", model=graphs) as engine:
        runner: Any = runner_of(engine)
        for case in CASES:
            check(own, [case], generate(engine, [case]))
        sizes = [*runner.graphs._graphs]
        assert {True, False} == {each.has_ranges for each in sizes}
        assert set() == runner.graphs._reasons
        assert runner.graphs.num_replays > 4 * NUM_NEW


def test_a_pinned_prefix_is_found_by_prompts_with_its_ranges(model: tuple[Path, Any]) -> None:
    path, own = model
    one, other = (TEXT, [(4, 17), (20, 33)]), (TEXT, [(4, 17), (20, 32)])
    with make_engine(path) as engine:
        # Whole blocks up to the end of the last range, or up to its start.
        assert [44, 20] == [
            engine.pin_prefix(Prompt(decoder=TEXT[:stop], bidirectional=one[1])).num_tokens for stop in (47, 34)
        ]
        for case, found in ((one, 44), (other, 20), ((TEXT, []), 4)):
            (output,) = generate(engine, [case])
            check(own, [case], [output])
            assert output.cached is not None
            assert found == output.cached.num_tokens
        with pytest.raises(RequestError, match="that divide no bidirectional range") as caught:
            engine.pin_prefix(Prompt(decoder=TEXT[:15], bidirectional=[(1, 15)]))
        assert "prompt_too_short" == caught.value.code


def test_saved_prefixes_keep_their_ranges(model: tuple[Path, Any], tmp_path: Path) -> None:
    path, own = model
    cases = [(TEXT, [(4, 17), (20, 33)]), ([*TEXT[:40], 1], [(0, 9)]), (TEXT, [])]
    with make_engine(path) as engine:
        prompts = [Prompt(decoder=tokens, bidirectional=ranges) for tokens, ranges in cases]
        saved = engine.save_prefixes(tmp_path / "prefixes", prompts)
        assert [44, 40, 44] == [each.num_tokens for each in saved]
    with make_engine(path) as engine:
        assert all(each.is_cached for each in engine.load_prefixes(tmp_path / "prefixes"))
        outputs = generate(engine, cases)
        check(own, cases, outputs)
        assert [44, 40, 44] == [output.cached.num_tokens for output in outputs if output.cached is not None]
    # Of two ranges that begin alike, one is cached: its pages are not those of the other.
    with make_engine(path) as engine:
        other = ([*TEXT[:30], 1, *TEXT[31:]], [(4, 17), (20, 33)])
        generate(engine, [other])
        loaded = engine.load_prefixes(tmp_path / "prefixes")
        assert [False, True, True] == [each.is_cached for each in loaded]
        assert "only its first 20 tokens are cached" in (loaded[0].reason or "")
        for case in (cases[0], other):
            check(own, [case], generate(engine, [case]))


def refusal(engine: Engine, ranges: Any, tokens: Sequence[int] = TEXT) -> str:
    with pytest.raises(RequestError) as caught:
        engine.add_request(Prompt(decoder=tokens, bidirectional=ranges), SamplingParams(max_new_tokens=1))
    return caught.value.code


def test_wrong_ranges_are_refused(model: tuple[Path, Any]) -> None:
    with make_engine(model[0]) as engine:
        wrong: list[Any] = [[(3, 3)], [(5, 3)], [(0, 48)], [(-1, 3)], [(4, 9), (8, 12)], [(9, 12), (1, 3)], [3], 7, "x"]
        assert {"bad_ranges"} == {refusal(engine, ranges) for ranges in wrong}
        assert "exceeds_step" == refusal(engine, [(2, 19)])


def test_an_empty_iterator_states_no_range(model: tuple[Path, Any]) -> None:
    with make_engine(model[0]) as engine:
        stated = [Prompt(decoder=TEXT, bidirectional=ranges) for ranges in ((), iter(()))]
        plain, empty = engine.generate(stated, SamplingParams(max_new_tokens=2))
        assert plain.token_ids == empty.token_ids


def test_ranges_are_refused_if_a_layers_backend_does_not_honour_them(
    model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = TorchBackend.capabilities
    monkeypatch.setattr(TorchBackend, "capabilities", attrs.evolve(known, masks=known.masks - {"ranges"}))
    with make_engine(model[0]) as engine:
        assert "mask_ranges" == refusal(engine, [(2, 9)])
