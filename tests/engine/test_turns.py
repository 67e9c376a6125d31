"""An engine serves one call at a time, and none after ``close``; an output that does not arrive is reported again."""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvframe_engine.contract.errors import EngineError
from kvframe_engine.core import EngineCore
from kvframe_engine.turns import Turns, verb

from kvframe import Embedder, Engine, SamplingParams
from kvframe.contract.errors import RequestError
from tests.engine.scripted_model import ScriptedModel
from tests.models.serving import TinyModel, make_stack
from tests.support.engines import requests_of

SCRIPT = "the quick brown fox jumps"
ALWAYS_ANSWER = {"close", "default_params", "stats", "from_pretrained", "from_model"}
"""What works on a closed engine; the last entry makes another engine."""


def verbs_of(kind: type[EngineCore[Any]]) -> list[str]:
    """Return the names of an engine's public methods, and of its setters."""
    own = {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}
    methods = {name for name, value in own.items() if callable(getattr(kind, name))}
    setters = {name for name, value in own.items() if isinstance(value, property) and value.fset is not None}
    return sorted((methods | setters | {"__enter__"}) - ALWAYS_ANSWER)


def call(engine: Any, name: str) -> None:
    """Call a verb without its arguments: it is accepted or refused before the arguments are checked."""
    if isinstance(inspect.getattr_static(type(engine), name), property):
        setattr(engine, name, None)
    else:
        getattr(engine, name)()


@pytest.fixture(scope="module")
def embedder(llama: TinyModel) -> Iterator[Embedder]:
    with Embedder.from_pretrained(llama.path, stack=make_stack()) as embedder:
        yield embedder


# --- closed -----------------------------------------------------------------------------------------------------------


def test_the_verbs_are_found() -> None:
    assert {
        "__enter__",
        "abort",
        "add_request",
        "generate",
        "load_prefixes",
        "on_cache_events",
        "pin_prefix",
        "reset_prefix_cache",
        "resize_cache",
        "save_prefixes",
        "step",
        "stream",
        "unpin",
    } <= set(verbs_of(Engine))
    assert {"add_request", "embed", "step"} <= set(verbs_of(Embedder))


@pytest.mark.parametrize("name", verbs_of(Engine))
def test_no_verb_of_a_closed_engine_does_anything(name: str) -> None:
    engine = ScriptedModel(SCRIPT).engine()
    engine.close()
    with pytest.raises(EngineError, match="the engine is closed") as error:
        call(engine, name)
    assert "closed" == error.value.code


@pytest.mark.parametrize("name", verbs_of(Embedder))
def test_no_verb_of_a_closed_embedder_does_anything(embedder: Embedder, name: str) -> None:
    embedder.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        call(embedder, name)


def test_a_closed_engine_says_what_it_did_and_that_nothing_is_left() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        engine.generate(["the"], SamplingParams(max_new_tokens=3))
        engine.add_request("the")
        assert not engine.is_closed
    engine.close()
    assert (3, False, True) == (engine.stats().generated_tokens, engine.has_unfinished, engine.is_closed)


def test_a_stream_that_is_half_read_says_that_the_engine_was_closed() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        stream = engine.stream("the")
        next(stream)
    for _ in range(2):
        with pytest.raises(EngineError, match="the engine is closed, so 'next' cannot be called"):
            next(stream)
    stream.close()


def test_closing_lets_another_engine_have_the_model_though_a_stream_is_left() -> None:
    model = ScriptedModel(SCRIPT)
    with model.engine() as engine:
        stream = engine.stream("the")
        next(stream)
    with model.engine() as other:
        with pytest.raises(EngineError):
            next(stream)
        assert " quick" == other.generate(["the"], SamplingParams(max_new_tokens=6))[0].text


# --- one at a time ----------------------------------------------------------------------------------------------------


def on_progress(engine: Engine, act: Callable[[], object]) -> None:
    engine.generate(["the"], SamplingParams(max_new_tokens=2), on_progress=lambda _: act() and None)


def on_cache_events(engine: Engine, act: Callable[[], object]) -> None:
    engine.on_cache_events = lambda _: act() and None
    engine.generate(["the quick"], SamplingParams(max_new_tokens=2))


def as_tokens(engine: Engine, act: Callable[[], object]) -> None:
    class Reading(list[int]):
        def __iter__(self) -> Iterator[int]:
            act()
            return super().__iter__()

    engine.add_request(Reading([97, 98]))


