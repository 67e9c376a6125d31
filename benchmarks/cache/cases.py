"""The cases that a cache core is measured on: the work and the sides. No package is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.cache.setting import Side, hybrid, sides
from benchmarks.cache.work import Build, Decode, Keys, LookUp, Pass, Work
from benchmarks.cache.worst_work import Chain, FarState, Lockstep, Turns

WORKS: dict[str, type[Work]] = {
    kind.__name__: kind for kind in (Decode, Pass, LookUp, Keys, Build, Turns, Chain, Lockstep, FarState)
}
AT_MOST_TWICE = 0.5
"""The aim of the cases that could be slow: none takes more than twice the time of vLLM's."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A piece of work, and who does it.

    Attributes:
        name: For the command line and the record.
        title: For the page.
        work: What is done.
        sides: The cores that do it; the others are compared with the first.
        aim: How many times as fast as the first kvframe is to be; None for no aim.
    """

    name: str
    title: str
    work: Work
    sides: tuple[Side, ...]
    aim: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the case as plain values."""
        return {
            "name": self.name,
            "title": self.title,
            "words": self.work.words,
            "work": type(self.work).__name__,
            "sizes": dataclasses.asdict(self.work),
            "sides": [dataclasses.asdict(side) for side in self.sides],
            "aim": self.aim,
        }


def _case(name: str, title: str, work: Work, aim: float | None = None, **options: Any) -> Case:
    """Return a case; a model of several layers is also given as many groups, and steps are also taken one by one."""
    forced = len(options.get("windows", ())) > 1
    return Case(
        name, title, work, sides(work.make_setting(**options), forced=forced, each=isinstance(work, Decode)), aim
    )


def standard_cases() -> tuple[Case, ...]:
    """Return what is measured by default."""
    six, of_six = hybrid(5), "5 layers with windows and 1 full"
    steps = Decode(length=2048, num_requests=256, num_cycles=4)
    fewer = dataclasses.replace(steps, num_requests=32)
    shorter = dataclasses.replace(steps, length=512, num_cycles=2)
    passing, hit = Pass(length=2048), LookUp(length=8192)
    miss = dataclasses.replace(hit, is_hit=False)
    stays = dataclasses.replace(passing, what_stays="; its blocks stay findable. No block is evicted.")
    evicts = dataclasses.replace(
        passing,
        num_before=80,
        what_stays="; its blocks stay findable, and each of them takes the place of one that was.",
    )
    long = LookUp(length=131_072, is_hit=False, num_prompts=0, num_calls=4)
    of_long = " of 131,072 tokens, nothing cached, one layer with a window"
    full, nothing = ", 8,192 tokens cached", ", nothing cached"
    turns = "Slowest decode step of a conversation after {} turns with reasoning"
    branches = "Slowest step among {:,} branches of one chain, {:,} tokens a step"
    chains = {
        "chain-500": Chain(depth=500),
        "chain-4000": Chain(depth=4000, length=16_384),
        "chain-4000-blocks": Chain(depth=4000, length=4096, chunk=16),
    }
    few = {"num_blocks": 131_073, "max_num_seqs": 1, "max_model_len": 4096}
    return (
        _case("decode-256x1", "Decode step, 256 requests, full attention", steps, 20),
        _case("decode-256x6", f"Decode step, 256 requests, {of_six}", steps, 40, windows=six),
        _case(
            "decode-32x41",
            "Decode step, 32 requests, 40 layers with windows and 1 full",
            fewer,
            40,
            windows=hybrid(40),
        ),
        _case(
            "decode-256x41",
            "Decode step, 256 requests of 512 tokens, 40 layers with windows of 256 and 1 full",
            shorter,
            windows=hybrid(40, 256),
            num_blocks=655_361,
        ),
        _case(
            "decode-256-state",
            "Decode step, 256 requests, one layer of full attention and one with a recurrent state",
            steps,
            20,
            num_states=1,
        ),
        _case(
            "decode-256-no-mask",
            "Decode step, 256 requests, one layer with a window that only its live ranges say",
            steps,
            20,
            windows=(1024,),
            has_masks=False,
        ),
        _case("pass-uncached", "2,048 tokens, caching off", passing, 5, caching=False),
        _case("pass-cached", "2,048 tokens, caching on", stays, 8),
        _case("pass-evicting", "2,048 tokens, every block evicts another", evicts, 7, num_blocks=8_193),
        _case("hit-1", f"Prefix lookup{full}, full attention", hit, 20),
        _case("hit-6", f"Prefix lookup{full}, {of_six}", hit, 20, windows=six),
        _case("miss-1", f"Prefix lookup{nothing}, full attention", miss, 1),
        _case("miss-6", f"Prefix lookup{nothing}, {of_six}", miss, 1, windows=six),
        _case("miss-long", f"Prefix lookup{of_long}", long, 1, windows=(1024,), max_model_len=262_144),
        _case("keys", "Prefix keys of 8,192 tokens", Keys(length=8192), 5, num_blocks=257),
        _case("build", "Build a pool of 131,073 blocks", Build(length=2048), 10, **few),
        *(_case(f"turns-{n}", turns.format(n), Turns(num_turns=n), AT_MOST_TWICE) for n in (25, 100, 300)),
        *(_case(n, branches.format(w.depth, w.chunk), w, AT_MOST_TWICE) for n, w in chains.items()),
        _case("lockstep", "Step of 8 identical prompts of 131,072 tokens", Lockstep(length=131_072), AT_MOST_TWICE),
        _case(
            "far-state",
            "Prefix lookup of 131,072 tokens, the nearest state after 2,048",
            FarState(length=131_072),
            AT_MOST_TWICE,
        ),
    )


def tiny_cases() -> tuple[Case, ...]:
    """Return cases to try the script on, not to measure."""
    windows = hybrid(2, 32)
    steps = Decode(length=64, num_requests=4, num_cycles=1)
    passing = Pass(length=64, num_calls=3, num_before=32)
    hit = LookUp(length=64, num_prompts=2, num_calls=2)
    miss = dataclasses.replace(hit, is_hit=False)
    turns = Turns(num_turns=32, length=16, reasoned=32, answered=16, window=128)
    return (
        _case("tiny-decode", "Decode step, tiny", steps, windows=windows, num_blocks=1024),
        _case("tiny-state", "Decode step, tiny", steps, num_states=1, num_blocks=1024),
        _case("tiny-no-mask", "Decode step, tiny", steps, windows=(32,), has_masks=False, num_blocks=1024),
        _case("tiny-pass", "Pass", passing, 1, num_blocks=65),
        _case("tiny-pass-uncached", "Pass, caching off", passing, 1, caching=False, num_blocks=65),
        _case("tiny-hit", "Prefix lookup, tiny", hit, 1, windows=windows, num_blocks=257),
        _case("tiny-miss", "Prefix lookup, tiny", miss, 1, windows=windows, num_blocks=257),
        _case("tiny-keys", "Keys", Keys(length=64), num_blocks=257),
        _case("tiny-build", "Build", Build(length=256), num_blocks=257),
        _case("tiny-turns", "Turns", turns, AT_MOST_TWICE),
        _case("tiny-chain", "Chain", Chain(depth=8, length=64, chunk=32, window=32), AT_MOST_TWICE),
        _case("tiny-lockstep", "Lockstep", Lockstep(length=64, num_requests=2, chunk=16), AT_MOST_TWICE),
        _case("tiny-far-state", "State", FarState(length=128, first=64, chunk=32, num_calls=1), AT_MOST_TWICE),
    )
