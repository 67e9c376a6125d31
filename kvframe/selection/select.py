"""Selects each layer's wrapper chain and backend, and records why every other candidate was passed over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import attrs

from kvframe.config.choices import check_order, make_backend_options, make_with_use
from kvframe.config.options import AUTO, Use
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import BackendError, KVFrameError, PluginError, StackError, WrapperError
from kvframe.contract.foreign import call
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import DROPS_TOKENS, MetadataWrapper
from kvframe.loading.claims import BUILTIN_OWNER
from kvframe.loading.packages import to_install
from kvframe.planning.answers import ask_mask
from kvframe.selection.choice import Candidate, Choice, Identity, bind_chain, chain_capture
from kvframe.selection.refusals import Refusal, find_refusals, needs_copies
from kvframe.selection.skipping import NO_SKIPPING, Skipping

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.loading.claims import Claim
    from kvframe.loading.registry import Registry

_log = logging.getLogger("kvframe")


def select_backends(
    layers: Sequence[LayerSpec],
    stack: Stack,
    registry: Registry,
    device: str,
    skipping: Skipping = NO_SKIPPING,
) -> tuple[Choice, ...]:
    """Choose a wrapper chain and a backend for each layer that attends, in the model's order.

    The chain is the stack's, or otherwise the default of the layer's cache spec. If the stack names a backend, that
    backend serves the layer or the layer is refused; no other one is tried. ``"auto"`` considers the backends whose
    declared capabilities cover the layer after its chain. If the stack names sizes of graphs, it considers only those
    whose steps can be captured, if there are any. Of these, it prefers those that read the layer's format themselves,
    then the highest preference, then the first name.

    A layer that keeps state and does not attend is computed by the model, so no backend is chosen for it.

    Raises:
        BackendError: No backend can serve a layer, or the named one cannot; the message says why for each. Or a rule
            gives a backend or wrappers to a layer that the model computes.
        WrapperError: A wrapper cannot serve a layer, or is at a wrong place in its chain.
        StackError: Options do not fit their wrapper or backend, or ``prefill_skipping`` is a wrapper that drops no
            tokens.
        PluginError: A wrapper cannot be imported or fails, or a parameter of a wrapper or backend cannot be hashed.
        UnknownNameError: A cache spec's default chain names a wrapper that no plugin registers.
        SpecError: The mask of a layer's cache spec is no mask.
    """
    _check_skipping(stack, registry)
    for layer in layers:
        # A rule that names a layer by its pattern does not mean the layer's entries.
        if layer.query is None and layer.spec is not None and layer.entry_of is None:
            _check_not_chosen(layer, layer.spec.kind, stack)
    attending = [layer for layer in layers if layer.query is not None]
    load = cache(partial(_load, registry=registry, device=device))
    choices = tuple(_choose(layer, layers, stack, registry, load, device, skipping) for layer in attending)
    for layer, choice in zip(attending, choices, strict=True):
        if choice.backend.startswith(f"{BUILTIN_OWNER}:") and _may_choose(stack, layer):
            _log.warning(
                "the attention of %s runs on %s, which is slow: it is for comparing other backends with it; %s",
                layer.name,
                choice.backend,
                _what_keeps_others(choice),
            )
            break
    return choices


def _may_choose(stack: Stack, layer: LayerSpec) -> bool:
    """Return whether the stack leaves the choice of a layer's backend to kvframe."""
    assert layer.spec is not None
    return stack.rule_for(layer.name, layer.spec.kind).backend == AUTO


def _what_keeps_others(choice: Choice) -> str:
    """Return what other backends lack on this machine, or what to install if they lack nothing."""
    sentences = [
        f"{candidate.name}: {choice.why_not(candidate)}"
        for candidate in choice.candidates
        if any(refusal.code in ("environment", "import") for refusal in candidate.refusals)
    ]
    return "; ".join(sentences) or f"`{to_install('kvframe-torch')}` adds one for serving models"


