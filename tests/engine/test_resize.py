"""An engine's cache gets more or less memory between steps, without an effect on any request's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from kvframe_engine.engine import Engine
from kvframe_engine.requests.request import SamplingParams
from kvframe_testing.audit import findable_pages

from kvframe.contract.errors import KVFrameError, PlanError, RequestError
from tests.covering import keep
from tests.models.serving import TinyModel, held_pages, ids
from tests.support.engines import manager_of, runner_of

PROMPTS = [ids(3, 45), ids(4, 30), ids(5, 21), ids(6, 40)]
PARAMS = SamplingParams(max_new_tokens=12)
LARGE, SMALL = 400_000, 120_000


@pytest.fixture(scope="module", params=keep(["llama", "gemma3_text", "jamba"], "gemma3_text", "jamba"))
def model(request: pytest.FixtureRequest, models: Callable[[str], TinyModel]) -> TinyModel:
    return models(request.param)


def make(model: TinyModel, memory: int, **options: Any) -> Engine:
    return model.engine(memory=memory, block_size=4, max_model_len=64, max_num_batched_tokens=32, audit=True, **options)


@pytest.fixture(scope="module")
def reference(model: TinyModel) -> list[tuple[int, ...]]:
    with make(model, LARGE) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("options", [{}, {"host_memory": "1MiB"}, {"prefix_caching": False}])
def test_requests_go_on_in_a_cache_of_another_size(
    model: TinyModel, reference: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    with make(model, LARGE, **options) as engine:
        names = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
        tokens: dict[str, tuple[int, ...]] = {}
        sizes = [SMALL, LARGE, LARGE // 2, SMALL, LARGE]
        while engine.has_unfinished:
            tokens |= {output.request_id: output.token_ids for output in engine.step()}
            if sizes:
                size = sizes.pop(0)
                engine.resize_cache(size)
                assert engine.stats().cache_bytes == engine.plan.total_bytes <= size
        assert reference == [tokens[name] for name in names]
        assert not sizes
        assert 0 == held_pages(engine)


@pytest.mark.parametrize("backend", keep(["cpu", "flex", "numba", "torch", "torch_reference"], "cpu", "numba", "torch"))
def test_every_backend_goes_on_in_a_cache_of_another_size(
    llama: TinyModel, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Torch traces the kernels of flex and runs what it traced: minutes of C++ say nothing of another pool.
    monkeypatch.setattr("kvframe_flex.kernel.COMPILER", "eager")
    params = attrs.evolve(PARAMS, max_new_tokens=4)
    with make(llama, LARGE, backend=backend) as engine:
        expected = [output.token_ids for output in engine.generate(PROMPTS[1:3], params)]
    with make(llama, LARGE // 2, backend=backend) as engine:
        names, tokens = [engine.add_request(prompt, params) for prompt in PROMPTS[1:3]], {}
        for size in (SMALL, LARGE, SMALL):
            tokens |= {output.request_id: output.token_ids for output in engine.step()}
            engine.resize_cache(size)
        while engine.has_unfinished:
            tokens |= {output.request_id: output.token_ids for output in engine.step()}
        assert expected == [tokens[name] for name in names]


def test_a_request_that_did_not_fit_does_afterwards(llama: TinyModel) -> None:
    with make(llama, llama.tight_memory(30, block_size=4, max_model_len=64, max_num_batched_tokens=32)) as engine:
        small = engine.plan.total_bytes
        with pytest.raises(RequestError) as refused:
            engine.generate(PROMPTS[:1], PARAMS)
        assert "too_large" == refused.value.code
        engine.resize_cache("400KB")
        assert "length" == engine.generate(PROMPTS[:1], PARAMS)[0].finish_reason
        engine.resize_cache(small)
        with pytest.raises(RequestError):
            engine.generate(PROMPTS[:1], PARAMS)


def test_what_is_cached_in_the_part_that_stays_is_found_again(model: TinyModel) -> None:
    with make(model, LARGE // 2) as engine:
        engine.generate(PROMPTS[:1], PARAMS)
        engine.resize_cache(LARGE)
        engine.generate(PROMPTS[:1], PARAMS)
        assert engine.stats().cached_prompt_tokens > 0


def test_graphs_are_captured_again_at_the_new_address(llama: TinyModel) -> None:
    with make(llama, LARGE, backend="cpu") as engine:
        expected = [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]
    with make(llama, LARGE, backend="cpu", graphs=[4], graph_query_lens=[1, 16]) as engine:
        graphs: Any = runner_of(engine).graphs
        assert expected == [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]
        captured, replays = graphs.num_graphs, graphs.num_replays
        engine.resize_cache(engine.plan.total_bytes)
        assert captured == graphs.num_graphs > 0  # the cache did not move
        for size in (SMALL, LARGE):
            engine.resize_cache(size)
            assert 0 == graphs.num_graphs
            assert expected == [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]
            assert graphs.num_graphs > 0
            assert replays < graphs.num_replays
            replays = graphs.num_replays


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_request_that_would_not_fit_any_more_is_named(llama: TinyModel) -> None:
    with make(llama, LARGE) as engine:
        name = engine.add_request(PROMPTS[0], PARAMS)
        engine.step()
        before = engine.plan
        with pytest.raises(PlanError, match=f"does not hold the request '{name}' of 57 tokens, which has not ended"):
            engine.resize_cache(llama.tight_memory(30, block_size=4, max_model_len=64, max_num_batched_tokens=32))
        assert before == engine.plan
        engine.abort(name)


def test_what_is_pinned_is_not_taken(llama: TinyModel) -> None:
    with make(llama, LARGE) as engine:
        pin = engine.pin_prefix(PROMPTS[0])
        with pytest.raises(PlanError, match="prefixes are pinned at the end of the cache, or leave too little"):
            engine.resize_cache(llama.tight_memory(60, block_size=4, max_model_len=64, max_num_batched_tokens=32))
        engine.unpin(pin)


@pytest.mark.parametrize(("memory", "said"), [(1, "1 bytes hold"), ("much", "'much' is not a size")])
def test_a_wrong_size_is_refused(llama: TinyModel, memory: int | str, said: str) -> None:
    with make(llama, LARGE) as engine, pytest.raises(KVFrameError, match=said):
        engine.resize_cache(memory)


@pytest.mark.parametrize(("before", "after"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_memory_that_is_not_there_changes_nothing(
    model: TinyModel, before: int | str, after: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(model, before) as engine:
        engine.generate(PROMPTS[:1], PARAMS)
        plan, pages = engine.plan, sorted(findable_pages(manager_of(engine)))

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patched:
            patched.setattr("torch.zeros", fail)
            with pytest.raises(PlanError, match=r"cpu has no [0-9]+ bytes to give the cache"):
                engine.resize_cache(after)
        assert plan == engine.plan == manager_of(engine).plan
        assert pages == sorted(findable_pages(manager_of(engine)))
        assert "length" == engine.generate(PROMPTS[2:3], PARAMS)[0].finish_reason
