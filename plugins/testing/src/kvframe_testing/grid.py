"""The cases that a backend must compute, made from what it declares.

Each feature is combined with every kind of batch, at the block sizes and lengths where paged kernels fail: one token
before, at and after a block's end. Wrapper chains are combined with the main masks, on a layer that keeps a cache and
on one that shares it. A case that the backend or the chain refuses is left out. Larger batches are those of serving.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import cycle, islice
from typing import Any

import attrs
import torch

from kvframe.config.choices import check_order
from kvframe.contract.capabilities import Capabilities
from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import SpecError, WrapperError
from kvframe.contract.formats import PLAIN, KVFormat
from kvframe.contract.metadata import SEQ_STARTS
from kvframe.contract.specs import LayerSpec, QuerySpec, align_up
from kvframe.contract.wrapper import FieldUse
from kvframe.loading.plugins import load_plugins
from kvframe.selection.choice import WrapperChain, bind_chain, chain_capture
from kvframe.selection.refusals import Refusal, find_not_causal, find_refusals
from kvframe_testing.batches import (
    HIDDEN_CROSS_STARTS,
    HIDDEN_STARTS,
    PARTLY_GENERATING,
    PREFIX,
    RANGES,
    SERVED_BATCHES,
    backend_batches,
    cross_batches,
    served_layers,
)
from kvframe_testing.case import Case, Request
from kvframe_testing.laws import ConformanceError
from kvframe_testing.state import ALIBI_SLOPES, BIAS_SIZES, KEYS_AND_VALUES, SOFT_CAP, StateForm

SCALE = 0.4
"""A scale that is not the inverse root of any head size, to find a backend that assumes that one."""

MAIN_DTYPES = ("float32", "bfloat16", "float16", "float64")
"""The main dtype: the first of these that a backend stores is used in all cases that are not about dtypes."""

MAIN_MASKS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "window=5-sink_tokens=3": {"window": 5, "num_sink_tokens": 3},
    "bidirectional": {"causal": False},
}
"""The masks that each further feature and dtype is combined with."""

CACHE_OWNER = "owner"
"""The name of the layer whose cache a sharing layer reads."""

NUM_PADDING = 3

FORMAT_BATCHES = ("decode", "mixed")
"""The batches that are computed for each format, beside those of the main masks."""

PADDED_BATCHES = ("decode", "mixed", "cross_decode", "cross_mixed", "cross_without_keys", "ranges", *PARTLY_GENERATING)
"""The batches that are also computed at the sizes of a graph."""


def make_cases(
    capabilities: Capabilities,
    device: str = "cpu",
    chains: Sequence[WrapperChain] = (),
    form: StateForm = KEYS_AND_VALUES,
    formats: Sequence[KVFormat] | None = None,
    only: str = "*",
) -> tuple[Case, ...]:
    """Return every case that a backend with these capabilities must compute, at least one.

    Args:
        capabilities: The backend's capabilities.
        device: The device of the backend.
        chains: Wrapper chains, as a stack gives them, after which it must work; it must also work without a chain.
        form: The form of the state that it reads (``form_of``).
        formats: The formats that exist; the installed ones unless given. Cases are made in those that the backend
            declares, and in all others too if it takes copies.
        only: A pattern for the names of the cases (``"full-*"``).
    """
    all_cases: list[Case] = []
    refusals: list[Refusal] = []
    read_formats = formats_of(capabilities, formats)
    for name, layer in make_layers(capabilities, form):
        layer_refusals = find_refusals(capabilities, layer, device)
        refusals += layer_refusals
        if not layer_refusals:
            assert layer.spec is not None
            batches = backend_batches(layer.spec.block_size)
            cross = cross_batches(layer.spec.block_size)
            if SEQ_STARTS in capabilities.extensions:
                batches |= HIDDEN_STARTS
                cross |= HIDDEN_CROSS_STARTS
            if "ranges" in capabilities.masks and not _has_bidirectional_mask(layer):
                batches |= RANGES
            cases = [*_cases(name, layer, batches)]
            all_cases += cases
            if _sees_all(layer) and not _reads_own_tokens(layer):
                all_cases += _cases(name, layer, cross)
            if name.startswith("full-block") and find_not_causal(capabilities) is None:
                causal = [case for case in cases if not any(request.ranges for request in case.requests)]
                all_cases += _not_causal([*causal, *_cases(name, layer, cross)])
    all_cases += _served_cases(capabilities, device, form)
    for kv_format in read_formats:
        all_cases += _format_cases(kv_format, capabilities, device, form)
    for chain in chains:
        all_cases += _chain_cases(chain, read_formats, capabilities, device, form)
    _require_cases(all_cases, refusals, device, chains, read_formats if formats is not None else ())
    matching_cases = tuple(attrs.evolve(case, form=form) for case in all_cases if fnmatchcase(case.name, only))
    if not matching_cases:
        raise ConformanceError(
            f"no case has a name like {only!r}; the {len(all_cases)} cases begin with {all_cases[0].name!r}"
        )
    return matching_cases


def _require_cases(
    cases: Sequence[Case],
    refusals: Sequence[Refusal],
    device: str,
    chains: Sequence[WrapperChain],
    formats: Sequence[KVFormat],
) -> None:
    """Raise if a chain, a format or the whole grid has no case: it would pass without a check."""
    if all(case.wrappers for case in cases):
        reasons = "; ".join(dict.fromkeys(f"it {refusal.reason}" for refusal in refusals))
        raise ConformanceError(f"no case at all: such a backend serves no layer of the kit on {device}: {reasons}")
    for chain in chains:
        if not any(case.wrappers == chain for case in cases):
            label = "+".join(wrapper.name for wrapper in chain)
            raise ConformanceError(f"no case after {label}: the chain or the backend refuses every layer of the kit")
    for kv_format in formats:
        if not any(case.spec.kv_format == kv_format for case in cases):
            raise ConformanceError(f"no case in the format {kv_format.name}: no layer of the kit is stored in it")


_CHOICES: Mapping[str, Mapping[str, Any]] = {
    "choice=tokens": {"choice": {"max_chosen": 6}},
    "choice=blocks": {"choice": {"max_chosen": 2, "block_size": 4}},
    "choice=tokens_by_kv_head-soft_cap-learned_sinks": {
        "choice": {"max_chosen": 5, "num_choosers": 2},
        "soft_cap": SOFT_CAP,
        "has_sinks": True,
    },
}
"""Tokens that are chosen by content: those of all heads, or of each group of KV heads; or blocks of them."""


# --- layers -----------------------------------------------------------------------------------------------------------


def make_layers(capabilities: Capabilities, form: StateForm = KEYS_AND_VALUES) -> Iterator[tuple[str, LayerSpec]]:
    """Yield every layer of the grid with its name: masks by block sizes, features by masks, head sizes, dtypes.

    The layers cover all masks and features, and some of the sizes and dtypes that the capabilities allow.
    """
    head_size = usual_head_size(capabilities, form)

    def layer_with(**options: Any) -> LayerSpec:
        return make_layer(capabilities, form, **options)

    scoring = {"soft_cap": SOFT_CAP, "has_sinks": True}
    features: dict[str, Mapping[str, Any]] = {
        "soft_cap": {"soft_cap": SOFT_CAP},
        "learned_sinks": {"has_sinks": True},
        "relative_bias": {"relative_bias": BIAS_SIZES},
        "relative_bias_both_ways": {"relative_bias": {**BIAS_SIZES, "bidirectional": True}},
        "relative_bias-soft_cap-learned_sinks": {"relative_bias": BIAS_SIZES, **scoring},
        "alibi": {"alibi_slopes": ALIBI_SLOPES},
        "alibi-soft_cap-learned_sinks": {"alibi_slopes": ALIBI_SLOPES, **scoring},
        **form.features(head_size),
        **(_CHOICES if form is KEYS_AND_VALUES else {"choice=tokens": _CHOICES["choice=tokens"]}),
    }
    for block_size in sorted({align_up(size, capabilities.block_size_multiple) for size in (1, 16, 17)}):
        for mask, options in make_masks(block_size).items():
            yield f"{mask}-block={block_size}", layer_with(block_size=block_size, **options)
    for mask, options in MAIN_MASKS.items():
        for feature, changes in features.items():
            yield f"{mask}-{feature}", layer_with(**{**options, **changes})
    for size in sorted(capabilities.head_sizes or {head_size + 32}):
        yield f"full-head_size={size}", layer_with(head_size=size)
    for dtype in usual_dtypes(capabilities)[1:]:
        for mask, options in MAIN_MASKS.items():
            yield f"{mask}-{dtype}", layer_with(dtype=dtype, **options)
        yield f"full-{dtype}-soft_cap-learned_sinks", layer_with(dtype=dtype, **scoring)
        yield f"full-{dtype}-relative_bias", layer_with(dtype=dtype, relative_bias=BIAS_SIZES)
        yield f"full-{dtype}-alibi", layer_with(dtype=dtype, alibi_slopes=ALIBI_SLOPES)


def make_layer(capabilities: Capabilities, form: StateForm = KEYS_AND_VALUES, **options: Any) -> LayerSpec:
    """Return a layer of usual sizes that the capabilities allow.

    ``options`` are fields of the form's spec and of ``QuerySpec`` that differ from the usual values. ALiBi's slopes
    repeat until each head has one.
    """
    head_size = options.pop("head_size", usual_head_size(capabilities, form))
    stored: dict[str, Any] = {
        **form.sizes(head_size),
        **{name: min(sizes) for name, sizes in capabilities.spec_sizes.items()},
        "dtype": usual_dtypes(capabilities)[0],
        "block_size": align_up(16, capabilities.block_size_multiple),
    }
    query: dict[str, Any] = {"num_heads": 4, "head_size": head_size, "scale": SCALE}
    query_fields = {field.name for field in attrs.fields(QuerySpec)}
    for name, value in options.items():
        (query if name in query_fields else stored)[name] = value
    if query.get("alibi_slopes") is not None:
        query["alibi_slopes"] = tuple(islice(cycle(query["alibi_slopes"]), query["num_heads"]))
    unknown_names = sorted(set(stored) - {field.name for field in attrs.fields(form.spec_class)})
    if unknown_names:
        raise ConformanceError(
            f"spec_sizes or an option names {', '.join(unknown_names)}, which {form.spec_class.__name__} lacks"
        )
    return LayerSpec(name="layer", spec=form.spec_class(**stored), query=QuerySpec(**query))


def share_cache(layer: LayerSpec) -> LayerSpec:
    """Return the layer without a cache of its own."""
    return attrs.evolve(layer, shares_with=CACHE_OWNER)


def make_masks(block_size: int) -> dict[str, Mapping[str, Any]]:
    """Return every kind of mask by name, with sizes around that of a block."""
    windows = sorted({1, 5, block_size, block_size + 1})
    chunks = sorted({6, block_size, block_size + 1, 2 * block_size})
    return {
        **MAIN_MASKS,
        **{f"window={window}": {"window": window} for window in windows},
        "window=1-sink_tokens=2": {"window": 1, "num_sink_tokens": 2},
        f"window=6-sink_tokens={block_size + 1}": {"window": 6, "num_sink_tokens": block_size + 1},
        **{
            f"window={window}-lookahead={lookahead}": {"causal": False, "window": window, "lookahead": lookahead}
            for window, lookahead in ((5, 3), (1, 2), (3, 0), (block_size + 1, block_size))
        },
        **{f"chunk={chunk}": {"chunk": chunk} for chunk in chunks},
        "stride=6": {"stride": 6},
        "function-stride=6": {"stride": 6, "has_function": True},
        "window=4-dilation=3": {"window": 4, "dilation": 3},
        f"window=3-dilation={block_size + 1}": {"window": 3, "dilation": block_size + 1},
    }


def usual_head_size(capabilities: Capabilities, form: StateForm) -> int:
    """Return a small head size that the capabilities allow."""
    return min(capabilities.head_sizes or {form.usual_head_size(capabilities.spec_sizes)})


def _has_bidirectional_mask(layer: LayerSpec) -> bool:
    mask = None if layer.spec is None else layer.spec.mask
    return mask is not None and not mask.causal


def _sees_all(layer: LayerSpec) -> bool:
    mask = None if layer.spec is None else layer.spec.mask
    return mask is not None and mask.sees_all


def _reads_own_tokens(layer: LayerSpec) -> bool:
    """Return whether a layer adds a bias by distance, or reads chosen tokens; neither goes with another sequence."""
    query = layer.query
    return query is not None and any((query.relative_bias, query.alibi_slopes, query.choice))


def usual_dtypes(capabilities: Capabilities) -> list[str]:
    """Return the dtypes of floats that the capabilities allow, the main one first."""
    main = [name for name in MAIN_DTYPES if name in capabilities.dtypes]
    return main + sorted(
        name for name in capabilities.dtypes.difference(main) if getattr(torch, name).is_floating_point
    )


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases(name: str, layer: LayerSpec, batches: Mapping[str, tuple[Request, ...]]) -> Iterator[Case]:
    for batch, requests in batches.items():
        yield Case(name=f"{name}-{batch}", layer=layer, requests=requests)
        if batch in PADDED_BATCHES:
            yield Case(name=f"{name}-{batch}-padded", layer=layer, requests=requests, num_padding=NUM_PADDING)


def _not_causal(cases: Sequence[Case]) -> list[Case]:
    return [attrs.evolve(case, name=f"{case.name}-not_causal", causal=False) for case in cases]


def _served_cases(capabilities: Capabilities, device: str, form: StateForm) -> Iterator[Case]:
    """Yield every layer that serving makes with every batch."""
    for name, served in served_layers(capabilities, form):
        layer = make_layer(capabilities, form, **served.options)
        for batch in served.batches if not find_refusals(capabilities, layer, device) else ():
            case = f"{PREFIX}{name}-{batch}"
            yield Case(name=case, layer=layer, requests=SERVED_BATCHES[batch], shift=served.shift)


# --- formats ----------------------------------------------------------------------------------------------------------


def installed_formats() -> tuple[KVFormat, ...]:
    """Return every format of the installed plugins, without options, by name."""
    formats = load_plugins().registry.formats
    return tuple(formats.load(name)() for name in formats.names())


def formats_of(capabilities: Capabilities, formats: Sequence[KVFormat] | None) -> list[KVFormat]:
    """Return the formats other than the plain one that a backend serves, by itself or on copies.

    ``formats`` are those that exist; the installed ones unless given. A declared one must be among them.
    """
    own_formats = capabilities.formats - {PLAIN.name}
    if formats is None:
        formats = installed_formats() if capabilities.takes_copies or own_formats else ()
    missing_formats = sorted(own_formats - {kv_format.name for kv_format in formats})
    if missing_formats:
        raise ConformanceError(
            f"the capabilities declare the formats {', '.join(missing_formats)}, which no installed plugin provides; "
            "install it, or give the formats to check"
        )
    return [kv_format for kv_format in formats if capabilities.takes_copies or kv_format.name in capabilities.formats]


def in_format(layer: LayerSpec, kv_format: KVFormat) -> LayerSpec | None:
    """Return the layer in a format; None if the format cannot store the layer's state or its sizes."""
    assert layer.spec is not None
    spec = layer.spec.in_format(kv_format)
    try:
        spec.state_tensors()
    except SpecError:
        return None
    return attrs.evolve(layer, spec=spec) if spec.kv_format == kv_format else None


