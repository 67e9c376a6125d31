"""Ctrl-C between any two lines of the engine and its cache: no state is half changed, no output is lost or repeated.

A session first runs without interrupts, and its lines are recorded. Then it runs again for each of these lines, with an
interrupt before the line's first and before its last run: the handler of SIGINT is called there, as Python does after a
signal. Then the state of the engine is compared with what its user knows, the session continues, and its tokens must
equal those of the first run.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import kvframe_engine
import pytest
from kvframe_engine.core import STEP_FAILED
from kvframe_testing.audit import audit

import kvframe
from kvframe import Engine, RequestOutput, SamplingParams
from kvframe.cache.prefix_lookup import Pin
from kvframe.contract.errors import RequestError
from kvframe.contract.model import ModelIdentity
from tests.engine.scripted_model import ScriptedModel
from tests.support.engines import manager_of, requests_of, scheduler_of

SOURCES = (str(Path(kvframe_engine.__file__).parent), str(Path(kvframe.__file__).parent / "cache"))
OUTPUTS = str(Path(kvframe_engine.__file__).parent / "requests" / "output.py")
"""The properties of outputs, which a user reads between two calls of the engine."""
SCRIPT = "the quick brown fox jumps over the lazy dog"
TRIALS = 40
"""The number of interrupts of each session in usual runs, spread evenly; ``-m whole`` interrupts at each line."""


@pytest.fixture(autouse=True)
def _interrupts_are_handled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Python only reports an exception in a finalizer.
    monkeypatch.setattr(sys, "unraisablehook", lambda told: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Lines:
    """Counts the lines of kvframe that run, and interrupts before one of them.

    Attributes:
        ran: The lines that ran, in order: the file and the line.
        has_struck: Whether it interrupted.
    """

    def __init__(self, strike_at: int | None = None) -> None:
        self.ran: list[tuple[str, int]] = []
        self.has_struck = False
        self._strike_at = strike_at

    def __enter__(self) -> Lines:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if event == "call" and (name == OUTPUTS or not name.startswith(SOURCES)):
            return None
        if event == "line":
            if len(self.ran) == self._strike_at:
                sys.settrace(None)
                self.has_struck = True
                handler: Any = signal.getsignal(signal.SIGINT)
                handler(signal.SIGINT, frame)
                return None
            self.ran.append((name, frame.f_lineno))
        return self._trace

    def first_and_last(self) -> list[int]:
        """Return the first and the last time that each line ran."""
        first: dict[tuple[str, int], int] = {}
        last: dict[tuple[str, int], int] = {}
        for index, line in enumerate(self.ran):
            first.setdefault(line, index)
            last[line] = index
        return sorted({*first.values(), *last.values()})


@attrs.define
class User:
    """What an engine's user knows; the user repeats a verb that was interrupted.

    Attributes:
        engine: The engine.
        model: Its model.
        tokens: By request and sample, the reported tokens.
        ends: Likewise, the reported reason of its end.
        pins: The current pins.
        interrupts: The number of interrupted verbs.
    """

    engine: Engine
    model: ScriptedModel
    folder: Path
    tokens: dict[tuple[str, int], tuple[int, ...]] = attrs.field(factory=dict)
    ends: dict[tuple[str, int], str] = attrs.field(factory=dict)
    pins: list[Pin] = attrs.field(factory=list)
    interrupts: int = 0

    def add(self, name: str, prompt: str, **params: Any) -> None:
        self._do(lambda: self.engine.add_request(prompt, SamplingParams(**params), name))
        for sample in range(params.get("n", 1)):
            self.tokens[name, sample] = ()
        with pytest.raises(RequestError, match="in the engine already"):
            self._do(lambda: self.engine.add_request(prompt, request_id=name))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self._do(self.engine.step):
                self._read(output)

    def finish(self) -> None:
        while self._do(lambda: self.engine.has_unfinished):
            self.step()
        assert self.tokens.keys() == self.ends.keys()

    def abort(self, name: str) -> None:
        self._do(lambda: self.engine.abort(name))

    def stream(self, prompt: str, most: int, **params: Any) -> None:
        stream = self._do(lambda: self.engine.stream(prompt, SamplingParams(**params)))
        mine: tuple[int, ...] = ()
        for _ in range(most):
            output = self._do(lambda: next(stream))
            mine += output.new_token_ids
            assert mine == output.token_ids
            if output.error is not None:
                assert STEP_FAILED == output.error
                break
        self._do(stream.close)

    def generate(self, *prompts: str, **params: Any) -> None:
        outputs = self._do(lambda: self.engine.generate(prompts, SamplingParams(**params)))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert SCRIPT[len(prompt) :].startswith(output.text)
            assert output.text

    def pin(self, prompt: str) -> None:
        self.pins.append(self._do(lambda: self.engine.pin_prefix(prompt)))

    def unpin(self) -> None:
        self._do(lambda: self.engine.unpin(self.pins[-1]))
        self.pins.pop()

    def save(self, name: str, *prompts: str) -> None:
        saved = self._do(lambda: self.engine.save_prefixes(self.folder / name, prompts))
        assert len(prompts) == len(saved)

    def load(self, name: str) -> None:
        loaded = self._do(lambda: self.engine.load_prefixes(self.folder / name))
        assert all(each.is_cached for each in loaded)

    def close(self) -> None:
        self._do(self.engine.close)
        assert not self.model.attached

    def do(self, name: str, *arguments: Any) -> None:
        self._do(lambda: getattr(self.engine, name)(*arguments))

    def _read(self, output: RequestOutput) -> None:
        key = (output.request_id, output.sample)
        assert key not in self.ends
        self.tokens[key] += output.new_token_ids
        assert self.tokens[key] == output.token_ids
        assert output.error in (None, STEP_FAILED)
        if output.finish_reason is not None:
            self.ends[key] = output.finish_reason

    def _do(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except KeyboardInterrupt:
            self.interrupts += 1
            self.check()
        return act()

    def check(self) -> None:
        """Check that the engine holds exactly what its user knows."""
        engine = self.engine
        audit(manager_of(engine))
        assert sum(pin.is_held for pin in self.pins) == len(manager_of(engine)._pins._pins)
        going_on = {name for name, sample in self.tokens.keys() - self.ends.keys()}
        known = {request.asked_id for request in requests_of(engine).values()}
        assert engine._turns.is_closed or going_on <= known
        unknown = known - going_on
        # A stream's own request, whose id the user does not know.
        assert len(unknown) <= 1
        assert all(name.startswith("req-") for name in unknown)
        unfinished = [request for request in requests_of(engine).values() if request.finish_reason is None]
        scheduled = [*scheduler_of(engine).waiting, *scheduler_of(engine).running]
        assert sorted(map(id, unfinished)) == sorted(map(id, scheduled))


def requests(user: User) -> None:
    """Requests that are added, forked, aborted and reported; two streams; a batch."""
    user.add("a", "the", max_new_tokens=4)
    user.add("b", "the qu", n=2, max_new_tokens=3)
    user.step(2)
    user.stream("the quick", 2, max_new_tokens=4)
    user.abort("a")
    user.add("c", "the quick b", max_new_tokens=2, stop="n")
    user.step()
    user.generate("the ", "the quick brown", max_new_tokens=3)
    user.stream("the quick", 2, max_new_tokens=2)
    user.finish()


def prefixes(user: User) -> None:
    """Prefixes that are pinned, saved, loaded and reset, a listener, a cache that is resized, and the end."""
    heard: list[Any] = []
    user.do("_set_listener", heard.extend)
    user.pin("the quick brow")
    user.add("a", "the quick brown f", max_new_tokens=3)
    user.save("prefixes", "the quick brown", "the lazy")
    user.do("resize_cache", 12 * 1024)
    user.step()
    user.unpin()
    user.do("reset_prefix_cache")
    user.load("prefixes")
    user.finish()
    user.add("b", "the")
    user.close()
    del user.tokens["b", 0]


SESSIONS = {"requests": requests, "prefixes": prefixes}


class Scripted(ScriptedModel):
    """Has an identity."""

    def identity(self) -> ModelIdentity:
        return ModelIdentity(config="scripted", weights={})


def serve(session: Callable[[User], None], folder: Path, strike_at: int | None = None) -> tuple[Lines, User]:
    """Run a session, with an interrupt before a line, or without one."""
    folder.mkdir(exist_ok=True)
    model = Scripted(SCRIPT)
    user = User(model.engine(self_check=False, max_num_batched_tokens=16, max_num_seqs=3), model, folder)
    with Lines(strike_at) as lines:
        session(user)
    user.check()
    user.engine.close()
    return lines, user


@pytest.mark.parametrize(
    "spread", [pytest.param(TRIALS, id="some"), pytest.param(None, id="all", marks=pytest.mark.whole)]
)
@pytest.mark.parametrize("name", SESSIONS)
def test_an_interrupt_before_any_line_leaves_nothing_half_done(name: str, spread: int | None, tmp_path: Path) -> None:
    session = SESSIONS[name]
    lines, undisturbed = serve(session, tmp_path / "undisturbed")
    places = lines.first_and_last()
    places = places[:: 1 if spread is None else len(places) // spread]
    raised, failures = 0, []
    for strike_at in places:
        try:
            struck, user = serve(session, tmp_path / "struck", strike_at)
            assert struck.has_struck
            for key, tokens in undisturbed.tokens.items():
                failed = user.ends[key] == "error"
                assert tokens[: len(user.tokens[key])] == user.tokens[key]
                assert failed or undisturbed.ends[key] == user.ends[key]
            raised += user.interrupts
        except (Exception, KeyboardInterrupt) as error:
            path, number = lines.ran[strike_at]
            failures.append(f"{Path(path).name}:{number}: {type(error).__name__}: {error}")
    assert [] == failures, f"{len(failures)} of {len(places)}"
    # An interrupt in a finalizer is only reported.
    assert raised >= 0.9 * len(places)
