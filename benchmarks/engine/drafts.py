"""Measure draft tokens: kvframe with and without them, beside transformers' two ways to draft and plain generation.

See benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from benchmarks.engine.serving import (
    ASSISTED,
    DRAFTED,
    KVFRAME,
    LOOKUP,
    NGRAM,
    TRANSFORMERS,
    Engines,
    load,
    serve_by_turns,
    setting_of,
    start_servers,
)
from benchmarks.engine.stepping import Served
from benchmarks.engine.workloads import Workload
from benchmarks.harness import models, options
from benchmarks.harness.edit_model import draw_edit
from benchmarks.harness.pages import Column, case_page, figures
from benchmarks.harness.record import benchmark, measure_each, ratios

MAX_DRAFTS = 8
"""The most draft tokens of a proposal, in every system."""
PLAIN, WITH_NGRAM, WITH_DRAFT_MODEL = KVFRAME, KVFRAME + NGRAM, KVFRAME + DRAFTED
GENERATE, WITH_LOOKUP, WITH_ASSISTANT = "transformers generate()", TRANSFORMERS + LOOKUP, TRANSFORMERS + ASSISTED
BY_LOOKUP = (PLAIN, WITH_NGRAM, GENERATE, WITH_LOOKUP)
BY_DRAFT_MODEL = (PLAIN, WITH_DRAFT_MODEL, GENERATE, WITH_ASSISTANT)
ROUNDS_OF_LOAD = 5
"""The most rounds before all systems load the model again: two equal systems differed in every round, and by another
share after they were loaded again."""
ON_LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""The variables of the systems' processes: on pages of 4 KiB, the time of a step depends more on where its data lie."""
BATCHES = (1, 8, 32)
"""The numbers of requests."""


def draw_copy(source: torch.Generator) -> torch.Tensor:
    """Return a segment and the order to copy it, as in the demo's training."""
    copy_task, num_answer = models.demo_copy_task()
    return copy_task(source)[:-num_answer]


def draw_random(source: torch.Generator) -> torch.Tensor:
    """Return random tokens; the text that the model generates after them does not repeat them."""
    return torch.randint(3, 256, (64,), generator=source)


@attrs.frozen(kw_only=True)
class Text(Workload):
    """Prompts of one kind.

    Attributes:
        systems: kvframe without drafts, kvframe with drafts, and their peers.
        aim: How many times as fast as kvframe without drafts the system with drafts has to be.
        temperature: If it is not 0, tokens are sampled. transformers is then left out, because its random numbers
            differ.
        draft_model: The draft model's name in ``harness/models.py``; empty for none.
    """

    what: str
    draw: Callable[[torch.Generator], torch.Tensor] = attrs.field(repr=False, default=draw_random)
    aim: float
    temperature: float = 0.0
    systems: tuple[str, ...] = BY_LOOKUP
    draft_model: str = ""

    @property
    def drafting(self) -> str:
        """The system of kvframe that has drafts."""
        return self.systems[1]

    def prompts(self, repeat: int, vocab_size: int) -> list[list[int]]:
        """Return the prompts of one round; rounds have different prompts."""
        source = torch.Generator().manual_seed(1000 * (1 + repeat) + self.num_prompts)
        return [self.draw(source).tolist() for _ in range(self.num_prompts)]


SIZES: dict[str, Any] = {"memory": "64MiB", "shortest": 64}
COPY: dict[str, Any] = {**SIZES, "num_new_tokens": 40, "draw": draw_copy}
TEXTS = (
    Text(name="copy", model="demo", what="the copy task of its training", aim=1.5, **COPY),
    Text(
        name="edit",
        model="bench-demo-edit",
        what="40 tokens of a file of code and the order to write them again; the model is the demo's, trained further "
        "to do so with some other identifiers, so that drafts are wrong at each of these and right between them",
        aim=1.0,
        **{**COPY, "draw": draw_edit},
    ),
    Text(
        name="sampled",
        model="demo",
        **SIZES,
        what="64 random tokens, and tokens are sampled at temperature 1.5, so that nothing repeats itself for long",
        num_new_tokens=48,
        aim=0.97,
        temperature=1.5,
        systems=(PLAIN, WITH_NGRAM),
    ),
    Text(
        name="draft-model",
        model="bench-demo-deep",
        what="the copy task; the served model is the demo's with 20 further layers that change nothing, and the draft "
        "model is the demo's, which is therefore always right: the most that a sixth of the layers can bring",
        draft_model="demo",
        aim=1.0,
        systems=BY_DRAFT_MODEL,
        **COPY,
    ),
    Text(
        name="tiny",
        model="bench-llama-tiny",
        draft_model="bench-llama-tiny",
        **SIZES,
        what="64 random tokens",
        num_new_tokens=8,
        aim=0.0,
        systems=(*BY_DRAFT_MODEL, WITH_NGRAM, WITH_LOOKUP),
    ),
)