def _check_not_chosen(layer: LayerSpec, kind: str, stack: Stack) -> None:
    """Raise for a rule that gives a backend or wrappers to a layer without attention."""
    rule = stack.rule_for(layer.name, kind)
    for label, names in (
        ("backend", [] if rule.backend == AUTO else [rule.backend.name]),
        ("wrapper", [use.name for use in rule.wrappers or ()]),
    ):
        if names:
            raise BackendError(
                f"{stack.source}: a rule gives layer {layer.name!r} the {label} {names[0]!r}, but a {kind!r} layer "
                "does not attend: the model computes it; let the rule name the kind of the layers that it is for, such "
                "as "
                'kind = "full_attention"'
            )


def _check_skipping(stack: Stack, registry: Registry) -> None:
    """Raise if ``prefill_skipping`` is a wrapper that drops no tokens, even if the model has no layers to skip."""
    use = stack.model.prefill_skipping
    if use is not None and DROPS_TOKENS not in _make_wrapper(use, registry)[0].effects:
        raise StackError(
            f"{stack.source}: model.prefill_skipping is {use.name!r}, a wrapper that drops no tokens; name one that "
            "keeps the generating ones only"
        )


def _choose(
    layer: LayerSpec,
    layers: Sequence[LayerSpec],
    stack: Stack,
    registry: Registry,
    load: Callable[[str], _Loaded],
    device: str,
    skipping: Skipping,
) -> Choice:
    assert layer.spec is not None
    ask_mask(layer.spec)  # a wrong one would look like a fault of every backend
    rule = stack.rule_for(layer.name, layer.spec.kind)
    uses = tuple(map(Use, layer.spec.default_wrappers)) if rule.wrappers is None else rule.wrappers
    owned_wrappers = [_make_wrapper(use, registry) for use in uses]
    drops_tokens = any(DROPS_TOKENS in wrapper.effects for wrapper, _ in owned_wrappers)
    if layer.name in skipping.layers and not drops_tokens:
        assert stack.model.prefill_skipping is not None
        owned_wrappers.insert(0, _make_wrapper(stack.model.prefill_skipping, registry))
    try:
        if drops_tokens and layer.name not in skipping.layers:
            raise WrapperError(
                f"its wrapper chain drops tokens, and the layer computes all of them: "
                f"{skipping.why_not(layers, layer.name)}",
                code="not_skipped",
            )
        check_order([type(wrapper) for wrapper, _ in owned_wrappers])
        wrappers, wrapped_layer, extensions = bind_chain([wrapper for wrapper, _ in owned_wrappers], layer)
    except WrapperError as error:
        raise WrapperError(f"layer {layer.name!r}: {error}", code=error.code) from error
    except PluginError as error:
        raise PluginError(f"layer {layer.name!r}: {error}") from error
    asks_graphs = not isinstance(stack.model.graphs, str) and chain_capture(wrappers) is not GraphCapture.NEVER
    names = registry.backends.names() if rule.backend == AUTO else (rule.backend.name,)
    usable_backends: dict[str, _Usable] = {}
    candidates = []
    for name in names:
        candidate, usable = _consider(load(name), rule.backend, wrapped_layer, extensions, device)
        if usable is not None:
            usable_backends[candidate.name] = usable
            if asks_graphs:
                is_capturable = usable.backend_class.capabilities.capture is not GraphCapture.NEVER
                candidate = attrs.evolve(candidate, in_graphs=is_capturable)
        candidates.append(candidate)
    able_candidates = [candidate for candidate in candidates if not candidate.refusals]
    if not able_candidates:
        raise BackendError(_none_serves(layer, rule.backend, candidates))
    best = _best(able_candidates)
    other_candidates = [candidate for candidate in candidates if candidate is not best]
    usable = usable_backends[best.name]
    return Choice(
        layer=layer.name,
        wrappers=wrappers,
        wrapper_ids=tuple(
            Identity.of(owner, type(wrapper), _parameters(wrapper))
            for wrapper, (_, owner) in zip(wrappers, owned_wrappers, strict=True)
        ),
        wrapped=wrapped_layer,
        backend=best.name,
        backend_class=usable.backend_class,
        backend_options=usable.options,
        backend_id=usable.identity,
        candidates=(best, *other_candidates),
    )


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the chosen candidate.

    Candidates that can be captured are chosen before others, if graphs are asked for: with the others, the engine would
    not start.
    """
    candidates = [candidate for candidate in candidates if candidate.in_graphs] or candidates
    return min(candidates, key=lambda candidate: (candidate.on_copies, -candidate.preference, candidate.name))


def _parameters(options: Any) -> dict[str, Any]:
    """Return all parameters, including those that the stack leaves at their defaults."""
    return {} if options is None else attrs.asdict(options, recurse=False)


@attrs.frozen
class _Usable:
    """A backend that can serve a layer: its class, an instance of its ``options_class``, and its identity."""

    backend_class: type[AttentionBackend]
    options: Any
    identity: Identity


@attrs.frozen
class _Loaded:
    """A backend's claim and its class, which is None with the reason why it cannot be imported."""

    claim: Claim
    backend_class: type[AttentionBackend] | None
    refusal: Refusal | None = None


