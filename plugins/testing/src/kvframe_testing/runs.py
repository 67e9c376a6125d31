"""Runs: several layers and several steps, as an engine makes them.

The grid's cases have one layer and one step. A bug that needs a large head, many heads, a second layer or a second step
appears in these runs only. Most runs have the sizes of real models, two layers on one instance of a backend, and two
steps of many requests. The ``SERVED`` runs have small layers of several kinds, so several instances, and more steps.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvframe.contract.capabilities import Capabilities
from kvframe.contract.formats import KVFormat
from kvframe.contract.specs import LayerSpec, align_up
from kvframe.selection.refusals import find_refusals
from kvframe_testing.case import Case, Request
from kvframe_testing.grid import SCALE, formats_of, in_format, make_layer, usual_dtypes
from kvframe_testing.laws import ConformanceError
from kvframe_testing.sample import cover, num_iterations
from kvframe_testing.state import ALIBI_SLOPES, BIAS_SIZES, KEYS_AND_VALUES, SOFT_CAP, StateForm

NUM_LAYERS = 2
NUM_REQUESTS = 17
NUM_PADDING = 7
"""Padding with which the batches have the sizes of a graph for 24 requests."""

TRAITS = ("kind", "feature", "head_size", "num_kv_heads", "dtype", "format")
"""The properties of runs."""

_LARGE = 32
"""Tokens of a block that is larger than most requests."""

_LEAVING = (3, 9, 14)
"""Requests of the first step that have left before the second step."""

Step = Mapping[str, Request]
"""A step's work for each request, by the request's name, in the order of the batch."""

SERVED: Mapping[str, tuple[Step, ...]] = {
    "alone_and_together": (
        {"a": Request(0, 37)},
        {"a": Request(37, 30)},
        {"b": Request(40, 20), "a": Request(67, 1), "c": Request(20, 1), "d": Request(0, 33)},
        {"d": Request(33, 1), "c": Request(21, 1), "b": Request(60, 1), "a": Request(68, 1)},
        {"c": Request(22, 1)},
        # Two steps of equal lengths, and of other requests.
        {name: Request(length, 1) for name, length in zip("efghij", (9, 24, 33, 48, 16, 40), strict=True)},
        {name: Request(length, 1) for name, length in zip("klmnop", (9, 24, 33, 48, 16, 40), strict=True)},
        {"m": Request(34, 1)},
    ),
    "shared_pages": (
        {"a": Request(48, 9), "b": Request(48, 1), "c": Request(60, 1)},
        {"c": Request(61, 1), "d": Request(48, 5), "a": Request(57, 1), "b": Request(49, 1)},
        {"a": Request(58, 1), "d": Request(53, 1)},
    ),
}
"""Steps by name. In each step, a request that was there before goes on, and one that is missing has left."""

NUM_SHARED = 48
"""The first tokens that all requests of the run ``shared_pages`` have in common."""

_SERVED_LAYERS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "windows": ({}, {"window": 40}, {"scale": SCALE / 2, "num_heads": 12}, {}, {"window": 40}, {}, {}),
    "chunks": ({"block_size": 32}, {"chunk": 48}, {"scale": SCALE / 2}, {"chunk": 48}),
}
"""Options of layers, with the block size of the first, by the name of their feature. An instance of a backend has up to
four layers, a cache group has two instances, and there are two cache groups."""


@attrs.frozen(kw_only=True)
class Run:
    """Some steps of some layers, whose output is compared after each layer.

    Attributes:
        name: The tested properties (``"head_size=128-num_kv_heads=4-full-decodes"``).
        layers: The layers, each with a name of its own, and all of one dtype and format.
        feature: The name of their masks and of the changes to scores.
        kind: The name of the steps.
        steps: The steps. A request that was in the step before continues after its tokens of that step.
        num_padding: Padded requests, tokens and generating rows after each batch.
        num_shared: The first tokens that all requests have in common. Their pages are shared, and the pages of each
            request lie in a row; if there are none, no two pages of a request do.
        form: The form of the stored state.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    feature: str
    kind: str
    steps: tuple[Step, ...]
    num_padding: int = 0
    num_shared: int = 0
    form: StateForm = KEYS_AND_VALUES

    def case(self, layer: LayerSpec, step: int) -> Case:
        """Return one layer's case in one step."""
        return Case(
            name=f"{self.name}, {layer.name} in step {step + 1}",
            layer=layer,
            requests=tuple(self.steps[step].values()),
            num_padding=self.num_padding,
            form=self.form,
        )


