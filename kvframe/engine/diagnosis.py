"""Finds the faulty part when a model fails its self-check: a backend, a wrapper or the description of the model."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial

import attrs

from kvframe.attention.layers import AttentionLayers
from kvframe.contract.errors import BackendError, ModelError, WrapperError
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import DROPS_TOKENS
from kvframe.engine.assembly import Assembly, plain_layers
from kvframe.engine.dense_check import check_densely
from kvframe.engine.self_check import run_packed
from kvframe.loading.claims import BUILTIN_OWNER, Claim
from kvframe.loading.registry import Catalogue, Registry
from kvframe.planning.retyping import retyped_layers
from kvframe.selection.chains import bind_chain, divides_keys
from kvframe.selection.choice import Candidate, Choice
from kvframe.selection.identity import Identity


def check_model(assembly: Assembly, layers: Sequence[LayerSpec], registry: Registry) -> None:
    """Let a model compare packed runs with its own plain forward, and find the wrong part if they differ.

    If the check fails, it runs again with the reference backend for every layer that this backend can serve. If the
    model then passes, a backend is wrong: that of the first layer with which the model fails. If it still fails, but
    passes without its wrappers, a wrapper is wrong. If it fails without them too, the model is wrong.

    Args:
        assembly: The set-up; its model is attached to its layers, and to others after a failure.
        layers: The layer specs that it was made of, in any format.
        registry: Where the reference backend is looked up.

    Raises:
        ModelError: The model attends in another way than its layers describe, or the comparison could not be made.
        BackendError: A backend computes a layer wrongly (``wrong_output``).
        WrapperError: A wrapper changes what a layer computes (``wrong_output``).
    """
    plain = plain_layers(layers)
    try:
        compare(assembly, plain, registry)
    except ModelError as error:
        explained = _explain(error, assembly, plain, registry)
        if explained is None:
            raise
        # The message says it all; a traceback would show the first error, which names no part, before it.
        raise explained from None


def compare(assembly: Assembly, layers: Sequence[LayerSpec], registry: Registry) -> None:
    """Compare packed runs with the model's own forward; with dense attention if layers have other types than its own.

    Args:
        assembly: The set-up; its model is attached to its layers.
        layers: The layer specs that it was made of.
        registry: Where the types of the model's own layers are looked up.

    Raises:
        ModelError: The runs differ, or the comparison could not be made.
    """
    retyped = retyped_layers(assembly.model.description, tuple(layers), registry)
    if retyped:
        check_densely(assembly, layers, retyped)
    else:
        assembly.model.self_check(partial(run_packed, assembly))


def _explain(
    error: ModelError, assembly: Assembly, layers: Sequence[LayerSpec], registry: Registry
) -> ModelError | BackendError | WrapperError | None:
    """Return the error that names the wrong part; None if ``error`` already says all that is known."""
    trials, chosen, device = _Trials(assembly, layers, registry), assembly.choices, assembly.device.type
    claim = _find_reference(registry)
    name = assembly.model.description.name
    if assembly.stack.engine.compile and trials.pass_with(chosen):
        return ModelError(f"{name} passes its self-check only if it is not compiled: leave compile out of the stack")
    reference, uncovered = _on_reference(chosen, layers, claim, device, keep_wrappers=True)
    if trials.pass_with(reference):
        return _wrong_backend(name, claim, chosen[trials.first_wrong(reference, chosen)], registry)
    plain, _ = _on_reference(chosen, layers, claim, device, keep_wrappers=False)
    if plain != reference and trials.pass_with(plain):
        return _wrong_wrapper(name, claim, chosen[trials.first_wrong(plain, reference)], registry)
    if not uncovered:
        return None
    choice, reason = uncovered[0]
    return ModelError(
        f"{error}. The fault may also be that of backend {choice.backend!r}, of layer {choice.layer!r}: it could not "
        f"be compared with {claim.id!r}, which {reason}; check it: {_to_check(registry.backends, choice.backend)}"
    )


class _Trials:
    """Runs a model's self-check on other choices of wrappers and backends, in the same cache."""

    def __init__(self, assembly: Assembly, layers: Sequence[LayerSpec], registry: Registry) -> None:
        self._assembly = assembly
        self._layers = layers
        self._registry = registry

    def pass_with(self, choices: Sequence[Choice]) -> bool:
        """Return whether the model passes its self-check with these choices."""
        assembly = self._assembly
        layers = AttentionLayers(
            self._layers,
            choices,
            assembly.grouping,
            assembly.views,
            assembly.device,
            assembly.layers.skipped,
            assembly.layers.local,
        )
        assembly.model.detach()
        assembly.model.attach(layers)
        try:
            compare(attrs.evolve(assembly, layers=layers), self._layers, self._registry)
        except ModelError:
            return False
        return True

    def first_wrong(self, right: Sequence[Choice], wrong: Sequence[Choice]) -> int:
        """Return the index of a layer that passes as in ``right`` and fails as in ``wrong``, found by bisection.

        Args:
            right: Choices that pass.
            wrong: Choices for the same layers that fail.
        """
        passing, failing = 0, len(wrong)
        while failing - passing > 1:
            middle = (passing + failing) // 2
            if self.pass_with((*wrong[:middle], *right[middle:])):
                passing = middle
            else:
                failing = middle
        return passing


