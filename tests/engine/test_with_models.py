"""The engine over real models and tokenizers: a request's end, of any kind, does not affect others or the pool."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_testing.audit import audit
from kvframe_torch.backend import TorchBackend
from kvframe_transformers.testing import save_tiny

from kvframe import Engine, RequestOutput, SamplingParams, Stack
from kvframe.contract.errors import BackendError, ModelError, PlanError, StackError
from tests.models.serving import GREEDY, PROMPTS, TinyModel, Tokens, held_pages, ids, make_stack
from tests.support.engines import manager_of, pool_of
from tests.support.models import save_tokenizer, trained_tokenizer
from tests.support.plugins import plugin

TEXT = "Ein Größenvergleich: 1 € ≈ 1,1 $; naïve cafés, 𝄞 and 東京. The quick brown fox jumps over the lazy dog. " * 3
VOCAB_SIZE = 320


@pytest.fixture(scope="module")
def model(models: Callable[[str], TinyModel]) -> TinyModel:
    return models("gemma3_text")


@pytest.fixture(scope="module")
def reference(references: Callable[[str], Tokens]) -> Tokens:
    return references("gemma3_text")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A random model with a byte-pair tokenizer: it writes nonsense, in pieces of characters."""
    path = tmp_path_factory.mktemp("texts")
    save_tokenizer(path, trained_tokenizer([TEXT], VOCAB_SIZE))
    return TinyModel.save(path, "gemma3_text", vocab_size=VOCAB_SIZE)


def drain(engine: Engine) -> dict[str, tuple[int, ...]]:
    """Serve the remaining requests; return each request's tokens."""
    tokens = {}
    while engine.has_unfinished:
        tokens |= {output.request_id: output.token_ids for output in engine.step()}
    return tokens


def assert_pool_as_before(engine: Engine) -> None:
    """Check that no request holds a page, and that every slab is free after the cached prefixes are removed."""
    assert (0, 0.0) == (held_pages(engine), manager_of(engine).usage)
    assert engine.stack.limits.max_num_seqs == manager_of(engine).num_free_rows
    engine.reset_prefix_cache()
    pool = pool_of(manager_of(engine))
    assert (0, engine.plan.num_slabs) == (pool.num_cached, pool.num_idle_slabs)
    audit(manager_of(engine))


# --- no block is held after a request's end, of any kind --------------------------------------------------------------


@contextmanager
def raising_in_layer(model: TinyModel, error: BaseException, after: int) -> Iterator[None]:
    """Make the model's third layer raise after ``after`` calls."""
    loaded: Any = model.loaded
    remaining = [after]

    def raise_(*_: Any) -> None:
        remaining[0] -= 1
        if remaining[0] < 0:
            raise error

    handle = loaded.model.model.layers[2].register_forward_pre_hook(raise_)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("after", [0, 1, 6], ids="after {} steps".format)
def test_a_model_that_raises_between_its_layers_leaves_the_pool_and_the_waiting_as_before(
    model: TinyModel, reference: list[tuple[int, ...]], after: int, error: BaseException
) -> None:
    with model.engine(max_num_seqs=2, max_num_batched_tokens=24, block_size=4) as engine:
        for name in "abcd":
            engine.add_request(PROMPTS[4 + "abcd".index(name)], GREEDY, name)
        with raising_in_layer(model, error, after), pytest.raises(type(error)):
            drain(engine)
        last: dict[str, RequestOutput] = {}
        while engine.has_unfinished:
            last |= {output.request_id: output for output in engine.step()}
        failed = {name for name, output in last.items() if output.finish_reason == "error"}
        assert failed
        assert failed <= {"a", "b"}
        for index, name in enumerate("abcd"):
            if name not in failed:
                assert reference[4 + index] == last[name].token_ids
        # State that failed requests computed in earlier steps may be hit; that of the failed step may not.
        assert reference == [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
        assert_pool_as_before(engine)


def test_a_batch_that_is_interrupted_leaves_other_requests_alone(
    model: TinyModel, reference: list[tuple[int, ...]]
) -> None:
    with model.engine(max_num_seqs=1) as engine:
        with raising_in_layer(model, RuntimeError("broken"), 3), pytest.raises(RuntimeError, match="broken"):
            engine.generate(PROMPTS[:4], GREEDY)
        assert not engine.has_unfinished
        engine.add_request(PROMPTS[5], GREEDY, "mine")

        def stop_after_two(num_done: int) -> None:
            if num_done == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[:4], GREEDY, on_progress=stop_after_two)
        assert {"mine": reference[5]} == drain(engine)
        assert_pool_as_before(engine)


