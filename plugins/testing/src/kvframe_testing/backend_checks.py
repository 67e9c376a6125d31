"""The checks of a backend: the grid's cases, other hosts, and runs at the sizes of real models."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import attrs

from kvframe.config.options import make_with_options
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import KVFrameError
from kvframe.contract.formats import PLAIN, KVFormat
from kvframe.contract.metadata import SEQ_STARTS
from kvframe.contract.specs import KVCacheSpec
from kvframe.selection.choice import WrapperChain
from kvframe.selection.refusals import find_not_causal, find_refusals
from kvframe_testing.batches import is_served
from kvframe_testing.case import Case
from kvframe_testing.checks import Check, Checks
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import MAIN_DTYPES, in_format, installed_formats, make_cases, make_layer, make_layers
from kvframe_testing.hosts import OtherHost, in_other_hosts
from kvframe_testing.laws import ConformanceError
from kvframe_testing.runs import TRAITS, Run, make_runs, sample_runs
from kvframe_testing.sample import TOGETHER, sample
from kvframe_testing.serving import check_run
from kvframe_testing.state import KEYS_AND_VALUES, StateForm, form_of

LARGE = 1e4
"""What fills memory without live state in some cases, instead of NaN: it finds a backend that hides NaN."""

_VALUE_SIZES, _NOT_CAUSAL, _HIDDEN, _LSE = (
    *("values of another size", "batches that are not causal", "hidden first tokens", "log-sum-exp"),
)
_RANGES = "bidirectional ranges"
_ORDER = (
    *("full attention", "windows", "sink tokens", "chunks", "bidirectional", "windows in both directions"),
    *("mask functions", "live ranges alone", "sparse types", "soft cap", "learned sinks", "relative bias", "ALiBi"),
    *("chosen tokens", "chosen blocks", _VALUE_SIZES, _LSE, *MAIN_DTYPES),
    *("prompts", "decodes", "mixed batches", "padding"),
)


def backend_checks(
    backend_class: type[AttentionBackend],
    *,
    name: str = "",
    device: str = "cpu",
    runs_on: str | None = None,
    whole: bool = False,
    chains: Sequence[WrapperChain] = (),
    formats: Sequence[KVFormat] | None = None,
    keeps: Callable[[Case], bool] = lambda case: True,
    together: Collection[tuple[str, str]] = TOGETHER,
    run_traits: Collection[str] = TRAITS,
    run_kinds: Collection[str] | None = None,
    writes_out: bool = False,
) -> Checks:
    """Return the checks of a backend.

    The arguments are the attributes of ``BackendTests``; ``whole`` asks for every case and run, instead of a sample in
    which every feature occurs, and ``keeps`` says whether a case is checked; a run is, if all its layers are.
    """
    capabilities, form = backend_class.capabilities, form_of(backend_class)
    cases = [case for case in make_cases(capabilities, device, chains, form, formats) if keeps(case)]
    runs = make_runs(capabilities, device, form, formats)
    runs = tuple(run for run in runs if run_kinds is None or run.kind in run_kinds)
    runs = tuple(run for run in runs if all(keeps(run.case(layer, 0)) for layer in run.layers))
    if not cases or not runs:
        raise ConformanceError(f"backend {name or backend_class.__name__!r}: no case or no run is left to check")
    sampled_cases, runs_on = sample(cases, together), runs_on or device
    checks = []
    if backend_class.options_class is not None:
        run = partial(_check_options, name or backend_class.__name__, backend_class)
        checks.append(Check(name="options", features=("options",), run=run))
    checks += [_case_check(backend_class, case, runs_on) for case in (cases if whole else sampled_cases)]
    # Neither the value of dead memory nor the host depends on the sizes of a step, so small steps are enough.
    small, sampled_cases = (
        tuple(case for case in part if not is_served(case.name)) for part in (tuple(cases), sampled_cases)
    )
    checks += [
        _case_check(backend_class, case, runs_on, LARGE) for case in (small if whole else sample(sampled_cases, ()))
    ]
    checks += [_host_check(backend_class, case, runs_on, host, writes_out) for case, host in in_other_hosts(small)]
    checks += [_run_check(backend_class, run, runs_on) for run in (runs if whole else sample_runs(runs, run_traits))]
    refused = _refused(backend_class, device, form, formats)
    return Checks(
        part=f"backend {name or backend_class.__name__!r}", checks=tuple(checks), refused=refused, order=_ORDER
    )


def _check_options(name: str, backend_class: type[AttentionBackend]) -> None:
    """Raise if a stack could not give the backend its options."""
    options: Any = backend_class.options_class
    part = f"backend {name!r}"
    if not (isinstance(options, type) and attrs.has(options)):
        raise ConformanceError(f"{part}: options_class must be a frozen class of attrs, or None, not {options!r}")
    try:
        make_with_options(options, backend_class.conformance_options)
    except (KVFrameError, ValueError) as error:
        raise ConformanceError(f"{part}: its options cannot be made with conformance_options: {error}") from error


def _case_check(backend_class: type[AttentionBackend], case: Case, device: str, poison: float = math.nan) -> Check:
    name = case.name if math.isnan(poison) else f"{case.name}-large_values"
    run = partial(check_backend, backend_class, case, device, poison)
    return Check(name=name, features=_features_of(backend_class, case), run=run)


def _host_check(
    backend_class: type[AttentionBackend], case: Case, device: str, host: OtherHost, writes_out: bool
) -> Check:
    def run() -> None:
        check_backend(backend_class, case, device, host=host)
        if writes_out and host.num_copies:
            raise ConformanceError(
                f"{backend_class.__name__} on {case.name}: it returned {host.num_copies} of {host.num_outputs} outputs "
                "in tensors of its own, which the host copied to where it wanted them"
            )

    features = (*_features_of(backend_class, case), "another host")
    return Check(name=f"{case.name}-host={host.layout}", features=features, run=run)


def _run_check(backend_class: type[AttentionBackend], run: Run, device: str) -> Check:
    features = [feature for layer in run.layers for feature in _features_of(backend_class, run.case(layer, 0))]
    return Check(
        name=f"run-{run.name}",
        features=(*dict.fromkeys(features), "several layers, several steps"),
        run=partial(check_run, backend_class, run, device),
    )


def _features_of(backend_class: type[AttentionBackend], case: Case) -> tuple[str, ...]:
    """Return the features that a case uses."""
    return (*_of_mask(case.spec), *_of_layer(case, backend_class.capabilities.returns_lse), *_of_batch(case))


def _of_mask(spec: KVCacheSpec) -> Iterator[str]:
    mask = spec.mask
    if spec.is_sparse:
        yield "sparse types"
    elif mask is None:
        yield "live ranges alone" if spec.mask_function is None else "mask functions"
    elif not mask.causal:
        yield "bidirectional" if mask.sees_all else "windows in both directions"
    elif mask.chunk is not None:
        yield "chunks"
    else:
        yield "full attention" if mask.window is None else "windows"
        if mask.num_sink_tokens:
            yield "sink tokens"


def _of_layer(case: Case, with_lse: bool) -> Iterator[str]:
    query, spec = case.query, case.spec
    uses = {
        "soft cap": query.soft_cap is not None,
        "learned sinks": query.has_sinks,
        "relative bias": query.relative_bias is not None,
        "ALiBi": query.alibi_slopes is not None,
        "chosen tokens": query.choice is not None and query.choice.unit == "tokens",
        "chosen blocks": query.choice is not None and query.choice.unit == "blocks",
        _VALUE_SIZES: case.form is KEYS_AND_VALUES and case.form.head_size_v(spec) != query.head_size,
        _LSE: with_lse,
    }
    yield from (feature for feature, is_used in uses.items() if is_used)
    yield str(case.stored_dtype).removeprefix("torch.")
    if spec.kv_format != PLAIN:
        yield f"format {spec.kv_format.name}"
    if case.layer.shares_with is not None:
        yield "shared caches"
    if case.wrappers:
        yield f"after {'+'.join(wrapper.name for wrapper in case.wrappers)}"


def _of_batch(case: Case) -> Iterator[str]:
    if case.is_cross:
        yield "keys of another sequence"
    elif all(request.num_new == 1 and request.num_computed for request in case.requests):
        yield "decodes"
    else:
        yield "prompts" if not any(request.num_computed for request in case.requests) else "mixed batches"
    uses = {
        _NOT_CAUSAL: not case.causal,
        _HIDDEN: any(request.num_hidden for request in case.requests),
        _RANGES: any(request.ranges for request in case.requests),
        "padding": case.num_padding > 0,
    }
    yield from (feature for feature, is_used in uses.items() if is_used)


def _refused(
    backend_class: type[AttentionBackend], device: str, form: StateForm, formats: Sequence[KVFormat] | None
) -> dict[str, tuple[str, ...]]:
    """Return the features that the backend refuses: those of layers of the kit that none of its layers has.

    The codes are those of the layer with the feature that has the fewest.
    """
    capabilities, usual = backend_class.capabilities, make_layer(backend_class.capabilities, form)
    layers = [layer for _, layer in make_layers(capabilities, form)]
    layers += [attrs.evolve(usual, spec=_in_dtype(usual.spec, dtype)) for dtype in MAIN_DTYPES]
    all_formats = installed_formats() if formats is None else formats
    layers += filter(None, (in_format(usual, kv_format) for kv_format in all_formats))
    served: set[str] = set()
    refused: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        case = Case(name="", layer=layer, requests=(), form=form)
        features = {*_of_mask(case.spec), *_of_layer(case, with_lse=False)}
        codes = tuple(refusal.code for refusal in find_refusals(capabilities, layer, device))
        if not codes:
            served |= features
        for feature in features if codes else ():
            refused[feature] = min(codes, refused.get(feature, codes), key=len)
    refused = {feature: codes for feature, codes in refused.items() if feature not in served}
    if (not_causal := find_not_causal(capabilities)) is not None:
        refused[_NOT_CAUSAL] = (not_causal.code,)
    if SEQ_STARTS not in capabilities.extensions:
        refused[_HIDDEN] = (f"extension_{SEQ_STARTS}",)
    if "ranges" not in capabilities.masks:
        refused[_RANGES] = ("mask_ranges",)
    return refused if capabilities.returns_lse else {**refused, _LSE: ("lse",)}


def _in_dtype(spec: KVCacheSpec | None, dtype: str) -> KVCacheSpec:
    values: Any = spec
    changed_spec: KVCacheSpec = attrs.evolve(values, dtype=dtype)
    return changed_spec