def make_runs(
    capabilities: Capabilities,
    device: str = "cpu",
    form: StateForm = KEYS_AND_VALUES,
    formats: Sequence[KVFormat] | None = None,
) -> tuple[Run, ...]:
    """Return every run that a backend with these capabilities must compute.

    Head sizes are 64, 128 and 256, or those in the backend's limits, with 32 query heads over 1, 4 and 8 KV heads. A
    step has 17 requests. The arguments are those of ``make_cases``.
    """
    steps = make_steps(align_up(16, capabilities.block_size_multiple))
    runs = [
        Run(
            name="-".join(filter(None, (size, feature, stored, kind))),
            layers=_named([layer] * NUM_LAYERS),
            feature=feature,
            kind=kind,
            steps=steps[kind.removesuffix("-padded")],
            num_padding=NUM_PADDING if kind.endswith("-padded") else 0,
            form=form,
        )
        for size, feature, stored, kinds, layer in _make_layers(capabilities, form, formats_of(capabilities, formats))
        if not find_refusals(capabilities, layer, device)
        for kind in kinds
    ]
    if not runs:
        raise ConformanceError(f"a backend with these capabilities serves no layer of the runs: {capabilities}")
    return (*_served_runs(capabilities, device, form), *runs)


def _named(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    return tuple(attrs.evolve(layer, name=f"layers.{index}") for index, layer in enumerate(layers))


def _served_runs(capabilities: Capabilities, device: str, form: StateForm) -> Iterator[Run]:
    """Yield the ``SERVED`` steps with small layers of several kinds, as far as the backend serves them."""
    for feature, kinds in _SERVED_LAYERS.items():
        size = align_up(kinds[0].get("block_size", 16), capabilities.block_size_multiple)
        all_layers = [
            make_layer(capabilities, form, **{"num_heads": 6, **options, "block_size": size}) for options in kinds
        ]
        layers = [layer for layer in all_layers if not find_refusals(capabilities, layer, device)]
        for kind, steps in SERVED.items() if layers else ():
            yield Run(
                name=f"served-{feature}-{kind}",
                layers=_named(layers),
                feature=f"served {feature} {kind}",
                kind=kind,
                steps=steps,
                num_shared=NUM_SHARED if kind == "shared_pages" else 0,
                form=form,
            )


def sample_runs(runs: Sequence[Run], names: Collection[str] = TRAITS) -> tuple[Run, ...]:
    """Return a few of the runs, in their order, such that every value of the named traits (``run_traits``) occurs."""
    parts = [{item for item in run_traits(run).items() if item[0] in names} for run in runs]
    return tuple(runs[index] for index in cover(parts, [_cost(run) for run in runs]))


def run_traits(run: Run) -> dict[str, Hashable]:
    """Return the properties of a run, by name."""
    case = run.case(run.layers[0], 0)
    return {
        "kind": run.kind,
        "feature": run.feature,
        "head_size": case.query.head_size,
        "num_kv_heads": getattr(case.spec, "num_kv_heads", None),
        "dtype": case.stored_dtype,
        "format": case.spec.kv_format.name,
    }


def _cost(run: Run) -> float:
    """Return the cost of a run: about equal for all, and a little more for a longer one."""
    num_programs = sum(num_iterations(tuple(step.values())) for step in run.steps)
    return 1.0 + 1e-6 * getattr(run.layers[0].spec, "num_kv_heads", 1) * num_programs


# --- layers -----------------------------------------------------------------------------------------------------------

_KINDS = ("decodes", "decodes-padded", "prompts", "mixed")
_FEW_KINDS = ("decodes", "mixed")


def _make_features(capabilities: Capabilities) -> dict[str, Mapping[str, Any]]:
    """Return the masks of layers by name, most of them with every change to scores that the backend supports."""
    scoring: dict[str, Any] = {}
    if capabilities.soft_cap:
        scoring["soft_cap"] = SOFT_CAP
    if capabilities.sinks:
        scoring["has_sinks"] = True
    features: dict[str, Mapping[str, Any]] = {
        "full": {},
        "scored": scoring,
        "window=20-sink_tokens=4": {"window": 20, "num_sink_tokens": 4, **scoring},
        "window=20": {"window": 20, **scoring},
        "bidirectional": {"causal": False, **scoring},
        "window=9-lookahead=7": {"causal": False, "window": 9, "lookahead": 7, **scoring},
        "chunk=24": {"chunk": 24},
        "function-stride=6": {"stride": 6, "has_function": True},
        "window=6-dilation=4": {"window": 6, "dilation": 4},
        "relative_bias": {"relative_bias": BIAS_SIZES},
        "alibi": {"alibi_slopes": ALIBI_SLOPES},
    }
    return {name: options for name, options in features.items() if options or name == "full"}


def _make_layers(
    capabilities: Capabilities, form: StateForm, formats: Sequence[KVFormat]
) -> Iterator[tuple[str, str, str, tuple[str, ...], LayerSpec]]:
    """Yield layers, each with its size, feature, and dtype or format as names, and with its kinds of steps."""
    sizes, features, dtypes = (
        form.real_sizes(capabilities.head_sizes),
        _make_features(capabilities),
        usual_dtypes(capabilities),
    )

    def layer(size: str, feature: str, dtype: str) -> LayerSpec:
        usual = make_layer(capabilities, form, **{**sizes[size], **features[feature], "dtype": dtype})
        assert usual.query is not None
        # The scores have the grid's size. With larger ones, only the largest score would matter.
        scale = SCALE * (8 / usual.query.head_size) ** 0.5
        return attrs.evolve(usual, query=attrs.evolve(usual.query, scale=scale))

    for size in sizes:
        for feature in features:
            yield size, feature, "", _KINDS, layer(size, feature, dtypes[0])
    # Of nine sizes: the smallest heads over one KV head, the middle ones over four, the largest over eight.
    few_sizes = [*sizes][len(sizes) // 4 :: max(1, len(sizes) // 4)][:3]
    for size in few_sizes:
        for feature in features:
            for dtype in dtypes[1:]:
                yield size, feature, dtype, _FEW_KINDS, layer(size, feature, dtype)
            for kv_format in formats:
                stored = in_format(layer(size, feature, dtypes[0]), kv_format)
                if stored is not None:
                    yield size, feature, kv_format.name, _FEW_KINDS, stored


# --- steps ------------------------------------------------------------------------------------------------------------


def make_steps(block_size: int) -> dict[str, tuple[Step, ...]]:
    """Return the two steps of a run for each kind, with lengths around the ends of blocks."""
    ends = (1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size - 1, 7)
    lengths = [ends[index % len(ends)] for index in range(NUM_REQUESTS)]
    if block_size > _LARGE:
        # For large blocks, a few long requests are enough to reach the ends of blocks.
        lengths = [length if index < len(ends) else length % _LARGE for index, length in enumerate(lengths)]
    # The longest request is in both steps, and its last block has a free slot, so both steps have equal shapes.
    lengths[NUM_REQUESTS // 2] = 2 * block_size + 1
    decodes = {str(index): Request(length, 1) for index, length in enumerate(lengths)}
    prompts = {str(index): Request(0, length) for index, length in enumerate(lengths)}
    mixed = {
        str(index): (Request(length, 1), Request(0, length, 0), Request(length, 3), Request(0, 5))[index % 4]
        for index, length in enumerate(lengths)
    }
    return {
        "decodes": (decodes, _continued(decodes, 1)),
        "prompts": (prompts, _continued(prompts, 1)),
        "mixed": (mixed, _continued(mixed, 4)),
    }


def _continued(first_step: Step, num_new: int) -> Step:
    """Return the step after ``first``: some requests have left, others have joined, and the order has changed."""
    requests = {
        name: Request(request.seq_len, 1 if request.num_generating else num_new)
        for name, request in reversed([*first_step.items()])
        if int(name) not in _LEAVING
    }
    for index in _LEAVING:
        requests[f"joined {index}"] = Request(first_step[str(index)].seq_len, num_new)
    return requests