@pytest.mark.parametrize("num_steps", [1, 2, 4, 9])
def test_an_abort_within_a_prompt_or_after_it_gives_everything_back(
    model: TinyModel, reference: list[tuple[int, ...]], num_steps: int
) -> None:
    with model.engine(max_num_batched_tokens=24, block_size=4) as engine:
        for index in (3, 6, 7):
            engine.add_request(PROMPTS[index], GREEDY, str(index))
        for _ in range(num_steps):
            engine.step()
        engine.abort("3")
        engine.abort("7")
        assert reference[6] == drain(engine)["6"]
        assert_pool_as_before(engine)


def test_a_stream_that_is_left_early_gives_everything_back(model: TinyModel, reference: list[tuple[int, ...]]) -> None:
    with model.engine(block_size=4) as engine:
        engine.add_request(PROMPTS[6], GREEDY, "other")
        stream = engine.stream(PROMPTS[5], GREEDY)
        next(stream)
        stream.close()
        assert {"other": reference[6]} == drain(engine)
        assert_pool_as_before(engine)


def test_numbers_that_are_none_in_one_request_do_not_reach_the_others(tmp_path: Path) -> None:
    model = TinyModel.save(tmp_path, "gemma3_text")
    expected = [model.reference(prompt) for prompt in PROMPTS]
    loaded: Any = model.loaded
    poisonous = min(set(range(128)).difference(*PROMPTS, *expected))
    with torch.no_grad():
        # Only its input embedding: the head is tied to it, so otherwise every token's logits would have a NaN.
        loaded.model.lm_head.weight = torch.nn.Parameter(loaded.model.lm_head.weight.clone())
        loaded.model.model.embed_tokens.weight[poisonous] = torch.nan
    prompts = [[*ids(4, 20), poisonous, 5], *PROMPTS, [poisonous]]
    for poison_freed in (True, False):
        with model.engine(block_size=4, max_num_seqs=4, poison_freed=poison_freed) as engine:
            for _ in range(2):
                outputs = engine.generate(prompts, GREEDY)
                assert "error" == outputs[0].finish_reason == outputs[-1].finish_reason
                assert expected == [output.token_ids for output in outputs[1:-1]]
            assert_pool_as_before(engine)


# --- ends and draws ---------------------------------------------------------------------------------------------------


def test_the_models_end_token_ends_a_request_where_generate_ends_it(tmp_path: Path, model: TinyModel) -> None:
    end = model.reference(PROMPTS[3])[4]
    ending = TinyModel.save(tmp_path, "gemma3_text", eos_token_id=end)
    expected = [ending.reference(prompt) for prompt in PROMPTS]
    assert expected[3][-1] == end
    assert len(expected[3]) <= 5
    with ending.engine() as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        assert expected == [output.token_ids for output in outputs]
        assert ["stop" if tokens[-1] == end else "length" for tokens in expected] == [
            output.finish_reason for output in outputs
        ]
        (going_on,) = engine.generate([PROMPTS[3]], SamplingParams(max_new_tokens=10, ignore_eos=True))
        assert model.reference(PROMPTS[3]) == going_on.token_ids


def test_a_seed_gives_the_same_tokens_in_any_batch_chunk_block_and_pool(model: TinyModel) -> None:
    params = [
        SamplingParams(max_new_tokens=8, temperature=3.0, seed=index, top_k=index % 3 * 20, top_p=1 - index % 2 * 0.1)
        for index in range(len(PROMPTS))
    ]

    def draw(**options: Any) -> list[tuple[int, ...]]:
        with model.engine(**options) as engine:
            return [output.token_ids for output in engine.generate(PROMPTS, params)]

    first = draw()
    assert len(set(first)) == len(PROMPTS)
    assert first == draw(max_num_seqs=1, block_size=17)
    assert first == draw(max_num_batched_tokens=7, prefix_caching=False)
    tight = {"block_size": 4, "max_model_len": 96, "max_num_batched_tokens": 12}
    assert first == draw(memory=model.tight_memory(75, **tight), **tight)


