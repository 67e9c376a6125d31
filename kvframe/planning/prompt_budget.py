"""Prompt budgets: the checks of types that keep a part of each prompt, and the pages that this takes."""

from __future__ import annotations

from kvframe.contract.errors import SpecError
from kvframe.contract.formats import PLAIN
from kvframe.contract.masks import AttentionMask
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.planning.answers import ask

QUERY = "query"
"""The entry of a type with a prompt budget in which the host stores queries, and the name of its tensor."""


def check_prompt_budget(layer: LayerSpec) -> None:
    """Raise ``SpecError`` unless tokens of a layer can be given up after the prompt.

    Args:
        layer: A layer whose type has a prompt budget.
    """
    spec, query = layer.spec, layer.query
    assert spec is not None
    budget = ask(spec, "prompt_budget", lambda: spec.prompt_budget)
    whose = f"layer {layer.name!r}: its type {spec.kind!r} keeps {budget!r} tokens of a prompt"
    if type(budget) is not int or budget < 1:
        raise SpecError(f"{whose}; prompt_budget must be a whole number of at least 1, or None")
    if spec.kv_format != PLAIN:
        raise SpecError(f"{whose}, and is stored as {spec.kv_format.name}; its tokens are moved in the plain format")
    if spec.defines_attention or spec.mask != AttentionMask() or spec.state_tensors().keys() != {"k", "v"}:
        raise SpecError(
            f"{whose}, which only a type of keys and values can whose queries see all earlier tokens: with the mask "
            "AttentionMask(), and without dense_attention"
        )
    if query is not None and (query.choice or query.relative_bias or query.alibi_slopes or query.first_token):
        raise SpecError(
            f"{whose}, which get other positions, and its queries read keys by position: it has a choice, a bias by "
            "distance, or a first token"
        )
    entries = ask(spec, "entries", lambda: {name: dict(entry.state_tensors()) for name, entry in spec.entries.items()})
    shape = None if query is None else (query.num_heads, query.head_size)
    for name, tensors in entries.items():
        if name != QUERY or [*tensors] != [QUERY] or tensors[QUERY].shape[1:] != shape:
            raise SpecError(
                f"{whose}, and has the entry {name!r} of {[*tensors]}; the host stores only one named {QUERY!r}, of "
                f"one tensor {QUERY!r} [block_size, *{shape}]"
            )


def num_moved_blocks(spec: KVCacheSpec, num_tokens: int) -> int:
    """Return the most blocks that the kept tokens of a prompt take.

    Args:
        spec: The type.
        num_tokens: Tokens of the prompt.

    Returns:
        The number; 0 if a request of so many tokens keeps all of them.
    """
    budget = spec.prompt_budget
    if budget is None or budget >= num_tokens:
        return 0
    # The first of them may begin within a block, and so may the last end.
    return min(-(-(budget - 1) // spec.block_size) + 1, -(-num_tokens // spec.block_size))
