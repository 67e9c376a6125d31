"""Batches of every kind, with lengths around the ends of blocks, and the layers and batches of serving.

The grid's small batches do not reach what serving makes. Of 2,400 steps of kvframe's engine in tests of models, of
the scheduler and of the server, 68 % were decodes alone, 11 % prompts alone, and 21 % of several kinds; 47 % had one
request, 7 % more than eight, up to 64. Of 1,500 steps of vLLM, 88 % were decodes alone and 10 % decodes and prompts;
68 % had a request of more than 512 tokens. ``SERVED_BATCHES`` has each of these classes, and goes beyond the sizes at
which kernels divide their work: 32, 64 and 128 requests, 256 and 512 tokens of a step, 512 and 1,024 of a request.
``tests.recorded_steps`` records both again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import cycle, islice
from typing import Any

import attrs

from kvframe.contract.capabilities import Capabilities
from kvframe.contract.specs import QuerySpec, align_up
from kvframe_testing.case import Request
from kvframe_testing.state import KEYS_AND_VALUES, SOFT_CAP, StateForm


def backend_batches(block_size: int) -> dict[str, tuple[Request, ...]]:
    """Return every kind of batch that a backend must compute, by name."""
    ends = sorted({max(1, block_size - 1), block_size, block_size + 1, 41})
    return {
        "prefill": tuple(Request(0, length) for length in ends),
        "extend": tuple(Request(length, new) for length in ends for new in (2, block_size + 1)),
        "decode": tuple(Request(length, 1) for length in (0, *ends)),
        "mixed": (Request(41, 1), Request(0, 19), Request(23, 7), Request(block_size, 1), Request(0, 1)),
        "uneven": (Request(300, 1), Request(9, 140), Request(2, 1), Request(0, 3)),
        # Two queries are the least that are more than one. A sample prefers "mixed", which costs less, for all else.
        "at_most_two": (Request(150, 2), Request(190, 1), Request(block_size, 1), Request(0, 2)),
    }


def wrapper_batches(block_size: int) -> dict[str, tuple[Request, ...]]:
    """Return every kind of batch that a wrapper must transform, by name; a request may have no new tokens."""
    ends = sorted({max(1, block_size - 1), block_size, block_size + 1, 3 * block_size + 2})
    return {
        "decode": tuple(Request(end, 1) for end in (0, *ends)),
        "later_decode": tuple(Request(2 * end + 1, 1) for end in ends),
        "drafts": tuple(Request(end, 3, 3) for end in ends),
        "later_drafts": tuple(Request(end + 2, 3, 3) for end in ends[:2]),
        "prefill": tuple(Request(0, end) for end in ends),
        "unfinished": tuple(Request(end, end, 0) for end in ends),
        "cached_prefix": tuple(Request(end, new) for end in ends for new in (2, block_size + 1)),
        "all_rows": (Request(0, 9, 9), Request(5, block_size, 1)),
        "mixed": (
            Request(4 * block_size, 1),
            Request(0, 2 * block_size + 3, 0),
            Request(block_size + 1, 7),
            Request(5, 3, 3),
        ),
        "without_tokens": (Request(5, 2), Request(block_size + 3, 0, 0), Request(0, 4), Request(7, 0, 0)),
        "one_prompt": (Request(0, block_size + 3),),
        "one_decode": (Request(2 * block_size + 1, 1),),
        "many": (
            Request(0, 280),
            Request(600, 5),
            *(Request(length, 1) for length in islice(cycle((9, 33, block_size)), 20)),
        ),
    }


def cross_batches(block_size: int) -> dict[str, tuple[Request, ...]]:
    """Return every kind of batch in which the keys are of another sequence than the queries, by name."""
    lengths = sorted({0, 1, max(1, block_size - 1), block_size, block_size + 1, 41})

    def request(num_new: int, num_keys: int, num_hidden: int = 0) -> Request:
        return Request(0, num_new, num_keys=num_keys, num_hidden=num_hidden)

    return {
        "cross_prefill": tuple(request(19, length) for length in lengths),
        "cross_decode": tuple(request(1, length) for length in lengths),
        "cross_mixed": (request(1, 41), request(19, 3), request(5, 0), request(1, 0), request(7, block_size + 7)),
        "cross_uneven": (request(1, 300), request(140, 9), request(1, 0), request(3, 1), request(1, 2)),
        "cross_without_keys": (request(2, 0), request(1, 0)),
    }


HIDDEN_STARTS: Mapping[str, tuple[Request, ...]] = {
    "hidden_starts": (
        Request(41, 1, num_hidden=5),
        Request(23, 7, num_hidden=23),
        Request(0, 4),
        Request(18, 2, num_hidden=17),
    )
}
"""Batches in which the first tokens are hidden, for backends that honour such an extension."""

HIDDEN_CROSS_STARTS: Mapping[str, tuple[Request, ...]] = {
    "cross_hidden_starts": (
        Request(0, 1, num_keys=41, num_hidden=5),
        Request(0, 30, num_keys=23, num_hidden=23),
        Request(0, 4, num_keys=18),
        Request(0, 2, num_keys=0),
    )
}
"""Likewise for keys of another sequence: its first tokens are hidden, or all of them."""

RANGES: Mapping[str, tuple[Request, ...]] = {
    "ranges": (
        Request(41, 1),
        Request(0, 19, ranges=((0, 7), (7, 9), (12, 19))),
        Request(23, 7, ranges=((24, 29),)),
        Request(16, 18, ranges=((16, 34),)),
        Request(2, 5),
    ),
    "long_ranges": (Request(0, 150, ranges=((3, 140),)), Request(5, 140, ranges=((8, 60), (90, 145)))),
}
"""Batches with ranges of prompts that see each other in both directions, for backends that honour them."""

PARTLY_GENERATING: Mapping[str, tuple[Request, ...]] = {
    "draft_tokens": (Request(41, 4, 4), Request(0, 5, 1), Request(16, 2, 2), Request(9, 1), Request(0, 6, 6)),
    "unfinished": (Request(41, 1), Request(0, 19, 0), Request(23, 7, 0), Request(16, 18)),
    "all_unfinished": (Request(0, 19, 0), Request(16, 5, 0)),
}
"""Batches in which not only the last token of each request generates, for chains that drop tokens."""


# --- serving ---------------------------------------------------------------------------------------------------------

SERVED_BATCHES: Mapping[str, tuple[Request, ...]] = {
    "one_prompt": (Request(0, 70),),
    "one_extend": (Request(37, 40),),
    "one_decode": (Request(90, 1),),
    "two_decodes": (Request(33, 1), Request(64, 1)),
    # The longest request is not among the first.
    "many_decodes": (*(Request(length, 1) for length in islice(cycle((9, 33, 2, 17)), 129)), Request(70, 1)),
    "many_mixed": (
        Request(0, 130),
        Request(60, 90),
        *(Request(length, 1) for length in islice(cycle((5, 34, 16)), 32)),
        Request(0, 40),
        Request(20, 1),
    ),
    "long_prompts": (Request(0, 66), Request(0, 270), *(Request(0, 66) for _ in range(3))),
    "long_decodes": (Request(1100, 1), Request(20, 1), Request(600, 1)),
    "long_extend": (Request(560, 30), Request(3, 5)),
}
"""Batches of serving by name."""

SHIFT = 200.0
"""A number that is added to all scores of a query: no output depends on it, and its exponential is infinite."""


@attrs.frozen(kw_only=True)
class ServedLayer:
    """Options of a layer, as ``make_layer`` takes them, and a shift of its scores.

    Attributes:
        options: What the layer is there for.
        scoring: Changes to scores that are left out if a backend refuses them.
        shift: As in ``Case``.
        batches: The names of its batches.
    """

    options: Mapping[str, Any]
    scoring: Mapping[str, Any] = attrs.field(factory=dict)
    shift: float = 0.0
    batches: Collection[str] = tuple(SERVED_BATCHES)


_NOT_LONG = tuple(
    name for name in SERVED_BATCHES if name != "long_prompts"
)  # that takes a third of a second with sinks
_SMALL = ("one_prompt", "one_extend", "one_decode", "two_decodes", "many_mixed")
_SCORED = {"soft_cap": SOFT_CAP, "has_sinks": True}

SERVED_LAYERS: Mapping[str, ServedLayer] = {
    "group=3": ServedLayer(options={"num_heads": 6, "num_kv_heads": 2}, scoring=_SCORED, batches=_NOT_LONG),
    "group=5-window=40": ServedLayer(options={"num_heads": 5, "num_kv_heads": 1, "window": 40, "block_size": 32}),
    "group=6-alibi": ServedLayer(
        options={"num_heads": 6, "num_kv_heads": 1, "block_size": 64}, scoring={"alibi_slopes": (0.004, 0.3, 0.06)}
    ),
    "group=7-window=70-sink_tokens=24": ServedLayer(
        options={"num_heads": 7, "num_kv_heads": 1, "window": 70, "num_sink_tokens": 24},
        scoring={"has_sinks": True},
        batches=_NOT_LONG,
    ),
    "num_kv_heads=3-chunk=48": ServedLayer(options={"num_heads": 6, "num_kv_heads": 3, "chunk": 48, "block_size": 32}),
    # With the grid's scale, only the largest score would matter.
    "head_size=80": ServedLayer(options={"head_size": 80, "scale": 0.13}, scoring=_SCORED, batches=_SMALL),
    "head_size=96-window=33": ServedLayer(
        options={"head_size": 96, "scale": 0.12, "window": 33, "block_size": 64}, batches=_SMALL
    ),
    "larger_scores": ServedLayer(options={}, shift=SHIFT),
    "smaller_scores": ServedLayer(options={}, shift=-SHIFT),
    "larger_scores-soft_cap": ServedLayer(options={"soft_cap": SOFT_CAP}, shift=SHIFT),
    # Products of queries and keys do not fit float16 before they are scaled.
    "larger_scores-float16": ServedLayer(options={"dtype": "float16", "scale": 1e-3}, shift=SHIFT),
    "float16": ServedLayer(options={"dtype": "float16"}),
}
"""Layers by name."""


def served_layers(capabilities: Capabilities, form: StateForm) -> Iterator[tuple[str, ServedLayer]]:
    """Yield each of the ``SERVED_LAYERS`` that fits a backend's state and sizes, with the scoring that it supports."""
    fields = {field.name for kind in (form.spec_class, QuerySpec) for field in attrs.fields(kind)}
    supports = {
        "soft_cap": capabilities.soft_cap,
        "has_sinks": capabilities.sinks,
        "alibi_slopes": capabilities.alibi,
    }
    for name, layer in SERVED_LAYERS.items():
        scoring = {key: value for key, value in layer.scoring.items() if supports[key]}
        block_size = align_up(layer.options.get("block_size", 16), capabilities.block_size_multiple)
        options = {**layer.options, **scoring, "block_size": block_size}
        options.pop("num_kv_heads" if "num_kv_heads" not in fields else "", None)
        has_own_sizes = "head_size" in options and (capabilities.head_sizes or form is not KEYS_AND_VALUES)
        if has_own_sizes or (layer.shift and form is not KEYS_AND_VALUES):
            continue
        yield name, attrs.evolve(layer, options=options)


PREFIX = "served-"


def is_served(name: str) -> bool:
    """Return whether a case of this name is one of these."""
    return name.startswith(PREFIX)
