"""The checks of a cache spec: its laws, a plan, and the attention of every installed backend under its mask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from kvframe.config.options import make_with_options
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import KVFrameError, SpecError
from kvframe.contract.specs import TOKENS, KVCacheSpec, LayerSpec, QuerySpec
from kvframe.loading.plugins import load_plugins
from kvframe.loading.registry import Registry
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import plan_cache
from kvframe.selection.refusals import find_refusals
from kvframe_testing.case import Case
from kvframe_testing.checks import Check, Checks, make_part
from kvframe_testing.composition import STEPS
from kvframe_testing.conformance import attention_checks
from kvframe_testing.grid import SCALE
from kvframe_testing.kept_tokens import check_kept
from kvframe_testing.laws import LAWS, ConformanceError, check_law
from kvframe_testing.state import KEYS_AND_VALUES, StateForm, form_of

BLOCK_SIZES = (1, 4, 5, 32)
MAX_TOKENS = 48
"""Positions up to this one are checked."""

_LONGEST = 1 << 14
"""The length of the longest request for which a spec is planned."""

_SIZES = ((1, 2, 3), (5, 3, 2), (24, 16, 7))
"""Values of the whole numbers that a spec requires, if no options are given: smaller and larger than blocks."""

_USUAL: Mapping[str, int] = {"num_kv_heads": 2, "head_size": 8, "latent_size": 16, "rope_size": 4, "head_size_v": 8}
"""Sizes of state, by the names of their fields."""


def spec_checks(
    spec_class: type[KVCacheSpec],
    options: Sequence[Mapping[str, Any]] | None = None,
    *,
    name: str = "",
    registry: Registry | None = None,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    max_tokens: int = MAX_TOKENS,
    num_refused: int = 0,
    whole: bool = False,
) -> Checks:
    """Return the checks of a spec. The arguments are the attributes of ``SpecTests``.

    Args:
        spec_class: The spec.
        options: Options with which it is checked, small against ``max_tokens``. Unless given, whole numbers are chosen
            for those that it requires.
        name: Its registered name; ``kind`` unless given.
        registry: Where backends are looked up; that of the installed plugins unless given.
        block_sizes: The block sizes with which it is checked.
        max_tokens: Positions up to this one are checked.
        num_refused: As for ``check_spec``.
        whole: Whether attention is computed for each step, and not for the mixed ones alone.
    """
    part = f"cache spec {name or spec_class.kind!r}"
    registry = load_plugins().registry if registry is None else registry
    variants = list(_options_of(spec_class, options))
    specs = {
        _label(variant, size): make_part(part, spec_class, {**variant, "block_size": size})
        for variant in variants
        for size in block_sizes
    }
    checks = [
        Check(
            name=f"{law}-{label}",
            features=(f"law: {law}",),
            run=partial(check_law, law, spec, max_tokens, num_refused=num_refused),
        )
        for law in LAWS
        for label, spec in specs.items()
    ]
    checks += [
        Check(name=f"plan-{label}", features=("planning",), run=partial(_check_plan, spec, max_tokens))
        for label, spec in specs.items()
    ]
    checks += [
        Check(name=f"kept-{label}", features=("prompt_budget",), run=partial(_check_kept, spec))
        for label, spec in specs.items()
        if spec.prompt_budget is not None
    ]
    refused_codes: dict[str, tuple[str, ...]] = {}
    for variant in variants:
        label, spec = _label(variant, 4), make_part(part, spec_class, {**variant, "block_size": 4})
        attention, codes = attention_checks(registry, partial(_cases_of, spec, label, STEPS if whole else ("mixed",)))
        checks += attention
        refused_codes = codes | refused_codes
    return Checks(part=part, checks=tuple(checks), refused=refused_codes, order=tuple(f"law: {law}" for law in LAWS))


def _check_kept(spec: KVCacheSpec) -> None:
    # A type that stores queries has their heads among its options.
    check_kept(spec, num_heads=getattr(spec, "num_heads", 4 * spec.state_tensors()["k"].shape[1]))


def _label(variant: Mapping[str, Any], block_size: int) -> str:
    shown_options = {key: value for key, value in variant.items() if key not in _USUAL}
    return "-".join(f"{key}={value}" for key, value in {**shown_options, "block": block_size}.items())


def _options_of(
    spec_class: type[KVCacheSpec], options: Sequence[Mapping[str, Any]] | None
) -> Sequence[Mapping[str, Any]]:
    """Return the options to check, with the usual sizes of state where the spec has such fields."""
    fields = {field.name: field for field in attrs.fields(spec_class) if field.init}
    usual = {key: value for key, value in _USUAL.items() if key in fields and fields[key].default is attrs.NOTHING}
    if options is not None:
        return [{**usual, **variant} for variant in options]
    required = [
        key for key, field in fields.items() if field.default is attrs.NOTHING and key not in {*usual, "block_size"}
    ]
    names = [key for key in required if fields[key].type not in ("int", int)]
    if names:
        raise ConformanceError(
            f"cache spec {spec_class.kind!r} needs {', '.join(map(repr, names))}, and the kit has values for whole "
            f"numbers only: give all that it needs, by --options '{{\"{names[0]}\": …}}' or by `options` of SpecTests"
        )
    variants = [{**usual, **dict(zip(required, sizes * len(required), strict=False))} for sizes in _SIZES]
    possible = [variant for variant in variants if _can_be_made(spec_class, variant)]
    if not possible:
        make_part(f"cache spec {spec_class.kind!r}", spec_class, {**variants[0], "block_size": 4})
    return possible if required else possible[:1]


def _can_be_made(spec_class: type[KVCacheSpec], variant: Mapping[str, Any]) -> bool:
    try:
        for size in BLOCK_SIZES:
            make_with_options(spec_class, {**variant, "block_size": size})
    except (KVFrameError, ValueError):
        return False
    return True


def _check_plan(spec: KVCacheSpec, max_tokens: int) -> None:
    """Plan one layer; planning checks a sample of answers up to real lengths too."""
    longest = _LONGEST
    input_lens = {} if spec.sequence == TOKENS else {spec.sequence: longest}
    try:
        plan_cache(
            group_layers([LayerSpec(name="layer", spec=spec)]),
            memory_bytes=1 << 30,
            max_model_len=longest,
            max_num_batched_tokens=max_tokens,
            max_input_lens=input_lens,
        )
    except KVFrameError as error:
        raise ConformanceError(f"{spec}: {error}") from error


def _cases_of(
    spec: KVCacheSpec, label: str, steps: Iterable[str], backend: str, backend_class: type[AttentionBackend]
) -> tuple[dict[str, Case], tuple[str, ...]]:
    """Return cases of attention under a spec's mask by name, or the codes of the refusals."""
    form = form_of(backend_class)
    layer = _layer_of(spec, form)
    if layer is None or not spec.keeps_past or spec.sequence != TOKENS:
        return {}, ()
    if refusals := find_refusals(backend_class.capabilities, layer, "cpu"):
        return {}, tuple(refusal.code for refusal in refusals)
    names = {step: f"{backend}-{label}-{step}" for step in steps}
    return {name: Case(name=name, layer=layer, requests=STEPS[step], form=form) for step, name in names.items()}, ()


def _layer_of(spec: KVCacheSpec, form: StateForm) -> LayerSpec | None:
    """Return a layer with this spec whose queries fit the form's state; None if the form draws other state."""
    names = {*spec.state_tensors()}
    if form is KEYS_AND_VALUES:
        if names != {"k", "v"}:
            return None
        key = spec.state_tensors()["k"].shape
        if len(key) != 3:
            return None
        return LayerSpec(name="layer", spec=spec, query=QuerySpec(num_heads=2 * key[1], head_size=key[2], scale=SCALE))
    usual = _as_form(form)
    if usual is None or names != {*usual.state_tensors()}:
        return None
    head_size = form.usual_head_size({})
    return LayerSpec(name="layer", spec=spec, query=QuerySpec(num_heads=4, head_size=head_size, scale=SCALE))


def _as_form(form: StateForm) -> KVCacheSpec | None:
    try:
        return form.spec_class(block_size=4, **form.sizes(form.usual_head_size({})))
    except (SpecError, TypeError):
        return None