def _load(name: str, *, registry: Registry, device: str) -> _Loaded:
    """Import a backend, and ask whether it can run here; any error in its code is the reason that it cannot."""
    claim = registry.backends.get(name)
    try:
        backend_class: type[AttentionBackend] = claim.load()
        reason = claim.why_unusable(backend_class) if device in backend_class.capabilities.devices else ""
    except KVFrameError as error:
        return _Loaded(claim, None, Refusal("import", str(error)))
    return _Loaded(claim, backend_class, Refusal("environment", reason) if reason else None)


def _consider(
    loaded: _Loaded, use: Use, layer: LayerSpec, extensions: Collection[str], device: str
) -> tuple[Candidate, _Usable | None]:
    """Check whether one backend can serve a layer; any error in its code is the reason that it cannot."""
    claim, backend_class = loaded.claim, loaded.backend_class
    if backend_class is None:
        assert loaded.refusal is not None
        return Candidate(name=claim.id, refusals=(loaded.refusal,)), None
    label = f"backend {claim.id!r}"
    try:
        candidate = call(f"{label}: capabilities", _compare, claim.id, backend_class, layer, extensions, device)
        if loaded.refusal is not None:
            candidate = attrs.evolve(candidate, refusals=(loaded.refusal,))
        if candidate.refusals:
            return candidate, None
        options = make_backend_options(use, backend_class)
        parameters = call(f"{label}: its options", _parameters, options)
        identity = call(
            f"{label}: its options", Identity.of, claim.owner, backend_class, parameters, passes=(PluginError,)
        )
    except StackError:
        if use != AUTO:
            raise
        refusal = Refusal("options", f"{label} has options without a default")
    except KVFrameError as error:
        refusal = Refusal("import", str(error))
    else:
        return candidate, _Usable(backend_class, options, identity)
    return Candidate(name=claim.id, refusals=(refusal,)), None


def _compare(
    name: str,
    backend_class: type[AttentionBackend],
    layer: LayerSpec,
    extensions: Collection[str],
    device: str,
) -> Candidate:
    """Compare a backend's capabilities with a layer. May raise anything."""
    capabilities = backend_class.capabilities
    refusals = find_refusals(capabilities, layer, device, extensions)
    if device not in capabilities.devices:
        # The first reason is enough. More checks could be slow, because a backend may compile its kernels for them.
        refusals = refusals[:1]
    return Candidate(
        name=name,
        refusals=tuple(refusals),
        preference=capabilities.preference,
        on_copies=needs_copies(capabilities, layer),
    )


def _none_serves(layer: LayerSpec, use: Use, candidates: Sequence[Candidate]) -> str:
    reasons = "; ".join(
        f"{candidate.name}: {', '.join(refusal.reason for refusal in candidate.refusals)}" for candidate in candidates
    )
    if use == AUTO:
        return f"no backend can serve layer {layer.name!r}: {reasons or 'none is installed'}"
    return f"the stack gives layer {layer.name!r} to backend {use.name!r}, which cannot serve it: {reasons}"


def _make_wrapper(use: Use, registry: Registry) -> tuple[MetadataWrapper, str]:
    """Return a wrapper, not yet bound to a layer, and the distribution that provides it."""
    claim = registry.wrappers.get(use.name)
    wrapper_class: type[MetadataWrapper] = claim.load()
    return make_with_use("wrapper", use, wrapper_class), claim.owner
