"""Measure what events cost a decode step of the cache manager. See benchmarks/README.md."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from benchmarks.cache.kvframe_core import KVFrame
from benchmarks.cache.setting import BLOCK_SIZE, Setting, hybrid
from benchmarks.cache.work import CHUNK, Client, expect
from benchmarks.harness import options
from benchmarks.harness.pages import Column, case_page, figures
from benchmarks.harness.record import benchmark, by_turns, counted, in_columns, measure_each, ratios

NONE, EVENTS = "no events", "events"
BETWEEN, FULL, ALL = "no block full", "all requests fill a block", "16 steps"


@attrs.frozen
class Case:
    """Requests that decode, and the windows of a model's layers."""

    name: str
    words: str
    num_requests: int
    length: int
    windows: tuple[int | None, ...]


CASES = (
    Case("full-64", "64 requests of 2,048 tokens, full attention", 64, 2_048, (None,)),
    Case("full-256", "256 requests of 2,048 tokens, full attention", 256, 2_048, (None,)),
    Case("windows-64", "64 requests of 2,048 tokens, 5 layers with windows and 1 full", 64, 2_048, hybrid(5)),
    Case("tiny", "2 requests of 64 tokens", 2, 64, (None,)),
)


class Requests:
    """Requests that decode in one cache manager, all at the end of a block; events are taken after each step."""

    def __init__(self, case: Case, *, has_events: bool) -> None:
        """Compute the prompts."""
        setting = Setting(
            windows=case.windows, max_num_seqs=case.num_requests + 1, max_model_len=2 * case.length + 8 * CHUNK
        )
        self._core = KVFrame()
        self._client = Client(self._core, setting)
        self._num_requests = case.num_requests
        prompts = [self._core.prepare(self._client.draw(case.length)) for _ in range(case.num_requests)]
        for prompt in prompts:
            self._core.compute(prompt, CHUNK)
        self._core.generate_from(prompts)
        self._take = self._core.record_events() if has_events else None
        if self._take is not None:
            self._take()  # the first events are all that is cached

    def decode_block(self) -> dict[str, float]:
        """Decode a block of each request; return the processor seconds of a step, by what happens in it.

        Of the steps that fill no block it is the median: the first one begins blocks, and takes longer.
        """
        steps = [self._client.draw(self._num_requests) for _ in range(BLOCK_SIZE)]
        seconds, num_events = [], []
        for tokens in steps:
            start = time.thread_time()
            self._core.step(tokens)
            events = () if self._take is None else self._take()
            seconds.append(time.thread_time() - start)
            num_events.append(len(events))
        if self._take is not None:
            expect([0] * (BLOCK_SIZE - 1), num_events[:-1], "events while no block is full")
            expect(True, num_events[-1] >= self._num_requests, "events when all requests fill a block")
        *between, full = seconds
        return {BETWEEN: statistics.median(between), FULL: full, ALL: sum(seconds) / len(seconds)}


def measure(case: Case, rounds: int, advance: Any) -> dict[str, Any]:
    """Let managers with and without events take turns; return the figures."""
    sides = {NONE: Requests(case, has_events=False), EVENTS: Requests(case, has_events=True)}
    turns = counted(by_turns([*sides], rounds, lambda side, _: sides[side].decode_block(), advance, warm_up=True))
    seconds = {side: in_columns(rows) for side, rows in turns.items()}
    return {
        "words": case.words,
        "steps": {
            kind: {
                NONE: seconds[NONE][kind],
                EVENTS: seconds[EVENTS][kind],
                "times": ratios(seconds[EVENTS][kind], seconds[NONE][kind]),
            }
            for kind in (BETWEEN, FULL, ALL)
        },
    }


def _section(case: Mapping[str, Any]) -> tuple[str, ...]:
    columns: dict[str, Column] = {
        NONE: (f"{NONE}, µs", "{:,.1f}", 1e6),
        EVENTS: (f"{EVENTS}, µs", "{:,.1f}", 1e6),
        "times": ("times as long", "{:.2f}"),
    }
    return f"{case['words']}.", figures(case["steps"], columns, "a step")


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = "Processor time of a step of the cache manager; blocks of 16 tokens. Events are taken after each step."
    return case_page("What cache events cost", record, "cases", _section, note)


@benchmark("event_costs", write_report, cases="cases")
@options.repeats(21, flag="--rounds")
@options.choose("--case", "cases", CASES)
def main(rounds: int, cases: Sequence[Case]) -> dict[str, Any]:
    """Measure decode steps with and without events; write one JSON file and one page."""
    results = measure_each(cases, rounds, lambda case, advance: measure(case, rounds, advance))
    return {"repeats": rounds, "cases": results}


if __name__ == "__main__":
    main()
