"""Choosing each layer's backend, with the reason for every candidate that was passed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kvframe.attention.backend import AttentionBackend, Refusal
from kvframe.attention.wrapper import MetadataWrapper, WrapperChain
from kvframe.errors import BackendError, KVFrameError, StackError
from kvframe.specs import LayerSpec

if TYPE_CHECKING:
    from kvframe.registry import Registry
    from kvframe.stack import Stack, WrapperUse

AUTO = "auto"


@attrs.frozen(kw_only=True)
class Candidate:
    """One backend that was looked at for a layer.

    Attributes:
        name: Its registered name, with its distribution (``"kvframe-triton:triton"``).
        refusals: Why it cannot serve the layer; empty if it can.
        preference: What it declares of itself; the highest that can serve is taken.
    """

    name: str
    refusals: tuple[Refusal, ...] = ()
    preference: int = 0


@attrs.frozen(kw_only=True)
class Choice:
    """What was chosen for one layer, and out of what.

    Attributes:
        layer: The layer's name.
        wrappers: Its wrapper chain.
        backend: The chosen backend, with its distribution.
        backend_class: Its class.
        candidates: Every backend that was looked at, the chosen one first.
    """

    layer: str
    wrappers: WrapperChain
    backend: str
    backend_class: type[AttentionBackend]
    candidates: tuple[Candidate, ...]

    def why_not(self, candidate: Candidate) -> str:
        """Return in one sentence why ``candidate`` was passed over; empty for the chosen one."""
        if candidate.name == self.backend:
            return ""
        if candidate.refusals:
            return "; ".join(refusal.reason for refusal in candidate.refusals)
        return f"can serve this layer; {self.backend} is preferred"


def select_backends(layers: Sequence[LayerSpec], stack: Stack, registry: Registry, device: str) -> tuple[Choice, ...]:
    """Choose a wrapper chain and a backend for each layer.

    A backend that the stack names is taken or refused, never replaced. ``"auto"`` takes, of the backends whose
    declared capabilities cover the layer, the one with the highest preference, then the first by name.

    Args:
        layers: The model's attention layers.
        stack: Its rules.
        registry: Where names are looked up.
        device: The device type that the model runs on (``"cpu"``).

    Raises:
        BackendError: No backend can serve a layer, or the named one cannot; says why for each.
        StackError: A wrapper's options do not fit it.
    """
    chosen = []
    for layer in layers:
        assert layer.spec is not None
        rule = stack.rule_for(layer.name, layer.spec.kind)
        wrappers = tuple(_make_wrapper(use, registry) for use in rule.wrappers)
        names = registry.backends.names() if rule.backend == AUTO else (rule.backend,)
        classes: dict[str, type[AttentionBackend]] = {}
        candidates = []
        for name in names:
            candidate, backend_class = _consider(name, layer, registry, device)
            candidates.append(candidate)
            if backend_class is not None:
                classes[candidate.name] = backend_class
        able = [candidate for candidate in candidates if not candidate.refusals]
        if not able:
            raise BackendError(_nobody(layer, rule.backend, candidates))
        best = min(able, key=lambda candidate: (-candidate.preference, candidate.name))
        rest = [candidate for candidate in candidates if candidate is not best]
        chosen.append(
            Choice(
                layer=layer.name,
                wrappers=wrappers,
                backend=best.name,
                backend_class=classes[best.name],
                candidates=(best, *rest),
            )
        )
    return tuple(chosen)


def _consider(
    name: str, layer: LayerSpec, registry: Registry, device: str
) -> tuple[Candidate, type[AttentionBackend] | None]:
    entry = registry.backends.get(name)
    try:
        backend_class: type[AttentionBackend] = entry.load()
        reason = backend_class.unusable_reason()
    except KVFrameError as error:
        return Candidate(name=entry.id, refusals=(Refusal("import", str(error)),)), None
    capabilities = backend_class.capabilities
    refusals = [Refusal("environment", reason)] if reason else capabilities.refusals(layer, device)
    return Candidate(name=entry.id, refusals=tuple(refusals), preference=capabilities.preference), backend_class


def _nobody(layer: LayerSpec, asked: str, candidates: Sequence[Candidate]) -> str:
    reasons = "; ".join(
        f"{candidate.name}: {', '.join(refusal.reason for refusal in candidate.refusals)}" for candidate in candidates
    )
    if asked == AUTO:
        return f"no backend can serve layer {layer.name!r}: {reasons or 'none is installed'}"
    return f"the stack gives layer {layer.name!r} to backend {asked!r}, which cannot serve it: {reasons}"


def _make_wrapper(use: WrapperUse, registry: Registry) -> MetadataWrapper:
    wrapper_class: type[MetadataWrapper] = registry.wrappers.load(use.name)
    try:
        return wrapper_class(**use.options)
    except TypeError as error:
        options = ", ".join(field.name for field in attrs.fields(wrapper_class)) or "none"
        raise StackError(f"wrapper {use.name!r}: {error}; its options: {options}") from error
