"""Finds the faulty part when a model fails its self-check: a backend, a wrapper or the description of the model."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial

import attrs

from kvframe import Choice, Registry, Setup
from kvframe.contract.description import LayerDescription, ModelDescription
from kvframe.contract.errors import BackendError, ModelError, SpecError, WrapperError
from kvframe.contract.specs import KVCacheSpec
from kvframe_engine.assembly import Assembly
from kvframe_engine.dense_check import check_densely
from kvframe_engine.self_check import run_packed

REFERENCE = "kvframe:torch_reference"
"""The backend that others are compared with."""

_STORAGE_FIELDS = frozenset({"block_size", "dtype", "model_dtype", "format"})
"""Fields that say how state is stored, and not which tokens a query sees."""


def check_model(assembly: Assembly) -> None:
    """Let a model compare packed runs with its own plain forward, and find the wrong part if they differ.

    If the check fails, it runs again with the reference backend for every layer that this backend can serve. If the
    model then passes, a backend is wrong: that of the first layer with which the model fails. If it still fails, but
    passes without its wrappers, a wrapper is wrong. If it fails without them too, the model is wrong.

    Args:
        assembly: The set-up, in the plain format; its model is attached to its layers, and to others after a failure.

    Raises:
        ModelError: The model attends in another way than its layers describe, or the comparison could not be made.
        BackendError: A backend computes a layer wrongly (``wrong_output``).
        WrapperError: A wrapper changes what a layer computes (``wrong_output``).
    """
    try:
        compare(assembly)
    except ModelError as error:
        explained = _explain(error, assembly)
        if explained is None:
            raise
        # The message says it all; a traceback would show the first error, which names no part, before it.
        raise explained from None


def compare(assembly: Assembly) -> None:
    """Compare packed runs with the model's own forward; with dense attention if layers have other types than its own.

    Args:
        assembly: The set-up, in the plain format; its model is attached to its layers.

    Raises:
        ModelError: The runs differ, or the comparison could not be made.
    """
    setup = assembly.setup
    retyped = retyped_layers(setup, assembly.model.description)
    if retyped:
        check_densely(assembly, setup.layers, retyped)
    else:
        assembly.model.self_check(partial(run_packed, assembly))


def retyped_layers(setup: Setup, description: ModelDescription) -> tuple[str, ...]:
    """Return the names of the layers that attend by another mask than the model's own forward.

    Args:
        setup: What the stack does with the model.
        description: The model, as its adapter describes it.
    """
    specs = {layer.name: layer.spec for layer in setup.layers}
    return tuple(
        layer.name
        for layer in description.layers
        if layer.query and layer.name in specs and _is_retyped(layer, specs[layer.name], setup.registry)
    )


def _is_retyped(layer: LayerDescription, spec: KVCacheSpec | None, registry: Registry) -> bool:
    """Return whether a spec is of another type than a description, or has another option besides its layout."""
    if spec is None:
        return False
    own_class: type[KVCacheSpec] = registry.specs.load(layer.kind)
    if type(spec) is not own_class:
        return True
    names = {field.name for field in attrs.fields(own_class)} - own_class.layout_fields - _STORAGE_FIELDS
    try:
        own_spec = own_class(**{"block_size": spec.block_size, **layer.options})
    except (TypeError, ValueError, SpecError):
        return True  # the stack gave an option that the type requires
    return any(getattr(spec, name) != getattr(own_spec, name) for name in names)


def _explain(error: ModelError, assembly: Assembly) -> ModelError | BackendError | WrapperError | None:
    """Return the error that names the wrong part; None if ``error`` already says all that is known."""
    setup, choices, name = assembly.setup, assembly.choices, assembly.model.description.name
    if setup.stack.model.compile and _passes(assembly, choices):
        return ModelError(f"{name} passes its self-check only if it is not compiled: leave compile out of the stack")
    on_reference, unserved = _on_reference(setup, choices, keep_wrappers=True)
    if _passes(assembly, on_reference):
        return _wrong_backend(name, choices[_first_wrong(assembly, on_reference, choices)], setup.registry)
    unwrapped, _ = _on_reference(setup, choices, keep_wrappers=False)
    if unwrapped != on_reference and _passes(assembly, unwrapped):
        return _wrong_wrapper(name, choices[_first_wrong(assembly, unwrapped, on_reference)], setup.registry)
    if not unserved:
        return None
    choice, reason = unserved[0]
    return ModelError(
        f"{error}. The fault may also be that of backend {choice.backend!r}, of layer {choice.layer!r}: it could not "
        f"be compared with {REFERENCE!r}, which {reason}; check it: "
        f"{_to_check(setup.registry, 'backend', choice.backend)}"
    )


def _passes(assembly: Assembly, choices: Sequence[Choice]) -> bool:
    """Return whether the model passes its self-check with other choices of wrappers and backends, in the same cache."""
    layers = assembly.setup.make_layers(assembly.views, assembly.plan, choices)
    assembly.model.detach()
    assembly.model.attach(layers)
    try:
        compare(attrs.evolve(assembly, layers=layers))
    except ModelError:
        return False
    return True


def _first_wrong(assembly: Assembly, right_choices: Sequence[Choice], wrong_choices: Sequence[Choice]) -> int:
    """Return the index of a layer that passes with its right choice and fails with its wrong one, found by bisection.

    Args:
        assembly: The set-up.
        right_choices: Choices that pass.
        wrong_choices: Choices for the same layers that fail.
    """
    passing, failing = 0, len(wrong_choices)
    while failing - passing > 1:
        middle = (passing + failing) // 2
        if _passes(assembly, (*wrong_choices[:middle], *right_choices[middle:])):
            passing = middle
        else:
            failing = middle
    return passing


def _on_reference(
    setup: Setup, choices: Sequence[Choice], *, keep_wrappers: bool
) -> tuple[tuple[Choice, ...], list[tuple[Choice, str]]]:
    """Return the choices with the reference backend for each layer that it serves, and why it cannot serve the others.

    Wrappers of prefill skipping always stay, because the layers after them get no other tokens.
    """
    specs = {layer.name: layer for layer in setup.layers}
    on_reference, unserved = [], []
    for choice in choices:
        try:
            on_reference.append(setup.choose_on(REFERENCE, specs[choice.layer], keep_wrappers=keep_wrappers))
        except BackendError as error:
            on_reference.append(choice)
            unserved.append((choice, str(error).rpartition(f"{REFERENCE}: ")[2]))
    return tuple(on_reference), unserved


def _wrong_backend(name: str, choice: Choice, registry: Registry) -> BackendError:
    return BackendError(
        f"backend {choice.backend!r} computes layer {choice.layer!r} wrongly: {name} fails its self-check with it, and "
        f"passes with {REFERENCE!r} in its place; give such layers another backend, or check it: "
        f"{_to_check(registry, 'backend', choice.backend)}",
        code="wrong_output",
    )


def _wrong_wrapper(name: str, choice: Choice, registry: Registry) -> WrapperError:
    names = ", ".join(repr(wrapper.name) for wrapper in choice.wrappers)
    commands = ", ".join(_to_check(registry, "wrapper", wrapper.name) for wrapper in choice.wrappers)
    return WrapperError(
        f"the wrappers [{names}] change what layer {choice.layer!r} computes: on {REFERENCE!r} too, {name} fails its "
        f"self-check with them, and passes without them; leave them out, or check them: {commands}",
        code="wrong_output",
    )


def _to_check(registry: Registry, kind: str, name: str) -> str:
    """Return the command that runs the kit on what is registered under a name; for a script, what to write."""
    catalogue = registry.catalogues[kind]
    claim = catalogue.get(name)
    what = claim.name if len(catalogue.claims(claim.name)) == 1 else claim.id
    if claim.plugin == f"{claim.owner}:{claim.owner}":  # it was passed as a module
        file = getattr(sys.modules.get(claim.owner), "__file__", None)
        if file is None:
            return f"test {what!r} by a class of kvframe_testing.suites"
        what = file
    return f"`{shlex.join(['kvframe', 'check', what, '--kind', claim.kind])}`"