def measure(text: Text, engines: Engines, repeats: int, advance: Callable[[int], object]) -> dict[str, Any]:
    """Let all systems take turns on the same prompts, for each number of requests."""
    engines = {name: engines[name] for name in text.systems}
    return {str(count): _measure(attrs.evolve(text, num_prompts=count), engines, repeats, advance) for count in BATCHES}


def _measure(text: Text, engines: Engines, repeats: int, advance: Callable[[int], object]) -> dict[str, Any]:
    setting, _ = setting_of(text, temperature=text.temperature)
    draft_model = str(models.path_of(text.draft_model)) if text.draft_model else ""
    served: dict[str, list[Served]] = {name: [] for name in engines}
    drafts = dict.fromkeys(("draft_tokens", "accepted_draft_tokens"), 0)
    for first in range(0, repeats, ROUNDS_OF_LOAD):
        load(engines, setting, max_drafts=MAX_DRAFTS, draft_model=draft_model)
        results = serve_by_turns(
            f"{text.name}, {text.num_prompts}",
            engines,
            min(ROUNDS_OF_LOAD, repeats - first),
            lambda repeat, first=first: (text.prompts(first + repeat, 0), text.num_new_tokens),  # type: ignore[misc]
            advance,
            # A random number at the border between two tokens may choose the other one in another batch.
            are_equal=not text.temperature,
        )
        for name, rounds in results.items():
            served[name] += rounds
        for name in drafts:
            drafts[name] += results[text.drafting][-1][name]
    num_tokens = text.num_prompts * text.num_new_tokens
    seconds = {name: [result["seconds"] for result in rounds] for name, rounds in served.items()}
    return {
        "tokens_per_second": {name: [num_tokens / took for took in times] for name, times in seconds.items()},
        "times_as_fast": {
            name: ratios(times, seconds[text.drafting]) for name, times in seconds.items() if name != text.drafting
        },
        **drafts,
    }


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = (
        "float32; greedy tokens of all systems are equal in every repeat. A proposal has at most "
        f"{MAX_DRAFTS} tokens. transformers drafts for one prompt at a time: it serves prompts one after the other."
    )
    names = iter(record["texts"])

    def section(batches: Mapping[str, Any]) -> Iterator[str]:
        name = next(names)
        text = next(text for text in TEXTS if text.name == name)
        yield f"Prompts are {text.what}. Aim: {text.aim} times as fast as without drafts."
        rows = {
            batch: {
                "drafts": measured["tokens_per_second"][text.drafting],
                **measured["times_as_fast"],
                "accepted": f"{measured['accepted_draft_tokens'] / max(1, measured['draft_tokens']):.0%} of "
                f"{measured['draft_tokens']:,}",
            }
            for batch, measured in batches.items()
        }
        peers = [name for name in text.systems if name != text.drafting]
        columns: dict[str, Column] = {
            "drafts": (f"{text.drafting}, tokens/s", "{:,.0f}"),
            **{name: (f"times as fast as {name}", "{:.2f}") for name in peers},
        }
        yield figures(rows, {**columns, "accepted": ("drafts accepted", "{}")}, "requests")

    return case_page("Draft tokens, by kvframe and by transformers", record, "texts", section, note)


@benchmark("drafts", write_report, cases="texts")
@options.repeats(7)
@options.threads(1)
@options.choose("--text", "texts", TEXTS)
def main(repeats: int, threads: int, texts: Sequence[Text]) -> dict[str, Any]:
    """Measure texts that repeat themselves and texts that do not, at several numbers of requests."""
    num_rounds = len(BATCHES) * (repeats + -(-repeats // ROUNDS_OF_LOAD))
    with start_servers([name for text in texts for name in text.systems], threads, variables=ON_LARGE_PAGES) as engines:
        results = measure_each(texts, num_rounds, lambda text, advance: measure(text, engines, repeats, advance))
    return {"repeats": repeats, "texts": results}


if __name__ == "__main__":
    main()
