"""What tests of steps that overlap share: a simulated device, what requests ask for, and calls at random."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvframe_engine.engine import Engine
from kvframe_engine.requests.output import RequestOutput
from kvframe_engine.requests.params import SamplingParams
from kvframe_engine.running.launched_steps import HostCopy
from kvframe_engine.running.model_runner import TokenRunner

from tests.support.engines import runner_of

EXTRAS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "logprobs": True, "top_logprobs": 3},
    {},
    {"no_repeat_ngram_size": 2, "prompt_logprobs": True, "top_logprobs": 2},
    {"no_repeat_ngram_size": 1, "bad_words_ids": [[5], [7, 9]], "logit_bias": {3: 2.0}},
    {"logprobs": True, "prompt_logprobs": True},
    {"min_new_tokens": 20, "begin_suppress_tokens": [1, 2], "suppress_tokens": [4], "min_p": 0.05},
    {"frequency_penalty": -1.5, "no_repeat_ngram_size": 3, "top_p": 0.8},
]
"""What requests ask for beside their next tokens."""


class DeviceQueue:
    """A device with a queue and a thread of its own. It begins a step after a time, or when the host waits for it.

    Attributes:
        num_queued: Steps that are queued or being computed.
        queued_at_wait: For each wait of the host, how many steps were queued when it began.
        interrupted_step: The number of the step, from 0, at whose beginning it sends SIGINT; None for no step.
    """

    interrupted_step: int | None = None

    def __init__(self, seconds: float | None = 0.002) -> None:
        self.num_queued = 0
        self.queued_at_wait: list[int] = []
        self._num_begun = 0
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1)
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], HostCopy]) -> _Queued:
        with self._lock:
            self.num_queued += 1
        is_waited_for = threading.Event()
        return _Queued(self, is_waited_for, self._thread.submit(self._compute, work, is_waited_for))

    def _compute(self, work: Callable[[], HostCopy], is_waited_for: threading.Event) -> HostCopy:
        is_waited_for.wait(self._seconds)
        if self._num_begun == self.interrupted_step:
            signal.raise_signal(signal.SIGINT)
        self._num_begun += 1
        try:
            return work()
        finally:
            with self._lock:
                self.num_queued -= 1


class _Queued:
    def __init__(self, queue: DeviceQueue, is_waited_for: threading.Event, future: Future[HostCopy]) -> None:
        self._queue, self._is_waited_for, self._future = queue, is_waited_for, future

    def result(self) -> HostCopy:
        if not self._is_waited_for.is_set():
            self._queue.queued_at_wait.append(self._queue.num_queued)
            self._is_waited_for.set()
        return self._future.result()


def on_queue(engine: Engine, seconds: float | None = 0.002) -> DeviceQueue:
    """Give an engine's steps to a device with a queue of its own.

    Args:
        engine: The engine.
        seconds: After how long the device begins a step at the latest; None if it begins when the host waits for it.
    """
    queue, runner = DeviceQueue(seconds), runner_of(engine)
    assert isinstance(runner, TokenRunner)
    submit = runner.submit
    runner.submit = lambda work: queue.submit(lambda: submit(work).result())
    return queue


def call_at_random(
    engine: Engine,
    seed: int,
    prompt_of: Callable[[int], Any],
    extras: Sequence[dict[str, Any]],
    stop: Sequence[str],
    memories: Sequence[int | str],
    num_calls: int = 24,
) -> Iterator[RequestOutput]:
    """Call an engine's verbs at random until its requests have ended, and yield their last outputs.

    Args:
        engine: The engine.
        seed: Of the random numbers.
        prompt_of: Returns the prompt of a length from 1 to 20.
        extras: What requests may ask for beside their next tokens.
        stop: Strings that may end them.
        memories: The sizes that its cache may get.
        num_calls: How many verbs are called, beside the steps that follow.
    """
    draw, names = random.Random(seed), []
    for number in range(num_calls):
        call = draw.choice(["add", "add", "step", "step", "step", "abort", "reset", "pin", "resize"])
        if call == "add":
            names.append(f"request {number}")
            params = SamplingParams(
                max_new_tokens=draw.randint(1, 12),
                n=draw.choice([1, 1, 2]),
                stop=draw.choice([(), *stop]),
                **draw.choice(extras),
            )
            owner = draw.choice(["", "", "other"])
            engine.add_request(prompt_of(draw.randint(1, 20)), params, names[-1], owner=owner)
        elif call == "abort" and names:
            engine.abort(draw.choice(names))
        elif call == "reset":
            engine.reset_prefix_cache()
        elif call == "pin":
            engine.unpin(engine.pin_prefix(prompt_of(draw.randint(4, 16))))
        elif call == "resize":
            engine.resize_cache(draw.choice(memories))
        yield from _ends_of_step(engine)
    while engine.has_unfinished:
        yield from _ends_of_step(engine)


def _ends_of_step(engine: Engine) -> list[RequestOutput]:
    outputs = engine.step() if engine.has_unfinished else []
    return [output for output in outputs if output.finish_reason is not None]