# --- the model after the engine ---------------------------------------------------------------------------------------


def test_closing_leaves_the_model_bit_for_bit_as_it_was(model: TinyModel) -> None:
    loaded: Any = model.loaded
    tokens = torch.tensor([PROMPTS[3]])

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return loaded.model(tokens).logits

    before = logits()
    with model.engine(self_check=True) as engine:
        engine.generate(PROMPTS, GREEDY)
    assert torch.equal(before, logits())


def test_one_model_serves_one_engine_at_a_time(model: TinyModel, reference: list[tuple[int, ...]]) -> None:
    with model.engine() as engine:
        with pytest.raises(ModelError, match="close that engine first"):
            model.engine()
        assert reference[3] == engine.generate([PROMPTS[3]], GREEDY)[0].token_ids
    with model.engine() as engine:
        assert reference[3] == engine.generate([PROMPTS[3]], GREEDY)[0].token_ids


def test_two_engines_take_turns(tmp_path: Path, model: TinyModel, reference: list[tuple[int, ...]]) -> None:
    other_model = TinyModel.save(tmp_path, "llama", seed=1)
    other_reference = [other_model.reference(prompt) for prompt in PROMPTS]
    with model.engine(max_num_batched_tokens=24) as engine, other_model.engine(block_size=4) as other:
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(prompt, GREEDY, str(index))
            other.add_request(prompt, GREEDY, str(index))
        tokens: dict[str, tuple[int, ...]] = {}
        other_tokens: dict[str, tuple[int, ...]] = {}
        while engine.has_unfinished or other.has_unfinished:
            tokens |= {output.request_id: output.token_ids for output in engine.step()}
            other_tokens |= {output.request_id: output.token_ids for output in other.step()}
    assert reference == [tokens[str(index)] for index in range(len(PROMPTS))]
    assert other_reference == [other_tokens[str(index)] for index in range(len(PROMPTS))]


# --- set-up from disk, with plugins as modules ------------------------------------------------------------------------


class CountingBackend(TorchBackend):
    """The torch backend, with a counter of its calls."""

    num_calls = 0

    def attend(self, *arguments: Any, **named: Any) -> torch.Tensor:
        type(self).num_calls += 1
        return super().attend(*arguments, **named)


