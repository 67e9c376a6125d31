"""The cases that a cache core is measured on: the work and the sides. No package is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.cache.setting import Setting, Side, hybrid, sides
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


def decode_setting(work: Decode, windows: tuple[int | None, ...] = (None,), **options: Any) -> Setting:
    """Return how a core is set up for decode steps."""
    limits = {"max_num_seqs": work.num_requests + 1, "max_model_len": work.length + 2048}
    return Setting(**{"windows": windows, "num_blocks": 262_145, **limits, **options})


def _decode(name: str, title: str, work: Decode, aim: float | None = None, **options: Any) -> Case:
    setting = decode_setting(work, **options)
    return Case(name, f"Decode step, {title}", work, sides(setting, forced=len(setting.windows) > 1, each=True), aim)


def _pass(name: str, title: str, aim: float, work: Pass, **options: Any) -> Case:
    return Case(name, title, work, sides(Setting(**options)), aim)


def _look_up(name: str, title: str, aim: float, work: LookUp, **options: Any) -> Case:
    setting = Setting(**options)
    return Case(name, f"Prefix lookup{title}", work, sides(setting, forced=len(setting.windows) > 1), aim)


def _worst(name: str, title: str, work: Turns | Chain | Lockstep | FarState) -> Case:
    return Case(name, title, work, sides(work.make_setting()), AT_MOST_TWICE)


def _turns(number: int) -> Case:
    title = f"Slowest decode step of a conversation after {number} turns with reasoning"
    return _worst(f"turns-{number}", title, Turns(num_turns=number))


def _chain(name: str, work: Chain) -> Case:
    title = f"Slowest step among {work.depth:,} branches of one chain, {work.chunk:,} tokens a step"
    return _worst(name, title, work)


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
    return (
        _decode("decode-256x1", "256 requests, full attention", steps, 20),
        _decode("decode-256x6", f"256 requests, {of_six}", steps, 40, windows=six),
        _decode("decode-32x41", "32 requests, 40 layers with windows and 1 full", fewer, 40, windows=hybrid(40)),
        _decode(
            "decode-256x41",
            "256 requests of 512 tokens, 40 layers with windows of 256 and 1 full",
            shorter,
            windows=hybrid(40, 256),
            num_blocks=655_361,
        ),
        _decode(
            "decode-256-state",
            "256 requests, one layer of full attention and one with a recurrent state",
            steps,
            20,
            num_states=1,
        ),
        _decode(
            "decode-256-no-mask",
            "256 requests, one layer with a window that only its live ranges say",
            steps,
            20,
            windows=(1024,),
            has_masks=False,
        ),
        _pass("pass-uncached", "2,048 tokens, caching off", 5, passing, caching=False),
        _pass("pass-cached", "2,048 tokens, caching on", 8, stays),
        _pass("pass-evicting", "2,048 tokens, every block evicts another", 7, evicts, num_blocks=8_193),
        _look_up("hit-1", f"{full}, full attention", 20, hit),
        _look_up("hit-6", f"{full}, {of_six}", 20, hit, windows=six),
        _look_up("miss-1", f"{nothing}, full attention", 1, miss),
        _look_up("miss-6", f"{nothing}, {of_six}", 1, miss, windows=six),
        _look_up("miss-long", of_long, 1, long, windows=(1024,), max_model_len=262_144),
        Case("keys", "Prefix keys of 8,192 tokens", Keys(length=8192), sides(Setting(num_blocks=257)), 5),
        Case(
            "build",
            "Build a pool of 131,073 blocks",
            Build(length=2048),
            sides(Setting(num_blocks=131_073, max_num_seqs=1, max_model_len=4096)),
            10,
        ),
        *(_turns(number) for number in (25, 100, 300)),
        _chain("chain-500", Chain(depth=500)),
        _chain("chain-4000", Chain(depth=4000, length=16_384)),
        _chain("chain-4000-blocks", Chain(depth=4000, length=4096, chunk=16)),
        _worst("lockstep", "Step of 8 identical prompts of 131,072 tokens", Lockstep(length=131_072)),
        _worst(
            "far-state",
            "Prefix lookup of 131,072 tokens, the nearest state after 2,048",
            FarState(length=131_072),
        ),
    )


def tiny_cases() -> tuple[Case, ...]:
    """Return cases to try the script on, not to measure."""
    windows = hybrid(2, 32)
    steps = Decode(length=64, num_requests=4, num_cycles=1)
    passing = Pass(length=64, num_calls=3, num_before=32)
    hit = LookUp(length=64, num_prompts=2, num_calls=2)
    miss = dataclasses.replace(hit, is_hit=False)
    return (
        _decode("tiny-decode", "tiny", steps, windows=windows, num_blocks=1024),
        _decode("tiny-state", "tiny", steps, num_states=1, num_blocks=1024),
        _decode("tiny-no-mask", "tiny", steps, windows=(32,), has_masks=False, num_blocks=1024),
        _pass("tiny-pass", "Pass", 1, passing, num_blocks=65),
        _pass("tiny-pass-uncached", "Pass, caching off", 1, passing, caching=False, num_blocks=65),
        _look_up("tiny-hit", ", tiny", 1, hit, windows=windows, num_blocks=257),
        _look_up("tiny-miss", ", tiny", 1, miss, windows=windows, num_blocks=257),
        Case("tiny-keys", "Keys", Keys(length=64), sides(Setting(num_blocks=257))),
        Case("tiny-build", "Build", Build(length=256), sides(Setting(num_blocks=257))),
        _worst("tiny-turns", "Turns", Turns(num_turns=32, length=16, reasoned=32, answered=16, window=128)),
        _worst("tiny-chain", "Chain", Chain(depth=8, length=64, chunk=32, window=32)),
        _worst("tiny-lockstep", "Lockstep", Lockstep(length=64, num_requests=2, chunk=16)),
        _worst("tiny-far-state", "State", FarState(length=128, first=64, chunk=32, num_calls=1)),
    )
