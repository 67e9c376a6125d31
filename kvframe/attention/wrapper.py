"""Wrappers: pure functions from batch metadata to batch metadata, chained as an ordered list."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from operator import attrgetter, is_
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import attrs

from kvframe.attention.capture import GraphCapture
from kvframe.attention.metadata import NO_EXTENSIONS, Axis, CommonAttentionMetadata, Extension
from kvframe.attention.shapes import find_misfit
from kvframe.attention.values import find_contradiction
from kvframe.errors import KVFrameError, PluginError, WrapperError
from kvframe.foreign import call, safe_repr, safe_text
from kvframe.specs import LayerSpec

if TYPE_CHECKING:
    import torch

DROPS_TOKENS = "drops_tokens"
"""The effect of a wrapper out of which fewer tokens come than go in."""

VIRTUAL_REQUESTS = "virtual_requests"
"""The effect of a wrapper that makes several rows of one request."""

CHANGES_MASK = "changes_mask"
"""The effect of a wrapper after which queries attend to other tokens than before: those of the mask that
``wrapped_layer`` gives the layer, over the rows of the batch as they were. Any other wrapper leaves to each query the
tokens that it attended to."""


class FieldUse(StrEnum):
    """What a wrapper does with a field of the metadata, or with an extension."""

    CARRY = "carry"
    """Hands it on as it is."""
    SLICE = "slice"
    """Hands on the rows that belong to the tokens or requests that it makes."""
    RESET = "reset"
    """Computes a field anew; leaves an extension out, because it says nothing about what comes out."""
    REJECT = "reject"
    """Refuses a step that has it: a field with another value than its default, or the extension at all."""


@attrs.frozen(kw_only=True)
class MetadataWrapper(ABC):
    """One transformation of a step's batch metadata.

    A wrapper is a frozen value (its parameters) and a pure function. It knows no backend, and no backend knows of it.
    It asks the device for nothing (no ``.item()``, no ``.cpu()``), loops over no requests, and writes into nothing
    that it was given: what it needs to know on the host, the metadata has there.
    """

    name: ClassVar[str]
    """The registered name (``"decode_only"``)."""
    fields: ClassVar[Mapping[str, FieldUse]]
    """What happens to each field of ``CommonAttentionMetadata``, ``extensions`` left out. A field that is not listed,
    of a later version of the contract, is refused unless it has its default."""
    extensions: ClassVar[Mapping[str, FieldUse]] = MappingProxyType({})
    """What happens to each extension; one that is not listed is refused."""
    effects: ClassVar[frozenset[str]] = frozenset()
    """What it does to a batch that others of a chain may care about: ``DROPS_TOKENS``, ``VIRTUAL_REQUESTS``,
    ``CHANGES_MASK``, or words of its own."""
    not_after: ClassVar[frozenset[str]] = frozenset()
    """Wrappers, or effects, that may not stand before it in a chain."""
    not_before: ClassVar[frozenset[str]] = frozenset()
    """Wrappers, or effects, that may not stand behind it in a chain."""
    capture: ClassVar[GraphCapture] = GraphCapture.NEVER
    """For which batches its output's shapes are known beforehand."""

    def for_layer(self, layer: LayerSpec) -> Self:
        """Return the wrapper with the parameters that the layer decides. Called at set-up, before any other method.

        Args:
            layer: The layer, as what stands before this wrapper leaves it.

        Raises:
            WrapperError: It cannot serve such a layer; ``code`` says why.
        """
        return self

    def wrapped_layer(self, layer: LayerSpec) -> LayerSpec:
        """Return the layer as what stands behind this wrapper sees it. Called at set-up.

        Args:
            layer: The layer, as what stands before this wrapper leaves it. Where the wrapper changes what a row of
                the batch means, the result's mask is the one over the new rows.
        """
        return layer

    def added_extensions(self, layer: LayerSpec) -> frozenset[str]:
        """Return the extensions that it may add for such a layer, and that the backend has to honour then.

        Args:
            layer: The layer, as what stands before this wrapper leaves it.
        """
        return frozenset()

    @abstractmethod
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the transformed metadata.

        Called once a step for each cache group and chain that holds it, for capture and replay alike.

        Args:
            metadata: The step's metadata, or what the wrapper before this one made of it, with nothing in it that the
                wrapper rejects or does not know. Never written to.

        Returns:
            New metadata, or ``metadata`` itself where nothing changes.

        Raises:
            WrapperError: The step cannot be transformed; ``code`` says why.
        """

    def pass_extensions(
        self,
        metadata: CommonAttentionMetadata,
        requests: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        *,
        requests_cpu: torch.Tensor | None = None,
        tokens_cpu: torch.Tensor | None = None,
    ) -> Mapping[str, Extension]:
        """Return the extensions of ``metadata`` as ``extensions`` of the class says.

        A sliced extension keeps its host copy if the index is there on the host too.

        Args:
            metadata: The wrapper's input.
            requests: ``[num_new_reqs], int64 or int32, device``: the request that each new row comes from; None if
                they are the same.
            tokens: ``[num_new_tokens], int64 or int32, device``: likewise for tokens.
            requests_cpu: ``requests`` on the host; None if it is not there.
            tokens_cpu: ``tokens`` on the host; None if it is not there.
        """
        if not metadata.extensions:
            return NO_EXTENSIONS
        index_of = {Axis.REQUEST: requests, Axis.TOKEN: tokens, Axis.STEP: None}
        index_cpu_of = {Axis.REQUEST: requests_cpu, Axis.TOKEN: tokens_cpu}
        passed = {}
        for name, extension in metadata.extensions.items():
            use = self.extensions[name]
            index = index_of[extension.axis]
            if use is FieldUse.SLICE and index is not None:
                values_cpu, index_cpu = extension.values_cpu, index_cpu_of[extension.axis]
                if values_cpu is not None:
                    values_cpu = None if index_cpu is None else values_cpu.index_select(0, index_cpu)
                passed[name] = Extension(extension.values.index_select(0, index), extension.axis, values_cpu)
            elif use in (FieldUse.CARRY, FieldUse.SLICE):
                passed[name] = extension
        return passed


WrapperChain = tuple[MetadataWrapper, ...]

MISTAKES = frozenset({"changed_field", "failed", "lost_extension", "wrong_shape", "wrong_value"})
"""Codes of the errors that a right wrapper never causes, whatever the step."""


def apply_wrapper(
    wrapper: MetadataWrapper, metadata: CommonAttentionMetadata, layers: Sequence[str] = ()
) -> CommonAttentionMetadata:
    """Apply one wrapper, and hold it to what it declares.

    Args:
        wrapper: The wrapper, made for the layers that will read the result.
        metadata: The step's metadata, or what another wrapper made of it.
        layers: The names of these layers, for errors.

    Raises:
        WrapperError: The step has something that the wrapper rejects (``rejected_field``, ``rejected_extension``) or
            does not know (``unknown_field``, ``unknown_extension``). Or the wrapper makes a mistake: it changed a field
            or lost an extension that it declares to hand on (``changed_field``, ``lost_extension``), what it hands on
            has parts that do not go together (``wrong_shape``), or its numbers and host copies contradict each other
            (``wrong_value``). Or it raised anything else (``failed``).
    """
    for field, default, code in _guarded_fields(type(wrapper)):
        if getattr(metadata, field) != default:
            raise WrapperError(
                f"wrapper {wrapper.name!r} cannot take a step with {field} = {getattr(metadata, field)!r}: "
                + ("it rejects it" if code == "rejected_field" else "it does not know this field"),
                code=code,
            )
    for name in metadata.extensions:
        use = wrapper.extensions.get(name)
        if use is None or use is FieldUse.REJECT:
            known = ", ".join(sorted(name for name, use in wrapper.extensions.items() if use is not FieldUse.REJECT))
            raise WrapperError(
                f"wrapper {wrapper.name!r} "
                + ("does not know" if use is None else "rejects")
                + f" the extension {name!r}; it takes {known or 'none'}",
                code="unknown_extension" if use is None else "rejected_extension",
            )
    try:
        wrapped = wrapper(metadata)
    except KVFrameError:
        raise
    except Exception as error:
        raise wrapper_mistake(wrapper, layers, f"failed: {safe_text(error)}", "failed") from error
    if wrapped is metadata:
        return wrapped
    if not isinstance(wrapped, CommonAttentionMetadata):
        raise wrapper_mistake(wrapper, layers, f"returns {type(wrapped).__name__!r}, not metadata", "wrong_shape")
    problem = find_misfit(wrapped, metadata)
    if problem is not None:
        problem = f"gives metadata that does not fit together: {problem}"
        raise wrapper_mistake(wrapper, layers, problem, "wrong_shape")
    changed = _find_changed(wrapper, metadata, wrapped)
    if changed is not None:
        problem = f"declares to carry {changed} and hands on something else"
        raise wrapper_mistake(wrapper, layers, problem, "changed_field")
    for name in metadata.extensions:
        if wrapper.extensions[name] is not FieldUse.RESET and name not in wrapped.extensions:
            problem = f"lost the extension {name!r}, which it declares to hand on"
            raise wrapper_mistake(wrapper, layers, problem, "lost_extension")
    problem = find_contradiction(wrapped, metadata)
    if problem is not None:
        raise wrapper_mistake(wrapper, layers, f"gives wrong values: {problem}", "wrong_value")
    return wrapped


def wrapper_mistake(wrapper: MetadataWrapper, layers: Sequence[str], problem: str, code: str) -> WrapperError:
    """Return the error for a wrapper that does what no wrapper may do.

    Args:
        wrapper: The wrapper.
        layers: The names of the layers that read what it hands on; empty if that is not known.
        problem: What it does: a verb and what follows.
        code: One of ``MISTAKES``.
    """
    where = ""
    if layers:
        where = f", of the layer {layers[0]!r}" + (f" and {len(layers) - 1} others," if len(layers) > 1 else ",")
    return WrapperError(f"wrapper {wrapper.name!r}{where} {problem}; this is a mistake in the wrapper", code=code)


def apply_chain(chain: Sequence[MetadataWrapper], metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Apply the wrappers of ``chain`` in order; raises what ``apply_wrapper`` raises."""
    for wrapper in chain:
        metadata = apply_wrapper(wrapper, metadata)
    return metadata


