"""Prefill skipping: finds the last layers of a model that need to compute only the tokens that generate.

A layer that reads another layer's cache produces no state. If no layer after it produces any either, its output for a
token is used only for that token's own output, and the outputs of a prompt's inner tokens are never used
(YOCO, arXiv 2405.05254; SwiftKV, arXiv 2410.03960).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvframe.contract.specs import LayerSpec


def find_skippable_layers(layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Return the last layers that keep no state of their own, in the order they run.

    Args:
        layers: The model's layers, in the order they run, including those with other state than keys and values.
    """
    found: list[str] = []
    for layer in reversed(layers):
        if _needs_every_token(layer):
            break
        if layer.shares_with is not None:
            found.append(layer.name)
    return tuple(reversed(found))


def why_not_skipped(layers: Sequence[LayerSpec], name: str) -> str:
    """Return in one sentence why a layer computes every token of a prompt.

    Args:
        layers: The model's layers, in the order they run.
        name: The layer.
    """
    place = next(index for index, layer in enumerate(layers) if layer.name == name)
    if _needs_every_token(layers[place]):
        return f"{name!r} keeps a cache of its own, which must hold every token"
    later = [layer.name for layer in layers[place:] if _needs_every_token(layer)]
    if later:
        return f"{later[0]!r} runs after {name!r} and keeps a cache of its own, for which it needs every token"
    return f"prefill skipping is off; {name!r} could be skipped: name the wrapper in prefill_skipping of [engine]"


def _needs_every_token(layer: LayerSpec) -> bool:
    """Return whether a layer keeps state of its own, or attends to tokens of the step itself."""
    return layer.shares_with is None and (layer.spec is not None or layer.query is not None)