def _format_cases(kv_format: KVFormat, capabilities: Capabilities, device: str, form: StateForm) -> Iterator[Case]:
    """Yield the main masks with every batch, and the other variants with a few batches."""
    sizes = sorted({align_up(size, capabilities.block_size_multiple) for size in (1, 16, 17)})
    head_size = usual_head_size(capabilities, form)
    usual = align_up(16, capabilities.block_size_multiple)
    main = {mask: {"block_size": usual, **options} for mask, options in MAIN_MASKS.items()}
    further: dict[str, Mapping[str, Any]] = {f"full-block={size}": {"block_size": size} for size in sizes}
    further |= {f"window=5-block={size}": {"block_size": size, "window": 5} for size in sizes}
    further |= {f"full-{name}": changes for name, changes in form.features(head_size).items()}
    further |= {
        f"full-head_size={size}": {"head_size": size} for size in sorted(capabilities.head_sizes or {head_size + 32})
    }
    further |= {f"full-{dtype}": {"dtype": dtype} for dtype in usual_dtypes(capabilities)[1:]}
    further |= {"chunk=6": {"chunk": 6}, "stride=6": {"stride": 6}}
    further["full-soft_cap-learned_sinks"] = {"soft_cap": SOFT_CAP, "has_sinks": True}
    for name, options in {**main, **further}.items():
        layer = in_format(make_layer(capabilities, form, **options), kv_format)
        if layer is None or find_refusals(capabilities, layer, device):
            continue
        assert layer.spec is not None
        batches = backend_batches(layer.spec.block_size)
        if _sees_all(layer):
            batches |= cross_batches(layer.spec.block_size)
        if name not in main:
            batches = {batch: requests for batch, requests in batches.items() if batch in FORMAT_BATCHES}
        yield from _cases(f"{kv_format.name}-{name}", layer, batches)


