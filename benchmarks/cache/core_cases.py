"""The cases that a cache core is measured on: the work in words and sizes, and the sides. No package is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

BLOCK_SIZE = 16
VLLM, KVFRAME, MORE_GROUPS = "vLLM", "kvframe", "kvframe, as many groups"
ONE_BY_ONE = ", one by one"
WINDOW = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How a cache core is set up.

    Attributes:
        windows: For each layer, the tokens of its window; None for a layer that reads every past token. All layers have
            pages of one size.
        num_states: Layers with a recurrent state beside them. A state has the bytes of a page.
        has_masks: Whether a window says which keys a query sees (a mask), or its live ranges alone.
        num_blocks: The memory, in pages of one layer; one of them is the null page.
        caching: Whether computed blocks become findable.
        max_num_seqs: The most requests at a time.
        max_model_len: The longest request, in tokens.
        one_by_one: Whether requests of a step are handled one by one where the core can take them together.
        keeps_all: Whether a core that can choose keeps every block findable, or those only where the same prompt, come
            again, continues.
    """

    windows: tuple[int | None, ...] = (None,)
    num_states: int = 0
    has_masks: bool = True
    num_blocks: int = 131_073
    caching: bool = True
    max_num_seqs: int = 8
    max_model_len: int = 16_384
    one_by_one: bool = False
    keeps_all: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """A core that does a case's work.

    Attributes:
        name: In the results.
        engine: ``vllm`` or ``kvframe``.
        setting: Its set-up.
    """

    name: str
    engine: str
    setting: Setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A piece of work.

    Attributes:
        name: For the command line and the record.
        title: For the page.
        words: What is timed.
        work: Its class in ``cache_work``.
        sizes: Its sizes.
        sides: The cores that do it; the others are compared with the first.
        aim: How many times as fast as the first kvframe is to be; None for no aim.
    """

    name: str
    title: str
    words: str
    work: str
    sizes: Mapping[str, int]
    sides: tuple[Side, ...]
    aim: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the case as plain values."""
        return dataclasses.asdict(self)


def sides(setting: Setting, *, forced: bool = False, each: bool = False) -> tuple[Side, ...]:
    """Return the sides that do a case's work.

    Args:
        setting: The model and the memory, the same for all.
        forced: Whether kvframe also does it with windows that differ a little, so that it has a group for each layer.
        each: Whether kvframe also handles the requests of a step one by one.
    """
    settings = {KVFRAME: setting}
    if forced:
        settings[MORE_GROUPS] = dataclasses.replace(setting, windows=apart(setting.windows))
    if each:
        one_by_one = {name: dataclasses.replace(kept, one_by_one=True) for name, kept in settings.items()}
        settings = {**settings, **{name + ONE_BY_ONE: kept for name, kept in one_by_one.items()}}
    own = (Side(name=name, engine="kvframe", setting=kept) for name, kept in settings.items())
    return Side(name=VLLM, engine="vllm", setting=setting), *own


