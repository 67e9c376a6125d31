"""Which layers a backend can serve by its capabilities, and why not the others."""

from __future__ import annotations

from collections.abc import Collection

import attrs

from kvframe.contract.capabilities import KEYS_AND_VALUES, Capabilities
from kvframe.contract.formats import PLAIN, StateTensor
from kvframe.contract.metadata import SEQ_STARTS
from kvframe.contract.specs import TOKENS, LayerSpec, QuerySpec


@attrs.frozen
class Refusal:
    """Why a backend cannot serve a layer: a stable code (``"mask_window"``), and the sentence for a person."""

    code: str
    reason: str


def find_not_causal(capabilities: Capabilities) -> Refusal | None:
    """Return why a backend cannot take a batch that is not causal, which overrides causal masks; None if it can."""
    if capabilities.masks & {"bidirectional", "mask_function", "live_range"}:
        return None
    return Refusal("mask_bidirectional", f"has no mask bidirectional ({', '.join(sorted(capabilities.masks))})")


def needs_copies(capabilities: Capabilities, layer: LayerSpec) -> bool:
    """Return whether a backend serves a layer on copies of its pages, because it does not read their format."""
    return layer.spec is not None and layer.spec.kv_format.name not in capabilities.formats


def find_refusals(
    capabilities: Capabilities, layer: LayerSpec, device: str, extensions: Collection[str] = ()
) -> list[Refusal]:
    """Return every reason why a backend cannot serve a layer; empty if it can.

    Args:
        capabilities: What the backend can do.
        layer: The layer as its wrapper chain leaves it.
        device: Where it runs (``"cpu"``).
        extensions: The extensions that its chain may add to the batch metadata.
    """
    spec, query = layer.spec, layer.query
    assert spec is not None
    assert query is not None
    refusals = []

    def refuse(code: str, reason: str) -> None:
        refusals.append(Refusal(code, reason))

    def listed(names: frozenset[str] | frozenset[int]) -> str:
        return ", ".join(str(name) for name in sorted(names))

    if device not in capabilities.devices:
        refuse("device", f"runs on {listed(capabilities.devices)}, not on {device}")
    if needs_copies(capabilities, layer) and not capabilities.takes_copies:
        refuse(
            "format",
            f"reads the formats {listed(capabilities.formats)}, not {spec.kv_format.name}, and takes no copies",
        )
    spec = spec.in_format(PLAIN)
    state = spec.state_tensors()
    if set(state) != capabilities.state:
        refuse("state", f"reads the state tensors {listed(capabilities.state)}, not {listed(frozenset(state))}")
    elif state.keys() == KEYS_AND_VALUES:
        misfit = _find_misfit(spec.block_size, query, state["k"], state["v"])
        if misfit is not None:
            refuse("state_shape", misfit)
    for dtype in sorted({tensor.dtype for tensor in state.values()} - capabilities.dtypes):
        refuse("dtype", f"stores {listed(capabilities.dtypes)}, not {dtype}")
    has_function = spec.mask_function is not None
    if spec.defines_attention:
        if spec.kind not in capabilities.kinds:
            refuse("kind", f"does not compute the attention that the type {spec.kind} defines")
    elif spec.is_sparse:
        if "sparse" not in capabilities.masks:
            refuse("mask_sparse", f"has no mask sparse, and would see every live token ({listed(capabilities.masks)})")
    elif spec.mask is not None and spec.mask.lookahead is not None:
        # Live ranges do not show later tokens, and backends that take functions may call none that is not causal.
        if "bidirectional_window" not in capabilities.masks:
            refuse("mask_bidirectional_window", f"has no mask bidirectional_window ({listed(capabilities.masks)})")
    elif not ("live_range" in capabilities.masks or ("mask_function" in capabilities.masks and has_function)):
        if spec.mask is not None:
            for feature in sorted(spec.mask.features - capabilities.masks):
                refuse(f"mask_{feature}", f"has no mask {feature} ({listed(capabilities.masks)})")
        elif has_function:
            refuse("mask_function", f"takes no mask function ({listed(capabilities.masks)})")
        else:
            refuse("mask_live_range", f"has no mask live_range ({listed(capabilities.masks)})")
    not_causal = find_not_causal(capabilities)
    if spec.sequence != TOKENS and not_causal is not None and not_causal not in refusals:
        # Between the positions of two sequences there is no order: such a batch is never causal.
        refusals.append(not_causal)
    hides_tokens = query.first_token or spec.prompt_budget is not None
    needed_extensions = {*extensions, SEQ_STARTS} if hides_tokens else {*extensions}
    for extension in sorted(needed_extensions - capabilities.extensions):
        refuse(f"extension_{extension}", f"does not honour the extension {extension}")
    if query.merged and not capabilities.returns_lse:
        refuse("lse", "returns no log-sum-exp, by which parts of the keys are merged")
    if query.choice is not None and query.choice.unit not in capabilities.choices:
        refuse(f"choice_{query.choice.unit}", f"would read more than the {query.choice.unit} that are chosen")
    if query.soft_cap is not None and not capabilities.soft_cap:
        refuse("soft_cap", "does not cap scores")
    if query.has_sinks and not capabilities.sinks:
        refuse("sinks", "does not add learned sinks")
    if capabilities.reads_dead_tokens and spec.mask is not None and spec.mask.window == 1:
        # Between steps no token is live, so the next token may be in another page.
        refuse("mask_window", "reads tokens before a window, and no token is kept before a window of one token")
    if query.relative_bias is not None and not capabilities.relative_bias:
        refuse("relative_bias", "adds no learned bias to the scores")
    if query.alibi_slopes is not None and not capabilities.alibi:
        refuse("alibi", "subtracts no ALiBi slopes from the scores")
    if capabilities.head_sizes is not None and query.head_size not in capabilities.head_sizes:
        refuse("head_size", f"takes head sizes {listed(capabilities.head_sizes)}, not {query.head_size}")
    value_sizes = {tensor.shape[-1] for name, tensor in state.items() if name == "v"}
    if not capabilities.separate_value_size and value_sizes - {query.head_size}:
        refuse("value_size", f"takes value vectors as long as key vectors ({query.head_size})")
    if spec.block_size % capabilities.block_size_multiple:
        refuse("block_size", f"takes blocks of a multiple of {capabilities.block_size_multiple}, not {spec.block_size}")
    for name, sizes in sorted(capabilities.spec_sizes.items()):
        # A spec of another kind, without the field, has other state too.
        if getattr(spec, name, None) not in {None, *sizes}:
            refuse(name, f"takes {name} {listed(sizes)}, not {getattr(spec, name)}")
    return refusals


def _find_misfit(block_size: int, query: QuerySpec, key: StateTensor, value: StateTensor) -> str | None:
    """Return why state tensors are not the keys and values of a layer, as a refusal's reason; None if they are."""
    if len(key.shape) != 3 or key.shape[0] != block_size or value.shape[:-1] != key.shape[:-1]:
        return (
            f"reads keys and values of the shapes [{block_size}, num_kv_heads, head_size] and [{block_size}, "
            f"num_kv_heads, head_size_v], not {[*key.shape]} and {[*value.shape]}"
        )
    if query.num_heads % key.shape[1] or query.head_size != key.shape[2]:
        return (
            f"takes query heads that share the KV heads evenly and are as long as keys, not {query.num_heads} of "
            f"{query.head_size} for {key.shape[1]} of {key.shape[2]}"
        )
    if key.dtype != value.dtype:
        return f"reads keys and values of one dtype, not {key.dtype} and {value.dtype}"
    return None
