"""The choice for one layer: its wrapper chain, its backend, their identities, and why not the other backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvframe.contract.backend import AttentionBackend
from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import PluginError, WrapperError
from kvframe.contract.foreign import call, safe_repr
from kvframe.contract.metadata import SEQ_STARTS
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import FieldUse, MetadataWrapper
from kvframe.selection.refusals import Refusal

WrapperChain = tuple[MetadataWrapper, ...]


def freeze(value: Any) -> Any:
    """Return ``value`` with its lists, sets and mappings made hashable; equal values give equal results."""
    if isinstance(value, Mapping):
        return tuple(sorted(((key, freeze(item)) for key, item in value.items()), key=repr))
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted((freeze(item) for item in value), key=repr))
    return value


@attrs.frozen
class Identity:
    """The identity of a plugin's class, in any process: a value that can be hashed, compared and pickled.

    Two plugins may each have a class ``MyBackend``; they have different identities. One class with equal parameters
    has one identity, in every process.

    Attributes:
        distribution: The distribution that provides it (``"kvframe-triton"``).
        qualified_name: Its module, and its name in the module (``"kvframe_triton.backend:TritonBackend"``).
        parameters: Its parameters by name, frozen and sorted.
    """

    distribution: str
    qualified_name: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, distribution: str, used_class: type, parameters: Mapping[str, Any] | None = None) -> Identity:
        """Return the identity of a class of ``distribution`` with ``parameters``, which can be hashed."""
        qualified_name, frozen = f"{used_class.__module__}:{used_class.__qualname__}", freeze(parameters or {})
        for name, value in frozen:
            try:
                hash(value)
            except TypeError as error:
                raise PluginError(
                    f"{qualified_name} of {distribution} holds {value!r} as its {name!r}, and parameters are frozen "
                    f"values ({error})"
                ) from error
        return cls(distribution, qualified_name, frozen)

    def __str__(self) -> str:
        parameters = ", ".join(f"{name}={value!r}" for name, value in self.parameters)
        return f"{self.distribution} {self.qualified_name}({parameters})"


@attrs.frozen(kw_only=True)
class Candidate:
    """One backend that was considered for a layer.

    Attributes:
        name: Its registered name, with its distribution (``"kvframe-triton:triton"``).
        refusals: Why it cannot serve the layer; empty if it can.
        preference: Its declared preference. Of the backends that can serve, the highest is chosen.
        on_copies: Whether it would get copies of the layer's pages, because it does not read their format. A backend
            that reads the format is chosen before one that does not.
        in_graphs: Whether its steps can be captured for the graphs whose sizes the stack names; None if the stack names
            none, or if a wrapper of the layer cannot be captured with any backend.
    """

    name: str
    refusals: tuple[Refusal, ...] = ()
    preference: int = 0
    on_copies: bool = False
    in_graphs: bool | None = None


@attrs.frozen(kw_only=True)
class Choice:
    """The choice for one layer, and all candidates.

    Attributes:
        layer: The layer's name.
        wrappers: Its wrapper chain, with the parameters for this layer.
        wrapper_ids: The identity of each of its wrappers, with its parameters.
        wrapped: The layer as the backend after the chain sees it.
        backend: The chosen backend, with its distribution.
        backend_class: Its class.
        backend_options: An instance of the class's ``options_class``; None if it has none.
        backend_id: The identity of the backend, with its parameters.
        candidates: Every backend that was considered, the chosen one first.
    """

    layer: str
    wrappers: WrapperChain
    wrapper_ids: tuple[Identity, ...]
    wrapped: LayerSpec
    backend: str
    backend_class: type[AttentionBackend]
    backend_options: Any
    backend_id: Identity
    candidates: tuple[Candidate, ...]

    def why_not(self, candidate: Candidate) -> str:
        """Return in one sentence why ``candidate`` was not chosen; empty for the chosen one."""
        if candidate.name == self.backend:
            return ""
        if candidate.refusals:
            return "; ".join(refusal.reason for refusal in candidate.refusals)
        if candidate.in_graphs is False and self.candidates[0].in_graphs:
            return (
                f"can serve this layer; the stack names sizes of graphs, and its steps cannot be captured, as those of "
                f"{self.backend} can"
            )
        if candidate.on_copies and not self.on_copies:
            return f"can serve this layer, on copies of what is stored as {self.format}; {self.backend} reads it itself"
        return f"can serve this layer; {self.backend} is preferred"

    @property
    def on_copies(self) -> bool:
        """Whether the backend gets copies of the layer's pages, because it does not read their format."""
        return self.candidates[0].on_copies

    @property
    def format(self) -> str:
        """The name of the format that the layer is stored in."""
        assert self.wrapped.spec is not None
        return self.wrapped.spec.kv_format.name


