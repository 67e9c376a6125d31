"""The layers and steps on which a wrapper chain is checked before a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from kvframe.contract.capabilities import Capabilities
from kvframe.contract.capture import GraphCapture
from kvframe.contract.specs import LayerSpec, align_up
from kvframe.selection.choice import WrapperChain, chain_capture
from kvframe_testing.case import Case, Request
from kvframe_testing.grid import make_layer, share_cache
from kvframe_testing.state import ALIBI_SLOPES, BIAS_SIZES, SOFT_CAP, StateForm

NOT_CAUSAL = ", batch not causal"
CROSS = ", keys of another sequence"
RANGES = ", ranges both ways"
SHARING = ", sharing a cache"

LAYERS: Mapping[str, Callable[[int], Mapping[str, Any]]] = {
    "full": lambda block_size: {},
    f"full{NOT_CAUSAL}": lambda block_size: {},
    f"full{RANGES}": lambda block_size: {},
    "window": lambda block_size: {"window": 5},
    f"window{RANGES}": lambda block_size: {"window": 5},
    "window and sink tokens": lambda block_size: {"window": 5, "num_sink_tokens": 3},
    "chunks of whole blocks": lambda block_size: {"chunk": 2 * block_size},
    "chunks that end within a block": lambda block_size: {"chunk": block_size + 3},
    f"chunks of whole blocks{RANGES}": lambda block_size: {"chunk": 2 * block_size},
    f"chunks that end within a block{RANGES}": lambda block_size: {"chunk": block_size + 3},
    "bidirectional": lambda block_size: {"causal": False},
    f"bidirectional{CROSS}": lambda block_size: {"causal": False},
    "window in both directions": lambda block_size: {"causal": False, "window": 5, "lookahead": 3},
    "soft cap and learned sinks": lambda block_size: {"soft_cap": SOFT_CAP, "has_sinks": True},
    "chunks of whole blocks, soft cap and learned sinks": lambda block_size: {
        "chunk": 2 * block_size,
        "soft_cap": SOFT_CAP,
        "has_sinks": True,
    },
    "relative bias": lambda block_size: {"relative_bias": BIAS_SIZES},
    "ALiBi": lambda block_size: {"alibi_slopes": ALIBI_SLOPES},
}
"""Every kind of layer by name, as options of the grid's layers by block size."""

STEPS: Mapping[str, tuple[Request, ...]] = {
    "mixed": (Request(13, 1), Request(0, 9), Request(0, 6, 0), Request(11, 4, 4), Request(5, 9, 0), Request(3, 8)),
    "decodes": (Request(13, 1), Request(0, 1), Request(8, 3, 3), Request(7, 1)),
    "unfinished": (Request(0, 9, 0), Request(7, 6, 0)),
}
"""A step with a mixed batch, one in which all tokens generate, and one in which none does."""

CROSS_STEPS: Mapping[str, tuple[Request, ...]] = {
    "mixed": tuple(
        Request(0, num_new, num_generating, num_keys=num_keys)
        for num_new, num_generating, num_keys in ((1, 1, 13), (9, 1, 3), (6, 0, 8), (1, 1, 0), (4, 4, 0))
    ),
    "decodes": (Request(0, 1, num_keys=13), Request(0, 1, num_keys=0), Request(0, 3, 3, num_keys=2)),
}
"""Likewise over keys of another sequence, which may be shorter than the queries, or empty."""

RANGE_STEPS: Mapping[str, tuple[Request, ...]] = {
    "mixed": (
        Request(13, 1),
        Request(0, 9, ranges=((2, 7),)),
        Request(0, 6, 0, ranges=((0, 6),)),
        Request(11, 4, 4, ranges=((12, 15),)),
        Request(5, 9, 0, ranges=((5, 9), (9, 13))),
        Request(3, 8),
    ),
    "unfinished": (Request(0, 9, 0, ranges=((1, 8),)), Request(7, 6, 0)),
}
"""Likewise with ranges of prompts that see each other in both directions."""

NUM_PADDING = 2


def make_labelled_layer(label: str, capabilities: Capabilities, form: StateForm) -> LayerSpec:
    """Return a layer of a kind: a label of ``LAYERS``, with or without ``SHARING`` after it."""
    block_size = align_up(4, capabilities.block_size_multiple)
    layer = make_layer(capabilities, form, block_size=block_size, **LAYERS[label.removesuffix(SHARING)](block_size))
    return share_cache(layer) if label.endswith(SHARING) else layer


def make_cases_of(chain: WrapperChain, label: str, layer: LayerSpec, causal: bool) -> Iterator[Case]:
    """Yield the steps of a layer of this kind after a chain, also padded if its shapes are known beforehand."""
    steps = CROSS_STEPS if CROSS in label else RANGE_STEPS if RANGES in label else STEPS
    for step, requests in steps.items():
        name = f"{label}: {step}"
        case = Case(name=name, layer=layer, requests=requests, causal=causal, wrappers=chain)
        yield case
        if chain_capture(chain) is GraphCapture.ALWAYS:
            yield attrs.evolve(case, name=f"{name}, padded", num_padding=NUM_PADDING)
