"""Wrapper chains: the wrappers that a stack lists, made for one layer; and which layers prefill skipping is for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

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


# --- prefill skipping -------------------------------------------------------------------------------------------------
#
# A layer that reads another layer's cache produces no state. If no layer after it produces any either, its output for a
# token is used only for that token's own output, and the outputs of a prompt's inner tokens are never used
# (YOCO, arXiv 2405.05254; SwiftKV, arXiv 2410.03960).


@attrs.frozen
class Skipping:
    """What prefill skipping does with a model.

    Attributes:
        layers: The layers that compute only the tokens that generate, in the order they run.
        note: One sentence that says why no layer does although the stack asks for it and the model alone has some;
            None if there is nothing to say.
        heads: The layers of the prediction heads that draft for the model; none if something else drafts.
        are_drafting: Whether the layers that are asked about draft for another model; these are never skipped.
    """

    layers: tuple[str, ...] = ()
    note: str | None = None
    heads: tuple[LayerSpec, ...] = ()
    are_drafting: bool = False

    def why_not(self, layers: Sequence[LayerSpec], name: str) -> str:
        """Return in one sentence why a layer computes every token of a prompt."""
        if self.are_drafting:
            return f"{name!r} drafts tokens, and prefill skipping is for the layers of the served model only"
        index = next(index for index, layer in enumerate(layers) if layer.name == name)
        if _reads_choices(layers[index]):
            return f"{name!r} reads tokens that are chosen by content, and the choices are made for every token"
        if _needs_every_token(layers[index]):
            return f"{name!r} keeps a cache of its own, which must hold every token"
        later_names = [layer.name for layer in (*layers[index:], *self.heads) if _needs_every_token(layer)]
        if later_names:
            return (
                f"{later_names[0]!r} runs after {name!r} and keeps a cache of its own, for which it needs every token"
            )
        return f"prefill skipping is off; {name!r} could be skipped: name the wrapper in prefill_skipping of [model]"


NO_SKIPPING = Skipping()
"""Every layer computes every token."""

DRAFTING = Skipping(are_drafting=True)
"""What prefill skipping does with layers that draft: nothing."""


def find_skipping(layers: Sequence[LayerSpec], heads: Sequence[LayerSpec] = (), *, is_on: bool) -> Skipping:
    """Return what prefill skipping does with a model, whose layers are in the order they run.

    Prediction heads continue the output of the model's last layer, and keep a cache of their own. So they are layers
    that run after it: the model then computes every token to its end.
    """
    if not is_on:
        return Skipping(heads=tuple(heads))
    without_heads, with_heads = find_skippable_layers(layers), find_skippable_layers([*layers, *heads])
    note = None
    if with_heads != without_heads:
        note = (
            "prefill skipping leaves nothing out: the prediction heads keep a cache of their own, for which "
            f"{without_heads[0]!r} and later layers compute every token of a prompt"
        )
    return Skipping(with_heads, note, tuple(heads))


def find_skippable_layers(layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Return the last layers that keep no state of their own, in the order they run."""
    names: list[str] = []
    for layer in reversed(layers):
        if _needs_every_token(layer):
            break
        if layer.shares_with is not None:
            names.append(layer.name)
    return tuple(reversed(names))


def _needs_every_token(layer: LayerSpec) -> bool:
    """Return whether a layer keeps state of its own, attends to tokens of the step itself, or reads choices."""
    keeps = layer.shares_with is None and (layer.spec is not None or layer.query is not None)
    return keeps or _reads_choices(layer)


def _reads_choices(layer: LayerSpec) -> bool:
    return layer.query is not None and layer.query.choice is not None