def layers_on_copies(layers: Sequence[LayerSpec], choices: Sequence[Choice]) -> list[LayerSpec]:
    """Return the layers whose backends get copies of their pages, because they do not read their format."""
    on_copies = {choice.layer for choice in choices if choice.on_copies}
    return [layer for layer in layers if layer.name in on_copies]


# --- wrapper chains ---------------------------------------------------------------------------------------------------


def bind_chain(wrappers: Sequence[MetadataWrapper], layer: LayerSpec) -> tuple[WrapperChain, LayerSpec, frozenset[str]]:
    """Make a chain, as the stack gives it, for a layer.

    Returns:
        The chain, with the wrappers' parameters for this layer; the layer as a backend after the chain sees it; the
        extensions that such a backend must honour.

    Raises:
        WrapperError: A wrapper cannot serve the layer.
        PluginError: A wrapper raises something else, or returns what the contract does not allow.
    """
    chain = []
    extensions: set[str] = set()
    for wrapper in wrappers:
        bound_wrapper, wrapper_extensions, layer = _bind(wrapper, layer)
        extensions |= wrapper_extensions
        chain.append(bound_wrapper)
    return tuple(chain), layer, frozenset(extensions)


def _bind(wrapper: MetadataWrapper, layer: LayerSpec) -> tuple[MetadataWrapper, frozenset[str], LayerSpec]:
    """Make a wrapper for a layer; return it, the extensions that it may add, and the layer that it leaves."""
    label = f"wrapper {wrapper.name!r} ({type(wrapper).__module__}.{type(wrapper).__qualname__})"
    bound_wrapper = call(f"{label}: for_layer()", wrapper.for_layer, layer, passes=(WrapperError,))
    if type(bound_wrapper) is not type(wrapper):
        raise PluginError(
            f"{label}: for_layer() must return a {type(wrapper).__name__}, not {safe_repr(bound_wrapper)}"
        )
    if reason := _chooses_or_keeps_more(layer):
        raise WrapperError(f"wrapper {wrapper.name!r} cannot serve layer {layer.name!r}: it {reason}", code="more")
    for extension, reason in _needed_extensions(layer):
        use = bound_wrapper.extensions.get(extension)
        if use is None or use is FieldUse.REJECT:
            raise WrapperError(
                f"wrapper {wrapper.name!r} cannot serve layer {layer.name!r}: {reason}, and the wrapper does not take "
                f"the extension {extension!r}",
                code="unknown_extension" if use is None else "rejected_extension",
            )
    extensions = call(f"{label}: added_extensions()", bound_wrapper.added_extensions, layer, passes=(WrapperError,))
    if not isinstance(extensions, frozenset | set) or not all(type(name) is str for name in extensions):
        raise PluginError(f"{label}: added_extensions() must return a frozenset of names, not {safe_repr(extensions)}")
    wrapped_layer = call(f"{label}: wrapped_layer()", bound_wrapper.wrapped_layer, layer, passes=(WrapperError,))
    if type(wrapped_layer) is not LayerSpec or wrapped_layer.spec is None or wrapped_layer.query is None:
        raise PluginError(
            f"{label}: wrapped_layer() must return a LayerSpec with a spec and a query side, not "
            f"{safe_repr(wrapped_layer)}"
        )
    return bound_wrapper, frozenset(extensions), wrapped_layer


def _chooses_or_keeps_more(layer: LayerSpec) -> str | None:
    """Return what of a layer a changed batch would not fit: positions and rows that come with its calls."""
    spec, query = layer.spec, layer.query
    if query is not None and query.choice is not None:
        return "reads tokens that are chosen by their positions"
    if query is not None and query.merged:
        return "is merged with other attention of the same queries"
    if spec is not None and spec.defines_attention:
        return f"has the type {spec.kind!r}, which defines its own attention"
    return None


def _needed_extensions(layer: LayerSpec) -> Iterator[tuple[str, str]]:
    """Yield the extensions that a layer's steps have with any backend, each with the reason."""
    if layer.query is not None and layer.query.first_token:
        yield SEQ_STARTS, f"its queries see no token before {layer.query.first_token}"
    if layer.spec is not None and layer.spec.prompt_budget is not None:
        yield SEQ_STARTS, "requests give up tokens of their prompts"


def chain_capture(chain: Sequence[MetadataWrapper]) -> GraphCapture:
    """Return the batches for which a whole chain can be captured: the least of its wrappers; always, if it is empty."""
    return min((wrapper.capture for wrapper in chain), default=GraphCapture.ALWAYS)
