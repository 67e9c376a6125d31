"""Try to find out, by timing, which prompts another tenant sent: across salts, where it must fail, and within one.

See benchmarks/README.md.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from kvframe_transformers.testing import save_tiny

from benchmarks.cache.kvframe_core import plan_of
from benchmarks.cache.setting import Setting
from benchmarks.harness import options
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.record import benchmark, progress
from kvframe import Engine, SamplingParams, Stack
from kvframe.cache.manager import KVCacheManager

SEED, VOCABULARY = 7, 128
LOOKUP_TOKENS, REQUEST_TOKENS = 2048, 480
QUEUED_TOKENS = 64
"""Tokens of prompts in the same queue. They are short, so that most of their time is the step that one waits."""
ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)
MINE, THEIRS = "mine", "theirs"

THEIR_SALT = "their salt"
KINDS = (
    "another prompt, their salt",
    "the same prompt, their salt",
    "another prompt, my salt",
    "the same prompt, my salt",
)
"""The kinds of the prompt before the timed one. The times of the first two must not differ; those of the last two must,
or the benchmark could not see a difference."""

Times = dict[str, list[int]]
"""By kind, processor time in nanoseconds."""

Z = 1.96
"""Standard errors on each side of a 95 % interval."""
TOLERANCE = 0.05
"""The times are a guess if the whole interval is this near to one half."""


@attrs.frozen
class Trial:
    """A timed prompt, and the prompt before it.

    Attributes:
        kind: The kind of the prompt before.
        mine: The timed prompt.
        before: The prompt before; the two share no Python object.
        salt: The salt of the prompt before.
    """

    kind: str
    mine: array[int]
    before: array[int]
    salt: str


def trials(num_each: int, num_tokens: int, chance: random.Random) -> list[Trial]:
    """Return ``num_each`` trials of each kind with two salts, and a third as many of the others, in random order."""
    kinds = [kind for kind in KINDS for _ in range(num_each if kind.endswith(THEIR_SALT) else max(2, num_each // 3))]
    chance.shuffle(kinds)
    made = []
    for kind in kinds:
        drawn, other = (chance.choices(range(VOCABULARY), k=num_tokens) for _ in range(2))
        # All prompts are made alike, so that a prompt's place in memory does not tell its kind.
        mine, before = array("I", drawn), array("I", drawn if kind.startswith("the same") else other)
        made.append(Trial(kind, mine, before, MINE if kind.endswith("my salt") else THEIRS))
    return made


def time_lookups(chosen: list[Trial], advance: Callable[[int], object]) -> Times:
    """Time ``KVCacheManager.start`` of each prompt after the prompt before it was computed and has ended."""
    setting = Setting(windows=(None, 1024), num_blocks=1025, max_num_seqs=4, max_model_len=LOOKUP_TOKENS + 64)
    manager = KVCacheManager(plan_of(setting), max_num_seqs=4)
    found: Times = {kind: [] for kind in KINDS}
    for trial in chosen:
        manager.reset_prefix_cache()
        manager.start("before", trial.before, salt=trial.salt)
        if not manager.extend("before", len(trial.before)):
            raise RuntimeError("the pool is too small")
        manager.commit("before", trial.before, len(trial.before))
        manager.free("before")
        start = time.thread_time_ns()
        manager.start("mine", trial.mine, salt=MINE)
        found[trial.kind].append(time.thread_time_ns() - start)
        manager.free("mine")
        advance(1)
    return found


def time_first_tokens(engine: Engine, chosen: list[Trial], is_beside: bool, advance: Callable[[int], object]) -> Times:
    """Time each prompt to its first token.

    Args:
        engine: An engine.
        chosen: The trials.
        is_beside: Whether the prompt before waits in the same queue; otherwise it has ended.
        advance: Called with 1 after each trial.
    """
    found: Times = {kind: [] for kind in KINDS}
    for trial in chosen:
        engine.reset_prefix_cache()
        engine.add_request(trial.before, ONE_TOKEN, cache_salt=trial.salt)
        while engine.has_unfinished and not is_beside:
            engine.step()
        start = time.thread_time_ns()
        mine = engine.add_request(trial.mine, ONE_TOKEN, cache_salt=MINE)
        while mine not in [output.request_id for output in engine.step()]:
            pass
        found[trial.kind].append(time.thread_time_ns() - start)
        while engine.has_unfinished:
            engine.step()
        advance(1)
    return found


@attrs.frozen
class Telling:
    """How well one time tells from which of two sets it is.

    Attributes:
        right: Over all pairs of one time of each set, the share in which the longer time is of the first set; ties
            count half. 0.5 is a guess, 1 or 0 certainty. (It is the area under the curve of Mann and Whitney, 1947.)
        low: The lower end of its 95 % interval.
        high: The upper end of its 95 % interval.
    """

    right: float
    low: float
    high: float

    @property
    def is_guessing(self) -> bool:
        """Whether the whole interval is within the tolerance of one half."""
        return self.low > 0.5 - TOLERANCE and self.high < 0.5 + TOLERANCE

    @property
    def is_telling(self) -> bool:
        """Whether at least three of four pairs are told apart, with the whole interval."""
        return max(self.low, 1 - self.high) > 0.75


def tell_apart(first: Sequence[float], second: Sequence[float]) -> Telling:
    """Compare two sets of times by their ranks; the interval is that of Hanley and McNeil (1982)."""
    m, n = len(first), len(second)
    _, places, counts = np.unique([*first, *second], return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    right = float((ranks[:m].sum() - m * (m + 1) / 2) / (m * n))
    q1, q2 = right / (2 - right), 2 * right**2 / (1 + right)
    variance = right * (1 - right) + (m - 1) * (q1 - right**2) + (n - 1) * (q2 - right**2)
    error = math.sqrt(max(variance, 0.0) / (m * n))
    return Telling(right, max(0.0, right - Z * error), min(1.0, right + Z * error))


def judged(title: str, times: Times) -> dict[str, Any]:
    """Return the record of one measurement: its times, and how well they tell the same prompt from another one."""
    other, same, own_other, own_same = (times[kind] for kind in KINDS)
    across, within = tell_apart(other, same), tell_apart(own_other, own_same)
    return {
        "title": title,
        "nanoseconds": times,
        "across": attrs.asdict(across),
        "within": attrs.asdict(within),
        "as_expected": across.is_guessing and within.is_telling,
    }


WORDS = (
    "One tenant's prompt is timed after, or beside, another prompt: the same one, or another one of the same length. "
    "*Right* is how often the longer of two times is that of the prompt that no tenant had sent before: 0.5 is a "
    "guess. Times across salts must not tell; those within one salt must, or the benchmark could not see a difference."
)


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    what = (
        f": processor time, {record['lookups']:,} lookups and {record['requests']:,} requests of each kind of two "
        "salts, in random order; medians, with the 5th and 95th percentile in brackets."
    )
    parts = [heading("What times tell of other tenants' prompts", record, what), WORDS]
    for measured in record["measured"].values():
        parts += [f"## {measured['title'].capitalize()}", *_section(measured)]
    return page(*parts)


def _section(measured: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for kind, times in measured["nanoseconds"].items():
        parts = statistics.quantiles([each / 1000 for each in times], n=20, method="inclusive")
        rows.append((kind, f"{parts[9]:,.1f} ({parts[0]:,.1f} to {parts[18]:,.1f})"))
    yield table(("before it", "µs"), rows)
    told = {"of two salts": measured["across"], "of one salt": measured["within"]}
    cells = ((words, f"{each['right']:.3f} ({each['low']:.3f} to {each['high']:.3f})") for words, each in told.items())
    yield table(("", "right (95 % interval)"), cells)
    yield "As it must be." if measured["as_expected"] else "**Not as it must be.**"


def has_failed(record: Mapping[str, Any]) -> bool:
    """Return whether times across salts tell something, or times within one salt tell nothing."""
    return not all(each["as_expected"] for each in record["measured"].values())


@benchmark("cache_salts", write_report, fails=has_failed)
@options.repeats(3000, flag="--lookups", least=2)
@options.repeats(2000, flag="--requests", least=2)
def main(lookups: int, requests: int) -> dict[str, Any]:
    """Time prompts that another tenant has cached, and others; write one JSON file and one page.

    The exit code is 1 if times across salts tell something, or times within one salt tell nothing.
    """
    chance = random.Random(SEED)
    stack = Stack.from_mapping({"cache": {"memory": "4MiB"}, "engine": {"max_model_len": REQUEST_TOKENS + 16}})
    sizes = ((lookups, LOOKUP_TOKENS), (requests, REQUEST_TOKENS), (requests, QUEUED_TOKENS))
    chosen = [trials(count, num_tokens, chance) for count, num_tokens in sizes]
    gc.disable()
    with tempfile.TemporaryDirectory() as folder, progress("timing", sum(map(len, chosen))) as advance:
        of_lookups = time_lookups(chosen[0], advance)
        save_tiny(folder, "llama")
        with Engine.from_pretrained(folder, stack=stack) as engine:
            after = time_first_tokens(engine, chosen[1], False, advance)
            beside = time_first_tokens(engine, chosen[2], True, advance)
    gc.enable()
    measured = {
        "lookup": judged(f"start of a prompt of {LOOKUP_TOKENS:,} tokens in the cache", of_lookups),
        "after": judged(f"first token of a prompt of {REQUEST_TOKENS} tokens, the other one done", after),
        "beside": judged(f"first token of a prompt of {QUEUED_TOKENS} tokens, the other one in the same queue", beside),
    }
    return {"lookups": lookups, "requests": requests, "measured": measured}


if __name__ == "__main__":
    main()