def bind_chain(wrappers: Sequence[MetadataWrapper], layer: LayerSpec) -> tuple[WrapperChain, LayerSpec, frozenset[str]]:
    """Make a chain for a layer.

    Args:
        wrappers: The chain as the stack gives it.
        layer: The layer.

    Returns:
        The chain with the parameters that the layer decides; the layer as a backend behind the chain sees it; the
        extensions that such a backend has to honour.

    Raises:
        WrapperError: A wrapper cannot serve the layer.
        PluginError: A wrapper raises something else, or returns what the contract does not allow.
    """
    bound = []
    required: set[str] = set()
    for wrapper in wrappers:
        made, added, layer = _bind(wrapper, layer)
        required |= added
        bound.append(made)
    return tuple(bound), layer, frozenset(required)


def _bind(wrapper: MetadataWrapper, layer: LayerSpec) -> tuple[MetadataWrapper, frozenset[str], LayerSpec]:
    """Make a wrapper for a layer; return it, the extensions that it may add, and the layer that it leaves."""
    whose = f"wrapper {wrapper.name!r} ({type(wrapper).__module__}.{type(wrapper).__qualname__})"
    made = call(f"{whose}: for_layer()", wrapper.for_layer, layer, passes=(WrapperError,))
    if type(made) is not type(wrapper):
        raise PluginError(f"{whose}: for_layer() must return a {type(wrapper).__name__}, not {safe_repr(made)}")
    added = call(f"{whose}: added_extensions()", made.added_extensions, layer, passes=(WrapperError,))
    if not isinstance(added, frozenset | set) or not all(type(each) is str for each in added):
        raise PluginError(f"{whose}: added_extensions() must return a frozenset of names, not {safe_repr(added)}")
    wrapped = call(f"{whose}: wrapped_layer()", made.wrapped_layer, layer, passes=(WrapperError,))
    if type(wrapped) is not LayerSpec or wrapped.spec is None or wrapped.query is None:
        raise PluginError(
            f"{whose}: wrapped_layer() must return a LayerSpec with a spec and a query side, not {safe_repr(wrapped)}"
        )
    return made, frozenset(added), wrapped


