"""Measure what draft tokens bring: kvframe with and without ``ngram``, beside transformers' own prompt lookup.

The README of benchmarks says how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from benchmarks.engine.serving import (
    KVFRAME,
    LOOKUP,
    NGRAM,
    TRANSFORMERS,
    Asked,
    Engines,
    load,
    serve_by_turns,
    start_servers,
)
from benchmarks.engine.stepping import Setting
from benchmarks.harness import models, options
from benchmarks.harness.pages import Column, figures, heading, medians, page
from benchmarks.harness.record import benchmark, progress, ratios

LOOKUP_TOKENS = 8
"""Tokens that both ``ngram`` and transformers' prompt lookup propose at most."""
PLAIN, WITH_NGRAM = KVFRAME, KVFRAME + NGRAM
GENERATE, WITH_LOOKUP = "transformers generate()", TRANSFORMERS + LOOKUP
SYSTEMS = (PLAIN, WITH_NGRAM, GENERATE, WITH_LOOKUP)


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


def measure(
    text: Text, engines: Engines, path: Path, batch: int, repeats: int, advance: Callable[[int], object]
) -> dict[str, Any]:
    """Let all systems take turns on the same prompts."""
    engines = {name: engine for name, engine in engines.items() if not text.temperature or name in (PLAIN, WITH_NGRAM)}
    setting = Setting(path=str(path), memory=64 << 20, max_num_seqs=64, temperature=text.temperature)
    load(engines, setting, max_drafts=LOOKUP_TOKENS)

    def ask(repeat: int) -> Asked:
        return {"prompts": text.prompts(repeat, batch), "num_new_tokens": text.num_new_tokens}

    # A number that lies at the border of two tokens may sample the other one in another batch.
    are_equal = not text.temperature
    served = serve_by_turns(f"{text.name}, {batch}", engines, repeats, ask, advance, are_equal=are_equal)
    num_tokens = batch * text.num_new_tokens
    seconds = {name: [each["seconds"] for each in rounds] for name, rounds in served.items()}
    return {
        "tokens_per_second": {name: [num_tokens / took for took in times] for name, times in seconds.items()},
        "times_as_fast": {
            name: ratios(times, seconds[WITH_NGRAM]) for name, times in seconds.items() if name != WITH_NGRAM
        },
        **{name: served[WITH_NGRAM][-1][name] for name in ("draft_tokens", "accepted_draft_tokens")},
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
        rows = {
            batch: {
                "ngram": measured["tokens_per_second"][WITH_NGRAM],
                **measured["times_as_fast"],
                "accepted": f"{measured['accepted_draft_tokens'] / max(1, measured['draft_tokens']):.0%} of "
                f"{measured['draft_tokens']:,}",
            }
            for batch, measured in batches.items()
        }
        peers = [name for name in SYSTEMS if name in next(iter(rows.values()))]
        columns: dict[str, Column] = {
            "ngram": ("ngram, tokens/s", "{:,.0f}"),
            **{name: (f"times as fast as {name}", "{:.2f}") for name in peers},
        }
        parts.append(figures(rows, {**columns, "accepted": ("drafts accepted", "{}")}, "requests"))
    return page(*parts)


@benchmark("drafts", write_report)
@options.repeats(7)
@options.threads(1)
@options.choose("--text", "texts", TEXTS)
def main(repeats: int, threads: int, texts: Sequence[Text]) -> dict[str, Any]:
    """Measure texts that repeat themselves and texts that do not, at several numbers of requests."""
    found: dict[str, Any] = {}
    with (
        start_servers(SYSTEMS, threads) as engines,
        progress("measuring", len(texts) * len(BATCHES) * (repeats + 1)) as advance,
    ):
        for text in texts:
            path = models.path_of("bench-llama-tiny" if text is TINY else "demo")
            found[text.name] = {str(each): measure(text, engines, path, each, repeats, advance) for each in BATCHES}
    return {"repeats": repeats, "texts": found}


if __name__ == "__main__":
    main()
