"""The checks of a format: its laws, and the attention of every installed backend on its pages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from kvframe.config.options import make_with_options
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import KVFrameError, PluginError
from kvframe.contract.foreign import call
from kvframe.contract.formats import KVFormat
from kvframe.loading.plugins import load_plugins
from kvframe.loading.registry import Registry
from kvframe.testing.checks import Check, Checks
from kvframe.testing.conformance import check_backend
from kvframe.testing.formats import DTYPES, LAWS, check_law
from kvframe.testing.grid import in_format, make_cases, make_layer
from kvframe.testing.laws import ConformanceError
from kvframe.testing.sample import sample
from kvframe.testing.state import KEYS_AND_VALUES, form_of

HEAD_SIZES = ((16, 8), (2, 2), (40, 128))
"""Elements of a key and of a value."""


def format_checks(
    format_class: type[KVFormat],
    options: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    registry: Registry | None = None,
    whole: bool = False,
) -> Checks:
    """Return the checks of a format.

    Args:
        format_class: The format.
        options: Its options; none unless given.
        name: Its registered name; its own unless given.
        registry: Where backends are looked up; that of the installed plugins unless given.
        whole: Whether backends compute all of their cases in the format, and not a sample.

    Raises:
        ConformanceError: It cannot be made with these options.
    """
    part = f"format {name or format_class.name!r}"
    try:
        kv_format = make_with_options(format_class, options or {})
    except (KVFrameError, ValueError) as error:
        raise ConformanceError(f"{part} cannot be made: {error}") from error
    checks = [
        Check(
            name=f"{law}-{str(dtype).removeprefix('torch.')}-sizes={size}_{size_v}",
            features=(f"law: {law}",),
            run=partial(check_law, law, kv_format, dtype, head_size=size, head_size_v=size_v),
        )
        for law in LAWS
        for dtype in DTYPES
        for size, size_v in HEAD_SIZES
    ]
    registry = load_plugins().registry if registry is None else registry
    refused: dict[str, tuple[str, ...]] = {}
    for backend in registry.backends.names():
        more, codes = _attention_checks(kv_format, backend, registry, whole)
        checks += more
        if codes:
            refused[f"attention by {backend}"] = codes
    return Checks(part=part, checks=tuple(checks), refused=refused)


def _attention_checks(
    kv_format: KVFormat, backend: str, registry: Registry, whole: bool
) -> tuple[list[Check], tuple[str, ...]]:
    """Return checks of a backend's attention in a format, or the codes of the refusals."""
    try:
        backend_class: type[AttentionBackend] = registry.backends.load(backend)
        reason = call("unusable_reason()", backend_class.unusable_reason)
    except PluginError:
        return [], ("import",)
    if reason:
        return [], ("environment",)
    capabilities = backend_class.capabilities
    if form_of(backend_class) is not KEYS_AND_VALUES:
        return [], ("state",)
    layer = in_format(make_layer(capabilities), kv_format)
    if layer is None:
        return [], ("format",)
    refusals = capabilities.refusals(layer, "cpu")
    if refusals:
        return [], tuple(refusal.code for refusal in refusals)
    of_others = capabilities.formats - {"plain", kv_format.name}
    formats = [kv_format, *(registry.formats.load(each)() for each in sorted(of_others))]
    cases = make_cases(capabilities, formats=formats, only=f"{kv_format.name}-*")
    chosen = cases if whole else sample([case for case in cases if "-full" in case.name], ())
    features = (f"attention by {backend}",)
    return [
        Check(name=f"{backend}-{case.name}", features=features, run=partial(check_backend, backend_class, case))
        for case in chosen
    ], ()
