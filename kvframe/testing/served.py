"""The batches and layers that serving makes and the grid's small ones do not reach.

Of 2,400 steps of kvframe's engine in tests of models, of the scheduler and of the server, 68 % were decodes alone, 11 %
prompts alone, and 21 % of several kinds; 47 % had one request, 7 % more than eight, up to 64. Of 1,500 steps of vLLM,
88 % were decodes alone and 10 % decodes and prompts; 68 % had a request of more than 512 tokens. ``BATCHES`` has each
of these classes, and goes beyond the sizes at which kernels divide their work: 32, 64 and 128 requests, 256 and 512
tokens of a step, 512 and 1,024 of a request. ``tests.recorded_steps`` records both again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import cycle, islice
from typing import Any

import attrs

from kvframe.contract.capabilities import Capabilities
from kvframe.contract.specs import QuerySpec, align_up
from kvframe.testing.case import Request
from kvframe.testing.state import KEYS_AND_VALUES, SOFT_CAP, StateForm

BATCHES: Mapping[str, tuple[Request, ...]] = {
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
"""Batches by name."""

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
    batches: Collection[str] = tuple(BATCHES)


_NOT_LONG = tuple(name for name in BATCHES if name != "long_prompts")  # that takes a third of a second with sinks
_SMALL = ("one_prompt", "one_extend", "one_decode", "two_decodes", "many_mixed")
_SCORED = {"soft_cap": SOFT_CAP, "has_sinks": True}

LAYERS: Mapping[str, ServedLayer] = {
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
    """Yield each of the ``LAYERS`` that fits a backend's state and sizes, with the scoring that it supports."""
    fields = {field.name for kind in (form.spec_class, QuerySpec) for field in attrs.fields(kind)}
    supports = {
        "soft_cap": capabilities.soft_cap,
        "has_sinks": capabilities.sinks,
        "alibi_slopes": capabilities.alibi,
    }
    for name, layer in LAYERS.items():
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
