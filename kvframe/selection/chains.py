"""Wrapper chains: the wrappers that a stack lists, made for one layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import PluginError, WrapperError
from kvframe.contract.foreign import call, safe_repr
from kvframe.contract.metadata import SEQ_STARTS
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import FieldUse, MetadataWrapper

WrapperChain = tuple[MetadataWrapper, ...]


def bind_chain(wrappers: Sequence[MetadataWrapper], layer: LayerSpec) -> tuple[WrapperChain, LayerSpec, frozenset[str]]:
    """Make a chain, as the stack gives it, for a layer.

    Returns:
        The chain, with the wrappers' parameters for this layer; the layer as a backend after the chain sees it; the
        extensions that such a backend must honour.

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
    if why := _chooses_or_keeps_more(layer):
        raise WrapperError(f"wrapper {wrapper.name!r} cannot serve layer {layer.name!r}: it {why}", code="more")
    for extension, why in _needed_extensions(layer):
        use = made.extensions.get(extension)
        if use is None or use is FieldUse.REJECT:
            raise WrapperError(
                f"wrapper {wrapper.name!r} cannot serve layer {layer.name!r}: {why}, and the wrapper does not take the "
                f"extension {extension!r}",
                code="unknown_extension" if use is None else "rejected_extension",
            )
    added = call(f"{whose}: added_extensions()", made.added_extensions, layer, passes=(WrapperError,))
    if not isinstance(added, frozenset | set) or not all(type(each) is str for each in added):
        raise PluginError(f"{whose}: added_extensions() must return a frozenset of names, not {safe_repr(added)}")
    wrapped = call(f"{whose}: wrapped_layer()", made.wrapped_layer, layer, passes=(WrapperError,))
    if type(wrapped) is not LayerSpec or wrapped.spec is None or wrapped.query is None:
        raise PluginError(
            f"{whose}: wrapped_layer() must return a LayerSpec with a spec and a query side, not {safe_repr(wrapped)}"
        )
    return made, frozenset(added), wrapped


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
