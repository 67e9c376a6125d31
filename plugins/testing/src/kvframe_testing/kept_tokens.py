"""Checks what a type with a prompt budget keeps of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvframe.attention.kept_tokens import choose_tokens
from kvframe.contract.specs import KVCacheSpec, LayerSpec, QuerySpec, num_covered
from kvframe.planning.layer_specs import with_entries
from kvframe_testing.laws import ConformanceError

State = dict[str, torch.Tensor]

_MOST_NEARLY_EQUAL = 20
"""One of so many tokens may be another one, because two are nearly equally good."""


def check_kept(spec: KVCacheSpec, *, num_heads: int = 4, num_tokens: int = 0, seed: int = 0) -> None:
    """Raise ``ConformanceError`` unless a type chooses well what it keeps of a prompt (``choose_kept``).

    It chooses tokens of the prompt, each once; the same ones if it is asked again; nearly the same ones in float64, for
    small scores and for large ones; it writes to nothing that it is given; and each KV head chooses by its own keys,
    values and queries.

    Args:
        spec: The type, with a ``prompt_budget``.
        num_heads: Query heads, a multiple of the KV heads.
        num_tokens: Tokens of the prompt; three budgets unless given.
        seed: Of the random keys, values and queries.
    """
    state = spec.state_tensors()
    layer = LayerSpec(
        name="layer",
        spec=spec,
        query=QuerySpec(num_heads=num_heads, head_size=state["k"].shape[-1], scale=state["k"].shape[-1] ** -0.5),
    )
    [*with_entries(layer, frozenset())]  # what it keeps fits together
    budget = spec.prompt_budget
    assert budget is not None
    num_tokens = num_tokens or 3 * budget
    generator = torch.Generator().manual_seed(seed)

    def draw(tensors: Mapping[str, Any], count: int) -> State:
        return {
            name: torch.randn(count, *tensor.shape[1:], generator=generator).to(getattr(torch, tensor.dtype))
            for name, tensor in tensors.items()
        }

    prompt = draw(state, num_tokens)
    live = {name: num_covered(entry.live_ranges(num_tokens)) for name, entry in spec.entries.items()}
    entries = {name: draw(entry.state_tensors(), live[name]) for name, entry in spec.entries.items()}
    values_before = _copy(prompt), {name: _copy(entry) for name, entry in entries.items()}
    label = f"cache spec {spec.kind!r}: choose_kept()"
    choice = choose_tokens(layer, budget, prompt, entries)
    for state_after, state_before in zip(
        [prompt, *entries.values()], [values_before[0], *values_before[1].values()], strict=True
    ):
        for name, tensor in state_after.items():
            if not torch.equal(tensor, state_before[name]):
                raise ConformanceError(f"{label} writes to {name!r}, which other requests and later steps read")
    if not torch.equal(choice, choose_tokens(layer, budget, prompt, entries)):
        raise ConformanceError(f"{label} chooses other tokens if it is asked again: a preempted request would differ")
    for factor in (1, 8):
        large = {name: tensor * factor for name, tensor in prompt.items()}
        rounded_choice = choose_tokens(layer, budget, large, entries)
        exact_choice = choose_tokens(
            layer, budget, _double(large), {name: _double(entry) for name, entry in entries.items()}
        )
        num_other = max(
            len({*chosen_tokens.tolist()} - {*exact_tokens.tolist()})
            for chosen_tokens, exact_tokens in zip(rounded_choice, exact_choice, strict=True)
        )
        if num_other > max(1, budget // _MOST_NEARLY_EQUAL):
            raise ConformanceError(
                f"{label} chooses {num_other} other tokens of {budget} in {state['k'].dtype} than in float64, of keys "
                f"about {factor} in size: its scores are rounded away"
            )
    for head in range(len(choice)):
        other_prompt = draw(state, num_tokens)
        other_entries = {name: draw(entry.state_tensors(), live[name]) for name, entry in spec.entries.items()}
        for name, tensor in other_prompt.items():
            tensor[:, head] = prompt[name][:, head]
        queries = slice(head * num_heads // len(choice), (head + 1) * num_heads // len(choice))
        for name, entry in other_entries.items():
            for tensor_name, tensor in entry.items():
                tensor[:, queries] = entries[name][tensor_name][:, queries]
        if not torch.equal(choice[head], choose_tokens(layer, budget, other_prompt, other_entries)[head]):
            raise ConformanceError(
                f"{label}: KV head {head} chooses other tokens if other heads have other keys, values or queries, so a "
                "rank that has some of the heads would choose differently"
            )


def _double(state: State) -> State:
    return {name: tensor.double() for name, tensor in state.items()}


def _copy(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}
