"""After any failure in a step, its requests fail or are recomputed, and all other requests' tokens are unchanged."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch
from kvframe_engine.core import STEP_FAILED
from kvframe_engine.graphs.device_graphs import CalledGraph
from kvframe_engine.turns import HeldInterrupts
from kvframe_testing.audit import audit

from kvframe import Engine, RequestOutput, SamplingParams
from kvframe.loading.plugins import load_plugins
from tests.attention.capturable import CapturableReference
from tests.covering import cover_values, few, keep
from tests.engine import injected_faults
from tests.engine.scripted_model import ScriptedModel
from tests.engine.test_with_models import assert_pool_as_before
from tests.models.encoder_decoder import generated
from tests.models.encoder_decoder import prompts as encoder_prompts
from tests.models.serving import GREEDY, NUM_NEW_TOKENS, PROMPTS, TinyModel, held_pages
from tests.support.engines import manager_of
from tests.support.plugins import plugin

SMALL_STEPS = {"max_num_seqs": 3, "max_num_batched_tokens": 20, "block_size": 4}
TIGHT = {"max_model_len": 96, "max_num_batched_tokens": 12, "block_size": 5, "max_num_seqs": 8}


@pytest.fixture(autouse=True)
def _interrupts_are_handled() -> Iterator[None]:
    # A shell starts background jobs with interrupts ignored, and Python keeps that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@attrs.define
class Served:
    """The result of a batch of requests.

    Attributes:
        outputs: The last output of each request, in order.
        errors: The exceptions that ``step`` raised.
    """

    outputs: list[RequestOutput]
    errors: list[BaseException]

    @property
    def failed(self) -> set[int]:
        """The outputs that ended with an error."""
        return {index for index, output in enumerate(self.outputs) if output.finish_reason == "error"}


def serve(engine: Engine, prompts: Sequence[Any], params: SamplingParams = GREEDY) -> Served:
    """Serve requests to their ends, in spite of exceptions."""
    names = [engine.add_request(prompt, params) for prompt in prompts]
    last: dict[str, RequestOutput] = {}
    errors: list[BaseException] = []
    while engine.has_unfinished:
        try:
            last |= {output.request_id: output for output in engine.step()}
        except (Exception, KeyboardInterrupt) as error:
            errors.append(error)
    return Served([last[name] for name in names], errors)


def assert_outlived(engine: Engine, prompts: Sequence[Any], expected: Sequence[Any], served: Served) -> None:
    """Check that other requests have their tokens, that no block is held, and that all requests can be served now."""
    for index, output in enumerate(served.outputs):
        if index in served.failed:
            assert expected[index][: len(output.token_ids)] == output.token_ids
        else:
            assert expected[index] == output.token_ids
    assert 0 == held_pages(engine)
    audit(manager_of(engine))
    assert expected == [output.token_ids for output in engine.generate(prompts, GREEDY)]
    assert_pool_as_before(engine)


_EXPECTED: dict[str, list[tuple[int, ...]]] = {}


def case_of(models: Any, family: str) -> tuple[TinyModel, list[Any], list[tuple[int, ...]]]:
    """Return a model, its prompts, and what transformers generates after each."""
    model = models(family)
    prompts: list[Any] = [*(encoder_prompts(family) if family == "t5gemma" else PROMPTS)]
    if family not in _EXPECTED:
        _EXPECTED[family] = (
            [generated(model, family, prompt, NUM_NEW_TOKENS) for prompt in prompts]
            if family == "t5gemma"
            else [model.reference(prompt) for prompt in prompts]
        )
    return model, prompts, _EXPECTED[family]


FAMILIES = ("gemma3_text", "bamba", "t5gemma")
"""Windows with full attention; states with attention; an encoder, and a decoder of both."""


@pytest.mark.parametrize(
    ("family", "kind", "after"), cover_values(FAMILIES, ("backend", "memory", "interrupt"), (0, 7, 25))
)
def test_what_is_raised_in_a_step_ends_its_requests_and_no_other(
    models: Any, family: str, kind: str, after: int
) -> None:
    model, prompts, expected = case_of(models, family)
    with model.engine(**SMALL_STEPS) as engine:
        broken = injected_faults.Faults(engine)
        broken.arm(kind, after * 9 if kind == "memory" else after)
        served = serve(engine, prompts)
        assert {kind: 1} == dict(broken.struck)
        assert 1 == len(served.errors)
        assert 1 <= len(served.failed) <= 3
        assert {STEP_FAILED} == {served.outputs[index].error for index in served.failed}
        assert_outlived(engine, prompts, expected, served)


@pytest.mark.parametrize("after", keep([0, 1, 5, 8], 0, 5))
def test_an_interrupt_while_the_books_are_written_waits_until_they_are(models: Any, after: int) -> None:
    model, prompts, expected = case_of(models, "gemma3_text")
    with model.engine(**SMALL_STEPS) as engine:
        broken = injected_faults.Faults(engine)
        broken.arm("books", after)
        served = serve(engine, prompts)
        assert ["KeyboardInterrupt"] == [type(error).__name__ for error in served.errors]
        assert_outlived(engine, prompts, expected, served)


def test_an_interrupt_after_a_step_costs_nobody_anything(models: Any) -> None:
    model, prompts, _ = case_of(models, "gemma3_text")
    with model.engine(**SMALL_STEPS) as engine:
        commit = manager_of(engine).commit_rows

        def interrupted(*arguments: Any, **options: Any) -> None:
            signal.raise_signal(signal.SIGINT)
            commit(*arguments, **options)

        engine.add_request(prompts[1], GREEDY)
        vars(manager_of(engine))["commit_rows"] = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        vars(manager_of(engine))["commit_rows"] = commit
        (output,) = [output for output in drain(engine) if output.finish_reason is not None]
        assert "length" == output.finish_reason


def drain(engine: Engine) -> list[RequestOutput]:
    """Return all remaining outputs."""
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


def test_interrupts_that_are_held_come_once_at_the_end() -> None:
    reached = []

    def hold() -> None:
        with HeldInterrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        hold()
    assert ["the end"] == reached
    assert signal.default_int_handler is signal.getsignal(signal.SIGINT)


@pytest.mark.parametrize("after", [0, 2])
def test_a_copy_that_fails_is_one_that_is_not_made(models: Any, after: int) -> None:
    model, prompts, expected = case_of(models, "gemma3_text")
    with model.engine(memory=model.tight_memory(75, **TIGHT), **TIGHT, host_memory="1MiB") as engine:
        broken = injected_faults.Faults(engine)
        broken.arm("host", after)
        served = serve(engine, prompts)
        assert ({"host": 1}, [], set()) == (dict(broken.struck), served.errors, served.failed)
        assert_outlived(engine, prompts, expected, served)


def test_a_wrapper_that_returns_wrong_shapes_is_named(models: Any) -> None:
    model, prompts, expected = case_of(models, "gemma3_text")
    model = attrs.evolve(model, registry=load_plugins(plugins=[injected_faults.careless_plugin()]).registry)
    with model.engine(wrappers=["careless"], **SMALL_STEPS) as engine:
        broken = injected_faults.Faults(engine)
        broken.arm("shape", 5)
        served = serve(engine, prompts)
        assert 1 <= len(served.failed) <= 3
        (error,) = served.errors
        assert str(error).startswith("wrapper 'careless', of the layer 'model.layers.")
        assert str(error).endswith(
            "gives metadata that does not fit together: seq_lens has the shape "
            f"[{len(served.failed) - 1}], not [{len(served.failed)}]; this is a mistake in the wrapper"
        )
        assert {STEP_FAILED} == {served.outputs[index].error for index in served.failed}
        assert_outlived(engine, prompts, expected, served)


@pytest.mark.parametrize("after", keep([1, 4], 4))
def test_a_listener_that_raises_while_other_things_break_harms_nobody(models: Any, after: int) -> None:
    model, prompts, expected = case_of(models, "gemma3_text")
    told = []

    def raise_soon(events: Any) -> None:
        told.append(events)
        if len(told) > after:
            raise OSError("the router is gone")

    with model.engine(**SMALL_STEPS) as engine:
        engine.on_cache_events = raise_soon
        broken = injected_faults.Faults(engine)
        broken.arm("backend", 9)
        served = serve(engine, prompts)
        assert (["BackendError"], after + 1) == ([type(error).__name__ for error in served.errors], len(told))
        assert ["InjectedError"] == [type(error.__cause__).__name__ for error in served.errors]
        assert engine.on_cache_events is None
        assert_outlived(engine, prompts, expected, served)


@pytest.mark.parametrize(("family", "kind"), few(2, cover_values(FAMILIES, ("logits", "state"))))
def test_an_output_that_is_not_numbers_ends_its_request_alone(models: Any, family: str, kind: str) -> None:
    model, prompts, expected = case_of(models, family)
    for after in (0, 11):
        with model.engine(**SMALL_STEPS) as engine:
            broken = injected_faults.Faults(engine)
            broken.arm(kind, after)
            served = serve(engine, prompts)
            assert ({kind: 1}, []) == (dict(broken.struck), served.errors)
            assert len(served.failed) + engine.stats().retries >= 1
            assert len(served.failed) <= 1
            assert_outlived(engine, prompts, expected, served)


def test_who_started_on_what_gives_no_numbers_is_computed_again_without(models: Any) -> None:
    model, prompts, expected = case_of(models, "gemma3_text")
    with model.engine(**SMALL_STEPS | {"max_num_seqs": 1}) as engine:
        broken = injected_faults.Faults(engine)
        # The first chunk of the first request with the common prefix: its blocks are hit, and hold NaN.
        broken.arm("state", 0)
        served = serve(engine, prompts[4:])
        assert ({0}, []) == (served.failed, served.errors)
        assert 1 <= engine.stats().retries <= 3
        assert_outlived(engine, prompts[4:], expected[4:], served)


def test_whoever_fails_without_a_prefix_fails_once(models: Any) -> None:
    model = ScriptedModel("abcdefgh")
    model.spoil = lambda tokens, logits: logits.fill_(torch.nan)
    with model.engine() as engine:
        served = serve(engine, ["ab", "ab"])
        assert ({0, 1}, []) == (served.failed, served.errors)
        assert 0 == engine.stats().retries


@pytest.mark.parametrize("error", [RuntimeError("no such kernel"), MemoryError()], ids=repr)
def test_a_step_whose_capture_fails_runs_without_a_graph(
    models: Any, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompts, expected = case_of(models, "gemma3_text")
    registry = load_plugins(plugins=[plugin("mine", backends={"capturable": CapturableReference})]).registry
    model = attrs.evolve(model, registry=registry)
    remaining = [2]

    def capture(self: CalledGraph, run: Any) -> tuple[torch.Tensor, ...]:
        remaining[0] -= 1
        output = run()
        if remaining[0] == 0:
            raise error
        self._run, self._output = run, tuple(each.clone() for each in output)
        return self._output

    monkeypatch.setattr(CalledGraph, "capture", capture)
    with model.engine(backend="capturable", graphs=[2, 4], **SMALL_STEPS | {"max_num_seqs": 4}) as engine:
        served = serve(engine, prompts)
        assert ([], set()) == (served.errors, served.failed)
        assert_outlived(engine, prompts, expected, served)
    assert 1 == sum(f"its capture raised {type(error).__name__}" in message for message in caplog.messages)


class Unreadable(ScriptedModel):
    """A tokenizer that fails on the token ``x``."""

    def decode(self, token_ids: Sequence[int]) -> str | None:
        if ord("x") in token_ids:
            raise KeyError("x")
        return super().decode(token_ids)


@pytest.mark.parametrize("stop", [(), ("zz",)], ids=["read-when-reported", "read-in-the-step"])
def test_tokens_that_cannot_be_turned_into_text_end_their_request_alone(stop: tuple[str, ...]) -> None:
    params = SamplingParams(max_new_tokens=6, stop=stop)
    prompts = [[97] * 4, [97] * 9]
    with Unreadable("the fox is quick").engine() as engine:
        for served in (serve(engine, prompts, params), Served(engine.generate(prompts, params), [])):
            assert ([], {0}) == (served.errors, served.failed)
            broken, sound = served.outputs
            assert "its tokens could not be turned into text: KeyError: 'x'" == broken.error
            assert ("length", 6) == (sound.finish_reason, len(sound.token_ids))
            assert " quic" == sound.text[-5:]
        assert "error" == list(engine.stream(prompts[0], params))[-1].finish_reason
        assert 0 == held_pages(engine)
        assert not engine.has_unfinished