def apart(windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Return the windows, each a block longer than the one before it, so that no two layers are of one type."""
    others = [window for window in windows if window is not None]
    steps = iter(window + index * BLOCK_SIZE for index, window in enumerate(others))
    return tuple(None if window is None else next(steps) for window in windows)


def hybrid(num_windows: int, window: int = WINDOW) -> tuple[int | None, ...]:
    """Return the layers of a model with one of full attention and ``num_windows`` with windows."""
    return (None, *[window] * num_windows)


def decode(
    name: str,
    title: str,
    num_requests: int,
    windows: tuple[int | None, ...],
    *,
    length: int = 2048,
    num_cycles: int = 4,
    num_blocks: int = 262_145,
    num_states: int = 0,
    has_masks: bool = True,
    aim: float | None = None,
) -> Case:
    """Return the case of decode steps."""
    setting = Setting(
        windows=windows,
        num_states=num_states,
        has_masks=has_masks,
        num_blocks=num_blocks,
        max_num_seqs=num_requests + 1,
        max_model_len=length + 2048,
    )
    return Case(
        name=name,
        title=title,
        words=f"One step of {num_requests} requests: each gets room for one more token; then the token is noted, with "
        "its id, as computed: a block that it fills becomes findable, and a page that a window has passed is released. "
        f"Prompts have {length:,} tokens and up to 15 more, so that in every step one in 16 begins a block.",
        work="Decode",
        sizes={"num_requests": num_requests, "length": length, "num_cycles": num_cycles},
        sides=sides(setting, forced=len(windows) > 1, each=True),
        aim=aim,
    )


def _passing(name: str, title: str, words: str, aim: float, **options: Any) -> Case:
    sizes = {"length": options.pop("length", 2048), "num_calls": options.pop("num_calls", 64)}
    sizes["num_before"] = options.pop("num_before", 8)
    return Case(
        name=name,
        title=title,
        words=f"One request of {sizes['length']:,} tokens that nothing is cached of: looked up, given room for all its "
        f"tokens, noted as computed, and let go{words}",
        work="Pass",
        sizes=sizes,
        sides=sides(Setting(**options)),
        aim=aim,
    )


def _looking(
    name: str,
    title: str,
    windows: tuple[int | None, ...],
    aim: float | None,
    num_blocks: int = 131_073,
    max_model_len: int = 16_384,
    **sizes: int,
) -> Case:
    sizes = {"length": 8192, "num_prompts": 4, "num_calls": 24, "chunk": 2048, "is_hit": 1, "makes_room": 0, **sizes}
    cached = f"whose first {sizes['length']:,} tokens are cached" if sizes["is_hit"] else "that is not cached"
    words = f"A prompt {cached}: looked up"
    if sizes["makes_room"]:
        words = f"From a list of token ids: keys are made where the lookup needs some. {words}, "
        words += "given its cached blocks and room for the rest."
    else:
        words += "; its keys, where the lookup needs some, are ready."
        words += " vLLM's call returns the blocks, kvframe's the number of tokens."
    setting = Setting(windows=windows, num_blocks=num_blocks, max_model_len=max_model_len)
    return Case(
        name=name,
        title=title,
        words=words,
        work="LookUp",
        sizes=sizes,
        sides=sides(setting, forced=len(windows) > 1),
        aim=aim,
    )


def standard_cases() -> tuple[Case, ...]:
    """Return what is measured by default."""
    six, many = hybrid(5), hybrid(40)
    of_six = "5 layers with windows and 1 full"
    return (
        decode("decode-256x1", "Decode step, 256 requests, full attention", 256, (None,), aim=20),
        decode("decode-256x6", f"Decode step, 256 requests, {of_six}", 256, six, aim=40),
        decode("decode-32x41", "Decode step, 32 requests, 40 layers with windows and 1 full", 32, many, aim=40),
        decode(
            "decode-256x41",
            "Decode step, 256 requests of 512 tokens, 40 layers with windows of 256 and 1 full",
            256,
            hybrid(40, 256),
            length=512,
            num_cycles=2,
            num_blocks=655_361,
        ),
        decode(
            "decode-256-state",
            "Decode step, 256 requests, one layer of full attention and one with a recurrent state",
            256,
            (None,),
            num_states=1,
            aim=20,
        ),
        decode(
            "decode-256-no-mask",
            "Decode step, 256 requests, one layer with a window that only its live ranges say",
            256,
            (WINDOW,),
            has_masks=False,
            aim=20,
        ),
        _passing("pass-uncached", "2,048 tokens, caching off", ".", 5, caching=False),
        _passing("pass-cached", "2,048 tokens, caching on", "; its blocks stay findable. No block is evicted.", 8),
        _passing(
            "pass-evicting",
            "2,048 tokens, every block evicts another",
            "; its blocks stay findable, and each of them takes the place of one that was.",
            7,
            num_blocks=8_193,
            num_before=80,
        ),
        _looking("hit-1", "Prefix lookup, 8,192 tokens cached, full attention", (None,), 20),
        _looking("hit-6", f"Prefix lookup, 8,192 tokens cached, {of_six}", six, 20),
        _looking("miss-1", "Prefix lookup, nothing cached, full attention", (None,), 1, is_hit=0),
        _looking("miss-6", f"Prefix lookup, nothing cached, {of_six}", six, 1, is_hit=0),
        _looking(
            "miss-long",
            "Prefix lookup of 131,072 tokens, nothing cached, one layer with a window",
            (WINDOW,),
            1,
            length=131_072,
            max_model_len=262_144,
            is_hit=0,
            num_prompts=0,
            num_calls=4,
        ),
        _keys("keys", 8192, 5),
        _looking("admit-1", "Admission, 8,192 tokens cached, full attention", (None,), None, makes_room=1),
        _looking("admit-6", f"Admission, 8,192 tokens cached, {of_six}", six, None, makes_room=1),
        _build("build", 131_073, 10),
    )


def tiny_cases() -> tuple[Case, ...]:
    """Return cases to try the script on, not to measure."""
    windows = hybrid(2, 32)
    small: dict[str, int] = {"num_blocks": 257, "length": 64, "num_prompts": 2, "num_calls": 2, "chunk": 32}
    return (
        decode("tiny-decode", "Decode", 4, windows, length=64, num_cycles=1, num_blocks=1024),
        decode("tiny-state", "Decode", 4, (None,), length=64, num_cycles=1, num_blocks=1024, num_states=1),
        decode("tiny-no-mask", "Decode", 4, (32,), length=64, num_cycles=1, num_blocks=1024, has_masks=False),
        _passing("tiny-pass", "Pass", ".", 1, num_blocks=65, length=64, num_calls=3, num_before=32),
        _passing(
            "tiny-pass-uncached", "Pass, caching off", ".", 1, caching=False, num_blocks=65, length=64, num_calls=3
        ),
        _looking("tiny-hit", "Hit", windows, 1, **small),
        _looking("tiny-miss", "Miss", windows, 1, **small, is_hit=0),
        _looking("tiny-admit", "Admission", windows, None, **small, makes_room=1),
        _keys("tiny-keys", 64, 1),
        _build("tiny-build", 257, 1),
    )


def _keys(name: str, length: int, aim: float) -> Case:
    return Case(
        name=name,
        title=f"Prefix keys of {length:,} tokens",
        words="From a list of token ids: what the lookup needs of it.",
        work="Keys",
        sizes={"length": length, "num_calls": 16},
        sides=sides(Setting(num_blocks=257)),
        aim=aim,
    )


def _build(name: str, num_blocks: int, aim: float) -> Case:
    return Case(
        name=name,
        title=f"Build a pool of {num_blocks:,} blocks",
        words="The manager with its pool, for one request at a time, from a plan that is made before. Then the bytes "
        "for each block, as Python and NumPy count them, when it is new, and when requests have filled it with cached "
        "blocks and gone.",
        work="Build",
        sizes={"num_calls": 3, "length": min(2048, num_blocks - 1)},
        sides=sides(Setting(num_blocks=num_blocks, max_num_seqs=1, max_model_len=4096)),
        aim=aim,
    )