class WrongBackend(TorchBackend):
    """Attention with a wrong scale, in the windowed layers only."""

    def attend(self, layer: Any, query: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        return super().attend(layer, query * (1.01 if "window" in layer.spec.kind else 1), *rest, **named)


def test_a_backend_from_a_script_serves_a_model(model: TinyModel, reference: list[tuple[int, ...]]) -> None:
    plugins = [plugin("my_plugin", backends={"counting": CountingBackend})]
    with Engine.from_pretrained(model.path, stack=make_stack(backend="counting"), plugins=plugins) as engine:
        assert {"my_plugin:counting"} == {choice.backend for choice in engine.choices}
        assert reference == [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
        assert CountingBackend.num_calls == 4 * engine.stats().steps


def test_a_rule_for_an_unknown_kind_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    stack = Stack.from_mapping({"rules": [{"kind": "slidin_window", "backend": "torch"}]})
    with pytest.raises(StackError, match=r"rules\[0\]\.kind: .*did you mean 'sliding_window'"):
        Engine.from_pretrained(tmp_path / "nothing", stack=stack)


def test_wrong_attention_is_refused_and_the_layer_named(model: TinyModel) -> None:
    stack = make_stack(backend="wrong", self_check=True)
    with pytest.raises(BackendError, match=r"^backend 'my_plugin:wrong' .* layer 'model\.layers\.0\.self_attn' wrong"):
        Engine.from_pretrained(model.path, stack=stack, plugins=[plugin("my_plugin", backends={"wrong": WrongBackend})])


def test_a_refused_model_is_left_as_it_was(model: TinyModel, reference: list[tuple[int, ...]]) -> None:
    loaded: Any = model.loaded
    implementation = loaded.model.config._attn_implementation
    with pytest.MonkeyPatch.context() as patch:
        zeros = functools.wraps(TorchBackend.attend)(lambda self, layer, query, *_, **__: torch.zeros_like(query))
        patch.setattr(TorchBackend, "attend", zeros)
        with pytest.raises(BackendError, match=r"^backend 'kvframe-torch:torch' computes layer .* wrongly"):
            model.engine(self_check=True, backend="torch")
    assert implementation == loaded.model.config._attn_implementation
    with model.engine(self_check=True) as engine:
        assert reference == [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


def test_the_default_stack_sizes_the_cache_by_itself(model: TinyModel, reference: list[tuple[int, ...]]) -> None:
    with Engine.from_pretrained(model.path, stack=Stack()) as engine:
        assert reference == [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
        assert engine.plan.max_concurrency(512) >= 64


def test_a_self_check_that_fits_by_halves_runs_by_halves(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    # The check's prompts have 5 and 9 tokens: 2 and 3 blocks of 4.
    with Engine.from_pretrained(tmp_path, stack=make_stack(memory="16KiB", block_size=4, self_check=True)) as engine:
        assert 4 == engine.plan.num_slabs
        assert 0 == held_pages(engine)


def test_a_self_check_that_does_not_fit_says_what_to_do(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    with pytest.raises(PlanError, match="hold the 9 tokens of the self-check; give more memory"):
        Engine.from_pretrained(tmp_path, stack=make_stack(memory="10KiB", block_size=4, self_check=True))


# --- text -------------------------------------------------------------------------------------------------------------

TEXT_PROMPTS = ("Ein Größen", "naïve cafés, 𝄞", "The", " 東", "1 € ≈ 1,1 $; ")


def test_text_in_and_out_is_the_tokenizers(texts: TinyModel) -> None:
    loaded: Any = texts.loaded
    with texts.engine() as engine:
        for prompt, output in zip(TEXT_PROMPTS, engine.generate(TEXT_PROMPTS, GREEDY), strict=True):
            assert tuple(loaded.tokenizer(prompt)["input_ids"]) == output.prompt_token_ids
            assert loaded.tokenizer.decode(list(output.token_ids)) == output.text


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(2, 6))])
def test_streamed_pieces_add_up_to_the_text(texts: TinyModel, seed: int) -> None:
    loaded: Any = texts.loaded
    params = SamplingParams(max_new_tokens=40, temperature=4.0, seed=seed)
    with texts.engine() as engine:
        for prompt in TEXT_PROMPTS:
            outputs = list(engine.stream(prompt, params))
            text = "".join(output.new_text for output in outputs)
            assert outputs[-1].text == text == loaded.tokenizer.decode(list(outputs[-1].token_ids))
            for earlier in outputs[:-1]:
                assert text.startswith(earlier.text)
                # All text so far, without the bytes of a character that they only begin.
                so_far = loaded.tokenizer.decode(list(earlier.token_ids))
                assert so_far.removeprefix(earlier.text) in ("", "\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize(
    "length", [pytest.param(1, marks=pytest.mark.whole), 2, pytest.param(3, marks=pytest.mark.whole), 7]
)
def test_a_stop_string_is_found_wherever_tokens_end(texts: TinyModel, length: int) -> None:
    params = {"max_new_tokens": 40, "temperature": 4.0, "seed": 3}
    with texts.engine() as engine:
        for prompt in TEXT_PROMPTS:
            (whole,) = engine.generate([prompt], SamplingParams(**params))
            for start in range(0, len(whole.text) - length, 23):
                stop = whole.text[start : start + length]
                outputs = list(engine.stream(prompt, SamplingParams(**params, stop=stop)))
                cut = whole.text[: whole.text.index(stop)]
                assert (cut, cut) == (outputs[-1].text, "".join(output.new_text for output in outputs))
                assert outputs[-1].token_ids == whole.token_ids[: len(outputs[-1].token_ids)]
