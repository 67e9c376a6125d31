"""The settings and sides that the cache cores and their works share. Imports only Python's library."""

from __future__ import annotations

import dataclasses

BLOCK_SIZE = 16
STATE = 2
"""A state needs the last token of the past, so its blocks are those of a window of two."""
VLLM, KVFRAME, MORE_GROUPS = "vLLM", "kvframe", "kvframe, as many groups"
ONE_BY_ONE = ", one by one"

TokenIds = list[int]


class Mistake(Exception):
    """A core does not hold or find what it should."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How a cache core is set up.

    Attributes:
        windows: For each layer, the tokens of its window; None for a layer that reads every past token. The pages of
            all layers have one size.
        num_states: Further layers with a recurrent state, which has the bytes of a page.
        has_masks: Whether a window has a mask, which says what a query sees, or live ranges alone.
        num_blocks: The memory in pages of one layer; one of them is the null page.
        caching: Whether computed blocks become findable.
        one_by_one: Whether a core that can take all requests of a step together handles them one by one.
    """

    windows: tuple[int | None, ...] = (None,)
    num_states: int = 0
    has_masks: bool = True
    num_blocks: int = 131_073
    caching: bool = True
    max_num_seqs: int = 8
    max_model_len: int = 16_384
    one_by_one: bool = False


@dataclasses.dataclass(frozen=True)
class Side:
    """A core that does a case's work: its name in the record, its engine (``vllm`` or ``kvframe``), and its setting."""

    name: str
    engine: str
    setting: Setting


def sides(setting: Setting, *, forced: bool = False, one_by_one: bool = False) -> tuple[Side, ...]:
    """Return the sides that do a case's work; the others are compared with the first.

    kvframe also does it with a group for each layer if ``forced``, and with a step's requests ``one_by_one``.
    """
    settings = {KVFRAME: setting}
    if forced:
        settings[MORE_GROUPS] = apart(setting)
    if one_by_one:
        settings |= {name + ONE_BY_ONE: dataclasses.replace(base, one_by_one=True) for name, base in settings.items()}
    return Side(VLLM, "vllm", setting), *(Side(name, "kvframe", variant) for name, variant in settings.items())


def apart(setting: Setting) -> Setting:
    """Return a setting in which no two layers are alike: each window is a block longer than the one before."""
    others = [window for window in setting.windows if window is not None]
    steps = iter(window + index * BLOCK_SIZE for index, window in enumerate(others))
    windows = tuple(None if window is None else next(steps) for window in setting.windows)
    return dataclasses.replace(setting, windows=windows)


def hybrid(num_windows: int, window: int = 1024) -> tuple[int | None, ...]:
    """Return the windows of a model with ``num_windows`` layers with windows and one of full attention."""
    return (None, *[window] * num_windows)