def _find_reference(registry: Registry) -> Claim:
    """Return the reference backend: the built-in one with the lowest preference, as it is slow on purpose."""
    built_in = [claim for claim in registry.backends.claims() if claim.owner == BUILTIN_OWNER]
    return min(built_in, key=lambda claim: int(claim.load().capabilities.preference))


def _on_reference(
    choices: Sequence[Choice], layers: Sequence[LayerSpec], claim: Claim, device: str, *, keep_wrappers: bool
) -> tuple[tuple[Choice, ...], list[tuple[Choice, str]]]:
    """Return the choices with the reference backend for each layer that it serves, and why it cannot serve the others.

    Wrappers that drop tokens always stay, because the layers after them get no other tokens.
    """
    backend_class = claim.load()
    specs = {layer.name: layer for layer in layers}
    found, uncovered = [], []
    for choice in choices:
        kept = [
            (wrapper, identity)
            for wrapper, identity in zip(choice.wrappers, choice.wrapper_ids, strict=True)
            if keep_wrappers or DROPS_TOKENS in wrapper.effects
        ]
        wrappers, wrapped, extensions = bind_chain([wrapper for wrapper, _ in kept], specs[choice.layer])
        refusals = backend_class.capabilities.refusals(wrapped, device, extensions, lse=divides_keys(wrappers))
        if refusals:
            uncovered.append((choice, refusals[0].reason))
            found.append(choice)
            continue
        found.append(
            attrs.evolve(
                choice,
                wrappers=wrappers,
                wrapper_ids=tuple(identity for _, identity in kept),
                wrapped=wrapped,
                backend=claim.id,
                backend_class=backend_class,
                backend_options=None,
                backend_id=Identity.of(claim.owner, backend_class, {}),
                candidates=(Candidate(name=claim.id),),
            )
        )
    return tuple(found), uncovered


def _wrong_backend(name: str, claim: Claim, choice: Choice, registry: Registry) -> BackendError:
    return BackendError(
        f"backend {choice.backend!r} computes layer {choice.layer!r} wrongly: {name} fails its self-check with it, and "
        f"passes with {claim.id!r} in its place; give such layers another backend, or check it: "
        f"{_to_check(registry.backends, choice.backend)}",
        code="wrong_output",
    )


def _wrong_wrapper(name: str, claim: Claim, choice: Choice, registry: Registry) -> WrapperError:
    names = ", ".join(repr(wrapper.name) for wrapper in choice.wrappers)
    commands = ", ".join(_to_check(registry.wrappers, wrapper.name) for wrapper in choice.wrappers)
    return WrapperError(
        f"the wrappers [{names}] change what layer {choice.layer!r} computes: on {claim.id!r} too, {name} fails its "
        f"self-check with them, and passes without them; leave them out, or check them: {commands}",
        code="wrong_output",
    )


def _to_check(catalogue: Catalogue, name: str) -> str:
    """Return the command that runs the kit on what is registered under a name; for a script, what to write."""
    claim = catalogue.get(name)
    what = claim.name if len(catalogue.claims(claim.name)) == 1 else claim.id
    if claim.plugin == f"{claim.owner}:{claim.owner}":  # it was passed as a module
        file = getattr(sys.modules.get(claim.owner), "__file__", None)
        if file is None:
            return f"test {what!r} by a class of kvframe.testing.suites"
        what = file
    return f"`{shlex.join(['kvframe', 'check', what, '--kind', claim.kind])}`"
