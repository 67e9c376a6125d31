"""Try to find out, by timing, what another tenant asked for: across salts, where it must fail, and within one.

The README of benchmarks says how.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from kvframe_transformers.testing import save_tiny

from benchmarks.cache.kvframe_core import plan_of
from benchmarks.cache.salts_statistics import tell_apart
from benchmarks.cache.setting import Setting
from benchmarks.harness import options
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.record import benchmark, progress
from kvframe import Engine, SamplingParams, Stack
from kvframe.cache.manager import KVCacheManager

SEED, VOCABULARY = 7, 128
LOOKUP_TOKENS, REQUEST_TOKENS = 2048, 480
QUEUED_TOKENS = 64
"""Of prompts in the same queue: short ones, of whose time the step that one waits for the other is the greater part."""
ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)
MINE, THEIRS = "mine", "theirs"

THEIR_SALT = "their salt"
KINDS = (
    "another prompt, their salt",
    "the same prompt, their salt",
    "another prompt, my salt",
    "the same prompt, my salt",
)
"""What came before the prompt that is timed. By the first two, the other tenant is to be found out; by the others, the
benchmark itself."""

Times = dict[str, list[int]]
"""By kind, in nanoseconds of processor time."""


@attrs.frozen
class Trial:
    """One prompt, and what came before it.

    Attributes:
        kind: What came before.
        mine: The prompt that is timed.
        before: The prompt before it, with no object in common.
        salt: The salt of the one before.
    """

    kind: str
    mine: array[int]
    before: array[int]
    salt: str


def trials(num_each: int, num_tokens: int, chance: random.Random) -> list[Trial]:
    """Return so many trials of each kind of two salts, and fewer of one, mixed, no two with the same prompt."""
    kinds = [kind for kind in KINDS for _ in range(num_each if kind.endswith(THEIR_SALT) else max(2, num_each // 3))]
    chance.shuffle(kinds)
    made = []
    for kind in kinds:
        drawn, other = (chance.choices(range(VOCABULARY), k=num_tokens) for _ in range(2))
        # Made alike, so that where a prompt lies in memory does not tell its kind.
        mine, before = array("I", drawn), array("I", drawn if kind.startswith("the same") else other)
        made.append(Trial(kind, mine, before, MINE if kind.endswith("my salt") else THEIRS))
    return made


def time_lookups(chosen: list[Trial], advance: Callable[[int], None]) -> Times:
    """Time ``KVCacheManager.start`` of each prompt after the one before it was computed and let go."""
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


def first_tokens(engine: Engine, chosen: list[Trial], is_beside: bool, advance: Callable[[int], None]) -> Times:
    """Time each prompt to its first token.

    Args:
        engine: With a model.
        chosen: The trials.
        is_beside: Whether the prompt before waits in the queue with it, rather than being done.
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


def judged(title: str, times: Times) -> dict[str, Any]:
    """Return a measurement with how well its times tell the same prompt from another one."""
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
    "*Right* is how often the longer of two times is that of the prompt that no tenant had asked for before: 0.5 is a "
    "guess. Times across salts must not tell; those within one salt must, or the benchmark could not."
)


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    what = (
        f": processor time, {record['lookups']:,} lookups and {record['requests']:,} requests of each kind of two "
        "salts, in random order; medians, with the 5th and 95th percentile in brackets."
    )
    parts = [heading("What times tell of other tenants' prompts", record, what), WORDS]
    for measured in record["measured"].values():
        parts += [f"## {measured['title'].capitalize()}", _times(measured), _told(measured)]
        parts.append("As it must be." if measured["as_expected"] else "**Not as it must be.**")
    return page(*parts)


def _times(measured: Mapping[str, Any]) -> str:
    rows = []
    for kind, times in measured["nanoseconds"].items():
        parts = statistics.quantiles([each / 1000 for each in times], n=20, method="inclusive")
        rows.append((kind, f"{parts[9]:,.1f} ({parts[0]:,.1f} to {parts[18]:,.1f})"))
    return table(("before it", "µs"), rows)


def _told(measured: Mapping[str, Any]) -> str:
    rows = []
    for name, words in (("across", "of two salts"), ("within", "of one salt")):
        told = measured[name]
        p_value = f"{told['p_value']:.2g}" if told["p_value"] >= 1e-12 else "below 1e-12"
        rows.append((words, f"{told['right']:.3f} ({told['low']:.3f} to {told['high']:.3f})", p_value))
    return table(("", "right (95 % interval)", "p for a guess"), rows)


def has_failed(record: Mapping[str, Any]) -> bool:
    """Return whether times across salts tell anything, or times within one tell nothing."""
    return not all(each["as_expected"] for each in record["measured"].values())


@benchmark("cache_salts", write_report, fails=has_failed)
@options.repeats(3000, flag="--lookups", least=2)
@options.repeats(2000, flag="--requests", least=2)
def main(lookups: int, requests: int) -> dict[str, Any]:
    """Time prompts that another tenant has cached, and others; write one JSON file and one page.

    The exit code is 1 if times across salts tell anything, or times within one tell nothing.
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
            after = first_tokens(engine, chosen[1], False, advance)
            beside = first_tokens(engine, chosen[2], True, advance)
    gc.enable()
    measured = {
        "lookup": judged(f"start of a prompt of {LOOKUP_TOKENS:,} tokens in the cache", of_lookups),
        "after": judged(f"first token of a prompt of {REQUEST_TOKENS} tokens, the other one done", after),
        "beside": judged(f"first token of a prompt of {QUEUED_TOKENS} tokens, the other one in the same queue", beside),
    }
    return {"lookups": lookups, "requests": requests, "measured": measured}


if __name__ == "__main__":
    main()