@pytest.mark.parametrize("name", [*verbs_of(Engine), "close"])
@pytest.mark.parametrize("within", [on_progress, on_cache_events, as_tokens])
def test_no_verb_can_be_called_from_within_another(within: Callable[..., None], name: str) -> None:
    errors: list[EngineError] = []

    def act() -> None:
        with pytest.raises(EngineError, match="the engine is busy") as error:
            call(engine, name)
        errors.append(error.value)
        assert engine.stats().generated_tokens >= 0

    with ScriptedModel(SCRIPT).engine() as engine:
        within(engine, act)
        assert {"busy"} == {error.code for error in errors}
        engine.on_cache_events = None
        # The engine continues as before.
        assert " quick" == engine.generate(["the"], SamplingParams(max_new_tokens=6))[0].text


def test_no_verb_can_be_called_while_another_thread_calls_one() -> None:
    inside, done = threading.Event(), threading.Event()

    def wait(_: int) -> None:
        inside.set()
        assert done.wait(60)

    with ScriptedModel(SCRIPT).engine() as engine:
        params = SamplingParams(max_new_tokens=1)
        thread = threading.Thread(target=lambda: engine.generate(["the"], params, on_progress=wait))
        thread.start()
        assert inside.wait(60)
        with pytest.raises(EngineError, match="the engine is busy"):
            engine.step()
        done.set()
        thread.join()
        assert [] == engine.step()


def test_threads_may_take_turns() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        stream = engine.stream("the", SamplingParams(max_new_tokens=6))
        texts: list[str] = []
        for _ in range(6):
            thread = threading.Thread(target=lambda: texts.append(next(stream).new_text))
            thread.start()
            thread.join()
        assert " quick" == "".join(texts)


def test_what_waits_for_its_turn_is_done_when_the_running_one_ends() -> None:
    done: list[str] = []

    class Part:
        _turns = Turns()

    part: Any = Part()

    def run(self: Any) -> None:
        self._turns.when_free(lambda: done.append("later"))
        assert [] == done

    verb(run)(part)
    assert ["later"] == done
    part._turns.when_free(lambda: done.append("at once"))
    assert ["later", "at once"] == done


# --- abandoned streams ------------------------------------------------------------------------------------------------


def assert_nothing_is_left(engine: Engine) -> None:
    assert not engine.has_unfinished
    assert [] == list(requests_of(engine))
    assert 0 == sum(engine.stats().blocks_held)


def test_a_stream_that_is_dropped_before_its_first_output_leaves_nothing() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        engine.stream("the")
        assert_nothing_is_left(engine)


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_a_stream_that_is_closed_leaves_nothing_and_is_at_its_end(num_read: int) -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        stream = engine.stream("the", SamplingParams(n=2, max_new_tokens=5))
        for _ in range(num_read):
            next(stream)
        stream.close()
        assert_nothing_is_left(engine)
        assert [] == list(stream)


def test_a_stream_that_is_found_dropped_in_the_middle_of_a_verb_ends_when_that_is_done() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        circle: list[Any] = [engine.stream("the")]
        circle.append(circle)
        del circle
        # Wherever the collector runs in these verbs, the engine's state is consistent.
        thresholds = gc.get_threshold()
        gc.set_threshold(1)
        try:
            outputs = engine.generate(["the qui", "the"], SamplingParams(max_new_tokens=3))
        finally:
            gc.set_threshold(*thresholds)
        gc.collect()
        assert ["ck ", " qu"] == [output.text for output in outputs]
        assert_nothing_is_left(engine)


def test_a_stream_whose_request_step_has_reported_does_not_take_another_one_of_its_id() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        stream = engine.stream("the", SamplingParams(max_new_tokens=1))
        (output,) = engine.step()
        engine.add_request("the q", SamplingParams(max_new_tokens=2), output.request_id)
        assert [] == list(stream)
        del stream
        assert ["u", "i"] == [engine.step()[0].new_text for _ in range(2)]


def test_a_stream_is_refused_at_once() -> None:
    with ScriptedModel(SCRIPT).engine() as engine, pytest.raises(RequestError, match="the prompt is empty"):
        engine.stream("")


def test_a_stream_can_be_read_on_after_a_step_that_failed_for_others() -> None:
    model = ScriptedModel(SCRIPT)

    def spoil(last: Any, logits: Any) -> None:
        if ord("!") in last.tolist():
            raise ValueError("out of luck")

    model.spoil = spoil
    with model.engine(max_num_seqs=1) as engine:
        engine.add_request("a!")
        stream = engine.stream("the", SamplingParams(max_new_tokens=6))
        with pytest.raises(ValueError, match="out of luck"):
            next(stream)
        assert " quick" == [output.text for output in stream][-1]