# --- chains -----------------------------------------------------------------------------------------------------------


def chain_refusals(chain: WrapperChain, layer: LayerSpec, capabilities: Capabilities, device: str) -> list[Refusal]:
    """Return every reason why a chain or the backend refuses a layer; empty if both serve it."""
    try:
        check_order([type(wrapper) for wrapper in chain])
        _, wrapped_layer, required = bind_chain(chain, layer)
    except WrapperError as error:
        return [Refusal(error.code, str(error))]
    return find_refusals(capabilities, wrapped_layer, device, required)


def _chain_cases(
    chain: WrapperChain, formats: Sequence[KVFormat], capabilities: Capabilities, device: str, form: StateForm
) -> Iterator[Case]:
    """Yield the main masks and chunks with every batch, and full attention and chunks in each format with a few."""
    label = "+".join(wrapper.name for wrapper in chain)
    any_causality = all(wrapper.fields.get("causal") is FieldUse.CARRY for wrapper in chain)
    for name, owner, batches in _chained_layers(formats, capabilities, form):
        for suffix, layer in (("", owner), ("-shared", share_cache(owner))):
            if chain_refusals(chain, layer, capabilities, device):
                continue
            cases = [attrs.evolve(case, wrappers=chain) for case in _cases(f"{label}-{name}{suffix}", layer, batches)]
            if chain_capture(chain) is not GraphCapture.ALWAYS:
                cases = [case for case in cases if not case.num_padding]
            yield from cases
            if name.startswith("full-block") and any_causality and find_not_causal(capabilities) is None:
                yield from _not_causal(cases)


def _chained_layers(
    formats: Sequence[KVFormat], capabilities: Capabilities, form: StateForm
) -> Iterator[tuple[str, LayerSpec, Mapping[str, tuple[Request, ...]]]]:
    for block_size in sorted({align_up(size, capabilities.block_size_multiple) for size in (1, 16)}):
        batches = {**backend_batches(block_size), **PARTLY_GENERATING}
        for mask, options in make_masks(block_size).items():
            if mask in MAIN_MASKS or "chunk" in options:
                layer = make_layer(capabilities, form, block_size=block_size, **options)
                yield f"{mask}-block={block_size}", layer, batches
    few = {batch: batches[batch] for batch in (*FORMAT_BATCHES, "unfinished")}
    for kv_format in formats:
        for mask, options in {"full": {}, "chunk=6": {"chunk": 6}}.items():
            stored = in_format(make_layer(capabilities, form, block_size=block_size, **options), kv_format)
            if stored is not None:
                yield f"{kv_format.name}-{mask}", stored, few
