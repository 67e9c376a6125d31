"""Measure what draft tokens bring: kvframe with and without ``ngram``, beside transformers' own prompt lookup.

The README of benchmarks says how.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from benchmarks.engine.peers import load_plain
from benchmarks.harness import models, options
from benchmarks.harness.pages import heading, medians, page, spread, table
from benchmarks.harness.process import timed
from benchmarks.harness.record import benchmark, progress, ratios, rounds
from kvframe import Engine, SamplingParams, Stack

LOOKUP_TOKENS = 8
"""Tokens that both ``ngram`` and transformers' prompt lookup propose at most."""
PLAIN, NGRAM = "kvframe", "kvframe, ngram"
GENERATE, LOOKUP = "transformers generate()", "transformers, prompt lookup"
Prompts = Sequence[Sequence[int]]


@attrs.frozen(kw_only=True)
class Text:
    """Prompts of one kind for the demo's trained model.

    Attributes:
        name: For the command line and the results.
        what: The prompts, in words.
        num_new_tokens: Generated for each prompt, end tokens ignored.
        draw: Draws a prompt.
        temperature: If it is not 0, tokens are sampled, and transformers, which has other random numbers, is left out.
        aim: How many times as fast as kvframe without drafts ``ngram`` has to be.
    """

    name: str
    what: str
    num_new_tokens: int
    draw: Callable[[torch.Generator], torch.Tensor] = attrs.field(repr=False)
    aim: float
    temperature: float = 0.0

    def prompts(self, repeat: int, count: int) -> list[list[int]]:
        """Return the prompts of one repeat; no two repeats have one in common."""
        source = torch.Generator().manual_seed(1000 * (1 + repeat) + count)
        return [self.draw(source).tolist() for _ in range(count)]


def draw_copy(source: torch.Generator) -> torch.Tensor:
    """Return a segment, and the order to say it again, as in the demo's training."""
    copy_task, num_answer = models.demo_copy_task()
    return copy_task(source)[:-num_answer]


def draw_random(source: torch.Generator) -> torch.Tensor:
    """Return tokens at random: the model goes on with text that has nothing to do with them."""
    return torch.randint(3, 256, (64,), generator=source)


TINY = Text(name="tiny", what="64 random tokens", num_new_tokens=8, draw=draw_random, aim=0.0)
TEXTS = (
    Text(name="copy", what="the copy task of its training", num_new_tokens=40, draw=draw_copy, aim=1.5),
    Text(
        name="sampled",
        what="64 random tokens, and tokens are sampled at temperature 1.5, so that nothing repeats itself for long",
        num_new_tokens=48,
        draw=draw_random,
        aim=0.97,
        temperature=1.5,
    ),
    TINY,
)
BATCHES = (1, 8, 32)


def make_engine(path: Path, **engine: Any) -> Engine:
    """Return an engine with the stack's defaults but for the memory."""
    tables = {"cache": {"memory": "64MiB", "prefix_caching": False}, "engine": engine}
    return Engine.from_pretrained(path, stack=Stack.from_mapping(tables))


