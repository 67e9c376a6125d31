"""Capabilities: what a backend can do, as data, and why it cannot serve a layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import attrs

from kvframe.contract import declared_words as words
from kvframe.contract.capture import GraphCapture
from kvframe.contract.formats import PLAIN, StateTensor
from kvframe.contract.metadata import SEQ_STARTS
from kvframe.contract.specs import TOKENS, LayerSpec, QuerySpec

_KEYS_AND_VALUES = frozenset({"k", "v"})


@attrs.frozen
class Refusal:
    """Why a backend cannot serve a layer: a stable code (``"mask_window"``), and the sentence for a person."""

    code: str
    reason: str


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a backend can do, as data. Every value is checked when it is given; a wrong one raises ``BackendError``.

    Attributes:
        devices: Device types by torch's name (``"cpu"``, ``"cuda"``), without index.
        dtypes: Cache and query dtypes by torch's name.
        masks: Mask features: ``causal``, ``bidirectional``, ``bidirectional_window`` (``AttentionMask.lookahead``,
            which no other word includes), ``window``, ``sink_tokens``, ``chunk``; ``mask_function`` for every mask that
            ``KVCacheSpec.mask_function`` describes; ``live_range`` for every mask at all, derived from
            ``KVCacheSpec.live_ranges``; ``sparse`` for ``KVCacheSpec.mask_function`` also if a query sees fewer tokens
            than are live; ``ranges`` if it reads the extension ``RANGE_ENDS``, which no layer needs: prompts that state
            such ranges are refused without it.
        extensions: Extensions of the batch metadata that it supports (``{"seq_starts"}``).
        state: Names of the state tensors that it reads in the plain format. ``{"k", "v"}`` are keys and values, of one
            dtype: ``[block_size, num_kv_heads, head_size]`` and ``[block_size, num_kv_heads, head_size_v]``. A type
            whose state has these names and other shapes is refused, so its backends need not look at them.
        formats: Formats of stored keys and values that it reads and writes itself.
        takes_copies: Whether it may be given copies of a step's pages, with a block table of their own, instead of the
            pool. So it serves keys and values of any format: the format converts them into the copies.
        reads_dead_tokens: Whether it also reads tokens before the window, with a weight of zero, if their page holds
            live tokens. They are the request's own, so they are finite if the model's keys and values are.
        soft_cap: Whether it supports a soft cap on the scores.
        sinks: Whether it supports learned sink logits.
        relative_bias: Whether it supports a learned bias by distance.
        alibi: Whether it supports ``QuerySpec.alibi_slopes``.
        head_sizes: The head sizes that it supports; None for all.
        separate_value_size: Whether value vectors may differ in size from key vectors.
        returns_lse: Whether ``attend`` writes the log-sum-exp, by which ``merge_attention`` merges results.
        choices: Which choices by content it honours (``QuerySpec.choice``): ``tokens``, ``blocks``.
        kinds: Cache specs, by registered name, whose own attention it computes (``KVCacheSpec.dense_attention``). A
            backend that declares some, and serves nothing else, declares no masks.
        block_size_multiple: The block size must be a multiple of this.
        spec_sizes: For fields of specs, the values that it supports (``{"latent_size": frozenset({512})}``).
            Another value is refused with the field's name as the code. A field that is not listed may have any value.
        capture: For which batches its steps can be captured as graphs: the ``capture`` of its builders. If a stack
            names sizes of graphs, ``backend = "auto"`` takes a backend that can be captured, if one can serve the
            layer.
        preference: If several backends can serve a layer, ``backend = "auto"`` takes the one with the highest.
    """

    devices: frozenset[str] = attrs.field(converter=words.as_set, validator=words.known_devices)
    dtypes: frozenset[str] = attrs.field(converter=words.as_set, validator=words.known_dtypes)
    masks: frozenset[str] = attrs.field(converter=words.as_set, validator=words.known_masks)
    extensions: frozenset[str] = attrs.field(
        default=frozenset(), converter=words.as_set, validator=words.extension_names
    )
    state: frozenset[str] = attrs.field(default=_KEYS_AND_VALUES, converter=words.as_set, validator=words.names)
    formats: frozenset[str] = attrs.field(
        default=frozenset({PLAIN.name}), converter=words.as_set, validator=words.optional_names
    )
    takes_copies: bool = attrs.field(default=False, validator=words.flag)
    reads_dead_tokens: bool = attrs.field(default=False, validator=words.flag)
    soft_cap: bool = attrs.field(default=False, validator=words.flag)
    sinks: bool = attrs.field(default=False, validator=words.flag)
    relative_bias: bool = attrs.field(default=False, validator=words.flag)
    alibi: bool = attrs.field(default=False, validator=words.flag)
    head_sizes: frozenset[int] | None = attrs.field(
        default=None, converter=words.as_set, validator=words.optional_sizes
    )
    separate_value_size: bool = attrs.field(default=False, validator=words.flag)
    returns_lse: bool = attrs.field(default=False, validator=words.flag)
    choices: frozenset[str] = attrs.field(default=frozenset(), converter=words.as_set, validator=words.known_choices)
    kinds: frozenset[str] = attrs.field(default=frozenset(), converter=words.as_set, validator=words.optional_names)
    block_size_multiple: int = attrs.field(default=1, validator=words.size)
    spec_sizes: Mapping[str, frozenset[int]] = attrs.field(
        default=MappingProxyType({}),
        converter=words.as_sizes,
        validator=words.sizes_by_field,
        hash=False,
    )
    capture: GraphCapture = attrs.field(default=GraphCapture.NEVER, validator=words.batches)
    preference: int = attrs.field(default=0, validator=words.whole_number)

    @property
    def not_causal(self) -> Refusal | None:
        """Why it cannot take a batch that is not causal, which overrides causal masks; None if it can."""
        if self.masks & {"bidirectional", "mask_function", "live_range"}:
            return None
        return Refusal("mask_bidirectional", f"has no mask bidirectional ({', '.join(sorted(self.masks))})")

    def needs_copies(self, layer: LayerSpec) -> bool:
        """Return whether it serves a layer on copies of its pages, because it does not read their format."""
        return layer.spec is not None and layer.spec.kv_format.name not in self.formats

    def refusals(self, layer: LayerSpec, device: str, extensions: Collection[str] = ()) -> list[Refusal]:
        """Return every reason why a layer cannot be served; empty if it can.

        Args:
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

        if device not in self.devices:
            refuse("device", f"runs on {listed(self.devices)}, not on {device}")
        if self.needs_copies(layer) and not self.takes_copies:
            refuse(
                "format", f"reads the formats {listed(self.formats)}, not {spec.kv_format.name}, and takes no copies"
            )
        spec = spec.in_format(PLAIN)
        state = spec.state_tensors()
        if set(state) != self.state:
            refuse("state", f"reads the state tensors {listed(self.state)}, not {listed(frozenset(state))}")
        elif state.keys() == _KEYS_AND_VALUES:
            misfit = _find_misfit(spec.block_size, query, state["k"], state["v"])
            if misfit is not None:
                refuse("state_shape", misfit)
        for dtype in sorted({tensor.dtype for tensor in state.values()} - self.dtypes):
            refuse("dtype", f"stores {listed(self.dtypes)}, not {dtype}")
        has_function = spec.mask_function is not None
        if spec.defines_attention:
            if spec.kind not in self.kinds:
                refuse("kind", f"does not compute the attention that the type {spec.kind} defines")
        elif spec.is_sparse:
            if "sparse" not in self.masks:
                refuse("mask_sparse", f"has no mask sparse, and would see every live token ({listed(self.masks)})")
        elif spec.mask is not None and spec.mask.lookahead is not None:
            # Live ranges do not show later tokens, and backends that take functions may call none that is not causal.
            if "bidirectional_window" not in self.masks:
                refuse("mask_bidirectional_window", f"has no mask bidirectional_window ({listed(self.masks)})")
        elif not ("live_range" in self.masks or ("mask_function" in self.masks and has_function)):
            if spec.mask is not None:
                for feature in sorted(spec.mask.features - self.masks):
                    refuse(f"mask_{feature}", f"has no mask {feature} ({listed(self.masks)})")
            elif has_function:
                refuse("mask_function", f"takes no mask function ({listed(self.masks)})")
            else:
                refuse("mask_live_range", f"has no mask live_range ({listed(self.masks)})")
        not_causal = self.not_causal
        if spec.sequence != TOKENS and not_causal is not None and not_causal not in refusals:
            # Between the positions of two sequences there is no order: such a batch is never causal.
            refusals.append(not_causal)
        hides_tokens = query.first_token or spec.prompt_budget is not None
        needed_extensions = {*extensions, SEQ_STARTS} if hides_tokens else {*extensions}
        for extension in sorted(needed_extensions - self.extensions):
            refuse(f"extension_{extension}", f"does not honour the extension {extension}")
        if query.merged and not self.returns_lse:
            refuse("lse", "returns no log-sum-exp, by which parts of the keys are merged")
        if query.choice is not None and query.choice.unit not in self.choices:
            refuse(f"choice_{query.choice.unit}", f"would read more than the {query.choice.unit} that are chosen")
        if query.soft_cap is not None and not self.soft_cap:
            refuse("soft_cap", "does not cap scores")
        if query.has_sinks and not self.sinks:
            refuse("sinks", "does not add learned sinks")
        if self.reads_dead_tokens and spec.mask is not None and spec.mask.window == 1:
            # Between steps no token is live, so the next token may be in another page.
            refuse("mask_window", "reads tokens before a window, and no token is kept before a window of one token")
        if query.relative_bias is not None and not self.relative_bias:
            refuse("relative_bias", "adds no learned bias to the scores")
        if query.alibi_slopes is not None and not self.alibi:
            refuse("alibi", "subtracts no ALiBi slopes from the scores")
        if self.head_sizes is not None and query.head_size not in self.head_sizes:
            refuse("head_size", f"takes head sizes {listed(self.head_sizes)}, not {query.head_size}")
        value_sizes = {tensor.shape[-1] for name, tensor in state.items() if name == "v"}
        if not self.separate_value_size and value_sizes - {query.head_size}:
            refuse("value_size", f"takes value vectors as long as key vectors ({query.head_size})")
        if spec.block_size % self.block_size_multiple:
            refuse("block_size", f"takes blocks of a multiple of {self.block_size_multiple}, not {spec.block_size}")
        for name, sizes in sorted(self.spec_sizes.items()):
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