def chain_capture(chain: Sequence[MetadataWrapper]) -> GraphCapture:
    """Return for which batches a whole chain can be captured: the least of its parts; always, if it is empty."""
    return min((wrapper.capture for wrapper in chain), default=GraphCapture.ALWAYS)


def check_order(chain: Sequence[type[MetadataWrapper]]) -> None:
    """Refuse a chain whose wrappers may not stand in this order.

    Args:
        chain: The wrappers' classes, in order.

    Raises:
        WrapperError: With the code ``chain_order``; the message names the legal order, if there is one.
    """
    problem = _misplaced(chain)
    if problem is None:
        return
    legal = next((order for order in itertools.permutations(chain) if _misplaced(order) is None), None)
    advice = (
        "these wrappers cannot be combined in any order"
        if legal is None
        else f"the legal order is [{', '.join(repr(wrapper.name) for wrapper in legal)}]"
    )
    raise WrapperError(f"{problem}; {advice}", code="chain_order")


def _misplaced(chain: Sequence[type[MetadataWrapper]]) -> str | None:
    """Return what is wrong with the order of a chain; None if nothing is."""
    for first, second in itertools.combinations(chain, 2):
        for reason in sorted(({first.name} | first.effects) & second.not_after):
            return f"wrapper {second.name!r} cannot stand behind {_because(first, reason)}"
        for reason in sorted(({second.name} | second.effects) & first.not_before):
            return f"wrapper {first.name!r} cannot stand before {_because(second, reason)}"
    return None