def measure(text: Text, path: Path, batch: int, repeats: int, advance: Callable[[int], None]) -> dict[str, Any]:
    """Run all systems on the same prompts by turns.

    Raises:
        SystemExit: Two systems generated different tokens.
    """
    plain = load_plain(path)
    drafts = {"name": "ngram", "max_drafts": LOOKUP_TOKENS}
    with make_engine(path) as without, make_engine(path, drafts=drafts) as with_drafts:
        params = SamplingParams(
            max_new_tokens=text.num_new_tokens, ignore_eos=True, temperature=text.temperature, seed=0
        )

        def serve(engine: Engine, prompts: Prompts) -> list[list[int]]:
            return [list(output.token_ids) for output in engine.generate(prompts, params)]

        def generate(prompts: Prompts, **settings: Any) -> list[list[int]]:
            # Prompt lookup takes one prompt at a time; prompts of one length need no padding.
            rows = [[prompt] for prompt in prompts] if settings else [prompts]
            found: list[list[int]] = []
            for row in rows:
                ids = torch.tensor(row)
                made = plain.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=text.num_new_tokens, **settings
                )
                found += made[:, ids.shape[1] :].tolist()
            return found

        systems: list[tuple[str, Callable[[Prompts], list[list[int]]]]] = [
            (PLAIN, lambda prompts: serve(without, prompts)),
            (NGRAM, lambda prompts: serve(with_drafts, prompts)),
            (GENERATE, generate),
            (LOOKUP, lambda prompts: generate(prompts, prompt_lookup_num_tokens=LOOKUP_TOKENS)),
        ][: 2 if text.temperature else 4]
        seconds: dict[str, list[float]] = {name: [] for name, _ in systems}
        for repeat, order in rounds(systems, repeats, warm_up=True):
            prompts = text.prompts(repeat, batch)
            outputs = {}
            for name, run in order:
                took, outputs[name] = timed(lambda: run(prompts))  # noqa: B023
                if repeat >= 0:
                    seconds[name].append(took)
            different = [name for name, tokens in outputs.items() if tokens != outputs[PLAIN]]
            # A number that lies at the border of two tokens may sample the other one in another batch.
            if different and not text.temperature:
                sys.exit(f"{text.name}, {batch}: {', '.join(different)} and {PLAIN} gave different tokens")
            advance(1)
        stats = with_drafts.stats()
    num_tokens = batch * text.num_new_tokens
    return {
        "tokens_per_second": {name: [num_tokens / took for took in times] for name, times in seconds.items()},
        "times_as_fast": {name: ratios(times, seconds[NGRAM]) for name, times in seconds.items() if name != NGRAM},
        "draft_tokens": stats.draft_tokens,
        "accepted_draft_tokens": stats.accepted_draft_tokens,
    }


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    note = (
        "float32, the demo's model; greedy tokens of all systems are equal in every repeat. "
        "transformers' prompt lookup serves one prompt after the other."
    )
    parts = [heading("Draft tokens: kvframe's ngram and transformers' prompt lookup", record, medians(record), note)]
    aims = {text.name: text.aim for text in TEXTS}
    for name, batches in record["texts"].items():
        what = next(text.what for text in TEXTS if text.name == name)
        parts.append(f"## {name}\n\nPrompts are {what}. Aim: {aims[name]} times as fast as without drafts.")
        peers = [peer for peer in (PLAIN, GENERATE, LOOKUP) if peer in next(iter(batches.values()))["times_as_fast"]]
        rows = []
        for batch, measured in batches.items():
            share = measured["accepted_draft_tokens"] / max(1, measured["draft_tokens"])
            rows.append(
                (
                    batch,
                    spread(measured["tokens_per_second"][NGRAM], "{:,.0f}"),
                    *(spread(measured["times_as_fast"][peer], "{:.2f}") for peer in peers),
                    f"{share:.0%} of {measured['draft_tokens']:,}",
                )
            )
        columns = ("requests", "ngram, tokens/s", *(f"times as fast as {each}" for each in peers))
        parts.append(table((*columns, "drafts accepted"), rows))
    return page(*parts)


@benchmark("drafts", write_report)
@options.repeats(7)
@options.threads(1)
@options.choose("--text", "texts", TEXTS)
def main(repeats: int, threads: int, texts: Sequence[Text]) -> dict[str, Any]:
    """Measure texts that repeat themselves and texts that do not, at several numbers of requests."""
    models.silence_transformers()
    found: dict[str, Any] = {}
    with progress("measuring", len(texts) * len(BATCHES) * (repeats + 1)) as advance:
        for text in texts:
            path = models.path_of("bench-llama-tiny" if text is TINY else "demo")
            found[text.name] = {str(batch): measure(text, path, batch, repeats, advance) for batch in BATCHES}
    return {"repeats": repeats, "texts": found}


if __name__ == "__main__":
    main()
