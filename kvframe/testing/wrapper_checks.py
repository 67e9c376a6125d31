"""The checks of a wrapper: its declarations and its effect, on every kind of layer that it does not refuse."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from kvframe.attention.wrapping import MISTAKES
from kvframe.config.options import make_with_options
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import KVFrameError, WrapperError
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import MetadataWrapper
from kvframe.loading.plugins import load_plugins
from kvframe.selection.chains import bind_chain
from kvframe.testing.case import Case
from kvframe.testing.checks import Check, Checks
from kvframe.testing.composition import CROSS, LAYERS, NOT_CAUSAL, RANGES, SHARING, make_cases_of, make_labelled_layer
from kvframe.testing.conformance import check_backend
from kvframe.testing.grid import chain_refusals
from kvframe.testing.laws import ConformanceError
from kvframe.testing.state import form_of
from kvframe.testing.wrappers import check_wrapper

_OF_A_BATCH = (NOT_CAUSAL, CROSS, RANGES)
"""Kinds that differ in their batches only; a layer's declarations are checked once."""


def wrapper_checks(
    wrapper_class: type[MetadataWrapper],
    options: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    layers: Mapping[str, LayerSpec] = MappingProxyType({}),
) -> Checks:
    """Return the checks of a wrapper: ``check_wrapper``, and the reference backend's attention after it.

    Args:
        wrapper_class: The wrapper.
        options: Its options; none unless given.
        name: Its registered name; its own unless given.
        layers: More layers that it can serve, by name, for which its declarations are checked.

    Raises:
        ConformanceError: It cannot be made with these options, or it refuses every layer of the kit.
    """
    part = f"wrapper {name or wrapper_class.name!r}"
    try:
        wrapper = make_with_options(wrapper_class, options or {})
    except (KVFrameError, ValueError) as error:
        raise ConformanceError(f"{part} cannot be made: {error}") from error
    reference: type[AttentionBackend] = load_plugins().registry.backends.load("torch_reference")
    checks: list[Check] = []
    refused: dict[str, tuple[str, ...]] = {}
    for label in (label + sharing for label in LAYERS for sharing in ("", SHARING)):
        layer = make_labelled_layer(label, reference.capabilities, form_of(reference))
        try:
            bind_chain((wrapper,), layer)
        except WrapperError as error:
            refused[label] = (error.code,)
            continue
        if not any(each in label for each in _OF_A_BATCH):
            run = partial(check_wrapper, wrapper, layer)
            checks.append(Check(name=f"declared-{_slug(label)}", features=(label,), run=run))
        codes = tuple(each.code for each in chain_refusals((wrapper,), layer, reference.capabilities, "cpu"))
        if codes:
            refused.setdefault(label, codes)
            continue
        checks += [
            Check(
                name=f"attention-{_slug(case.name)}", features=(label,), run=partial(_check_attention, reference, case)
            )
            for case in make_cases_of((wrapper,), label, layer, NOT_CAUSAL not in label)
        ]
    checks += [
        Check(name=f"declared-{label}", features=("more layers",), run=partial(check_wrapper, wrapper, layer))
        for label, layer in layers.items()
    ]
    return Checks(part=part, checks=tuple(checks), refused=refused)


def _slug(label: str) -> str:
    return label.replace(", ", "-").replace(": ", "-").replace(" ", "_")


def _check_attention(backend_class: type[AttentionBackend], case: Case) -> str | None:
    """Compare attention after the wrapper; return the code if the wrapper refuses the step."""
    try:
        check_backend(backend_class, case)
    except WrapperError as error:
        if error.code in MISTAKES:
            raise ConformanceError(str(error)) from error
        return error.code
    return None