def _because(wrapper: type[MetadataWrapper], reason: str) -> str:
    return repr(wrapper.name) if reason == wrapper.name else f"{wrapper.name!r} ({reason})"


def _find_changed(
    wrapper: MetadataWrapper, given: CommonAttentionMetadata, wrapped: CommonAttentionMetadata
) -> str | None:
    """Return a field that a wrapper declares to carry and does not; None if there is none."""
    names, values_of = _carried_fields(type(wrapper))
    before, after = values_of(given), values_of(wrapped)
    if all(map(is_, before, after)):
        return None
    for name, one, other in zip(names, before, after, strict=True):
        # Tensors are carried as they are; equal numbers may be two objects.
        if one is not other and not (isinstance(one, int) and one == other):
            return name
    return None


@cache
def _carried_fields(
    wrapper_class: type[MetadataWrapper],
) -> tuple[tuple[str, ...], Callable[[CommonAttentionMetadata], tuple[Any, ...]]]:
    """Return the fields that such a wrapper carries, and what reads them off metadata."""
    known = (field.name for field in attrs.fields(CommonAttentionMetadata) if field.name != "extensions")
    names = tuple(name for name in known if wrapper_class.fields.get(name) is FieldUse.CARRY)
    # Of fewer than two names, attrgetter does not return a tuple: a field that no wrapper may change makes them two.
    return (*names, "block_size", "block_size"), attrgetter(*names, "block_size", "block_size")


@cache
def _guarded_fields(wrapper_class: type[MetadataWrapper]) -> tuple[tuple[str, Any, str], ...]:
    """Return the fields that a step must leave at their default for such a wrapper, with the code if it does not."""
    guarded = []
    for field in attrs.fields(CommonAttentionMetadata):
        use = wrapper_class.fields.get(field.name)
        if field.name == "extensions" or use not in (None, FieldUse.REJECT):
            continue
        if field.default is attrs.NOTHING:
            raise WrapperError(
                f"wrapper {wrapper_class.name!r} does not say what it does with the field {field.name!r}, which every "
                "step has",
                code="unknown_field",
            )
        guarded.append((field.name, field.default, "unknown_field" if use is None else "rejected_field"))
    return tuple(guarded)
